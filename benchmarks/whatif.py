# SPDX-License-Identifier: Apache-2.0
"""Whether `ttft-otel whatif` predicts what real vLLM servers then do: predictions first, runs after.

    python -m benchmarks.whatif [PART ...] [--json FILE] [--predictions FILE] [--requests N] [--delay MS]
        [--folder DIR]

A window is recorded; changes are predicted and written down; then each is run with the same arrivals and
lengths of prompts and answers, and at last the unchanged window again. Where that one differs from the
first by more than a tenth, something else used the machine meanwhile, and the part's predictions are not
judged. Parts: load, limits, encoders (whatif_changes.py); each takes six to ten minutes.
Every forward pass sleeps for --delay milliseconds, and every run of an encoder for three times that, so that
two servers on few cores are still two; what the processor itself adds is in the figures as noise.
tests/live/test_commands.py asserts the goal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

import numpy

from benchmarks.figures import Figure, build_figure, report_figures
from benchmarks.whatif_changes import PARTS, Outcome
from benchmarks.whatif_servers import Bench, plan_load, raise_priority
from lab.injection import InjectionControl
from lab.local_deployment import build_receiver_command
from lab.local_servers import run_servers

MAX_MEAN_ERROR: Final = 0.15  # of p50 and p95 over all changes
ENCODER_STEPS: Final = 3  # that an encoder's run takes as long as


def run_part(name: str, arguments: argparse.Namespace, known: Sequence[Outcome]) -> list[Outcome]:
    """Run one part; its predictions are written, with what is `known`, before its changes are run."""
    with tempfile.TemporaryDirectory(prefix="ttft-otel-whatif-") as scratch:
        folder = (arguments.folder or Path(scratch)) / name
        folder.mkdir(parents=True, exist_ok=True)
        control = InjectionControl(folder / "control.json")
        delay = arguments.delay
        control.set_injections({"forward": delay, "encoder": ENCODER_STEPS * delay})
        with run_servers(build_receiver_command(folder / "spans.db"), timeout=120, logs=folder) as (
            receiver,
        ):
            raise_priority([os.getpid()])
            planned = plan_load(arguments.requests, delay, pictures=name == "encoders")
            bench = Bench(folder, receiver, control, planned)
            return PARTS[name](bench, partial(write_outcomes, arguments.predictions, known))


def write_outcomes(
    file: Path | None, known: Sequence[Outcome], outcomes: Sequence[Outcome]
) -> None:
    """Write what is known so far."""
    if file is not None:
        told = [asdict(each) for each in (*known, *outcomes)]
        file.write_text(json.dumps(told, indent=1) + "\n", "utf-8")


def build_figures(outcomes: Sequence[Outcome]) -> dict[str, Figure]:
    """The mean error of all judged changes, against its goal, and that of each beside it."""
    judged = [each for each in outcomes if each.is_judged]
    figures = {"judged": build_figure([len(judged)])}
    if judged:
        errors = [error for each in judged for error in each.list_errors()]
        unchanged = [
            abs(a / b - 1)
            for each in judged
            for a, b in zip(each.before, each.measured, strict=True)
        ]
        figures["mean_error"] = build_figure([float(numpy.mean(errors))], MAX_MEAN_ERROR, digits=3)
        # What somebody would be wrong by who expects that nothing changes.
        figures["mean_error_of_no_change"] = build_figure([float(numpy.mean(unchanged))], digits=3)
    for each in outcomes:
        figures[f"{each.name} drift"] = build_figure([each.drift], digits=3)
        for share, error in zip(("p50", "p95"), each.list_errors(), strict=True):
            figures[f"{each.name} {share}"] = build_figure([error], digits=3)
    return figures


def main() -> int:
    """Run the benchmark; 1 when the goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "parts", nargs="*", choices=[*PARTS, []], metavar="PART", help="all without"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--predictions", type=Path, help="write predictions here, before the runs")
    parser.add_argument("--requests", type=int, default=110)
    parser.add_argument("--delay", type=float, default=80.0, help="milliseconds in each step")
    parser.add_argument("--folder", type=Path, help="keep the spans and logs here")
    arguments = parser.parse_args()
    outcomes: list[Outcome] = []
    for name in arguments.parts or PARTS:
        outcomes += run_part(name, arguments, outcomes)
        write_outcomes(arguments.predictions, (), outcomes)
    return report_figures(build_figures(outcomes), arguments.json)


if __name__ == "__main__":
    sys.exit(main())
