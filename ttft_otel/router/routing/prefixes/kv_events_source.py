# SPDX-License-Identifier: Apache-2.0
"""Cached prefixes from the KV events that vLLM publishes over ZMQ: --prefix-index kv-events.

Every instance that prefills is asked periodically for its endpoints (`GET /kv_event_sources`), which change
when it is restarted elsewhere, unless an operator has configured them; a wildcard in an address that the
instance binds is replaced by its host. For an instance without events, the prefixes are estimated from the
prompts sent to it. The wire format is that of vLLM's ZmqEventPublisher (distributed/kv_events.py).
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

try:
    import zmq.asyncio
    from zmq.utils.monitor import recv_monitor_message
except ImportError as error:
    raise ImportError(
        "--prefix-index kv-events needs pyzmq; install it with pip install 'ttft-otel[router]'."
    ) from error

from ttft_otel.router.errors import ReplayFailed
from ttft_otel.router.routing.prefixes.kv_events import (
    MAX_REPORTED_BLOCKS,
    BlockLedger,
    EventFeed,
    ReportedIndex,
)
from ttft_otel.router.routing.prefixes.prefix_source import (
    DEFAULT_BLOCK_SIZE,
    MAX_HISTORY_BLOCKS,
    PrefixSource,
    run_sliced,
)
from ttft_otel.router.time_limits import wait_at_most
from ttft_otel.router.upstream.connection_pool import QUERY_ERRORS, QueryClient
from ttft_otel.router.upstream.instance_pool import InstancePool

REFRESH_INTERVAL_S: Final = 10.0  # seconds between two requests for the endpoints
RECONNECT_DELAY_S: Final = 1.0  # seconds before asking again after a publisher disconnected
# Seconds without any connection after which the reported blocks are dropped: it may have restarted.
MAX_SILENCE_S: Final = 30.0
_REFRESH_ERRORS: Final = (*QUERY_ERRORS, ValueError)
MAX_ANSWER_BYTES: Final = 64 << 10  # of /kv_event_sources
MAX_SOCKETS: Final = 16_384  # of all subscriptions: three for each rank; ZMQ's default is 1023
# Messages in ZMQ's queue of a socket. What is published faster waits at the publisher, in its own queue.
MAX_QUEUED_MESSAGES: Final = 32
# Bytes of a frame; a prompt of a million tokens has 7 MB of events.
MAX_MESSAGE_BYTES: Final = 8 << 20
MAX_FRAMES: Final = 4  # of a message: a replay's has an empty one, topic, number and events
FRAMES_PER_TURN: Final = 256  # excess frames discarded before other tasks run
MAX_REPLAYED_MESSAGES: Final = 100_000  # of one request; vLLM keeps 10 000 by default
# Seconds for the next message of a replay; an engine in a long step sends late.
REPLAY_TIMEOUT_S: Final = 5.0
MESSAGES_PER_TURN: Final = 16  # messages handled before other tasks run
MAX_EMPTY_REPLAYS: Final = 3  # replays in a row without a new message
# The number that ends a replay: -1 as vLLM's signed 64 bits.
END_OF_REPLAY: Final = (1 << 64) - 1
# Milliseconds; to notice half-open connections.
HEARTBEAT_MS: Final = {"IVL": 5_000, "TIMEOUT": 15_000}
ENDPOINT_REMEDY: Final = (
    "write --kv-events-endpoint INSTANCE_URL=ENDPOINT[,REPLAY_ENDPOINT] with endpoints like "
    "tcp://host:5557 or ipc:///path, once for each data-parallel rank of the instance"
)
MAX_RANKS: Final = 128  # data-parallel ranks of an instance; each takes sockets and a task
MAX_ADDRESS_CHARS: Final = 255  # paths of sockets have fewer, host names no more
WILDCARD_HOSTS: Final = ("*", "0.0.0.0", "::", "[::]")
log: Final = logging.getLogger("ttft_otel")


@dataclass(frozen=True, slots=True)
class EventEndpoint:
    """ZMQ addresses of one publisher: its PUB socket, and its replay (ROUTER) socket, "" if it has none."""

    events: str
    replay: str = ""
    topic: str = ""


def parse_configured(values: Sequence[str]) -> dict[str, list[EventEndpoint]]:
    """Parse --kv-events-endpoint into endpoints by instance URL. Raises ValueError with the remedy.

    values: each INSTANCE_URL=ENDPOINT[,REPLAY_ENDPOINT], in the order of data-parallel ranks.
    """
    endpoints: dict[str, list[EventEndpoint]] = {}
    for value in values:
        url, separator, rest = value.partition("=")
        events, _, replay = rest.partition(",")
        # Checked before: urlsplit() takes almost any text for a path.
        host = urlsplit(url).hostname if url.startswith(("http://", "https://")) else None
        if not separator or not host:
            raise ValueError(
                f"{value!r} is not an instance URL and an endpoint; {ENDPOINT_REMEDY}."
            )
        try:
            endpoint = EventEndpoint(
                resolve_address(events, host), resolve_address(replay, host) if replay else ""
            )
        except ValueError as error:
            raise ValueError(f"{error}; {ENDPOINT_REMEDY}.") from error
        endpoints.setdefault(url.rstrip("/"), []).append(endpoint)
    return endpoints


def parse_announced(answer: Any, url: str) -> dict[int, EventEndpoint]:
    """Parse a decoded response of /kv_event_sources into endpoints by data-parallel rank.

    answer: empty if the instance publishes nothing. url: of the instance, to resolve wildcard addresses.
    Raises ValueError for a response of another form, or with more than MAX_RANKS.
    """
    if not isinstance(answer, Mapping):
        raise ValueError("/kv_event_sources did not return an object by rank")
    # The answer comes from an instance: it must not make the router open thousands of sockets.
    if len(answer) > MAX_RANKS:
        raise ValueError(f"/kv_event_sources returned more than {MAX_RANKS} ranks")
    host = urlsplit(url).hostname or ""
    endpoints: dict[int, EventEndpoint] = {}
    for rank, config in answer.items():
        if not isinstance(config, Mapping) or not str(rank).isdigit():
            raise ValueError(f"/kv_event_sources has no valid configuration for rank {rank!r:.20}")
        # The other publisher, "null", sends nothing.
        if config.get("publisher") == "zmq" and config.get("enable_kv_cache_events", True):
            replay = config.get("replay_endpoint") or ""
            endpoints[int(rank)] = EventEndpoint(
                resolve_address(str(config.get("endpoint")), host),
                resolve_address(str(replay), host) if replay else "",
                str(config.get("topic") or ""),
            )
    return endpoints


def resolve_address(address: str, host: str) -> str:
    """Turn the `address` that a publisher binds into one to connect to, on `host` if it is a wildcard.

    Raises ValueError for anything but tcp://HOST:PORT and ipc://PATH.
    """
    scheme, _, rest = address.partition("://")
    if len(address) > MAX_ADDRESS_CHARS or not address.isprintable():
        raise ValueError(f"{address[:50]!r}... is not a ZMQ address of a publisher")
    # Only on this host, in a file system that both see.
    if scheme == "ipc" and rest:
        return address
    host_part, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host_part or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r:.200} is not a ZMQ address of a publisher")
    if host_part in WILDCARD_HOSTS:
        # An IPv6 address needs its brackets before a port.
        host_part = f"[{host}]" if ":" in host else host
    return f"tcp://{host_part}:{port}"


async def receive_events(
    context: zmq.asyncio.Context,
    endpoint: EventEndpoint,
    feed: EventFeed,
    on_connection: Callable[[bool], None],
) -> None:
    """Pass published messages and connection changes to `feed`, until cancelled.

    endpoint: of the publisher. on_connection: called with True on connect and False on disconnect.
    """
    with ExitStack() as stack:
        socket = stack.enter_context(_open_socket(context, zmq.SUB))
        # Closed by us: a subscription that fails is tried again and again.
        monitor = stack.enter_context(
            socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        )
        stack.callback(socket.disable_monitor)
        for name, value in HEARTBEAT_MS.items():
            socket.setsockopt(getattr(zmq, f"HEARTBEAT_{name}"), value)
        # A SUB socket without a subscription receives nothing.
        socket.setsockopt(zmq.SUBSCRIBE, endpoint.topic.encode())
        socket.connect(endpoint.events)
        tasks = [
            asyncio.ensure_future(_watch_connection(monitor, feed, on_connection)),
            asyncio.ensure_future(_receive_messages(socket, feed)),
        ]
        for task in tasks:
            stack.callback(task.cancel)
        await asyncio.gather(*tasks)


async def _receive_messages(socket: zmq.asyncio.Socket, feed: EventFeed) -> None:
    for turns in itertools.count(1):
        parts = await _receive_frames(socket)
        async with feed.lock:
            # Topic, number (8 bytes, big-endian), events.
            if len(parts) == 3 and len(parts[1]) == 8:
                await feed.receive_message(int.from_bytes(parts[1], "big"), parts[2])
            else:
                feed.counts["malformed"] += 1
        # Receiving a message that is already queued does not yield to the event loop.
        if turns % MESSAGES_PER_TURN == 0:
            await asyncio.sleep(0)


async def _watch_connection(
    monitor: zmq.asyncio.Socket, feed: EventFeed, on_connection: Callable[[bool], None]
) -> None:
    while True:
        event = await recv_monitor_message(monitor)
        feed.is_connected = event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        feed.changed_at_s = monotonic()
        on_connection(feed.is_connected)
        if feed.is_connected:
            async with feed.lock:
                await feed.handle_connected()
        else:
            # Without the lock: it only sets a flag, and must not wait for a replay.
            feed.handle_disconnected()


async def request_replay(
    context: zmq.asyncio.Context, address: str, start: int
) -> AsyncGenerator[tuple[int, bytes], None]:
    """Iterate over all messages that the engine keeps from number `start` on, without gaps.

    address: of the replay socket. Engines send faster than their socket may accept and then drop messages,
    which are requested again. Raises ReplayFailed, also after MAX_REPLAYED_MESSAGES.
    """
    next_number: int | None = None
    empty_replays = replayed = 0
    while empty_replays < MAX_EMPTY_REPLAYS:
        previous_number, is_complete, has_ended = next_number, True, False
        # A new socket for each request: late answers to an earlier one cannot mix in.
        with _open_socket(context, zmq.DEALER) as socket:
            socket.connect(address)
            # The empty frame is what a REQ socket would send; vLLM's ROUTER expects it.
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            while not has_ended:
                try:
                    parts = await wait_at_most(_receive_frames(socket), REPLAY_TIMEOUT_S)
                except asyncio.TimeoutError:
                    break
                if not 3 <= len(parts) <= MAX_FRAMES or len(parts[-2]) != 8:
                    break
                replayed += 1
                if replayed > MAX_REPLAYED_MESSAGES:
                    raise ReplayFailed(address)
                # Receiving a message that is already queued does not yield to the event loop.
                if replayed % MESSAGES_PER_TURN == 0:
                    await asyncio.sleep(0)
                number = int.from_bytes(parts[-2], "big")
                if number == END_OF_REPLAY:
                    has_ended = True
                elif is_complete and next_number in (None, number):
                    yield number, parts[-1]
                    start = next_number = number + 1
                else:
                    is_complete = False
        if is_complete and has_ended:
            return
        empty_replays = 0 if next_number != previous_number else empty_replays + 1
    raise ReplayFailed(address)


async def _receive_frames(socket: zmq.asyncio.Socket) -> list[bytes]:
    """The frames of one message, up to one more than MAX_FRAMES; the rest is discarded."""
    frames: list[bytes] = [await socket.recv()]
    for count in itertools.count(1):
        if not socket.getsockopt(zmq.RCVMORE):
            break
        frame = await socket.recv()
        if count <= MAX_FRAMES:
            frames.append(frame)
        if count % FRAMES_PER_TURN == 0:
            await asyncio.sleep(0)
    return frames


def _open_socket(context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
    socket: zmq.asyncio.Socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    # Before connect(), which is when ZMQ reads these options.
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.IPV6, 1)
    return socket


class KvEventsSource(PrefixSource):
    """Follows the KV events of each instance that publishes them; estimates the others.

    endpoints: values of --kv-events-endpoint. Raises ValueError for a malformed one.
    """

    index: ReportedIndex

    def __init__(self, endpoints: Sequence[str] = ()) -> None:
        # One index for reported and estimated blocks: policies compare instances of both kinds.
        super().__init__(ReportedIndex(DEFAULT_BLOCK_SIZE, MAX_HISTORY_BLOCKS))
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
        urls = self._list_urls()
        for url in self._subscriptions.keys() - urls:
            self._subscriptions.pop(url).close()
        if self._context is not None:
            for url in urls - self._subscriptions.keys():
                self._subscriptions[url] = Subscription(
                    url, self.index, self._context, self._find_endpoints
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
            if url in self.index.reporting
        }


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
        self._endpoints: dict[int, EventEndpoint] = {}  # that the feeds receive from
        self._feeds: dict[int, EventFeed] = {}  # by data-parallel rank
        self._wake_event = asyncio.Event()
        self._last_connected_s = monotonic()  # when a feed was last seen connected
        self._logged: set[str] = set()
        self.task = asyncio.create_task(self._run_forever())

    def close(self) -> list[asyncio.Task[None]]:
        """Unsubscribe and drop what the instance reported. Returns the cancelled tasks, to be awaited."""
        self.task.cancel()
        ending = [self.task, *(feed.task for feed in self._feeds.values())]
        for rank in list(self._feeds):
            self._stop_feed(rank)
        self._index.stop_reporting(self.url)
        return ending

    async def _run_forever(self) -> None:
        while True:
            try:
                # Asked again and again: a restarted instance may name other ports.
                self._sync_feeds(await self._find_endpoints(self.url))
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

    def _sync_feeds(self, endpoints: dict[int, EventEndpoint]) -> None:
        if not endpoints and not self._feeds:
            self._warn_once(
                "names no endpoint of KV events, so its cached prefixes are estimated from the prompts "
                "sent; start vLLM with --kv-events-config, or name it with --kv-events-endpoint"
            )
        for rank, feed in list(self._feeds.items()):
            # ZMQ repairs a mere disconnection by itself, but gives a connection up on which a message was
            # too long.
            is_silent = not feed.is_connected and monotonic() - feed.changed_at_s > MAX_SILENCE_S
            if endpoints.get(rank) != self._endpoints[rank] or feed.task.done() or is_silent:
                self._stop_feed(rank)
        self._endpoints = endpoints
        for rank in endpoints.keys() - self._feeds.keys():
            endpoint = endpoints[rank]
            replay_from = functools.partial(request_replay, self._context, endpoint.replay)
            # A new one, since another publisher's hashes mean nothing to the old.
            ledger = BlockLedger(self._index, self.url, rank)
            feed = self._feeds[rank] = EventFeed(ledger, replay_from if endpoint.replay else None)
            feed.task = asyncio.create_task(
                receive_events(self._context, endpoint, feed, self._handle_connection)
            )

    def _check_silence(self) -> None:
        """Drop the reported blocks if nothing is published any more, or no feed was connected for long."""
        if any(feed.is_live for feed in self._feeds.values()):
            self._last_connected_s = monotonic()
        elif not self._feeds or monotonic() - self._last_connected_s > MAX_SILENCE_S:
            if self.url in self._index.reporting:
                self._warn_once(
                    "stopped publishing KV events; its cached prefixes are estimated from the prompts sent"
                )
            for feed in self._feeds.values():
                feed.clear_state()
            self._index.stop_reporting(self.url)

    def _stop_feed(self, rank: int) -> None:
        feed = self._feeds.pop(rank)
        if feed.task.done() and not feed.task.cancelled():
            self._warn_once(
                f"lost its KV event subscription at {self._endpoints[rank].events}, which is renewed while "
                f"it names that endpoint: {feed.task.exception()!r}"
            )
        feed.task.cancel()
        feed.ledger.clear_blocks()

    def _handle_connection(self, is_connected: bool) -> None:
        if is_connected:
            self._index.start_reporting(self.url)
        else:
            self._last_connected_s = monotonic()
            self._wake_event.set()

    def _warn_misconfigured(self) -> None:
        for rank, feed in self._feeds.items():
            # Never connected: most likely bound to the loopback address of another host.
            if not feed.is_connected and not feed.counts:
                self._warn_once(
                    f"accepts no KV event subscriber at {self._endpoints[rank].events}; give vLLM a wildcard "
                    "address to bind in --kv-events-config, like tcp://*:5557"
                )
        if any(feed.ledger.counts["dropped"] for feed in self._feeds.values()):
            self._warn_once(
                f"has more KV blocks cached than the router tracks ({MAX_REPORTED_BLOCKS // 2} per cache, "
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
        for feed in self._feeds.values():
            counts += feed.counts + feed.ledger.counts
        return {
            "source": "kv-events",
            "connected": bool(self._feeds) and all(feed.is_live for feed in self._feeds.values()),
            "block_size": self._index.block_sizes.get(self.url, 0),
            "blocks": sum(len(feed.ledger) for feed in self._feeds.values()),
            "last": {rank: feed.last_applied for rank, feed in self._feeds.items()},
            "counts": dict(counts),
        }
