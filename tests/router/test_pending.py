# SPDX-License-Identifier: Apache-2.0
"""The accounts under every order of events, and what cached prefixes cost: nothing stays behind."""

from __future__ import annotations

import random
import timeit
import tracemalloc
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from ttft_otel.router.choose import Asked, Choice, Instance, instance
from ttft_otel.router.policies.index import History
from ttft_otel.router.policies.pending import SECOND, Load, Pending
from ttft_otel.router.policies.registry import POLICIES
from ttft_otel.router.policies.state import State
from ttft_otel.router.policies.work import trapezoid

PATIENCE = 30
FLEET = tuple(instance(f"http://127.0.0.1:{port}", "prefill") for port in range(8001, 8006))

# What may happen to one of twelve requests, after so many seconds: sent (also again, elsewhere), first token,
# any other end, nothing more ever.
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("sent", "sent", "first", "left")),
        st.integers(0, 11),
        st.sampled_from(FLEET),
        st.integers(0, 12),
    ),
    max_size=80,
)


def asked(number: int) -> Asked:
    """One of the twelve; their prompts share beginnings."""
    blocks = tuple(range(number % 5)) + (100 + number,)
    length = 16 * len(blocks) + number
    return Asked(
        "prefill", "/v1/completions", "m", str(number), {}, b"", tokens=length, blocks=blocks
    )


def sums(pending: Pending) -> list[tuple[int, int, int, int]]:
    """Of each instance: requests, tokens, pairs, queued blocks."""
    loads = [pending.at(each.url) for each in FLEET]
    return [(len(x.entries), x.fresh, x.pairs, x.queued.total()) for x in loads]


@given(EVENTS, st.sampled_from(sorted(POLICIES)))
def test_any_order(events: list[tuple[str, int, Instance, int]], name: str) -> None:
    """Whatever happens in whatever order, the sums are those of who is there, and end at zero."""
    pending, now, there = Pending(PATIENCE * SECOND), 0, {}
    state = State(History(16, 50), pending=pending)
    policy = POLICIES[name](state)
    for what, number, failed, later in events:
        now += later * SECOND
        request = asked(number)
        if what == "sent":
            others = tuple(each for each in FLEET if each is not failed)
            choice = policy.choose(request, others, now, number in there)
            state.sent(request, choice, now)
            there = {key: x for key, x in there.items() if now - x[1] < PATIENCE * SECOND}
            there[number] = (choice, now)
        elif what == "first":
            state.first(request, now, 0.1, 0)
            there.pop(number, None)
        else:
            state.left(request, now)
            there.pop(number, None)
        assert sums(pending) == [expected(there, each.url) for each in FLEET]

    pending.expire(now + PATIENCE * SECOND)

    assert len(pending) == 0
    assert sums(pending) == [(0, 0, 0, 0)] * len(FLEET)
    assert pending.crowd(now, 1) == 0  # no instance counts as busy


def expected(there: dict[int, tuple[Choice, int]], url: str) -> tuple[int, int, int, int]:
    """The sums of one instance, from scratch."""
    here = [
        (asked(number), choice.cached)
        for number, (choice, _) in there.items()
        if choice.instance.url == url
    ]
    return (
        len(here),
        sum(request.tokens - cached for request, cached in here),
        sum(trapezoid(request.tokens, cached) for request, cached in here),
        sum(len(request.blocks) for request, _ in here),
    )


def test_soak() -> None:
    """After 10 000 requests on instances that come and go, a third of them lost, nothing is left."""
    chance = random.Random(3)
    state = State(History(16, 100))
    policy = POLICIES["ttft"](state)
    under_way: list[Asked] = []
    for number in range(10_000):
        now = number * SECOND // 50
        fleet = tuple(instance(f"http://10.0.0.{number // 200 + at}", "prefill") for at in range(4))
        request = asked(number)
        state.sent(request, policy.choose(request, fleet, now, False), now)
        under_way.append(request)
        while len(under_way) > 20:
            one = under_way.pop(chance.randrange(20))
            if chance.random() < 0.67:
                state.first(one, now, 0.1, 0)
            else:
                state.left(one, now)
    for one in under_way:
        state.left(one, now)

    assert len(state.pending) == 0
    assert all(not state.pending.at(f"http://10.0.0.{at}").entries for at in range(60))


