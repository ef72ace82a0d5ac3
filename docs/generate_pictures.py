# SPDX-License-Identifier: Apache-2.0
"""Draw how the TTFT is divided in each deployment, as docs/img/cut-*.svg: run it after a stage has changed.

A strip is a stretch of time, not to scale, whose segments add up to it. A numbered segment is another
process's sum, and the strip with that number below it shows its stages. The pictures bring their own
background, light or dark as the reader's system asks, so they can be read on any page.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from ttft_otel.model import stages

FOLDER = Path(__file__).parent / "img"
WIDTH, MARGIN, HEIGHT = 860, 16, 30  # of the picture, beside the strips, of a strip; pixels
CHARACTER, PADDING = 6.3, 8  # width of a character in a segment, and around its text; pixels
ROLES = {"encode": "encoder", "prefill": "prefill instance", "decode": "decode instance"} | {
    "prefill_decode": "prefill-decode instance",
}
FILLS = {"host": "#a9b6c8", "work": "#b9a2f7", "move": "#6fd3df", "wait": "#fbc34a"} | {
    "leg": "#d5deeb",
    "none": "none",
}
LEGEND = (
    ("wait", "waiting"),
    ("work", "computing"),
    ("move", "moving data"),
    ("host", "host code"),
)
STYLE = """<style>
.bg { fill: #ffffff; stroke: #d0d7de } .text { fill: #1f2937 } .soft { fill: #57606a }
.line { stroke: #57606a }
@media (prefers-color-scheme: dark) {
.bg { fill: #161b22; stroke: #30363d } .text { fill: #e6edf3 } .soft { fill: #9aa4af }
.line { stroke: #9aa4af }
}
</style>"""
Segment = tuple[str, str]  # text and kind


@dataclass(frozen=True)
class Strip:
    """A title, its segments, and below them which process measures which: (name, first, last)."""

    title: str
    segments: tuple[Segment, ...]
    processes: tuple[tuple[str, int, int], ...] = ()


def cut_server(*names: str) -> tuple[Segment, ...]:
    """Make a server's stages segments, in their order, in the colour of their kind."""
    return tuple((name, stages.STAGES_BY_NAME[name].kind) for name in names)


def cut_router(*legs: str) -> tuple[Segment, ...]:
    """Make the router's TTFT: its stages, and for each leg the hop and the leg's own sum."""
    segments = [("router.receive", "host"), ("router.route", "host")]
    for number, leg in enumerate(legs):
        segments += [(f"router.hop.{leg}", "move"), (f"{'①②③'[number]} {leg}.<stage>", "leg")]
    return (*segments, ("router.egress", "host"))


def explain_leg(number: int, role: str, *names: str) -> Strip:
    """Make the strip that a numbered segment stands for."""
    return Strip(f"{'①②③'[number]} {ROLES[role]}: its own sum", cut_server(*names))


PREPARE = ("receive", "preprocess", "ipc")
FINISH = ("output", "egress")
ENCODE = (*PREPARE, "encoder.queue", "dispatch", "ec.transfer", "encoder.compute", *FINISH)
PREFILL = ("prefill.queue", "dispatch", "prefill.compute", "sample", *FINISH)
PREFILL_MEDIA = ("prefill.queue", "dispatch", "ec.transfer", "prefill.compute", "sample", *FINISH)
DECODE = (
    *PREPARE,
    "prefill.queue",
    "kv.transfer",
    "dispatch",
    "prefill.compute",
    "sample",
    *FINISH,
)
MONO = (*PREPARE, "encoder.queue", "dispatch", "encoder.compute", "prefill.compute")
HANDOVER = ("ttft.handover: not in the TTFT", "none")

PICTURES = {
    "single-server": (
        Strip(
            "TTFT of a server, from the call of its application to its first chunk",
            cut_server(*MONO, "prefill.stall", "sample", *FINISH),
            (("API server", 0, 1), ("engine core", 2, 3), ("worker", 4, 8), ("API server", 9, 10)),
        ),
    ),
    "epd": (
        Strip("TTFT of the client, at the router", cut_router("encode", "prefill_decode")),
        explain_leg(0, "encode", *ENCODE),
        explain_leg(1, "prefill_decode", *PREPARE, *PREFILL_MEDIA),
    ),
    "prefill-decode": (
        Strip(
            "--first-token strip or continue: the client's TTFT ends with P's token",
            (*cut_router("prefill"), HANDOVER),
        ),
        Strip("--first-token off: it ends with D's", cut_router("prefill", "decode")),
        explain_leg(0, "prefill", *PREPARE, *PREFILL),
        explain_leg(1, "decode", *DECODE),
    ),
    "encode-prefill-decode": (
        Strip("TTFT of the client, at the router", cut_router("encode", "prefill")),
        explain_leg(0, "encode", *ENCODE),
        explain_leg(1, "prefill", *PREPARE, *PREFILL_MEDIA),
        Strip(
            "After P's token (--first-token strip or continue): the decode instance takes over",
            (HANDOVER,),
        ),
    ),
    "other-router": (
        Strip(
            "TTFT of the client: the servers' sums; what lies between them is in none",
            (
                ("ttft.before_us", "none"),
                ("① prefill: ttft", "leg"),
                ("unattributed", "none"),
                ("② decode: ttft, outermost", "leg"),
                ("not seen", "none"),
            ),
        ),
        explain_leg(0, "prefill", *PREPARE, *PREFILL),
        explain_leg(1, "decode", *DECODE),
    ),
}


def draw_text(x: float, y: float, text: str, style: str, size: float = 12) -> str:
    """Make a text element; `style` is further attributes."""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" {style}>{escape(text)}</text>'


def draw_strip(strip: Strip, top: float) -> list[str]:
    """Draw a strip over the full width, each segment as wide as its text needs and its share of the rest."""
    wanted = [len(text) * CHARACTER + PADDING for text, _ in strip.segments]
    more = (WIDTH - 2 * MARGIN - sum(wanted)) / len(wanted)
    assert more >= 0, f"too much text in a strip: {strip.title}"
    parts = [draw_text(MARGIN, top - 8, strip.title, 'class="text" font-weight="600"')]
    ends = [float(MARGIN)]
    for (text, kind), width in zip(strip.segments, wanted, strict=True):
        x, wide = ends[-1], width + more
        dashed = ' class="line" stroke-dasharray="4 3"' if kind == "none" else ' stroke="#ffffff"'
        box = f'x="{x + 0.5:.1f}" y="{top}" width="{wide - 1:.1f}" height="{HEIGHT}" rx="3"'
        parts.append(f'<rect {box} fill="{FILLS[kind]}"{dashed}/>')
        color = 'class="soft"' if kind == "none" else 'fill="#111827"'
        style = f'{color} text-anchor="middle" font-family="monospace"'
        parts.append(draw_text(x + wide / 2, top + HEIGHT / 2 + 4, text, style, 10.5))
        ends.append(x + wide)
    for name, first, last in strip.processes:
        left, right, y = ends[first] + 3, ends[last + 1] - 3, top + HEIGHT + 8
        parts.append(f'<path d="M{left:.1f} {y}H{right:.1f}" class="line"/>')
        style = 'class="soft" text-anchor="middle"'
        parts.append(draw_text((left + right) / 2, y + 15, name, style, 11))
    return parts


def draw_legend(y: float) -> list[str]:
    """Draw what the colours mean, and that lengths mean nothing."""
    parts, x = [], float(MARGIN)
    for kind, text in LEGEND:
        parts.append(
            f'<rect x="{x}" y="{y - 10}" width="12" height="12" rx="2" fill="{FILLS[kind]}"/>'
        )
        parts.append(draw_text(x + 18, y, text, 'class="soft"', 11))
        x += 36 + 6 * len(text)
    end = 'class="soft" text-anchor="end"'
    return [*parts, draw_text(WIDTH - MARGIN, y, "not to scale", end, 11)]


def draw(strips: tuple[Strip, ...]) -> str:
    """Draw a picture: strips below one another, then the legend."""
    parts, top = [], 40
    for strip in strips:
        parts += draw_strip(strip, top)
        top += HEIGHT + (62 if strip.processes else 34)
    height = top + 2
    parts += draw_legend(height - 16)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="system-ui, sans-serif">'
    )
    back = f'<rect class="bg" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>'
    return "\n".join((head, STYLE, back, *parts, "</svg>\n"))


def main() -> None:
    """Write the pictures."""
    for name, strips in PICTURES.items():
        (FOLDER / f"cut-{name}.svg").write_text(draw(strips), "utf-8")


if __name__ == "__main__":
    main()
