# SPDX-License-Identifier: Apache-2.0
"""Throughput, inter-token latency and CPU time of real vLLM with ttft-otel off, on, and its own tracing on.

Four servers of the tiny text model, loaded in turn, every second round in reverse; figures are
ratios within a round: median, spread, and a 95 % interval of the median (from six rounds on). Two of them
have tracing off: what "again" is to "off" is what two equal servers differ by here, and no ratio beside it
tells less than that. CPU time is that of the server's processes, all together and how much more it is in
each (the API server is `python`); that of the exporter process and the receiver stands beside it. Needs
about 15 GB of memory.

With --apart the exporter process and the receiver have the last core for themselves, and servers and clients
the others: what is left is what tracing costs inside the server. vLLM's own exporter is a thread of the
server and stays there.

Two servers of one kind differ by more than tracing costs. With --paired each of two servers is its own
reference: in turn its clients ask for traces or, by the flag of their traceparent, for none. What is there
without any trace (wrappers that pass calls on, 2 us a request) is then on both sides.

    python -m benchmarks.serving [--paired] [--apart] [--rounds 7] [--requests 240] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.figures import Figure, build_figure, divide_rounds, report_figures
from benchmarks.serving_load import CONCURRENT_CLIENTS, LoadResult, list_exporters, run_load
from lab import local_deployment, server_commands, session_processes, tiny_models
from lab.evidence import estimate_median
from lab.local_servers import LocalServer, run_servers
from ttft_otel.model.names import env_names

# Of each round, to the server without tracing in the same round.
RATIO_GOALS: Final = {"throughput": 0.98, "itl_p99": 1.03, "itl_median": 1.02, "cpu_us": None}
# To vLLM's own tracing, each against the same server without, or one like it.
OWN_GOALS: Final = {"throughput": 1.03, "cpu_us": None}
CONFIDENCE: Final = 0.95
SAMPLED: Final = "01"  # flags of a traceparent


@dataclass(frozen=True, slots=True)
class ServingMode:
    """What is measured in each round: requests to the server `server`, against those of the mode `base`.

    flags: of the traceparent that its requests have; "" without one. base: "" for what others refer to.
    """

    server: str
    base: str = ""
    flags: str = ""


MODES: Final = {
    "off": ServingMode("off"),
    "on": ServingMode("on", "off"),
    "own": ServingMode("own", "off"),
    "again": ServingMode("again", "off"),
}
PAIRED_MODES: Final = {
    "off": ServingMode("on", flags="00"),
    "on": ServingMode("on", "off", SAMPLED),
    "own_off": ServingMode("own", flags="00"),
    "own": ServingMode("own", "own_off", SAMPLED),
}


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


def measure_tracing_modes(
    modes: Mapping[str, ServingMode], rounds: int, requests: int, is_apart: bool = False
) -> dict[str, list[LoadResult]]:
    """All rounds of all `modes`. is_apart: exporter and receiver have a core of their own."""
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
        env = {env_names.TTFT_OTEL: "1", env_names.OTEL_EXPORTER_OTLP_ENDPOINT: endpoint}
        # The receiver's HTTP port: vLLM exports by gRPC unless it is told.
        protocol = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
        wanted = {mode.server for mode in modes.values()}
        plans = {
            "off": base,
            "on": replace(base, env=env),
            "own": replace(base, extra=own_tracing_flags, env=protocol),
            "again": base,
        }
        plans = {name: plan for name, plan in plans.items() if name in wanted}
        commands = [
            sink,
            *(server_commands.build_mono_command(options) for options in plans.values()),
        ]
        results: dict[str, list[LoadResult]] = {name: [] for name in modes}
        with run_servers(
            *commands, timeout=900, progress=report_server_start, logs=Path(scratch)
        ) as servers:
            by_name = dict(zip(plans, servers[1:], strict=True))
            for server in by_name.values():
                # Warm-up: first requests import and compile.
                run_load(server, CONCURRENT_CLIENTS * 4, servers[0])  # of which all are traced
            if is_apart:
                move_apart(servers[0], by_name["on"], cores[-1])
            for number in range(rounds):
                # In turn within a round: a slow minute of the machine meets all of them.
                for name in [*modes][:: -1 if number % 2 else 1]:
                    mode = modes[name]
                    results[name].append(
                        run_load(by_name[mode.server], requests, servers[0], mode.flags)
                    )
                    report_server_start(
                        name, number + 1, f"{results[name][-1].throughput:.1f} requests/s"
                    )
        return results


def report_server_start(name: str, seconds: float, line: str) -> None:
    """Print progress to stderr."""
    sys.stderr.write(f"\r{name} {seconds:.0f} {line[-80:]:80}")
    sys.stderr.flush()


def compute_serving_figures(
    modes: Mapping[str, ServingMode], results: Mapping[str, list[LoadResult]]
) -> dict[str, Figure]:
    """Ratios to each mode's base, and to vLLM's own tracing, round by round: throughput should not fall,
    latency should not rise. After them what was measured in each mode.
    """
    figures: dict[str, Figure] = {}

    def add_ratios(key: str, ratios: list[float], goal: float | None) -> list[float]:
        figures[key] = build_figure(ratios, goal, at_least="throughput" in key, digits=4)
        figures[f"{key}_interval"] = build_interval(ratios, digits=4)
        return ratios

    def divide_modes(name: str, figure: str) -> list[float]:
        rounds, base = results[name], results[modes[name].base]
        return divide_rounds(*([getattr(each, figure) for each in some] for some in (rounds, base)))

    for figure, goal in RATIO_GOALS.items():
        ratios = {
            name: add_ratios(
                f"{name}_{figure}_ratio", divide_modes(name, figure), goal if name == "on" else None
            )
            for name, mode in modes.items()
            if mode.base
        }
        if figure in OWN_GOALS:
            to_own = divide_rounds(ratios["on"], ratios["own"])
            add_ratios(f"on_{figure}_to_own", to_own, OWN_GOALS[figure])
    for name, mode in modes.items():
        if mode.base:
            figures |= compare_processes(name, results[name], results[mode.base])
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


def compare_processes(
    name: str, rounds: Sequence[LoadResult], base_rounds: Sequence[LoadResult]
) -> dict[str, Figure]:
    """How much more CPU time a request takes in each of the server's processes than in the base's rounds,
    in us: intervals, as single rounds differ by much more.
    """
    figures = {}
    # Of a process that is not in every round (a worker that was replaced) nothing can be said.
    common = set.intersection(*(set(each.process_us) for each in (*rounds, *base_rounds)))
    for process in sorted(common):
        more = [
            one.process_us[process] - other.process_us[process]
            for one, other in zip(rounds, base_rounds, strict=True)
        ]
        figures[f"{name}_more_cpu_us_in_{process}"] = build_interval(more, digits=1)
    return figures


def build_interval(values: Sequence[float], digits: int) -> Figure:
    """The median of `values`, one a round, with the bounds of its interval as its spread."""
    interval = estimate_median(values, CONFIDENCE)
    return build_figure([interval.low, interval.median, interval.high], digits=digits)


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
    parser.add_argument(
        "--paired", action="store_true", help="each server against itself, asked for no traces"
    )
    arguments = parser.parse_args()
    modes = PAIRED_MODES if arguments.paired else MODES
    results = measure_tracing_modes(modes, arguments.rounds, arguments.requests, arguments.apart)
    figures = compute_serving_figures(modes, results)
    sys.stderr.write("\n")
    return report_figures(figures, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
