# SPDX-License-Identifier: Apache-2.0
"""HOT: state of one traced request, which role this server has for it, and the parts of its Record.

recorder.py, asgi.py and hooks/api_server.py fill RequestTrace; the last one fills `identity` from vLLM's
configuration. recorder.py puts the parts together and sends them. Whether a server's span is the request's
outermost one: docs/adr/013-outermost-behind-any-router.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ttft_otel.model import stages
from ttft_otel.model.breakdown import Breakdown
from ttft_otel.model.endpoints import OPERATION_BY_PATH
from ttft_otel.model.names import keys, span_names
from ttft_otel.model.record import Attributes, HeldBy, Piece, Server, Ttft
from ttft_otel.model.waits import WAIT_STAGES, HeldPiece, ReasonSlice
from ttft_otel.tracing import carrier
from ttft_otel.tracing.context import SAMPLED_FLAG, TraceContext, new_span_id, parse_traceparent


class EngineRequest(msgspec.Struct, eq=False, gc=False):
    """One engine request of an HTTP request (there are several for n > 1 or several prompts).

    Times are microseconds, 0: not yet.
    """

    #: It left the preprocessing.
    assign: int
    #: The engine core's serialized timeline.
    marks: str = ""
    #: Its first output came, and was processed.
    received: int = 0
    output: int = 0
    #: Its last output was processed; 0 for good where it was aborted.
    ended: int = 0
    #: Then what it made, -1 unknown, and vLLM's word for why it ended.
    output_tokens: int = 0
    finish_reason: str = ""
    #: Its end will be noticed.
    is_watched: bool = False


class RequestTrace(msgspec.Struct, eq=False, gc=False):
    """State of one traced request; times are microseconds of CLOCK_MONOTONIC, 0: not reached."""

    #: The ASGI call; of a direct one the call of the engine, or what its caller says.
    arrive: int
    context: TraceContext
    #: The caller asked for Server-Timing.
    timing_requested: bool
    #: The exporter counts it in metrics, also if it is not sampled.
    is_counted: bool = False
    #: Engine request ID -> end of its preprocessing.
    assign_times: dict[str, int] = {}
    timeline: carrier.EngineTimeline | None = None
    breakdown: Breakdown | None = None
    #: The engine core's clock minus this process's, estimated, and its error.
    clock_offset: int = 0
    clock_error: int = 0
    failed_stage: str = ""
    #: By the router's header: an encoder encoded some of its items.
    encoded_before: bool = False
    #: End of the response.
    end: int = 0
    #: Its response was sent, and is neither an error nor given up.
    is_answered: bool = False
    engine_requests: dict[str, EngineRequest] = {}
    error: str = ""
    first_output: EngineRequest | None = None
    #: The answer only says that the request is queued; its tokens are read by another one.
    is_background: bool = False
    #: The engine was called without HTTP: nothing of its answer is seen.
    is_direct: bool = False
    #: Then the engine that was called.
    direct_engine: Any = None
    #: Such a call hands over a stream of inputs: the headers with their parent, and whether an input's
    #: arrival time is when vLLM began to render it, not the caller's of the stream. This trace is not sent.
    session: tuple[list[tuple[bytes, bytes]], bool] | None = None
    #: It is one input of a session: its trace ends with its first output.
    is_input: bool = False
    #: Then how many earlier ones have not been answered to the end.
    inputs_before: int = 0
    #: Its engine requests are steps of a search, not generations.
    is_beam_search: bool = False
    #: The role that a router's header names, "" without one.
    leg: str = ""
    #: The role by its own transfer parameters, where vLLM's configuration does not decide it.
    request_role: str = ""
    #: This server's role for it, see roles.resolve_role(); "" before it is asked for.
    role: str = ""
    method: str = ""
    #: (name, start, end) of details inside stages.
    parts: list[tuple[str, int, int]] = []
    path: str = ""
    #: Start of the renderer.
    render: int = 0
    request_id: str = ""
    route: str = ""
    scheme: str = ""
    #: Address and port at which it arrived.
    server: tuple[str, int | None] = ("", None)
    #: `arrive` by the wall clock, once a record needs it.
    start_ns: int = 0
    status: int = 0
    streamed: bool = False
    ttft_sent: bool = False

    @property
    def is_unended(self) -> bool:
        """Whether vLLM has not reported the end of one of its engine requests."""
        for engine in self.engine_requests.values():  # any() takes three times as long for one
            if engine.is_watched and not engine.ended:
                return True
        return False

    @property
    def has_first_token(self) -> bool:
        """Whether a first output is there, and is not withheld by an error response (one prompt of
        several failed)."""
        return self.first_output is not None and self.status < 400


@dataclass(slots=True)
class ServerIdentity:
    """This server's role and connectors; filled from vLLM's configuration when it starts.

    role: "" where each request decides (kv_both, ec_both).
    default_role: then, the role of a request without transfer parameters.
    kv_connector, ec_connector: names of the KV and encoder-cache connectors, "" without one.
    takes_encodings: whether the encoder-cache connector takes encodings from other instances.
    is_known: whether a configuration was read.
    can_see_outputs: whether the hooks that notice a request's first output are installed; can_see_ends: and
    the one that notices its last.
    """

    role: str = ""
    default_role: str = "mono"
    model: str = ""
    kv_connector: str = ""
    ec_connector: str = ""
    takes_encodings: bool = False
    is_known: bool = False
    # Given by the hooks, because this module must not import them.
    can_see_outputs: Callable[[], bool] = lambda: True
    can_see_ends: Callable[[], bool] = lambda: True


# One per process and filled in place: modules hold it before the server's start fills it.
identity: Final = ServerIdentity()


def resolve_role(trace: RequestTrace) -> str:
    """The role of this server for one request; asked for once its parameters are read, and kept in the trace.

    vLLM's configuration decides; where it leaves the role open, the router's header, then the
    request's transfer parameters. A header also overrides `mono`, which is what a server without
    any connector looks like.
    """
    if not trace.role:
        # TTFT_OTEL_ROLE and connector roles are in `identity.role`.
        if identity.role and not (identity.role == "mono" and trace.leg):
            trace.role = identity.role
        else:
            trace.role = trace.leg or trace.request_role or identity.default_role
    return trace.role


def is_outermost(trace: RequestTrace) -> bool:
    """Whether the client gets its first token from this server, as far as the server can know.

    With an `x-ttft-leg` header the router that sent it is the outermost. Without one there may still
    be a foreign router: encoders and prefill instances are never outermost, because a router does
    not relay their answers to the client.
    """
    return not trace.leg and resolve_role(trace) not in stages.INTERMEDIATE_ROLES


MAX_PARTS: Final = 64  # parts of stages that are kept of a request
MAX_REASON_PIECES: Final = 64  # of which the sums on the `ttft` span do not depend
MAX_FINISH_REASONS: Final = 64  # one for each generation, or none
# vLLM's finish reasons of generations that did not succeed.
_FAILED_REASONS: Final = ("abort", "error")
MAX_ID_CHARS: Final = 256  # of a holder's request ID; a client may have chosen it
_HELD_ATTRIBUTES: Final = tuple(
    [keys.name_held_attribute(kind) for kind in stages.HOLDING_KIND_NAMES]
)

# By stage and reason: a request has one or more, and making a name takes half a microsecond.
_REASON_ATTRIBUTES: Final = {
    (stage, reason): keys.name_reason_attribute(stage, reason)
    for stage in (*stages.QUEUE_STAGES, stages.STALL_STAGE)
    for reason in stages.WAIT_REASON_NAMES
}


def count_trace_items(trace: RequestTrace) -> carrier.ItemCounts | None:
    """Count the trace's media items by the source of their encodings; None without media items."""
    timeline = trace.timeline
    if timeline is None or not (media := timeline.read_details().media):
        return None
    counts = carrier.count_items(media, timeline.complete, trace.encoded_before)
    consumer = identity.takes_encodings and resolve_role(trace) != "encode"
    return counts if consumer else counts._replace(remote=None, recomputed=None)


