# SPDX-License-Identifier: Apache-2.0
"""Send requests on time, as an open or a closed loop, and collect RequestResults.

A response is parsed after its last byte and in slices, so that parsing hardly delays the reading of
other responses. A piece of a stream may end anywhere: within a line, between CR and LF, within a character,
within the JSON. How late this process itself is, is measured throughout the run.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any, Final, TypeAlias

from ttft_otel.bench.http_exchange import (
    HTTP_OK,
    BenchTarget,
    RawResponse,
    perform_exchange,
    sleep_until,
)
from ttft_otel.bench.request_factory import BenchRequest
from ttft_otel.model import timing
from ttft_otel.model.names import header_names
from ttft_otel.tracing import context

# Enough for TCP and TLS within a data centre; beyond it the send itself is late.
CONNECT_LEAD_NS: Final = 20_000_000  # connections are opened this long before their request is due
START_SPACING_NS: Final = 1_000_000  # between the first requests of a closed loop
# A stall counts once per interval (docs/guides/benchmark.md).
LAG_SAMPLE_INTERVAL_S: Final = 0.01
# In vLLM's error messages for prompts that are too long.
CONTEXT_EXCEEDED_PHRASES: Final = ("maximum context length", "maximum model length")
MAX_PIECES_PER_TURN: Final = 32  # pieces parsed in one turn of the event loop
DONE_MARKER = "[DONE]"
# Finish reasons of an answer that the server broke off: a pause, sleep mode, a failed KV load.
SERVER_ENDS = ("abort", "error")
MAX_ERROR_CHARS = 300  # characters of an error message that are kept


@dataclass(slots=True)
class RequestResult:
    """One request: its response, and what that says."""

    request_id: str
    trace_id: str
    response: RawResponse
    content: StreamContent
    timing: timing.ServerTiming | None  #: the server's breakdown, if it sent one
    error: str  #: "" when it succeeded, else the kind of failure
    server_message: str = ""  #: the server's error message

    @property
    def ttft_us(self) -> float:
        """Microseconds from the write to the event with the first token."""
        return (self.content.token_times_ns[0] - self.response.sent_ns) / 1000

    @property
    def latency_us(self) -> float:
        """Microseconds from the write to the end of the response."""
        return (self.response.end_ns - self.response.sent_ns) / 1000


@dataclass(slots=True)
class LoadRun:
    """Results of one run."""

    results: list[RequestResult] = field(default_factory=list)
    loop_lags_ns: list[int] = field(default_factory=list)  #: lateness of this process's event loop
    started: int = 0  #: requests sent
    stopped: bool = False  #: ended by Ctrl-C
    overloaded: bool = False  #: ended early: the server's queue only grew
    #: Requests without a result, by request ID.
    in_flight: dict[str, RawResponse] = field(default_factory=dict)

    @property
    def unfinished(self) -> int:
        """Number of requests that were sent and have no result (yet)."""
        return self.started - len(self.results)


class LoadDriver:
    """Sends requests to a target and collects their results in `run`.

    timeout_s: for each request.
    """

    def __init__(self, target: BenchTarget, timeout_s: float = 600.0) -> None:
        self.target = target
        self.timeout_s = timeout_s
        self.run = LoadRun()

    async def hold_conversation(self, request: BenchRequest, due_ns: int) -> int:
        """Send `request` at `due_ns`, and what follows its answer; returns the end of the last answer."""
        while True:
            result = await self.send_request(request, due_ns)
            end_ns = result.response.end_ns
            if request.next_turn is None:
                return end_ns
            answer = "".join(result.content.text_parts)
            request = request.next_turn(None if result.error else answer)
            due_ns = end_ns + int(request.wait_s * 1e9)
            await sleep_until(due_ns - CONNECT_LEAD_NS)

    async def send_request(self, request: BenchRequest, due_ns: int) -> RequestResult:
        """Send `request` at `due_ns`, and add its result to the run."""
        # Both are ours, so that a result can be found in traces and logs.
        trace_id, request_id = context.new_trace_id(), uuid.uuid4().hex
        headers = {
            **request.headers,
            # Flag 01: sampled, so that the server's spans of every request are exported.
            header_names.TRACEPARENT: f"00-{trace_id}-{context.new_span_id()}-01",
            header_names.REQUEST_ID: request_id,
            # Asks for Server-Timing: with it no trace store is needed to see the stages.
            header_names.ASK_TIMING: "1",
        }
        self.run.started += 1
        message = self.target.encode_request(request.path, request.body, headers)
        response = self.run.in_flight[request_id] = RawResponse(due_ns)
        await perform_exchange(self.target, message, due_ns, self.timeout_s, response)
        del self.run.in_flight[request_id]  # not of a cancelled one: it stays unanswered
        content = await _parse_response(response)
        breakdown = timing.parse_server_timing(response.headers.get(header_names.SERVER_TIMING, ""))
        error = classify_failure(response, content)
        result = RequestResult(
            request_id,
            trace_id,
            response,
            content,
            breakdown,
            error,
            content.server_message if error else "",
        )
        self.run.results.append(result)
        return result

    @asynccontextmanager
    async def measure_loop_lag(self) -> AsyncIterator[None]:
        """Sample how late this process's event loop is while the block runs."""
        task = asyncio.create_task(self._sample_loop_lag())
        try:
            yield
        finally:
            task.cancel()

    async def _sample_loop_lag(self) -> None:
        while True:
            # Anew for each sample: sleeps that end late must not add up.
            due_ns = monotonic_ns() + int(LAG_SAMPLE_INTERVAL_S * 1e9)
            await asyncio.sleep(LAG_SAMPLE_INTERVAL_S)
            lag_ns = max(0, monotonic_ns() - due_ns)
            # A stall delays all samples that were due within it. Only one was taken, so add the others;
            # otherwise a long stall would count as a single sample.
            self.run.loop_lags_ns += [
                lag_ns,
                *range(
                    lag_ns - int(LAG_SAMPLE_INTERVAL_S * 1e9), 0, -int(LAG_SAMPLE_INTERVAL_S * 1e9)
                ),
            ]


