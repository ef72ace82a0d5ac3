# SPDX-License-Identifier: Apache-2.0
"""Cached prefixes from the KV events that vLLM publishes over ZMQ: --prefix-index kv-events.

Every instance that prefills is asked periodically for its endpoints, which change when it is restarted
elsewhere. For an instance without events, the prefixes are estimated from the prompts sent to it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

import msgspec

try:
    import zmq.asyncio
except ImportError as error:
    raise ValueError(
        "--prefix-index kv-events needs pyzmq; install it with pip install 'ttft-otel[router]'."
    ) from error

from ttft_otel.router.routing.prefixes.block_ledger import (
    MAX_BLOCKS_PER_CACHE,
    MAX_REPORTED_BLOCKS,
    BlockLedger,
    ReportedIndex,
)
from ttft_otel.router.routing.prefixes.event_feed import EventFeed
from ttft_otel.router.routing.prefixes.prefix_source import (
    PrefixSource,
    list_prefilling,
    run_sliced,
)
from ttft_otel.router.routing.prefixes.zmq_sockets import (
    ENDPOINT_REMEDY,
    EventEndpoint,
    parse_announced,
    parse_configured,
    receive_events,
    request_replay,
)
from ttft_otel.router.time_limits import wait_at_most
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.router.upstream.query_client import QUERY_ERRORS, QueryClient

REFRESH_INTERVAL_S: Final = 10.0  # seconds between two requests for the endpoints
RECONNECT_DELAY_S: Final = 1.0  # seconds before asking again after a publisher disconnected
# Seconds without any connection after which the reported blocks are dropped: it may have restarted.
MAX_SILENCE_S: Final = 30.0
_REFRESH_ERRORS: Final = (*QUERY_ERRORS, ValueError)
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


@dataclass(slots=True)
class RankFeed:
    """The feed of one data-parallel rank and the task that receives its messages."""

    endpoint: EventEndpoint
    feed: EventFeed
    task: asyncio.Task[None]
    is_connected: bool = False
    disconnected_at_s: float = 0.0  # monotonic time of its last disconnection, or of its start

    @property
    def is_live(self) -> bool:
        return self.is_connected and not self.task.done()

    @property
    def is_lost(self) -> bool:
        """Whether it must be started anew: ZMQ gives a connection up on which a message was too long."""
        is_silent = monotonic() - self.disconnected_at_s > MAX_SILENCE_S
        return self.task.done() or (not self.is_connected and is_silent)


class Subscription:
    """Follows the KV events of the instance at `url`; starts its task on creation.

    index: shared by all instances. find_endpoints: returns the endpoints of a URL by data-parallel rank.
    """

    def __init__(
        self,
        url: str,
        index: ReportedIndex,
        context: zmq.asyncio.Context,
        find_endpoints: Callable[[str], Awaitable[dict[int, EventEndpoint]]],
    ) -> None:
        self.url = url
        self._index = index
        self._context = context
        self._find_endpoints = find_endpoints
        self._ranks: dict[int, RankFeed] = {}
        self._wake_event = asyncio.Event()
        self._last_connected_s = monotonic()  # when a feed was last seen connected
        self._logged: set[str] = set()
        self.task = asyncio.create_task(self._run_forever())

    def close(self) -> list[asyncio.Task[None]]:
        """Unsubscribe and drop what the instance reported. Returns the cancelled tasks, to be awaited."""
        self.task.cancel()
        ending = [self.task, *(rank.task for rank in self._ranks.values())]
        for number in list(self._ranks):
            self._stop_rank(number)
        self._index.stop_reporting(self.url)
        return ending

    async def _run_forever(self) -> None:
        while True:
            try:
                # Asked again and again: a restarted instance may name other ports.
                self._sync_ranks(await self._find_endpoints(self.url))
            except _REFRESH_ERRORS as error:
                # ValueError: it responds, but not with endpoints, and retrying does not help. After other
                # errors the instance may just be starting.
                remedy = f"; {ENDPOINT_REMEDY}" if isinstance(error, ValueError) else ""
                self._warn_once(
                    f"does not answer where it publishes KV events: {error!r:.200}{remedy}"
                )
            self._check_silence()
            await run_sliced(self._index.free_retired())
            self._wake_event.clear()
            try:
                await wait_at_most(self._wake_event.wait(), REFRESH_INTERVAL_S)
            except asyncio.TimeoutError:
                self._warn_misconfigured()
            else:
                # A publisher disconnected: the instance may come back with other endpoints.
                await asyncio.sleep(RECONNECT_DELAY_S)

    def _sync_ranks(self, endpoints: dict[int, EventEndpoint]) -> None:
        if not endpoints and not self._ranks:
            self._warn_once(
                "names no endpoint of KV events, so its cached prefixes are estimated from the prompts "
                "sent; start vLLM with --kv-events-config, or name it with --kv-events-endpoint"
            )
        for number, rank in list(self._ranks.items()):
            # Not on a mere disconnection, which ZMQ repairs by itself.
            if endpoints.get(number) != rank.endpoint or rank.is_lost:
                self._stop_rank(number)
        for number, endpoint in endpoints.items():
            if number not in self._ranks:
                replay_from = functools.partial(request_replay, self._context, endpoint.replay)
                # A new one, since another publisher's hashes mean nothing to the old.
                ledger = BlockLedger(self._index, self.url, number)
                feed = EventFeed(ledger, replay_from if endpoint.replay else None)
                listening = receive_events(
                    self._context,
                    endpoint,
                    feed,
                    functools.partial(self._handle_connection, number),
                )
                self._ranks[number] = RankFeed(
                    endpoint, feed, asyncio.create_task(listening), disconnected_at_s=monotonic()
                )

    def _check_silence(self) -> None:
        """Drop the reported blocks if nothing is published any more, or no feed was connected for long."""
        if any(rank.is_live for rank in self._ranks.values()):
            self._last_connected_s = monotonic()
        elif not self._ranks or monotonic() - self._last_connected_s > MAX_SILENCE_S:
            if self.url in self._index.reporting:
                self._warn_once(
                    "stopped publishing KV events; its cached prefixes are estimated from the prompts sent"
                )
            for rank in self._ranks.values():
                rank.feed.clear_state()
            self._index.stop_reporting(self.url)

    def _stop_rank(self, rank_number: int) -> None:
        rank = self._ranks.pop(rank_number)
        if rank.task.done() and not rank.task.cancelled():
            self._warn_once(
                f"lost its KV event subscription at {rank.endpoint.events}, which is renewed while "
                f"it names that endpoint: {rank.task.exception()!r}"
            )
        rank.task.cancel()
        rank.feed.ledger.clear_blocks()

    def _handle_connection(self, rank_number: int, is_connected: bool) -> None:
        # May be gone: the monitor's last event comes after _stop_rank().
        rank = self._ranks.get(rank_number)
        if rank is not None:
            rank.is_connected = is_connected
            rank.disconnected_at_s = monotonic()
        if is_connected:
            self._index.start_reporting(self.url)
        else:
            self._last_connected_s = monotonic()
            self._wake_event.set()

    def _warn_misconfigured(self) -> None:
        for rank in self._ranks.values():
            # Never connected: most likely bound to the loopback address of another host.
            if not rank.is_connected and not rank.feed.counts:
                self._warn_once(
                    f"accepts no KV event subscriber at {rank.endpoint.events}; give vLLM a wildcard "
                    "address to bind in --kv-events-config, like tcp://*:5557"
                )
        if any(rank.feed.ledger.counts["dropped"] for rank in self._ranks.values()):
            self._warn_once(
                f"has more KV blocks cached than the router tracks ({MAX_BLOCKS_PER_CACHE} per cache, "
                f"{MAX_REPORTED_BLOCKS} in all): the rest counts as not cached; see `dropped` on "
                "/metrics"
            )
        size = self._index.block_sizes.get(self.url, 0)
        if size not in (0, self._index.block_size):
            self._warn_once(
                f"has KV blocks of {size} tokens, but the index holds blocks of {self._index.block_size}: "
                "nothing counts as cached there; give all instances the same --block-size"
            )

    def _warn_once(self, message: str) -> None:
        # Bounded, because messages contain what instances answered.
        if message not in self._logged and len(self._logged) < 100:
            self._logged.add(message)
            log.warning("ttft-otel: %s %.1000s", self.url, message)

    def describe_status(self) -> dict[str, Any]:
        """The state of the feeds for GET /instances; `last` is the last message number by rank."""
        counts: Counter[str] = Counter()
        for rank in self._ranks.values():
            counts += rank.feed.counts + rank.feed.ledger.counts
        return {
            "source": "kv-events",
            "connected": bool(self._ranks) and all(each.is_live for each in self._ranks.values()),
            "block_size": self._index.block_sizes.get(self.url, 0),
            "blocks": sum(len(each.feed.ledger) for each in self._ranks.values()),
            "last": {number: each.feed.last_applied for number, each in self._ranks.items()},
            "counts": dict(counts),
        }
