# SPDX-License-Identifier: Apache-2.0
"""Cached prefixes by what instances were sent: needs nothing of them; the choice where they tell nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import aiohttp

from ttft_otel.router.fleet import Fleet
from ttft_otel.router.policies.index import History
from ttft_otel.router.prefixes.slices import sliced
from ttft_otel.router.prefixes.source import prefilling

if TYPE_CHECKING:
    from ttft_otel.router.prompts.prompt import Prompt


class Sent:
    """The latest blocks that each instance computed, going by the answers that came."""

    def __init__(self, index: History) -> None:
        self.index = index
        self._fleet: Fleet | None = None
        self._urls: set[str] = set()
        self._tidying: asyncio.Future[None] | None = None

    async def start(self, session: aiohttp.ClientSession, fleet: Fleet) -> None:
        """Nobody is asked."""
        self._fleet = fleet
        self.follow()

    async def close(self) -> None:
        """End what is still being forgotten."""
        if self._tidying is not None:
            self._tidying.cancel()
            await asyncio.gather(self._tidying, return_exceptions=True)

    def follow(self) -> None:
        """Forget who is gone."""
        now = {each.url for each in prefilling(self._fleet)}
        for url in self._urls - now:
            self.index.unlearn(url)
        self._urls = now
        self.tidy()

    def tidy(self) -> None:
        """Free the memory of what was forgotten, in the background."""
        if self._tidying is None or self._tidying.done():
            self._tidying = asyncio.ensure_future(sliced(self.index.tidy()))

    async def lookup(
        self, model: str, prompt: Prompt, urls: Sequence[str]
    ) -> dict[str, int] | None:
        """The index knows."""
        return None

    def status(self) -> dict[str, Any]:
        """Blocks remembered of each instance."""
        return {url: {"source": "history", "blocks": self.index.sent(url)} for url in self._urls}
