# SPDX-License-Identifier: Apache-2.0
"""CPU time per request of the router, with tracing on and off, and of other routers.

Beside it, in the same rounds: `vllm-router` (Rust, from PyPI, in an environment of its own in the
user's cache) and a bare FastAPI proxy. 16 connections in a closed loop against an instance that
answers at once (bare_transport.py): plain answers, streams of 16 events (in one write, or the first token
5 ms earlier) and of 200 tokens 5 ms apart. Goals are for ratios of the same rounds. --latency: what
each router adds to the times of first and later tokens instead (router_latency.py).

    python -m benchmarks.router [--rounds 8] [--requests 4000] [--latency] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import uvloop

from benchmarks import bare_transport, router_latency
from benchmarks.figures import Figure, build_figure, divide_rounds, report_figures
from benchmarks.process_cpu import read_process_cpu_s
from lab import session_processes
from lab.free_ports import find_free_port
from lab.tiny_models import get_cache_root
from lab.vllm_releases import run_uv

CONNECTIONS: Final = 16
BENCHMARKS_FOLDER: Final = Path(__file__).parent
CASES_BY_TWO: Final = ("stream", "apart", "paced")  # of prefill and decode instances
RUST_ROUTER_PACKAGE: Final = "vllm-router==0.1.17"
ROUTER_COMMAND: Final = (
    sys.executable,
    "-c",
    "from ttft_otel.commands.router.command import command; command()",
)
CHAT_MESSAGES: Final = [{"role": "user", "content": "How long until the first token?"}]
EVENTS_BY_CASE: Final = {
    "plain": 0,
    "stream": bare_transport.EVENTS_PER_STREAM - 1,
    "apart": bare_transport.EVENTS_PER_STREAM - 1,
    "paced": bare_transport.TOKENS_PER_STREAM - 1,
}  # with words
# (case, router, reference) -> at most so many times the reference's CPU time of the same round.
RATIO_GOALS: Final = {
    ("plain", "traced", "fastapi"): 1.0,
    ("stream", "traced", "fastapi"): 1.0,
    ("plain", "untraced", "rust"): 2.0,
    ("stream", "untraced", "rust"): 1.0,
    ("stream", "traced", "rust"): 1.4,
    ("paced", "untraced", "rust"): 1.0,
    ("paced", "traced", "rust"): 1.0,
    ("stream", "traced P/D", "traced"): 1.6,
    ("stream", "traced P/D, D's token", "traced"): 1.6,
    ("apart", "traced P/D", "traced"): 1.6,
    ("apart", "traced P/D, D's token", "traced"): 1.6,
    ("paced", "traced P/D", "traced"): 1.6,
    ("plain", "traced", "untraced"): None,
    ("stream", "traced", "untraced"): None,
}
# An exporter has work left after the load; it is done when it takes less CPU time in such a pause.
SETTLE_S: Final = 0.2
IDLE_CPU_S: Final = 0.002
MAX_SETTLE_S: Final = 5.0
# Dropping records would be a cheap way to look fast.
MAX_RECORDS_DROPPED: Final = 0.0


@dataclass
class RouterSubject:
    """A router under test: its command, its port, and CPU time of each round of each case."""

    name: str
    command: Sequence[str]
    port: int
    env: Mapping[str, str] = field(default_factory=dict)
    cases: tuple[str, ...] = tuple(EVENTS_BY_CASE)
    pid: int = 0
    cpu_us_by_case: dict[str, list[float]] = field(
        default_factory=lambda: {case: [] for case in EVENTS_BY_CASE}
    )

    @property
    def url(self) -> str:
        """Where it is asked."""
        return f"http://127.0.0.1:{self.port}"


def list_subjects(backend: str) -> list[RouterSubject]:
    """Everything that is measured; without vllm-router when it cannot be had."""
    router_list = []
    for name, on in (("traced", "1"), ("untraced", "0")):
        port = find_free_port()
        # The instance swallows the exporter's OTLP: what leaves the router costs as in real use.
        env = {"TTFT_OTEL": on, "OTEL_EXPORTER_OTLP_ENDPOINT": backend}
        command = (*ROUTER_COMMAND, "--backend", backend, "--port", str(port))
        router_list.append(RouterSubject(name, command, port, env))
    # P's token at once, which is the default, and the first token when D has it.
    for name, mode in (("traced P/D", "strip"), ("traced P/D, D's token", "off")):
        port = find_free_port()
        # The instance is P and D at once: two legs, without the work of two servers.
        pair = ("--prefill", backend, "--decode", backend, "--first-token", mode)
        env = {"TTFT_OTEL": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": backend}
        disaggregated = (*ROUTER_COMMAND, *pair, "--port", str(port))
        router_list.append(RouterSubject(name, disaggregated, port, env, CASES_BY_TWO))
    if program := install_rust_router():
        port = find_free_port()
        # Without a port of its own it would take the default one for its metrics.
        address = (
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--prometheus-port",
            str(find_free_port()),
        )
        # Round robin with one worker: no policy's work enters, nor that of a log.
        quiet = ("--policy", "round_robin", "--log-level", "error")
        router_list.append(
            RouterSubject("rust", (program, "--worker-urls", backend, *address, *quiet), port)
        )
    port = find_free_port()
    bare = (sys.executable, str(BENCHMARKS_FOLDER / "bare.py"), str(port), backend)
    router_list.append(RouterSubject("fastapi", bare, port))
    return router_list


def install_rust_router() -> str:
    """vllm-router's program, installed at the first use; "" when it cannot be had, and says why."""
    folder = get_cache_root() / "peers" / RUST_ROUTER_PACKAGE
    program = folder / "bin" / "vllm-router"
    if not program.exists():
        try:
            # An environment of its own: its pins must not change ours.
            run_uv("venv", "--quiet", "--clear", "--python", "3.11", str(folder))
            run_uv("pip", "install", "--quiet", "--python", str(folder), RUST_ROUTER_PACKAGE)
        except (OSError, subprocess.CalledProcessError) as error:
            print_progress(
                f"Without {RUST_ROUTER_PACKAGE}: it could not be installed into {folder} ({error}).\n"
            )
            return ""
    return str(program)