def name_operation(trace: RequestTrace) -> str:
    """What the request asks for, `gen_ai.operation.name`."""
    return OPERATION_BY_PATH.get(trace.path, "generate_content")


def list_identity_attributes(trace: RequestTrace) -> Attributes:
    """Attributes of both the server span and the `ttft` span."""
    attributes: Attributes = {
        keys.OPERATION: name_operation(trace),
        keys.PROVIDER: keys.PROVIDER_VLLM,
        keys.STREAM: trace.streamed,
    }
    # The served name, not the body's `model`: that may be an alias, or any text.
    if identity.model:
        attributes[keys.MODEL] = identity.model
        if trace.has_first_token:
            attributes[keys.RESPONSE_MODEL] = identity.model
    host, port = trace.server
    if port is not None:  # a Unix socket has a path and no port
        attributes[keys.SERVER_ADDRESS], attributes[keys.SERVER_PORT] = host, port
    return attributes


def make_server(trace: RequestTrace) -> Server:
    """The server half of the record of `trace`, which has ended."""
    attributes: Attributes
    if trace.is_direct:
        attributes = {keys.DIRECT: True}
    else:
        attributes = {
            keys.HTTP_METHOD: trace.method,
            keys.URL_PATH: trace.path,
            keys.URL_SCHEME: trace.scheme,
        }
    if trace.is_background:
        attributes[keys.BACKGROUND] = True
    _add_generation_attributes(attributes, trace)
    # Low cardinality, as HTTP's conventions ask: a path may hold an ID.
    if trace.route:
        attributes[keys.HTTP_ROUTE] = trace.route
    name = f"{trace.method} {trace.route}" if trace.route else trace.method
    if trace.is_direct:  # by the conventions of generative AI
        name = f"{name_operation(trace)} {identity.model}".rstrip()
    # By HTTP's conventions a 4xx is the client's error, not this server's.
    error = "" if 400 <= trace.status < 500 else trace.error
    return Server(name, trace.end - trace.arrive, trace.status, attributes, error)


