# SPDX-License-Identifier: Apache-2.0
"""Send requests on time, as an open or a closed loop, and collect RequestResults.

A response is parsed after its last byte and in slices, so that parsing hardly delays the reading of
other responses. A piece of a stream may end anywhere: within a line, between CR and LF, within a character,
within the JSON. How late this process itself is, is measured throughout the run.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from time import monotonic_ns
from typing import Any, Final

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
LAG_SAMPLE_INTERVAL_NS: Final = 10_000_000
# In vLLM's error messages for prompts that are too long.
CONTEXT_EXCEEDED_PHRASES: Final = ("maximum context length", "maximum model length")
LINE: Final = re.compile(rb"([^\r\n]*)(?:\r\n|\r|\n)")
MAX_EVENTS_PER_TURN: Final = 32  # events parsed in one turn of the event loop
DONE_MARKER = "[DONE]"
# Finish reasons of an answer that the server broke off: a pause, sleep mode, a failed KV load.
SERVER_ENDS = ("abort", "error")
MAX_ERROR_CHARS = 300  # characters of an error message that are kept


@dataclass(slots=True)
class RequestResult:
    """One request: its response, and what that says.

    Numbers of tokens are the server's, None when it did not send them.
    """

    request_id: str
    trace_id: str
    response: RawResponse
    timing: timing.ServerTiming | None = None  #: the server's breakdown, if it sent one
    error: str = ""  #: "" when it succeeded, else the kind of failure
    #: Arrival of each event with a token; an event may hold several tokens.
    token_times_ns: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    text_parts: list[str] = field(default_factory=list)
    stream_error: str = ""  #: kind of error
    server_message: str = ""  #: the server's error message
    is_finished: bool = False  #: whether it was complete

    @property
    def ttft_ms(self) -> float:
        """From the write to the event with the first token."""
        return (self.token_times_ns[0] - self.response.sent_ns) / 1e6

    @property
    def latency_ms(self) -> float:
        """From the write to the end of the response."""
        return (self.response.end_ns - self.response.sent_ns) / 1e6

    @property
    def output_tokens(self) -> int:
        """As the server counts them, else its events with tokens."""
        counted = self.completion_tokens
        return len(self.token_times_ns) if counted is None else counted

    @property
    def tpot_ms(self) -> float | None:
        """Time per token after the first; None for a single one."""
        times_ns = self.token_times_ns
        # By tokens, not by events: a server may send several tokens in one event.
        later = self.output_tokens - 1
        return (times_ns[-1] - times_ns[0]) / 1e6 / later if later > 0 else None

    def record_refusal(self, body: bytes) -> None:
        """Take the error message from the `body` of a response with a status other than 200."""
        try:
            self.server_message = _extract_message(json.loads(body))
        except ValueError:
            self.server_message = _sanitize_text(body.decode("utf-8", "replace"))

    def record_event(self, received_ns: int, event: bytes) -> None:
        """Take what the data of an event says that was complete at `received_ns`."""
        data = event.decode("utf-8", "replace")
        if data == DONE_MARKER:
            self.is_finished = True
            return
        try:
            payload = json.loads(data)
        # The stream is read on: later tokens still have their times.
        except (ValueError, RecursionError):
            self.stream_error = self.stream_error or "no JSON in the stream"
            return
        # Valid JSON, but of no API: neither a token nor an error.
        if not isinstance(payload, dict):
            return
        if payload.get("error"):
            self.stream_error = "error in the stream"
            self.server_message = self.server_message or _extract_message(payload)
        # vLLM's last event has usage and no choices.
        self._record_usage(_coerce_object(payload.get("usage")))
        listed = payload.get("choices")
        choices = [_coerce_object(each) for each in listed] if isinstance(listed, list) else []
        for choice in choices:
            delta = _coerce_object(choice.get("delta"))
            self.text_parts.append(str(choice.get("text") or delta.get("content") or ""))
        ends = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
        # HTTP has answered 200 by then: only the finish reason tells it.
        if any(end in SERVER_ENDS for end in ends):
            self.stream_error = self.stream_error or "ended by the server"
        self.is_finished = self.is_finished or bool(ends)
        # An event with only a finish reason counts as a token if none came before: the only token of
        # the answer then has an empty text.
        if any(map(_has_token, choices)) or (ends and not self.token_times_ns):
            self.token_times_ns.append(received_ns)

    def _record_usage(self, usage: dict[str, Any]) -> None:
        details = _coerce_object(usage.get("prompt_tokens_details"))
        counts = {**usage, "cached_tokens": details.get("cached_tokens")}
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
            # type() and not isinstance(): true is an int to Python.
            if type(counts.get(name)) is int and counts[name] >= 0:
                setattr(self, name, counts[name])


@dataclass(slots=True)
class LoadRun:
    """One run of a load: it sends requests to a target, and has their results."""

    target: BenchTarget
    timeout_s: float = 600.0  #: of each request
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

    @property
    def start_ns(self) -> int:
        """Time of the first write, CLOCK_MONOTONIC; 0 without results."""
        return min((each.response.sent_ns for each in self.results), default=0)

    @property
    def end_ns(self) -> int:
        """Time of the last byte, likewise."""
        return max((each.response.end_ns for each in self.results), default=0)

    async def hold_conversation(self, request: BenchRequest, due_ns: int) -> int:
        """Send `request` at `due_ns`, and what follows its answer; returns the end of the last answer."""
        while True:
            result = await self.send_request(request, due_ns)
            end_ns = result.response.end_ns
            if request.next_turn is None:
                return end_ns
            answer = "".join(result.text_parts)
            request = request.next_turn(None if result.error else answer)
            due_ns = end_ns + int(request.wait_s * 1e9)
            await sleep_until(due_ns - CONNECT_LEAD_NS)

    async def send_request(self, request: BenchRequest, due_ns: int) -> RequestResult:
        """Send `request` at `due_ns`, and add its result."""
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
        self.started += 1
        message = self.target.encode_request(request.path, request.body, headers)
        response = self.in_flight[request_id] = RawResponse(due_ns)
        await perform_exchange(self.target, message, due_ns, self.timeout_s, response)
        del self.in_flight[request_id]  # not of a cancelled one: it stays unanswered
        reported = response.headers.get(header_names.SERVER_TIMING, "")
        breakdown = timing.parse_server_timing(reported)
        result = RequestResult(request_id, trace_id, response, breakdown)
        await _parse_response(result)
        result.error = classify_failure(result)
        self.results.append(result)
        return result

    async def sample_loop_lag(self) -> None:
        """Note how late this process's event loop is, until cancelled."""
        while True:
            # Anew for each sample: sleeps that end late must not add up.
            due_ns = monotonic_ns() + LAG_SAMPLE_INTERVAL_NS
            await asyncio.sleep(LAG_SAMPLE_INTERVAL_NS / 1e9)
            lag_ns = max(0, monotonic_ns() - due_ns)
            # A stall delays all samples that were due within it. Only one was taken, so add the others;
            # otherwise a long stall would count as a single sample.
            later_ns = range(lag_ns - LAG_SAMPLE_INTERVAL_NS, 0, -LAG_SAMPLE_INTERVAL_NS)
            self.loop_lags_ns += [lag_ns, *later_ns]


