# SPDX-License-Identifier: Apache-2.0
"""Compare routing policies in front of two real vLLM servers under the same load, in alternation.

The servers run the laboratory's heavy text model, one processor core each, with KV events. Each policy has
a router of its own; all of them stay up over all rounds, each is loaded by `ttft-otel bench` in its turn.
All policies get the same prompts at the same times within a round. Before each run both servers forget
their cached prefixes (POST /reset_prefix_cache, which servers with VLLM_SERVER_DEV_MODE=1 have).
Ctrl-C ends it and keeps what was measured. Needs about 8 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.routing.experiment_loads import (
    EXPERIMENTS,
    ROUTER_FLAGS_BY_POLICY,
    SATURATION_CONCURRENCY,
    SINGLE_PROMPT_FLAGS,
    WARMUP_FLAGS,
    Experiment,
    order_policies,
)
from benchmarks.routing.experiment_options import parse_experiment_options
from benchmarks.routing.experiment_pages import (
    draw_experiment,
    format_experiment_table,
    format_interference,
    replace_in_page,
)
from benchmarks.routing.experiment_servers import (
    REALTIME_PREFIX,
    ExperimentServers,
    start_experiment_servers,
)
from benchmarks.routing.experiment_statistics import compute_capacity, compute_experiment_figures

DEFAULT_OVERHEAD_S: Final = 7.0  # seconds that a run takes beside its load, until one was measured


@dataclass(slots=True)
class TimeBudget:
    """Remaining time, and the time of an experiment's run in addition to its load."""

    deadline_s: float
    overhead_s: dict[str, float] = field(default_factory=dict)

    @property
    def remaining_s(self) -> float:
        """Seconds until the end of the budget."""
        return self.deadline_s - time.monotonic()

    def has_room(self, experiment: Experiment, runs: int) -> bool:
        """Whether so many runs of an experiment still fit into the budget."""
        return (
            runs * (experiment.seconds + self.overhead_s.get(experiment.name, DEFAULT_OVERHEAD_S))
            <= self.remaining_s
        )

    def record_run(self, experiment: Experiment, seconds: float) -> None:
        """A run did."""
        rest = seconds - experiment.seconds
        # The longest: the estimate decides whether all policies of a round still fit.
        self.overhead_s[experiment.name] = max(self.overhead_s.get(experiment.name, 0.0), rest)

    def report_progress(self, text: str) -> None:
        """A line of progress."""
        left = max(0, int(self.remaining_s))
        sys.stderr.write(f"\r[{left // 60:2}:{left % 60:02} left] {text}\n")
        sys.stderr.flush()


def measure_experiments(
    stage: ExperimentServers,
    arguments: argparse.Namespace,
    clock: TimeBudget,
    results: dict[str, Any],
) -> None:
    """Warm up, then round after round of all experiments, while time is left; fills `results`."""
    # Without resets equal prompts would be cached for the second policy: then each gets its own.
    results["resets"] = stage.reset_caches()
    if not results["resets"]:
        clock.report_progress(
            "servers cannot forget their caches: each run has prompts and times of its own"
        )
    results["apart"] = _measure_interference(stage, arguments.seed)
    clock.report_progress(
        "a prefill takes {alone:.2f} s, {together:.2f} s with both at work".format(
            **results["apart"]
        )
    )
    experiments = [_set_rate(stage, each, arguments.seed, clock) for each in arguments.experiments]
    results["loads"] = {each.name: each.build_load_flags(0) for each in experiments}
    for place, (policy, router) in enumerate(stage.routers.items()):
        seed = arguments.seed if results["resets"] else arguments.seed + place
        document = _run_bench(router.url, [*WARMUP_FLAGS, "--seed", str(seed)])
        results["warm"][policy] = stage.read_instances(policy)
        clock.report_progress(f"warm-up {policy}: {_format_run(_reduce_run(document))}")
        stage.reset_caches()
    for number in range(arguments.rounds):
        for experiment in experiments:
            if clock.has_room(experiment, len(arguments.policies)):
                _run_round(stage, arguments, clock, results, experiment, number)
            else:
                clock.report_progress(
                    f"{experiment.name} round {number + 1}: no time left for all policies"
                )


def _measure_interference(stage: ExperimentServers, seed: int) -> dict[str, float]:
    """Seconds of the same prefills on one server alone, and on both at once: less than two cores show."""
    flags = [*SINGLE_PROMPT_FLAGS, "--seed", str(seed)]
    alone = _reduce_run(_run_bench(stage.backends[0], flags))["requests"]
    stage.reset_caches()
    with ThreadPoolExecutor() as pool:
        both = list(
            pool.map(lambda url: _reduce_run(_run_bench(url, flags))["requests"], stage.backends)
        )
    stage.reset_caches()
    runs = {"alone": alone, "together": [row for rows in both for row in rows]}
    return {
        name: round(statistics.fmean(row[1] for row in rows) / 1e3, 3)
        for name, rows in runs.items()
    }


def _set_rate(
    stage: ExperimentServers, experiment: Experiment, seed: int, clock: TimeBudget
) -> Experiment:
    """The experiment with a rate: its own, or its share of the servers' capacity."""
    if experiment.rate:
        return experiment
    run = _reduce_run(
        _run_bench(next(iter(stage.routers.values())).url, experiment.build_saturation_flags(seed))
    )
    most = compute_capacity(run["requests"], SATURATION_CONCURRENCY)
    stage.reset_caches()
    clock.report_progress(
        f"{experiment.name}: {most:.2f} requests/s are all that both servers can do"
    )
    return replace(experiment, rate=round(most * experiment.share, 2))


