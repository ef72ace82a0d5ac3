# SPDX-License-Identifier: Apache-2.0
"""Replicas agree on the load of all, whatever the network between them loses, doubles or reorders."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.workers.joined_workers import LEG, URLS, JoinedWorker, build_request
from ttft_otel.router import types
from ttft_otel.router.peers import peer_books, peer_frames
from ttft_otel.router.peers.peer_books import PeerBooks
from ttft_otel.router.peers.peer_frames import PeerFrame, PeerPlace, PeerRequest
from ttft_otel.router.peers.told_loads import ToldLoads
from ttft_otel.router.timeline import Attempt
from ttft_otel.router.workers.load_counts import CountReader
from ttft_otel.router.workers.messages import LoadMessage
from ttft_otel.tracing import clock


class JoinedReplica(JoinedWorker):
    """One replica, without sockets."""

    def __init__(self, policy: str, name: str) -> None:
        super().__init__(policy)
        self.told = ToldLoads(name, self.own, CountReader(self.counts, 0))
        self.own.listener = self
        self.books = PeerBooks(self.siblings, self.pool)

    def record_change(self) -> None:
        """Frames are built when a test says so."""

    def record_message(self, message: LoadMessage) -> None:
        """As peer_link.py does."""
        self.told.note_message(message)

    def take(self, frames: list[PeerFrame]) -> None:
        """Take in frames, as they come over the network."""
        for frame in frames:
            self.books.apply_frame(
                peer_frames.decode_peer_frame(peer_frames.encode_peer_frame(frame))
            )


def compare(one: JoinedReplica, other: JoinedReplica) -> None:
    """What `other` knows of `one` is what there is."""
    assert other.books.count_requests() == len(other.state.pending) == len(one.state.pending)
    for theirs, ours in zip(one.pool, other.pool, strict=True):
        assert (ours.in_flight, ours.all_in_flight) == (0, theirs.in_flight)
        load, known = (each.state.pending.get_load(theirs.url) for each in (one, other))
        assert (known.tokens_to_compute, known.pairs) == (load.tokens_to_compute, load.pairs)


@pytest.mark.parametrize("policy", ["least_requests", "qps", "ttft"])
@pytest.mark.parametrize("busy", URLS)
def test_the_other_replicas_load_counts(policy: str, busy: str) -> None:
    """Where the one has sent something, the other sends nothing."""
    one, other = JoinedReplica(policy, "one"), JoinedReplica(policy, "other")
    # By arrivals, only what comes after the first frame is news.
    other.take(one.told.build_statement())
    one.send(build_request(1), busy)
    other.take(one.told.build_changes())

    for number in range(20):
        assert other.choose(build_request(10 + number)).instance.url != busy


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("policy", ["least_requests", "ttft"])
def test_any_network(policy: str, seed: int) -> None:
    """A third is lost, some comes twice, some late: one whole statement later both agree."""
    chance = random.Random(seed)
    one, other = JoinedReplica(policy, "one"), JoinedReplica(policy, "other")
    open_attempts: list[Attempt] = []
    late: list[PeerFrame] = []
    has_differed = False
    for number in range(300):
        if open_attempts and chance.random() < 0.45:
            one.pool.record_ended(open_attempts.pop(chance.randrange(len(open_attempts))))
        else:
            open_attempts.append(one.send(build_request(number)))
        frames = one.told.build_changes() if chance.random() < 0.5 else []
        if chance.random() < 0.05:
            frames += one.told.build_statement()
        late += [frame for frame in frames if chance.random() < 0.2]
        other.take([frame for frame in frames if chance.random() < 0.67])
        if late and chance.random() < 0.3:
            other.take([late.pop(chance.randrange(len(late)))])
        has_differed |= len(other.state.pending) != len(one.state.pending)
    assert has_differed or policy == "least_requests"

    one.told.build_changes()  # lost
    other.take(one.told.build_statement())
    compare(one, other)
    for attempt in open_attempts:
        one.pool.record_ended(attempt)
    one.told.build_changes()  # lost
    other.take(one.told.build_statement())
    compare(one, other)
    assert not other.books.count_requests()


def test_an_unfinished_statement_ends_nothing() -> None:
    """Some of its parts are lost: what they would have said is not taken for over."""
    one, other = JoinedReplica("ttft", "one"), JoinedReplica("ttft", "other")
    for number in range(200):
        one.send(build_request(number))
    other.take(one.told.build_changes())
    frames = one.told.build_statement()
    assert len(frames) > 3

    other.take(frames[1:])

    compare(one, other)


def test_what_is_sent_after_a_statement_stays() -> None:
    """The statement overtakes nothing: an attempt that it could not have is not taken for over."""
    one, other = JoinedReplica("ttft", "one"), JoinedReplica("ttft", "other")
    one.send(build_request(1), URLS[0])
    statement = one.told.build_statement()
    one.send(build_request(2), URLS[1])
    other.take(one.told.build_changes())

    other.take(statement)

    compare(one, other)


def test_a_replica_that_is_silent_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """After SILENCE_S, and not before."""
    one, other = JoinedReplica("ttft", "one"), JoinedReplica("ttft", "other")
    one.send(build_request(1))
    other.take(one.told.build_changes())
    other.books.forget_silent()
    compare(one, other)
    monkeypatch.setattr(peer_books, "SILENCE_S", -1.0)

    other.books.forget_silent()

    assert not len(other.state.pending) and not other.books.count_replicas()
    assert [each.all_in_flight for each in other.pool] == [0, 0]


def test_a_farewell() -> None:
    """A replica that ends takes with it what it had, though its clients have not."""
    one, other = JoinedReplica("ttft", "one"), JoinedReplica("ttft", "other")
    one.send(build_request(1))
    other.take(one.told.build_changes())

    other.take(one.told.build_farewell())

    assert not len(other.state.pending)
    assert [each.all_in_flight for each in other.pool] == [0, 0]


def test_instances_that_are_unknown_or_on_another_leg() -> None:
    """The first are left out until they are known; a URL alone says which instance is meant."""
    one, other = JoinedReplica("ttft", "one"), JoinedReplica("ttft", "other")
    late = other.pool.get(LEG)[1]
    other.pool.remove_instance(late)
    other.books.sync_instances(other.pool)
    one.send(build_request(1), URLS[1])
    other.take(one.told.build_changes())
    assert not other.books.count_requests() and not other.state.pending.get_load(URLS[1]).entries
    other.pool.add_instance(late)
    other.books.sync_instances(other.pool)
    other.take(one.told.build_statement())
    compare(one, other)

    place = PeerPlace("prefill_decode", URLS[0], 7, 7)
    other.take([PeerFrame("third", "process", 1, 0, places=(place,))])

    assert other.pool.get(LEG)[0].all_in_flight == 7
    assert set(other.routing._leg_policies) == {LEG}, "a leg of others is none of this router's"


def test_books_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of senders, instances and attempts that somebody with the key makes up."""
    it = JoinedReplica("ttft", "it")
    monkeypatch.setattr(peer_books, "MAX_BOOKS", 2)
    monkeypatch.setattr(peer_books, "MAX_BOOK_PLACES", 1)
    monkeypatch.setattr(peer_books, "MAX_BOOK_REQUESTS", 3)
    requests = tuple(PeerRequest(number, 0, 1, 1) for number in range(5))
    places = tuple(PeerPlace(LEG, url, 1, 1, requests) for url in URLS)
    for name in "abc":
        it.take([PeerFrame("made up", name, 1, 0, places=places)])

    assert it.books.too_many == 2 * (1 + 2) + 1
    assert [each.all_in_flight for each in it.pool] == [2, 0]
    assert len(it.state.pending) == it.books.count_requests() == 6