def _add_generation_attributes(attributes: Attributes, trace: RequestTrace) -> None:
    """Add what was generated, known at the end; nothing where not all of it is known.

    Of an aborted generation vLLM reports no end, the engine requests of a beam search are not what the
    client gets, and an encoder's single step generates nothing that anybody reads.
    """
    engines = list(trace.engine_requests.values())
    role = resolve_role(trace)
    if trace.is_beam_search or role == "encode":
        return
    output_tokens, is_known = 0, bool(engines)
    for engine in engines:
        if not engine.ended:
            return
        output_tokens += engine.output_tokens
        is_known = is_known and engine.output_tokens >= 0
    if is_known:
        attributes[keys.OUTPUT_TOKENS] = output_tokens
    if 0 < len(engines) <= MAX_FINISH_REASONS:
        attributes[keys.FINISH_REASONS] = tuple([engine.finish_reason for engine in engines])
    token_time_us = measure_token_time(trace, role)
    if token_time_us:
        attributes[keys.TIME_PER_OUTPUT_TOKEN_US] = token_time_us


def measure_token_time(trace: RequestTrace, role: str) -> int:
    """Microseconds for each output token after the first; 0 where the convention defines none.

    It is of successful answers. Several generations share the steps, so that no length is one's own; a
    prefill instance's token is the first one.
    """
    if len(trace.engine_requests) != 1 or trace.is_beam_search:
        return 0
    (engine,) = trace.engine_requests.values()
    later_tokens, length_us = engine.output_tokens - 1, engine.ended - engine.output
    succeeded = (
        trace.status < 400 and not trace.error and engine.finish_reason not in _FAILED_REASONS
    )
    # All tokens may come in one step, by speculative decoding: then there is no step after the first.
    if not (succeeded and engine.output and later_tokens > 0 and length_us > 0):
        return 0
    if role in stages.INTERMEDIATE_ROLES:
        return 0
    return max(1, round(length_us / later_tokens))


def make_ttft(trace: RequestTrace, cut: Breakdown) -> Ttft:
    """The `ttft` half of the record of `trace`, whose breakdown is `cut`."""
    base = trace.arrive
    timeline = trace.timeline
    holders = list_holders(timeline) if timeline is not None else ()
    attributes = _list_ttft_attributes(trace)
    pieces = _make_stage_pieces(cut, holders, attributes)
    for name, low, high in trace.parts[:MAX_PARTS]:
        pieces.append(Piece("part", name, low - base, high - base))
    if len(trace.engine_requests) > 1:
        for engine in trace.engine_requests.values():
            if engine is not trace.first_output and engine.output:
                start, end = max(0, engine.assign - base), engine.output - base
                pieces.append(Piece("sibling", span_names.SIBLING, start, end))
    return Ttft(
        new_span_id(),
        span_names.ENCODE if resolve_role(trace) == "encode" else span_names.TTFT,
        0,
        cut.end - base,
        cut.stages,
        cut.unattributed,
        cut.clamped,
        tuple(pieces),
        attributes,
        "" if trace.has_first_token else trace.error,
        trace.failed_stage,
    )


