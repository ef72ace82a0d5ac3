# SPDX-License-Identifier: Apache-2.0
"""The accounts under every order of events, and what cached prefixes cost: nothing stays behind."""

from __future__ import annotations

import random
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from ttft_otel.router.routing.policies.block_index import SentHistory
from ttft_otel.router.routing.policies.pending_load import US_PER_SECOND, InstanceLoad, PendingLoads
from ttft_otel.router.routing.policies.policy_registry import POLICIES
from ttft_otel.router.routing.policies.policy_state import PolicyState
from ttft_otel.router.routing.policies.prefill_model import count_pairs
from ttft_otel.router.types import Decision, Instance, RoutingRequest, parse_instance_url

PATIENCE_S = 30
INSTANCES = tuple(
    parse_instance_url(f"http://127.0.0.1:{port}", "prefill") for port in range(8001, 8006)
)

# What may happen to one of twelve requests, after so many seconds: sent (also again, elsewhere), first token,
# any other end, nothing more ever.
EVENT_LISTS = st.lists(
    st.tuples(
        st.sampled_from(("sent", "sent", "first", "left")),
        st.integers(0, 11),
        st.sampled_from(INSTANCES),
        st.integers(0, 12),
    ),
    max_size=80,
)


def build_request(number: int) -> RoutingRequest:
    """One of the twelve; their prompts share beginnings."""
    blocks = tuple(range(number % 5)) + (100 + number,)
    length = 16 * len(blocks) + number
    return RoutingRequest(
        "prefill",
        "/v1/completions",
        "m",
        str(number),
        {},
        b"",
        prompt_tokens=length,
        block_keys=blocks,
    )


def compute_sums(pending: PendingLoads) -> list[tuple[int, int, int, int]]:
    """Of each instance: requests, tokens, pairs, queued blocks."""
    loads = [pending.get_load(each.url) for each in INSTANCES]
    return [(len(x.entries), x.tokens_to_compute, x.pairs, x.queued_blocks.total()) for x in loads]


@given(EVENT_LISTS, st.sampled_from(sorted(POLICIES)))
def test_any_order(events: list[tuple[str, int, Instance, int]], name: str) -> None:
    """Whatever happens in whatever order, the sums are those of who is there, and end at zero."""
    pending, now, there = PendingLoads(PATIENCE_S * US_PER_SECOND), 0, {}
    state = PolicyState(SentHistory(16, 50), pending=pending)
    policy = POLICIES[name](state)
    for what, number, failed, later in events:
        now += later * US_PER_SECOND
        request = build_request(number)
        if what == "sent":
            others = tuple(each for each in INSTANCES if each is not failed)
            choice = policy.choose_instance(request, others, now, number in there)
            state.record_sent(request, choice, now)
            there = {key: x for key, x in there.items() if now - x[1] < PATIENCE_S * US_PER_SECOND}
            there[number] = (choice, now)
        elif what == "first":
            state.record_first_token(request, now, 0.1, 0)
            there.pop(number, None)
        else:
            state.record_left(request, now)
            there.pop(number, None)
        assert compute_sums(pending) == [expect_sums(there, each.url) for each in INSTANCES]

    pending.drop_expired(now + PATIENCE_S * US_PER_SECOND)

    assert len(pending) == 0
    assert compute_sums(pending) == [(0, 0, 0, 0)] * len(INSTANCES)
    assert pending.estimate_delay_cost(now, 1) == 0  # no instance counts as busy


def expect_sums(
    requests_by_number: dict[int, tuple[Decision, int]], url: str
) -> tuple[int, int, int, int]:
    """The sums of one instance, from scratch."""
    requests_here = [
        (build_request(number), choice.cached_tokens)
        for number, (choice, _) in requests_by_number.items()
        if choice.instance.url == url
    ]
    return (
        len(requests_here),
        sum(request.prompt_tokens - cached for request, cached in requests_here),
        sum(count_pairs(request.prompt_tokens, cached) for request, cached in requests_here),
        sum(len(request.block_keys) for request, _ in requests_here),
    )


