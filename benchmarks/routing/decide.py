# SPDX-License-Identifier: Apache-2.0
"""What a decision costs: microseconds of the ttft policy by part, for fleets of several sizes, on stdout.

    python benchmarks/routing/decide.py [--json FILE] [--tokenizer DIR]

Prompts of 8 192 tokens in blocks of 16, a third of them cached on some instance, four prompts waiting on
each. `decision` is lookup and score together, as the router does them. With a tokenizer also what
tokenizing costs: `tokenize` until the ids are there, `tokenize (loop)` of it on the event loop.
The least of many rounds, of processor time, in passes some seconds apart: what it costs when nothing
else runs. A virtual machine's neighbours make all of it half as much again for a second or two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from ttft_otel.router.choose import Asked, Choice, instance
from ttft_otel.router.fleet import Fleet
from ttft_otel.router.policies.index import Holders
from ttft_otel.router.policies.model import Line, Models
from ttft_otel.router.policies.state import Options, State
from ttft_otel.router.policies.ttft import Ttft
from ttft_otel.router.prompts.local import Local

TOKENS, SIZE = 8192, 16
SIZES = (2, 16, 128, 1000)
GOAL = {("decision", 128): 100.0}
PROMPTS = 20
PASSES = 6


def asked(number: int, blocks: tuple[int, ...]) -> Asked:
    """A request with such a prompt."""
    return Asked("mono", "/v1/completions", "m", str(number), {}, b"", tokens=TOKENS, blocks=blocks)


def best(call: Callable[[], object]) -> float:
    """Microseconds of one call."""
    return min(timeit.repeat(call, timer=time.thread_time, number=4, repeat=50)) / 4 * 1e6


def decide(size: int) -> dict[str, float]:
    """A fleet of this size: lookup, that and score, the original formula, and the accounts of a request."""
    chance = random.Random(size)
    fleet = tuple(instance(f"http://10.0.{at // 250}.{at % 250}", "mono") for at in range(size))
    index, models = Holders(SIZE), Models(Line(0.005, 40e-6, 1.3e-9))
    calibrated = State(index, models=models)
    trapezoid = State(index, Options(score="trapezoid"), calibrated.pending)
    prompt = tuple(range(TOKENS // SIZE))
    for at, each in enumerate(fleet):
        index.add(each.url, prompt[: chance.randrange(len(prompt) // 3)])
        for n in range(4):
            other = tuple(chance.randrange(10**12) for _ in prompt)
            calibrated.sent(asked(4 * at + n, other), Choice(each, 0, ""), 0)
    request, ours, original = asked(-1, prompt), Ttft(calibrated), Ttft(trapezoid)
    urls = [each.url for each in fleet]

    def account() -> None:
        calibrated.sent(request, Choice(fleet[0], 0, ""), 0)
        calibrated.left(request, 0)

    return {
        "lookup": best(lambda: index.match(prompt, urls)),
        "decision": best(lambda: ours.choose(request, fleet, 10, False)),
        "decision, trapezoid": best(lambda: original.choose(request, fleet, 10, False)),
        "accounts": best(account),
    }


async def tokenize(tokenizer: str) -> dict[str, float]:
    """A prompt of about so many tokens that nobody has seen, read as the router does."""
    chance, spans, loops = random.Random(1), [], []
    reader = Local(tokenizer, Fleet({"mono": []}))
    async with aiohttp.ClientSession() as session:
        await reader.start(session)
        while await reader.read("/v1/completions", "m", b'{"prompt": "a"}', SIZE) is None:
            await asyncio.sleep(0.1)
        for _ in range(PROMPTS):
            text = " ".join(str(chance.randrange(100, 1000)) for _ in range(TOKENS // 4))
            prompt = await reader.read(
                "/v1/completions", "m", b'{"prompt": "%s"}' % text.encode(), SIZE
            )
            assert prompt is not None
            text = text[: len(text) * TOKENS // prompt.tokens] + str(chance.random())
            body = b'{"prompt": "%s"}' % text.encode()
            wall, own = time.perf_counter(), time.thread_time()
            await reader.read("/v1/completions", "m", body, SIZE)
            spans.append(time.perf_counter() - wall)
            loops.append(time.thread_time() - own)
        await reader.close()
    return {
        "tokenize": statistics.median(spans) * 1e6,
        "tokenize (loop)": statistics.median(loops) * 1e6,
    }


def main() -> None:
    """A line for each size of fleet; --json writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokenizer", help="a folder; without it tokenizing is left out")
    options = parser.parse_args()
    figures: dict[str, dict[str, Any]] = {}
    passes = [{size: decide(size) for size in SIZES} for _ in range(PASSES)]
    for size in SIZES:
        every = [each[size] for each in passes]
        found = {name: min(each[name] for each in every) for name in every[0]}
        found["score"] = found["decision"] - found["lookup"]
        sys.stdout.write(
            f"{size:5} " + "  ".join(f"{n} {us:.1f}" for n, us in found.items()) + "\n"
        )
        for name, value in found.items():
            goal = GOAL.get((name, size))
            met = None if goal is None else value <= goal
            figure = {"value": round(value, 1), "goal": goal, "met": met}
            figures[f"us of {name}, {size} instances"] = figure
    if options.tokenizer:
        for name, value in asyncio.run(tokenize(options.tokenizer)).items():
            sys.stdout.write(f"{name} {value:.0f}\n")
            figures[f"us of {name}"] = {"value": round(value, 1), "goal": None, "met": None}
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
