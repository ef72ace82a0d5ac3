# SPDX-License-Identifier: Apache-2.0
"""Which attributes the spans of a Record have, and which spans a router's handover adds to them.

span_writer.py writes them, its reference in tests builds the same; request_metrics.py makes labels of them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from ttft_otel.model import stages
from ttft_otel.model.intervals import PartitionCursor
from ttft_otel.model.leg_partition import place_leg
from ttft_otel.model.names import keys, span_names
from ttft_otel.model.record import Attributes, Call, Handover, HeldBy, Piece, Record, Server, Ttft
from ttft_otel.model.timing import parse_server_timing

MAX_CACHED_PARTS: Final = 4096  # names and encodings of each kind that are kept; about 1 MB
MAX_KEPT_NAMES: Final = 256
_EGRESS: Final = "router.egress"
_PIECES_BESIDE_STAGES: Final = 3  # of a call: routing, hop or back-off, and what is unattributed
_UNATTRIBUTED_TOTAL: Final = keys.name_handover_attribute(stages.UNATTRIBUTED)

_name_stage_attribute = lru_cache(MAX_CACHED_PARTS)(keys.name_stage_attribute)


def list_shared_attributes(record: Record) -> Attributes:
    """Attributes of all spans of the record."""
    return {keys.ROLE: record.role, keys.OUTERMOST: record.outermost}


def list_identity_attributes(record: Record, shared: Attributes) -> Attributes:
    """Attributes of both the server span and the `ttft` span. shared: list_shared_attributes() of it."""
    own: Attributes = shared | {keys.REQUEST_ID: record.request_id}
    if record.rank >= 0:
        own[keys.RANK] = record.rank
    return own | record.attributes


def list_stage_attributes(record: Record, shared: Attributes) -> Attributes:
    """Attributes of stage spans: also model and error, because metrics are made per span."""
    own = dict(shared)
    if keys.MODEL in record.attributes:
        own[keys.MODEL] = record.attributes[keys.MODEL]
    if record.ttft and record.ttft.error:
        own[keys.ERROR_TYPE] = record.ttft.error
    return own


def list_totals(ttft: Ttft) -> Attributes:
    """The complete partition as attributes of one span: backends cannot add up over child spans."""
    total = ttft.end - ttft.start
    totals: Attributes = {
        _name_stage_attribute(stage): length for stage, length in ttft.stages.items()
    }
    totals[keys.UNATTRIBUTED_US] = ttft.unattributed
    totals[keys.CLAMPED_US] = ttft.clamped
    totals[keys.TOTAL_US] = total
    if ttft.error:
        totals[keys.ERROR_TYPE] = ttft.error
    elif ttft.name == span_names.TTFT and ttft.attributes.get(keys.STREAMING):
        totals[keys.TIME_TO_FIRST_CHUNK] = total / 1e6  # by convention of streams; ours is on all
    if ttft.died:
        totals[keys.DIED_IN] = ttft.died
    return totals


def list_outcome(http: Server | Call) -> Attributes:
    """Status code and `error.type`; by the HTTP conventions a server fails from 500, a client from 400."""
    attributes: Attributes = {}
    if http.status:
        attributes[keys.HTTP_STATUS] = http.status
    error = http.error
    if not error and http.status >= (400 if isinstance(http, Call) else 500):
        error = str(http.status)
    if error:
        attributes[keys.ERROR_TYPE] = error
    return attributes


def list_kind_attributes(kind: str, name: str) -> Attributes:
    """`ttft.stage` or `ttft.part` of a piece, and its leg on a router's stage."""
    if kind == "stage":
        leg = "" if name in stages.ROUTER_STAGES else stages.split_stage(name)[0]
        found: Attributes = {keys.STAGE: name}
        return found | {keys.LEG: leg} if leg else found
    return {keys.PART: name} if kind == "part" else {}


def list_holder_attributes(holder: HeldBy) -> Attributes:
    return {
        keys.HELD_BY_US: holder.us,
        keys.HELD_BY_TOKENS: holder.tokens,
        keys.HELD_BY_KIND: holder.kind,
        keys.HELD_BY_REQUEST_ID: holder.request_id,
    }


def list_late_pieces(record: Record) -> list[Piece]:
    """Pieces of what came after the first token of `record`: those that it has, and those of its handover."""
    return [*record.late, *(cut_handover(record.handover) if record.handover else ())]


def count_late_pieces(record: Record) -> int:
    """How many list_late_pieces() gives, the most; without parsing anything."""
    return len(record.late) + (_count_handover_pieces(record.handover) if record.handover else 0)


def cut_handover(handover: Handover) -> list[Piece]:
    """Pieces of the wait between a prefill instance's token and the decode instance's next one.

    The whole first, then its steps, which add up to it like the stages of a TTFT. Cut here and not in the
    router, where nobody asks for them: they would be 8 % of the interpreter's steps for such a request.
    """
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


@lru_cache(MAX_KEPT_NAMES)
def _name_step(stage: str, is_token_repeated: bool) -> tuple[str, str, Attributes]:
    """Names of a step of the wait and of its total, and its attributes."""
    # The decode instance generates the prefill instance's token first: the last piece is a step of it.
    name = span_names.FIRST_DECODE if is_token_repeated and stage == _EGRESS else stage
    return name, keys.name_handover_attribute(name), {keys.HANDOVER_STAGE: name}
