# SPDX-License-Identifier: Apache-2.0
"""What policies choose on instances that never serve, and by what: pending loads and models of prefills."""

from __future__ import annotations

import functools
import json
import random
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from ttft_otel.router.errors import SloUnreachable
from ttft_otel.router.routing.policies import policy_registry
from ttft_otel.router.routing.policies.block_index import SentHistory
from ttft_otel.router.routing.policies.policy_registry import (
    POINTS_PER_INSTANCE,
    POLICIES,
    HashRing,
)
from ttft_otel.router.routing.policies.policy_state import (
    US_PER_SECOND,
    PendingLoads,
    PolicyOptions,
    PolicyState,
)
from ttft_otel.router.routing.policies.prefill_model import (
    MAX_TRACKED,
    MIN_SAMPLES,
    PrefillFit,
    PrefillLine,
    PrefillModels,
    PrefillWork,
    compute_work,
    count_pairs,
    describe_fit,
)
from ttft_otel.router.types import Decision, Instance, RoutingRequest, parse_instance_url

BLOCK_TOKENS = 16
INSTANCES = tuple(
    parse_instance_url(f"http://127.0.0.1:{port}", "prefill") for port in (8001, 8002, 8003)
)
A, B, C = INSTANCES
PREFILL_LINE = PrefillLine(0.01, 1e-4, 1e-8)
MS_PER_TOKEN = PrefillLine(0, 1e-3, 0)


def build_request(
    number: int = 0, tokens: int = 0, blocks: Sequence[int] = (), **more: object
) -> RoutingRequest:
    """A request with a prompt of this length and these full blocks."""
    body = json.dumps({"model": "m", **more}).encode()
    return RoutingRequest(
        "prefill",
        "/v1/completions",
        "m",
        str(number),
        {},
        body,
        prompt_tokens=tokens,
        block_keys=(*blocks,),
    )


def build_state(
    line: PrefillLine | None = None, pending: PendingLoads | None = None, **options: Any
) -> PolicyState:
    """Nothing known yet but the `line` of prefills; ties are broken the same way each time."""
    return PolicyState(
        SentHistory(BLOCK_TOKENS, 100),
        PolicyOptions(**options),
        PendingLoads() if pending is None else pending,
        PrefillModels(line),
        tie_breaker=random.Random(7),
    )


def add_load_entry(
    state: PolicyState, request: RoutingRequest, instance: Instance, cached: int = 0, now: int = 0
) -> None:
    """The request goes there, whoever chose it."""
    state.record_sent(request, Decision(instance, 0.0, "test", cached), now)


def add_prompts(state: PolicyState, *prompts: tuple[Instance, int], now: int = 0) -> None:
    """Prompts of so many tokens, numbered from 1, go to these instances."""
    for number, (instance, tokens) in enumerate(prompts, 1):
        add_load_entry(state, build_request(number, tokens), instance, now=now)


def choose_instance(
    name: str,
    state: PolicyState,
    request: RoutingRequest,
    now: int = 0,
    among: Sequence[Instance] = INSTANCES,
) -> Decision:
    """What a new policy of this name chooses."""
    return POLICIES[name](state).choose_instance(request, among, now, False)


def set_in_flight(*counts: int) -> list[Instance]:
    """The instances with so many requests under way."""
    return [replace(each, in_flight=count) for each, count in zip(INSTANCES, counts, strict=True)]


# By hand from the formula: tokens, cached, pairs.
PAIRS_BY_PROMPT = [
    (0, 0, 0),
    (10, 4, 45),
    (16, 16, 0),
    (100, 99, 100),
    (4096, 2048, 6_292_480),
    (131_072, 131_056, 2_097_032),
]


@pytest.mark.parametrize(("tokens", "cached", "pairs"), PAIRS_BY_PROMPT)
def test_trapezoid(tokens: int, cached: int, pairs: int) -> None:
    """The formula's worked cases, exactly; and it is the sum that it stands for."""
    assert count_pairs(tokens, cached) == pairs
    if tokens <= 20_260:
        assert sum(range(cached + 1, tokens + 1)) == pairs


# Pending prompts (tokens, cached) of A, B and C; what each has cached of the new one of 64; the scores.
SCORE_CASES = [
    ([[], [], []], (0, 0, 48), (2080, 2080, 904)),
    ([[(64, 0)], [(64, 48)], []], (0, 16, 0), (4160, 2848, 2080)),
    ([[(10, 0)], [(10, 4), (3, 1)], [(100, 99)]], (32, 32, 32), (1607, 1602, 1652)),
    ([[(1000, 512)], [(100, 0)], [(100, 0), (2, 0)]], (48, 0, 0), (370_076, 7130, 7133)),
]


