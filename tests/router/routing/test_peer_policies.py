# SPDX-License-Identifier: Apache-2.0
"""Rules of other routers in benchmarks/routing/peer_policies.py, on examples that those publish or test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy
import pytest

from benchmarks.routing.peer_policies import (
    MAX_PENALTY_S,
    PEAK_THROUGHPUT,
    PEER_POLICIES,
    DynamoPolicy,
)
from benchmarks.routing.predicted_latency import (
    MAX_PREDICTED_PENALTY_S,
    BoostedTrees,
    filter_candidates,
    score_deficits,
)
from ttft_otel.router.routing.policies.block_index import BlockHolders
from ttft_otel.router.routing.policies.policy_state import PolicyState, RoutingPolicy
from ttft_otel.router.types import (
    Decision,
    Instance,
    RoutingRequest,
    parse_instance_url,
)

INSTANCES = tuple(parse_instance_url(f"http://127.0.0.1:{9000 + n}", "mono") for n in range(3))
BLOCK_TOKENS = 512


@pytest.fixture
def instances() -> Sequence[Instance]:
    """Three idle instances."""
    return [parse_instance_url(each.url, "mono") for each in INSTANCES]


def build_policy(name: str) -> RoutingPolicy:
    """A peer's policy that knows nothing yet."""
    return PEER_POLICIES[name](PolicyState(BlockHolders(BLOCK_TOKENS)))


def build_request(blocks: Sequence[int], name: str = "request") -> RoutingRequest:
    """A prompt of these blocks."""
    tokens = len(blocks) * BLOCK_TOKENS
    return RoutingRequest(
        "mono", "", "model", name, {}, b"", prompt_tokens=tokens, block_keys=tuple(blocks)
    )


def put_work(policy: RoutingPolicy, instance: Instance, tokens: int) -> None:
    """So many tokens are to be computed there."""
    request = RoutingRequest("mono", "", "model", f"work {tokens}", {}, b"", prompt_tokens=tokens)
    policy.state.record_sent(request, Decision(instance, 0.0, "made"), 0)


def cache_blocks(policy: RoutingPolicy, depths: Mapping[int, int]) -> None:
    """The first so many blocks of a prompt are cached at instances, by their number."""
    for number, depth in depths.items():
        policy.state.index.add_blocks(INSTANCES[number].url, range(1, depth + 1))


def test_dynamo_example(instances: Sequence[Instance]) -> None:
    """Its guide: of 10 blocks 2, 5 and 8 overlap, 10, 5 and 9 are active: costs are 18, 10 and 11."""
    policy = build_policy("dynamo")
    assert isinstance(policy, DynamoPolicy)
    cache_blocks(policy, {0: 2, 1: 5, 2: 8})
    for instance, active in zip(instances, (10, 5, 9), strict=True):
        policy._active_tokens[instance.url] = active * BLOCK_TOKENS

    decision = policy.choose_instance(build_request(range(1, 11)), instances, 0, False)

    assert decision.instance is instances[1]
    assert decision.score == 10 * BLOCK_TOKENS


def test_dynamo_forgets(instances: Sequence[Instance]) -> None:
    """An answer that has ended has no blocks any more."""
    policy = build_policy("dynamo")
    assert isinstance(policy, DynamoPolicy)
    sent = policy.choose_instance(build_request(range(1, 11), "first"), instances, 0, False)
    assert policy._active_tokens[sent.instance.url]

    policy.record_end("first")

    assert not any(policy._active_tokens.values())


@pytest.mark.parametrize(("penalty_s", "chosen"), ((0.9, 0), (1.1, 1)))
def test_llmd_gate(instances: Sequence[Instance], penalty_s: float, chosen: int) -> None:
    """Who has 80 % of the prompt gets it until its queue is longer than others' by the allowed time."""
    policy = build_policy("llmd")
    cache_blocks(policy, {0: 8, 1: 7})  # 7 of 10 are too few
    put_work(policy, instances[0], int(penalty_s * MAX_PENALTY_S * PEAK_THROUGHPUT))
    put_work(policy, instances[2], 50_000)

    decision = policy.choose_instance(build_request(range(1, 11)), instances, 0, False)

    assert decision.instance is instances[chosen]


