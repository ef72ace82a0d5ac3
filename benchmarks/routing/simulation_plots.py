# SPDX-License-Identifier: Apache-2.0
"""Plot results of simulate.py for docs/routing.md: reads a file of results/, writes SVG to docs/img.

python -m benchmarks.routing.simulation_plots
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from benchmarks.routing.simulation_tables import compute_gains, compute_half_interval

ROOT = Path(__file__).parents[2]
RESULTS_FOLDER = ROOT / "benchmarks" / "results"
IMAGES_FOLDER = ROOT / "docs" / "img"
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
POLICY_COLORS = {
    "calibrated": "#5b5bf0",
    "trapezoid": "#ea6a12",
    "tokens": "#0f9d7a",
    "decay": "#b0851b",
    "prefix": "#c2418c",
    "least_requests": "#6b7280",
    "oracle": "#111827",
    "alone": "#9ca3af",
}
# Marks that stay visible on one another, because policies are often equal.
POLICY_MARKERS = {"tokens": "|", "decay": "x", "oracle": "D"}
POLICY_LABELS = {"alone": "no waiting, all cached"}
PLOTTED_FLEET_SIZES = (4, 8, 64)


def plot_gains(cases: list[dict[str, Any]]) -> Figure:
    """Every case: what policies have less than trapezoid, and what no policy could fall below."""
    figure = Figure(figsize=(9, 8.6), layout="constrained")
    axes = figure.subplots()
    places = range(len(cases), 0, -1)
    # Grey from -100 % to the bound: what is faster than no waiting with everything cached.
    bounds = [_get_gain_over_trapezoid(case, "alone") for case in cases]
    axes.barh(places, [-1 - b for b in bounds], left=bounds, height=0.9, color="#f0f1f3", zorder=0)
    for policy, mark in POLICY_MARKERS.items():
        # A file of results may lack a policy that was added later.
        run = [each for each in zip(cases, places, strict=True) if policy in each[0]["seeds"]["1"]]
        axes.scatter(
            [_get_gain_over_trapezoid(case, policy) for case, _ in run],
            [place for _, place in run],
            14 if mark == "D" else 30,
            color=POLICY_COLORS[policy],
            marker=mark,
            label=policy,
            linewidths=1.2,
        )
    axes.scatter(
        [_get_gain_over_trapezoid(case, "calibrated") for case in cases],
        places,
        42,
        color=POLICY_COLORS["calibrated"],
        label="calibrated",
        zorder=4,
    )
    for case, place in zip(cases, places, strict=True):
        values = compute_gains(case, "calibrated")
        # A single seed has no interval.
        if len(values) > 1:
            middle, most = statistics.fmean(values), compute_half_interval(values)
            axes.plot(
                (middle - most, middle + most),
                (place - 0.3, place - 0.3),
                color=POLICY_COLORS["calibrated"],
                linewidth=2,
                alpha=0.45,
            )
    axes.axvline(0, color=POLICY_COLORS["trapezoid"], linewidth=1.5)
    axes.set_yticks(places, [case["name"] for case in cases])
    axes.set_ylim(0.3, len(cases) + 0.7)
    # Nothing is below -100 %, and no case is worse than trapezoid by more.
    axes.set_xlim(-1, 0.15)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.set_title(
        "Mean TTFT to trapezoid's; bars: 95 % over seeds; grey: out of reach for any policy",
        loc="left",
    )
    axes.legend(loc="lower left", frameon=True)
    return figure


def plot_load_curves(cases: list[dict[str, Any]]) -> Figure:
    """The conversation trace with equal instances: mean TTFT over load, for each size of fleet."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes_list: Any = figure.subplots(1, len(PLOTTED_FLEET_SIZES), sharey=True)
    for axes, size in zip(axes_list, PLOTTED_FLEET_SIZES, strict=True):
        _plot_fleet_curves(
            axes,
            [c for c in cases if c["name"].startswith(f"conv-n{size}-") and _is_default_case(c)],
        )
        axes.set_title(f"{size} instances", loc="left")
        axes.set_xlabel("load")
    axes_list[0].set_ylabel("mean TTFT, s")
    figure.legend(
        *axes_list[0].get_legend_handles_labels(), loc="outside right center", frameon=False
    )
    return figure


def _plot_fleet_curves(axes: Axes, cases: list[dict[str, Any]]) -> None:
    cases.sort(key=lambda case: case["load"])
    for policy, color in POLICY_COLORS.items():
        if policy in ("oracle", "tokens"):
            continue
        values = [case["seeds"]["1"][policy] for case in cases]
        axes.plot(
            [case["load"] for case in cases],
            values,
            color=color,
            marker="o",
            markersize=3,
            linewidth=2 if policy == "calibrated" else 1.2,
            linestyle=":" if policy == "alone" else "-",
            label=POLICY_LABELS.get(policy, policy),
        )
    # Near saturation waiting grows by powers of ten.
    axes.set_yscale("log")
    axes.set_ylim(0.4, 110)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _is_default_case(case: dict[str, Any]) -> bool:
    # The defaults of cases.json: the curves vary fleet and load alone.
    usual = {"slow": 0, "cache": 1000, "noise": 0.1, "lag": 0.05, "index": "events"}
    return all(case[name] == value for name, value in usual.items())


def _get_gain_over_trapezoid(case: dict[str, Any], policy: str) -> float:
    means = case["seeds"]["1"]
    return float(means[policy] / means["trapezoid"] - 1)


def main() -> None:
    """Both pictures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--to", type=Path, default=IMAGES_FOLDER)
    folder = parser.parse_args().to
    cases = json.loads((RESULTS_FOLDER / "routing-simulation.json").read_text("utf-8"))["cases"]
    with mpl.rc_context(PLOT_STYLE):
        for name, figure in (("gains", plot_gains(cases)), ("load", plot_load_curves(cases))):
            path = folder / f"routing-simulation-{name}.svg"
            # No date and no version: the same numbers give the same file.
            figure.savefig(path, metadata={"Date": None, "Creator": None})
            text = path.read_text("utf-8")
            # Matplotlib leaves blanks at the ends of lines.
            path.write_text("\n".join(map(str.rstrip, text.splitlines())) + "\n", "utf-8")


if __name__ == "__main__":
    main()
