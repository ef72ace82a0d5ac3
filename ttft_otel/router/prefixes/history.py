# SPDX-License-Identifier: Apache-2.0
"""Cached prefixes by what instances were sent: needs nothing of them; the choice where they tell nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from ttft_otel.router.caches import read
from ttft_otel.router.choose import Instance
from ttft_otel.router.fleet import Fleet
from ttft_otel.router.policies.index import History
from ttft_otel.router.prefixes.slices import sliced
from ttft_otel.router.prefixes.source import prefilling

if TYPE_CHECKING:
    from ttft_otel.router.prompts.prompt import Prompt

ASK: Final = aiohttp.ClientTimeout(total=5.0)
TOTAL: Final = 1_000_000  # blocks of all instances: 200 MB
AGAIN: Final = 10.0  # seconds until instances that did not answer are asked again


class Sent:
    """The latest blocks that each instance computed, going by the answers that came."""

    def __init__(self, index: History) -> None:
        self.index = index
        self._most = index.most
        self._fleet: Fleet | None = None
        self._urls: set[str] = set()
        self._session: aiohttp.ClientSession | None = None
        self._sizing: asyncio.Future[None] | None = None
        self._tidying: asyncio.Future[None] | None = None

    async def start(self, session: aiohttp.ClientSession, fleet: Fleet) -> None:
        """Instances are asked for nothing but the size of their blocks."""
        self._fleet, self._session = fleet, session
        fleet.back = self._back
        self._sizing = asyncio.ensure_future(self._size(session))
        self.follow()

    async def close(self) -> None:
        """End what is under way."""
        tasks = [each for each in (self._tidying, self._sizing) if each is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def follow(self) -> None:
        """Forget who is gone."""
        now = {each.url for each in prefilling(self._fleet)}
        self._urls = now
        self.index.follow(now)
        self.index.limit(min(self._most, TOTAL // max(1, len(now))))
        self.tidy()

    def _back(self, instance: Instance) -> None:
        """It was away, maybe restarted: what it was sent before counts no more."""
        self.index.unlearn(instance.url)
        self.tidy()

    def tidy(self) -> None:
        """Free the memory of what was forgotten, in the background."""
        if self._tidying is None or self._tidying.done():
            self._tidying = asyncio.ensure_future(sliced(self.index.tidy()))

    async def _size(self, session: aiohttp.ClientSession) -> None:
        """The first instance that tells its block size tells the index's."""
        while True:
            for url in tuple(self._urls):
                try:
                    async with session.get(f"{url}/metrics", timeout=ASK) as response:
                        size = read(await response.read(), b"").block
                except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
                    continue
                if size:
                    self.index.hint(size)
                    return
            await asyncio.sleep(AGAIN)

    async def lookup(
        self, model: str, prompt: Prompt, urls: Sequence[str]
    ) -> dict[str, int] | None:
        """The index knows."""
        return None

    def status(self) -> dict[str, Any]:
        """Blocks remembered of each instance."""
        return {url: {"source": "history", "blocks": self.index.sent(url)} for url in self._urls}
