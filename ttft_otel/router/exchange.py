# SPDX-License-Identifier: Apache-2.0
"""The life of one client request in the router: each step is recorded here, exchange_reporter.py tells it.

Other modules read an Exchange's fields and write them only by its methods; tests/router/test_exchange.py
holds them to that.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from ttft_otel.model.endpoints import RESPONSES_PATH
from ttft_otel.model.names import keys
from ttft_otel.router.timeline import Attempt, RequestTimeline, find_failed_stage
from ttft_otel.tracing import clock
from ttft_otel.tracing.context import TraceContext

CLIENT_DISCONNECTED: Final = keys.ERROR_DISCONNECTED


class ExchangePhase(enum.IntEnum):
    """Progress of the response; it only increases."""

    RECEIVING = 0  # the body is not parsed yet
    ROUTING = 1  # prompt, encoders, instances; nothing was sent to the client yet
    HEAD_SENT = 2  # status and headers were sent or are being sent
    RELAYING = 3  # the first body chunk was sent, more follow
    FINISHED = 4  # the last bytes are being sent or were sent


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
    phase: ExchangePhase = ExchangePhase.RECEIVING
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

    def _advance(self, phase: ExchangePhase) -> None:
        if phase > self.phase:
            self.phase = phase

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
        self._advance(ExchangePhase.ROUTING)

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
        self._advance(ExchangePhase.HEAD_SENT)

    def record_last_send(self) -> None:
        """Record that the next send is the last one.

        Called before that send, because uvicorn may report a disconnect during it, and a client that
        disconnects after the last byte has not cancelled anything.
        """
        self.phase = ExchangePhase.FINISHED

    def record_first_chunk(self) -> None:
        """Record that the first body chunk was sent, at which the TTFT of a stream ends."""
        self.first_chunk_us = clock.now_us()
        # Of an answer that is not streamed the first token was earlier: `rest` of Server-Timing.
        if self.is_streaming:
            self.timeline.ended_us = self.first_chunk_us
        self._advance(ExchangePhase.RELAYING)

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
        if self.phase == ExchangePhase.FINISHED:
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
