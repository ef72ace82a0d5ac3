# SPDX-License-Identifier: Apache-2.0
"""Call encoders for all of a request's items at once; forward.py asks, legs.py makes each call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import aiohttp

from ttft_otel import clock, context
from ttft_otel.router import body, choose, headers
from ttft_otel.router.legs import Legs, down, learn
from ttft_otel.router.path import Attempt
from ttft_otel.router.plan import CHAT

AT_ONCE: Final = 64  # calls of one request in flight
# Placeholders where nobody has counted them: the same for all, then numbers decide.
GUESS: Final = 576


class Refused(Exception):
    """An encoder answered with an error; the client gets exactly that."""

    def __init__(self, status: int, raw: list[tuple[bytes, bytes]], body: bytes) -> None:
        super().__init__(f"encoder answered {status}")
        self.status, self.headers, self.body = status, raw, body


def calls(request: body.Body, asked: choose.Asked) -> list[choose.Asked]:
    """What to ask for each item of a request, the longest first: short ones even out what these do."""
    passed = {**asked.headers, "content-type": "application/json"}
    passed.pop("content-encoding", None)
    found = [
        choose.Asked(
            choose.ENCODE,
            CHAT,
            request.model,
            f"{asked.request_id}-encode-{number}",
            passed,
            body.encoder(request, item),
            tokens=size or GUESS,
            guessed=not size,
        )
        for number, (item, size) in enumerate(
            zip(request.media, request.sizes(asked.items), strict=True)
        )
    ]
    return sorted(found, key=lambda each: -each.tokens)


async def prime(
    legs: Legs,
    asked: Sequence[choose.Asked],
    trace: context.Context,
    chains: Sequence[list[Attempt]],
) -> None:
    """One call for each item; the first that fails for good ends the others. Raises Refused, Down."""
    if len(asked) == 1:
        await _encode(legs, asked[0], trace, chains[0])
        return
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(ask: choose.Asked, chain: list[Attempt]) -> None:
        async with gate:
            await _encode(legs, ask, trace, chain)

    tasks = [asyncio.create_task(one(ask, chain)) for ask, chain in zip(asked, chains, strict=True)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await _end(tasks)
    for failure in [task.exception() for task in tasks if not task.cancelled()]:
        if failure is not None:
            raise failure


async def _encode(
    legs: Legs, asked: choose.Asked, trace: context.Context, chain: list[Attempt]
) -> None:
    while True:
        try:
            response = await legs.open(asked, trace, chain)
            answer = await response.read()  # closes its connection when it is cut short
            break
        except asyncio.CancelledError:
            if chain:
                chain[-1].cut()
            raise
        except (aiohttp.ClientError, OSError) as error:  # it broke off within its answer
            if not legs.after(asked, chain, error):
                raise down(chain[-1], error) from error
            await legs.pause(chain)
    chain[-1].first = chain[-1].ended = clock.now()
    learn(chain[-1], response)
    legs.fleet.left(chain[-1])
    if response.status >= 400:
        raise Refused(response.status, headers.down(response.raw_headers), answer)


def critical(chains: Sequence[list[Attempt]]) -> list[Attempt]:
    """The encoder leg that decided: one that failed, else one still running, else the slowest."""
    started = [chain for chain in chains if chain]
    return max(started, key=_decides, default=[])


def _decides(chain: list[Attempt]) -> tuple[bool, bool, int]:
    last = chain[-1]
    failed = last.lost or last.status >= 400
    return failed, not last.first, last.first


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
