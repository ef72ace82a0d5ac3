# SPDX-License-Identifier: Apache-2.0
"""CPU time of a routing decision of the ttft policy, by part, for fleets of several sizes.

    python -m benchmarks.routing.decision_cost [--json FILE] [--tokenizer DIR]

Prompts of 8 192 tokens in blocks of 16, a third of them cached on some instance, four prompts waiting on
each. `decision` is lookup and score together, as the router does them. With a tokenizer also what
tokenizing costs: `tokenize` until the ids are there, `tokenize (loop)` of it on the event loop.
The least of many rounds, of processor time, in passes some seconds apart: what it costs when nothing
else runs. A virtual machine's neighbours make all of it half as much again for a second or two.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.figures import Figure, build_figure, report_figures
from ttft_otel.model.endpoints import COMPLETIONS_PATH
from ttft_otel.router.routing.policies.block_index import BlockHolders
from ttft_otel.router.routing.policies.policy_registry import LeastTtftPolicy
from ttft_otel.router.routing.policies.policy_state import PolicyOptions, PolicyState
from ttft_otel.router.routing.policies.prefill_model import PrefillLine, PrefillModels
from ttft_otel.router.routing.prompts.prompt_reader import LocalPromptReader
from ttft_otel.router.types import Decision, RoutingRequest, parse_instance_url
from ttft_otel.router.upstream.connection_pool import QueryClient
from ttft_otel.router.upstream.instance_pool import InstancePool

PROMPT_TOKENS, BLOCK_TOKENS = 8192, 16
# 1 000 is far beyond a usual fleet: it shows how the cost grows.
FLEET_SIZES = (2, 16, 128, 1000)
ANSWERS = 20  # in flight at each instance, most of them answers under way
# Fleet -> the most that a decision may cost, as a multiple of one by the original formula (trapezoid).
RATIO_GOALS = {128: 1.6}
PROMPTS_PER_PASS = 20
PASSES = 6


def build_routing_request(number: int, blocks: tuple[int, ...]) -> RoutingRequest:
    """A request with such a prompt."""
    return RoutingRequest(
        "mono",
        COMPLETIONS_PATH,
        "m",
        str(number),
        {},
        b"",
        prompt_tokens=PROMPT_TOKENS,
        block_keys=blocks,
    )


def measure_least_us(call: Callable[[], object]) -> float:
    """Microseconds of one call."""
    # Thread time: other processes of the machine do not enter; the least of 50 is undisturbed.
    return min(timeit.repeat(call, timer=time.thread_time, number=4, repeat=50)) / 4 * 1e6


def measure_decision(size: int) -> dict[str, float]:
    """A fleet of this size: lookup, that and score, the original formula, and the accounts of a request."""
    chance = random.Random(size)
    fleet = tuple(
        parse_instance_url(f"http://10.0.{position // 250}.{position % 250}", "mono")
        for position in range(size)
    )
    # The simulation's cost of a prefill, so that there is a line to predict with from the start.
    index, models = (
        BlockHolders(BLOCK_TOKENS),
        PrefillModels(PrefillLine(0.005, 40e-6, 1.3e-9, 1e-4)),
    )
    calibrated = PolicyState(index, models=models)
    # The same index and the same accounts: the two decisions differ in their score alone.
    trapezoid = PolicyState(index, PolicyOptions(ttft_model="trapezoid"), calibrated.pending)
    prompt = tuple(range(PROMPT_TOKENS // BLOCK_TOKENS))
    for position, each in enumerate(fleet):
        each.in_flight = ANSWERS
        # Lengths differ, so that the walk along the prompt ends at different places.
        index.add_blocks(each.url, prompt[: chance.randrange(len(prompt) // 3)])
        for n in range(4):
            # No block in common with the prompt that is decided on.
            other_prompt = tuple(chance.randrange(10**12) for _ in prompt)
            calibrated.record_sent(
                build_routing_request(4 * position + n, other_prompt), Decision(each, 0, ""), 0
            )
    request, calibrated_policy, trapezoid_policy = (
        # A number that no waiting request has.
        build_routing_request(-1, prompt),
        LeastTtftPolicy(calibrated),
        LeastTtftPolicy(trapezoid),
    )
    urls = [each.url for each in fleet]

    def record_request() -> None:
        calibrated.record_sent(request, Decision(fleet[0], 0, ""), 0)
        # Both ends at once: else requests would pile up from round to round.
        calibrated.record_left(request, 0)

    return {
        "lookup": measure_least_us(lambda: index.match_blocks(prompt, urls)),
        "decision": measure_least_us(
            lambda: calibrated_policy.choose_instance(request, fleet, 10, False)
        ),
        "decision, trapezoid": measure_least_us(
            lambda: trapezoid_policy.choose_instance(request, fleet, 10, False)
        ),
        "accounts": measure_least_us(record_request),
    }


async def measure_tokenization(tokenizer: str) -> dict[str, float]:
    """Tokenize a new prompt of about so many tokens, as the router does."""
    chance, wall_seconds, loop_seconds = random.Random(1), [], []
    # The tokenizer runs in a process of its own, which takes seconds to start: None until then.
    reader = LocalPromptReader(tokenizer, InstancePool({"mono": []}))
    async with QueryClient() as queries:
        await reader.start(queries)
        while (
            await reader.read_prompt(COMPLETIONS_PATH, "m", b'{"prompt": "a"}', BLOCK_TOKENS)
            is None
        ):
            await asyncio.sleep(0.1)
        for _ in range(PROMPTS_PER_PASS):
            # How many tokens a number is depends on the tokenizer: counted first, then cut to length.
            text = " ".join(str(chance.randrange(100, 1000)) for _ in range(PROMPT_TOKENS // 4))
            prompt = await reader.read_prompt(
                COMPLETIONS_PATH, "m", b'{"prompt": "%s"}' % text.encode(), BLOCK_TOKENS
            )
            assert prompt is not None
            text = text[: len(text) * PROMPT_TOKENS // prompt.tokens] + str(chance.random())
            body = b'{"prompt": "%s"}' % text.encode()
            # Two clocks: what a client waits for, and what keeps all other requests of the router waiting.
            started, loop_started = time.perf_counter(), time.thread_time()
            await reader.read_prompt(COMPLETIONS_PATH, "m", body, BLOCK_TOKENS)
            wall_seconds.append(time.perf_counter() - started)
            loop_seconds.append(time.thread_time() - loop_started)
        await reader.close()
    return {
        "tokenize": statistics.median(wall_seconds) * 1e6,
        "tokenize (loop)": statistics.median(loop_seconds) * 1e6,
    }


def main() -> int:
    """A line for each figure; --json writes them; 1 when the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokenizer", help="a folder; without it tokenizing is left out")
    options = parser.parse_args()
    figures: dict[str, Figure] = {}
    passes = [{size: measure_decision(size) for size in FLEET_SIZES} for _ in range(PASSES)]
    for size in FLEET_SIZES:
        figures.update(build_decision_figures([each[size] for each in passes], size))
    if options.tokenizer:
        for name, value in asyncio.run(measure_tokenization(options.tokenizer)).items():
            figures[f"us of {name}"] = build_figure([value], digits=1)
    return report_figures(figures, options.json)


def build_decision_figures(passes: Sequence[Mapping[str, float]], size: int) -> dict[str, Figure]:
    """The least of all passes for one size of fleet, after the ratio of two of them."""
    least_us = {name: min(each[name] for each in passes) for name in passes[0]}
    # Derived, because the policy looks up and scores in one call.
    least_us["score"] = least_us["decision"] - least_us["lookup"]
    ratio = least_us["decision"] / least_us["decision, trapezoid"]
    figures = {
        f"decision, times trapezoid's, {size} instances": build_figure(
            [ratio], RATIO_GOALS.get(size)
        )
    }
    for name, value in least_us.items():
        figures[f"us of {name}, {size} instances"] = build_figure([value], digits=1)
    return figures


if __name__ == "__main__":
    sys.exit(main())
