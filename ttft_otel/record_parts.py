# SPDX-License-Identifier: Apache-2.0
"""HOT: build the parts of a Record from a RequestTrace; recorder.py puts them together and sends them."""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

from ttft_otel import breakdown, carrier, media_items, names, stages
from ttft_otel.endpoints import OPERATION_BY_PATH
from ttft_otel.record import Attributes, Piece, Server, Ttft
from ttft_otel.request_trace import RequestTrace
from ttft_otel.roles import identity, resolve_role
from ttft_otel.wait_reasons import ReasonSlice

MAX_PARTS: Final = 64  # parts of stages that are kept of a request
MAX_REASON_PIECES: Final = 64  # of which the sums on the `ttft` span do not depend


def count_trace_items(trace: RequestTrace) -> media_items.ItemCounts | None:
    """Count the trace's media items by the source of their encodings; None without media items."""
    timeline = trace.timeline
    if timeline is None or not timeline.media:
        return None
    counts = media_items.count_items(timeline.media, timeline.complete, trace.encoded_before)
    consumer = identity.takes_encodings and resolve_role(trace) != "encode"
    return counts if consumer else counts._replace(remote=None, recomputed=None)


def list_identity_attributes(trace: RequestTrace) -> Attributes:
    """Attributes of both the server span and the `ttft` span."""
    attributes: Attributes = {
        names.OPERATION: OPERATION_BY_PATH.get(trace.path, "generate_content"),
        names.PROVIDER: names.PROVIDER_VLLM,
        names.STREAM: trace.streamed,
    }
    # The served name, not the body's `model`: that may be an alias, or any text.
    if identity.model:
        attributes[names.MODEL] = identity.model
        if trace.has_first_token:
            attributes[names.RESPONSE_MODEL] = identity.model
    host, port = trace.server
    if port is not None:  # a Unix socket has a path and no port
        attributes[names.SERVER_ADDRESS], attributes[names.SERVER_PORT] = host, port
    return attributes


def make_server(trace: RequestTrace) -> Server:
    """The server half of the record of `trace`, which has ended."""
    attributes: Attributes = {
        names.HTTP_METHOD: trace.method,
        names.URL_PATH: trace.path,
        names.URL_SCHEME: trace.scheme,
    }
    # Low cardinality, as HTTP's conventions ask: a path may hold an ID.
    if trace.route:
        attributes[names.HTTP_ROUTE] = trace.route
    name = f"{trace.method} {trace.route}" if trace.route else trace.method
    # By HTTP's conventions a 4xx is the client's error, not this server's.
    error = "" if 400 <= trace.status < 500 else trace.error
    return Server(name, trace.end - trace.arrive, trace.status, attributes, error)


def make_ttft(trace: RequestTrace, cut: breakdown.Breakdown) -> Ttft:
    """The `ttft` half of the record of `trace`, whose breakdown is `cut`."""
    base = trace.arrive
    pieces = _make_stage_pieces(cut)
    pieces += [
        Piece("part", name, low - base, high - base) for name, low, high in trace.parts[:MAX_PARTS]
    ]
    pieces += [
        Piece("sibling", names.SIBLING, max(0, engine.assign - base), engine.output - base)
        for engine in trace.engine_requests.values()
        if engine is not trace.first_output and engine.output
    ]
    return Ttft(
        span_id=trace.ttft_id,
        name=names.ENCODE if resolve_role(trace) == "encode" else names.TTFT,
        start=0,
        end=cut.end - base,
        stages=cut.stages,
        unattributed=cut.unattributed,
        clamped=cut.clamped,
        pieces=tuple(pieces),
        attributes=_list_ttft_attributes(trace, cut),
        error="" if trace.has_first_token else trace.error,
        died=trace.failed_stage,
    )


def _make_stage_pieces(cut: breakdown.Breakdown) -> list[Piece]:
    """The stages' pieces; of a waiting one with several reasons, a piece for each below it."""
    base = cut.start
    slices = deque(cut.reasons)
    pieces: list[Piece] = []
    below: list[Piece] = []
    for name, low, high in cut.pieces:
        inside = []
        # Slices come in the order of the pieces and fill each one: one pass pairs them.
        while slices and slices[0].stage == name and slices[0].end <= high:
            inside.append(slices.popleft())
        # The usual case has one reason: an attribute then saves a span.
        attributes = _name_reason(inside[0]) if len(inside) == 1 else {}
        pieces.append(Piece("stage", name, low - base, high - base, attributes))
        if len(inside) > 1:
            below += [
                Piece("reason", each.reason, each.start - base, each.end - base, _name_reason(each))
                for each in inside
            ]
    # Only these are cut here: breakdown.MAX_PIECES has bounded the stages' pieces.
    return pieces + below[:MAX_REASON_PIECES]


def _name_reason(part: ReasonSlice) -> Attributes:
    in_queue = part.stage in stages.QUEUE_STAGES
    return {names.QUEUE_REASON if in_queue else names.STALL_REASON: part.reason}


def _sum_reasons(cut: breakdown.Breakdown) -> Attributes:
    """Microseconds per reason: in queues they add up to the queues' stages, in stalls to the stall."""
    sums: Counter[str] = Counter()
    for part in cut.reasons:
        sums[names.name_reason_attribute(part.stage, part.reason)] += part.end - part.start
    return {key: length for key, length in sums.items()}


def _list_ttft_attributes(trace: RequestTrace, cut: breakdown.Breakdown) -> Attributes:
    attributes: Attributes = {names.STREAMING: trace.streamed, **_sum_reasons(cut)}
    if trace.timeline is None:
        return attributes
    if trace.timeline.blocks and identity.kv_connector:
        attributes[names.KV_CONNECTOR] = identity.kv_connector
    attributes |= carrier.list_timeline_attributes(trace.timeline, trace.clock_error)
    if trace.timeline.media:
        attributes |= media_items.list_item_attributes(
            count_trace_items(trace), identity.ec_connector
        )
    return attributes