LoadFunction: TypeAlias = Callable[[LoadDriver], Awaitable[None]]


async def run_open_loop(driver: LoadDriver, arrivals: Iterable[tuple[float, BenchRequest]]) -> None:
    """Begin each conversation at its offset, whether or not earlier ones are answered.

    arrivals: (seconds after the start, first request), in time order.
    """
    # Twice the lead: the first request is connected in advance as well, with time to spare.
    start_ns = monotonic_ns() + 2 * CONNECT_LEAD_NS
    under_way: set[asyncio.Task[int]] = set()
    try:
        for offset_s, request in arrivals:
            due_ns = start_ns + int(offset_s * 1e9)
            # Tasks are created one by one: thousands that sleep would slow down every turn of the loop.
            await sleep_until(due_ns - CONNECT_LEAD_NS)
            task = asyncio.create_task(driver.hold_conversation(request, due_ns))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        await asyncio.gather(*under_way)
    finally:
        await _cancel_tasks(under_way)


async def run_closed_loop(
    driver: LoadDriver, requests: Iterable[BenchRequest], concurrency: int
) -> None:
    """Hold `concurrency` conversations at once until all that begin with `requests` have ended.

    The first ones are sent 1 ms apart: sent at once, this process would be late with most of them.
    """
    queue, start_ns = iter(requests), monotonic_ns() + 2 * CONNECT_LEAD_NS

    async def send_in_turn(due_ns: int) -> None:
        await sleep_until(due_ns - CONNECT_LEAD_NS)
        # All take from one iterator, so that a slow answer holds back nobody else's next request.
        for request in queue:
            due_ns = await driver.hold_conversation(request, due_ns)

    tasks = {
        asyncio.create_task(send_in_turn(start_ns + place * START_SPACING_NS))
        for place in range(concurrency)
    }
    try:
        await asyncio.gather(*tasks)
    finally:
        await _cancel_tasks(tasks)


