# SPDX-License-Identifier: Apache-2.0
"""Cached prefixes from the KV events that vLLM publishes over ZMQ: --prefix-index kv-events.

Every instance that prefills is asked periodically for its endpoints, which change when it is restarted
elsewhere. For an instance without events, the prefixes are estimated from the prompts sent to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final

import msgspec

try:
    import zmq.asyncio
except ImportError as error:
    raise ValueError(
        "--prefix-index kv-events needs pyzmq; install it with pip install 'ttft-otel[router]'."
    ) from error

from ttft_otel.router.routing.prefixes.block_ledger import ReportedIndex
from ttft_otel.router.routing.prefixes.kv_subscription import Subscription
from ttft_otel.router.routing.prefixes.prefix_source import PrefixSource, list_prefilling
from ttft_otel.router.routing.prefixes.zmq_sockets import (
    EventEndpoint,
    parse_announced,
    parse_configured,
)
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.router.upstream.query_client import QueryClient

MAX_ANSWER_BYTES: Final = 64 << 10  # of /kv_event_sources
MAX_SOCKETS: Final = 16_384  # of all subscriptions: three for each rank; ZMQ's default is 1023
log: Final = logging.getLogger("ttft_otel")


class KvEventsSource(PrefixSource):
    """Follows the KV events of each instance that publishes them; estimates the others.

    endpoints: values of --kv-events-endpoint. Raises ValueError for a malformed one.
    """

    def __init__(self, block_size: int, max_blocks: int, endpoints: Sequence[str]) -> None:
        # One index for reported and estimated blocks: policies compare instances of both kinds.
        self.reported = ReportedIndex(block_size, max_blocks)
        super().__init__(self.reported)
        self.configured_endpoints = parse_configured(endpoints)
        self._subscriptions: dict[str, Subscription] = {}
        self._context: zmq.asyncio.Context | None = None

    async def start(self, queries: QueryClient, pool: InstancePool) -> None:
        """Subscribe to the instances of `pool` that prefill."""
        self._context = zmq.asyncio.Context()
        # Before the first socket: later it has no effect.
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        await super().start(queries, pool)
        for url in self.configured_endpoints.keys() - self._subscriptions.keys():
            log.warning(
                "ttft-otel: --kv-events-endpoint names %s, which is no instance that prefills: its "
                "events are not read; correct the URL",
                url,
            )

    async def close(self) -> None:
        """End all subscriptions."""
        ending = [task for each in self._subscriptions.values() for task in each.close()]
        self._subscriptions.clear()
        await asyncio.gather(*ending, return_exceptions=True)
        if self._context is not None:
            # Without waiting for messages that nobody will read.
            self._context.destroy(linger=0)
        await super().close()

    def sync_instances(self) -> None:
        """Subscribe to added instances, and end the subscriptions of removed ones."""
        urls = {each.url for each in list_prefilling(self._pool)}
        for url in self._subscriptions.keys() - urls:
            self._subscriptions.pop(url).close()
        if self._context is not None:
            for url in urls - self._subscriptions.keys():
                self._subscriptions[url] = Subscription(
                    url, self.reported, self._context, self._find_endpoints
                )
        # After the subscriptions have ended: their blocks are retired then, and freed here.
        super().sync_instances()

    async def _find_endpoints(self, url: str) -> dict[int, EventEndpoint]:
        """Endpoints of an instance by data-parallel rank, configured ones first.

        Raises what the HTTP request or `parse_announced` raises.
        """
        if self._queries is None:
            return {}
        if url in self.configured_endpoints:
            return dict(enumerate(self.configured_endpoints[url]))
        answer = await self._queries.ask(f"{url}/kv_event_sources", max_bytes=MAX_ANSWER_BYTES)
        # A release without this endpoint (0.29 and older): not a failure.
        if answer.status == 404:
            return {}
        try:
            return parse_announced(msgspec.json.decode(answer.body), url)
        except RecursionError as error:
            raise ValueError("/kv_event_sources returned lists in lists") from error

    def describe_instances(self) -> dict[str, Any]:
        """By URL: the source of its prefixes, its number of blocks, and the state of its feeds."""
        return super().describe_instances() | {
            url: each.describe_status()
            for url, each in self._subscriptions.items()
            if url in self.reported.reporting
        }