@contextlib.contextmanager
def run_process(command: Sequence[str], url: str, env: Mapping[str, str]) -> Iterator[int]:
    """Run a process while the block runs; gives its pid once its /health answers."""
    process = subprocess.Popen(command, env={**os.environ, **env}, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        # Our router answers once its instance does: no load meets one that is still probing.
        while not is_answering(f"{url}/health"):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{' '.join(command)} did not start ({process.poll()})")
            time.sleep(0.1)
        yield process.pid
    finally:
        process.terminate()
        try:
            # Routers drain streams when they are asked to end, for half a minute at most.
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_answering(url: str) -> bool:
    """Whether a GET is answered with 200."""
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def measure_cases(rounds: int, requests: int, routers: Sequence[RouterSubject]) -> None:
    """Run every case with every subject, round by round, so that disturbances affect all alike."""
    for number in range(rounds + 1):  # the first one warms up
        for case, events in EVENTS_BY_CASE.items():
            # A paced stream lasts a second: one a connection is enough, tokens are what is counted.
            count = CONNECTIONS if case == "paced" else requests // rounds
            for router in routers:
                if case not in router.cases:
                    continue
                print_progress(f"\rround {number}/{rounds}: {case} {router.name}{' ' * 20}")
                before = read_process_cpu_s(router.pid)
                # The load runs in this process, whose CPU time is in no figure.
                uvloop.run(
                    bare_transport.run_client_loop(
                        router.url, build_chat_body(case), events, count, CONNECTIONS
                    )
                )
                if number:
                    router.cpu_us_by_case[case].append(
                        (read_process_cpu_s(router.pid) - before) / count * 1e6
                    )
                wait_for_exporter(router.pid)
    print_progress("\r" + " " * 60 + "\r")


def wait_for_exporter(pid: int) -> None:
    """Wait until the exporter of the process `pid`, if it has one, is done: the next one would pay for it."""
    exporters = session_processes.find_exporters([pid])
    until, before_s = time.monotonic() + MAX_SETTLE_S, 0.0
    while exporters and time.monotonic() < until:
        spent_s = sum(map(read_process_cpu_s, exporters))
        if spent_s - before_s < IDLE_CPU_S:
            return
        before_s = spent_s
        time.sleep(SETTLE_S)


def build_chat_body(case: str) -> bytes:
    """The request body of a case in compact JSON, as the Rust router writes it in any case."""
    # `user` names the case for the instance, which looks for "paced" in the bytes.
    document = {"model": "tiny", "messages": CHAT_MESSAGES, "stream": case != "plain", "user": case}
    return json.dumps(document, separators=(",", ":")).encode()


def read_dropped_records(url: str) -> float:
    """The records that the router dropped, by its own count; waits until the last one is out."""
    time.sleep(1)
    with urllib.request.urlopen(f"{url}/metrics") as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("ttft_otel_dropped"))


def compute_router_figures(
    routers: Sequence[RouterSubject], dropped_records: float
) -> dict[str, Figure]:
    """Ratios with their goals; then microseconds, per token where it is paced."""
    figures: dict[str, Figure] = {}
    rounds_by_name = {router.name: router.cpu_us_by_case for router in routers}
    for (case, name, reference), goal in RATIO_GOALS.items():
        if {name, reference} <= rounds_by_name.keys():
            ratios = divide_rounds(rounds_by_name[name][case], rounds_by_name[reference][case])
            figures[f"{case} {name} / {reference}"] = build_figure(ratios, goal)
    for router in routers:
        for case, rounds in router.cpu_us_by_case.items():
            if rounds:
                tokens = bare_transport.TOKENS_PER_STREAM if case == "paced" else 1
                unit = "us a token" if tokens > 1 else "us"
                figures[f"{case} {router.name}, {unit}"] = build_figure(
                    [cpu_us / tokens for cpu_us in rounds], digits=1
                )
    figures["records dropped"] = build_figure([dropped_records], MAX_RECORDS_DROPPED)
    return figures


def print_progress(text: str) -> None:
    """Print progress to stderr."""
    sys.stderr.write(text)
    sys.stderr.flush()


def main() -> int:
    """Measure, print, write; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write {figure: {value, goal, met}} there")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--latency", action="store_true", help="measure added latency instead")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load, for --latency")
    parser.add_argument("--requests", type=int, default=4000, help="per router and case")
    options = parser.parse_args()
    port = find_free_port()
    backend = f"http://127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        instance = (sys.executable, str(BENCHMARKS_FOLDER / "bare_transport.py"), str(port))
        stack.enter_context(run_process(instance, backend, {}))
        routers = list_subjects(backend)
        for router in routers:
            router.pid = stack.enter_context(run_process(router.command, router.url, router.env))
        if options.latency:
            urls = {"": backend} | {each.name: each.url for each in routers}
            figures = router_latency.measure_latency(urls, routers[1].pid, options.seconds)
            return report_figures(figures, options.json)
        measure_cases(options.rounds, options.requests, routers)
        figures = compute_router_figures(routers, read_dropped_records(routers[0].url))
    return report_figures(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