def test_what_is_told_is_no_content() -> None:
    """Neither blocks of prompts nor IDs of requests, nor what a prefill took."""
    one = JoinedReplica("ttft", "one")
    request = build_request(987_654_321)
    attempt = one.send(request)
    wire = b"".join(map(peer_frames.encode_peer_frame, one.told.build_changes()))
    one.state.record_first_token(request, clock.now_us(), 0.25, 0, (LEG, attempt.span_id))
    frames = [*one.told.build_changes(), *one.told.build_statement()]
    wire += b"".join(map(peer_frames.encode_peer_frame, frames))

    assert attempt.instance.url.encode() in wire
    assert attempt.span_id.encode() not in wire
    for block in request.block_keys:
        assert msgspec.msgpack.encode(block) not in wire
    assert frames[0].ended == (1,) and not any(place.requests for place in frames[-1].places)


@settings(deadline=None)  # a busy machine takes its time
@given(
    st.lists(st.tuples(st.integers(1, 480), st.integers(0, 90)), max_size=30),
    st.integers(0, 600),
)
def test_every_frame_fits(sizes: list[tuple[int, int]], ended: int) -> None:
    """Into one packet of any network; together they say all that there is, in its order."""
    big = 2**53
    places = [
        PeerPlace(
            "prefill_decode",
            f"{number:02}" + "x" * length,
            1_000_000,
            big,
            tuple(PeerRequest(big, 3_600_000_000, 10_000_000, 10**14) for _ in range(requests)),
        )
        for number, (length, requests) in enumerate(sizes)
    ]
    numbers = tuple(range(big - ended, big))
    parts = list(peer_frames.split_load(places, numbers))
    frames = [
        PeerFrame("f" * 16, "e" * 16, big, big, 512, 511, big, some, ends) for some, ends in parts
    ]

    lengths = [len(peer_frames.encode_peer_frame(each)) for each in frames]

    assert max(lengths) <= peer_frames.MAX_FRAME_BYTES
    assert tuple(number for _, ends in parts for number in ends) == numbers
    by_url = {place.url: 0 for place in places}
    for some, _ in parts:
        for place in some:
            by_url[place.url] += len(place.requests)
    assert by_url == {place.url: len(place.requests) for place in places}