async def _cancel_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the `tasks` that are not done, and wait until they have ended."""
    pending = list(tasks)
    # All first, then the waiting: they end side by side.
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


async def _parse_response(response: RawResponse) -> StreamContent:
    """Parse an answer's pieces, a slice at a time."""
    reader = StreamParser()
    # A refusal is one JSON object and no stream.
    if response.status != HTTP_OK:
        reader.parse_refusal(b"".join(piece for _, piece in response.pieces))
    for place, (received_ns, piece) in enumerate(response.pieces):
        if place % MAX_PIECES_PER_TURN == MAX_PIECES_PER_TURN - 1:
            await asyncio.sleep(0)  # let the event loop read other responses
        reader.parse_piece(received_ns, piece)
    response.pieces.clear()  # parsed; a long run would keep all bodies in memory
    return reader.content


def classify_failure(response: RawResponse, content: StreamContent) -> str:
    """The kind of a failure; "" for a success."""
    # How the exchange ended comes first: a body that was cut off explains nothing.
    if response.error:
        return response.error
    # Before the status, so that these are told apart from other 400s.
    if any(word in content.server_message for word in CONTEXT_EXCEEDED_PHRASES):
        return "longer than the context"
    if response.status != HTTP_OK:
        return f"HTTP {response.status}"
    # A finish reason alone looks like a token with an empty text; the server's count tells.
    if content.stream_error or not content.token_times_ns or content.completion_tokens == 0:
        return content.stream_error or "no token"
    return "" if content.is_finished else "cut off"


@dataclass(slots=True)
class StreamContent:
    """The content of a stream. Numbers of tokens are the server's, None when it did not send them."""

    #: Arrival of each event with a token; an event may hold several tokens.
    token_times_ns: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    text_parts: list[str] = field(default_factory=list)
    stream_error: str = ""  #: kind of error
    server_message: str = ""  #: the server's error message
    is_finished: bool = False  #: whether it was complete


class EventDecoder:
    """Decodes server-sent events from pieces of a byte stream."""

    def __init__(self) -> None:
        self.incomplete_line = b""
        self.data_lines: list[bytes] = []
        self.ends_with_cr = False

    def decode_piece(self, piece: bytes) -> list[bytes]:
        """The data of the events that end in `piece`; lines end with CR, LF or both."""
        # CR and LF in two pieces: one line end, not an empty line that would end the event.
        if self.ends_with_cr and piece[:1] == b"\n":
            piece = piece[1:]
        if piece:
            self.ends_with_cr = piece[-1:] == b"\r"
        # Bytes, not text: a piece may end within a character.
        text = (self.incomplete_line + piece).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self.incomplete_line = text.split(b"\n")
        return [event for line in lines if (event := self._decode_line(line)) is not None]

    def _decode_line(self, line: bytes) -> bytes | None:
        """Decode one line; an empty one ends an event, whose data is returned if it has any."""
        if line:
            # Comments (": ping") and other fields have no data and end here.
            name, _, value = line.partition(b":")
            if name == b"data":
                self.data_lines.append(value.removeprefix(b" "))
            return None
        event = b"\n".join(self.data_lines) if self.data_lines else None
        self.data_lines = []
        return event


