# SPDX-License-Identifier: Apache-2.0
"""CPU time per request of the router with several workers, as a multiple of one worker's.

Workers pay for telling one another what they send; the supervisor's time counts, too. Rounds are paired: both
routers get the same requests one after the other, each process of them from as many connections at once.
How many times more requests several workers serve is not measured: on the few cores beside a load generator
it would be the generator's figure.

    python -m benchmarks.router_workers [--workers 2] [--rounds 8] [--requests 4000] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import uvloop

from benchmarks import bare_transport
from benchmarks.figures import Figure, build_figure, divide_rounds, report_figures
from benchmarks.router import (
    BENCHMARKS_FOLDER,
    CONNECTIONS,
    EVENTS_BY_CASE,
    ROUTER_COMMAND,
    build_chat_body,
    read_process_cpu_s,
    run_process,
)
from lab.free_ports import find_free_port

MAX_CPU_RATIO: Final = 1.1  # CPU time per request, several workers to one
CASES: Final = ("plain", "stream")
# One that needs no messages between workers, one that compares what is under way, one that compares
# what was sent.
POLICIES: Final = ("round_robin", "least_requests", "qps")
SETTLE_S: Final = 1.5  # seconds for all workers to be up


@dataclass
class WorkersSubject:
    """A router of so many workers, and microseconds of CPU per request of each round of each case."""

    policy: str
    workers: int
    port: int
    pid: int = 0
    cpu_us_by_case: dict[str, list[float]] = field(
        default_factory=lambda: {case: [] for case in CASES}
    )

    def read_cpu_s(self) -> float:
        """Seconds of CPU of all its processes."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text("ascii").split()
        return sum(map(read_process_cpu_s, (self.pid, *map(int, children))))


def measure_round(subject: WorkersSubject, case: str, count: int) -> float:
    """Microseconds of CPU per request of `count` of them."""
    before_s = subject.read_cpu_s()
    uvloop.run(
        bare_transport.run_client_loop(
            f"http://127.0.0.1:{subject.port}",
            build_chat_body(case),
            EVENTS_BY_CASE[case],
            count,
            CONNECTIONS * subject.workers,
        )
    )
    return (subject.read_cpu_s() - before_s) / count * 1e6


def compute_figures(subjects: list[WorkersSubject]) -> dict[str, Figure]:
    """The ratio of each policy and case, and the microseconds that it is of."""
    figures: dict[str, Figure] = {}
    for one, several in zip(subjects[::2], subjects[1::2], strict=True):
        for case in CASES:
            rounds, references = several.cpu_us_by_case[case], one.cpu_us_by_case[case]
            name = f"{case} {one.policy}"
            figures[f"{name}, {several.workers} workers / one"] = build_figure(
                divide_rounds(rounds, references), MAX_CPU_RATIO, digits=3
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
        WorkersSubject(policy, workers, find_free_port())
        for policy in options.policies
        for workers in (1, options.workers)
    ]
    with contextlib.ExitStack() as stack:
        instance = (sys.executable, str(BENCHMARKS_FOLDER / "bare_transport.py"), str(port))
        stack.enter_context(run_process(instance, backend, {}))
        for each in subjects:
            flags = ("--routing-logic", each.policy, "--workers", str(each.workers))
            command = (*ROUTER_COMMAND, "--backend", backend, "--port", str(each.port), *flags)
            url = f"http://127.0.0.1:{each.port}"
            each.pid = stack.enter_context(run_process(command, url, {"TTFT_OTEL": "0"}))
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
