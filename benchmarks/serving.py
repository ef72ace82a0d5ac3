# SPDX-License-Identifier: Apache-2.0
"""Throughput, inter-token latency and CPU time of real vLLM with ttft-otel off, on, and its own tracing on.

Four servers of the tiny text model, loaded in turn, every second round in reverse; figures are
ratios within a round: median, spread, and a 95 % interval of the median (from six rounds on). Two of them
have tracing off: what "again" is to "off" is what two equal servers differ by here, and no ratio beside it
tells less than that. CPU time is that of the server's processes; that of the exporter process and the
receiver stands beside it. Needs about 15 GB of memory.

With --apart the exporter process and the receiver have the last core for themselves, and servers and clients
the others: what is left is what tracing costs inside the server. vLLM's own exporter is a thread of the
server and stays there.

    python -m benchmarks.serving [--apart] [--rounds 7] [--requests 240] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.figures import Figure, build_figure, divide_rounds, report_figures
from lab import local_deployment, server_commands, session_processes, tiny_models, ttft_client
from lab.evidence import estimate_median
from lab.local_servers import LocalServer, run_servers
from lab.ttft_client import TimedRequest, TimedResponse
from ttft_otel import names

CONCURRENT_CLIENTS: Final = 12
TOKENS_PER_ANSWER: Final = 48
# Of each round, to the server without tracing in the same round.
RATIO_GOALS: Final = {"throughput": 0.98, "itl_p99": 1.03, "itl_median": 1.02, "cpu_us": None}
MIN_OWN_RATIO: Final = 1.03  # of our throughput to that with vLLM's own tracing
CONFIDENCE: Final = 0.95
EXPORT_WAIT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One round on one server: requests per second, p99 and median inter-token latency in us, and the
    CPU time of a request in us, in the server's processes and in those that take its spans.
    """

    throughput: float
    itl_p99: float
    itl_median: float
    cpu_us: float
    outside_us: float


def read_cpu_us(pids: Iterable[int]) -> float:
    """CPU time so far of these processes."""
    ticks = 0
    for pid in pids:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8")
        ticks += sum(int(each) for each in text.rpartition(")")[2].split()[11:13])
    return ticks / os.sysconf("SC_CLK_TCK") * 1e6


def move_to_cores(pids: Iterable[int], cores: set[int]) -> None:
    """Let all threads of these processes run on `cores` alone; those that they start will, too."""
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), cores)


def move_apart(receiver: LocalServer, traced: LocalServer, core: int) -> None:
    """Give `core` to the receiver and to the exporter of `traced`, which has served requests."""
    exporters = list_exporters(traced)
    if not exporters:
        raise SystemExit("the traced server has no exporter process; see the servers' logs")
    move_to_cores([*session_processes.list_session_pids(receiver.pid), *exporters], {core})


def list_exporters(server: LocalServer) -> list[int]:
    """The exporter processes of `server`."""
    return session_processes.find_exporters(session_processes.list_session_pids(server.pid))


