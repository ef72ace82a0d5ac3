# SPDX-License-Identifier: Apache-2.0
"""Whether `ttft-otel whatif` predicts what real vLLM servers then do: predictions first, runs after.

    python -m benchmarks.whatif [--json FILE] [--predictions FILE] [--requests N] [--delay MS]
        [--folder DIR]

One server behind the router is recorded; five changes are predicted and written down; then each is run with
the same arrivals and lengths of prompts and answers. Servers start one after another, at most two at a time.
Every forward pass sleeps for --delay milliseconds, so that two servers on few cores are still two; what the
processor itself adds is in the figures as noise. tests/live/test_whatif.py asserts the goal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import numpy

from benchmarks.figures import Figure, build_figure, report_figures
from benchmarks.whatif_servers import START_TIMEOUT_S, Bench, plan_load, raise_priority
from lab import session_processes
from lab.injection import InjectionControl
from lab.local_deployment import build_receiver_command
from lab.local_servers import run_servers
from ttft_otel.explain import what_if
from ttft_otel.explain.planned_change import PlannedChange
from ttft_otel.explain.replay_facts import Recording
from ttft_otel.explain.what_if_figures import TTFT

MAX_MEAN_ERROR: Final = 0.15  # of p50 and p95 over all changes
BUSY_RATE: Final = 1.8  # times as many requests, for two instances


@dataclass(slots=True)
class Outcome:
    """p50 and p95 of the TTFT, milliseconds: as it was, as predicted, as it then was."""

    name: str
    before: list[float]
    predicted: list[float]
    interval: list[list[float]]
    replay_error: list[float]
    measured: list[float] = field(default_factory=list)
    measured_by_client: list[float] = field(default_factory=list)

    def list_errors(self) -> list[float]:
        """Relative errors of the prediction."""
        return [abs(a / b - 1) for a, b in zip(self.predicted, self.measured, strict=True)]


def predict(name: str, recording: Recording, change: PlannedChange) -> Outcome:
    """The prediction of one change; the reason of a refusal ends the benchmark."""
    answer = what_if.predict_change(recording, change, PlannedChange())
    figures = answer.figures[TTFT][:2]
    return Outcome(
        name,
        before=[each.recorded / 1000 for each in figures],
        predicted=[each.predicted / 1000 for each in figures],
        interval=[[each.low / 1000, each.high / 1000] for each in figures],
        replay_error=list(answer.errors[:2]),
    )


def measure(outcome: Outcome, recording: Recording, clients: Sequence[float]) -> None:
    """Add what then was."""
    ttfts = [each.ttft_us / 1000 for each in recording.requests]
    outcome.measured = [float(each) for each in numpy.quantile(ttfts, [0.5, 0.95])]
    outcome.measured_by_client = [float(each) for each in numpy.quantile(clients, [0.5, 0.95])]
    sys.stderr.write(
        f"{outcome.name}: before {outcome.before}, predicted {outcome.predicted}, "
        f"measured {outcome.measured} ({len(ttfts)} requests)\n"
    )


def run_changes(bench: Bench, predictions: Path | None) -> list[Outcome]:
    """Record, predict, write down, and run each change."""
    first = bench.build_server(0)
    with ExitStack() as stack:
        servers = stack.enter_context(
            run_servers(first, bench.build_server(1), timeout=START_TIMEOUT_S, logs=bench.folder)
        )
        one, two = [servers[0].url], [each.url for each in servers]
        for each in servers:
            raise_priority(session_processes.list_session_pids(each.pid))
        with bench.route(one, "round_robin") as url:
            recorded, _ = bench.run_window(url, 1.0, seed=1)
            outcomes = {
                "instances 1 -> 2": predict(
                    "instances 1 -> 2", recorded, PlannedChange(instances=1)
                ),
                "max-num-seqs 4 -> 16": predict(
                    "max-num-seqs 4 -> 16", recorded, PlannedChange(max_num_seqs=16)
                ),
                "max-num-batched-tokens 512 -> 2048": predict(
                    "max-num-batched-tokens 512 -> 2048",
                    recorded,
                    PlannedChange(max_batched_tokens=2048),
                ),
                "rate x1.5": predict("rate x1.5", recorded, PlannedChange(rate=1.5)),
            }
            write_outcomes(predictions, list(outcomes.values()))
            measure(outcomes["rate x1.5"], *bench.run_window(url, 1.5, seed=2))
        with bench.route(two, "round_robin") as url:
            measure(outcomes["instances 1 -> 2"], *bench.run_window(url, 1.0, seed=3))
            busy, _ = bench.run_window(url, BUSY_RATE, seed=4)
        by_ttft = predict("round robin -> ttft", busy, PlannedChange(policy="ttft"))
        outcomes["round robin -> ttft"] = by_ttft
        write_outcomes(predictions, list(outcomes.values()))
        with bench.route(two, "ttft") as url:
            measure(by_ttft, *bench.run_window(url, BUSY_RATE, seed=5))
    for name, limits, seed in (
        ("max-num-seqs 4 -> 16", {"max_num_seqs": 16}, 6),
        ("max-num-batched-tokens 512 -> 2048", {"max_num_batched_tokens": 2048}, 7),
    ):
        changed = bench.build_server(0, **limits)
        with (
            run_servers(changed, timeout=START_TIMEOUT_S, logs=bench.folder) as (server,),
            bench.route([server.url], "round_robin") as url,
        ):
            raise_priority(session_processes.list_session_pids(server.pid))
            measure(outcomes[name], *bench.run_window(url, 1.0, seed))
    return list(outcomes.values())


def write_outcomes(file: Path | None, outcomes: Sequence[Outcome]) -> None:
    """Write what is known so far."""
    if file is not None:
        file.write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n", "utf-8")


def build_figures(outcomes: Sequence[Outcome]) -> dict[str, Figure]:
    """The mean error of all changes, against its goal, and that of each beside it."""
    errors = [error for each in outcomes for error in each.list_errors()]
    unchanged = [
        abs(a / b - 1) for each in outcomes for a, b in zip(each.before, each.measured, strict=True)
    ]
    figures = {
        "mean_error": build_figure([float(numpy.mean(errors))], MAX_MEAN_ERROR, digits=3),
        # What somebody would be wrong by who expects that nothing changes.
        "mean_error_of_no_change": build_figure([float(numpy.mean(unchanged))], digits=3),
    }
    for each in outcomes:
        for share, error in zip(("p50", "p95"), each.list_errors(), strict=True):
            figures[f"{each.name} {share}"] = build_figure([error], digits=3)
    return figures


def main() -> int:
    """Run the benchmark; 1 when the goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--predictions", type=Path, help="write predictions here, before the runs")
    parser.add_argument("--requests", type=int, default=110)
    parser.add_argument("--delay", type=float, default=80.0, help="milliseconds in each step")
    parser.add_argument("--folder", type=Path, help="keep the spans and logs here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ttft-otel-whatif-") as scratch:
        folder = arguments.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        control = InjectionControl(folder / "control.json")
        control.set_injections({"forward": arguments.delay})
        with run_servers(build_receiver_command(folder / "spans.db"), timeout=120, logs=folder) as (
            receiver,
        ):
            raise_priority([os.getpid()])
            bench = Bench(folder, receiver, control, plan_load(arguments.requests, arguments.delay))
            outcomes = run_changes(bench, arguments.predictions)
    write_outcomes(arguments.predictions, outcomes)
    return report_figures(build_figures(outcomes), arguments.json)


if __name__ == "__main__":
    sys.exit(main())