@pytest.mark.parametrize(("pending", "cached", "scores"), SCORE_CASES)
def test_original_score(
    pending: list[list[tuple[int, int]]], cached: tuple[int, ...], scores: tuple[int, ...]
) -> None:
    """An instance's score is its pending prompts' pairs and the new one's; the least wins."""
    known = build_state(ttft_model="trapezoid")
    prompt = range(4)
    for at, each in enumerate(INSTANCES):
        known.index.add_blocks(each.url, prompt[: cached[at] // BLOCK_TOKENS])
        for number, (tokens, had) in enumerate(pending[at]):
            add_load_entry(known, build_request(10 * at + number, tokens), each, had)
    request = build_request(99, 64, prompt)

    every = [choose_instance("ttft", known, request, 0, (each,)).score for each in INSTANCES]
    best = choose_instance("ttft", known, request)

    assert every == [*scores]
    assert best.score == min(scores)
    assert (best.instance, best.reason) == (INSTANCES[scores.index(min(scores))], "trapezoid")


def test_one_token() -> None:
    """A prompt that is cached to its last token is computed from its last block on."""
    known = build_state()
    known.index.add_blocks(A.url, range(4))

    assert known.estimate_cached(build_request(0, 64, range(4)), INSTANCES) == [48, 0, 0]
    assert known.estimate_cached(build_request(0, 65, range(4)), INSTANCES) == [64, 0, 0]


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_known(name: str) -> None:
    """Without tokens, history, session or models any is taken, about as often, and with a seed the same."""
    took, again = (
        [
            policy.choose_instance(build_request(), INSTANCES, 0, False).instance.url
            for _ in range(300)
        ]
        for policy in (POLICIES[name](build_state()) for _ in range(2))
    )

    assert took == again
    assert min(Counter(took).values()) > 60


def test_session() -> None:
    """session: a session stays on its instance; when an instance goes, only its sessions move."""
    policy = POLICIES["session"](build_state(session_key="user"))

    def choose_url(user: object, among: Sequence[Instance]) -> str:
        return policy.choose_instance(build_request(user=user), among, 0, False).instance.url

    before = {user: choose_url(user, INSTANCES) for user in range(300)}
    after = {user: choose_url(user, (A, C)) for user in range(300)}

    assert min(Counter(before.values()).values()) > 60
    assert all(after[user] == url for user, url in before.items() if url != B.url)
    assert {after[user] for user, url in before.items() if url == B.url} == {A.url, C.url}


NAMELESS_BODIES = (b"", b"[1]", b'{"X-User": {"id": 1}}', b'{"X-User": ""}', b"\xff")


@pytest.mark.parametrize(
    ("headers", "body", "reason"),
    [
        ({"x-user": "ann"}, b"", "session"),
        ({}, b'{"X-User": "ann"}', "session"),
        ({"x-user": "ann"}, b"no json", "session"),
        *(({}, body, "least_requests") for body in NAMELESS_BODIES),
    ],
)
def test_session_key(headers: dict[str, str], body: bytes, reason: str) -> None:
    """The key is a header or one of the body's own; without one the fewest requests under way decide."""
    request = structs.replace(build_request(), headers=headers, body=body)
    plain = structs.replace(build_request(), headers={"x-user": "ann"})

    found = choose_instance("session", build_state(session_key="X-User"), request)
    same = choose_instance("session", build_state(session_key="x-user"), plain)

    assert found.reason == reason
    assert reason != "session" or found.instance is same.instance


def test_prefix() -> None:
    """The longest beginning that an instance was sent, computed or not; else the fewest under way.

    A beginning that all prompts share does not decide: the match must be a good part of the prompt.
    """
    known = build_state()
    known.index.add_blocks(A.url, range(3))
    add_load_entry(known, build_request(1, 64, (0, 1, 50, 51)), B)

    found = choose_instance("prefix", known, build_request(2, 80, (0, 1, 50, 51, 52)))
    own = [*range(3), *range(100, 107)]

    assert (found.instance, found.cached_tokens, found.reason) == (B, 64, "prefix")
    assert choose_instance("prefix", known, build_request(1, 160, own)).reason == "least_requests"
    assert choose_instance("prefix", known, build_request(2, 144, own[:9])).instance is A


@pytest.mark.parametrize(
    ("in_flight", "chosen", "reason"),
    [
        ((8, 9, 0), (0,), "prefix"),
        ((9, 9, 0), (2,), "least_requests"),
        ((29, 29, 20), (0, 1), "prefix"),
        ((31, 31, 20), (2,), "least_requests"),
    ],
)
def test_prefix_busy(in_flight: tuple[int, ...], chosen: tuple[int, ...], reason: str) -> None:
    """Not even a whole prefix is worth many more requests than elsewhere; among equals the fewest count."""
    known = build_state()
    for each in (A, B):
        known.index.add_blocks(each.url, range(5))
    busy = set_in_flight(*in_flight)

    found = choose_instance("prefix", known, build_request(1, 80, range(5)), 0, busy)

    assert busy.index(found.instance) in chosen
    assert found.reason == reason


@pytest.mark.parametrize(("threshold", "reason"), [(16, "kvaware"), (15, "session")])
def test_kvaware(threshold: int, reason: str) -> None:
    """The longest cached prefix, if no more than the threshold is missing; else by session."""
    known = build_state(session_key="user", kv_aware_threshold=threshold)
    known.index.add_blocks(C.url, range(4))
    known.index.add_blocks(A.url, range(3))
    request = build_request(1, 80, range(5), user="ann")

    found = choose_instance("kvaware", known, request)

    assert found.reason == reason
    assert reason == "session" or found.instance is C


@pytest.mark.parametrize("shared", [False, True])
def test_kvaware_among_equals(shared: bool) -> None:
    """What several have cached goes to each of them alike, or by session: never all to the first one."""
    known = build_state(session_key="user", shared_cache=shared)
    for each in (A,) if shared else (A, C):
        known.index.add_blocks(each.url, range(4))
    policy, sent, instances = POLICIES["kvaware"](known), Counter[str](), set_in_flight(0, 0, 0)
    for number in range(300):
        request = build_request(number, 80, range(4))
        found = policy.choose_instance(request, instances, number, False)
        assert (found.reason, found.cached_tokens, found.score) == ("kvaware", 64, 16)
        found.instance.in_flight += 1
        sent[found.instance.url] += 1

    assert sent == ({each.url: 100 for each in INSTANCES} if shared else {A.url: 150, C.url: 150})
    of = [build_request(number, 80, range(4), user="ann") for number in range(300, 309)]
    assert (
        len({policy.choose_instance(each, INSTANCES, 300, False).instance.url for each in of}) == 1
    )


def test_calibrated() -> None:
    """What is waiting and what is new, in seconds; the running one's part that is done is taken off."""
    known = build_state(PREFILL_LINE)
    add_prompts(known, (A, 1000), (A, 500), (B, 1400))
    one = PREFILL_LINE.predict_seconds(compute_work(1000, 0))
    new = PREFILL_LINE.predict_seconds(compute_work(100, 0))

    def predict_ttft(each: Instance, now: float) -> float | None:
        now_us = round(now * US_PER_SECOND)
        return choose_instance(
            "ttft", known, build_request(9, 100), now_us, (each,)
        ).predicted_ttft_s

    start = one + PREFILL_LINE.predict_seconds(compute_work(500, 0)) + new
    assert predict_ttft(C, 0.05) == pytest.approx(new)
    assert predict_ttft(A, 0) == pytest.approx(start)
    assert predict_ttft(A, 0.05) == pytest.approx(start - 0.05)
    assert predict_ttft(A, 60) == pytest.approx(start - 0.9 * one)  # late: it may end any moment
    assert choose_instance("ttft", known, build_request(9, 100)).instance is C
    known.record_first_token(build_request(1, 1000), US_PER_SECOND, 1.0, 0)
    # The next one began now.
    assert predict_ttft(A, 1) == pytest.approx(
        PREFILL_LINE.predict_seconds(compute_work(500, 0)) + new
    )


def test_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers under way lengthen each prefill there, and half a step of theirs is waited for."""
    known = build_state(MS_PER_TOKEN._replace(e=0.002))
    monkeypatch.setattr(A, "in_flight", 10)  # none has a prompt before its first token

    def predict_ttft(each: Instance) -> float | None:
        return choose_instance("ttft", known, build_request(9, 100), 0, (each,)).predicted_ttft_s

    assert predict_ttft(B) == pytest.approx(0.1)
    assert predict_ttft(A) == pytest.approx(0.1 + 1.5 * 10 * 0.002)
    assert choose_instance("ttft", known, build_request(9, 100), 0, (A, B)).instance is B
    add_prompts(known, (A, 50))
    # One of the ten is this prompt, whose own steps are waited for in place of half a step.
    assert predict_ttft(A) == pytest.approx(0.05 + 0.1 + 2 * 9 * 0.002)
    monkeypatch.setattr(A, "in_flight_elsewhere", 5)  # sent by another worker
    assert predict_ttft(A) == pytest.approx(0.05 + 0.1 + 2 * 14 * 0.002)


def test_others() -> None:
    """The busier the fleet, the longer a request waits where its prompt is cached: others need the time."""
    known = build_state(MS_PER_TOKEN)
    request = build_request(99, 1600, range(100))
    known.index.add_blocks(A.url, range(50))
    prompts = ((A, 1000), (B, 100), (C, 100))
    add_prompts(known, *prompts)

    quiet = choose_instance("ttft", known, request)
    for number in range(10, 400):
        now = number * US_PER_SECOND // 10
        add_load_entry(known, build_request(number, 1), INSTANCES[number % 3], now=now)
        known.record_left(build_request(number), now)
    add_prompts(known, *prompts, now=now)
    busy = choose_instance("ttft", known, request, now)

    assert quiet.instance is not A  # 1.7 s there, 1.8 s at A
    assert busy.instance is A  # 0.8 s of work instead of 1.6 s
    assert busy.predicted_ttft_s == pytest.approx(1.8)
    assert quiet.predicted_ttft_s == pytest.approx(1.7)


def test_near() -> None:
    """Among about equal ones the instance that had the least to compute lately; what is better still wins."""
    known = build_state(MS_PER_TOKEN)
    add_prompts(known, (A, 1000), (A, 1000), (B, 1000), (C, 1000), (C, 1000))
    for number in range(1, 6):
        known.record_left(build_request(number), 0)

    def choose() -> Instance:
        return choose_instance("ttft", known, build_request(9, 1000, range(60))).instance

    assert choose() is B
    known.index.add_blocks(A.url, range(2))
    assert choose() is B  # A has 3 % less to do
    known.index.add_blocks(A.url, range(6))
    assert choose() is A


def test_speculative() -> None:
    """A prefix that waits on an instance counts as cached there, but not for the original formula."""
    known = build_state(MS_PER_TOKEN)
    add_load_entry(known, build_request(1, 160, range(10)), A)
    add_load_entry(known, build_request(2, 160, range(20, 30)), B)
    request = build_request(3, 320, range(20))
    original = build_state(None, known.pending, ttft_model="trapezoid")

    cached = [choose_instance("ttft", known, request, 0, (x,)).cached_tokens for x in INSTANCES]

    assert cached == [160, 0, 0]
    assert choose_instance("ttft", original, request, 0, (A,)).cached_tokens == 0


def test_slow() -> None:
    """An instance of half the speed gets the request only where the faster one's queue is longer."""
    known = build_state()
    for number in range(1, 60):
        todo = compute_work(100 * number, 0)
        known.models.add_sample("m", A.url, todo, PREFILL_LINE.predict_seconds(todo))
        known.models.add_sample("m", B.url, todo, 2 * PREFILL_LINE.predict_seconds(todo))
    policy = POLICIES["ttft"](known)
    chosen = []
    for number in range(6):
        choice = policy.choose_instance(build_request(number, 1000), (A, B), 0, False)
        known.record_sent(build_request(number, 1000), choice, 0)
        chosen.append(choice.instance)

    assert chosen.count(A) == 4
    assert chosen[0] is A


def test_adapters() -> None:
    """Prefills of an adapter teach what its base model and that one's other adapters take, no other model."""
    known, instance = build_state(), replace(A)
    # A base model that the instance does not list could have any name, of any length.
    parents = {"m": None, "one": "m", "two": "m", "other": "unlisted"}
    instance.record_model_cards(tuple({"id": each, "parent": parents[each]} for each in parents))
    requests = {each: structs.replace(build_request(1, 100), model=each) for each in parents}
    for number in range(10):
        add_load_entry(known, requests["one"], instance, now=number)
        known.record_first_token(requests["one"], number, 0.1, 0)

    among = (replace(B), instance)  # B has just been found, and has told nothing yet
    reasons = [
        choose_instance("ttft", known, each, among=among).reason for each in requests.values()
    ]

    assert reasons == ["calibrated"] * 3 + ["trapezoid"]
    assert {model for model, _ in known.models.list_fits()} == {"m"}


def test_start() -> None:
    """Before there are enough samples the pairs decide; then seconds, also for an instance without any."""
    known = build_state()
    reasons = []
    for number in range(10):
        choice = choose_instance("ttft", known, build_request(number, 100))
        reasons.append(choice.reason)
        known.record_sent(build_request(number, 100), structs.replace(choice, instance=A), number)
        known.record_first_token(build_request(number, 100), number, 0.1, 0)

    assert reasons == ["trapezoid"] * 8 + ["calibrated"] * 2
    last = choose_instance("ttft", known, build_request(11, 100))
    assert last.predicted_ttft_s == pytest.approx(0.1)


# Pending tokens of A, B and C, seconds besides queue and prefill, the request's tokens, seconds that have
# passed: where it may go, or in how many seconds it could.
SLO_CASES = [
    pytest.param((800, 700, 900), 0, 100, 0, 0.3, id="every queue is too long"),
    pytest.param((800, 700, 900), 0, 100, 0.31, (B,), id="one queue is short enough now"),
    pytest.param((), 0, 2000, 0, INSTANCES, id="waiting makes no idle instance faster"),
    pytest.param((100, 3000), 0, 2000, 0, (C,), id="the idle one serves what is late anyway"),
    pytest.param((100, 3000, 3000), 0, 2000, 0, 0.1, id="it waits until one is idle"),
    pytest.param((200, 200, 200), 0.3, 100, 0, 0.1, id="time besides the queue counts, too"),
    pytest.param((1000, 1000, 1000), 0, 0, 0, INSTANCES, id="no known work is never too late"),
]


@pytest.mark.parametrize(("pending", "overhead_s", "tokens", "now_s", "wanted"), SLO_CASES)
def test_late(
    pending: tuple[int, ...],
    overhead_s: float,
    tokens: int,
    now_s: float,
    wanted: float | tuple[Instance, ...],
) -> None:
    """When no instance can answer within half a second, the decision says so, and when one could."""
    known = build_state(MS_PER_TOKEN, slo_s=0.5)
    add_prompts(known, *zip(INSTANCES, pending, strict=False))
    for each in INSTANCES:
        known.record_overhead(each.url, overhead_s)
    request, now = build_request(9, tokens), round(now_s * US_PER_SECOND)

    if isinstance(wanted, tuple):
        found = choose_instance("ttft", known, request, now)
        assert found.instance in wanted
        assert pending or found.predicted_ttft_s == pytest.approx(2)
    else:
        with pytest.raises(SloUnreachable) as late:
            choose_instance("ttft", known, request, now)
        assert late.value.wait_s == pytest.approx(wanted)


def test_outcome() -> None:
    """The predicted time is compared with the measured one."""
    known = build_state(MS_PER_TOKEN)
    for number in range(4):
        request = build_request(number, 100 * (1 + number % 2))
        choice = structs.replace(
            choose_instance("ttft", known, request, number * US_PER_SECOND), instance=A
        )
        known.record_sent(request, choice, number * US_PER_SECOND)
        known.record_first_token(
            request, number * US_PER_SECOND + 1250 * request.prompt_tokens, 0.1, 0
        )

    assert known.outcomes[A.url].mape == pytest.approx(0.2)
    assert known.outcomes[A.url].r2 == pytest.approx(0.6, rel=0.01)


INSTANCE_URLS = tuple(f"http://10.0.0.{number}:8000" for number in range(8))


@functools.cache
def build_ring(urls: frozenset[str]) -> list[tuple[int, str]]:
    """The points of these instances alone, in order."""
    numbers = range(POINTS_PER_INSTANCE)
    return sorted((policy_registry._hash_text(f"{url}#{n}"), url) for url in urls for n in numbers)


def choose_from_ring(key: str, urls: Iterable[str]) -> str:
    """Whose point on the ring of these instances alone follows."""
    points = build_ring(frozenset(urls))
    return points[bisect(points, (policy_registry._hash_text(key), "~")) % len(points)][1]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sets(st.sampled_from(INSTANCE_URLS), min_size=1), st.text()), min_size=1)
)
def test_same(asked: list[tuple[set[str], str]]) -> None:
    """Whoever was offered before, a session goes where the ring of those offered now puts it."""
    ring = HashRing()
    for urls, key in asked:
        ring.add_urls(urls)
        assert ring.find_owner(key, urls) == choose_from_ring(key, urls)


