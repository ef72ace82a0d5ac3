# SPDX-License-Identifier: Apache-2.0
"""A request through P and then D: P's token to the client, P's KV blocks to D; forward.py asks.

What P keeps for D is given back whatever happens: D takes it, or is told that nobody will.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, Final

import aiohttp

from ttft_otel import clock
from ttft_otel.router import choose, headers, seam
from ttft_otel.router.answer import Headers
from ttft_otel.router.caches import Cache, Caches
from ttft_otel.router.fan import Refused
from ttft_otel.router.legs import Down, Legs, down, learn
from ttft_otel.router.path import Attempt, Trip
from ttft_otel.router.plan import CONTINUE, DECODE, OFF, PREFILL, STRIP, Plan
from ttft_otel.router.release import Releases
from ttft_otel.router.report import Exchange
from ttft_otel.router.seam import Seam, Token
from ttft_otel.router.stream import Client, finish, hand_on

IDS: Final = (0, 29)  # the first vLLM that takes a chat's prompt as token ids
_STREAM: Final = (b"content-type", b"text/event-stream; charset=utf-8")


class Hold:
    """What P keeps for a D; None once a D took it."""

    def __init__(self, params: dict[str, Any] | None) -> None:
        self.params = params


class Pair:
    """The prefill and decode legs of one router."""

    def __init__(self, legs: Legs) -> None:
        self.legs, self.caches = legs, Caches(legs)
        self.mismatches = 0
        self._releases = Releases(legs)

    async def serve(
        self, plan: Plan, asked: choose.Asked, exchange: Exchange, client: Client
    ) -> None:
        """Serve one request; `asked` is as it would go to a single server."""
        passed = {**asked.headers, "content-type": "application/json"}
        for name in ("content-encoding", "accept-encoding"):
            passed.pop(name, None)
        asked = replace(asked, headers=passed)
        one, down_headers, chain = await self._prefill(plan, asked, exchange)
        hold = Hold(one.params if one else None)
        try:
            if one is None:
                plan.off("answer")
            elif plan.mode != OFF and (reason := one.refusal(plan) or self._long(plan, one)):
                plan.off(reason)
            if one is None or plan.mode == OFF:
                exchange.token = (plan.mode, plan.reason)
                await self._again(plan, hold, asked, exchange, client)
                return
            follow = await self._follows(plan, one, chain[-1])
            exchange.token, exchange.streaming = (plan.mode, plan.reason), True
            more = one.finish != "stop"
            await client.first(200, down_headers, seam.opening(one, plan), True)
            if more:
                await self._proceed(plan, one, hold, follow, asked, exchange, client)
            await client.end()
        finally:
            if hold.params:
                self._releases.start(hold.params, asked.headers)

    async def _prefill(
        self, plan: Plan, asked: choose.Asked, exchange: Exchange
    ) -> tuple[Token | None, Headers, list[Attempt]]:
        """P's answer, whole: it is one token. Raises Refused, Down."""
        chain = _chain(exchange)
        exchange.trip.path.append(chain)
        body = plan.prefill()
        response, data = await self._read(replace(asked, leg=PREFILL, body=body), exchange, chain)
        learn(chain[-1], response)
        if response.status >= 400:
            raise Refused(response.status, headers.down(response.raw_headers), data)
        kept = [
            (name, value)
            for name, value in headers.down(response.raw_headers)
            if name not in (b"content-type", b"content-length")
        ]
        return seam.token(data, plan.chat), [*kept, _STREAM], chain

    async def _read(
        self,
        asked: choose.Asked,
        exchange: Exchange,
        chain: list[Attempt],
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        response = await self.legs.open(asked, exchange.context, chain)
        try:
            data = await response.read()
        except asyncio.CancelledError:
            chain[-1].cut()
            raise
        except (aiohttp.ClientError, OSError) as error:
            chain[-1].error = type(error).__name__
            raise down(chain[-1], error) from error
        finally:
            finish(response, chain[-1])
            self.legs.fleet.left(chain[-1])
        chain[-1].first = chain[-1].ended
        return response, data

    async def _again(
        self,
        plan: Plan,
        hold: Hold,
        asked: choose.Asked,
        exchange: Exchange,
        client: Client,
    ) -> None:
        """D makes the first token again and answers."""
        chain = _chain(exchange)
        exchange.trip.path.append(chain)
        body = plan.decode(hold.params)
        response = await self.legs.open(
            replace(asked, leg=DECODE, body=body), exchange.context, chain
        )
        if response.status < 400:
            hold.params = None
        await hand_on(response, chain[-1], client)

    def _long(self, plan: Plan, one: Token) -> str:
        """D will refuse what does not fit with all the tokens the client wants; P cannot know."""
        room = _room(self.legs.fleet.get(DECODE))
        wanted = one.usage.get("prompt_tokens", 0) + (plan.most or 0)
        return "max_model_len" if room and wanted > room else ""

    async def _follows(self, plan: Plan, one: Token, prefill: Attempt) -> bool:
        """Settle whether D can continue; whether D must first load P's blocks by themselves."""
        if plan.mode != CONTINUE:
            return False
        plan.mode = STRIP
        length = len(one.prompt)
        if not one.ids or not length:
            plan.reason = "token_ids"
        elif prefill.instance is None or not one.params:
            plan.reason = "kv_transfer_params"
        else:
            others = self.legs.fleet.get(DECODE)
            cache, *caches = await self.caches.of((prefill.instance, *others))
            plan.reason = _unfit(plan, cache, caches, length) or _short(others, length)
            if not plan.reason:
                plan.mode = CONTINUE
                return length % cache.block == 0
        return False

    async def _proceed(
        self,
        plan: Plan,
        one: Token,
        hold: Hold,
        follow: bool,
        asked: choose.Asked,
        exchange: Exchange,
        client: Client,
    ) -> None:
        """D's stream after P's token."""
        exchange.handover = Trip(exchange.trip.end, exchange.trip.end)
        only = await self._load(plan, hold, asked, exchange) if follow else None
        chain = _chain(exchange)
        exchange.handover.path.append(chain)
        if plan.mode == STRIP:
            body = plan.decode(hold.params)
        else:
            body = plan.proceed([*one.prompt, *one.ids], None if follow else hold.params)
        try:
            response = await self.legs.open(
                replace(asked, leg=DECODE, body=body), exchange.context, chain, only
            )
        except Down as error:
            exchange.error = str(error.status)
            await client.give(seam.broken(b"", str(error)))
            return
        if response.status >= 400:
            exchange.error = str(response.status)
            try:
                await client.give(seam.broken(await response.read(), exchange.error))
            finally:
                finish(response, chain[-1])
            return
        if not follow:
            hold.params = None
        await self._join(response, chain[-1], Seam(one, plan), exchange, client)

    async def _load(
        self, plan: Plan, hold: Hold, asked: choose.Asked, exchange: Exchange
    ) -> choose.Instance | None:
        """A whole number of blocks: D must have them before it is asked for one token more.

        Asked at once for the prompt and P's token, it would want one block more than P has, and
        NIXL's assertion ends its engine. Where this fails, D computes the prompt itself.
        """
        assert exchange.handover is not None
        chain = _chain(exchange)
        exchange.handover.path.append(chain)
        request = replace(
            asked,
            leg=DECODE,
            body=plan.load(hold.params),
            request_id=f"{asked.request_id}-load",
        )
        try:
            response, _ = await self._read(request, exchange, chain)
        except Down:
            return None
        learn(chain[-1], response)
        if response.status < 400:
            hold.params = None
        return chain[-1].instance

    async def _join(
        self,
        response: aiohttp.ClientResponse,
        attempt: Attempt,
        joint: Seam,
        exchange: Exchange,
        client: Client,
    ) -> None:
        trip = exchange.handover
        assert trip is not None
        try:
            async for chunk in response.content.iter_any():
                if not attempt.first:
                    attempt.first = clock.now()
                    learn(attempt, response)
                if out := joint.feed(chunk):
                    await client.give(out)
                    trip.end = trip.end or clock.now()
            if rest := joint.end():
                await client.give(rest)
        except (aiohttp.ClientError, OSError) as error:
            attempt.error = type(error).__name__
            raise
        except asyncio.CancelledError:
            attempt.cut()
            raise
        finally:
            finish(response, attempt)
            if joint.mismatch:
                exchange.mismatch = True
                self.mismatches += 1


def _chain(exchange: Exchange) -> list[Attempt]:
    chain: list[Attempt] = []
    exchange.calls.append(chain)
    return chain


def _unfit(plan: Plan, cache: Cache, others: list[Cache], length: int) -> str:
    """Why D may not continue after a prompt of this length, or ""."""
    if not cache.block or any(each.block != cache.block for each in others):
        return "block_size"
    if length % cache.block == 0 and not all(each.prefix for each in others):
        return "prefix_caching"
    return "version" if plan.chat and any(each.version < IDS for each in others) else ""


def _short(instances: tuple[choose.Instance, ...], length: int) -> str:
    """To D the prompt is one token longer, and there must be room for one more."""
    return "" if length + 1 < _room(instances) else "max_model_len"


def _room(instances: tuple[choose.Instance, ...]) -> int:
    """Tokens of prompt and answer that every D has room for; 0 while that is not known."""
    found = [card.get("max_model_len") for each in instances for card in each.cards]
    return min((most for most in found if isinstance(most, int)), default=0)
