# SPDX-License-Identifier: Apache-2.0
"""Cached prefixes as vLLM's engines publish them (ZMQ); the source behind --prefix-index kv-events.

Every instance of the leg that prefills is asked where it publishes, again and again since it may come
back elsewhere; one that tells nothing is known by what it was sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final

import aiohttp

try:
    import zmq.asyncio
except ImportError as error:
    raise ValueError(
        "--prefix-index kv-events needs pyzmq; install it with pip install 'ttft-otel[router]'."
    ) from error

from ttft_otel.router.fleet import Fleet
from ttft_otel.router.prefixes.endpoints import Endpoint, given, told
from ttft_otel.router.prefixes.history import ASK, Sent
from ttft_otel.router.prefixes.reported import Reported
from ttft_otel.router.prefixes.source import prefilling
from ttft_otel.router.prefixes.subscription import Subscription

log: Final = logging.getLogger("ttft_otel")


class Events(Sent):
    """Instances that publish events are known by them, others by what they were sent."""

    def __init__(self, size: int, most: int, endpoints: Sequence[str]) -> None:
        self._reported = Reported(size, most)
        super().__init__(self._reported)
        self.given = given(endpoints)
        self._subscriptions: dict[str, Subscription] = {}
        self._context: zmq.asyncio.Context | None = None

    async def start(self, session: aiohttp.ClientSession, fleet: Fleet) -> None:
        """Subscribe to whoever prefills."""
        self._context = zmq.asyncio.Context()
        await super().start(session, fleet)
        for url in self.given.keys() - self._subscriptions.keys():
            log.warning(
                "ttft-otel: --kv-events-endpoint names %s, which prefills nothing here", url
            )

    async def close(self) -> None:
        """End all subscriptions."""
        ending = [task for each in self._subscriptions.values() for task in each.close()]
        self._subscriptions.clear()
        await asyncio.gather(*ending, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)
        await super().close()

    def follow(self) -> None:
        """Subscribe to who is new, forget who is gone."""
        now = {each.url for each in prefilling(self._fleet)}
        for url in self._subscriptions.keys() - now:
            self._subscriptions.pop(url).close()
        if self._context is not None:
            for url in now - self._subscriptions.keys():
                self._subscriptions[url] = Subscription(
                    url, self._reported, self._context, self._where
                )
        super().follow()

    async def _where(self, url: str) -> dict[int, Endpoint]:
        """Where an instance publishes, by rank. Raises what a request or `told` may."""
        if self._session is None:
            return {}
        if url in self.given:
            return dict(enumerate(self.given[url]))
        async with self._session.get(f"{url}/kv_event_sources", timeout=ASK) as response:
            return {} if response.status == 404 else told(await response.json(), url)

    def status(self) -> dict[str, Any]:
        """Of each instance: what it is known by, its blocks, its feeds by rank."""
        return super().status() | {
            url: each.status()
            for url, each in self._subscriptions.items()
            if url in self._reported.reporting
        }
