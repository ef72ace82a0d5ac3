# SPDX-License-Identifier: Apache-2.0
"""Which stage works on which vLLM release: compat.py fills these rows, people read the tables. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ttft_otel.hooks.targets import TARGETS
from ttft_otel.stages import UNATTRIBUTED

Sample = dict[str, int]

# place of the delay -> the stage it must show in, by the kind of request that passes there.
PLACES: Final[dict[str, dict[str, str]]] = {
    "text": {
        "receive": "receive",
        "tokenize": "preprocess",
        "ipc": "ipc",
        "queue": "prefill.queue",
        "dispatch": "dispatch",
        "forward": "prefill.compute",
        "sample": "sample",
        "output": "output",
        "egress": "egress",
    },
    "image": {"multimodal": "preprocess", "encoder": "encoder.compute"},
}
EXPECTED: Final[dict[str, str]] = {
    place: stage for places in PLACES.values() for place, stage in places.items()
}
WORKS: Final = "works"
WRONG: Final = "wrong"
ABSENT: Final = "not tried"  # the delay found no place to wait in


@dataclass(frozen=True, slots=True)
class Cell:
    """One place on one release: the state, and how far every stage moved (ms)."""

    state: str
    note: str = ""
    moved: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Row:
    """One release. closes: kind of request -> "" or why it did not close; missing: the ledger's.

    left: kind of request -> its unattributed milliseconds, with nothing injected.
    """

    version: str
    closes: Mapping[str, str]
    cells: Mapping[str, Cell]
    missing: Mapping[str, str]
    complaints: Sequence[str] = ()
    left: Mapping[str, float] = field(default_factory=dict)

    @property
    def closed(self) -> bool:
        """Whether every kind of request closed."""
        return bool(self.closes) and not any(self.closes.values())


def moved(plain: Sequence[Sample], changed: Sequence[Sample]) -> dict[str, float]:
    """How far each stage's median moved, ms; a stage that a request lacks is 0 there."""
    keys = {key for sample in (*plain, *changed) for key in sample}
    return {key: (_median(changed, key) - _median(plain, key)) / 1000 for key in sorted(keys)}


def judge(
    shift: Mapping[str, float],
    stage: str,
    delay: float,
    tolerance: float,
    missing: Mapping[str, str],
) -> Cell:
    """Where the delay went: into its stage, into what is unattributed, or somewhere wrong."""
    strays = {name: ms for name, ms in shift.items() if name != stage and abs(ms) > tolerance}
    if abs(shift.get(stage, 0.0) - delay) <= tolerance and not strays:
        return Cell(WORKS, f"{shift[stage]:+.1f} ms", shift)
    if abs(shift.get(UNATTRIBUTED, 0.0) - delay) <= tolerance:
        return Cell(UNATTRIBUTED, culprits(stage, missing), shift)
    went = ", ".join(f"{name} {ms:+.1f}" for name, ms in strays.items()) or "nowhere"
    return Cell(WRONG, f"{stage} {shift.get(stage, 0.0):+.1f} ms; {went}", shift)


def culprits(stage: str, missing: Mapping[str, str]) -> str:
    """The missing targets without which a stage is unattributed, as the ledger knows them."""
    rows = [row for row in TARGETS if stage in row.lost and missing.get(row.name)]
    return "; ".join(f"{row.name}: {missing[row.name]}" for row in rows) or "no target is missing"


def markdown(rows: Sequence[Row]) -> str:
    """A table for the README: stages down, releases across."""
    head = ["stage (delay injected at)", *(f"vLLM {row.version}" for row in rows)]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for kind in ("text", "image"):
        cells = [_closing(row, kind) for row in rows]
        lines.append(f"| {kind} request | {' | '.join(cells)} |")
    for place, stage in EXPECTED.items():
        cells = [_word(row.cells.get(place, Cell(ABSENT))) for row in rows]
        lines.append(f"| `{stage}` ({place}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def remarks(rows: Sequence[Row]) -> list[str]:
    """What a cell has no room for: one sentence each."""
    found = []
    for row in rows:
        found += [f"{row.version}: {kind}: {why}" for kind, why in row.closes.items() if why]
        found += [f"{row.version}: missing {what} ({name})" for name, what in row.missing.items()]
        found += [
            f"{row.version}: {place}: {cell.state}: {cell.note}"
            for place, cell in row.cells.items()
            if cell.state != WORKS
        ]
        found += [f"{row.version}: log: {line}" for line in row.complaints]
    return found


def _closing(row: Row, kind: str) -> str:
    if row.closes.get(kind, "?"):
        return "**open**"
    left = row.left.get(kind, 0.0)
    return f"closes, {left:.3f} ms unattributed" if left else "closes"


def _word(cell: Cell) -> str:
    return "✓" if cell.state == WORKS else cell.state


def _median(samples: Sequence[Sample], key: str) -> float:
    return statistics.median(sample.get(key, 0) for sample in samples)