def test_llmd_without_affinity(instances: Sequence[Instance]) -> None:
    """Nobody has enough: the least tokens to compute, those of the prompt that are not cached included."""
    policy = build_policy("llmd")
    cache_blocks(policy, {0: 7})
    put_work(policy, instances[1], 1)
    put_work(policy, instances[2], 1)

    decision = policy.choose_instance(build_request(range(1, 11)), instances, 0, False)

    assert decision.instance is instances[0]
    assert decision.score == 3 * BLOCK_TOKENS


def test_cache_aware(instances: Sequence[Instance]) -> None:
    """The longest match if it is more than 0.3 of the prompt, else who was sent least."""
    policy = build_policy("cache_aware")

    def choose(*blocks: int) -> Instance:
        return policy.choose_instance(build_request(blocks), instances, 0, False).instance

    first = choose(*range(1, 11))
    assert choose(*range(1, 5), *range(100, 106)) is first  # 4 of 10
    second = choose(*range(1, 4), *range(200, 207))  # 3 of 10
    assert second is not first
    third = choose(*range(300, 310))
    assert third not in (first, second)


@pytest.mark.parametrize(("low", "high", "chosen"), ((0, 64, 0), (0, 65, 1), (200, 265, 0)))
def test_cache_aware_imbalance(
    instances: Sequence[Instance], low: int, high: int, chosen: int
) -> None:
    """More than 64 requests apart, and half as many again: the fewest requests, whatever is cached."""
    policy = build_policy("cache_aware")
    first = policy.choose_instance(build_request(range(1, 11)), instances[:1], 0, False).instance
    for instance in instances:
        instance.in_flight = high if instance is first else low

    decision = policy.choose_instance(build_request(range(1, 11)), instances[:2], 0, False)

    assert decision.instance is instances[chosen]


def test_power_of_two(instances: Sequence[Instance]) -> None:
    """The busiest of three is never chosen, and each of the others is."""
    policy = build_policy("power_of_two")
    instances[0].in_flight = 5

    chosen = {
        policy.choose_instance(build_request([]), instances, 0, False).instance.url
        for _ in range(100)
    }

    assert chosen == {each.url for each in instances[1:]}


def test_latency_deficits() -> None:
    """Its scorer's example, all too slow: 10 and 5 above the objectives have more than 100 and 30."""
    less, more = score_deficits(numpy.array([10.0, 100.0]), numpy.array([5.0, 30.0]))
    assert less == 1.01 and more == 0.01
    # 0.8 for TTFT and 0.2 for TPOT, of those that differ.
    opposite = score_deficits(numpy.array([1.0, 2.0]), numpy.array([2.0, 1.0]))
    assert list(opposite) == pytest.approx([0.81, 0.21], abs=0.011)
    assert list(score_deficits(numpy.array([1.0, 1.0]), numpy.array([2.0, 1.0]))) == [0.01, 1.01]


@pytest.mark.parametrize(
    ("shares", "penalty_s", "in_flight", "kept"),
    (
        ((0.995, 0.9, 0.0), 0.9 * MAX_PREDICTED_PENALTY_S, (1, 1, 1), [0]),
        ((0.995, 0.9, 0.0), 1.1 * MAX_PREDICTED_PENALTY_S, (1, 1, 1), [0, 1]),
        ((0.9, 0.85, 0.7), 0.0, (1, 1, 1), [0, 1]),
        ((0.7, 0.5, 0.0), 0.0, (1, 1, 1), [0, 1, 2]),
        ((0.9, 0.85, 0.7), 0.0, (1, 0, 0), [1]),
    ),
    ids=("nearly all", "too slow of these", "most", "no affinity", "idle"),
)
def test_latency_filters(
    shares: Sequence[float], penalty_s: float, in_flight: Sequence[int], kept: Sequence[int]
) -> None:
    """Its example of an idle one, which has the score to itself; stickiness as its filter's page has it."""
    ttfts_ms = numpy.array([1000 * penalty_s + 50, 50, 50])

    assert list(filter_candidates(numpy.array(shares), ttfts_ms, in_flight)) == kept


def test_latency_trees() -> None:
    """They learn what requests take, from samples as it has them."""
    chance = numpy.random.default_rng(1)
    seen, new = (chance.random((count, 3)) * [20_000, 10, 1] for count in (1000, 100))
    seen_ms, new_ms = (5 + 0.04 * each[:, 0] + 20 * each[:, 1] for each in (seen, new))

    errors = BoostedTrees(seen, seen_ms).predict(new) / new_ms - 1

    assert float(numpy.abs(errors).mean()) < 0.05
