# SPDX-License-Identifier: Apache-2.0
"""Call encoders for all media items of a request concurrently; endpoint.py asks.

Each item is one call of upstream_client.py. What an instance encoded again is logged here, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from ttft_otel.model import stages, timing
from ttft_otel.model.endpoints import CHAT_PATH
from ttft_otel.router import types
from ttft_otel.router.disagg import request_body
from ttft_otel.router.disagg.ec_params import MAX_ANSWER_BYTES, TransferParams, splice_params
from ttft_otel.router.disagg.request_plan import LegPlan
from ttft_otel.router.errors import InvalidAnswer, UpstreamRefused
from ttft_otel.router.timeline import Attempt
from ttft_otel.router.upstream import http_headers
from ttft_otel.router.upstream.failures import UPSTREAM_ERRORS, build_unavailable_error
from ttft_otel.router.upstream.query_client import read_at_most
from ttft_otel.router.upstream.upstream_client import (
    FirstByteWait,
    UpstreamClient,
    record_server_timing,
)
from ttft_otel.tracing import clock, context

# Half of --max-items by default: one request must not occupy all encoders.
MAX_CONCURRENT_CALLS: Final = 64  # calls of one request in flight
# Default token count per image when unknown; equal weights make routing fall back to request counts.
DEFAULT_ITEM_TOKENS: Final = 576
LOG_INTERVAL_US: Final = 60_000_000  # microseconds: at most one line in that time
MAX_LOGGED_INSTANCES: Final = 4  # instances in one line, those with the most items
log: Final = logging.getLogger("ttft_otel")


def build_encoder_requests(
    parsed_body: request_body.RequestBody, request: types.RoutingRequest
) -> list[types.RoutingRequest]:
    """The encoder requests for the items of `parsed_body`, longest first to balance the load."""
    encoder_headers = http_headers.build_buffered_headers(request.headers)
    body_frame = request_body.build_encoder_frame(parsed_body)
    requests = [
        types.RoutingRequest(
            stages.ENCODE,
            CHAT_PATH,
            parsed_body.model,
            # An ID per item, by which the calls can be told apart in an encoder's logs.
            f"{request.request_id}-encode-{number}",
            encoder_headers,
            b"",
            media_item=item,
            body_frame=body_frame,
            prompt_tokens=item_tokens or DEFAULT_ITEM_TOKENS,
            tokens_estimated=not item_tokens,
        )
        for number, (item, item_tokens) in enumerate(
            zip(
                parsed_body.media_items,
                parsed_body.map_item_tokens(request.item_tokens),
                strict=True,
            )
        )
    ]
    return sorted(requests, key=lambda each: -each.prompt_tokens)


async def encode_items(
    upstream: UpstreamClient,
    requests: Sequence[types.RoutingRequest],
    trace: context.TraceContext,
    attempt_chains: Sequence[list[Attempt]],
) -> TransferParams:
    """One call for each item; the first that fails for good ends the others.
    Raises UpstreamRefused, UpstreamUnavailable.

    Returns what all answers together announce as `ec_transfer_params`.
    """
    transfer_params = TransferParams()
    # The common case needs no tasks.
    if len(requests) == 1:
        await _encode_item(upstream, requests[0], trace, attempt_chains[0], transfer_params)
        return transfer_params
    semaphore = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

    async def encode_bounded(request: types.RoutingRequest, attempts: list[Attempt]) -> None:
        async with semaphore:
            await _encode_item(upstream, request, trace, attempts, transfer_params)

    tasks = [
        asyncio.create_task(encode_bounded(request, attempts))
        for request, attempts in zip(requests, attempt_chains, strict=True)
    ]
    try:
        # The first failure ends the request, and what the others compute would be lost.
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        # Awaited: attempts have to be over when the request is recorded.
        running = [task for task in tasks if not task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
    for failure in [task.exception() for task in tasks if not task.cancelled()]:
        if failure is not None:
            raise failure
    return transfer_params


async def _encode_item(
    upstream: UpstreamClient,
    request: types.RoutingRequest,
    trace: context.TraceContext,
    attempts: list[Attempt],
    transfer_params: TransferParams,
) -> None:
    """Encode one item, retrying once elsewhere; its response is added to `transfer_params`."""
    while True:
        try:
            response = await upstream.send_request(request, trace, attempts)
            try:
                with FirstByteWait(attempts[-1]):
                    answer = await read_at_most(response, MAX_ANSWER_BYTES)
            finally:
                response.close()  # what is left of it, if anything is
            # The next leg waits for the end of this answer, so that is the end of this one.
            attempts[-1].record_whole_answer()
            if response.status < 400:
                transfer_params.add_answer(answer)
            break
        except asyncio.CancelledError:
            if attempts:
                attempts[-1].record_cancelled()
            raise
        except (*UPSTREAM_ERRORS, InvalidAnswer) as error:  # it broke off, or cannot be used
            # An encoder only fills a cache, so any failure may be followed by another attempt.
            if not upstream.record_connection_failure(request, attempts, error):
                raise build_unavailable_error(request.leg, error) from error
            await upstream.wait_before_retry(attempts)
    # After the end was recorded: reading the header is no part of the leg.
    record_server_timing(attempts[-1], response)
    upstream.pool.record_ended(attempts[-1])
    if response.status >= 400:
        raise UpstreamRefused(
            response.status, http_headers.filter_response_headers(response.raw_headers), answer
        )


def select_critical_attempts(attempt_chains: Sequence[list[Attempt]]) -> list[Attempt]:
    """The attempts of the item on the critical path: failed, else still running, else the slowest.

    attempt_chains: the attempts of each item.
    """
    # A call that never began waited behind MAX_CONCURRENT_CALLS others.
    started = [chain for chain in attempt_chains if chain]
    return max(started, key=_rank_attempts, default=[])


def _rank_attempts(attempts: list[Attempt]) -> tuple[bool, bool, int]:
    last = attempts[-1]
    has_failed = last.is_lost or last.status >= 400
    # In this order; one without a first byte was still running when another one failed.
    return has_failed, not last.first_byte_us, last.first_byte_us


def add_ec_params(
    request: types.RoutingRequest, leg_plan: LegPlan | None, params: bytes
) -> types.RoutingRequest:
    """The request for the leg that prefills, with the encoders' `params` in its body."""
    if leg_plan is not None and len(leg_plan.legs) > 1:
        leg_plan.ec_params = params  # prefill_decode.py sends bodies of the plan's own
        return replace(request, media_encoded=True)
    body_bytes = splice_params(request.body, params) if params else request.body
    return replace(request, body=body_bytes, media_encoded=True)


