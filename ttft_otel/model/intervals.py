# SPDX-License-Identifier: Apache-2.0
"""Intervals (name or code, start, end): cut by a cursor, nested ones made disjoint, a long tail merged.
Pure; breakdown.py moves the cursor from mark to mark, and passes a worker's intervals.
"""

from __future__ import annotations

from ttft_otel.model.stages import UNATTRIBUTED


class PartitionCursor:
    """Walks from mark to mark; all time before `position` is already attributed to a stage."""

    __slots__ = ("position", "clamped", "is_open", "pieces", "limit")

    def __init__(self, start: int, limit: int = 0) -> None:
        """`limit`: no mark can lie after it; 0: unknown."""
        self.position = start
        self.limit = limit
        self.is_open = False
        self.clamped = 0
        self.pieces: list[tuple[str, int, int]] = []

    def close_stage(self, stage: str, mark: int) -> None:
        """End `stage` at `mark`; with 0 the interval stays open until the next mark (unattributed).

        A mark after the limit is treated as missing: it is of a clock that is not ours.
        """
        if not mark or 0 < self.limit < mark:
            self.is_open = True
            return
        if self.is_open:
            stage = UNATTRIBUTED
            self.is_open = False
        position = self.position
        if mark > position:
            pieces = self.pieces
            # One span, not two that touch: neighbouring lost intervals are one of unknown stage.
            if pieces and pieces[-1][0] == stage:
                pieces[-1] = (stage, pieces[-1][1], mark)
            else:
                pieces.append((stage, position, mark))
            self.position = mark
        else:
            # Times of two processes, or of a device, may overlap a little: the sum stays exact.
            self.clamped += position - mark


def flatten_intervals(pairs: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Make nested intervals disjoint; the inner one wins (V1's runner saves inside the encoder call)."""
    if len(pairs) < 2:  # a prompt's forward alone: most steps
        return pairs
    flat: list[tuple[int, int, int]] = []
    # Of intervals with the same start the longer one comes first: it is the outer one.
    for code, start, stop in sorted(pairs, key=lambda pair: (pair[1], -pair[2])):
        if flat and start < flat[-1][2]:
            outer, first, end = flat.pop()
            if start > first:
                flat.append((outer, first, start))
            flat.append((code, start, min(stop, end)))
            if stop < end:
                flat.append((outer, stop, end))
        else:
            flat.append((code, start, stop))
    return flat


def merge_tail_pieces(pieces: list[tuple[str, int, int]], kept: int) -> list[tuple[str, int, int]]:
    """Bound the number of spans: pieces after the first `kept` are merged to one per stage, end to end."""
    merged, tail = pieces[:kept], pieces[kept:]
    lengths: dict[str, int] = {}
    for label, low, high in tail:
        lengths[label] = lengths.get(label, 0) + high - low
    position = tail[0][1]
    for label, length in lengths.items():
        merged.append((label, position, position + length))
        position += length
    return merged
