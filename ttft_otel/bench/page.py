# SPDX-License-Identifier: Apache-2.0
"""A benchmark as one HTML page with charts that loads nothing: from document.py's JSON, for a browser.

Charts are SVG, drawn here; a place in one is a percentage, so that they are as wide as the window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ttft_otel import palette
from ttft_otel.bench.figures import OUTSIDE
from ttft_otel.bench.screen import COLUMNS, TITLES

BINS: Final = 48
POINTS: Final = 4000  # more dots than this hide one another, and make the page slow
TICKS: Final = 6
MARKS: Final = ("p50", "p95", "p99")


@dataclass(frozen=True, slots=True)
class Tick:
    """A number on an axis, and where."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle or a dot: percentages of the chart, its stage if it has one, what it says."""

    x: float
    y: float
    width: float
    height: float
    says: str
    stage: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn, over its axes; `marks` are upright lines."""

    boxes: list[Box]
    across: list[Tick]
    up: list[Tick]
    marks: list[Tick]


def page(found: Mapping[str, Any]) -> str:
    """The whole document."""
    charts = [_charts(each) for each in found["targets"]]
    return (
        _jinja()
        .get_template("page.html")
        .render(
            found=found,
            targets=zip(found["targets"], charts, strict=True),
            sheet=Markup(palette.sheet()),  # ours, no data in it
        )
    )


@lru_cache(maxsize=1)
def _jinja() -> Environment:
    made = Environment(
        loader=PackageLoader("ttft_otel.bench"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals.update(titles=TITLES, columns=COLUMNS, css=_css, number=_number)
    return made


def _charts(target: Mapping[str, Any]) -> dict[str, Chart]:
    """The charts for which there are requests, or breakdowns."""
    rows = [row for run in target["runs"] for row in run["requests"]]
    summary = target["summary"]
    found = {}
    if rows:
        found["spread"] = _spread([row["ttft_ms"] for row in rows], summary["figures_ms"]["ttft"])
        found["time"] = _time(target["runs"])
    if summary["ends_ms"]:
        found["ends"] = _ends(summary["ends_ms"])
    return found


def _spread(ttft: Sequence[float], line: Mapping[str, float]) -> Chart:
    """How many requests had which TTFT."""
    most = max(ttft) or 1.0
    counts, edges = np.histogram(ttft, bins=BINS, range=(0.0, most))
    top = float(counts.max())
    boxes = [
        Box(
            x=100 * low / most,
            y=100 - 100 * count / top,
            width=100 / BINS,
            height=100 * count / top,
            says=f"{_number(low)} to {_number(high)} ms: {count} requests",
        )
        for count, low, high in zip(counts.tolist(), edges, edges[1:], strict=False)
        if count
    ]
    marks = [Tick(100 * line[name] / most, f"{name} {_number(line[name])}") for name in MARKS]
    return Chart(boxes, _ticks(most), _ticks(top, up=True), marks)


def _time(runs: Sequence[Mapping[str, Any]]) -> Chart:
    """Each request's TTFT at the time when it was sent; runs one after the other."""
    dots: list[tuple[float, float, str]] = []
    marks, start = [], 0.0
    for number, run in enumerate(runs, 1):
        if number > 1:
            marks.append(Tick(start, f"round {number}"))
        for row in run["requests"]:
            sent = start + row["sent_ms"] / 1000
            says = f"{row['request_id']}, trace {row['trace_id']}"
            dots.append((sent, row["ttft_ms"], says))
        start += run["seconds"]
    long, top = max(start, 1e-3), max(ttft for _, ttft, _ in dots) or 1.0
    step = math.ceil(len(dots) / POINTS)
    boxes = [
        Box(100 * sent / long, 100 - 100 * ttft / top, 0, 0, f"{_number(ttft)} ms: {says}")
        for sent, ttft, says in dots[::step]
    ]
    marks = [Tick(100 * mark.at / long, mark.text) for mark in marks]
    return Chart(boxes, _ticks(long), _ticks(top, up=True), marks)


def _ends(ends: Mapping[str, Mapping[str, float]]) -> Chart:
    """The usual request above the slow one, stage by stage."""
    most = max(sum(parts.values()) for parts in ends.values()) or 1.0
    boxes = []
    for place, parts in enumerate(ends.values()):
        x = 0.0
        for name, ms in parts.items():
            width = 100 * max(0.0, ms) / most
            boxes.append(Box(x, 50 * place + 8, width, 34, f"{name}: {_number(ms)} ms", name))
            x += width
    rows = [Tick(50 * place + 25, title) for place, title in enumerate(ends)]
    return Chart(boxes, _ticks(most), rows, [])


def _ticks(most: float, up: bool = False) -> list[Tick]:
    """Round numbers from 0 on, at most so many."""
    rough = most / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    values = [place * step for place in range(math.floor(most / step + 1e-9) + 1)]
    return [
        Tick(100 - 100 * value / most if up else 100 * value / most, f"{value:g}")
        for value in values
    ]


def _css(name: str) -> str:
    """A stage's class; what is outside of the server has no colour on the report's page."""
    return "outside" if name == OUTSIDE else palette.css(name)


def _number(value: float) -> str:
    """Three digits that count."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}"
