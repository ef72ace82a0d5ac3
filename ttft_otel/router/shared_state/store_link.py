# SPDX-License-Identifier: Apache-2.0
"""Joins one process of a router to the other replicas, through a Valkey or Redis that all of them reach.

commands/router/router_options.py builds it. Each process has one key with all that it has under way
(snapshots.py), which expires by itself. Who writes its key says so on a channel, and who hears that reads the
key: one pipeline writes and reads at once. Nothing of a request waits for any of this.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import redis.asyncio
from prometheus_client.core import Metric
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from ttft_otel.model.names import metric_names
from ttft_otel.router.discovery.discovery import end_tasks
from ttft_otel.router.routing.routing_service import RoutingService
from ttft_otel.router.shared_state.snapshots import MAX_VALUE_BYTES, OtherReplicas, build_snapshot
from ttft_otel.router.types import JSON_ERRORS
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.router.workers.process_loads import OwnLoads, RemoteLoads
from ttft_otel.tracing.guard import Guard
from ttft_otel.tracing.meter import build_counter, build_gauge

CHANNEL: Final = "changes"
FORMAT: Final = 2  # of keys and values: releases that differ in it know nothing of one another
# Seconds between two exchanges: what happens meanwhile shares one.
EXCHANGE_INTERVAL_S: Final = 0.005
REFRESH_INTERVAL_S: Final = 1.0  # seconds after which a key is written though nothing has changed
EXPIRY_S: Final = 5.0  # seconds after which what a silent process had under way is forgotten
TIMEOUT_S: Final = 1.0  # seconds for the store to connect, and to answer
MAX_BACKOFF_S: Final = 5.0  # seconds between two attempts to reach it
MAX_PROCESSES: Final = 64  # processes of other replicas
NAME_PATTERN: Final = re.compile(rb"([0-9a-f]{16})\.[0-9a-f]{8}")  # router and process

log: Final = logging.getLogger("ttft_otel")


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """What --shared-state and its like say."""

    url: str  # redis:// or rediss://; files of certificates are in its query
    password_file: str  # "" for a password in the URL, or none
    prefix: str  # of keys and of the channel: one for each deployment


class StoreLink:
    """What one process and the other replicas know of one another.

    own: what happens here. loads: takes the load of others. replica: names the router, whose other workers
    share by themselves.
    """

    def __init__(
        self,
        settings: StoreSettings,
        pool: InstancePool,
        own: OwnLoads,
        loads: RemoteLoads,
        replica: str,
    ) -> None:
        self._settings, self._pool, self._own = settings, pool, own
        self._replica, self._name = replica, f"{replica}.{secrets.token_hex(4)}"
        self._others = OtherReplicas(pool, loads)
        self._heard_s: dict[str, float] = {}  # by process
        self._values: dict[str, bytes] = {}  # what was read last, by process
        self._unread: set[str] = set()  # processes that have written since
        self._has_changed = True  # since this process has written
        self._wake = asyncio.Event()
        self._is_up: bool | None = None  # None before the first attempt
        self._exchanges = Counter(ok=0, failed=0)
        self._results = Counter(taken=0, malformed=0, too_many=0)
        self._tasks: list[asyncio.Task[None]] = []
        self._remove_listener: Callable[[], None] | None = None

    async def __aenter__(self) -> None:
        """Share from now on; a store that cannot be reached delays nothing."""
        self._own.on_change = self._note_change
        self._remove_listener = self._pool.change_listeners.add(self._sync_instances)
        self._tasks = [asyncio.create_task(self._share_forever())]

    async def __aexit__(self, *_: object) -> None:
        """Leave: the others forget at once what was under way here."""
        self._own.on_change = None
        if self._remove_listener is not None:
            self._remove_listener()
        await end_tasks(self._tasks)
        for each in list(self._heard_s):
            self._forget(each)

    def collect_metrics(self) -> Iterator[Metric]:
        replicas = {each.partition(".")[0] for each in self._others}
        help_text = "Other replicas whose load is known."
        yield build_gauge(metric_names.ROUTER_REPLICAS, help_text, len(replicas))
        help_text = "Whether the store of --shared-state answers."
        yield build_gauge(metric_names.ROUTER_SHARED_STATE_UP, help_text, bool(self._is_up))
        for name, help_text, counts in (
            (
                metric_names.ROUTER_SHARED_STATE_EXCHANGES,
                "Round trips to the store, by result.",
                self._exchanges,
            ),
            (
                metric_names.ROUTER_SHARED_STATE_VALUES,
                "Values of other replicas, by what became of them.",
                self._results,
            ),
        ):
            yield build_counter(name, help_text, counts, "result")

    def _note_change(self) -> None:
        self._has_changed = True
        self._wake.set()

    def _sync_instances(self) -> None:
        self._others.sync_instances()
        # What they have at instances that are new here was left out.
        self._values.clear()
        self._unread.update(self._others)
        self._note_change()

    async def _share_forever(self) -> None:
        backoff_s = 0.1
        while True:
            began_s = time.monotonic()
            # Whatever else the client may raise must not end the sharing.
            with Guard("router.shared_state"):
                try:
                    await self._share()
                except (RedisError, OSError, asyncio.TimeoutError) as error:
                    self._exchanges["failed"] += 1
                    self._note_state(False, str(error) or type(error).__name__)
            if time.monotonic() - began_s > MAX_BACKOFF_S:
                backoff_s = 0.1
            self._forget_silent()
            # Jitter, so that replicas do not come back at the same moment.
            await asyncio.sleep(backoff_s * random.uniform(0.8, 1.2))
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _share(self) -> None:
        """Exchange until the store is gone. Raises RedisError, OSError, TimeoutError."""
        async with AsyncExitStack() as stack:
            client = _build_client(self._settings)
            stack.push_async_callback(client.aclose)
            channel = client.pubsub(ignore_subscribe_messages=True)
            stack.push_async_callback(channel.aclose)
            await channel.subscribe(self._build_key(CHANNEL))
            listening = asyncio.create_task(self._listen(channel))
            stack.push_async_callback(end_tasks, [listening])
            self._has_changed = True
            # Not begun anew by what others write: they would keep this one from ever writing.
            refreshing = asyncio.create_task(self._refresh_forever())
            stack.push_async_callback(end_tasks, [refreshing])
            try:
                while not listening.done():
                    await self._exchange(client)
                    self._note_state(True)
                    await asyncio.sleep(EXCHANGE_INTERVAL_S)
                    await self._wake.wait()
                listening.result()
            except asyncio.CancelledError:
                await self._leave(client)
                raise

    async def _refresh_forever(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_INTERVAL_S)
            self._note_change()

    async def _listen(self, channel: PubSub) -> None:
        """Note who has written. Raises TimeoutError if not even this process is heard."""
        heard_s = time.monotonic()
        while time.monotonic() - heard_s < EXPIRY_S:
            message = await channel.get_message(timeout=EXPIRY_S)
            if message is None:
                continue
            heard_s = time.monotonic()
            found = NAME_PATTERN.fullmatch(message["data"])
            if found is None:
                self._results["malformed"] += 1
            # Workers of one router share by themselves.
            elif found[1].decode() != self._replica:
                self._note_written(found[0].decode())
        raise asyncio.TimeoutError("its channel is silent")

    def _note_written(self, name: str) -> None:
        if name not in self._heard_s and len(self._heard_s) >= MAX_PROCESSES:
            self._results["too_many"] += 1
            return
        self._heard_s[name] = time.monotonic()
        self._unread.add(name)
        self._wake.set()

    async def _exchange(self, client: redis.asyncio.Redis) -> None:
        self._wake.clear()
        names, self._unread = list(self._unread), set()
        pipeline = client.pipeline(transaction=False)
        for name in names:
            pipeline.getrange(self._build_key(name), 0, MAX_VALUE_BYTES)
        if self._has_changed:
            self._has_changed = False
            value = build_snapshot(self._pool, self._own)
            pipeline.set(self._build_key(self._name), value, px=round(EXPIRY_S * 1000))
            pipeline.publish(self._build_key(CHANNEL), self._name)
        results = await pipeline.execute(raise_on_error=False)
        self._exchanges["ok"] += 1
        for result in results[len(names) :]:
            if isinstance(result, Exception):
                raise result
        for name, result in zip(names, results, strict=False):
            self._take_value(name, result)
        self._forget_silent()

    async def _leave(self, client: redis.asyncio.Redis) -> None:
        pipeline = client.pipeline(transaction=False)
        pipeline.delete(self._build_key(self._name))
        pipeline.publish(self._build_key(CHANNEL), self._name)
        with contextlib.suppress(RedisError, OSError):
            await pipeline.execute()

    def _take_value(self, name: str, value: Any) -> None:
        if value == self._values.get(name):
            return
        if value == b"":  # it has left
            self._forget(name)
            return
        # What cannot be handled must not end the exchange.
        with Guard("router.shared_state"):
            try:
                # Another type of key gives an exception.
                self._others.apply_value(name, value if isinstance(value, bytes) else b"")
            except JSON_ERRORS:
                self._results["malformed"] += 1
                return
            self._values[name] = value
            self._results["taken"] += 1

    def _forget_silent(self) -> None:
        moment = time.monotonic()
        for name, heard_s in list(self._heard_s.items()):
            if moment - heard_s > EXPIRY_S:
                self._forget(name)

    def _forget(self, name: str) -> None:
        self._heard_s.pop(name, None)
        self._values.pop(name, None)
        if name in self._others:
            self._others.forget_process(name)

    def _note_state(self, is_up: bool, problem: str = "") -> None:
        if is_up != self._is_up:
            # Not the URL: it may have a password.
            place = urlsplit(self._settings.url).netloc.rpartition("@")[2]
            if not is_up:
                log.warning(
                    "ttft-otel: --shared-state %s: %s; decisions are by this replica's own load until "
                    "it answers",
                    place,
                    problem,
                )
            elif self._is_up is not None:
                log.warning("ttft-otel: --shared-state %s answers again", place)
        self._is_up = is_up

    def _build_key(self, name: str) -> str:
        return f"{self._settings.prefix}:{FORMAT}:{name}"


def _build_client(settings: StoreSettings) -> redis.asyncio.Redis:
    """A client for one stay in touch: files are read anew for the next one. Raises OSError."""
    options: dict[str, Any] = {}
    if settings.password_file:
        options["password"] = Path(settings.password_file).read_text("utf-8").strip()
    if settings.url.startswith("rediss:"):
        # Older releases of the client do not check the name by themselves.
        options |= {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
    return redis.asyncio.Redis.from_url(
        settings.url,
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=TIMEOUT_S,
        # _share_forever() alone tries again.
        retry=Retry(NoBackoff(), 0),
        protocol=2,
        **options,
    )


def build_lone_link(
    settings: StoreSettings, pool: InstancePool, routing: RoutingService
) -> StoreLink:
    """The link of a router without --workers, which else would not keep account of its load."""
    own = OwnLoads(pool, routing, lambda _: None)
    loads = RemoteLoads(pool.find_instance, lambda leg: routing.get_policy(leg).state)
    own.start()
    pool.change_listeners.add(loads.sync_instances)
    return StoreLink(settings, pool, own, loads, secrets.token_hex(8))
