# SPDX-License-Identifier: Apache-2.0
"""A request through P and then D: P's token to the client, P's KV blocks to D; forward.py asks.

What P keeps for D is given back whatever happens: D takes it, or is told that nobody will.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ttft_otel.router import choose, decode, headers, seam
from ttft_otel.router.answer import Headers
from ttft_otel.router.caches import Cache, Caches
from ttft_otel.router.decode import Decode, Job
from ttft_otel.router.fan import Refused
from ttft_otel.router.legs import Legs
from ttft_otel.router.path import Attempt
from ttft_otel.router.plan import CONTINUE, DECODE, OFF, PREFILL, STRIP, Plan
from ttft_otel.router.release import Releases
from ttft_otel.router.report import Exchange
from ttft_otel.router.seam import Token
from ttft_otel.router.stream import Client

IDS: Final = (0, 29)  # the first vLLM that takes a chat's prompt as token ids
_STREAM: Final = (b"content-type", b"text/event-stream; charset=utf-8")


class Pair:
    """The prefill and decode legs of one router."""

    def __init__(self, legs: Legs) -> None:
        self.legs, self.caches, self.releases = legs, Caches(legs), Releases(legs)
        self.decode = Decode(legs, self.releases)

    async def serve(
        self, plan: Plan, asked: choose.Asked, exchange: Exchange, client: Client
    ) -> None:
        """Serve one request; `asked` is as it would go to a single server, its prompt looked up."""
        passed = {**asked.headers, "content-type": "application/json"}
        for name in ("content-encoding", "accept-encoding"):
            passed.pop(name, None)
        job = Job(plan, replace(asked, headers=passed), exchange, client)
        if plan.mode == CONTINUE:
            self.caches.renew((*self.legs.fleet.get(PREFILL), *self.legs.fleet.get(DECODE)))
        one, down, attempt = await self._prefill(job)
        try:
            if one is None:
                plan.off("answer")
            elif plan.mode != OFF and (reason := one.refusal(plan) or self._long(plan, one)):
                plan.off(reason)
            if one is None or plan.mode == OFF:
                exchange.token = (plan.mode, plan.reason)
                await self.decode.again(job)
                return
            whole = await self._continues(job, one, attempt)
            exchange.token, exchange.streaming = (plan.mode, plan.reason), True
            await client.first(200, down, seam.opening(one, plan), True)
            if one.finish != "stop":
                await self.decode.proceed(job, one, whole)
            await client.end()
        finally:
            if job.held:
                self.releases.start(job.held, passed)

    async def _prefill(self, job: Job) -> tuple[Token | None, Headers, Attempt]:
        """P's answer, whole: it is one token. Raises Refused, Down."""
        asked = replace(job.asked, leg=PREFILL, body=job.plan.prefill())
        chain = decode.chained(job.exchange, job.exchange.trip)
        response, data = await decode.read(self.legs, asked, job.exchange, chain)
        down = headers.down(response.raw_headers)
        if response.status >= 400:
            raise Refused(response.status, down, data)
        one = seam.token(data, job.plan.chat)
        job.held = one.params if one else None
        kept = [each for each in down if each[0] not in (b"content-type", b"content-length")]
        return one, [*kept, _STREAM], chain[-1]

    def _long(self, plan: Plan, one: Token) -> str:
        """D will refuse what does not fit with all the tokens the client wants; P cannot know."""
        room = _room(self.legs.fleet.get(DECODE))
        wanted = one.usage.get("prompt_tokens", 0) + (plan.most or 0)
        return "max_model_len" if room and wanted > room else ""

    async def _continues(self, job: Job, one: Token, prefill: Attempt) -> bool:
        """Settle whether D can continue, and tell whether the prompt is a whole number of blocks."""
        plan = job.plan
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