class RecomputedMediaLog:
    def __init__(self) -> None:
        self._items_by_url: Counter[str] = Counter()  # by the instance's URL
        self._request_count = 0
        self._logged_us: int | None = None

    def record_attempt(self, attempt: Attempt) -> None:
        """Count items that the instance of `attempt` encoded again; usually none."""
        # Instances that are not traced, or have no encoder cache, report nothing.
        if not timing.may_count_media(attempt.timing_header):
            return
        server_timing = attempt.read_server_timing()
        if server_timing is None or server_timing.ec is None or not server_timing.ec.recomputed:
            return
        ec = server_timing.ec
        instance = attempt.instance
        instance.recomputed_items += ec.recomputed
        self._items_by_url[instance.url] += ec.recomputed
        self._request_count += 1
        now_us = clock.now_us()
        if self._logged_us is None or now_us - self._logged_us >= LOG_INTERVAL_US:
            self._logged_us = now_us
            self._log_recomputed()

    def _log_recomputed(self) -> None:
        most_common = self._items_by_url.most_common(MAX_LOGGED_INSTANCES)
        instances = ", ".join(f"{url} ({number})" for url, number in most_common)
        other_count = len(self._items_by_url) - len(most_common)
        log.warning(
            "ttft-otel: media items encoded again although an encoder had encoded them: %d, in %d"
            " requests since the last such line, by %s%s. Possible causes: encoder responses without"
            " ec_transfer_params, different EC connectors on encoder and consumer, an EC port of the"
            " encoder that the consumer cannot reach, or a cache (ec_cpu_bytes) too small for the"
            " requests in flight. What to check: docs/router.md, 'Encoder-cache parameters'.",
            self._items_by_url.total(),
            self._request_count,
            instances,
            f" and {other_count} more" if other_count else "",
        )
        self._items_by_url.clear()
        self._request_count = 0