async def run_open_loop(run: LoadRun, arrivals: Iterable[tuple[float, BenchRequest]]) -> None:
    """Begin each conversation at its offset, whether or not earlier ones are answered.

    arrivals: (seconds after the start, first request), in time order.
    """
    # Twice the lead: the first request is connected in advance as well, with time to spare.
    start_ns = monotonic_ns() + 2 * CONNECT_LEAD_NS
    async with _hold_tasks() as under_way:
        for offset_s, request in arrivals:
            due_ns = start_ns + int(offset_s * 1e9)
            # Tasks are created one by one: thousands that sleep would slow down every turn of the loop.
            await sleep_until(due_ns - CONNECT_LEAD_NS)
            task = asyncio.create_task(run.hold_conversation(request, due_ns))
            under_way.add(task)
            task.add_done_callback(under_way.discard)


async def run_closed_loop(run: LoadRun, requests: Iterable[BenchRequest], concurrency: int) -> None:
    """Hold `concurrency` conversations at once until all that begin with `requests` have ended.

    The first ones are sent 1 ms apart: sent at once, this process would be late with most of them.
    """
    queue, start_ns = iter(requests), monotonic_ns() + 2 * CONNECT_LEAD_NS

    async def send_in_turn(due_ns: int) -> None:
        await sleep_until(due_ns - CONNECT_LEAD_NS)
        # All take from one iterator, so that a slow answer holds back nobody else's next request.
        for request in queue:
            due_ns = await run.hold_conversation(request, due_ns)

    async with _hold_tasks() as tasks:
        for place in range(concurrency):
            tasks.add(asyncio.create_task(send_in_turn(start_ns + place * START_SPACING_NS)))


