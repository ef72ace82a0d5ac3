# SPDX-License-Identifier: Apache-2.0
"""What it is worth that workers of one router share their load: mean TTFT in the simulation.

    python -m benchmarks.routing.worker_sharing --traces DIR [--workers 4] [--seeds 1 2 3] [--json FILE]

Ratios to one worker on the same arrivals, one for each seed: workers that tell one another what they send,
replicas that do (--shared-state), and workers that know only their own. All are simulated; times of day,
threads and sockets play no part, so that the same seeds give the same figures everywhere.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks.figures import Figure, build_figure, divide_rounds, report_figures
from benchmarks.routing import trace_options
from benchmarks.routing.load_kinds import read_rows
from benchmarks.routing.shared_state_simulation import SharedStateSimulation
from benchmarks.routing.worker_simulation import run_workers

CASE_NAMES: Final = ("conversation-n8-load0.85", "history-n8-load0.85")
POLICIES: Final = ("calibrated", "least_requests")
MAX_SHARING_RATIO: Final = 1.03  # of the mean TTFT, workers that share to one
MAX_REPLICAS_RATIO: Final = 1.02  # replicas with --shared-state to one


def measure_case(
    case: dict[str, Any], policy: str, folder: Path, seeds: list[int], workers: int
) -> dict[str, Figure]:
    """The figures of one case with one policy."""
    alone, sharing, replicas, apart = [], [], [], []
    for seed in seeds:
        rows = read_rows(case["kind"], folder, seed, case["requests"])
        alone.append(run_workers(case, policy, rows, seed, 1, False).mean_ttft_s)
        sharing.append(run_workers(case, policy, rows, seed, workers, True).mean_ttft_s)
        replicas.append(
            run_workers(case, policy, rows, seed, workers, True, SharedStateSimulation).mean_ttft_s
        )
        apart.append(run_workers(case, policy, rows, seed, workers, False).mean_ttft_s)
        ratios = ", ".join(f"{each[-1] / alone[-1]:.3f}" for each in (sharing, replicas, apart))
        sys.stderr.write(f"{case['name']} {policy} seed {seed}: {ratios}\n")
    where = f"{policy}, {case['name']}"
    return {
        f"{workers} workers that share / one, {where}": build_figure(
            divide_rounds(sharing, alone), MAX_SHARING_RATIO, digits=3
        ),
        f"{workers} replicas with --shared-state / one, {where}": build_figure(
            divide_rounds(replicas, alone), MAX_REPLICAS_RATIO, digits=3
        ),
        f"{workers} workers that share nothing / one, {where}": build_figure(
            divide_rounds(apart, alone), digits=3
        ),
        f"mean TTFT of one, s, {where}": build_figure(alone, digits=3),
    }


def main() -> int:
    """A line for each figure; --json writes them; 1 when a goal is missed."""
    parser = trace_options.make_parser(__doc__)
    parser.add_argument("--cases", nargs="+", default=CASE_NAMES, help="names of cases")
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write {figure: {value, goal, met}} there")
    options = trace_options.parse_options(parser)
    figures: dict[str, Figure] = {}
    for case in json.loads(options.list.read_text("utf-8"))["cases"]:
        if case["name"] in options.cases:
            for policy in options.policies:
                figures |= measure_case(
                    case, policy, options.traces, options.seeds, options.workers
                )
    return report_figures(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
