# SPDX-License-Identifier: Apache-2.0
"""The command line of experiments.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.routing.experiment_loads import (
    EXPERIMENTS,
    MEASURED_POLICIES,
    ROUTER_FLAGS_BY_POLICY,
)

EXAMPLES: Final = """\
examples:
  python -m benchmarks.routing.experiments multi-round shared-prefix multi-round-long \\
      --minutes 28 --json live.json
  python -m benchmarks.routing.experiments shared-prefix --rounds 5 --rate 2 --seconds 60 --json live.json
  python -m benchmarks.routing.experiments shared-prefix --rounds 1 --seconds 10 \\
      --servers http://127.0.0.1:8001 http://127.0.0.1:8002 --policies round_robin least_requests
  python -m benchmarks.routing.experiments --json live.json --pictures docs/img   (no run: redraws)
"""


def parse_experiment_options(description: str | None = None) -> argparse.Namespace:
    """The command line's options, and the experiments with the load that they ask for.

    `description` is what --help says first.
    """
    parser = _build_parser(description)
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(EXPERIMENTS):
        parser.error(
            f"no experiment {', '.join(sorted(unknown))}; there are {', '.join(EXPERIMENTS)}"
        )
    # Without names old results are read: tables and pictures anew, nothing is measured.
    if not arguments.names and not (arguments.json and arguments.json.exists()):
        parser.error("name an experiment, or with --json FILE results that are there")
    # `or`: 0 would be no load, so it cannot be meant.
    arguments.experiments = [
        replace(
            EXPERIMENTS[name],
            rate=_pick_nth(arguments.rate, place) or EXPERIMENTS[name].rate,
            seconds=_pick_nth(arguments.seconds, place) or EXPERIMENTS[name].seconds,
        )
        for place, name in enumerate(arguments.names)
    ]
    return arguments


def _build_parser(description: str | None) -> argparse.ArgumentParser:
    # Raw, because the examples' lines must stay as they are.
    parser = argparse.ArgumentParser(
        description=description,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="EXPERIMENT", help=" or ".join(EXPERIMENTS))
    parser.add_argument(
        "--policies", nargs="+", choices=ROUTER_FLAGS_BY_POLICY, default=list(MEASURED_POLICIES)
    )
    parser.add_argument("--rounds", type=int, default=3, help="at most (default: 3)")
    # A round that has begun is finished: a round in which a policy is missing counts for nothing.
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="for everything; begins no round later"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        nargs="+",
        help="of load in a run: one for all, or one for each experiment",
    )
    parser.add_argument(
        "--rate", type=float, nargs="+", help="requests per second: one for all, or one for each"
    )
    parser.add_argument("--seed", type=int, default=1)
    # Two, because the loads above are sized for that.
    parser.add_argument(
        "--servers", nargs=2, default=(), metavar="URL", help="two that run already"
    )
    parser.add_argument(
        # With `=`, because argparse takes a value that begins with -- for a flag of its own.
        "--router",
        action="append",
        default=[],
        metavar="FLAG",
        help="for all routers: --router=--flag",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="figures and all runs")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="draw into it")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="put the tables between its marks"
    )
    return parser


def _pick_nth(values: Sequence[float] | None, place: int) -> float | None:
    """One for each, or the only one for all."""
    return values[min(place, len(values) - 1)] if values else None
