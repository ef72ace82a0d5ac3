# SPDX-License-Identifier: Apache-2.0
"""Plot results of simulate.py for docs/routing.md: reads a file of results/, writes SVG to docs/img.

python -m benchmarks.routing.simulation_plots
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.routing.simulation_tables import OURS, Case, compute_mean

ROOT = Path(__file__).parents[2]
RESULTS_FILE = ROOT / "benchmarks" / "results" / "routing-simulation.json"
IMAGE_NAME = "routing-simulation.svg"
PLOT_STYLE: dict[Any, Any] = {  # matplotlib types every key
    "svg.hashsalt": "ttft-otel",  # the same numbers give the same file
    # Text stays text: smaller files, in the reader's own font.
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e7eb",
    "axes.axisbelow": True,
}
# Policy -> color and mark; marks stay visible on one another, because policies are often equal.
POLICIES = {
    "round_robin": ("#d1d5db", "s"),
    "least_requests": ("#6b7280", "s"),
    "cache_aware": ("#c2418c", "^"),
    "llmd": ("#0f9d7a", "|"),
    "dynamo": ("#b0851b", "v"),
    "decay": ("#b0851b", "x"),
    "trapezoid": ("#ea6a12", "+"),
    "oracle": ("#111827", "D"),
}
MAX_RATIO = 8.0


def plot_ratios(cases: list[Case]) -> Figure:
    """Every case: the mean TTFT of policies as a multiple of that of `calibrated`."""
    figure = Figure(figsize=(9, 0.26 * len(cases) + 1.6), layout="constrained")
    axes = figure.subplots()
    places = list(range(len(cases), 0, -1))
    for policy, (color, mark) in POLICIES.items():
        ratios = [
            min(
                compute_mean(case, policy, "mean") / compute_mean(case, OURS, "mean", policy),
                MAX_RATIO,
            )
            for case in cases
        ]
        axes.scatter(ratios, places, 28, color=color, marker=mark, label=policy, linewidths=1.3)
    axes.axvline(1, color="#5b5bf0", linewidth=2, label=OURS)
    axes.set_xscale("log")
    axes.set_xlim(0.8, MAX_RATIO * 1.05)
    axes.set_xticks([1, 1.5, 2, 4, 8])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
    axes.set_yticks(places, [case["name"] for case in cases])
    axes.set_title(f"Mean TTFT, as a multiple of {OURS}'s ({MAX_RATIO:g}: or more)", loc="left")
    figure.legend(loc="outside right center", frameon=False)
    return figure


def main() -> None:
    """The picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "img")
    path = parser.parse_args().to / IMAGE_NAME
    cases = json.loads(RESULTS_FILE.read_text("utf-8"))["cases"]
    with mpl.rc_context(PLOT_STYLE):
        # No date and no version: the same numbers give the same file.
        plot_ratios(cases).savefig(path, metadata={"Date": None, "Creator": None})
    # Matplotlib leaves blanks at the ends of lines.
    text = "\n".join(map(str.rstrip, path.read_text("utf-8").splitlines()))
    path.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
