# SPDX-License-Identifier: Apache-2.0
"""D's part of a request: fetch P's blocks, make the token again or go on after it; pair.py asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from ttft_otel import clock
from ttft_otel.router import choose, retry, seam
from ttft_otel.router.legs import Down, Legs, down, learn
from ttft_otel.router.path import Attempt, Trip
from ttft_otel.router.plan import DECODE, STRIP, Plan
from ttft_otel.router.release import Releases
from ttft_otel.router.report import Exchange
from ttft_otel.router.seam import Seam, Token
from ttft_otel.router.stream import Client, finish, hand_on, reading

Params = dict[str, Any] | None


@dataclass(slots=True)
class Job:
    """One request on its way through P and D; `held`: what P keeps for it, until a D took it."""

    plan: Plan
    asked: choose.Asked
    exchange: Exchange
    client: Client
    held: Params = None


class Decode:
    """The decode leg; counts the first tokens that were not P's."""

    def __init__(self, legs: Legs, releases: Releases) -> None:
        self.legs, self.releases = legs, releases
        self.mismatches = 0

    async def again(self, job: Job) -> None:
        """D makes the first token again and answers."""
        chain = chained(job.exchange, job.exchange.trip)
        response = await self._open(job, job.plan.decode, chain)
        if response.status < 400:
            job.held = None
        await hand_on(response, chain[-1], job.client)

    async def proceed(self, job: Job, one: Token, whole: bool) -> None:
        """D's stream after P's token, which the client has; `whole`: the prompt fills its blocks."""
        exchange, plan = job.exchange, job.plan
        exchange.handover = Trip(exchange.trip.end, exchange.trip.end)
        loaded = await self._load(job, exchange.handover) if whole else None
        chain = chained(exchange, exchange.handover)

        def after(params: Params) -> bytes:
            return plan.proceed([*one.prompt, *one.ids], None if whole else params)

        make = plan.decode if plan.mode == STRIP else after
        try:
            response = await self._open(job, make, chain, loaded)
        except Down as error:
            exchange.error = str(error.status)
            await job.client.give(seam.broken(b"", str(error)))
            return
        if response.status >= 400:
            exchange.error = str(response.status)
            try:
                await job.client.give(seam.broken(await response.read(), exchange.error))
            finally:
                finish(response, chain[-1])
            return
        if not whole:
            job.held = None
        await self._join(response, chain[-1], Seam(one, plan), job)

    async def _open(
        self,
        job: Job,
        make: Callable[[Params], bytes],
        chain: list[Attempt],
        only: choose.Instance | None = None,
    ) -> aiohttp.ClientResponse:
        """Ask a D; where it cannot, another one that computes the prompt itself.

        A D that refuses tells P to free the blocks: nobody may be sent for them after that.
        """
        asked = replace(job.asked, leg=DECODE, body=make(job.held), final=bool(job.held))
        response = await self.legs.open(asked, job.exchange.context, chain, only)
        if not job.held or response.status not in retry.CANNOT or not self._others(asked, chain):
            return response
        response.close()
        chain[-1].lost, chain[-1].ended = True, clock.now()
        self.legs.fleet.left(chain[-1])
        self.legs.retried[DECODE] = self.legs.retried.get(DECODE, 0) + 1
        self.releases.start(job.held, asked.headers)
        job.held = None
        asked = replace(asked, body=make(None), final=False)
        return await self.legs.open(asked, job.exchange.context, chain)

    def _others(self, asked: choose.Asked, chain: list[Attempt]) -> bool:
        if sum(each.lost for each in chain) >= self.legs.retries:
            return False
        offered = self.legs.fleet.offered(DECODE, asked.model)
        return any(each is not chain[-1].instance for each in offered) and self.legs.budget.spend()

    async def _load(self, job: Job, trip: Trip) -> choose.Instance | None:
        """A whole number of blocks: D must have them before it is asked for one token more.

        Asked at once for the prompt and P's token, it would want one block more than P has, and
        NIXL's assertion ends its engine. Where this fails, a D computes the prompt itself.
        """
        chain = chained(job.exchange, trip)
        asked = replace(
            job.asked,
            leg=DECODE,
            body=job.plan.load(job.held),
            request_id=f"{job.asked.request_id}-load",
            final=True,
        )
        try:
            response, _ = await read(self.legs, asked, job.exchange, chain)
        except Down:
            return None
        if response.status >= 400:
            return None
        job.held = None
        return chain[-1].instance

    async def _join(
        self, response: aiohttp.ClientResponse, attempt: Attempt, joint: Seam, job: Job
    ) -> None:
        trip = job.exchange.handover
        try:
            with reading(response, attempt):
                async for chunk in response.content.iter_any():
                    if not attempt.first:
                        attempt.first = clock.now()
                        learn(attempt, response)
                    if out := joint.feed(chunk):
                        await job.client.give(out)
                        if trip is not None and not trip.end:
                            trip.end = clock.now()
                if rest := joint.end():
                    await job.client.give(rest)
        finally:
            if joint.mismatch:
                job.exchange.mismatch = True
                self.mismatches += 1


def chained(exchange: Exchange, trip: Trip) -> list[Attempt]:
    """The attempts at one more leg, on the critical path of the trip."""
    chain: list[Attempt] = []
    exchange.calls.append(chain)
    trip.path.append(chain)
    return chain


async def read(
    legs: Legs, asked: choose.Asked, exchange: Exchange, chain: list[Attempt]
) -> tuple[aiohttp.ClientResponse, bytes]:
    """One answer, whole. Raises Down."""
    response = await legs.open(asked, exchange.context, chain)
    try:
        with reading(response, chain[-1]):
            data = await response.read()
        chain[-1].first = chain[-1].ended
        learn(chain[-1], response)
    except (aiohttp.ClientError, OSError) as error:
        raise down(chain[-1], error) from error
    finally:
        legs.fleet.left(chain[-1])
    return response, data
