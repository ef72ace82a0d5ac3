# SPDX-License-Identifier: Apache-2.0
"""Joins one process of a router to the other replicas: tells them its load, and takes in theirs.

cli/peer_options.py builds it. With --workers each worker tells the others by itself, and one of them has the
port and passes on what arrives (workers/load_link.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ttft_otel.model.names import metric_names
from ttft_otel.router.discovery.discovery import end_tasks
from ttft_otel.router.discovery.source_address import SourceAddress
from ttft_otel.router.peers.peer_books import PeerBooks
from ttft_otel.router.peers.peer_directory import PeerDirectory
from ttft_otel.router.peers.peer_frames import (
    PeerFrame,
    decode_peer_frame,
    encode_peer_frame,
)
from ttft_otel.router.peers.peer_seal import ReplayGuard, open_datagram, seal_body
from ttft_otel.router.peers.peer_socket import PeerSocket
from ttft_otel.router.peers.told_loads import ToldLoads
from ttft_otel.router.routing.routing_service import RoutingService
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.router.workers.load_counts import CountReader, CountWriter, LoadCounts
from ttft_otel.router.workers.messages import LoadMessage
from ttft_otel.router.workers.own_loads import OwnLoads
from ttft_otel.router.workers.sibling_loads import SiblingLoads
from ttft_otel.tracing.guard import Guard

FLUSH_S: Final = (
    0.005  # seconds between two datagrams of changes: what happens meanwhile shares one
)
STATEMENT_INTERVAL_S: Final = 1.0  # seconds between two statements of everything under way
PORT_SEAT: Final = 0  # of the worker that has the port
WARN_INTERVAL_S: Final = 60.0  # seconds between two log lines about datagrams that were dropped
# Why datagrams are dropped, and what that means.
DROP_REASONS: Final = {
    "forged": "its sender has another key",
    "malformed": "its sender has another release",
    "stale": "the clocks of the hosts differ by more than 30 s",
    "replayed": "it came twice, or much too late",
    "full": "more replicas, instances or requests than there is room for",
}

log: Final = logging.getLogger("ttft_otel")


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """What --peers says. host: where this replica listens. replica: its name, one for all its workers."""

    address: SourceAddress
    keys: tuple[bytes, ...]
    host: str
    replica: str


class PeerLink:
    """What one process and the other replicas know of one another.

    own: what happens here; its numbers are read by `counts`. siblings: takes the load of others.
    has_port: whether datagrams arrive here; if not, `take_body` is called with them. relay: passes bodies on
    to the workers that have not.
    """

    def __init__(
        self,
        settings: PeerSettings,
        pool: InstancePool,
        own: OwnLoads,
        siblings: SiblingLoads,
        counts: CountReader,
        has_port: bool = True,
        relay: Callable[[bytes], None] | None = None,
    ) -> None:
        self.settings, self.pool, self.own, self.relay = settings, pool, own, relay
        self.directory = PeerDirectory(settings.address)
        self.told = ToldLoads(settings.replica, own, counts)
        self.books = PeerBooks(siblings, pool)
        self.results: Counter[str] = Counter(dict.fromkeys((*DROP_REASONS, "taken", "sent"), 0))
        port = int(settings.address.port) if has_port else 0
        self.socket = PeerSocket(settings.host, port, self.receive_datagram)
        self._guard = ReplayGuard()
        self._timer: asyncio.TimerHandle | None = None
        self._flushed_s = self._warned_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._remove_listener: Callable[[], None] | None = None

    async def start(self) -> None:
        """Tell and listen from now on. Raises ValueError if the port is taken."""
        address = self.settings.address
        try:
            self.socket.open()
        except OSError as error:
            raise ValueError(
                f"--peers {address.text}: cannot listen on {self.settings.host} port {address.port} (UDP): "
                f"{error}"
            ) from error
        self.own.listener = self
        self._remove_listener = self.pool.change_listeners.add(self._sync_instances)
        self._sync_instances()
        self._tasks = [
            asyncio.create_task(self.directory.ask_forever()),
            asyncio.create_task(self._state_forever()),
        ]

    async def close(self) -> None:
        """Tell the others that nothing is under way here any more."""
        await end_tasks(self._tasks)
        if self._timer is not None:
            self._timer.cancel()
        if self._remove_listener is not None:
            self._remove_listener()
        self.own.listener = None
        self._send_frames(self.told.build_farewell())
        self.socket.close()
        self.books.forget_all()

    # The listener of own_loads.py, called for each request.

    def record_change(self) -> None:
        """A number has changed: it is told soon."""
        if self._timer is None:
            # At once after a pause, so that it is known when the next request is decided on.
            delay_s = max(0.0, self._flushed_s + FLUSH_S - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._flush)

    def record_message(self, message: LoadMessage) -> None:
        """Something that others compare has happened to an attempt."""
        self.told.note_message(message)
        self.record_change()

    def receive_datagram(self, data: bytes) -> None:
        """Judge one datagram, which anybody may have sent, and take it in."""
        body = open_datagram(data, self.settings.keys)
        if body is None:
            self._count_drop("forged")
            return
        # What cannot be handled must not end the reading.
        with Guard("router.peers"):
            try:
                frame = decode_peer_frame(body)
            except msgspec.MsgspecError:
                self._count_drop("malformed")
                return
            # The name leads to this replica, too.
            if frame.replica == self.settings.replica:
                return
            now_ms = time.time_ns() // 1_000_000
            sender = (frame.replica, frame.sender)
            reason = self._guard.judge_frame(sender, frame.sequence, frame.time_ms, now_ms)
            if reason:
                self._count_drop(reason)
                return
            self.results["taken"] += 1
            self._apply_frame(frame)
            if self.relay is not None:
                self.relay(body)

    def take_body(self, body: bytes) -> None:
        """Take in what the worker with the port has judged."""
        self._apply_frame(decode_peer_frame(body))

    def collect_metrics(self) -> Iterator[Metric]:
        """For /metrics."""
        yield GaugeMetricFamily(
            metric_names.ROUTER_PEERS,
            "Other replicas that were heard of within 5 s.",
            value=self.books.count_replicas(),
        )
        messages = CounterMetricFamily(
            metric_names.ROUTER_PEER_MESSAGES,
            "Datagrams between replicas, by result.",
            labels=["result"],
        )
        counts = {**self.results, "unsent": self.socket.unsent}
        for result, number in counts.items():
            messages.add_metric([result], number)
        yield messages

    def _apply_frame(self, frame: PeerFrame) -> None:
        before = self.books.too_many
        self.books.apply_frame(frame)
        if self.books.too_many != before:
            self._count_drop("full")

    def _flush(self) -> None:
        self._timer, self._flushed_s = None, time.monotonic()
        with Guard("router.peers"):
            self._send_frames(self.told.build_changes())

    async def _state_forever(self) -> None:
        while True:
            with Guard("router.peers"):
                self._send_frames(self.told.build_statement())
                self.books.forget_silent()
            await asyncio.sleep(STATEMENT_INTERVAL_S)

    def _send_frames(self, frames: Iterable[PeerFrame]) -> None:
        addresses = self.directory.addresses
        for frame in frames:
            self.socket.send(seal_body(encode_peer_frame(frame), self.settings.keys), addresses)
            self.results["sent"] += len(addresses)

    def _sync_instances(self) -> None:
        self.books.sync_instances(self.pool)

    def _count_drop(self, reason: str) -> None:
        self.results[reason] += 1
        moment = time.monotonic()
        if not self._warned_s or moment - self._warned_s > WARN_INTERVAL_S:
            self._warned_s = moment
            log.warning(
                "ttft-otel: --peers: a datagram was dropped (%s): %s; all are in %s_total",
                reason,
                DROP_REASONS[reason],
                metric_names.ROUTER_PEER_MESSAGES,
            )


class LonePeerLink(PeerLink):
    """That of a router without --workers, which else would keep no books."""

    def __init__(self, settings: PeerSettings, pool: InstancePool, routing: RoutingService) -> None:
        shared = LoadCounts(1)
        own = OwnLoads(pool, routing, CountWriter(shared, 0), _tell_nobody)
        siblings = SiblingLoads(pool.find_instance, lambda leg: routing.get_leg_policy(leg).state)
        super().__init__(settings, pool, own, siblings, CountReader(shared, 0))
        self.siblings = siblings

    async def start(self) -> None:
        """Keep books, tell and listen from now on."""
        self.own.start()
        self.pool.change_listeners.add(self.siblings.sync_instances)
        await super().start()


def _tell_nobody(_: LoadMessage) -> None:
    """There is no other worker."""
