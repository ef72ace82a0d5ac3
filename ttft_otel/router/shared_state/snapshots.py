# SPDX-License-Identifier: Apache-2.0
"""One process's load as a value of the store, and other processes' values put into pool and policies.

workers/process_loads.py says what is under way here, store_link.py writes and reads the values. They hold no
blocks of prompts, IDs of requests or measured times. Every number has a bound, which the decoder checks: a
replica is believed about how much it sent where and which breakers it opened, and about nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Annotated, Final

import msgspec

from ttft_otel.router.routing.policies.pending_load import MAX_PENDING_US
from ttft_otel.router.types import Instance
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.router.workers.messages import Ended, Sent
from ttft_otel.router.workers.process_loads import OwnLoads, RemoteLoads
from ttft_otel.tracing import clock

MAX_INSTANCES: Final = 1024  # instances in one value; others are not shared
MAX_REQUESTS: Final = 2048  # requests without a first token in one value
MAX_URL_CHARS: Final = 512  # instances with longer URLs are not shared
MAX_VALUE_BYTES: Final = 1 << 20  # more than all of these take
_NUMBER_MASK: Final = 2**62 - 1

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
Url = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_URL_CHARS)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
InFlight = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]
Pairs = Annotated[int, msgspec.Meta(ge=0, le=10**14)]
AgeUs = Annotated[int, msgspec.Meta(ge=0, le=MAX_PENDING_US)]


# array_like: the names of fields would be most of the bytes.
class SharedRequest(msgspec.Struct, array_like=True, frozen=True):
    """A request without a first token."""

    instance: Annotated[int, msgspec.Meta(ge=0, lt=MAX_INSTANCES)]  # its place in the snapshot
    number: Number  # tells it from the sender's others
    age_us: AgeUs  # since it was sent, when the snapshot was made
    tokens_to_compute: Tokens
    pairs: Pairs


class SharedInstance(msgspec.Struct, array_like=True, frozen=True):
    """What the sender has at one instance."""

    leg: Name
    url: Url
    in_flight: InFlight
    is_breaker_open: bool


class Snapshot(msgspec.Struct, array_like=True, frozen=True):
    """All that one process has under way."""

    instances: Annotated[tuple[SharedInstance, ...], msgspec.Meta(max_length=MAX_INSTANCES)]
    requests: Annotated[tuple[SharedRequest, ...], msgspec.Meta(max_length=MAX_REQUESTS)]


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Snapshot)


def build_snapshot(pool: InstancePool, own: OwnLoads) -> bytes:
    shared = [each for each in pool if len(each.url) <= MAX_URL_CHARS][:MAX_INSTANCES]
    instances = tuple(
        SharedInstance(each.leg, each.url, each.in_flight, each.breaker.state == "open")
        for each in shared
    )
    indices = {(each.leg, each.url): index for index, each in enumerate(shared)}
    now_us = clock.now_us()
    requests = tuple(
        SharedRequest(
            indices[sent.leg, sent.url],
            # Python salts it in each process: nobody can tell the span's ID from it.
            hash(sent.span_id) & _NUMBER_MASK,
            min(max(0, now_us - sent.sent_us), MAX_PENDING_US),
            sent.tokens_to_compute,
            sent.pairs,
        )
        for sent in itertools.islice(own.list_pending(max_keys=0), MAX_REQUESTS)
        if (sent.leg, sent.url) in indices
    )
    return _ENCODER.encode(Snapshot(instances, requests))


class OtherReplicas:
    """The load of other replicas' processes, by the names under which the store has them.

    loads: takes what is in their snapshots.
    """

    def __init__(self, pool: InstancePool, loads: RemoteLoads) -> None:
        self._pool, self._loads = pool, loads
        # Numbers of requests without a first token, by process.
        self._processes: dict[str, set[int]] = {}
        self._instances: dict[str, list[Instance]] = {}  # by URL
        self.sync_instances()

    def __contains__(self, owner: str) -> bool:
        return owner in self._processes

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._processes))

    def sync_instances(self) -> None:
        """The pool has other instances now; what is under way at them is known by the next snapshots."""
        self._instances.clear()
        for each in self._pool:
            self._instances.setdefault(each.url, []).append(each)

    def apply_value(self, owner: str, value: bytes) -> None:
        """The store has this of the process `owner`. Raises MsgspecError for what is no snapshot."""
        snapshot = _DECODER.decode(value)
        found = [self._find_instance(each) for each in snapshot.instances]
        in_flight = {
            (instance.leg, instance.url): row.in_flight
            for row, instance in zip(snapshot.instances, found, strict=True)
            if instance is not None
        }
        self._loads.replace_in_flight(owner, in_flight)
        self._apply_requests(owner, snapshot, found)
        for row, instance in zip(snapshot.instances, found, strict=True):
            if instance is not None and row.is_breaker_open:
                instance.make_elsewhere().breaker_openers.add(owner)
            elif instance is not None and instance.elsewhere is not None:
                instance.elsewhere.breaker_openers.discard(owner)

    def forget_process(self, owner: str) -> None:
        del self._processes[owner]
        self._loads.forget_process(owner, clock.now_us())
        for each in self._pool:
            if each.elsewhere is not None:
                each.elsewhere.breaker_openers.discard(owner)

    def _find_instance(self, row: SharedInstance) -> Instance | None:
        """The instance of that URL: on the same leg, or the only one, if roles are called otherwise here."""
        same_url = self._instances.get(row.url, [])
        same_leg = [each for each in same_url if each.leg == row.leg]
        found = same_leg or (same_url if len(same_url) == 1 else [])
        return found[0] if found else None

    def _apply_requests(self, owner: str, snapshot: Snapshot, found: list[Instance | None]) -> None:
        now_us, before = clock.now_us(), self._processes.get(owner, set())
        numbers = self._processes[owner] = set()
        for each in snapshot.requests:
            instance = found[each.instance] if each.instance < len(found) else None
            if instance is None:
                continue
            numbers.add(each.number)
            if each.number not in before:
                sent_us = now_us - each.age_us
                work = (each.tokens_to_compute, each.pairs)
                name = f"{owner}/{each.number}"
                self._loads.apply_sent(
                    owner, Sent(name, instance.leg, instance.url, sent_us, *work)
                )
        for number in before - numbers:
            self._loads.apply_ended(owner, Ended(f"{owner}/{number}", now_us))
