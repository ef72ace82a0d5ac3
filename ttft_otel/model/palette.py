# SPDX-License-Identifier: Apache-2.0
"""The colour of every stage, the same on pages, in the terminal and in exported files.

The hue stands for the kind (host, work, move, wait), the shade for the stage.
"""

from __future__ import annotations

from typing import Final

from ttft_otel.model import stages

STAGE_COLORS: Final[dict[str, str]] = {
    **{stage.name: stage.color for stage in stages.STAGES},
    **{stage.name: stage.color for stage in stages.ROUTER_STAGES.values()},
    stages.UNATTRIBUTED: "#9a9a9a",
}
KIND_LABELS: Final[dict[str, str]] = {
    "work": "computing",
    "wait": "waiting",
    "move": "moving data",
    "host": "host code",
}
# Hues that no stage has. In legends a square is a server, a circle a stage.
ROLE_COLORS: Final[dict[str, str]] = {
    "router": "#6b7c93",
    "encode": "#db2777",
    "prefill": "#b45309",
    "decode": "#15803d",
    "prefill_decode": "#2563eb",
    "mono": "#4d7c0f",
}
ROLE_SHORT: Final[dict[str, str]] = {
    "router": "R",
    "encode": "E",
    "prefill": "P",
    "decode": "D",
    "prefill_decode": "PD",
    "mono": "mono",
}


def find_color(name: str) -> str:
    """The stage's colour as #rrggbb, for outputs without style sheets; grey when `name` is unknown."""
    return STAGE_COLORS.get(stages.strip_leg(name), STAGE_COLORS[stages.UNATTRIBUTED])


def get_css_class(name: str) -> str:
    """The stage's class in the style sheet; unknown names share that of "unattributed"."""
    word = stages.strip_leg(name)
    # A dot in a class name would begin another class in CSS.
    return "s-" + (word if word in STAGE_COLORS else stages.UNATTRIBUTED).replace(".", "-")


def build_style_sheet() -> str:
    """The colours as a style sheet: one class per stage, one per role."""
    lines = [
        f".{get_css_class(word)}{{fill:{hue};background-color:{hue}}}"
        for word, hue in STAGE_COLORS.items()
    ]
    # Hatched as well: grey alone is hard to tell from a stage's grey.
    lines.append(f"rect.s-{stages.UNATTRIBUTED}{{fill:url(#hatch)}}")
    lines += [
        f".r-{role}{{fill:{hue};background-color:{hue}}}" for role, hue in ROLE_COLORS.items()
    ]
    return "\n".join(lines) + "\n"
