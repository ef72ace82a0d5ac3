# SPDX-License-Identifier: Apache-2.0
"""What replicas of the router that share nothing cost: mean TTFT and cached tokens in the simulation.

    python -m benchmarks.routing.replica_routing --traces DIR [--replicas 1 2 4] [--seeds 1 2 3] [--json FILE]

Each replica gets a random share of the requests and knows the prefixes of its own ones. A table for people,
figures for programs; the same seeds give the same figures everywhere (worker_sharing.py).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks.figures import Figure, build_figure, report_figures
from benchmarks.routing import trace_options
from benchmarks.routing.load_kinds import read_rows
from benchmarks.routing.worker_simulation import run_workers

CASE_NAME: Final = "history-n8-load0.85"
POLICIES: Final = (
    *("session", "kvaware", "prefix", "hashed_prefix"),
    *("least_requests", "calibrated"),
)


def measure_policy(
    case: dict[str, Any], policy: str, folder: Path, seeds: list[int], replicas: int
) -> dict[str, Figure]:
    """Mean TTFT, and the share of prompt tokens that were cached, over the seeds."""
    means_s, hits = [], []
    for seed in seeds:
        rows = read_rows(case["kind"], folder, seed, case["requests"])
        simulation = run_workers(case, policy, rows, seed, replicas, False)
        means_s.append(simulation.mean_ttft_s)
        hits.append(simulation.cached_tokens / sum(row.tokens for row in rows))
        sys.stderr.write(f"{policy} {replicas} seed {seed}: {means_s[-1]:.3f} {hits[-1]:.3f}\n")
    where = f"{policy}, {replicas} replicas, {case['name']}"
    return {
        f"mean TTFT, s, {where}": build_figure(means_s),
        f"cached share, {where}": build_figure(hits, digits=3),
    }


def main() -> int:
    """A line for each figure; --json writes them."""
    parser = trace_options.make_parser(__doc__)
    parser.add_argument("--case", default=CASE_NAME, help="its name")
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--json", type=Path, help="write {figure: {value, goal, met}} there")
    options = trace_options.parse_options(parser)
    cases = json.loads(options.list.read_text("utf-8"))["cases"]
    (case,) = (each for each in cases if each["name"] == options.case)
    figures: dict[str, Figure] = {}
    for policy in options.policies:
        for replicas in options.replicas:
            figures |= measure_policy(case, policy, options.traces, options.seeds, replicas)
    return report_figures(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
