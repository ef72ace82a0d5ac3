# SPDX-License-Identifier: Apache-2.0
"""One place in the bar and one colour for every stage, the same on page, terminal and export.

The hue says the kind (host, work, move, wait), the shade the stage; the words come from stages.py.
"""

from __future__ import annotations

from typing import Final

from ttft_otel import stages

# Mid-tones, readable on white and on near-black alike.
COLORS: Final[dict[str, str]] = {
    "receive": "#94a3b8",
    "dispatch": "#7587a0",
    "egress": "#5d7089",
    "router.receive": "#b3bfcf",
    "router.tokenize": "#a78bda",
    "router.lookup": "#4cc3d9",
    "router.route": "#8796ac",
    "router.egress": "#64748b",
    "preprocess": "#c084fc",
    "encoder.compute": "#8b5cf6",
    "prefill.compute": "#5b5bf0",
    "sample": "#a33bd6",
    "ipc": "#5fd4e6",
    "ec.transfer": "#14b8c4",
    "kv.transfer": "#0e9488",
    "output": "#38bd8f",
    "router.hop": "#0a8fb8",
    "encoder.queue": "#fcc63d",
    "prefill.queue": "#f59e0b",
    "prefill.stall": "#ea6a12",
    "router.retry": "#e0403a",
    stages.UNATTRIBUTED: "#9a9a9a",
}
KINDS: Final[dict[str, str]] = {
    "work": "computing",
    "wait": "waiting",
    "move": "moving data",
    "host": "host code",
}
ROUTER_KINDS: Final[dict[str, str]] = {
    "router.receive": "host",
    "router.tokenize": "work",
    "router.lookup": "move",
    "router.route": "host",
    "router.retry": "wait",
    "router.hop": "move",
    "router.egress": "host",
}
# Hues that no stage has: a square is a server, a circle a stage.
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
_TURN: Final[dict[str, int]] = {role: turn for turn, role in enumerate(stages.ROLES)}
_FIRST: Final = (
    *("router.receive", "router.tokenize", "router.lookup"),
    *("router.route", "router.retry"),
)


def bare(name: str) -> str:
    """The vocabulary's word: `encode.preprocess` -> preprocess, `router.hop.x` -> router.hop."""
    if name in stages.ROUTER:  # `router.receive` is a stage of its own, not a leg's `receive`
        return name
    word = stages.split(name)[1]
    return "router.hop" if word.startswith("router.hop.") else word


def leg(name: str) -> str:
    """The leg that a full stage name belongs to; "" when it is the server's or the router's own."""
    if name.startswith("router.hop."):
        return name.removeprefix("router.hop.")
    return "" if name in stages.ROUTER else stages.split(name)[0]


def kind(name: str) -> str:
    """host, work, move or wait; "" for what is unattributed."""
    word = bare(name)
    if word in stages.BY_NAME:
        return stages.BY_NAME[word].kind
    return ROUTER_KINDS.get(word, "")


def color(name: str) -> str:
    """The stage's colour, for screens that know no style sheet."""
    return COLORS.get(bare(name), COLORS[stages.UNATTRIBUTED])


def says(name: str) -> str:
    """The vocabulary's sentence about a stage."""
    word = bare(name)
    if word in stages.BY_NAME:
        return stages.BY_NAME[word].says
    return stages.ROUTER.get(word, "What no mark accounts for.")


def css(name: str) -> str:
    """The stage's class in the style sheet; unknown words share one."""
    word = bare(name)
    return "s-" + (word if word in COLORS else stages.UNATTRIBUTED).replace(".", "-")


def order(name: str) -> tuple[int, int, int]:
    """Sort key: the critical path's order, legs one after the other, the remainder last."""
    word = bare(name)
    if word in _FIRST:
        return (0, 0, _FIRST.index(word))
    if word == "router.egress":
        return (2, 0, 0)
    if word == stages.UNATTRIBUTED:
        return (3, 0, 0)
    side = leg(name)
    turn = _TURN.get(side, len(_TURN))
    if word == "router.hop":
        return (1, turn, -1)
    if side == "encode" and word == "ec.transfer":
        word = "encoder.compute"  # an encoder's transfer is the save behind its run
    place = 2 * stages.NAMES.index(word) if word in stages.NAMES else 99
    place += bare(name) != word
    return (1, turn, place)


def sheet() -> str:
    """The colours as a style sheet: one class per stage, one per role."""
    lines = [f".{css(word)}{{fill:{hue};background-color:{hue}}}" for word, hue in COLORS.items()]
    lines.append(f"rect.s-{stages.UNATTRIBUTED}{{fill:url(#hatch)}}")
    lines += [
        f".r-{role}{{fill:{hue};background-color:{hue}}}" for role, hue in ROLE_COLORS.items()
    ]
    return "\n".join(lines) + "\n"
