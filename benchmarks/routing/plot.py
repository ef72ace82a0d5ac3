# SPDX-License-Identifier: Apache-2.0
"""Pictures of what simulate.py found: results.json in, SVG in docs/img out, for docs/routing.md.

python benchmarks/routing/plot.py
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
from tables import gains, half

HERE = Path(__file__).parent
IMAGES = HERE.parents[1] / "docs" / "img"
STYLE = {
    "svg.hashsalt": "ttft-otel",  # the same numbers give the same file
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e7eb",
    "axes.axisbelow": True,
}
COLORS = {
    "calibrated": "#5b5bf0",
    "trapezoid": "#ea6a12",
    "tokens": "#0f9d7a",
    "decay": "#b0851b",
    "prefix": "#c2418c",
    "least_requests": "#6b7280",
    "oracle": "#111827",
    "alone": "#9ca3af",
}
MARKS = {"tokens": "|", "decay": "x", "oracle": "D"}
NAMES = {"alone": "no waiting, all cached"}
FLEETS = (4, 8, 64)


def against(cases: list[dict[str, Any]]) -> Figure:
    """Every case: what policies have less than trapezoid, and what no policy could fall below."""
    figure = Figure(figsize=(9, 8.6), layout="constrained")
    axes = figure.subplots()
    places = range(len(cases), 0, -1)
    bounds = [_once(case, "alone") for case in cases]
    axes.barh(places, [-1 - b for b in bounds], left=bounds, height=0.9, color="#f0f1f3", zorder=0)
    for policy, mark in MARKS.items():
        run = [each for each in zip(cases, places, strict=True) if policy in each[0]["seeds"]["1"]]
        axes.scatter(
            [_once(case, policy) for case, _ in run],
            [place for _, place in run],
            14 if mark == "D" else 30,
            color=COLORS[policy],
            marker=mark,
            label=policy,
            linewidths=1.2,
        )
    axes.scatter(
        [_once(case, "calibrated") for case in cases],
        places,
        42,
        color=COLORS["calibrated"],
        label="calibrated",
        zorder=4,
    )
    for case, place in zip(cases, places, strict=True):
        values = gains(case, "calibrated")
        if len(values) > 1:
            middle, most = statistics.fmean(values), half(values)
            axes.plot(
                (middle - most, middle + most),
                (place - 0.3, place - 0.3),
                color=COLORS["calibrated"],
                linewidth=2,
                alpha=0.45,
            )
    axes.axvline(0, color=COLORS["trapezoid"], linewidth=1.5)
    axes.set_yticks(places, [case["name"] for case in cases])
    axes.set_ylim(0.3, len(cases) + 0.7)
    axes.set_xlim(-1, 0.15)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.set_title(
        "Mean TTFT to trapezoid's; bars: 95 % over seeds; grey: out of reach for any policy",
        loc="left",
    )
    axes.legend(loc="lower left", frameon=True)
    return figure


def course(cases: list[dict[str, Any]]) -> Figure:
    """The conversation trace with equal instances: mean TTFT over load, for each size of fleet."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    every: Any = figure.subplots(1, len(FLEETS), sharey=True)
    for axes, size in zip(every, FLEETS, strict=True):
        _course(axes, [c for c in cases if c["name"].startswith(f"conv-n{size}-") and _plain(c)])
        axes.set_title(f"{size} instances", loc="left")
        axes.set_xlabel("load")
    every[0].set_ylabel("mean TTFT, s")
    figure.legend(*every[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


def _course(axes: Axes, cases: list[dict[str, Any]]) -> None:
    cases.sort(key=lambda case: case["load"])
    for policy, color in COLORS.items():
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
            label=NAMES.get(policy, policy),
        )
    axes.set_yscale("log")
    axes.set_ylim(0.4, 110)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _plain(case: dict[str, Any]) -> bool:
    usual = {"slow": 0, "cache": 1000, "noise": 0.1, "lag": 0.05, "index": "events"}
    return all(case[name] == value for name, value in usual.items())


def _once(case: dict[str, Any], policy: str) -> float:
    of = case["seeds"]["1"]
    return float(of[policy] / of["trapezoid"] - 1)


def main() -> None:
    """Both pictures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--to", type=Path, default=IMAGES)
    folder = parser.parse_args().to
    cases = json.loads((HERE / "results.json").read_text("utf-8"))["cases"]
    with mpl.rc_context(STYLE):
        for name, figure in (("gains", against(cases)), ("load", course(cases))):
            path = folder / f"routing-simulation-{name}.svg"
            figure.savefig(path, metadata={"Date": None, "Creator": None})
            text = path.read_text("utf-8")
            path.write_text("\n".join(map(str.rstrip, text.splitlines())) + "\n", "utf-8")


if __name__ == "__main__":
    main()
