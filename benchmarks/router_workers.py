# SPDX-License-Identifier: Apache-2.0
"""CPU time per request of the router with several workers, as a multiple of one worker's.

Workers pay for telling one another what they send; the supervisor's time counts, too. Rounds are paired: all
routers get the same requests one after the other, each process of them from as many connections at once.
Beside them as many routers of one worker each, which know nothing of one another, take a load together: what
that costs is the price of more processes on the same cores; the rest is the price of sharing. So the goal is
asked of both ratios: to one worker that has the cores almost for itself, and to one beside as many others.
How many times more requests several workers serve is not measured: on the few cores beside a load generator
it would be the generator's figure.

    python -m benchmarks.router_workers [--workers 2] [--rounds 8] [--requests 4000] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import uvloop

from benchmarks import bare_transport
from benchmarks.figures import Figure, build_figure, divide_rounds, report_figures
from benchmarks.process_cpu import read_process_cpu_s
from benchmarks.router import (
    BENCHMARKS_FOLDER,
    CONNECTIONS,
    EVENTS_BY_CASE,
    ROUTER_COMMAND,
    build_chat_body,
    run_process,
)
from lab.free_ports import find_free_port

MAX_CPU_RATIO: Final = 1.1  # CPU time per request, several workers to one
CASES: Final = ("plain", "stream")
# One that needs no messages between workers, and one that compares what is under way.
POLICIES: Final = ("round_robin", "least_requests")
SETTLE_S: Final = 1.5  # seconds for all workers to be up


@dataclass
class WorkersSubject:
    """Routers, on `ports`, of so many workers each, and microseconds of CPU per request of each round."""

    policy: str
    workers: int
    ports: tuple[int, ...]
    pids: list[int] = field(default_factory=list)
    cpu_us_by_case: dict[str, list[float]] = field(
        default_factory=lambda: {case: [] for case in CASES}
    )

    def read_cpu_s(self) -> float:
        """Seconds of CPU of all its processes."""
        pids = list(self.pids)
        for pid in self.pids:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()
            pids += map(int, children)
        return sum(map(read_process_cpu_s, pids))

    async def load(self, case: str, count: int) -> None:
        """Send `count` requests to all of its routers at once."""
        body, events = build_chat_body(case), EVENTS_BY_CASE[case]
        share, connections = count // len(self.ports), CONNECTIONS * self.workers
        urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        await asyncio.gather(
            *(bare_transport.run_client_loop(url, body, events, share, connections) for url in urls)
        )


def measure_round(subject: WorkersSubject, case: str, count: int) -> float:
    """Microseconds of CPU per request of `count` of them."""
    before_s = subject.read_cpu_s()
    uvloop.run(subject.load(case, count))
    return (subject.read_cpu_s() - before_s) / count * 1e6


def compute_figures(subjects: list[WorkersSubject]) -> dict[str, Figure]:
    """The ratio of each policy and case, and the microseconds that it is of."""
    figures: dict[str, Figure] = {}
    for one, several, apart in zip(subjects[::3], subjects[1::3], subjects[2::3], strict=True):
        for case in CASES:
            rounds, references = several.cpu_us_by_case[case], one.cpu_us_by_case[case]
            name = f"{case} {one.policy}"
            figures[f"{name}, {several.workers} workers / one"] = build_figure(
                divide_rounds(rounds, references), MAX_CPU_RATIO, digits=3
            )
            alone = apart.cpu_us_by_case[case]
            label = f"{several.workers} routers of one worker"
            figures[f"{name}, {label} / one"] = build_figure(
                divide_rounds(alone, references), digits=3
            )
            figures[f"{name}, {several.workers} workers / {label}"] = build_figure(
                divide_rounds(rounds, alone), MAX_CPU_RATIO, digits=3
            )
            figures[f"{name}, one worker, us"] = build_figure(references, digits=1)
    return figures


def main() -> int:
    """Measure, print, write; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write {figure: {value, goal, met}} there")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--requests", type=int, default=4000, help="per router and case")
    options = parser.parse_args()
    port = find_free_port()
    backend = f"http://127.0.0.1:{port}"
    subjects = [
        WorkersSubject(policy, workers, tuple(find_free_port() for _ in range(routers)))
        for policy in options.policies
        for workers, routers in ((1, 1), (options.workers, 1), (1, options.workers))
    ]
    with contextlib.ExitStack() as stack:
        instance = (sys.executable, str(BENCHMARKS_FOLDER / "bare_transport.py"), str(port))
        stack.enter_context(run_process(instance, backend, {}))
        for each in subjects:
            flags = ("--routing-logic", each.policy, "--workers", str(each.workers))
            for port in each.ports:
                command = (*ROUTER_COMMAND, "--backend", backend, "--port", str(port), *flags)
                url = f"http://127.0.0.1:{port}"
                each.pids.append(stack.enter_context(run_process(command, url, {"TTFT_OTEL": "0"})))
        time.sleep(SETTLE_S)
        for number in range(options.rounds + 1):  # the first one warms up
            for case in CASES:
                for each in subjects:
                    cpu_us = measure_round(each, case, options.requests // options.rounds)
                    if number:
                        each.cpu_us_by_case[case].append(cpu_us)
        figures = compute_figures(subjects)
    return report_figures(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
