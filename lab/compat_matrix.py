# SPDX-License-Identifier: Apache-2.0
"""Evaluate which stage works on which vLLM release, and format the tables. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ttft_otel.hooks.targets import TARGETS
from ttft_otel.model.stages import UNATTRIBUTED

StageSample = dict[str, int]

# Kind of request -> place of an injected delay -> stage in which it has to show.
# Places are those of the `inject` guest; the encoder runs for images only.
PLACES_BY_KIND: Final[dict[str, dict[str, str]]] = {
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
EXPECTED_STAGES: Final[dict[str, str]] = {
    place: stage for places in PLACES_BY_KIND.values() for place, stage in places.items()
}
STATE_WORKS: Final = "works"
STATE_WRONG: Final = "wrong"
# The release lacks the function in which the delay would be injected.
STATE_NOT_TRIED: Final = "not tried"


@dataclass(frozen=True, slots=True)
class MatrixCell:
    """Result for one place on one release; moved: stage -> change of its median in ms."""

    state: str
    note: str = ""
    moved: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReleaseRow:
    """Results of one release.

    closes: kind of request -> "" when its stages add up to its TTFT, else why not.
    cells: by place of the delay. missing: target -> what of it the release lacks.
    complaints: our log lines. left: kind of request -> unattributed ms without any delay.
    """

    version: str
    closes: Mapping[str, str]
    cells: Mapping[str, MatrixCell]
    missing: Mapping[str, str]
    complaints: Sequence[str] = ()
    left: Mapping[str, float] = field(default_factory=dict)

    @property
    def closed(self) -> bool:
        """Whether the stages of every kind of request add up to its TTFT."""
        return bool(self.closes) and not any(self.closes.values())


def compute_stage_shifts(
    plain: Sequence[StageSample], changed: Sequence[StageSample]
) -> dict[str, float]:
    """Change of each stage's median from `plain` to `changed`, in ms; a missing stage counts as 0."""
    # Of all samples: a stage that is in one of them only has moved, too.
    keys = {key for sample in (*plain, *changed) for key in sample}
    return {
        key: (_compute_median(changed, key) - _compute_median(plain, key)) / 1000
        for key in sorted(keys)
    }


def judge_shift(
    shift: Mapping[str, float],
    stage: str,
    delay_ms: float,
    tolerance_ms: float,
    missing: Mapping[str, str],
) -> MatrixCell:
    """Judge whether a delay shows in its stage, in unattributed time, or elsewhere.

    shift: result of compute_stage_shifts(). stage: where it should show. missing: see ReleaseRow.
    """
    # A delay must show in its stage and nowhere else.
    strays = {name: ms for name, ms in shift.items() if name != stage and abs(ms) > tolerance_ms}
    if abs(shift.get(stage, 0.0) - delay_ms) <= tolerance_ms and not strays:
        return MatrixCell(STATE_WORKS, f"{shift[stage]:+.1f} ms", shift)
    # The second best result: time that is known to be missing, not wrongly named.
    if abs(shift.get(UNATTRIBUTED, 0.0) - delay_ms) <= tolerance_ms:
        return MatrixCell(UNATTRIBUTED, find_responsible_targets(stage, missing), shift)
    went = ", ".join(f"{name} {ms:+.1f}" for name, ms in strays.items()) or "nowhere"
    return MatrixCell(STATE_WRONG, f"{stage} {shift.get(stage, 0.0):+.1f} ms; {went}", shift)


def find_responsible_targets(stage: str, missing: Mapping[str, str]) -> str:
    """The `missing` targets without which `stage` is unattributed, for a cell's note."""
    rows = [row for row in TARGETS if stage in row.lost and missing.get(row.name)]
    # Without a missing target the cause is elsewhere, and the note must not hide that.
    return "; ".join(f"{row.name}: {missing[row.name]}" for row in rows) or "no target is missing"


def format_release_matrix(rows: Sequence[ReleaseRow]) -> str:
    """A table for docs/reference/releases.md: stages down, releases across."""
    head = ["stage (delay injected at)", *(f"vLLM {row.version}" for row in rows)]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for kind in ("text", "image"):
        cells = [_format_closing(row, kind) for row in rows]
        lines.append(f"| {kind} request | {' | '.join(cells)} |")
    for place, stage in EXPECTED_STAGES.items():
        # A kind that did not close was not tried any further, so its cells are missing.
        cells = [_format_state(row.cells.get(place, MatrixCell(STATE_NOT_TRIED))) for row in rows]
        lines.append(f"| `{stage}` ({place}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def list_remarks(rows: Sequence[ReleaseRow]) -> list[str]:
    """Sentences with details for which the table's cells have no space."""
    sentences = []
    for row in rows:
        sentences += [f"{row.version}: {kind}: {why}" for kind, why in row.closes.items() if why]
        sentences += [
            f"{row.version}: missing {missing_part} ({name})"
            for name, missing_part in row.missing.items()
        ]
        sentences += [
            f"{row.version}: {place}: {cell.state}: {cell.note}"
            for place, cell in row.cells.items()
            if cell.state != STATE_WORKS
        ]
        sentences += [f"{row.version}: log: {line}" for line in row.complaints]
    return sentences


def _format_closing(row: ReleaseRow, kind: str) -> str:
    if row.closes.get(kind, "?"):
        return "**open**"
    left = row.left.get(kind, 0.0)
    # Three decimals: a microsecond is the unit of all marks.
    return f"closes, {left:.3f} ms unattributed" if left else "closes"


def _format_state(cell: MatrixCell) -> str:
    return "✓" if cell.state == STATE_WORKS else cell.state


def _compute_median(samples: Sequence[StageSample], key: str) -> float:
    return statistics.median(sample.get(key, 0) for sample in samples)