@pytest.mark.parametrize(
    "place",
    [
        ("mono", URLS[0], -1, 0, ()),
        ("mono", URLS[0], 10**9, 0, ()),
        ("mono", "x" * 513, 1, 0, ()),
        ("", URLS[0], 1, 0, ()),
        ("mono", URLS[0], 1, 0, ((1, 0, -5, 0),)),
        ("mono", URLS[0], 1, 0, ((1, 0, 5, 10**18),)),
        ("mono", URLS[0], 1.5, 0, ()),
    ],
)
def test_numbers_beyond_their_bounds(place: tuple[object, ...]) -> None:
    """No frame has them, whoever made it."""
    data = msgspec.msgpack.encode(("a", "b", 1, 0, 0, 0, 0, (place,), ()))
    with pytest.raises(msgspec.MsgspecError):
        peer_frames.decode_peer_frame(data)
    fine = msgspec.msgpack.encode(("a", "b", 1, 0, 0, 0, 0, (("mono", URLS[0], 1, 0, ()),), ()))
    assert peer_frames.decode_peer_frame(fine).places[0].in_flight == 1


def test_instances_that_leave() -> None:
    """Their counts go with them, and come back with them."""
    one, other = JoinedReplica("least_requests", "one"), JoinedReplica("least_requests", "other")
    one.send(build_request(1), URLS[0])
    other.take(one.told.build_changes())
    left = other.pool.get(LEG)[0]
    for change in (other.pool.remove_instance, other.pool.add_instance):
        change(left)
        other.siblings.sync_instances()
        other.books.sync_instances(other.pool)
        other.take(one.told.build_statement())
    fresh = other.pool.find_instance(LEG, URLS[0])
    assert isinstance(fresh, types.Instance) and fresh.all_in_flight == 1