def test_running() -> None:
    """What an instance computes now began when it was sent, or when the one before it left."""
    pending = Pending()
    state = State(History(16, 100), pending=pending)
    (to, *_) = FLEET
    for number in range(3):
        state.sent(asked(number), Choice(to, 0, "test"), number * SECOND)

    def elapsed(at: int) -> float:
        running = pending.at(to.url).running(at * SECOND)
        assert running is not None
        return running[1]

    assert elapsed(4) == 4
    state.left(asked(1), 5 * SECOND)  # left before its turn
    assert elapsed(6) == 6
    state.first(asked(0), 7 * SECOND, 0.1, 0)
    assert elapsed(9) == 2
    assert Load().running(0) is None


def test_crowd() -> None:
    """Two arrivals a second, busy for half of the time: four are delayed; by the part that is busy now."""
    pending = Pending(window=10)
    state = State(History(16, 100), pending=pending)
    (to, *_) = FLEET
    assert pending.crowd(0, 1) == 0
    for number in range(200):
        at = number * SECOND // 2
        state.sent(asked(number), Choice(to, 0, "test"), at)
        state.left(asked(number), at + SECOND // 4)
    assert pending.crowd(100 * SECOND, 1) == 0  # nobody waits
    state.sent(asked(1), Choice(to, 0, "test"), 100 * SECOND)

    assert abs(pending.crowd(100 * SECOND, 1) - 4) < 0.4
    assert abs(pending.crowd(100 * SECOND, 4) - 0.5 / (1 - 0.5 / 4) / 4) < 0.05
    assert pending.crowd(400 * SECOND, 1) < 1e-9


def test_lately() -> None:
    """Of what an instance had to compute half is forgotten after each window."""
    pending = Pending(window=10)
    state = State(History(16, 100), pending=pending)
    to, other, *_ = FLEET
    state.sent(asked(1), Choice(to, 0, "test"), SECOND)
    once = asked(1).tokens
    state.sent(asked(2), Choice(other, 0, "test"), 5 * SECOND)
    assert pending.at(to.url).lately == once
    state.sent(asked(3), Choice(other, 0, "test"), 12 * SECOND)

    assert pending.at(to.url).lately == once // 2


def test_memory() -> None:
    """A million blocks of history are held in 300 MB."""
    count = 50_000
    tracemalloc.start()
    try:
        index = History(16, count)
        for start in range(0, count, 100):
            index.served("http://0", tuple((start + n) * 2**40 + 7 for n in range(100)))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(index) == count
    assert used / count < 300


def test_instances() -> None:
    """Instances that come and go leave nothing; those that stay keep what they have."""
    index = History(16, 100, instances=3)
    for number in range(200):
        index.served("http://stays", range(5))
        index.served(f"http://{number}", range(number, number + 4))
    urls = ["http://stays", "http://198", "http://199", "http://0"]

    assert index.match(range(5), urls) == [5, 0, 0, 0]
    assert index.match(range(199, 205), urls) == [0, 3, 4, 0]
    index.unlearn("http://stays")
    assert index.match(range(5), urls) == [0, 0, 0, 0]
    deque(index.tidy(), 0)
    assert len(index) == 5


def test_lookup() -> None:
    """A prompt of 100 blocks is looked up for all instances at once, in less than 50 us."""
    index = History(16, 10_000)
    urls = [f"http://{at}" for at in range(8)]
    for at, url in enumerate(urls):
        index.served(url, range(10 + 10 * at))

    assert index.match(range(100), urls) == [10, 20, 30, 40, 50, 60, 70, 80]
    assert (
        min(timeit.repeat(lambda: index.match(range(100), urls), number=20, repeat=20)) < 20 * 5e-5
    )
