# SPDX-License-Identifier: Apache-2.0
"""Cut the wait between a prefill instance's token and the decode instance's next one into stages.

A router's Record has its times; the spans are written in span_writer.py. Done here and not in the router,
where nobody asks for them: they would be 8 % of the interpreter's steps for such a request.
"""

from __future__ import annotations

import functools
from typing import Final

from ttft_otel.model import stages
from ttft_otel.model.intervals import PartitionCursor
from ttft_otel.model.leg_partition import place_leg
from ttft_otel.model.names import keys, span_names
from ttft_otel.model.record import Attributes, Handover, Piece, Record
from ttft_otel.model.timing import parse_server_timing

MAX_KEPT_NAMES: Final = 256
_EGRESS: Final = "router.egress"
_PIECES_BESIDE_STAGES: Final = 3  # of a call: routing, hop or back-off, and what is unattributed
_UNATTRIBUTED_TOTAL: Final = keys.name_handover_attribute(stages.UNATTRIBUTED)


def list_late_pieces(record: Record) -> list[Piece]:
    """Pieces of what came after the first token of `record`: those that it has, and those of its handover."""
    return [*record.late, *(cut_handover(record.handover) if record.handover else ())]


def count_late_pieces(record: Record) -> int:
    """How many list_late_pieces() gives, the most; without parsing anything."""
    return len(record.late) + (_count_handover_pieces(record.handover) if record.handover else 0)


def cut_handover(handover: Handover) -> list[Piece]:
    """Pieces of the wait, which add up to it like the stages of a TTFT: the whole first, then its steps."""
    start = handover.start
    cursor = PartitionCursor(start)
    for call in handover.calls:
        server_timing = parse_server_timing(call.server_timing)
        # The answer is a stream: its end is known, and asks no `rest` of the last call.
        place_leg(cursor, call, server_timing, handover.end, False)
    cursor.close_stage(_EGRESS, max(handover.end, cursor.position))
    totals: Attributes = {keys.HANDOVER_TOTAL_US: cursor.position - start}
    pieces = [Piece("late", span_names.HANDOVER, start, cursor.position, totals)]
    for stage, low, high in cursor.pieces:
        name, total_name, attributes = _name_step(stage, handover.is_token_repeated)
        # A stage may have several pieces.
        totals[total_name] = totals.get(total_name, 0) + high - low  # type: ignore[operator]
        pieces.append(Piece("step", name, low, high, attributes))
    totals.setdefault(_UNATTRIBUTED_TOTAL, 0)
    return pieces


def _count_handover_pieces(handover: Handover) -> int:
    entries = sum(call.server_timing.count(";") for call in handover.calls)
    # The whole and the egress besides.
    return 2 + entries + _PIECES_BESIDE_STAGES * len(handover.calls)


@functools.lru_cache(MAX_KEPT_NAMES)
def _name_step(stage: str, is_token_repeated: bool) -> tuple[str, str, Attributes]:
    """Names of a step of the wait and of its total, and its attributes."""
    # D generates P's token first: the last piece is a step of D, not the router's.
    name = span_names.FIRST_DECODE if is_token_repeated and stage == _EGRESS else stage
    return name, keys.name_handover_attribute(name), {keys.HANDOVER_STAGE: name}
