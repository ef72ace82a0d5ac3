# SPDX-License-Identifier: Apache-2.0
"""ZMQ sockets to one publisher of KV events; kv_events_source.py runs them, event_feed.py handles messages.

The wire format is that of vLLM's ZmqEventPublisher (distributed/kv_events.py). An instance reports its
addresses on `GET /kv_event_sources`, by data-parallel rank, or an operator configures them; a wildcard in an
address that the instance binds is replaced by its host.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from ttft_otel.router.errors import ReplayFailed
from ttft_otel.router.routing.prefixes.event_feed import EventFeed
from ttft_otel.router.time_limits import wait_at_most

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
        # A replay awaits: without the lock the next message would be applied in the middle of it.
        lock = asyncio.Lock()
        tasks = [
            asyncio.ensure_future(_watch_connection(monitor, feed, lock, on_connection)),
            asyncio.ensure_future(_receive_messages(socket, feed, lock)),
        ]
        for task in tasks:
            stack.callback(task.cancel)
        await asyncio.gather(*tasks)


async def _receive_messages(
    socket: zmq.asyncio.Socket, feed: EventFeed, lock: asyncio.Lock
) -> None:
    for turns in itertools.count(1):
        parts = await _receive_frames(socket)
        async with lock:
            # Topic, number (8 bytes, big-endian), events.
            if len(parts) == 3 and len(parts[1]) == 8:
                await feed.receive_message(int.from_bytes(parts[1], "big"), parts[2])
            else:
                feed.counts["malformed"] += 1
        # Receiving a message that is already queued does not yield to the event loop.
        if turns % MESSAGES_PER_TURN == 0:
            await asyncio.sleep(0)


async def _watch_connection(
    monitor: zmq.asyncio.Socket,
    feed: EventFeed,
    lock: asyncio.Lock,
    on_connection: Callable[[bool], None],
) -> None:
    while True:
        event = await recv_monitor_message(monitor)
        is_connected = event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        on_connection(is_connected)
        if is_connected:
            async with lock:
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
        async with aclosing(_receive_replay(context, address, start)) as answer:
            async for number, payload in answer:
                replayed += 1
                if replayed > MAX_REPLAYED_MESSAGES:
                    raise ReplayFailed(address)
                # Receiving a message that is already queued does not yield to the event loop.
                if replayed % MESSAGES_PER_TURN == 0:
                    await asyncio.sleep(0)
                if number == END_OF_REPLAY:
                    has_ended = True
                elif is_complete and next_number in (None, number):
                    yield number, payload
                    start = next_number = number + 1
                else:
                    is_complete = False
        if is_complete and has_ended:
            return
        empty_replays = 0 if next_number != previous_number else empty_replays + 1
    raise ReplayFailed(address)


async def _receive_replay(
    context: zmq.asyncio.Context, address: str, start: int
) -> AsyncGenerator[tuple[int, bytes], None]:
    """The messages of one replay request; complete if the last number is END_OF_REPLAY."""
    # A new socket for each request: late answers to an earlier one cannot mix in.
    with _open_socket(context, zmq.DEALER) as socket:
        socket.connect(address)
        # The empty frame is what a REQ socket would send; vLLM's ROUTER expects it.
        await socket.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            try:
                parts = await wait_at_most(_receive_frames(socket), REPLAY_TIMEOUT_S)
            except asyncio.TimeoutError:
                return
            if not 3 <= len(parts) <= MAX_FRAMES or len(parts[-2]) != 8:
                return
            number = int.from_bytes(parts[-2], "big")
            yield number, parts[-1]
            if number == END_OF_REPLAY:
                return


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
