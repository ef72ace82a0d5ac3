# SPDX-License-Identifier: Apache-2.0
"""Sends requests to instances: choose one, send, retry on another, note the times."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, Final

import aiohttp
import msgspec

from ttft_otel.model import timing
from ttft_otel.model.names import header_names, keys
from ttft_otel.model.stages import ENCODE, INTERMEDIATE_ROLES
from ttft_otel.router import types
from ttft_otel.router.errors import FirstByteTimeout, UpstreamUnavailable
from ttft_otel.router.limits import RouterLimits
from ttft_otel.router.routing.routing_service import RoutingService
from ttft_otel.router.timeline import Attempt
from ttft_otel.router.upstream import failures
from ttft_otel.router.upstream.connection_pool import ClientTls, ConnectionPool, QueryClient
from ttft_otel.router.upstream.instance_connection import InstanceAnswer
from ttft_otel.router.upstream.instance_pool import HealthMonitor
from ttft_otel.tracing import clock, context

_SERVER_TIMING: Final = header_names.SERVER_TIMING.lower().encode()


class UpstreamClient:
    """Requests and questions to all instances; started and closed on the event loop.

    queries: for the router's own questions, from start() on.
    """

    queries: QueryClient
    _connections: ConnectionPool

    def __init__(
        self,
        routing: RoutingService,
        max_retries: int = failures.MAX_RETRIES,
        budget_ratio: float = failures.RETRY_BUDGET_RATIO,
        health_monitor: HealthMonitor | None = None,
        limits: RouterLimits | None = None,
        tls: ClientTls | None = None,
        api_key: str = "",
    ) -> None:
        self.pool = routing.pool
        self.tls = tls
        self.api_key = api_key  # of the router's own questions
        self.limits = limits or RouterLimits()
        self.routing = routing
        self.max_retries = max_retries
        self.retry_budget = failures.RetryBudget(budget_ratio)
        self.health_monitor = health_monitor or HealthMonitor(routing.pool)
        self.retry_counts: dict[str, int] = {}

    async def start(self) -> None:
        """Open the clients, and start health probes and routing."""
        limits = self.limits
        self.queries = QueryClient(limits.max_answer_header_bytes, self.tls, self.api_key)
        self._connections = ConnectionPool(
            limits.max_answer_header_bytes, limits.total_timeout, limits.idle_timeout, self.tls
        )
        await self.health_monitor.start(self.queries)
        await self.routing.start(self.queries)

    async def close(self) -> None:
        # In reverse order of start(): the clients are closed when nobody uses them any more.
        await self.routing.close()
        await self.health_monitor.close()
        await self._connections.close()
        await self.queries.close()

    async def send_request(
        self, request: types.RoutingRequest, trace: context.TraceContext, attempts: list[Attempt]
    ) -> InstanceAnswer:
        """Send the request of one leg, retrying where failures.py allows it; fills `attempts`.

        The caller closes the response and calls `pool.record_ended` for every attempt.
        Raises UpstreamUnavailable, SloUnreachable.
        """
        self.retry_budget.record_request()
        candidates = self.pool.get_candidates(request.leg, request.model)
        if attempts:
            candidates = _exclude_tried(candidates, attempts)
        if not candidates:
            has_any = bool(self.pool.get(request.leg))
            message = (
                "No {} instance can take the request now."
                if has_any
                else "There is no {} instance."
            )
            raise UpstreamUnavailable(503, message.format(request.leg))
        while True:
            is_retry = bool(attempts) and attempts[-1].is_lost
            decision = self.routing.choose_instance(request, candidates, clock.now_us(), is_retry)
            try:
                response = await self._send_attempt(request, trace, decision, candidates, attempts)
            except failures.UPSTREAM_ERRORS as error:
                candidates = self.record_connection_failure(request, attempts, error)
                if not candidates:
                    raise failures.build_unavailable_error(request.leg, error) from error
            else:
                is_retryable = response.status in failures.UNAVAILABLE_STATUSES
                if not (is_retryable or (request.leg == ENCODE and response.status >= 500)):
                    return response
                candidates = self._record_refusal(request, attempts)
                if not candidates:
                    return response
                # Closed, not read to its end: an instance in trouble may send that slowly.
                response.close()
            await self.wait_before_retry(attempts)

    def record_connection_failure(
        self, request: types.RoutingRequest, attempts: list[Attempt], error: BaseException
    ) -> tuple[types.Instance, ...]:
        """Record a failed connection of the last attempt. Returns candidates for a retry, () for none."""
        attempt = attempts[-1]
        attempt.record_lost(type(error).__name__)
        # Without a connection the instance read nothing.
        is_unsent = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
        is_race = failures.is_idle_close_race(attempt, error)
        if not is_race and failures.is_instance_failure(error):
            self.pool.record_failure(attempt.instance, failures.describe_error(error), is_unsent)
        if failures.is_resource_shortage(error):
            return ()  # there is none for another instance either
        candidates = _exclude_tried(self.pool.get_candidates(request.leg, request.model), attempts)
        if is_race:
            # Nothing was read, and it says nothing about the instance: it may be used again, once.
            return self._take_retry(
                request, candidates or (attempt.instance,), attempts, failures.MAX_RACE_RETRIES
            )
        if not (is_unsent or request.leg == ENCODE):
            return ()
        return self._take_retry(request, candidates, attempts, self.max_retries)

    def _record_refusal(
        self, request: types.RoutingRequest, attempts: list[Attempt]
    ) -> tuple[types.Instance, ...]:
        """Record a retryable status of the last attempt. Returns candidates for a retry, () for none."""
        attempt = attempts[-1]
        if attempt.status in failures.UNAVAILABLE_STATUSES:  # any other may be the client's fault
            self.pool.record_failure(attempt.instance, f"it responded with status {attempt.status}")
        return () if request.single_use else self.take_refused_retry(request, attempts)

    def take_refused_retry(
        self, request: types.RoutingRequest, attempts: list[Attempt]
    ) -> tuple[types.Instance, ...]:
        """Give up the last attempt, which was refused, if there are candidates for a retry; () for none."""
        candidates = _exclude_tried(self.pool.get_candidates(request.leg, request.model), attempts)
        candidates = self._take_retry(request, candidates, attempts, self.max_retries)
        if candidates:
            attempts[-1].record_lost()  # otherwise it is the client's answer
        return candidates

    def _take_retry(
        self,
        request: types.RoutingRequest,
        candidates: tuple[types.Instance, ...],
        attempts: list[Attempt],
        max_retries: int,
    ) -> tuple[types.Instance, ...]:
        """The others, if after its last attempt this request and the budget still have a retry."""
        if request.leg == ENCODE:
            max_retries = min(max_retries, failures.MAX_ENCODER_RETRIES)
        if (
            not candidates
            or sum(attempt.is_lost for attempt in attempts[:-1]) >= max_retries
            or not self.retry_budget.try_spend()
        ):
            return ()
        self.retry_counts[request.leg] = self.retry_counts.get(request.leg, 0) + 1
        return candidates

    async def wait_before_retry(self, attempts: list[Attempt]) -> None:
        """Wait with jitter before the next attempt; the time counts to the lost one of `attempts`."""
        attempt = attempts[-1]
        # Before the pause, in which the instance has no work of this request.
        self.pool.record_ended(attempt)
        try:
            longest_s = failures.FIRST_BACKOFF_S * 2 ** (attempt.number - 1)
            await asyncio.sleep(random.uniform(0, longest_s))
        finally:
            attempt.record_resumed()

    async def _send_attempt(
        self,
        request: types.RoutingRequest,
        trace: context.TraceContext,
        decision: types.Decision,
        candidates: tuple[types.Instance, ...],
        attempts: list[Attempt],
    ) -> InstanceAnswer:
        instance = decision.instance
        span_id = context.new_span_id()
        own_headers = {header_names.REQUEST_ID: request.request_id}
        if trace.trace_id:
            own_headers[header_names.TRACEPARENT] = trace.format_traceparent(span_id)
            own_headers[header_names.ASK_TIMING] = "1"
            own_headers[header_names.LEG] = request.leg
            if request.media_encoded:
                own_headers[header_names.MEDIA_ENCODED] = "1"
        if trace.tracestate:
            own_headers[header_names.TRACESTATE] = trace.tracestate
        path = request.path.partition("?")[0][:256]
        sent_us = clock.now_us()
        policy = self.routing.get_policy(request.leg)
        load_entry = self.routing.add_load_entry(request, decision, span_id, sent_us)
        attempt = Attempt(
            request.leg,
            path,
            instance,
            span_id,
            sent_us,
            len(attempts) + 1,
            candidates,
            decision,
            policy.name,
            load_entry,
            self.pool.record_begun,
        )
        attempts.append(attempt)
        self.pool.record_sent(attempt)
        if load_entry is not None and not trace.trace_id and policy.uses_predictions:
            # Server-Timing is removed from the response, unless the client asked for it.
            load_entry.requested_timing = request.headers.get(header_names.ASK_TIMING) != "1"
            own_headers[header_names.ASK_TIMING] = "1"
        body = (
            (request.body,)
            if request.body_frame is None
            else (request.body_frame[0], request.media_item, request.body_frame[1])
        )
        try:
            with FirstByteWait(attempt):
                response = await self._connections.send_request(
                    attempt, request.path, {**request.headers, **own_headers}, body
                )
        # The client left, or another call failed: the instance did nothing wrong.
        except asyncio.CancelledError:
            attempt.record_cancelled()
            raise
        attempt.record_head(response.status)
        return response


TIMED_OUT_MESSAGE: Final = "it did not begin to answer in time"


class FirstByteWait(msgspec.Struct):
    """Context manager that raises FirstByteTimeout once the time of `attempt` is over."""

    _attempt: Attempt
    _task: asyncio.Task[Any] | None = None

    def __enter__(self) -> None:
        # The time may have ended between two waits, when there was nobody to cancel.
        if self._attempt.is_overdue:
            raise FirstByteTimeout(TIMED_OUT_MESSAGE)
        self._task = asyncio.current_task()
        self._attempt.record_waiting(self._task)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._attempt.record_waiting(None)
        # If the client left as well, its cancellation has to go on.
        if kind is asyncio.CancelledError and self._attempt.is_overdue and self._is_own_cancel():
            raise FirstByteTimeout(TIMED_OUT_MESSAGE) from error

    def _is_own_cancel(self) -> bool:
        """Take back the cancellation by `time_out`; False if the task was cancelled by others, too.

        Python 3.10 does not count cancellations.
        """
        # Since Python 3.11 a task counts its cancellations; uncancel() returns how many are left.
        uncancel = getattr(self._task, "uncancel", None)
        return uncancel is None or not uncancel()


async def read_first_chunk(response: InstanceAnswer, attempt: Attempt) -> bytes:
    """The first chunk of the body, b"" if it is empty. Raises FirstByteTimeout."""
    first_chunk = response.read_nowait()  # mostly it came with the headers
    # An answer that is here cannot be late, so the common case registers no wait.
    if not first_chunk and not response.at_eof():
        with FirstByteWait(attempt):
            first_chunk = await response.readany()
    attempt.record_first_byte()
    return first_chunk


def record_server_timing(attempt: Attempt, response: InstanceAnswer) -> None:
    """Record Server-Timing of `response`, after the first chunk: not counted in `router.hop`."""
    header_value = ", ".join(response.list_values(_SERVER_TIMING))
    attempt.record_server_timing(header_value)
    if timing.reports_no_token(header_value) and not attempt.error:
        attempt.record_failure(keys.ERROR_NO_TOKEN, is_instance_failure=False)
    if attempt.load_entry is not None and not attempt.error:
        # their whole answer is what the next leg waits for
        is_streaming = (
            attempt.leg in INTERMEDIATE_ROLES or response.content_type == "text/event-stream"
        )
        attempt.load_entry.record_first_token(
            attempt.first_byte_us, attempt.read_server_timing(), is_streaming
        )


def _exclude_tried(
    candidates: tuple[types.Instance, ...], attempts: Sequence[Attempt]
) -> tuple[types.Instance, ...]:
    tried = [attempt.instance for attempt in attempts]
    return tuple(each for each in candidates if each not in tried)