class StreamParser:
    """Fill a StreamContent from the pieces of one body."""

    def __init__(self) -> None:
        self.decoder = EventDecoder()
        self.content = StreamContent()
        self.last_ns = 0

    def parse_piece(self, received_ns: int, piece: bytes) -> None:
        """Parse a piece that arrived at `received_ns`, which is the time of all events that it ends."""
        for event in self.decoder.decode_piece(piece):
            self._parse_event(received_ns, event.decode("utf-8", "replace"))

    def parse_refusal(self, body: bytes) -> None:
        """Take the error message from the `body` of a response with a status other than 200."""
        try:
            self.content.server_message = _extract_message(json.loads(body))
        except ValueError:
            self.content.server_message = _sanitize_text(body.decode("utf-8", "replace"))

    def _parse_event(self, received_ns: int, data: str) -> None:
        if data == DONE_MARKER:
            self.content.is_finished = True
            return
        try:
            payload = json.loads(data)
        # The stream is read on: later tokens still have their times.
        except (ValueError, RecursionError):
            self.content.stream_error = self.content.stream_error or "no JSON in the stream"
            return
        # Valid JSON, but of no API: neither a token nor an error.
        if not isinstance(payload, dict):
            return
        if payload.get("error"):
            self.content.stream_error = "error in the stream"
            self.content.server_message = self.content.server_message or _extract_message(payload)
        # vLLM's last event has usage and no choices.
        self._record_usage(_coerce_object(payload.get("usage")))
        raw_choices = payload.get("choices")
        choices = (
            [_coerce_object(choice) for choice in raw_choices]
            if isinstance(raw_choices, list)
            else []
        )
        for choice in choices:
            delta = _coerce_object(choice.get("delta"))
            self.content.text_parts.append(str(choice.get("text") or delta.get("content") or ""))
        # HTTP has answered 200 by then: only the finish reason tells it.
        if any(choice.get("finish_reason") in SERVER_ENDS for choice in choices):
            self.content.stream_error = self.content.stream_error or "ended by the server"
        self.content.is_finished = self.content.is_finished or _has_finished(choices)
        # An event with only a finish reason counts as a token if none came before: the only token of
        # the answer then has an empty text.
        if any(map(_has_token, choices)) or (
            choices and _has_finished(choices) and not self.content.token_times_ns
        ):
            self.content.token_times_ns.append(received_ns)

    def _record_usage(self, usage: dict[str, Any]) -> None:
        self.content.prompt_tokens = _parse_count(
            usage.get("prompt_tokens"), self.content.prompt_tokens
        )
        self.content.completion_tokens = _parse_count(
            usage.get("completion_tokens"), self.content.completion_tokens
        )
        details = _coerce_object(usage.get("prompt_tokens_details"))
        self.content.cached_tokens = _parse_count(
            details.get("cached_tokens"), self.content.cached_tokens
        )


def _extract_message(payload: Any) -> str:
    """The message of an error in the formats of vLLM, OpenAI and FastAPI."""
    error = payload.get("error", payload) if isinstance(payload, dict) else payload
    if isinstance(error, dict):
        # FastAPI's own refusals have `detail`.
        error = error.get("message") or error.get("detail") or ""
    return _sanitize_text(str(error))


def _sanitize_text(text: str) -> str:
    """Foreign text as one line of at most MAX_ERROR_CHARS, without control characters."""
    printable = "".join(each if each.isprintable() else " " for each in text)
    return printable.strip()[:MAX_ERROR_CHARS]


def _coerce_object(value: Any) -> dict[str, Any]:
    """`value` if it is a JSON object, else {}."""
    return value if isinstance(value, dict) else {}


def _parse_count(value: Any, previous: int | None) -> int | None:
    """`value` if it is a number of tokens, else `previous`."""
    # type() and not isinstance(): true is an int to Python.
    return value if type(value) is int and value >= 0 else previous


def _has_token(choice: dict[str, Any]) -> bool:
    """Whether a choice of an event holds a token, rather than only a role or a finish reason."""
    delta = _coerce_object(choice.get("delta"))
    # Any other key: reasoning and tool calls are tokens as well.
    has_content = choice.get("text") or any(value for key, value in delta.items() if key != "role")
    # A token that is only a part of a character has an empty text.
    has_silent_token = "role" not in delta and not choice.get("finish_reason")
    return bool(has_content) or has_silent_token


def _has_finished(choices: list[dict[str, Any]]) -> bool:
    return any(choice.get("finish_reason") for choice in choices)
