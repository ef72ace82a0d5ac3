# SPDX-License-Identifier: Apache-2.0
"""A snapshot says what is under way, replaces what was known before, and is bounded."""

from __future__ import annotations

import random

import msgspec
import pytest

from router.workers.joined_workers import LEG, URLS, JoinedWorker, build_request
from ttft_otel.router import types
from ttft_otel.router.shared_state import snapshots
from ttft_otel.router.shared_state.snapshots import OtherReplicas, build_snapshot
from ttft_otel.router.timeline import Attempt
from ttft_otel.tracing import clock


class Replica(JoinedWorker):
    """One replica without a store."""

    def __init__(self, policy: str) -> None:
        super().__init__(policy)
        self.others = OtherReplicas(self.pool, self.remote)

    def read(self, other: Replica, name: str = "other") -> None:
        """Take in what another one has under way."""
        self.others.apply_value(name, build_snapshot(other.pool, other.own))


def compare(one: Replica, other: Replica) -> None:
    """What `other` knows of `one` is what there is."""
    assert len(other.state.pending) == len(one.state.pending)
    for theirs, ours in zip(one.pool, other.pool, strict=True):
        assert (ours.in_flight, ours.all_in_flight) == (0, theirs.in_flight)
        load, known = (each.state.pending.get_load(theirs.url) for each in (one, other))
        assert (known.tokens_to_compute, known.pairs) == (load.tokens_to_compute, load.pairs)


@pytest.mark.parametrize("policy", ["least_requests", "ttft"])
@pytest.mark.parametrize("busy", URLS)
def test_the_other_replicas_load_counts(policy: str, busy: str) -> None:
    """Where the one has sent something, the other sends nothing."""
    one, other = Replica(policy), Replica(policy)
    one.send(build_request(1), busy)
    other.read(one)

    for number in range(20):
        assert other.choose(build_request(10 + number)).instance.url != busy


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 10))]
)
@pytest.mark.parametrize("policy", ["least_requests", "ttft"])
def test_whatever_was_missed(policy: str, seed: int) -> None:
    """Most snapshots are never read, and instances come and go: each that is read makes both agree."""
    chance = random.Random(seed)
    one, other = Replica(policy), Replica(policy)
    attempts: list[Attempt] = []
    for number in range(300):
        if attempts and chance.random() < 0.45:
            one.pool.record_ended(attempts.pop(chance.randrange(len(attempts))))
        else:
            attempts.append(one.send(build_request(number)))
        if chance.random() < 0.05:
            url = f"http://127.0.0.1:{10 + len(one.pool)}"
            for each in (one, other):
                each.pool.add_instance(types.parse_instance_url(url, LEG))
                each.remote.sync_instances()
                each.others.sync_instances()
        if chance.random() < 0.2:
            other.read(one)
            compare(one, other)
    for attempt in attempts:
        one.pool.record_ended(attempt)
    other.read(one)
    compare(one, other)


def test_instances_that_are_unknown_or_on_another_leg() -> None:
    """The first are left out until they are known; a URL alone says which instance is meant."""
    one, other = Replica("ttft"), Replica("ttft")
    late = other.pool.get(LEG)[1]
    other.pool.remove_instance(late)
    other.others.sync_instances()
    one.send(build_request(1), URLS[1])
    other.read(one)
    assert not len(other.state.pending)
    other.pool.add_instance(late)
    other.others.sync_instances()
    other.read(one)
    compare(one, other)
    other.others.forget_process("other")
    assert not len(other.state.pending) and not late.all_in_flight

    row = snapshots.SharedInstance("prefill_decode", URLS[0], 7, True)
    other.others.apply_value("third", msgspec.msgpack.encode(snapshots.Snapshot((row,), ())))

    first = other.pool.get(LEG)[0]
    assert first.all_in_flight == 7 and first.is_suspect
    assert set(other.routing._policies) == {LEG}, "a leg of others is none of this router's"
    other.others.forget_process("third")
    assert not (first.all_in_flight or first.is_suspect)


def test_a_snapshot_has_no_content() -> None:
    """Neither blocks of prompts nor IDs of requests, nor what a prefill took."""
    one = Replica("ttft")
    requests = [build_request(987_654_321), build_request(123_456_789)]
    attempts = [one.send(each) for each in requests]
    one.state.record_first_token(requests[0], clock.now_us(), 0.25, 0, (LEG, attempts[0].span_id))

    value = build_snapshot(one.pool, one.own)

    assert len(msgspec.msgpack.decode(value)[1]) == 1
    for attempt, request in zip(attempts, requests, strict=True):
        assert attempt.span_id.encode() not in value
        assert not any(msgspec.msgpack.encode(block) in value for block in request.block_keys)


@pytest.mark.full
def test_the_largest_snapshot_fits() -> None:
    """More instances and requests than are shared, with the longest URLs: as large as a value may be."""
    one, other = Replica("ttft"), Replica("ttft")
    urls = [f"http://127.0.0.1:1/{number:04}".ljust(512, "x") for number in range(1100)]
    for each in (one, other):
        each.pool.replace_instances({LEG: [types.parse_instance_url(url, LEG) for url in urls]})
        each.remote.sync_instances()
        each.others.sync_instances()
    for number in range(2200):
        one.send(build_request(number), urls[number % 1000])

    value = build_snapshot(one.pool, one.own)

    assert 500_000 < len(value) < snapshots.MAX_VALUE_BYTES
    other.others.apply_value("one", value)
    assert len(other.state.pending) == snapshots.MAX_REQUESTS
    assert sum(each.all_in_flight for each in other.pool) == 2200


def test_instances_that_came_and_went_leave_nothing() -> None:
    """A replica that names ever new ones has under way what its latest value says."""
    it = Replica("least_requests")
    for turn in range(3):
        urls = [f"http://127.0.0.1:1/{turn}/{number}" for number in range(1000)]
        it.pool.replace_instances({LEG: [types.parse_instance_url(url, LEG) for url in urls]})
        it.remote.sync_instances()
        it.others.sync_instances()
        rows = tuple(snapshots.SharedInstance(LEG, url, 1, False) for url in urls)
        it.others.apply_value("it", msgspec.msgpack.encode(snapshots.Snapshot(rows, ())))
        assert len(it.remote._in_flight["it"]) == it.count_elsewhere() == 1000


@pytest.mark.parametrize(
    "value",
    [
        ((("mono", URLS[0], -1, False),), ()),
        ((("mono", URLS[0], 10**9, False),), ()),
        ((("mono", "x" * 513, 1, False),), ()),
        ((("", URLS[0], 1, False),), ()),
        ((("mono", URLS[0], 1.5, False),), ()),
        ((("mono", URLS[0], 1, False),) * 1025, ()),
        ((), ((0, 1, -5, 0, 0),)),
        ((), ((0, 1, 0, 5, 10**18),)),
        ((), ((0, 1, 0, 5, 5),) * 2049),
        "text",
        None,
    ],
)
def test_numbers_beyond_their_bounds(value: object) -> None:
    """No snapshot has them, whoever made it, and nothing of it is taken."""
    it = Replica("ttft")
    with pytest.raises(msgspec.MsgspecError):
        it.others.apply_value("it", msgspec.msgpack.encode(value))
    assert "it" not in it.others and not any(each.all_in_flight for each in it.pool)


def test_requests_at_no_instance() -> None:
    """A request that names an instance which is not in the snapshot is left out."""
    it = Replica("ttft")
    it.others.apply_value("it", msgspec.msgpack.encode(((), ((5, 1, 0, 5, 5),))))
    assert not len(it.state.pending)
