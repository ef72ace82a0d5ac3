# SPDX-License-Identifier: Apache-2.0
"""HOT: spans that end after the answer: KV blocks and encodings that an instance keeps for another
one, and an encoder that still ran.

When a response has ended, asgi.py asks the engine core how long that was. The answer comes once it is
over, which is after the request's own record was sent: the span has its own record.
"""

from __future__ import annotations

from typing import Final

from ttft_otel.model.names import keys, span_names
from ttft_otel.model.record import Attributes, Piece
from ttft_otel.tracing import carrier, clock, recorder
from ttft_otel.tracing.handoff import RecordSender
from ttft_otel.tracing.request_trace import RequestTrace
from ttft_otel.tracing.roles import identity

# One call per kind: each is answered when its own data are gone.
KEPT_QUERIES = (
    (carrier.KEPT_BLOCKS_BIT, carrier.KEPT_BLOCKS_QUERY),
    (carrier.KEPT_ITEMS_BIT, carrier.KEPT_ITEMS_QUERY),
    (carrier.ENCODER_RUN_BIT, carrier.ENCODER_QUERY),
)
# Seconds before each further query about an encoder that still runs.
PENDING_PAUSES_S: Final = (0.05, 0.2, 1.0, 5.0)


def list_queries(trace: RequestTrace) -> list[str]:
    """The utility calls to make after the response of `trace`: one for each kind of data it keeps.

    Encodings are fetched only after an encoder's answer; a router's leg header may say that this
    request was not an encoder's.
    """
    kept_bits = trace.timeline.read_details().kept if trace.timeline is not None else 0
    # Metrics count nothing of what comes after the answer.
    if not kept_bits or not trace.context.sampled:
        return []
    if trace.leg not in ("", "encode"):  # "": without our router it may be an encoder's request
        kept_bits &= ~carrier.KEPT_ITEMS_BIT
    return [question for bit, question in KEPT_QUERIES if kept_bits & bit]


def send_kept_span(trace: RequestTrace, query: str, answer: str, sender: RecordSender) -> bool:
    """Send the span described by the engine core's `answer`; False when it describes none.

    query: the utility call that was answered, one of KEPT_QUERIES.
    """
    piece = PIECE_MAKERS[query](trace, answer)
    if piece is not None:
        recorder.send_record(trace, sender, late=(piece,))
    return piece is not None


def _make_blocks_piece(trace: RequestTrace, answer: str) -> Piece | None:
    kept = carrier.decode_answer(carrier.KeptBlocks, answer)
    if kept is None:
        return None
    attributes: Attributes = {keys.KV_TOKENS: kept.tokens, keys.KV_BLOCKS: kept.blocks}
    if identity.kv_connector:
        attributes[keys.KV_CONNECTOR] = identity.kv_connector
    if kept.expired:
        attributes[keys.ERROR_TYPE] = "expired"
    return _make_piece(trace, span_names.KV_KEPT, kept.since, kept.until, attributes)


def _make_items_piece(trace: RequestTrace, answer: str) -> Piece | None:
    kept = carrier.decode_answer(carrier.KeptItems, answer)
    if kept is None:
        return None
    attributes: Attributes = {keys.EC_ITEMS: kept.items, keys.EC_BYTES: kept.bytes}
    if identity.ec_connector:
        attributes[keys.EC_CONNECTOR] = identity.ec_connector
    if kept.ready_at:
        attributes[keys.EC_READY_US] = max(0, kept.ready_at - kept.since)
    # An error: the encodings were made and nobody fetched them.
    if kept.end_reason:
        attributes[keys.ERROR_TYPE] = kept.end_reason
    return _make_piece(trace, span_names.EC_KEPT, kept.since, kept.until, attributes)


def _make_encoder_piece(trace: RequestTrace, answer: str) -> Piece | None:
    run = carrier.decode_answer(carrier.EncoderRun, answer)
    return (
        None if run is None else _make_piece(trace, span_names.ENCODER_RUN, run.start, run.end, {})
    )


def _make_piece(
    trace: RequestTrace, name: str, since: int, until: int, attributes: Attributes
) -> Piece | None:
    """The piece of a time in the engine core; None when it cannot be placed on our clock."""
    # Both marks are the engine core's; the offset was found with the request's own marks.
    start = since - trace.clock_offset - trace.arrive
    end = until - trace.clock_offset - trace.arrive
    known_end = clock.now_us() - trace.arrive  # the engine core has reported it, so it is over
    # Outside of what can be, beyond the clock's error: a wrong span is worse than none.
    if not -trace.clock_error <= start <= end <= known_end + trace.clock_error:
        return None
    return Piece("late", name, max(0, start), min(end, known_end), attributes)


PIECE_MAKERS: Final = {
    carrier.KEPT_BLOCKS_QUERY: _make_blocks_piece,
    carrier.KEPT_ITEMS_QUERY: _make_items_piece,
    carrier.ENCODER_QUERY: _make_encoder_piece,
}
