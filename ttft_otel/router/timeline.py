# SPDX-License-Identifier: Apache-2.0
"""The life of one client request in the router: its attempts with their times, its stages, its steps.

Stages add up exactly to the TTFT; breakdown.py places those of the attempts. Other modules read the
fields of attempts, timelines and exchanges and write them only by their methods;
tests/router/test_timeline.py holds them to that. proxy/exchange_reporter.py tells them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from ttft_otel.model.breakdown import Breakdown, PartitionCursor, place_leg
from ttft_otel.model.endpoints import RESPONSES_PATH
from ttft_otel.model.names import keys
from ttft_otel.model.stages import HELD_BY_QUEUES, HOLD, UNATTRIBUTED
from ttft_otel.model.timing import ServerTiming, parse_server_timing
from ttft_otel.tracing import clock
from ttft_otel.tracing.context import TraceContext

if TYPE_CHECKING:
    from ttft_otel.router.types import AttemptLoad, Decision, Instance


class Attempt(msgspec.Struct, eq=False):
    """One HTTP call to a leg; times are microseconds of CLOCK_MONOTONIC, 0 if not reached yet.

    Fields up to `on_begun` are set at creation, the others only by its methods.

    first_byte_us: end of the leg on the way to the first token, which is the first body chunk of a
    backend and the whole response of an encoder. is_lost: it failed, and was retried if possible.
    resumed_us: end of the back-off before the retry. is_new_connection: the connection was opened for it.
    """

    leg: str
    path: str
    instance: Instance
    span_id: str
    sent_us: int
    number: int = 1
    candidates: tuple[Instance, ...] = ()
    decision: Decision | None = None
    policy: str = ""
    load_entry: AttemptLoad | None = None  # its entry in the policy's pending load
    on_begun: Callable[[Attempt], None] | None = None  # called at its first byte

    is_new_connection: bool = False
    status: int = 0
    error: str = ""
    first_byte_us: int = 0
    ended_us: int = 0
    is_lost: bool = False
    is_instance_failure: bool = True  # if it failed: whether that counts against the instance
    resumed_us: int = 0
    is_overdue: bool = False  # its answer had not begun in time
    waiting_task: asyncio.Task[Any] | None = None  # while it waits for the first byte
    timing_header: str = ""  # Server-Timing as the instance sent it
    server_timing: ServerTiming | None | UnsetType = UNSET  # of the header, once somebody has asked

    def record_sent(self, is_new_connection: bool) -> None:
        """Record that its connection is requested, or that it is sent on an open one."""
        self.sent_us = clock.now_us()
        self.is_new_connection = is_new_connection

    def record_waiting(self, task: asyncio.Task[Any] | None) -> None:
        """From now on `task` waits for its first byte, or with None nobody does."""
        self.waiting_task = task

    def time_out(self) -> None:
        """The time for its first byte is over: cancel the task that waits for it."""
        # The deadline queue forgets an attempt at its end only: the answer may have begun long ago.
        if not self.first_byte_us and not self.ended_us:
            self.is_overdue = True
            # Between two waits there is no task: the next one sees `is_overdue`, and raises.
            if self.waiting_task is not None:
                self.waiting_task.cancel()

    def record_head(self, status: int) -> None:
        """Record the `status` of the response."""
        self.status = status
        if status >= 400:
            self.error = str(status)

    def record_first_byte(self) -> None:
        """Record that the first body chunk was received."""
        self.first_byte_us = clock.now_us()
        if self.on_begun is not None:
            self.on_begun(self)

    def record_whole_answer(self) -> None:
        """Record that a response on which the next leg depends was received completely."""
        if not self.ended_us:
            self.ended_us = clock.now_us()
        # The next leg needs the whole answer, so its first byte did not end this leg.
        self.first_byte_us = self.ended_us
        if self.on_begun is not None:
            self.on_begun(self)

    def record_server_timing(self, header: str) -> None:
        """Record what the instance said in Server-Timing, "" for nothing."""
        self.timing_header = header
        self.server_timing = UNSET

    def read_server_timing(self) -> ServerTiming | None:
        """The header, parsed at the first call; None for none that is ours."""
        if self.server_timing is UNSET:
            self.server_timing = parse_server_timing(self.timing_header)
        return self.server_timing

    def record_failure(self, error: str, is_instance_failure: bool = True) -> None:
        """Record that the response broke off; `error` is the exception class."""
        self.error = error
        self.is_instance_failure = is_instance_failure

    def record_ended(self) -> None:
        """Record that no more of it is read. Idempotent: the first call counts."""
        if not self.ended_us:
            self.ended_us = clock.now_us()

    def record_cancelled(self) -> None:
        """Mark it cancelled: the client disconnected, or another call of the request failed."""
        # After its end only what follows is cancelled, and the result of the attempt stays.
        if not self.ended_us:
            self.error = keys.ERROR_CANCELLED
            self.ended_us = clock.now_us()

    def record_lost(self, error: str = "") -> None:
        """Record that it failed and its response is not used; `error` "" keeps that of its status."""
        self.is_lost = True
        self.ended_us = clock.now_us()
        if error:
            self.error = error

    def record_resumed(self) -> None:
        """Record the end of the back-off before the retry."""
        self.resumed_us = clock.now_us()


class Hold(msgspec.Struct):
    """When a request waited at the router for a shorter queue; released_us: 0 if it never went on."""

    began_us: int
    released_us: int = 0
    reason: str = HELD_BY_QUEUES


class RequestTimeline(msgspec.Struct):
    """Times of one request in microseconds of CLOCK_MONOTONIC, 0 if not reached yet.

    critical_path: the attempts of each leg on it, in order. ended_us: when the first chunk was sent to the
    client or the request failed; 0 for a response that is not streamed, whose first token was earlier.
    lookup_began_us, tokenized_us, looked_up_us: of a prompt and its prefix, before any leg.
    """

    arrived_us: int
    parsed_us: int = 0
    critical_path: list[list[Attempt]] = []
    ended_us: int = 0
    lookup_began_us: int = 0
    tokenized_us: int = 0
    looked_up_us: int = 0
    hold: Hold | None = None  # with --max-queue-ms

    def record_lookup_began(self) -> None:
        """Record that tokenizing and looking up the prompt begin."""
        self.lookup_began_us = clock.now_us()

    def record_tokenized(self) -> None:
        """Record that the prompt was tokenized, or could not be."""
        self.tokenized_us = clock.now_us()

    def record_looked_up(self) -> None:
        """Record the end of the lookup; without `record_tokenized`, all of it was tokenizing."""
        self.looked_up_us = clock.now_us()
        self.tokenized_us = self.tokenized_us or self.looked_up_us

    def record_hold(self, hold: Hold) -> None:
        """Record that it waits for an instance with a shorter queue."""
        self.hold = hold

    def record_ended(self) -> None:
        """Record the end of the measured time. Idempotent: the first call counts."""
        if not self.ended_us:
            self.ended_us = clock.now_us()


def partition_timeline(timeline: RequestTimeline) -> Breakdown:
    """Partition `timeline`, from arrival to the first token sent, into stages."""
    cursor = _place_stages(timeline)
    # A stage may have several pieces, as router.route does where an attempt is repeated.
    totals: dict[str, int] = {}
    for label, low, high in cursor.pieces:
        totals[label] = totals.get(label, 0) + high - low
    lost = totals.pop(UNATTRIBUTED, 0)
    return Breakdown(
        timeline.arrived_us, cursor.position, cursor.pieces, totals, lost, cursor.clamped
    )


def _place_stages(timeline: RequestTimeline) -> PartitionCursor:
    cursor = PartitionCursor(timeline.arrived_us)
    # A request that failed while its body was read was received for all of its time.
    cursor.close_stage("router.receive", timeline.parsed_us or timeline.ended_us)
    attempts = [attempt for chain in timeline.critical_path for attempt in chain]
    if timeline.lookup_began_us:
        cursor.close_stage("router.route", timeline.lookup_began_us)
        cursor.close_stage("router.tokenize", timeline.tokenized_us or timeline.ended_us)
        # Nothing was looked up before the tokens were known: there is no such stage then.
        if timeline.tokenized_us:
            cursor.close_stage("router.lookup", timeline.looked_up_us or timeline.ended_us)
    hold = timeline.hold
    for attempt in attempts:
        # Encoders come before it.
        if hold is not None and attempt.sent_us >= hold.began_us:
            _place_hold(cursor, hold, timeline.ended_us)
            hold = None
        server_timing = attempt.read_server_timing()
        place_leg(cursor, attempt, server_timing, timeline.ended_us, attempt is attempts[-1])
    if hold is not None:
        _place_hold(cursor, hold, timeline.ended_us)
    if timeline.ended_us:
        # Without an attempt (no instance, or none in time) it was refused while it was routed.
        last_stage = "router.egress" if attempts else "router.route"
        cursor.close_stage(last_stage, max(timeline.ended_us, cursor.position))
    return cursor


def _place_hold(cursor: PartitionCursor, hold: Hold, ended_us: int) -> None:
    cursor.close_stage("router.route", hold.began_us)
    cursor.close_stage(HOLD, hold.released_us or ended_us)


def find_failed_stage(timeline: RequestTimeline) -> str:
    """The stage in which the request failed; inside a leg it is the hop, as no more is known."""
    if not timeline.parsed_us:
        return "router.receive"
    if timeline.lookup_began_us and not timeline.looked_up_us:
        return "router.lookup" if timeline.tokenized_us else "router.tokenize"
    if timeline.hold is not None and not timeline.hold.released_us:
        return HOLD
    attempts = [attempt for chain in timeline.critical_path for attempt in chain]
    return f"router.hop.{attempts[-1].leg}" if attempts else "router.route"


class Exchange(msgspec.Struct):
    """One HTTP request of a client.

    first_chunk_us: when the first body chunk of an instance's answer was out; 0: not yet.
    error: the last reason why it went wrong; an error answer has its status here and may still be
    relayed as a whole. is_client_gone: why its task is cancelled.
    attempt_chains: the attempts at every leg, encoders' included, each in order.
    """

    trace_context: TraceContext
    request_id: str
    path: str
    route: str
    scheme: str
    operation: str
    is_outermost: bool
    timeline: RequestTimeline
    owner: str | None = None  # who has sent it, by the key; None until it is admitted
    is_finished: bool = False  # the last bytes are being sent or were sent
    model: str = ""
    is_model_listed: bool = False  # by an instance
    wants_stream: bool = False
    is_background: bool = False  # the answer only says that the request is queued
    is_streaming: bool = False
    has_token: bool = True  # False once an instance has answered without a first token
    first_chunk_us: int = 0
    has_reported_ttft: bool = False
    is_client_gone: bool = False
    status: int = 0
    error: str = ""
    failed_stage: str = ""
    attempt_chains: list[list[Attempt]] = []
    # how the first token travelled, and why not otherwise
    first_token_outcome: tuple[str, str] = ("", "")
    first_token_mismatch: bool = False  # D's first token was not P's
    handover_timeline: RequestTimeline | None = None  # from P's token to D's next

    @property
    def has_ttft(self) -> bool:
        """Whether its TTFT is reported; one that was only queued has none, unless it failed."""
        return bool(self.operation) and not self.is_queued_only

    @property
    def is_queued_only(self) -> bool:
        """Whether its answer only says that the request is queued."""
        return self.is_background and self.has_answered

    @property
    def has_answered(self) -> bool:
        """Whether the first chunk of a good answer is out: a later error is not one of its TTFT."""
        return self.first_chunk_us > 0 and self.status < 400 and self.has_token

    def record_owner(self, owner: str) -> None:
        """Record whose request it is."""
        self.owner = owner

    def record_parsed(self, model: str, wants_stream: bool, asks_background: bool = False) -> None:
        """Record that the body is parsed, with its `model` and whether it asks for a stream.

        asks_background: it has `background`, which /v1/responses answers before there is a token.
        """
        self.model = model
        self.wants_stream = wants_stream
        self.is_background = asks_background and not wants_stream and self.path == RESPONSES_PATH
        self.timeline.parsed_us = clock.now_us()

    def record_model_listed(self) -> None:
        """Record that an instance lists the model."""
        self.is_model_listed = True

    def record_first_token_mode(self, mode: str, reason: str) -> None:
        """Record the first-token `mode`, and the `reason` if it is not the configured one."""
        self.first_token_outcome = (mode, reason)

    def record_token_mismatch(self) -> None:
        """Record that D's first token differs from P's, which the client has."""
        self.first_token_mismatch = True

    def record_answer(self, is_streaming: bool, error: str = "") -> None:
        """Record the start of an instance's response; `error` says why it has no first token."""
        self.is_streaming = is_streaming
        self.error = error
        self.has_token = not error

    def record_head(self, status: int) -> None:
        """Record that `status` and headers are sent. Raises RuntimeError if they were before."""
        if self.status:
            raise RuntimeError(f"the head of this answer is out, with status {self.status}")
        self.status = status

    def record_last_send(self) -> None:
        """Record that the next send is the last one.

        Called before that send, because uvicorn may report a disconnect during it, and a client that
        disconnects after the last byte has not cancelled anything.
        """
        self.is_finished = True

    def record_first_chunk(self) -> None:
        """Record that the first body chunk was sent, at which the TTFT of a stream ends."""
        self.first_chunk_us = clock.now_us()
        # Of an answer that is not streamed the first token was earlier: `rest` of Server-Timing.
        if self.is_streaming:
            self.timeline.ended_us = self.first_chunk_us

    def record_ttft_reported(self) -> None:
        """Record that the TTFT part of its Record was sent."""
        self.has_reported_ttft = True

    def record_failure(self, reason: str) -> None:
        """Record a failure; `reason` is an exception class, a status, or what the client did."""
        self.error = reason

    def record_error_answer(self, status: int) -> None:
        """Record an error response with `status`; the reason of an earlier failure is kept."""
        self.error = self.error or str(status)
        self.record_last_send()

    def record_client_left(self) -> bool:
        """Record that the client disconnected; returns whether the response was incomplete."""
        if self.is_finished:
            return False
        self.is_client_gone = True
        return True

    def record_ended(self, now_us: int) -> None:
        """Record the end; if the request failed before its first chunk, its TTFT ends at `now_us`."""
        # Without an error its end is known: the first chunk of a stream, or `rest` tells it (0).
        if not self.error:
            return
        if not self.first_chunk_us:
            self.timeline.ended_us = now_us
        if not self.has_answered:
            self.failed_stage = find_failed_stage(self.timeline)

    def add_attempts(self, timeline: RequestTimeline | None = None) -> list[Attempt]:
        """Add a list for the attempts of one more leg on the critical path of `timeline`, or its own."""
        attempts: list[Attempt] = []
        # Before anything is sent, so that attempts that fail or are cancelled are in it, too.
        self.attempt_chains.append(attempts)
        (timeline or self.timeline).critical_path.append(attempts)
        return attempts

    def add_parallel_attempts(self, number: int) -> list[list[Attempt]]:
        """Add lists for `number` concurrent encoder calls; the critical one is chosen later."""
        chains: list[list[Attempt]] = [[] for _ in range(number)]
        self.attempt_chains.extend(chains)
        return chains

    def begin_handover(self) -> RequestTimeline:
        """Start the timeline from P's token, which was sent, to D's next token."""
        # Where the TTFT ends, so that both partitions meet without a gap.
        began_us = self.timeline.ended_us
        self.handover_timeline = RequestTimeline(began_us, began_us)
        return self.handover_timeline