def test_no_new_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """When one of many instances is not offered, or is again, nothing but the key is hashed."""
    urls = {f"http://10.0.0.{count_hashes}:8000" for count_hashes in range(128)}
    ring = HashRing()
    ring.add_urls(urls)
    hashed: list[str] = []

    def count_hashes(text: str) -> int:
        hashed.append(text)
        return len(hashed) << 54

    monkeypatch.setattr(policy_registry, "_hash_text", count_hashes)

    for gone in sorted(urls):
        ring.add_urls(urls - {gone})
        assert ring.find_owner("ann", urls - {gone}) != gone

    assert hashed == ["ann"] * 128


def test_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances that come and go do not stay on the ring for ever."""
    monkeypatch.setattr(policy_registry, "MAX_RING_INSTANCES", 3)
    ring = HashRing()

    for number in range(2, len(INSTANCE_URLS)):
        urls = set(INSTANCE_URLS[number - 2 : number])
        ring.add_urls(urls)
        assert ring.find_owner("ann", urls) == choose_from_ring("ann", urls)
        assert len(ring._points) <= 3 * POINTS_PER_INSTANCE


PATIENCE_S = 30
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


def build_shared_prompt(number: int) -> RoutingRequest:
    """One of the twelve; their prompts share beginnings."""
    blocks = (*range(number % 5), 100 + number)
    return build_request(number, BLOCK_TOKENS * len(blocks) + number, blocks)


def compute_sums(pending: PendingLoads) -> list[tuple[int, int, int, int]]:
    """Of each instance: requests, tokens, pairs, queued blocks."""
    loads = [pending.get_load(each.url) for each in INSTANCES]
    return [(len(x.entries), x.tokens_to_compute, x.pairs, x.queued_blocks.total()) for x in loads]


@given(EVENT_LISTS, st.sampled_from(sorted(POLICIES)))
def test_any_order(events: list[tuple[str, int, Instance, int]], name: str) -> None:
    """Whatever happens in whatever order, the sums are those of who is there, and end at zero."""
    pending, now, there = PendingLoads(PATIENCE_S * US_PER_SECOND), 0, {}
    state = build_state(pending=pending)
    policy = POLICIES[name](state)
    for what, number, failed, later in events:
        now += later * US_PER_SECOND
        request = build_shared_prompt(number)
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
        from_scratch = build_state()
        for each, sent in there.items():
            from_scratch.record_sent(build_shared_prompt(each), *sent)
        assert compute_sums(pending) == compute_sums(from_scratch.pending)

    pending.drop_expired(now + PATIENCE_S * US_PER_SECOND)

    assert len(pending) == 0
    assert compute_sums(pending) == [(0, 0, 0, 0)] * len(INSTANCES)
    assert pending.estimate_delay_cost(now, 1) == 0  # no instance counts as busy


def test_running() -> None:
    """What an instance computes now began when it was sent, or when the one before it left."""
    state = build_state()
    for number in range(3):
        add_load_entry(state, build_request(number, 10), A, now=number * US_PER_SECOND)

    def get_elapsed(at: int) -> float:
        return state.pending.get_load(A.url).estimate_running(at * US_PER_SECOND)[1]

    assert get_elapsed(4) == 4
    state.record_left(build_request(1), 5 * US_PER_SECOND)  # left before its turn
    assert get_elapsed(6) == 6
    state.record_first_token(build_request(0), 7 * US_PER_SECOND, 0.1, 0)
    assert get_elapsed(9) == 2


def test_crowd() -> None:
    """Two arrivals a second, busy for half of the time: four are delayed; by the part that is busy now."""
    pending = PendingLoads(window_s=10)
    state = build_state(pending=pending)
    assert pending.estimate_delay_cost(0, 1) == 0
    for number in range(200):
        at = number * US_PER_SECOND // 2
        add_load_entry(state, build_request(number, 10), A, now=at)
        state.record_left(build_request(number), at + US_PER_SECOND // 4)
    assert pending.estimate_delay_cost(100 * US_PER_SECOND, 1) == 0  # nobody waits
    add_load_entry(state, build_request(1, 10), A, now=100 * US_PER_SECOND)

    assert abs(pending.estimate_delay_cost(100 * US_PER_SECOND, 1) - 4) < 0.4
    assert abs(pending.estimate_delay_cost(100 * US_PER_SECOND, 4) - 0.5 / (1 - 0.5 / 4) / 4) < 0.05
    assert pending.estimate_delay_cost(400 * US_PER_SECOND, 1) < 1e-9


def test_lately() -> None:
    """Of what an instance had to compute half is forgotten after each window; the idle one then, too."""
    state = build_state(pending=PendingLoads(window_s=10))
    for number, (to, at) in enumerate(((A, 1), (B, 5), (B, 12))):
        assert state.pending.get_load(A.url).recent_tokens == (50 if number else 0)
        add_load_entry(state, build_request(number, 50), to, now=at * US_PER_SECOND)
    assert state.pending.get_load(A.url).recent_tokens == 25

    state.record_left(build_request(0), 13 * US_PER_SECOND)
    add_load_entry(state, build_request(9, 50), C, now=30 * US_PER_SECOND)
    assert state.pending.get_load(A.url).recent_tokens == 0
    assert state.pending.get_load(B.url).entries  # its requests have not ended


TRUE_LINE = PrefillLine(0.005, 40e-6, 1.3e-9)
PROBE = compute_work(8000, 0)


def generate_prefills(
    count: int, factor: float = 1.0, noise: float = 0.0, seed: int = 1
) -> Iterator[tuple[PrefillWork, float]]:
    """Lengths from 16 to 64k tokens, with any part of them cached, and `factor` times TRUE_LINE's seconds.

    noise: of the seconds, relative.
    """
    rng, chance = random.Random(seed), random.Random(seed + 1)
    for _ in range(count):
        tokens = round(16 * 4096 ** rng.random())
        work = compute_work(tokens, rng.randrange(tokens) // 16 * 16)
        yield work, factor * TRUE_LINE.predict_seconds(work) * chance.lognormvariate(0, noise)


def train_fit(prefills: Iterable[tuple[PrefillWork, float]]) -> tuple[PrefillLine, PrefillFit]:
    """What these prefills teach, one after the other."""
    fit = PrefillFit()
    for work, seconds in prefills:
        fit.add_sample(work, seconds)
    assert fit.line is not None
    return fit.line, fit


def test_cost_of_answers() -> None:
    """What answers under way cost each prefill is found, and nothing where none are."""
    fit, chance, cost_s = PrefillFit(), random.Random(3), 0.0007
    for work, seconds in generate_prefills(300):
        decodes = chance.randrange(100)
        noise = chance.lognormvariate(0, 0.05)
        fit.add_sample(work, (seconds + cost_s * decodes) * noise, decodes)

    assert fit.line is not None
    assert fit.line.e == pytest.approx(cost_s, rel=0.1)
    assert describe_fit(fit)["e"] == fit.line.e


def test_noise() -> None:
    """With 10 % of noise its errors are about that noise; long prompts are predicted within a few percent."""
    line, fit = train_fit(generate_prefills(2000, noise=0.1))

    for tokens in (2000, 8000, 32_000):
        work = compute_work(tokens, 0)
        assert line.predict_seconds(work) == pytest.approx(TRUE_LINE.predict_seconds(work), 0.05)
    assert fit.quality.mape is not None and 0.06 < fit.quality.mape < 0.12
    assert fit.quality.r2 is not None and fit.quality.r2 > 0.95


@pytest.mark.parametrize("kept", list(product((0, 1), repeat=3)))
def test_never_negative(kept: tuple[int, ...]) -> None:
    """A part that costs nothing has a coefficient of zero, never below, whatever the noise."""
    true = PrefillLine(*(x * keep for x, keep in zip(TRUE_LINE[:3], kept, strict=True)))
    fit, chance = PrefillFit(), random.Random(4)
    for work, _ in generate_prefills(300):
        fit.add_sample(work, true.predict_seconds(work) + chance.gauss(0, 1e-4))
        assert fit.line is None or min(fit.line) >= 0

    if any(kept):
        assert fit.line is not None
        assert fit.line.predict_seconds(PROBE) == pytest.approx(
            true.predict_seconds(PROBE), rel=0.1, abs=1e-3
        )


TRUE_PROBE_S = TRUE_LINE.predict_seconds(PROBE)


@pytest.mark.parametrize(
    ("prefills", "expected_s"),
    [
        pytest.param([(PROBE, 0.25)] * MIN_SAMPLES, 0.25, id="prompts of one length"),
        pytest.param(
            chain(generate_prefills(500), generate_prefills(3000, factor=2, seed=2)),
            2 * TRUE_PROBE_S,
            id="becomes twice as slow",
        ),
    ],
)
def test_follows(prefills: Iterable[tuple[PrefillWork, float]], expected_s: float) -> None:
    """A length that was seen is predicted, and what an instance takes now, not what it took before."""
    assert train_fit(prefills)[0].predict_seconds(PROBE) == pytest.approx(expected_s, 0.02)


def train_models(
    models: PrefillModels,
    count: int,
    slowdowns: Mapping[str, float] = MappingProxyType({}),
    noise: float = 0.0,
    instances: int = 8,
) -> tuple[PrefillLine, Mapping[str, float]]:
    """What is known of `m` after so many prefills at each instance; `slowdowns`: how slow."""
    for number, (work, seconds) in enumerate(generate_prefills(count * instances, noise=noise)):
        url = str(number % instances)
        models.add_sample("m", url, work, seconds * slowdowns.get(url, 1.0))
    known = models.get_line("m")
    assert known is not None
    return known


def test_pool() -> None:
    """Start values, then a line that all instances have in common; other models have no part in it."""
    start = PrefillLine(1, 0, 0)
    models = PrefillModels(start)
    assert models.get_line("m") == (start, {})
    assert PrefillModels().get_line("m") is None
    line, factors = train_models(models, 1, instances=MIN_SAMPLES)

    assert line == pytest.approx(TRUE_LINE, rel=1e-3)
    assert factors == {}
    assert models.get_line("other") == (start, {})


def test_pace() -> None:
    """A few samples tell a slow instance from the others: its line is the common one times its pace."""
    models, slowdowns = PrefillModels(), {"0": 2.0, "1": 2.0, "2": 0.5, "3": 1.0, "7": 1.0}
    train_models(models, 20, slowdowns, 0.1)
    lines = {url: fit.line for (_, url), fit in models.list_fits().items() if fit.line}

    took_s = {url: lines[url].predict_seconds(PROBE) / TRUE_PROBE_S for url in slowdowns}
    assert took_s == pytest.approx(slowdowns, rel=0.12)


@pytest.mark.parametrize(("each", "noise"), [(5, 0.1), (50, 0.1), (50, 0.5)])
def test_chance(each: int, noise: float) -> None:
    """Equally fast instances are not told apart by their noise: nearly all have no pace of their own."""
    _, factors = train_models(PrefillModels(), each, noise=noise, instances=64)

    assert len(factors) < 12
    assert all(abs(factor - 1) < noise / 2 for factor in factors.values())


def test_pace_changes() -> None:
    """An instance that becomes slow is known to be after a hundred prefills; all of them after more."""
    models = PrefillModels()
    train_models(models, 60, noise=0.05, instances=4)

    for slow, count in (("0", 100), ("0123", 500)):
        slowdowns = {**dict.fromkeys("0123", 1.0), **dict.fromkeys(slow, 3.0)}
        line, factors = train_models(models, count, slowdowns, instances=4)
        ratio = line.predict_seconds(PROBE) / TRUE_PROBE_S
        paces = {url: factors.get(url, 1.0) * ratio for url in slowdowns}
        assert paces == pytest.approx(slowdowns, rel=0.15)


def test_wild() -> None:
    """A prefill time a thousand times too long, or zero, does not spoil the predictions of its instance.

    One tells nothing of an instance while nobody knows how much they differ by chance.
    """
    models, early = PrefillModels(), PrefillModels()
    _, factors = train_models(models, 40, noise=0.1)
    models.add_sample("m", "0", PROBE, 1000 * TRUE_PROBE_S)
    models.add_sample("m", "1", PROBE, 0.0)
    _, early_factors = train_models(early, MIN_SAMPLES, instances=1)
    early.add_sample("m", "b", PROBE, 10 * TRUE_PROBE_S)

    assert factors.get("0", 1.0) < 1.3
    assert factors.get("1", 1.0) > 0.8
    assert early_factors == {}


def test_models_are_bounded() -> None:
    """However many models and instances are named, no more than so many are kept, the latest."""
    models = PrefillModels()
    for number in range(MAX_TRACKED + 100):
        models.add_sample(f"m{number}", "a", PROBE, 0.1)
    kept = [key for key in models.list_fits() if key[1]]

    assert len(kept) == MAX_TRACKED
    assert kept[0] == ("m100", "a")
    assert ("m99", "") not in models.list_fits()


def test_drop() -> None:
    """An instance that is gone leaves no series and weighs nothing in what the others are held against."""
    models = PrefillModels()
    line, factors = train_models(models, 40, {"0": 4.0}, 0.05, 2)
    assert factors
    models.add_sample("other", "0", PROBE, 0.1)
    models.drop_instance("0")
    assert set(models.list_fits()) == {("m", ""), ("m", "1")}
    models.add_sample("m", "1", PROBE, line.predict_seconds(PROBE))
    assert factors == {}
