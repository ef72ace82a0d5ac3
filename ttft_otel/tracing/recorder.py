# SPDX-License-Identifier: Apache-2.0
"""HOT: one RequestTrace per HTTP request in the API server: collect its marks, send its Record.

asgi.py begins and ends a trace, hooks/api_server.py adds marks; the results are a Record's bytes for
the exporter and the Server-Timing header.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Final

from ttft_otel.model import breakdown, stages, timing
from ttft_otel.model.names import header_names, keys
from ttft_otel.model.record import RECORD_VERSION, Piece, Record, Server, Ttft, encode_record
from ttft_otel.tracing import carrier, clock, context, meter, request_trace
from ttft_otel.tracing.handoff import RecordSender
from ttft_otel.tracing.measurement import encode_trace_measurement
from ttft_otel.tracing.request_trace import EngineRequest, RequestTrace, is_outermost, resolve_role
from ttft_otel.tracing.settings import Settings

log = logging.getLogger("ttft_otel")
MAX_AWAITING_REQUESTS: Final = 16384
MAX_UNENDED_REQUESTS: Final = 65536  # they stay for a whole answer
_TIMING_REQUEST_HEADER: Final = header_names.ASK_TIMING.encode()
_LEG_HEADER: Final = header_names.LEG.encode()
_ENCODED_HEADER: Final = header_names.MEDIA_ENCODED.encode()
# The legs on which a router sends ENCODED_HEADER.
_LEGS_AFTER_ENCODERS: Final = ("prefill", "prefill_decode")
_READ_HEADERS: Final = frozenset(
    name.encode()
    for name in (
        header_names.TRACEPARENT,
        header_names.TRACESTATE,
        header_names.ASK_TIMING,
        header_names.LEG,
        header_names.MEDIA_ENCODED,
        header_names.REQUEST_ID,
    )
)


current_trace: ContextVar[RequestTrace | None] = ContextVar("ttft_otel_trace", default=None)
# Whether the code runs for an HTTP request, traced or not: its calls of the engine are not of their own.
is_http_request: ContextVar[bool] = ContextVar("ttft_otel_http", default=False)
# Engine request id -> the trace that still lacks this engine request's first output.
awaiting_traces: dict[str, RequestTrace] = {}
# Engine request id -> the engine request, until its last output.
unended_requests: dict[str, EngineRequest] = {}


def begin_trace(headers: Iterable[tuple[bytes, bytes]], settings: Settings) -> RequestTrace | None:
    """Start a trace from ASGI `headers`; None when neither sampled, counted nor asked for (x-ttft-timing)."""
    arrive = clock.now_us()
    # ASGI gives header names in lower case and both parts as bytes; HTTP headers are Latin-1.
    values = {name: value.decode("latin-1") for name, value in headers if name in _READ_HEADERS}
    if not values:  # of a client that knows nothing of us
        trace_context = context.start_context("", "", settings)
        if not (trace_context.sampled or settings.metrics):
            return None
        return RequestTrace(arrive, trace_context, False, settings.metrics)
    asked = values.get(_TIMING_REQUEST_HEADER) == "1"
    trace_context = context.start_context(
        values.get(b"traceparent", ""), values.get(b"tracestate", ""), settings
    )
    leg = values.get(_LEG_HEADER, "")
    # Anybody can send the header: only known words become span names and labels.
    leg_role = leg if leg in stages.ROLES else ""
    if not (asked or trace_context.sampled or settings.metrics):
        return None
    trace = RequestTrace(arrive, trace_context, asked, settings.metrics)
    trace.leg = leg_role
    trace.encoded_before = values.get(_ENCODED_HEADER) == "1" and leg in _LEGS_AFTER_ENCODERS
    # The caller's wins over the engine's. Cut, because it goes on spans.
    trace.request_id = values.get(b"x-request-id", "")[:256]
    return trace


def register_engine_request(trace: RequestTrace, engine_id: str) -> None:
    """Note that `trace` sends an engine request."""
    # With n > 1 there are several, named `<index>_<parent id>`: only the parent has an assign time.
    times = trace.assign_times
    assign = times.get(engine_id) or times.get(engine_id.partition("_")[2], 0)
    engine = trace.engine_requests[engine_id] = EngineRequest(assign)
    # Beyond the bound what is known only at its end is missing; its TTFT is not.
    if len(unended_requests) < MAX_UNENDED_REQUESTS and not trace.is_input:
        unended_requests[engine_id], engine.is_watched = engine, True
    if len(awaiting_traces) >= MAX_AWAITING_REQUESTS:  # drop the oldest: dicts keep their order
        del awaiting_traces[next(iter(awaiting_traces))]
        meter.count_dropped("awaiting")
    awaiting_traces[engine_id] = trace


def record_first_output(engine_id: str, marks: str, received: int, now: int) -> None:
    """Note a first output: `received`, processed at `now`; `marks` is its serialized timeline."""
    trace = awaiting_traces.pop(engine_id, None)
    if trace is None:
        return
    engine = trace.engine_requests[engine_id]
    engine.marks = marks
    engine.received = received
    engine.output = now
    if trace.first_output is None:  # of several (n > 1) the earliest is the client's first token
        trace.first_output = engine


def note_unmeasured() -> None:
    """Count a request whose engine core measured nothing; the first one is said in the log."""
    meter.count_dropped("unmeasured")
    _warn_of_unmeasured()


@functools.cache  # once in a process
def _warn_of_unmeasured() -> None:
    log.warning(
        "ttft-otel: the engine core answered a traced request without having measured it, so that its stages "
        "are unattributed: its process has no hooks. Install ttft-otel and set TTFT_OTEL=1 where it runs; "
        "Ray's actors have no other variables than those that vLLM copies "
        "(VLLM_RAY_EXTRA_ENV_VARS_TO_COPY=TTFT_OTEL). On /metrics "
        'ttft_otel_dropped_total{reason="unmeasured"} counts such requests.'
    )


def record_end(engine_id: str, finish_reason: str, output_tokens: int) -> None:
    """Note that vLLM has ended `engine_id`; called once for each, before its last output is in its queue."""
    engine = unended_requests.pop(engine_id, None)
    if engine is not None:
        engine.ended = clock.now_us()
        engine.finish_reason = finish_reason
        engine.output_tokens = output_tokens


def fail_engine_request(engine_id: str, marks: str) -> None:
    """Note that the only output of `engine_id` ends it without a token."""
    trace = awaiting_traces.pop(engine_id, None)
    if trace is not None:
        trace.engine_requests[engine_id].marks = marks
        trace.error = keys.ERROR_ENGINE


def collect_marks(trace: RequestTrace, egress: int, end: int = 0) -> breakdown.Marks:
    """Input of breakdown.partition_marks(); sets `trace.timeline`.

    egress: of the first body chunk. end: of a request without a first token.
    """
    engine = trace.first_output or next(iter(trace.engine_requests.values()), None)
    marks = breakdown.Marks(trace.arrive, trace.render)
    marks.encode_only = resolve_role(trace) == "encode"
    marks.egress = egress
    if engine is None:
        marks.assign = next(iter(trace.assign_times.values()), 0)
        if trace.role == stages.RENDER:  # what it has made is its answer
            marks.assign = egress
        return marks
    marks.assign = engine.assign
    marks.output = engine.output
    marks.received = engine.received
    trace.timeline = carrier.decode_timeline(engine.marks, marks) if engine.marks else None
    if trace.timeline is not None:
        arrived = marks.received or marks.output or end
        clock.align_marks(marks, trace.timeline.boot, trace.timeline.rank, arrived)
        trace.clock_offset = marks.clock_offset
        trace.clock_error = marks.clock_error
    # An ec_both instance used as an encoder also runs the language model.
    marks.encode_only = marks.encode_only and not breakdown.runs_language_model(marks)
    return marks


def close_ttft(trace: RequestTrace, egress: int) -> breakdown.Breakdown:
    """Compute the breakdown; `egress` is 0 when the TTFT ends with `output` (see breakdown.Marks)."""
    marks = collect_marks(trace, egress)
    trace.breakdown = breakdown.partition_marks(marks)
    _add_engine_parts(trace, marks)
    return trace.breakdown


def fail_trace(trace: RequestTrace, end: int, marks: str = "") -> breakdown.Breakdown:
    """The breakdown without a first token; `marks` is what the engine core kept of it, or ""."""
    engine = next(iter(trace.engine_requests.values()), None)
    # What an output carried is newer than what the engine core kept.
    if engine is not None and not engine.marks:
        engine.marks = marks
    failed_marks = collect_marks(trace, 0, end)
    failed_marks.partial = trace.timeline is not None and not trace.timeline.complete
    trace.failed_stage = breakdown.find_failed_stage(failed_marks)
    trace.breakdown = breakdown.partition_marks(failed_marks, end, trace.failed_stage)
    _add_engine_parts(trace, failed_marks)
    return trace.breakdown


def _add_engine_parts(trace: RequestTrace, marks: breakdown.Marks) -> None:
    # The last step is the one whose output the first token came with.
    step = marks.steps[-1] if marks.steps else breakdown.EngineStep([])
    if marks.foreign or not trace.context.sampled:  # metrics count no parts
        return
    for name, start, end in (
        ("draft", step.draft_start, step.draft_end),
        ("collect", step.draft_end or step.sampled, marks.entered),
        ("transport", marks.entered, marks.received),
        ("detokenize", marks.received, marks.output),
    ):
        # Parts are details: one that does not fit is left out, and no stage depends on it.
        if start > trace.arrive and end > start:
            trace.parts.append((name, start, end))
    if trace.breakdown is not None:
        parts = breakdown.divide_dispatch(trace.breakdown.pieces, marks)
        # All or none: they add up to their stage.
        if len(trace.parts) + len(parts) <= request_trace.MAX_PARTS:
            trace.parts += parts


def format_timing_header(trace: RequestTrace, now: int) -> str:
    """The Server-Timing value, "" without a breakdown; `now` ends `rest` of a plain response."""
    cut = trace.breakdown
    if cut is None:
        return ""
    # A stream's headers leave before its body: there is no rest yet.
    rest = None if trace.streamed else now - cut.end
    total = cut.end - cut.start
    tokens = _make_token_counts(trace.timeline)
    ec = carrier.summarize_items(request_trace.count_trace_items(trace))
    note = carrier.read_clock(trace.timeline)
    return timing.format_server_timing(cut.stages, cut.unattributed, total, rest, tokens, ec, note)


def _make_token_counts(timeline: carrier.EngineTimeline | None) -> timing.TokenCounts | None:
    if timeline is None or not timeline.own_tokens:
        return None
    return timing.TokenCounts(
        timeline.prompt, timeline.cached, timeline.own_tokens, timeline.step_tokens
    )


def send_known_halves(trace: RequestTrace, sender: RecordSender, *, server: bool) -> None:
    """Send the record's `ttft` half if it was not sent yet, and with `server` its server half."""
    # A stream's first half goes when its first token is out, so that a later crash cannot lose it.
    cut = None if trace.ttft_sent else trace.breakdown
    if not (server or cut is not None):
        return
    if not trace.context.sampled:
        trace.ttft_sent = trace.ttft_sent or cut is not None
        if trace.is_counted:
            _send_bytes(encode_trace_measurement(trace, cut, server), sender)
        return
    ttft = None if cut is None else request_trace.make_ttft(trace, cut)
    trace.ttft_sent = trace.ttft_sent or ttft is not None
    send_record(trace, sender, ttft, request_trace.make_server(trace) if server else None)


