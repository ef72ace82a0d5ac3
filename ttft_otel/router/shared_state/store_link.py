# SPDX-License-Identifier: Apache-2.0
"""Joins one process of a router to the other replicas, through a Valkey or Redis that all of them reach.

commands/router/router_options.py builds it. Each process has one key with all that it has under way (a
snapshot), which expires by itself. Who writes its key says so on a channel, and who hears that reads the key:
one pipeline writes and reads at once. Nothing of a request waits for any of this.

Snapshots hold no blocks of prompts, IDs of requests or measured times. Every number has a bound, which the
decoder checks: a replica is believed about how much it sent where and which breakers it opened, and about
nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias
from urllib.parse import urlsplit

import msgspec
import redis.asyncio
from prometheus_client.core import Metric
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from ttft_otel.model.names import metric_names
from ttft_otel.router.discovery.discovery import end_tasks
from ttft_otel.router.routing.policies.policy_state import MAX_PENDING_US
from ttft_otel.router.types import JSON_ERRORS, Instance
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.router.workers.messages import OwnLoads, RemoteLoads, Sent
from ttft_otel.tracing import clock
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

MAX_INSTANCES: Final = 1024  # instances in one snapshot; others are not shared
MAX_REQUESTS: Final = 2048  # requests without a first token in one snapshot
MAX_URL_CHARS: Final = 512  # instances with longer URLs are not shared
MAX_VALUE_BYTES: Final = 1 << 20  # more than all of these take
_NUMBER_MASK: Final = 2**62 - 1

Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
Url: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_URL_CHARS)]
InFlight: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
Index: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MAX_INSTANCES)]
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
AgeUs: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_PENDING_US)]
Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]
Pairs: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=10**14)]
# What the sender has at one instance: leg, URL, requests in flight, whether its circuit breaker is open.
InstanceRow: TypeAlias = tuple[Name, Url, InFlight, bool]
# A request without a first token: the place of its instance among the rows above, a number that tells it from
# the sender's others, microseconds since it was sent, and its work: tokens to compute, pairs.
RequestRow: TypeAlias = tuple[Index, Number, AgeUs, Tokens, Pairs]
# All that one process has under way.
Snapshot: TypeAlias = tuple[
    Annotated[tuple[InstanceRow, ...], msgspec.Meta(max_length=MAX_INSTANCES)],
    Annotated[tuple[RequestRow, ...], msgspec.Meta(max_length=MAX_REQUESTS)],
]

log: Final = logging.getLogger("ttft_otel")
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Snapshot)


def build_snapshot(pool: InstancePool, own: OwnLoads) -> bytes:
    shared = [each for each in pool if len(each.url) <= MAX_URL_CHARS][:MAX_INSTANCES]
    instances = [
        (each.leg, each.url, each.in_flight, each.breaker.state == "open") for each in shared
    ]
    places = {(each.leg, each.url): place for place, each in enumerate(shared)}
    now_us = clock.now_us()
    requests = [
        (
            places[sent.leg, sent.url],
            # Python salts it in each process: nobody can tell the span's ID from it.
            hash(sent.span_id) & _NUMBER_MASK,
            min(max(0, now_us - sent.sent_us), MAX_PENDING_US),
            sent.tokens_to_compute,
            sent.pairs,
        )
        for sent in itertools.islice(own.list_pending(max_keys=0), MAX_REQUESTS)
        if (sent.leg, sent.url) in places
    ]
    return _ENCODER.encode((instances, requests))


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
        self._settings, self._pool, self._own, self._loads = settings, pool, own, loads
        self._replica, self._name = replica, f"{replica}.{secrets.token_hex(4)}"
        self._heard_s: dict[str, float] = {}  # by process
        # What was taken last, by process; None if the instances here are others since.
        self._values: dict[str, bytes | None] = {}
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
        self._remove_listener = self._pool.change_listeners.add(self._note_instances)
        self._tasks = [asyncio.create_task(self._share_forever())]

    async def __aexit__(self, *_: object) -> None:
        """Leave: the others forget at once what was under way here."""
        self._own.on_change = None
        if self._remove_listener is not None:
            self._remove_listener()
        await end_tasks(self._tasks)
        for each in list(self._heard_s):
            self.forget(each)

    def collect_metrics(self) -> Iterator[Metric]:
        replicas = {each.partition(".")[0] for each in self._values}
        help_text = "Other replicas whose load is known."
        yield build_gauge(metric_names.ROUTER_REPLICAS, help_text, len(replicas))
        help_text = "Whether the store of --shared-state answers."
        yield build_gauge(metric_names.ROUTER_SHARED_STATE_UP, help_text, bool(self._is_up))
        help_text = "Round trips to the store, by result."
        name = metric_names.ROUTER_SHARED_STATE_EXCHANGES
        yield build_counter(name, help_text, self._exchanges, "result")
        help_text = "Values of other replicas, by what became of them."
        name = metric_names.ROUTER_SHARED_STATE_VALUES
        yield build_counter(name, help_text, self._results, "result")

    def _note_change(self) -> None:
        self._has_changed = True
        self._wake.set()

    def _note_instances(self) -> None:
        # What they have at instances that are new here was left out.
        self._values = dict.fromkeys(self._values)
        self._unread.update(self._values)
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
            self.forget(name)
            return
        # What cannot be handled must not end the exchange.
        with Guard("router.shared_state"):
            try:
                # Another type of key gives an exception.
                self.apply_value(name, value if isinstance(value, bytes) else b"")
            except JSON_ERRORS:
                self._results["malformed"] += 1
                return
            self._results["taken"] += 1

    def apply_value(self, name: str, value: bytes) -> None:
        """The store has this of the process `name`. Raises MsgspecError for what is no snapshot."""
        instances, requests = _DECODER.decode(value)
        found = self._find_instances(instances)
        in_flight = {
            (instance.leg, instance.url): number
            for instance, (_, _, number, _) in zip(found, instances, strict=True)
            if instance is not None
        }
        self._loads.replace_in_flight(name, in_flight)
        now_us, pending = clock.now_us(), {}
        for place, number, age_us, *work in requests:
            instance = found[place] if place < len(found) else None
            if instance is not None:
                span_id = f"{name}/{number}"
                sent_us = now_us - age_us
                pending[span_id] = Sent(span_id, instance.leg, instance.url, sent_us, *work)
        self._loads.replace_pending(name, pending, now_us)
        for instance, (_, _, _, is_breaker_open) in zip(found, instances, strict=True):
            if instance is not None and is_breaker_open:
                instance.breaker_openers.add(name)
            elif instance is not None:
                instance.breaker_openers.discard(name)
        self._values[name] = value

    def _find_instances(self, rows: Sequence[InstanceRow]) -> list[Instance | None]:
        """Those of the same URLs: on the same leg, or the only one, if roles are called otherwise here."""
        by_url: dict[str, list[Instance]] = {}
        for each in self._pool:
            by_url.setdefault(each.url, []).append(each)
        found: list[Instance | None] = []
        for leg, url, _, _ in rows:
            same_url = by_url.get(url, [])
            same_leg = [each for each in same_url if each.leg == leg]
            found.append(next(iter(same_leg or same_url[: len(same_url) == 1]), None))
        return found

    def _forget_silent(self) -> None:
        moment = time.monotonic()
        for name, heard_s in list(self._heard_s.items()):
            if moment - heard_s > EXPIRY_S:
                self.forget(name)

    def forget(self, name: str) -> None:
        """Forget what a process had under way."""
        self._heard_s.pop(name, None)
        self._values.pop(name, None)
        self._loads.forget_process(name, clock.now_us())
        for each in self._pool:
            each.breaker_openers.discard(name)

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
