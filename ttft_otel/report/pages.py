# SPDX-License-Identifier: Apache-2.0
"""Requests and traces -> HTML, escaped throughout; app.py serves it, scripts/demo writes it to a file.

Bars are SVG with percentages, so the pages need no inline style and the server's policy forbids it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ttft_otel import __version__, palette, stages
from ttft_otel.report import tree
from ttft_otel.report.query import Trace, Wanted
from ttft_otel.report.shape import ERROR, KINDS, Request
from ttft_otel.report.summary import Summary, summarize

HERE: Final = Path(__file__).parent
LABEL: Final = 0.56  # percent of the bar that one letter needs
LABELS: Final = 6.5  # percent that the line with the number needs
DEEP: Final = 12  # indents that the style sheet knows
ROWS: Final = 2000  # spans drawn of one trace


@dataclass(frozen=True, slots=True)
class Segment:
    """One coloured piece of a bar; x and width in percent of the bar's box."""

    name: str
    us: float
    x: float
    width: float

    @property
    def css(self) -> str:
        """Its class in the style sheet."""
        return palette.css(self.name)

    @property
    def word(self) -> str:
        """What is written on it: the stage without its leg."""
        word = palette.bare(self.name)
        return word if self.width >= max(LABELS, LABEL * len(word)) else ""


def index(requests: Sequence[Request], wanted: Wanted, models: Sequence[str]) -> str:
    """The list of requests with its percentiles."""
    longest = max((each.ttft_us for each in requests), default=0)
    return _render(
        "index.html",
        requests=requests,
        longest=longest,
        summary=summarize(requests),
        wanted=wanted,
        models=models,
        roles=stages.ROLES,
    )


def trace(found: Trace) -> str:
    """One trace: each of its requests, its legs, and the waterfall of all its spans."""
    return _render("trace.html", trace=found)


def missing(trace_id: str) -> str:
    """The page for a trace that is not stored."""
    return _render("missing.html", trace_id=trace_id)


def document(
    title: str, summary: Summary, entries: Sequence[tuple[Request, Trace, str, float | None]]
) -> str:
    """A file of its own, nothing loaded: entries are (request, trace, kind, client's TTFT in ms)."""
    return _render(
        "document.html",
        title=title,
        summary=summary,
        entries=entries,
        longest=max((each.ttft_us for each, *_ in entries), default=0),
        sheet=Markup(_static("style.css") + palette.sheet()),  # ours, no data in it
        script=Markup(_static("page.js")),
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


def segments(parts: dict[str, int], rest: int, box: float) -> list[Segment]:
    """The stages of one request as a bar in a box of `box` microseconds, the remainder last."""
    ordered: list[tuple[str, float]] = sorted(
        parts.items(), key=lambda part: palette.order(part[0])
    )
    return list(_laid([*ordered, (stages.UNATTRIBUTED, rest)], box))


def mean(summary: Summary) -> list[Segment]:
    """The mean of every stage as one bar."""
    parts = [(line.name, line.mean * 1000) for line in summary.stages]
    return list(_laid(parts, summary.ttft.mean * 1000))


def lines(request: Request) -> list[tuple[str, int]]:
    """The stages of one request in order, for the sum below it."""
    return sorted(request.stages.items(), key=lambda part: palette.order(part[0]))


def waterfall(found: Trace) -> dict[str, Any]:
    """Rows, their window, and the ticks of its axis."""
    start, end = tree.window(found.spans)
    rows = tree.rows(found.spans)
    legs = {row.role for row in rows if row.what == "trunk" and row.role != "router"}
    last = max(span.end_ns for span in found.spans)
    return {
        "rows": rows[:ROWS],
        "legs": legs,
        "hidden": max(0, len(rows) - ROWS),
        "start": start,
        "us": (end - start) // 1000,
        "all": max(1, (last - start) // 1000),
        "services": list(dict.fromkeys((row.span.service, row.role) for row in rows)),
    }


def duration(us: float) -> str:
    """Microseconds for people: three or four digits that mean something."""
    if us < 1000:
        return f"{us:.0f} µs"
    if us < 100_000:
        return f"{us / 1000:.2f} ms"
    if us < 1_000_000:
        return f"{us / 1000:.1f} ms"
    return f"{us / 1e6:.2f} s"


def exact(us: float) -> str:
    """Milliseconds to the microsecond, so that a reader can add them up."""
    return f"{us / 1000:,.3f}"


def share(part: float, whole: float) -> float:
    """Percent, within its box."""
    return round(min(100.0, max(0.0, 100.0 * part / whole)), 3) if whole > 0 else 0.0


def legend() -> list[tuple[str, str, list[str]]]:
    """(kind, its words, its stages), every stage of the vocabulary once."""
    words = [word for word in palette.COLORS if word != stages.UNATTRIBUTED]
    groups = [
        (kind, says, [word for word in words if palette.kind(word) == kind])
        for kind, says in palette.KINDS.items()
    ]
    return [*groups, ("", "no mark accounts for it", [stages.UNATTRIBUTED])]


def _laid(parts: Iterable[tuple[str, float]], box: float) -> Iterable[Segment]:
    at = 0.0
    for name, us in parts:
        if us > 0:
            yield Segment(name, us, share(at, box), share(us, box))
        at += us


def _static(name: str) -> str:
    return (HERE / "static" / name).read_text("utf-8")


def _iso(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9, timezone.utc).isoformat(timespec="milliseconds")


def _clock(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9, timezone.utc).strftime("%H:%M:%S")


def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for call in (duration, exact, share, segments, mean, lines, waterfall, legend):
        made.globals[call.__name__] = call
    made.globals.update(
        palette=palette, version=__version__, iso=_iso, clock=_clock, kinds=KINDS, failed=ERROR
    )
    made.globals.update(deep=DEEP, UNATTRIBUTED=stages.UNATTRIBUTED)
    return made


_ENVIRONMENT: Final = _environment()


def _render(name: str, **values: Any) -> str:
    return _ENVIRONMENT.get_template(name).render(**values)
