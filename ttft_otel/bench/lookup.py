# SPDX-License-Identifier: Apache-2.0
"""Breakdowns that answers did not carry, from the router's `GET /ttft_report/<id>`; session.py adds them.

A proxy between us and the router may take Server-Timing away; the router keeps its newest reports.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from time import monotonic_ns
from typing import Any, Final

from ttft_otel.bench.drive import OK, Result
from ttft_otel.bench.wire import Reply, Target, exchange
from ttft_otel.original import STAGES, TTFT_MS, UNATTRIBUTED_MS
from ttft_otel.timing import Timing

PATH: Final = "/ttft_report/"
TRIED: Final = 3  # a server that does not know this many of its requests has no reports
AT_ONCE: Final = 8
PATIENCE: Final = 5.0


async def complete(target: Target, results: Iterable[Result]) -> None:
    """Give successful Results without a breakdown the router's, after the load."""
    bare = [each for each in results if not each.error and each.timing is None]
    # The newest first: they are the ones that a router still has.
    bare.reverse()
    for each in bare[:TRIED]:
        each.timing = await _asked(target, each.request_id)
    if not any(each.timing for each in bare[:TRIED]):
        return
    left = iter(bare[TRIED:])
    await asyncio.gather(*(_worker(target, left) for _ in range(AT_ONCE)))


async def _worker(target: Target, left: Iterable[Result]) -> None:
    for each in left:
        each.timing = await _asked(target, each.request_id)


async def _asked(target: Target, request_id: str) -> Timing | None:
    message = target.message(PATH + request_id, b"", {}, "GET")
    reply = await exchange(target, message, monotonic_ns(), PATIENCE)
    return _read(reply) if reply.status == OK and not reply.error else None


def _read(reply: Reply) -> Timing | None:
    """The whole request's stages; None where they are no report of ours or do not add up."""
    try:
        whole: Any = json.loads(b"".join(piece for _, piece in reply.pieces))["combined"]
        parts = {str(name): _us(ms) for name, ms in whole[STAGES].items()}
        rest, ttft = _us(whole[UNATTRIBUTED_MS]), _us(whole[TTFT_MS])
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return Timing(parts, rest, ttft) if sum(parts.values()) + rest == ttft else None


def _us(ms: float) -> int:
    return round(ms * 1000)
