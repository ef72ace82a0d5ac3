# SPDX-License-Identifier: Apache-2.0
"""A router in front of a prefill and a decode server of lab.fake_vllm, and what a client gets from it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from lab.fake_vllm.pair_servers import (
    ANSWER_TOKENS,
    BLOCK_TOKENS,
    CHAT_PATH,
    PairModel,
    PairServer,
    run_server,
)
from router import fake_instances

__all__ = ["ANSWER_TOKENS", "BLOCK_TOKENS", "CHAT_PATH", "PairModel", "PairServer", "run_server"]


@contextlib.asynccontextmanager
async def run_disaggregated(
    model: PairModel, encoder: fake_instances.InstancePlan | None = None, **options: Any
) -> AsyncIterator[tuple[Any, ...]]:
    """Run prefill and decode with the same `model`, and a router; with a plan for one, an encoder before
    them.

    Gives the router, then the servers: encoder, prefill, decode. options: of run_router.
    """
    async with contextlib.AsyncExitStack() as stack:
        encoders = []
        if encoder is not None:
            encoders.append(await stack.enter_async_context(fake_instances.run_instance(encoder)))
        prefill = await stack.enter_async_context(run_server(model, False))
        decode = await stack.enter_async_context(run_server(model, True))
        router = await stack.enter_async_context(
            fake_instances.run_router(
                [],
                [each.url for each in encoders],
                prefills=[prefill.url],
                decodes=[decode.url],
                **options,
            )
        )
        yield (router, *encoders, prefill, decode)


@dataclass
class PairFleet:
    """Prefill, decode, their shared state, and the router in front of them."""

    model: PairModel
    prefill: PairServer
    decode: PairServer
    router: fake_instances.RunningRouter

    async def send_request(self, path: str = CHAT_PATH, **fields: Any) -> PairAnswer:
        """Send a streamed request; `fields` override those of the body."""
        body: dict[str, Any] = {"model": "tiny", "stream": True, "max_tokens": 4}
        body |= (
            {"prompt": "x"}
            if path != CHAT_PATH
            else {"messages": [{"role": "user", "content": "x"}]}
        )
        status, headers, data = await self.router.post_body(path, body | fields)
        return PairAnswer(status, headers, data)

    async def wait_until_freed(self) -> bool:
        """Whether prefill releases all blocks within a second."""
        for _ in range(100):
            if not self.model.held_requests:
                return True
            await asyncio.sleep(0.01)
        return False


@dataclass
class PairAnswer:
    """The response that the client received."""

    status: int
    headers: Any
    body: bytes

    @property
    def events(self) -> list[Any]:
        """Its parsed events; [DONE] as text."""
        texts = [each.removeprefix(b"data: ") for each in self.body.split(b"\n\n") if each]
        return [text.decode() if text == b"[DONE]" else json.loads(text) for text in texts]

    @property
    def texts(self) -> list[str]:
        """The texts of its events, without the role event of a chat."""
        choices = [each["choices"][0] for each in self.events[:-1] if each.get("choices")]
        deltas = [choice.get("delta", choice) for choice in choices]
        return [delta.get("content", delta.get("text")) for delta in deltas if "role" not in delta]


@contextlib.asynccontextmanager
async def run_fleet(
    mode: str = "strip", options: Mapping[str, Any] | None = None, **fields: Any
) -> AsyncIterator[PairFleet]:
    """Run one prefill, one decode and a router with --first-token `mode`; `fields` are those of PairModel.

    options: more of run_router.
    """
    model, options = PairModel(**fields), {"probe_interval_s": 0.05, **(options or {})}
    async with run_disaggregated(model, first_token=mode, **options) as (router, prefill, decode):
        yield PairFleet(model, prefill, decode, router)
