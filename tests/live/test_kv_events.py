# SPDX-License-Identifier: Apache-2.0
"""What the index finds in a real engine's KV events is what that engine then finds in its cache.

One server of its own, whose cache is so small that prompts push each other out.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from time import monotonic
from typing import Any

import aiohttp
import pytest

from tests.live.bench import Bench
from tests.live.conftest import NEWER, Deck, deployment
from tests.live.test_alone import alone
from ttft_otel.router import prefixes
from ttft_otel.router.choose import instance
from ttft_otel.router.fleet import Fleet
from ttft_otel.router.policies.blocks import numbers
from ttft_otel.router.prefixes import Source

pytestmark = pytest.mark.timeout(900)

BLOCK = 128  # tokens of a KV block on CPU
BLOCKS = 72  # of them is one for nothing; the longest prompt takes 64
PROMPTS = 40


@pytest.fixture(scope="module")
def small(
    deck: Deck, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Bench]:
    """A server that publishes KV events and whose cache may be reset; it has the second core."""
    folder = tmp_path_factory.mktemp("kv")
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/replay",
        "topic": "kv",
    }
    extra = ("--kv-events-config", json.dumps(config), "--enable-prompt-tokens-details")
    more = ("--num-gpu-blocks-override", str(BLOCKS))
    wanted = any(deployment(item) == "newer" for item in request.session.items)
    env, beside = {"VLLM_SERVER_DEV_MODE": "1"}, NEWER if wanted else ""
    with alone(deck, folder, (*extra, *more), env=env, core=1, beside=beside) as bench:
        yield bench


class Asker:
    """Asks the server and compares."""

    def __init__(self, url: str, session: aiohttp.ClientSession, source: Source) -> None:
        self.url, self.session, self.source = url, session, source

    def found(self, ids: list[int]) -> int:
        """Tokens of a prompt that the index expects to be cached; the last is computed always."""
        depth = self.source.index.match(numbers(ids, BLOCK), [self.url])[0]
        return min(depth, (len(ids) - 1) // BLOCK) * BLOCK

    async def ask(self, ids: list[int]) -> int:
        """Tokens of a prompt that the engine finds cached."""
        body = {"model": "tiny", "prompt": ids, "max_tokens": 1, "return_token_ids": True}
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            answer: dict[str, Any] = await response.json()
        assert answer["choices"][0]["prompt_token_ids"] == ids
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def stored(self, ids: list[int]) -> None:
        """Wait until the engine has told of all of this prompt."""
        end = monotonic() + 30
        while self.source.index.match(numbers(ids, BLOCK), [self.url])[0] < len(ids) // BLOCK:
            assert monotonic() < end, self.source.status()
            await asyncio.sleep(0.02)

    def counts(self) -> dict[str, int]:
        """What happened to the feed."""
        found: dict[str, int] = self.source.status()[self.url]["counts"]
        return found


def prompts(chance: random.Random) -> Iterator[list[int]]:
    """Prompts that share beginnings, of whole blocks or not."""
    before: list[list[int]] = [[]]
    for _ in range(PROMPTS):
        shared = chance.choice(before)
        shared = shared[: chance.randrange(len(shared) // BLOCK + 1) * BLOCK]
        more = chance.choice([1, 5, BLOCK, 3 * BLOCK, 4 * BLOCK - 1, 7 * BLOCK + 40])
        ids = [*shared, *(chance.randrange(10, 200) for _ in range(more))]
        before.append(ids)
        yield ids
        if chance.random() < 0.3:
            yield ids


async def compared(url: str) -> tuple[list[tuple[int, int]], dict[str, int]]:
    """What the index expected and the engine found, for each prompt; what came of the feed."""
    chance = random.Random(7)
    fleet = Fleet({"mono": [instance(url, "mono")]})
    async with aiohttp.ClientSession() as session:
        source = prefixes.source("kv-events")
        await source.start(session, fleet)
        try:
            asker = Asker(url, session, source)
            pairs = []
            for ids in prompts(chance):
                expected = asker.found(ids)
                both = await asyncio.gather(*(asker.ask(ids) for _ in range(chance.choice([1, 2]))))
                pairs.append((expected, both[0]))
                await asker.stored(ids)
            late = prefixes.source("kv-events")
            await late.start(session, fleet)
            second = Asker(url, session, late)
            await second.stored(ids)
            assert late.status()[url]["blocks"] == source.status()[url]["blocks"]
            await late.close()
            async with session.post(f"{url}/reset_prefix_cache") as response:
                assert response.status == 200
            await asker.ask([11])  # an engine tells with its next step
            end = monotonic() + 30
            while asker.found(ids):
                assert monotonic() < end
                await asyncio.sleep(0.02)
            pairs.append((asker.found(ids), await asker.ask(ids)))
            return pairs, asker.counts()
        finally:
            await source.close()


def test_index_is_the_engines_cache(small: Bench) -> None:
    """For prompts that share beginnings, repeat, run twice at once and push others out: the same tokens."""
    pairs, counts = asyncio.run(compared(small.front))

    assert [pair for pair in pairs if pair[0] != pair[1]] == []
    assert sum(expected > 0 for expected, _ in pairs) > 10
    assert counts["removed"] > 10 and counts["cleared"] == 1
    assert not {"gaps", "lost", "malformed", "orphans", "restarts"} & counts.keys()
