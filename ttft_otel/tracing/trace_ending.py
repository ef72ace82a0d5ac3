# SPDX-License-Identifier: Apache-2.0
"""End a request's trace: its breakdown where the first token came, what the engine core knows where not.

asgi.py calls it at the end of an HTTP request, hooks/api_server.py at that of a request that came without
HTTP; the records go to the exporter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeAlias

from ttft_otel.model import endpoints, stages
from ttft_otel.model.names import keys, span_names
from ttft_otel.model.record import Attributes, Piece
from ttft_otel.tracing import carrier, clock, handoff, meter, recorder, roles
from ttft_otel.tracing.guard import Guard
from ttft_otel.tracing.handoff import RecordSender
from ttft_otel.tracing.request_trace import RequestTrace
from ttft_otel.tracing.roles import identity

EngineQuery: TypeAlias = Callable[[Any, RequestTrace, str], Awaitable[str]]

MAX_ENGINE_QUERIES: Final = 256  # concurrent queries about aborted requests
ENGINE_QUERY_TIMEOUT_S: Final = 5.0
MAX_KEPT_SPAN_TASKS: Final = 1024  # concurrent queries that wait until kept data is freed
_GUARD_END: Final = Guard("asgi end")  # made once, as it holds nothing of a request

# Seconds before each further query about an encoder that still runs.
PENDING_PAUSES_S: Final = (0.05, 0.2, 1.0, 5.0)


class TraceEnding:
    """Ends traces; keeps the tasks that ask the engine core about some of them.

    query_engine: called with what end_trace() got as `engine`, the trace and the query.
    """

    def __init__(self, query_engine: EngineQuery) -> None:
        self.query_engine = query_engine
        self.abort_tasks: set[asyncio.Task[None]] = set()
        self.kept_span_tasks: set[asyncio.Task[None]] = set()

    def end_trace(self, engine: Any, trace: RequestTrace, error: str) -> None:
        """Send what is left of `trace`, whose request has ended now.

        engine: handed on to query_engine, None where nobody can be asked. error: why it ended early, "" where
        it did not.
        """
        trace.end = clock.now_us()
        recorder.forget_trace(trace)
        is_used = trace.engine_requests or trace.role == stages.RENDER
        if not is_used and trace.path not in endpoints.OPERATION_BY_PATH:
            return  # an endpoint that does not generate, such as /tokenize
        # Its engine core is alive, and may know how far the request got.
        is_ended_by_engine = trace.error == keys.ERROR_ENGINE
        # Starlette ends a stream whose client has left as if it were complete.
        is_stream = trace.streamed and trace.breakdown is not None
        if not error and is_stream and trace.is_unended and roles.identity.can_see_ends():
            error = keys.ERROR_INCOMPLETE
        # One that ends after all was generated has lost nothing.
        if trace.status >= 500 or (error and (trace.breakdown is None or trace.is_unended)):
            trace.error = str(trace.status) if trace.status >= 400 else error
        if trace.is_background and not error:  # it has no TTFT
            recorder.send_known_halves(trace, handoff.get_sender(), server=True)
            return
        # A first token was computed, but no chunk was sent: the TTFT ends with `output`.
        if trace.breakdown is None and trace.has_first_token:
            recorder.close_ttft(trace, 0)
        if trace.breakdown is not None:
            recorder.send_known_halves(trace, handoff.get_sender(), server=True)
            for query in list_queries(trace) if engine is not None else ():
                if len(self.kept_span_tasks) < MAX_KEPT_SPAN_TASKS:
                    self._start_task(
                        self._send_kept_span(engine, trace, query), self.kept_span_tasks
                    )
                else:
                    meter.count_dropped("kept")
            return
        trace.error = (
            str(trace.status)
            if trace.status >= 400
            else error or trace.error or keys.ERROR_CANCELLED
        )
        # The request reached the engine and was aborted there: only the engine core knows how far it
        # got. Beyond the bound the record is sent without that.
        if (
            engine is not None
            and trace.engine_requests
            and (trace.status < 400 or is_ended_by_engine)
            and not any(each.marks for each in trace.engine_requests.values())
            and len(self.abort_tasks) < MAX_ENGINE_QUERIES
        ):
            self._start_task(self._send_aborted(engine, trace), self.abort_tasks)
            return
        recorder.fail_trace(trace, trace.end)
        recorder.send_known_halves(trace, handoff.get_sender(), server=True)

    def _start_task(
        self, coroutine: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]
    ) -> None:
        task = asyncio.ensure_future(coroutine)
        # The set keeps a reference, because the event loop holds tasks only weakly; its size is the
        # bound.
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _send_kept_span(self, engine: Any, trace: RequestTrace, query: str) -> None:
        """Wait until the data kept for another instance is freed, then send a span of its own."""
        with Guard("asgi kept"):
            answer = await self.query_engine(engine, trace, query)
            for pause_s in PENDING_PAUSES_S:
                if answer != carrier.PENDING_ANSWER:
                    break
                await asyncio.sleep(pause_s)
                answer = await self.query_engine(engine, trace, query)
            if not send_kept_span(trace, query, answer, handoff.get_sender()):
                meter.count_dropped("kept")

    async def _send_aborted(self, engine: Any, trace: RequestTrace) -> None:
        """Ask the engine core in which stage an aborted request was, then send its record."""
        marks = ""
        with Guard("asgi ask"):
            try:
                marks = await asyncio.wait_for(
                    self.query_engine(engine, trace, carrier.ABORTED_QUERY), ENGINE_QUERY_TIMEOUT_S
                )
            except asyncio.TimeoutError:
                marks = ""
        with _GUARD_END:
            recorder.fail_trace(trace, trace.end, marks)
            recorder.send_known_halves(trace, handoff.get_sender(), server=True)


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
    return [query for query, (bit, *_) in KEPT_QUERIES.items() if kept_bits & bit]


def send_kept_span(trace: RequestTrace, query: str, answer: str, sender: RecordSender) -> bool:
    """Send the span described by the engine core's `answer`; False when it describes none.

    query: the utility call that was answered, one of KEPT_QUERIES.
    """
    _, kind, name, list_attributes = KEPT_QUERIES[query]
    kept = carrier.decode_answer(kind, answer)
    if kept is None:
        return False
    piece = _make_piece(trace, name, kept.since, kept.until, list_attributes(kept))
    if piece is not None:
        recorder.send_record(trace, sender, late=(piece,))
    return piece is not None


def _list_block_attributes(kept: carrier.KeptBlocks) -> Attributes:
    attributes: Attributes = {keys.KV_TOKENS: kept.tokens, keys.KV_BLOCKS: kept.blocks}
    if identity.kv_connector:
        attributes[keys.KV_CONNECTOR] = identity.kv_connector
    if kept.expired:
        attributes[keys.ERROR_TYPE] = "expired"
    return attributes


def _list_item_attributes(kept: carrier.KeptItems) -> Attributes:
    attributes: Attributes = {keys.EC_ITEMS: kept.items, keys.EC_BYTES: kept.bytes}
    if identity.ec_connector:
        attributes[keys.EC_CONNECTOR] = identity.ec_connector
    if kept.ready_at:
        attributes[keys.EC_READY_US] = max(0, kept.ready_at - kept.since)
    # An error: the encodings were made and nobody fetched them.
    if kept.end_reason:
        attributes[keys.ERROR_TYPE] = kept.end_reason
    return attributes


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


# By the utility call, one for each kind, as each is answered when its own data are gone: the bit of
# EngineDetails.kept, the type of the answer, the name of the span, and what makes its attributes.
KEPT_QUERIES: Final[dict[str, tuple[int, Any, str, Callable[[Any], Attributes]]]] = {
    carrier.KEPT_BLOCKS_QUERY: (
        carrier.KEPT_BLOCKS_BIT,
        carrier.KeptBlocks,
        span_names.KV_KEPT,
        _list_block_attributes,
    ),
    carrier.KEPT_ITEMS_QUERY: (
        carrier.KEPT_ITEMS_BIT,
        carrier.KeptItems,
        span_names.EC_KEPT,
        _list_item_attributes,
    ),
    carrier.ENCODER_QUERY: (
        carrier.ENCODER_RUN_BIT,
        carrier.EncoderRun,
        span_names.ENCODER_RUN,
        lambda run: {},
    ),
}