def run_load(server: LocalServer, requests: int, receiver: LocalServer) -> LoadResult:
    """CONCURRENT_CLIENTS in a closed loop, streamed answers of TOKENS_PER_ANSWER tokens."""
    url = server.url
    inside = session_processes.list_session_pids(server.pid)
    outside = [*session_processes.list_session_pids(receiver.pid), *list_exporters(server)]
    answers: list[TimedResponse] = []
    # One iterator for all clients: they end together, whichever of them is faster.
    request_numbers = iter(range(requests))
    lock = threading.Lock()

    def run_client() -> None:
        while True:
            with lock:
                number = next(request_numbers, None)
            if number is None:
                return
            # Every prompt is another one; ignore_eos makes all answers equally long.
            question = TimedRequest(
                prompt=f"request {number}", max_tokens=TOKENS_PER_ANSWER, extra={"ignore_eos": True}
            )
            answer = ttft_client.send_timed_request(url, question)
            with lock:
                answers.append(answer)

    began_us, outside_us = read_cpu_us(inside), read_cpu_us(outside)
    started = time.monotonic()
    threads = [threading.Thread(target=run_client) for _ in range(CONCURRENT_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed_s = time.monotonic() - started
    cpu_us = read_cpu_us(inside) - began_us
    time.sleep(EXPORT_WAIT_S)  # the last spans leave in batches
    outside_us = read_cpu_us(outside) - outside_us
    # The first event has the role and no token: the gap behind it is no time between tokens.
    gaps = sorted(
        later.at_us - earlier.at_us
        for answer in answers
        for earlier, later in zip(answer.events[1:], answer.events[2:], strict=False)
    )
    # A server that fails fast would have the best throughput.
    if any(answer.status != 200 for answer in answers):
        raise SystemExit("a request failed; see the servers' logs")
    return LoadResult(
        len(answers) / elapsed_s,
        # A client that is short of CPU reads several events at once, whose gaps are 0.
        max(1.0, gaps[int(len(gaps) * 0.99)]),
        max(1.0, statistics.median(gaps)),
        cpu_us / len(answers),
        outside_us / len(answers),
    )


def measure_tracing_modes(
    rounds: int, requests: int, is_apart: bool = False
) -> dict[str, list[LoadResult]]:
    """All rounds on all servers. is_apart: exporter and receiver have a core of their own."""
    cores = sorted(os.sched_getaffinity(0))
    if is_apart:
        if len(cores) < 2:
            raise SystemExit("--apart needs two cores")
        os.sched_setaffinity(0, cores[:-1])  # what is started from here inherits it
    with tempfile.TemporaryDirectory(prefix="ttft-otel-") as scratch:
        sink = local_deployment.build_receiver_command(Path(scratch) / "spans.db")
        endpoint = f"http://{sink.host}:{sink.port}"
        base = server_commands.VllmOptions(model=tiny_models.build_model(tiny_models.TEXT_RECIPE))
        # vLLM's own spans, as the alternative that a reader has in mind.
        own_tracing_flags = ("--otlp-traces-endpoint", f"{endpoint}/v1/traces")
        env = {names.ENV_ON: "1", names.ENV_ENDPOINT: endpoint}
        # The receiver's HTTP port: vLLM exports by gRPC unless it is told.
        protocol = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
        plans = {
            "off": base,
            "on": replace(base, env=env),
            "own": replace(base, extra=own_tracing_flags, env=protocol),
            "again": base,
        }
        commands = [
            sink,
            *(server_commands.build_mono_command(options) for options in plans.values()),
        ]
        results: dict[str, list[LoadResult]] = {name: [] for name in plans}
        with run_servers(
            *commands, timeout=900, progress=report_server_start, logs=Path(scratch)
        ) as servers:
            by_name = dict(zip(plans, servers[1:], strict=True))
            for server in by_name.values():
                # Warm-up: first requests import and compile.
                run_load(server, CONCURRENT_CLIENTS * 4, servers[0])
            if is_apart:
                move_apart(servers[0], by_name["on"], cores[-1])
            for number in range(rounds):
                # In turn within a round: a slow minute of the machine meets all four.
                for name in [*by_name][:: -1 if number % 2 else 1]:
                    results[name].append(run_load(by_name[name], requests, servers[0]))
                    report_server_start(
                        name, number + 1, f"{results[name][-1].throughput:.1f} requests/s"
                    )
        return results


def report_server_start(name: str, seconds: float, line: str) -> None:
    """Print progress to stderr."""
    sys.stderr.write(f"\r{name} {seconds:.0f} {line[-80:]:80}")
    sys.stderr.flush()


def compute_serving_figures(results: dict[str, list[LoadResult]]) -> dict[str, Figure]:
    """Ratios to `off`, and to vLLM's own tracing, round by round: throughput should not fall, latency
    should not rise. After them what was measured on each server.
    """
    figures: dict[str, Figure] = {}

    def add_ratio(name: str, base: str, figure: str, goal: float | None) -> None:
        ratios = divide_rounds(
            [getattr(result, figure) for result in results[name]],
            [getattr(result, figure) for result in results[base]],
        )
        key = f"{name}_{figure}_ratio" if base == "off" else f"{name}_{figure}_to_{base}"
        figures[key] = build_figure(ratios, goal, at_least=figure == "throughput", digits=4)
        interval = estimate_median(ratios, CONFIDENCE)
        figures[f"{key}_interval"] = build_figure([interval.low, interval.high], digits=4)

    for figure, goal in RATIO_GOALS.items():
        add_ratio("on", "off", figure, goal)
        add_ratio("own", "off", figure, None)
        add_ratio("again", "off", figure, None)
    add_ratio("on", "own", "throughput", MIN_OWN_RATIO)
    add_ratio("on", "own", "cpu_us", None)
    for name, rounds in results.items():
        figures[f"{name}_requests_per_s"] = build_figure([result.throughput for result in rounds])
        for key, figure in (("itl_p99_us", "itl_p99"), ("itl_median_us", "itl_median")):
            figures[f"{name}_{key}"] = build_figure(
                [getattr(result, figure) for result in rounds], digits=1
            )
        for key in ("cpu_us", "outside_us"):
            figures[f"{name}_{key}"] = build_figure(
                [getattr(result, key) for result in rounds], digits=1
            )
    return figures


def main() -> int:
    """Measure, print, write; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=240, help="per server and round")
    parser.add_argument("--json", type=Path, help="write {figure: {value, goal, met}} there")
    parser.add_argument(
        "--apart", action="store_true", help="exporter and receiver on a core alone"
    )
    arguments = parser.parse_args()
    figures = compute_serving_figures(
        measure_tracing_modes(arguments.rounds, arguments.requests, arguments.apart)
    )
    sys.stderr.write("\n")
    return report_figures(figures, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