def send_record(
    trace: RequestTrace,
    sender: RecordSender,
    ttft: Ttft | None = None,
    server: Server | None = None,
    late: tuple[Piece, ...] = (),
) -> None:
    """Send a Record of this trace, which is sampled, with these parts; count it if it is refused."""
    _send_bytes(encode_record(make_record(trace, ttft, server, late)), sender)


def make_record(
    trace: RequestTrace,
    ttft: Ttft | None = None,
    server: Server | None = None,
    late: tuple[Piece, ...] = (),
) -> Record:
    """The Record of this trace with these parts."""
    role = resolve_role(trace)
    own = trace.context
    # Once: its halves must not be placed apart where the wall clock was stepped in between.
    trace.start_ns = trace.start_ns or clock.to_wall_ns(trace.arrive)
    # By position, in the order of its fields: by name takes a microsecond more, 2 % of a traced request.
    return Record(
        RECORD_VERSION,
        own.trace_id,
        own.span_id,
        own.parent_id,
        own.flags,
        own.tracestate,
        trace.start_ns,
        role,
        is_outermost(trace),
        stages.SERVICE_NAMES.get(role, "vllm"),  # type: ignore[call-overload]
        trace.request_id,
        -1 if trace.timeline is None else trace.timeline.rank,
        request_trace.list_identity_attributes(trace),
        ttft,
        server,
        (),
        late,
    )


def _send_bytes(data: bytes, sender: RecordSender) -> None:
    # Without bytes there is nothing to count.
    if data and not sender.send(data):
        meter.count_dropped("handoff")


def forget_trace(trace: RequestTrace) -> None:
    """Remove all global state of a trace; called however its request ended."""
    for engine_id, engine in trace.engine_requests.items():
        # By now it may be the next input of the same session that has the ID.
        if awaiting_traces.get(engine_id) is trace:
            del awaiting_traces[engine_id]
        if unended_requests.get(engine_id) is engine:
            del unended_requests[engine_id]
