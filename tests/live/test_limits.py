# SPDX-License-Identifier: Apache-2.0
"""What requests wait for on one real server that has few of everything: places, tokens, KV blocks, adapters.

Each limit alone has 95 % of the wait that was made of it, and `ttft-otel explain` names it; of two at once
TWO_AT_ONCE says which one is told. Every step is slowed down, so that waits are many steps on any machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final

import pytest

from lab import ttft_client
from lab.ttft_client import TimedResponse
from tests.live.bench import LiveDeployment
from tests.live.like_requests import FEWER_LIKE, LikeRequests, check_cause, check_stage
from tests.live.server_plans import (
    ADAPTERS,
    BLOCK_TOKENS,
    CACHE_BLOCKS,
    TEXT_PLACES,
)
from tests.live.test_engine_features import run_request, sum_metric
from tests.live.test_queue_reasons import MIN_SHARE, get_share, read_reasons

pytestmark = pytest.mark.timeout(900)  # what comes next is started meanwhile

STEP_MS: Final = 40.0
LONG_STEP_MS: Final = 800.0
ATTEMPTS: Final = 3  # of each case: programs beside these stretch single steps
LARGE_BLOCKS: Final = 58  # leave room for short prompts, and none for another of SECOND_BLOCKS
SECOND_BLOCKS: Final = CACHE_BLOCKS - LARGE_BLOCKS
FIRST, SECOND = ADAPTERS

Fields = dict[str, Any]


def make_prompt(blocks: int, answer: int = 1, **more: Any) -> Fields:
    """A request whose prompt fills so many KV blocks, and is in no cache."""
    ids = [random.randrange(10, 200) for _ in range(blocks * BLOCK_TOKENS)]
    extra = {"prompt": ids}
    return {"path": ttft_client.COMPLETIONS_PATH, "max_tokens": answer, "extra": extra, **more}


def make_answer(tokens: int, **more: Any) -> Fields:
    """A short request with an answer of so many tokens."""
    return {"max_tokens": tokens, **more}


def cache_prompt(
    bench: LiveDeployment, answer: int, blocks: int = LARGE_BLOCKS, **more: Any
) -> Fields:
    """A request that holds so many blocks while it answers; its prompt is in the prefix cache."""
    fields = make_prompt(blocks, **more)
    assert bench.send_request(bench.front_url, **fields).status == 200
    return {**fields, "max_tokens": answer}


def plan_holders(bench: LiveDeployment, case: str) -> tuple[list[Fields], Fields]:
    """Who comes first in a case, and who then waits: the last of the holders is the first to end."""
    long_prompt = make_prompt(LARGE_BLOCKS)
    more_blocks = make_prompt(SECOND_BLOCKS)
    others = [make_answer(140)] * (TEXT_PLACES - 1)
    plans: dict[str, Any] = {
        "max_num_seqs": lambda: ([*others, make_answer(40)], {}),
        "token_budget": lambda: ([long_prompt], {}),
        "kv_blocks": lambda: ([cache_prompt(bench, 60)], more_blocks),
        # Each grows by a block with its first token: of 71 that is one too many, and the last one has to go.
        "preempted": lambda: ([cache_prompt(bench, 60, 23) for _ in range(3)], {}),
        "lora": lambda: ([make_answer(40, model=FIRST)], {"model": SECOND}),
        "max_num_seqs, token_budget": lambda: ([*others, long_prompt], {}),
        "max_num_seqs, kv_blocks": lambda: ([*others, cache_prompt(bench, 60)], more_blocks),
        "max_num_seqs, lora": lambda: (
            [*others, make_answer(60, model=FIRST)],
            {"model": SECOND},
        ),
        "token_budget, kv_blocks": lambda: ([long_prompt], more_blocks),
        "token_budget, lora": lambda: ([{**long_prompt, "model": FIRST}], {"model": SECOND}),
        "kv_blocks, lora": lambda: (
            [cache_prompt(bench, 60, model=FIRST)],
            {**more_blocks, "model": SECOND},
        ),
    }
    found: tuple[list[Fields], Fields] = plans[case]()
    return found


def wait_behind(
    bench: LiveDeployment, holders: Sequence[Fields], waiter: Fields
) -> tuple[TimedResponse, str]:
    """Send the waiter while the holders are at the engine; its answer and its trace."""
    bench.control.set_injections({"forward": STEP_MS})
    try:
        with ExitStack() as stack:
            for each in holders:
                stack.enter_context(run_request(bench, **each))
            return bench.send_traced(**{"max_tokens": 2, **waiter})
    finally:
        bench.control.set_injections()


def measure_case(bench: LiveDeployment, case: str, reason: str) -> str:
    """The ID of a request that waited in `case`; fails unless `reason` has nearly all of the wait."""
    seen = []
    for _ in range(ATTEMPTS):
        answer, trace = wait_behind(bench, *plan_holders(bench, case))
        assert answer.status == 200, answer.body[:300]
        reasons = read_reasons(bench, trace)
        seen.append(reasons)
        if get_share(reasons, reason) >= MIN_SHARE:
            return answer.request_id
    raise AssertionError((case, seen))


# Reason of waiting -> the setting that explain names.
SETTINGS: Final = {
    "max_num_seqs": "max_num_seqs",
    "token_budget": "max_num_batched_tokens",
    "kv_blocks": "kv_blocks",
    "lora": "max_loras",
}


@pytest.mark.parametrize("reason", SETTINGS)
def test_alone(small: LiveDeployment, reason: str) -> None:
    """One limit: it has the wait, and explain names it with its setting."""
    model = SECOND if reason == "lora" else "tiny"
    like = LikeRequests(small, count=FEWER_LIKE, model=model)
    reported = like.explain(measure_case(small, reason, reason))

    check_cause(reported, "setting_limit", SETTINGS[reason])
    assert reported["reasons"][reason] >= 0.9
    settings = reported["cause"]["remedy"]["settings"]
    assert reason != "max_num_seqs" or "--max-num-seqs" in settings


def test_preempted(small: LiveDeployment) -> None:
    """Answers fill the cache, one is preempted: who comes later waits behind it, for blocks as it does."""
    like = LikeRequests(small, count=FEWER_LIKE)
    before = sum_metric(small, "vllm:num_preemptions_total")
    reported = like.explain(measure_case(small, "preempted", "kv_blocks"))

    assert sum_metric(small, "vllm:num_preemptions_total") > before
    check_cause(reported, "setting_limit", "kv_blocks")


# Two at once: which of them is told. Written before the first run.
TWO_AT_ONCE: Final = {
    ("max_num_seqs", "token_budget"): "max_num_seqs",
    ("max_num_seqs", "kv_blocks"): "max_num_seqs",
    ("max_num_seqs", "lora"): "max_num_seqs",
    ("token_budget", "kv_blocks"): "token_budget",
    ("token_budget", "lora"): "token_budget",
    ("kv_blocks", "lora"): "lora",
}


@pytest.mark.full
@pytest.mark.parametrize("both", TWO_AT_ONCE, ids=" and ".join)
def test_two_at_once(small: LiveDeployment, both: tuple[str, str]) -> None:
    """Both limits hold until the same moment: the one of the table has the wait."""
    measure_case(small, ", ".join(both), TWO_AT_ONCE[both])


def test_in_step(small: LiveDeployment) -> None:
    """It comes while a long step runs: all of its wait is the rest of that step."""
    like = LikeRequests(small, count=FEWER_LIKE)
    for _ in range(ATTEMPTS):
        small.control.set_injections({"forward": LONG_STEP_MS})
        began_ns = time.monotonic_ns()
        with run_request(small, max_tokens=2):
            small.control.set_injections()
            reported = like.explain(like.send_one())
        if reported["answered"] and small.control.read_delays(began_ns):
            break
    check_stage(reported, "prefill.queue")
    assert reported["cause"]["kind"] in ("not_known", "process_pause"), reported["sentences"]
    assert reported["reasons"] == {"in_step": 1.0}


def test_long_prompt(small: LiveDeployment) -> None:
    """Nobody else is there, and the prompt is long."""
    like = LikeRequests(small, count=FEWER_LIKE)
    reported = like.explain(like.send_one(**make_prompt(LARGE_BLOCKS)))

    check_cause(reported, "own_size")
    assert reported["cause"]["tokens_to"] > LARGE_BLOCKS * reported["cause"]["tokens_from"]


def test_cache_miss(small: LiveDeployment) -> None:
    """The prompt is as long as others, of which the prefix cache has all but the last block."""
    like = LikeRequests(small, count=FEWER_LIKE, **make_prompt(LARGE_BLOCKS // 2))
    reported = like.explain(like.send_one(**make_prompt(LARGE_BLOCKS // 2)))

    check_cause(reported, "cold_prefix_cache")
    assert reported["cause"]["hits_to"] < 0.1 < 0.5 < reported["cause"]["hits_from"]