def _run_round(
    stage: ExperimentServers,
    arguments: argparse.Namespace,
    clock: TimeBudget,
    results: dict[str, Any],
    experiment: Experiment,
    number: int,
) -> None:
    """Run all policies one after another."""
    for place, policy in enumerate(order_policies(tuple(arguments.policies), number)):
        started = time.monotonic()
        stage.reset_caches()
        # Far apart: seeds of rounds and places never meet.
        seed = arguments.seed + 1000 * (number + 1)
        seed += 0 if results["resets"] else place + 1
        before = stage.read_server_cpu_s()
        run = _reduce_run(_run_bench(stage.routers[policy].url, experiment.build_load_flags(seed)))
        run["cpu_s"] = [
            round(b - a, 2) for a, b in zip(before, stage.read_server_cpu_s(), strict=True)
        ]
        run["learnt"] = stage.read_instances(policy) if policy == "calibrated" else None
        where = {"experiment": experiment.name, "policy": policy, "round": number + 1}
        results["runs"].append({**where, "place": place + 1, "seed": seed, **run})
        _save_results(arguments.json, results)
        clock.record_run(experiment, time.monotonic() - started)
        clock.report_progress(f"{experiment.name} round {number + 1} {policy}: {_format_run(run)}")


def _run_bench(url: str, flags: Sequence[str]) -> Any:
    """One run of `ttft-otel bench`, as its JSON."""
    with tempfile.TemporaryDirectory(prefix="ttft-otel-") as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "ttft_otel.commands.main", "bench", "--url", url, *flags]
        done = subprocess.run(
            [*REALTIME_PREFIX, *command, "--output", str(out)],
            capture_output=True,
            text=True,
            check=False,
        )
        # bench got the Ctrl-C too; measure nothing more.
        if done.returncode == 130:
            raise KeyboardInterrupt
        if not out.exists():
            raise SystemExit(f"bench ended with {done.returncode}: {done.stderr[-2000:]}")
        return json.loads(out.read_text("utf-8"))


def _reduce_run(document: Any) -> dict[str, Any]:
    """The part of a run's result that is stored."""
    run = document["targets"][0]["runs"][0]
    keys = ("sent_ms", "ttft_ms", "input_tokens", "cached_tokens", "latency_ms")
    kept = ("valid", "seconds", "lag_ms", "failures", "unfinished")
    # In milliseconds and tokens; None, for what was not told, becomes 0.
    rows = [[request[key] or 0 for key in keys] for request in run["requests"]]
    return {key: run[key] for key in kept} | {"requests": rows}


def _format_run(run: dict[str, Any]) -> str:
    rows = run["requests"]
    if not rows:
        return f"no request succeeded: {run['failures']}"
    ttfts = sorted(row[1] for row in rows)
    cached = sum(row[3] for row in rows) / max(1, sum(row[2] for row in rows))
    return (
        f"{len(rows)} requests in {run['seconds']:.0f} s, TTFT mean {sum(ttfts) / len(ttfts):.0f} ms, "
        f"max {ttfts[-1]:.0f} ms, {cached:.0%} cached, own lag p99 {run['lag_ms']['send_p99']:.1f} ms, "
        f"failures {run['failures'] or 'none'}"
    )


def _save_results(path: Path | None, results: dict[str, Any]) -> None:
    """Write all results as JSON, one run per line."""
    if path is None:
        return
    runs = ",\n".join(json.dumps(run, separators=(",", ":")) for run in results["runs"])
    rest = json.dumps({key: value for key, value in results.items() if key != "runs"}, indent=1)
    path.write_text(f'{rest[:-2]},\n "runs": [\n{runs}\n]\n}}\n', encoding="utf-8")


def _report_server_start(name: str, seconds: float, line: str) -> None:
    sys.stderr.write(f"\r{name} {seconds:3.0f} s {line[-80:]:80}")
    sys.stderr.flush()


def run_experiments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start, measure, stop; returns the results so far when it ends early."""
    clock = TimeBudget(time.monotonic() + 60 * arguments.minutes)
    flags = {
        each: [*ROUTER_FLAGS_BY_POLICY[each], *arguments.router] for each in arguments.policies
    }
    results: dict[str, Any] = {
        "figures": {},
        "machine": {"processors": os.cpu_count(), "machine": platform.machine()},
        "policies": flags,
        "warm": {},
        "runs": [],
    }
    with tempfile.TemporaryDirectory(prefix="ttft-otel-") as scratch:
        try:
            with start_experiment_servers(
                arguments.servers, flags, Path(scratch), _report_server_start
            ) as stage:
                sys.stderr.write("\n")
                measure_experiments(stage, arguments, clock, results)
        except KeyboardInterrupt:
            clock.report_progress("interrupted: what was measured is kept")
    return results


def main() -> None:
    """Measure or read, then print, write, draw."""
    arguments = parse_experiment_options(__doc__)
    results = (
        run_experiments(arguments)
        if arguments.names
        else json.loads(arguments.json.read_text("utf-8"))
    )
    results["figures"] = {}  # at the end only: the draws take seconds
    for name in EXPERIMENTS:
        results["figures"] |= compute_experiment_figures(results, name)
    _save_results(arguments.json, results)
    pages = {"apart": format_interference(results)} | {
        name: format_experiment_table(results, name) for name in EXPERIMENTS
    }
    for name, shown in pages.items():
        if not shown:
            continue
        sys.stdout.write(f"{name}\n\n{shown}\n")
        if arguments.pictures and name in EXPERIMENTS:
            (arguments.pictures / f"routing-{name}.svg").write_text(
                draw_experiment(results, name), "utf-8"
            )
        if arguments.page:
            text = arguments.page.read_text("utf-8")
            arguments.page.write_text(replace_in_page(text, name, shown), encoding="utf-8")


if __name__ == "__main__":
    main()
