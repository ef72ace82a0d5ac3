# SPDX-License-Identifier: Apache-2.0
"""One instance that kvevents.py follows: a feed for each data-parallel rank, kept to where it publishes.

Until its first feed is connected the instance counts as one that reports nothing, and again when it
publishes no more or is not heard for long.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

import aiohttp
import zmq.asyncio

from ttft_otel.router.prefixes.endpoints import REMEDY, Endpoint
from ttft_otel.router.prefixes.feed import Feed
from ttft_otel.router.prefixes.ledger import MOST, Ledger
from ttft_otel.router.prefixes.reported import TOTAL, Reported
from ttft_otel.router.prefixes.slices import sliced
from ttft_otel.router.prefixes.wire import listen, replay

AGAIN: Final = 10.0  # seconds between two questions where an instance publishes
SOON: Final = 1.0  # after a publisher went away
SILENCE: Final = 30.0  # seconds without any of its publishers until what they told counts no more
log: Final = logging.getLogger("ttft_otel")
_ODD: Final = (ValueError, aiohttp.ClientResponseError)  # it answers, and will not answer better
_FAILED: Final = (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError)


@dataclass(slots=True)
class Rank:
    """One publisher of the instance."""

    endpoint: Endpoint
    feed: Feed
    task: asyncio.Task[None]
    connected: bool = False

    @property
    def up(self) -> bool:
        """Whether it is heard."""
        return self.connected and not self.task.done()


class Subscription:
    """Begins at once; `where` says where an instance publishes, by rank."""

    def __init__(
        self,
        url: str,
        index: Reported,
        context: zmq.asyncio.Context,
        where: Callable[[str], Awaitable[dict[int, Endpoint]]],
    ) -> None:
        self.url, self._index, self._context, self._where = url, index, context, where
        self._ranks: dict[int, Rank] = {}
        self._soon = asyncio.Event()
        self._heard = monotonic()  # when a publisher was last there
        self._said: set[str] = set()
        self.task = asyncio.create_task(self._run())

    def close(self) -> list[asyncio.Task[None]]:
        """Follow it no longer, and forget it; what ends of it."""
        self.task.cancel()
        ending = [self.task, *(rank.task for rank in self._ranks.values())]
        for number in list(self._ranks):
            self._end(number)
        self._index.leave(self.url)
        return ending

    async def _run(self) -> None:
        while True:
            try:
                self._keep(await self._where(self.url))
            except _FAILED as error:
                remedy = f"; {REMEDY}" if isinstance(error, _ODD) else ""  # else it may be starting
                self._say(f"cannot be asked where it publishes KV events: {error!r:.200}{remedy}")
            self._judge()
            await sliced(self._index.tidy())
            self._soon.clear()
            try:
                await asyncio.wait_for(self._soon.wait(), AGAIN)
            except asyncio.TimeoutError:
                self._look()
            else:
                await asyncio.sleep(SOON)

    def _keep(self, wanted: dict[int, Endpoint]) -> None:
        """Follow these publishers, and no others."""
        if not wanted and not self._ranks:
            self._say(
                "does not say where it publishes KV events; start vLLM with --kv-events-config, "
                "or name the endpoint with --kv-events-endpoint. It is known by what it is sent"
            )
        for number, rank in list(self._ranks.items()):
            if wanted.get(number) != rank.endpoint or rank.task.done():
                self._end(number)
        for number, endpoint in wanted.items():
            if number not in self._ranks:
                self._begin(number, endpoint)

    def _judge(self) -> None:
        """Who publishes no more, or is away for long, is known by what it is sent until it is back."""
        if any(rank.up for rank in self._ranks.values()):
            self._heard = monotonic()
        elif not self._ranks or monotonic() - self._heard > SILENCE:
            if self.url in self._index.reporting:
                self._say("publishes no KV events any more; it is known by what it is sent")
            for rank in self._ranks.values():
                rank.feed.clear()
            self._index.leave(self.url)

    def _begin(self, number: int, endpoint: Endpoint) -> None:
        ask = functools.partial(replay, self._context, endpoint.replay)
        ledger = Ledger(self._index, self.url, number)
        feed = Feed(ledger, ask if endpoint.replay else None)
        listening = listen(
            self._context, endpoint, feed, functools.partial(self._connected, number)
        )
        self._ranks[number] = Rank(endpoint, feed, asyncio.create_task(listening))

    def _end(self, number: int) -> None:
        rank = self._ranks.pop(number)
        if rank.task.done() and not rank.task.cancelled():
            self._say(f"cannot be listened to at {rank.endpoint.events}: {rank.task.exception()!r}")
        rank.task.cancel()
        rank.feed.ledger.clear()

    def _connected(self, number: int, there: bool) -> None:
        rank = self._ranks.get(number)
        if rank is not None:
            rank.connected = there
        if there:
            self._index.report(self.url)
        else:
            self._heard = monotonic()
            self._soon.set()

    def _look(self) -> None:
        """Say what an operator should change."""
        for rank in self._ranks.values():
            if not rank.connected and not rank.feed.counts:
                self._say(
                    f"publishes no KV events at {rank.endpoint.events}; vLLM lets subscribers "
                    "connect only where its own endpoint has a wildcard, like tcp://*:5557"
                )
        if any(rank.feed.ledger.counts["dropped"] for rank in self._ranks.values()):
            self._say(
                f"has more blocks cached than the router keeps ({MOST} of a cache, {TOTAL} in all): "
                "the rest counts as not cached; see `dropped` on /metrics"
            )
        size = self._index.sizes.get(self.url, 0)
        if size not in (0, self._index.size):
            self._say(
                f"has KV blocks of {size} tokens, others of {self._index.size}: the index holds "
                "one size, so it counts as having nothing cached"
            )

    def _say(self, what: str) -> None:
        if what not in self._said and len(self._said) < 100:
            self._said.add(what)
            log.warning("ttft-otel: %s %s", self.url, what)

    def status(self) -> dict[str, Any]:
        """Whether all of it is heard, how many blocks it has, what happened to its feeds."""
        happened: Counter[str] = Counter()
        for rank in self._ranks.values():
            happened += rank.feed.counts + rank.feed.ledger.counts
        return {
            "source": "kv-events",
            "connected": bool(self._ranks) and all(each.up for each in self._ranks.values()),
            "block_size": self._index.sizes.get(self.url, 0),
            "blocks": sum(len(each.feed.ledger) for each in self._ranks.values()),
            "last": {number: each.feed.last for number, each in self._ranks.items()},
            "counts": dict(happened),
        }