def list_holders(timeline: carrier.EngineTimeline) -> tuple[HeldBy, ...]:
    """The largest holders of the request's wait; one that is not sampled has no IDs of a span."""
    found = []
    for us, tokens, code, request_id, parent in timeline.read_details().holders:
        # A kind of a later version has no name here.
        if 0 <= code < len(stages.HOLDING_KIND_NAMES):
            kind = stages.HOLDING_KIND_NAMES[code]
            trace_id, span_id, flags = parse_traceparent(parent) or ("", "", 0)
            if not flags & SAMPLED_FLAG:
                trace_id = span_id = ""
            found.append(HeldBy(us, tokens, kind, request_id[:MAX_ID_CHARS], trace_id, span_id))
    return tuple(found)


def _make_stage_pieces(
    cut: Breakdown, holders: tuple[HeldBy, ...], sums: Attributes
) -> list[Piece]:
    """The stages' pieces; of a waiting one with several reasons, a piece for each below it.

    holders: of the queue; its longest piece gets them. sums: gets the microseconds of each reason
    and of each kind of work that held a queue; in all its pieces they add up to the stage.
    """
    base = cut.start
    pieces = [Piece("stage", name, low - base, high - base) for name, low, high in cut.pieces]
    if not (cut.reasons or cut.held):  # nothing waited
        return pieces
    longest = _find_longest_queue(cut) if holders else None
    below: list[Piece] = []
    # Both come in the order of the waiting pieces; reasons fill each one, and of `held` each has one.
    place = number = 0
    for index, (name, low, high) in enumerate(cut.pieces):
        if name not in WAIT_STAGES:
            continue
        attributes: Attributes = {}
        first = place
        while place < len(cut.reasons) and cut.reasons[place].end <= high:
            each = cut.reasons[place]
            if each.stage != name:
                break
            key = _REASON_ATTRIBUTES[name, each.reason]
            sums[key] = sums.get(key, 0) + each.end - each.start  # type: ignore[operator]
            place += 1
        if place - first == 1:  # the usual case has one reason: an attribute then saves a span
            attributes = _name_reason(cut.reasons[first])
        elif place > first:
            below += [
                Piece("reason", each.reason, each.start - base, each.end - base, _name_reason(each))
                for each in cut.reasons[first:place]
            ]
        held_by: tuple[HeldBy, ...] = ()
        if cut.held:
            part = cut.held[number]
            number += 1
            _add_held(attributes, part)
            if name in stages.QUEUE_STAGES:
                _add_held(sums, part)
            if part is longest:
                held_by = holders
        pieces[index] = Piece("stage", name, low - base, high - base, attributes, held_by)
    # Only these are cut here: breakdown.MAX_PIECES has bounded the stages' pieces.
    return pieces + below[:MAX_REASON_PIECES] if below else pieces


def _find_longest_queue(cut: Breakdown) -> HeldPiece | None:
    queues = [part for part in cut.held if part.stage in stages.QUEUE_STAGES]
    return max(queues, key=lambda part: part.end - part.start, default=None)


def _add_held(attributes: Attributes, part: HeldPiece) -> None:
    """Add microseconds of each kind of work; they add up to the piece. Kinds without any are left out."""
    for code, length in enumerate(part.lengths):
        if length:
            key = _HELD_ATTRIBUTES[code]
            attributes[key] = attributes.get(key, 0) + length  # type: ignore[operator]


def _name_reason(part: ReasonSlice) -> Attributes:
    in_queue = part.stage in stages.QUEUE_STAGES
    return {keys.QUEUE_REASON if in_queue else keys.STALL_REASON: part.reason}


def _list_ttft_attributes(trace: RequestTrace) -> Attributes:
    timeline = trace.timeline
    if timeline is None:
        return {keys.STREAMING: trace.streamed}
    attributes = carrier.list_timeline_attributes(timeline, trace.clock_error)
    attributes[keys.STREAMING] = trace.streamed
    details = timeline.read_details()
    if details.blocks and identity.kv_connector:
        attributes[keys.KV_CONNECTOR] = details.connector or identity.kv_connector
    if details.holders_lost and details.holders:
        attributes[keys.HELD_BY_TRUNCATED] = True
    if details.media:
        attributes |= carrier.list_item_attributes(count_trace_items(trace), identity.ec_connector)
    return attributes
