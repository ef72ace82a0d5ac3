# SPDX-License-Identifier: Apache-2.0
"""Draw docs/img/architecture.svg: the processes and what flows between them, folders and their imports.

Imports are measured (room_imports.py); the processes are the two tables below. After a change:

    .venv/bin/python -m lab.architecture_picture
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

from lab import room_imports
from lab.room_imports import RoomImports

PICTURE: Final = Path(__file__).resolve().parents[1] / "docs" / "img" / "architecture.svg"
# Units of the SVG's viewBox; the docs scale the picture to their width.
WIDTH: Final = 1080
IMPORTS_TOP: Final = 420  # where the lower half begins
ROOM_HEIGHT = 26
ROOM_STEP = 38
ROOM_WIDTH = 150
OURS = "#e0e7ff"
OTHERS = "#f1f5f9"
UPWARD = "#dc2626"


@dataclass(frozen=True, slots=True)
class ProcessBox:
    """One process: where it is drawn, its name, and a second line with what it does."""

    key: str
    x: int
    y: int
    title: str
    detail: str
    is_ours: bool = False
    width: int = 150
    height: int = 52


@dataclass(frozen=True, slots=True)
class DataFlow:
    """An arrow between two processes.

    source, target: keys of ProcessBox. label: what is sent. answer: what comes back on the same way.
    label_at: x and y of the label's centre in the picture's units; None puts it half-way.
    """

    source: str
    target: str
    label: str
    answer: str = ""
    label_at: tuple[int, int] | None = None


# By hand: processes and what they exchange cannot be read from imports, as folders can.
PROCESSES: Final = (
    ProcessBox("client", 20, 60, "client", "or ttft-otel bench", width=130),
    ProcessBox("router", 225, 60, "router", "ttft-otel router", True, 140),
    ProcessBox("api", 530, 60, "API server", "asgi, recorder", width=130),
    ProcessBox("core", 730, 60, "engine core", "scheduler hooks", width=130),
    ProcessBox("worker", 930, 60, "worker", "model runner hooks", width=130),
    ProcessBox("router_exporter", 225, 190, "exporter child", "records to spans", True, 140),
    ProcessBox("api_exporter", 525, 190, "exporter child", "records to spans", True, 140),
    ProcessBox("serve", 215, 320, "ttft-otel serve", "receiver, SQLite, page", True, 160),
    ProcessBox("collector", 525, 320, "collector", "span metrics, sampling", width=160),
    ProcessBox("tempo", 765, 285, "Tempo", "traces", width=110, height=44),
    ProcessBox("prometheus", 765, 350, "Prometheus", "metrics", width=110, height=44),
    ProcessBox("grafana", 950, 317, "Grafana", "dashboards", width=110, height=44),
)
# Labels that would lie on a line or on another label have a place of their own.
FLOWS: Final = (
    DataFlow("client", "router", "HTTP", "answer"),
    DataFlow("router", "api", "HTTP, x-ttft-timing", "Server-Timing"),
    DataFlow("api", "core", "ZMQ", "marks"),
    DataFlow("core", "worker", "step", "marks"),
    DataFlow("router", "router_exporter", "records", label_at=(330, 152)),
    DataFlow("api", "api_exporter", "records", label_at=(630, 152)),
    DataFlow("router_exporter", "serve", "OTLP", label_at=(275, 290)),
    DataFlow("router_exporter", "collector", "or OTLP", label_at=(415, 258)),
    DataFlow("api_exporter", "serve", ""),
    DataFlow("api_exporter", "collector", "OTLP", label_at=(622, 284)),
    DataFlow("collector", "tempo", "OTLP"),
    DataFlow("collector", "prometheus", "OTLP"),
    DataFlow("grafana", "tempo", "TraceQL", label_at=(925, 306)),
    DataFlow("grafana", "prometheus", "PromQL", label_at=(925, 376)),
)
SERVER_FRAME: Final = (510, 20, 562, 104)  # x, y, width, height around a vLLM server's processes


def draw_text(x: float, y: float, text: str, style: str = "") -> str:
    """One line of text; `style` is a class of the style sheet."""
    # Escaped: "<" in a label would end the picture.
    return f'<text x="{x:g}" y="{y:g}" class="{style}">{escape(text)}</text>'


def draw_box(box: ProcessBox) -> Iterator[str]:
    """A process with its two lines."""
    fill = OURS if box.is_ours else OTHERS
    yield (
        f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="6" '
        f'fill="{fill}" stroke="#475569"/>'
    )
    middle = box.x + box.width / 2
    yield draw_text(middle, box.y + box.height / 2 - 4, box.title, "b")
    yield draw_text(middle, box.y + box.height / 2 + 13, box.detail, "s")


def find_border(box: ProcessBox, other: ProcessBox) -> tuple[float, float]:
    """The middle of the side of `box` that faces `other`."""
    if box.x + box.width <= other.x or other.x + other.width <= box.x:
        # Boxes of one row are joined side by side, others from below to above.
        if abs(box.y - other.y) < 100:
            side = box.width if box.x < other.x else 0
            return box.x + side, box.y + box.height / 2
    below = box.height if box.y < other.y else 0
    # Off the middle, so that two arrows from one box do not begin at the same point.
    shift = 20 if other.x > box.x + box.width else -20 if other.x + other.width < box.x else 0
    return box.x + box.width / 2 + shift, box.y + below


def draw_flow(flow: DataFlow, boxes: dict[str, ProcessBox]) -> Iterator[str]:
    """An arrow with its label above and what comes back below."""
    x1, y1 = find_border(boxes[flow.source], boxes[flow.target])
    x2, y2 = find_border(boxes[flow.target], boxes[flow.source])
    start = ' marker-start="url(#head)"' if flow.answer else ""
    yield (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" '
        f'stroke="#475569" marker-end="url(#head)"{start}/>'
    )
    x, y = flow.label_at or ((x1 + x2) / 2, (y1 + y2) / 2 - 7)
    yield draw_text(x, y, flow.label, "s")
    if flow.answer:
        yield draw_text(x, y + 20, flow.answer, "s")


def draw_processes() -> Iterator[str]:
    """The upper half."""
    boxes = {box.key: box for box in PROCESSES}
    x, y, width, height = SERVER_FRAME
    yield draw_text(20, 24, "Processes", "h")
    yield (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="10" '
        f'fill="none" stroke="#94a3b8" stroke-dasharray="5 4"/>'
    )
    yield draw_text(
        x + width / 2, y + 22, "vLLM server (one, or several: encode, prefill, decode)", "s"
    )
    # Arrows first: boxes are drawn over their ends.
    for flow in FLOWS:
        yield from draw_flow(flow, boxes)
    for box in PROCESSES:
        yield from draw_box(box)
    yield draw_text(890, 160, "KV blocks and encodings travel between servers' workers", "s")


def draw_arc(x: float, top: float, bottom: float, files: int, upward: bool) -> str:
    """One import arrow beside the column of folders: right of it, or left if it is against the order."""
    # Longer arcs reach further out, so that they do not lie on shorter ones.
    bulge = (20 + abs(bottom - top) * 0.42) * (-1 if upward else 1)
    style = UPWARD if upward else "#4f46e5"
    # At most 5 units: a folder that every file imports would hide its neighbours.
    width = min(1 + files * 0.22, 5)
    return (
        f'<path d="M{x:g},{top:g} C{x + bulge:g},{top:g} {x + bulge:g},{bottom:g} {x:g},{bottom:g}" '
        f'fill="none" stroke="{style}" stroke-opacity="0.55" stroke-width="{width:g}" '
        f'marker-end="url(#small)"/>'
    )


def draw_rooms(x: int, title: str, rooms: Sequence[str], imports: RoomImports) -> Iterator[str]:
    """A column of folders and their imports, from the top of the lower half."""
    yield draw_text(x, IMPORTS_TOP + 20, title, "h")
    first = IMPORTS_TOP + 44
    middles = {
        room: first + place * ROOM_STEP + ROOM_HEIGHT / 2 for place, room in enumerate(rooms)
    }
    left = x + 60  # room for arrows against the order
    # Sorted: the same imports give the same file, which a test compares.
    for (source, target), files in sorted(imports.items()):
        upward = middles[target] < middles[source]
        side = left if upward else left + ROOM_WIDTH
        # Arrows leave in the lower third of a box and arrive in the upper one.
        offset = -6 if upward else 6
        yield draw_arc(side, middles[source] + offset, middles[target] - offset, files, upward)
    for room, middle in middles.items():
        yield (
            f'<rect x="{left}" y="{middle - ROOM_HEIGHT / 2:g}" width="{ROOM_WIDTH}" '
            f'height="{ROOM_HEIGHT}" rx="5" fill="{OURS}" stroke="#475569"/>'
        )
        yield draw_text(left + ROOM_WIDTH / 2, middle + 5, room, "b")


def draw_architecture() -> str:
    """The whole picture, as SVG."""
    package_rooms = list(room_imports.PACKAGE_ROOMS)
    router_rooms = list(room_imports.list_router_rooms())
    longest = max(len(package_rooms), len(router_rooms))
    height = IMPORTS_TOP + 44 + longest * ROOM_STEP + 30
    body = (
        *draw_processes(),
        *draw_rooms(
            20, "Folders of ttft_otel/", package_rooms, room_imports.count_package_imports()
        ),
        *draw_rooms(
            560, "Parts of ttft_otel/router/", router_rooms, room_imports.count_router_imports()
        ),
        draw_text(
            WIDTH / 2,
            height - 12,
            "Right: imports, as wide as files that have one. Left, red: imports against the order.",
            "s",
        ),
    )
    return "\n".join((f"<svg {HEADER.format(width=WIDTH, height=height)}", *body, "</svg>\n"))


# Doubled braces are CSS's: the text goes through str.format().
HEADER: Final = """xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>Processes, folders and imports of ttft-otel</title>
<style>text {{ font: 13px sans-serif; fill: #0f172a; text-anchor: middle }}
.b {{ font-weight: 600 }} .s {{ font-size: 11px; fill: #334155 }}
.h {{ font-size: 15px; font-weight: 600; text-anchor: start }}</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"
 orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" fill="#475569"/></marker>
<marker id="small" viewBox="0 0 8 8" refX="7" refY="4" markerUnits="userSpaceOnUse" markerWidth="9"
 markerHeight="9" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#334155"/></marker></defs>
<rect width="{width}" height="{height}" fill="#ffffff"/>"""


def main() -> int:
    """Write the picture; says where."""
    PICTURE.write_text(draw_architecture(), "utf-8")
    sys.stdout.write(f"{PICTURE}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