def test_soak() -> None:
    """After 2 000 requests on instances that come and go, a third of them lost, nothing is left."""
    chance = random.Random(3)
    state = PolicyState(SentHistory(16, 100))
    policy = POLICIES["ttft"](state)
    under_way: list[RoutingRequest] = []
    for number in range(2_000):
        now = number * US_PER_SECOND // 50
        fleet = tuple(
            parse_instance_url(f"http://10.0.0.{number // 200 + at}", "prefill") for at in range(4)
        )
        request = build_request(number)
        state.record_sent(request, policy.choose_instance(request, fleet, now, False), now)
        under_way.append(request)
        while len(under_way) > 20:
            one = under_way.pop(chance.randrange(20))
            if chance.random() < 0.67:
                state.record_first_token(one, now, 0.1, 0)
            else:
                state.record_left(one, now)
    for one in under_way:
        state.record_left(one, now)

    assert len(state.pending) == 0
    assert all(not state.pending.get_load(f"http://10.0.0.{at}").entries for at in range(60))


def test_running() -> None:
    """What an instance computes now began when it was sent, or when the one before it left."""
    pending = PendingLoads()
    state = PolicyState(SentHistory(16, 100), pending=pending)
    (to, *_) = INSTANCES
    for number in range(3):
        state.record_sent(build_request(number), Decision(to, 0, "test"), number * US_PER_SECOND)

    def get_elapsed(at: int) -> float:
        running = pending.get_load(to.url).estimate_running(at * US_PER_SECOND)
        assert running is not None
        return running[1]

    assert get_elapsed(4) == 4
    state.record_left(build_request(1), 5 * US_PER_SECOND)  # left before its turn
    assert get_elapsed(6) == 6
    state.record_first_token(build_request(0), 7 * US_PER_SECOND, 0.1, 0)
    assert get_elapsed(9) == 2
    assert InstanceLoad().estimate_running(0) is None


def test_crowd() -> None:
    """Two arrivals a second, busy for half of the time: four are delayed; by the part that is busy now."""
    pending = PendingLoads(window_s=10)
    state = PolicyState(SentHistory(16, 100), pending=pending)
    (to, *_) = INSTANCES
    assert pending.estimate_delay_cost(0, 1) == 0
    for number in range(200):
        at = number * US_PER_SECOND // 2
        state.record_sent(build_request(number), Decision(to, 0, "test"), at)
        state.record_left(build_request(number), at + US_PER_SECOND // 4)
    assert pending.estimate_delay_cost(100 * US_PER_SECOND, 1) == 0  # nobody waits
    state.record_sent(build_request(1), Decision(to, 0, "test"), 100 * US_PER_SECOND)

    assert abs(pending.estimate_delay_cost(100 * US_PER_SECOND, 1) - 4) < 0.4
    assert abs(pending.estimate_delay_cost(100 * US_PER_SECOND, 4) - 0.5 / (1 - 0.5 / 4) / 4) < 0.05
    assert pending.estimate_delay_cost(400 * US_PER_SECOND, 1) < 1e-9


def test_lately() -> None:
    """Of what an instance had to compute half is forgotten after each window."""
    pending = PendingLoads(window_s=10)
    state = PolicyState(SentHistory(16, 100), pending=pending)
    to, other, *_ = INSTANCES
    state.record_sent(build_request(1), Decision(to, 0, "test"), US_PER_SECOND)
    once = build_request(1).prompt_tokens
    state.record_sent(build_request(2), Decision(other, 0, "test"), 5 * US_PER_SECOND)
    assert pending.get_load(to.url).recent_tokens == once
    state.record_sent(build_request(3), Decision(other, 0, "test"), 12 * US_PER_SECOND)

    assert pending.get_load(to.url).recent_tokens == once // 2


def test_memory() -> None:
    """A million blocks of history are held in 300 MB."""
    count = 50_000
    tracemalloc.start()
    try:
        index = SentHistory(16, count)
        for start in range(0, count, 100):
            index.record_served("http://0", tuple((start + n) * 2**40 + 7 for n in range(100)))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(index) == count
    assert used / count < 300