@asynccontextmanager
async def _hold_tasks() -> AsyncIterator[set[asyncio.Task[Any]]]:
    """Tasks that have ended when the block is left; those that have not when it is cancelled are, too."""
    tasks: set[asyncio.Task[Any]] = set()
    try:
        yield tasks
        await asyncio.gather(*tasks)
    finally:
        pending = list(tasks)
        # All first, then the waiting: they end side by side.
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def _parse_response(result: RequestResult) -> None:
    """Parse an answer's pieces, a slice at a time."""
    response = result.response
    # A refusal is one JSON object and no stream.
    if response.status != HTTP_OK:
        result.record_refusal(b"".join(piece for _, piece in response.pieces))
    for place, (received_ns, event) in enumerate(decode_events(response.pieces), 1):
        if place % MAX_EVENTS_PER_TURN == 0:
            await asyncio.sleep(0)  # let the event loop read other responses
        result.record_event(received_ns, event)
    response.pieces.clear()  # parsed; a long run would keep all bodies in memory


def classify_failure(result: RequestResult) -> str:
    """The kind of a failure; "" for a success."""
    response = result.response
    # How the exchange ended comes first: a body that was cut off explains nothing.
    if response.error:
        return response.error
    # Before the status, so that these are told apart from other 400s.
    if any(word in result.server_message for word in CONTEXT_EXCEEDED_PHRASES):
        return "longer than the context"
    if response.status != HTTP_OK:
        return f"HTTP {response.status}"
    # A finish reason alone looks like a token with an empty text; the server's count tells.
    if result.stream_error or not result.token_times_ns or result.completion_tokens == 0:
        return result.stream_error or "no token"
    return "" if result.is_finished else "cut off"


def decode_events(pieces: Sequence[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """The data of server-sent events of a body's timed pieces, each with the time of what ended it."""
    ends, lines = list(accumulate(len(piece) for _, piece in pieces)), list[bytes]()
    # Of the whole body, as bytes: a piece may end within a character, or between CR and LF.
    body = b"".join(piece for _, piece in pieces)
    # Behind the last line end the expression would try again at every byte.
    for line in LINE.finditer(body, 0, max(body.rfind(b"\n"), body.rfind(b"\r")) + 1):
        if line[1]:
            # Comments (": ping") and other fields have no data.
            name, _, value = line[1].partition(b":")
            if name == b"data":
                lines.append(value.removeprefix(b" "))
        elif lines:
            # An empty line ends an event as soon as the first byte of its end is there.
            yield pieces[bisect_right(ends, line.end(1))][0], b"\n".join(lines)
            lines = []


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


def _has_token(choice: dict[str, Any]) -> bool:
    """Whether a choice of an event holds a token, rather than only a role or a finish reason."""
    delta = _coerce_object(choice.get("delta"))
    # Any other key: reasoning and tool calls are tokens as well.
    has_content = choice.get("text") or any(value for key, value in delta.items() if key != "role")
    # A token that is only a part of a character has an empty text.
    has_silent_token = "role" not in delta and not choice.get("finish_reason")
    return bool(has_content) or has_silent_token
