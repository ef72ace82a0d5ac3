# SPDX-License-Identifier: Apache-2.0
"""Media items go to encoders, and what these announce to the leg that prefills; endpoint.py asks.

Each item is one call of upstream_client.py. An EC connector announces in the encoder's answer where each
encoding can be fetched from (`ec_transfer_params`, an object by the item's hash). A consumer fetches only
what its own request carries. What an instance encoded again is logged here, too.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from ttft_otel.model import stages, timing
from ttft_otel.model.endpoints import CHAT_PATH
from ttft_otel.router import types
from ttft_otel.router.disagg import request_body
from ttft_otel.router.disagg.request_plan import LegPlan
from ttft_otel.router.errors import InvalidAnswer, UpstreamRefused, UpstreamUnavailable
from ttft_otel.router.routing.upstream_client import (
    FirstByteWait,
    UpstreamClient,
    record_server_timing,
)
from ttft_otel.router.timeline import Attempt, Exchange
from ttft_otel.router.upstream import http_headers
from ttft_otel.router.upstream.connection_pool import read_at_most
from ttft_otel.router.upstream.failures import UPSTREAM_ERRORS, build_unavailable_error
from ttft_otel.tracing import clock, context

# Half of --max-items by default: one request must not occupy all encoders.
MAX_CONCURRENT_CALLS: Final = 64  # calls of one request in flight
# Default token count per image when unknown; equal weights make routing fall back to request counts.
DEFAULT_ITEM_TOKENS: Final = 576
LOG_INTERVAL_US: Final = 60_000_000  # microseconds: at most one line in that time
MAX_LOGGED_INSTANCES: Final = 4  # instances in one line, those with the most items
EC_PARAMS_FIELD: Final = "ec_transfer_params"
# An entry of vLLM 0.32's ECCPUConnector is about 200 bytes, with a video's timestamps some thousand.
MAX_ANSWER_BYTES: Final = 1 << 20  # bytes of one encoder's answer
MAX_PARAMS_BYTES: Final = 4 << 20  # bytes of all entries of one request
MAX_ENTRIES: Final = 4096  # entries of one request, and of one answer
MAX_NESTING_DEPTH: Final = 32  # objects and lists inside one another in one entry
log: Final = logging.getLogger("ttft_otel")

T = TypeVar("T")

_EMPTY_OBJECT: Final = re.compile(rb"\s*\{\s*\}\s*")
_WHITESPACE: Final = b" \t\n\r"


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
    upstream: UpstreamClient, requests: Sequence[types.RoutingRequest], exchange: Exchange
) -> bytes:
    """Call an encoder for each item, all at once; the slowest call is on the critical path.

    Returns what all answers together announce as `ec_transfer_params`, b"" for nothing.
    Raises UpstreamRefused, UpstreamUnavailable.
    """
    transfer_params = TransferParams()
    attempt_chains = exchange.add_parallel_attempts(len(requests))
    try:
        await _encode_all(
            upstream, requests, exchange.trace_context, attempt_chains, transfer_params
        )
    finally:
        # Also of a request that failed: its time ended in the call that failed.
        exchange.timeline.critical_path.append(select_critical_attempts(attempt_chains))
    return transfer_params.to_json()


async def _encode_all(
    upstream: UpstreamClient,
    requests: Sequence[types.RoutingRequest],
    trace: context.TraceContext,
    attempt_chains: Sequence[list[Attempt]],
    transfer_params: TransferParams,
) -> None:
    """One call for each item; the first that fails for good ends the others."""
    # The common case needs no tasks.
    if len(requests) == 1:
        await _encode_item(upstream, requests[0], trace, attempt_chains[0], transfer_params)
        return
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
        leg_plan.ec_params = params  # endpoint.py sends bodies of the plan's own
        return replace(request, media_encoded=True)
    body_bytes = splice_params(request.body, params) if params else request.body
    return replace(request, body=body_bytes, media_encoded=True)


class _EncoderAnswer(msgspec.Struct):
    """The only field that is read; msgspec skips the others without building objects."""

    ec_transfer_params: Raw = Raw(b"null")


_answer_decoder: Final = msgspec.json.Decoder(_EncoderAnswer)
_entries_decoder: Final = msgspec.json.Decoder(dict[str, Raw])
_any_decoder: Final = msgspec.json.Decoder()
_NO_OBJECT_MESSAGE: Final = f"its answer, or {EC_PARAMS_FIELD} in it, is not a JSON object"
_TOO_DEEP_MESSAGE: Final = f"its answer, or {EC_PARAMS_FIELD} in it, is nested too deeply"


class TransferParams(msgspec.Struct):
    """The entries of all encoder answers of one request, by the hash of the item.

    What an entry holds is the connector's own and passes byte for byte, unknown keys included.
    `item_indices` too, although they count within the encoder's request, which has one item: no
    consumer of vLLM 0.32 reads them (they are written in ec_connector/utils.py and nowhere read).
    """

    _entries: dict[str, bytes] = {}
    _size_bytes: int = 0

    def add_answer(self, data: bytes) -> None:
        """Add the parameters in `data`, an encoder's answer; it may have none.

        Raises InvalidAnswer, and UpstreamUnavailable where all answers of the request are too much, which
        one with very many items can cause too.

        Of two announcements of one hash the longer one stays: an encoder that has evicted the
        encoding announces the item without an address (vLLM 0.32, ec_connector/cpu/scheduler,
        request_finished), and another encoder's entry may have one.
        """
        params = _decode(_answer_decoder, data, _NO_OBJECT_MESSAGE).ec_transfer_params
        if bytes(params) == b"null":
            return
        entries = _decode(_entries_decoder, params, _NO_OBJECT_MESSAGE)
        if len(entries) > MAX_ENTRIES:
            raise InvalidAnswer(f"its {EC_PARAMS_FIELD} have more than {MAX_ENTRIES} entries")
        for mm_hash, raw in entries.items():
            entry = bytes(raw)
            if entry == b"null":
                continue
            _check_entry(entry)
            known_entry = self._entries.get(mm_hash, b"")
            if len(entry) > len(known_entry):
                self._size_bytes += (
                    len(entry) - len(known_entry) + (0 if known_entry else len(mm_hash))
                )
                self._entries[mm_hash] = entry
            if self._size_bytes > MAX_PARAMS_BYTES or len(self._entries) > MAX_ENTRIES:
                raise UpstreamUnavailable(
                    502,
                    f"The encode instances' answers cannot be used: {EC_PARAMS_FIELD} of one request "
                    f"exceed {MAX_PARAMS_BYTES} bytes or {MAX_ENTRIES} entries.",
                )

    def to_json(self) -> bytes:
        if not self._entries:
            return b""
        return msgspec.json.encode({key: Raw(entry) for key, entry in self._entries.items()})


def splice_params(body: bytes, params: bytes) -> bytes:
    """Append `params` as the last member of the JSON object `body`, without parsing it.

    Parsers take the last of equal names, so that nothing in the body can override it.
    """
    end = len(body.rstrip(_WHITESPACE)) - 1  # where the closing brace is
    comma = b"" if _EMPTY_OBJECT.fullmatch(body) else b","
    name = b'"%b":' % EC_PARAMS_FIELD.encode()
    # One copy: the body may hold megabytes of media.
    return b"".join((memoryview(body)[:end], comma, name, params, b"}"))


def _check_entry(entry: bytes) -> None:
    """Raise InvalidAnswer for an entry that is not a JSON object or that a consumer could not parse."""
    if not entry.startswith(b"{"):
        raise InvalidAnswer(f"an entry of its {EC_PARAMS_FIELD} is not a JSON object")
    # parsed in full, because msgspec does not validate what it skips
    value = _decode(_any_decoder, entry, f"a number in its {EC_PARAMS_FIELD} is out of range")
    if _measure_nesting(value) > MAX_NESTING_DEPTH:
        raise InvalidAnswer(_TOO_DEEP_MESSAGE)


def _decode(decoder: msgspec.json.Decoder[T], data: bytes | Raw, mistyped: str) -> T:
    """Decode JSON, or raise InvalidAnswer; with the text `mistyped` where it is other JSON than wanted."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise InvalidAnswer(mistyped) from error
    except RecursionError as error:
        raise InvalidAnswer(_TOO_DEEP_MESSAGE) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidAnswer("its answer is not JSON") from error


def _measure_nesting(value: Any) -> int:
    """How many objects and lists are inside one another; stops soon after MAX_NESTING."""
    depth, level = 0, [value]
    while level and depth <= MAX_NESTING_DEPTH:
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner.extend(each.values())
            elif isinstance(each, list):
                inner.extend(each)
        if any(isinstance(each, dict | list) for each in level):
            depth += 1
        level = inner
    return depth


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
