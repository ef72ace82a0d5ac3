# SPDX-License-Identifier: Apache-2.0
"""Render result_document.py's JSON as a self-contained HTML page with SVG charts.

Coordinates are percentages, so that charts take the width of the window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ttft_otel.bench.terminal_report import COLUMNS, METRIC_TITLES
from ttft_otel.model import palette
from ttft_otel.model.stages import OUTSIDE

HISTOGRAM_BINS: Final = 48
MAX_POINTS: Final = 4000  # more points cover each other and make the page slow
MAX_TICKS: Final = 6  # on an axis
MARKED_PERCENTILES: Final = ("p50", "p95", "p99")


# A chart for the template: `boxes` over two axes (`across`, `up`); `marks` are vertical lines with labels.
Chart: TypeAlias = dict[str, Sequence[Any]]
# A label of an axis, or of a mark: `at`, its position in percent, and its `text`.
Tick: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChartBox:
    """A rectangle, or a point when it has no size, in percent of the chart."""

    x: float
    y: float
    width: float
    height: float
    says: str  #: its tooltip
    stage: str = ""  #: the stage that gives its colour, "" without one


def render_page(document: Mapping[str, Any]) -> str:
    """The HTML of a result document."""
    charts = [_build_charts(target) for target in document["targets"]]
    return (
        _create_environment()
        .get_template("page.html")
        .render(
            found=document,
            targets=zip(document["targets"], charts, strict=True),
            sheet=Markup(palette.build_style_sheet()),  # safe without escaping: no data in it
        )
    )


@lru_cache(maxsize=1)
def _create_environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("ttft_otel.bench"),
        # Request IDs, models and URLs come from elsewhere.
        autoescape=True,
        # A misspelt name should end in an error and not in an empty cell.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        titles=METRIC_TITLES, columns=COLUMNS, css=_choose_css_class, number=_format_number
    )
    return environment


def _build_charts(target: Mapping[str, Any]) -> dict[str, Chart]:
    """A target's charts by name; those without data are left out."""
    rows = [row for run in target["runs"] for row in run["requests"]]
    summary = target["summary"]
    charts = {}
    if rows:
        charts["spread"] = _build_histogram(
            [row["ttft_ms"] for row in rows], summary["figures_ms"]["ttft"]
        )
        charts["time"] = _build_timeline(target["runs"])
    # Empty below MIN_EXPLAINED_REQUESTS: too few to call any of them the slowest hundredth.
    if summary["ends_ms"]:
        charts["ends"] = _build_stage_bars(summary["ends_ms"])
    return charts


def _build_histogram(ttfts_ms: Sequence[float], distribution: Mapping[str, float]) -> Chart:
    """Histogram of the TTFT."""
    # Not 0, by which positions are divided.
    max_ttft_ms = max(ttfts_ms) or 1.0
    counts, edges = np.histogram(ttfts_ms, bins=HISTOGRAM_BINS, range=(0.0, max_ttft_ms))
    max_count = float(counts.max())
    boxes = [
        ChartBox(
            x=100 * low / max_ttft_ms,
            y=100 - 100 * count / max_count,
            width=100 / HISTOGRAM_BINS,
            height=100 * count / max_count,
            says=f"{_format_number(low)} to {_format_number(high)} ms: {count} requests",
        )
        for count, low, high in zip(counts.tolist(), edges, edges[1:], strict=False)
        if count
    ]
    marks = [
        _make_tick(distribution[name] / max_ttft_ms, f"{name} {_format_number(distribution[name])}")
        for name in MARKED_PERCENTILES
    ]
    return _make_chart(
        boxes, _compute_ticks(max_ttft_ms), _compute_ticks(max_count, vertical=True), marks
    )


def _build_timeline(runs: Sequence[Mapping[str, Any]]) -> Chart:
    """Each request's TTFT over the time at which it was sent; runs one after another."""
    dots: list[tuple[float, float, str]] = []
    starts_s: list[float] = []
    start_s = 0.0
    for run in runs:
        starts_s.append(start_s)
        for row in run["requests"]:
            # Rounds are drawn one after another; the time between them is not part of the axis.
            sent_s = start_s + row["sent_ms"] / 1000
            says = f"{row['request_id']}, trace {row['trace_id']}"
            dots.append((sent_s, row["ttft_ms"], says))
        start_s += run["seconds"]
    duration_s, max_ttft_ms = max(start_s, 1e-3), max(ttft for _, ttft, _ in dots) or 1.0
    # Every step-th in order of sending: a drift or a burst keeps its shape.
    step = math.ceil(len(dots) / MAX_POINTS)
    boxes = [
        ChartBox(
            100 * sent_s / duration_s,
            100 - 100 * ttft / max_ttft_ms,
            0,
            0,
            f"{_format_number(ttft)} ms: {says}",
        )
        for sent_s, ttft, says in dots[::step]
    ]
    marks = [
        _make_tick(each / duration_s, f"round {number}")
        for number, each in enumerate(starts_s[1:], 2)
    ]
    return _make_chart(
        boxes, _compute_ticks(duration_s), _compute_ticks(max_ttft_ms, vertical=True), marks
    )


def _build_stage_bars(stages_by_percentile: Mapping[str, Mapping[str, float]]) -> Chart:
    """Mean stages of median requests above those of the slowest ones, as stacked bars."""
    max_ttft_ms = max(sum(parts.values()) for parts in stages_by_percentile.values()) or 1.0
    boxes = []
    for place, parts in enumerate(stages_by_percentile.values()):
        x = 0.0
        for name, ms in parts.items():
            # `outside` is the difference of two measurements and can be slightly negative.
            width = 100 * max(0.0, ms) / max_ttft_ms
            boxes.append(
                ChartBox(x, 50 * place + 8, width, 34, f"{name}: {_format_number(ms)} ms", name)
            )
            x += width
    rows = [_make_tick(0.5 * place + 0.25, name) for place, name in enumerate(stages_by_percentile)]
    return _make_chart(boxes, _compute_ticks(max_ttft_ms), rows, [])


def _compute_ticks(maximum: float, vertical: bool = False) -> list[Tick]:
    """Round numbers from 0 to `maximum`, at distances of 1, 2, 5 or 10 times a power of ten."""
    # Rounded up to the next round number below, so there are at most MAX_TICKS steps.
    raw_step = maximum / MAX_TICKS
    power = 10.0 ** math.floor(math.log10(raw_step))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw_step)
    # The tiny addend keeps a last tick that division put just below a whole number.
    values = [place * step for place in range(math.floor(maximum / step + 1e-9) + 1)]
    return [
        _make_tick(1 - value / maximum if vertical else value / maximum, f"{value:g}")
        for value in values
    ]


def _make_tick(place: float, text: str) -> Tick:
    """A label at a place from 0 to 1."""
    return {"at": 100 * place, "text": text}


def _make_chart(
    boxes: Sequence[ChartBox], across: Sequence[Tick], up: Sequence[Tick], marks: Sequence[Tick]
) -> Chart:
    return {"boxes": boxes, "across": across, "up": up, "marks": marks}


def _choose_css_class(name: str) -> str:
    """A stage's CSS class; time outside of the server has one of its own."""
    return OUTSIDE if name == OUTSIDE else palette.get_css_class(name)


def _format_number(value: float) -> str:
    """A number with about three significant digits."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}"
