# SPDX-License-Identifier: Apache-2.0
"""Fetch breakdowns that responses did not carry from the router's `GET /ttft_report/<id>`.

A proxy in front of the router may remove Server-Timing; the router keeps its newest reports.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from time import monotonic_ns
from typing import Any, Final

from ttft_otel.bench.http_exchange import BenchTarget, RawResponse, perform_exchange
from ttft_otel.bench.load_driver import HTTP_OK, RequestResult
from ttft_otel.model.timing import ServerTiming
from ttft_otel.model.ttft_report import STAGES_KEY, TTFT_MS_KEY, UNATTRIBUTED_MS_KEY

REPORT_PATH: Final = "/ttft_report/"
# A server that does not know this many of its newest requests has no reports: stop asking.
MAX_UNKNOWN_REPORTS: Final = 3
# Few: the router may be serving others.
MAX_CONCURRENT_LOOKUPS: Final = 8
LOOKUP_TIMEOUT_S: Final = 5.0


async def fetch_missing_breakdowns(target: BenchTarget, results: Iterable[RequestResult]) -> None:
    """Set the breakdown of successful `results` that have none, after the load has ended."""
    missing = [result for result in results if not result.error and result.timing is None]
    # The newest first: a router keeps only its newest reports.
    missing.reverse()
    for result in missing[:MAX_UNKNOWN_REPORTS]:
        # One by one, to stop early where there is no such endpoint.
        result.timing = await _fetch_breakdown(target, result.request_id)
    if not any(result.timing for result in missing[:MAX_UNKNOWN_REPORTS]):
        return
    remaining = iter(missing[MAX_UNKNOWN_REPORTS:])  # shared: each worker takes the next one
    await asyncio.gather(
        *(_fetch_breakdowns(target, remaining) for _ in range(MAX_CONCURRENT_LOOKUPS))
    )


async def _fetch_breakdowns(target: BenchTarget, results: Iterable[RequestResult]) -> None:
    for result in results:
        result.timing = await _fetch_breakdown(target, result.request_id)


async def _fetch_breakdown(target: BenchTarget, request_id: str) -> ServerTiming | None:
    message = target.encode_request(REPORT_PATH + request_id, b"", {}, "GET")
    response = await perform_exchange(target, message, monotonic_ns(), LOOKUP_TIMEOUT_S)
    return _parse_report(response) if response.status == HTTP_OK and not response.error else None


def _parse_report(response: RawResponse) -> ServerTiming | None:
    """The stages of the whole request; None when it is not a TTFT report, or does not add up."""
    try:
        report: Any = json.loads(b"".join(piece for _, piece in response.pieces))["combined"]
        parts = {str(name): _to_microseconds(ms) for name, ms in report[STAGES_KEY].items()}
        unattributed_us, ttft_us = (
            _to_microseconds(report[UNATTRIBUTED_MS_KEY]),
            _to_microseconds(report[TTFT_MS_KEY]),
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return (
        # Must add up to the microsecond, as in every other answer; else it is of something else.
        ServerTiming(parts, unattributed_us, ttft_us)
        if sum(parts.values()) + unattributed_us == ttft_us
        else None
    )


def _to_microseconds(ms: float) -> int:
    # Reports have milliseconds with three decimals: rounding gives the exact microseconds back.
    return round(ms * 1000)
