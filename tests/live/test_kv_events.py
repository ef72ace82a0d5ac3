# SPDX-License-Identifier: Apache-2.0
"""What the index computes from a real engine's KV events equals what that engine finds in its cache.

The server of `small` has a cache that is so small that prompts evict each other.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from time import monotonic
from typing import Any

import aiohttp
import pytest

from tests.live.bench import LiveDeployment
from tests.live.conftest import BLOCK_TOKENS
from ttft_otel.router.routing import prefixes
from ttft_otel.router.routing.policies.block_index import compute_block_keys
from ttft_otel.router.routing.prefixes import PrefixSource
from ttft_otel.router.types import parse_instance_url
from ttft_otel.router.upstream.connection_pool import QueryClient
from ttft_otel.router.upstream.instance_pool import InstancePool

pytestmark = pytest.mark.timeout(900)

PROMPTS = 40


class CacheComparer:
    """Asks the server and the index how much of a prompt is cached."""

    def __init__(self, url: str, session: aiohttp.ClientSession, source: PrefixSource) -> None:
        self.url, self.session, self.source = url, session, source

    def predict_cached_tokens(self, ids: list[int]) -> int:
        """Tokens of a prompt that the index expects to be cached; the engine always computes the last one."""
        depth = self.source.index.match_blocks(compute_block_keys(ids, BLOCK_TOKENS), [self.url])[0]
        return min(depth, (len(ids) - 1) // BLOCK_TOKENS) * BLOCK_TOKENS

    async def read_cached_tokens(self, ids: list[int]) -> int:
        """Tokens of a prompt that the engine finds in its cache."""
        body = {"model": "tiny", "prompt": ids, "max_tokens": 1, "return_token_ids": True}
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            answer: dict[str, Any] = await response.json()
        assert answer["choices"][0]["prompt_token_ids"] == ids
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def wait_until_stored(self, ids: list[int]) -> None:
        """Wait until the engine has published all blocks of this prompt."""
        end = monotonic() + 30
        while (
            self.source.index.match_blocks(compute_block_keys(ids, BLOCK_TOKENS), [self.url])[0]
            < len(ids) // BLOCK_TOKENS
        ):
            assert monotonic() < end, self.source.describe_instances()
            await asyncio.sleep(0.02)

    def count_feed_events(self) -> dict[str, int]:
        """Counts of the feed's events."""
        found: dict[str, int] = self.source.describe_instances()[self.url]["counts"]
        return found


def generate_prompts(chance: random.Random) -> Iterator[list[int]]:
    """Prompts with common beginnings, which end at a block's boundary or not."""
    before: list[list[int]] = [[]]
    for _ in range(PROMPTS):
        shared = chance.choice(before)
        shared = shared[: chance.randrange(len(shared) // BLOCK_TOKENS + 1) * BLOCK_TOKENS]
        more = chance.choice(
            [1, 5, BLOCK_TOKENS, 3 * BLOCK_TOKENS, 4 * BLOCK_TOKENS - 1, 7 * BLOCK_TOKENS + 40]
        )
        ids = [*shared, *(chance.randrange(10, 200) for _ in range(more))]
        before.append(ids)
        yield ids
        if chance.random() < 0.3:
            yield ids


async def compare_prompts(url: str) -> tuple[list[tuple[int, int]], dict[str, int]]:
    """For each prompt the index's expectation and the engine's count; and the counts of the feed's events."""
    chance = random.Random(7)
    fleet = InstancePool({"mono": [parse_instance_url(url, "mono")]})
    async with aiohttp.ClientSession() as session, QueryClient() as queries:
        source = prefixes.build_source("kv-events")
        await source.start(queries, fleet)
        try:
            asker = CacheComparer(url, session, source)
            pairs = []
            for ids in generate_prompts(chance):
                expected = asker.predict_cached_tokens(ids)
                both = await asyncio.gather(
                    *(asker.read_cached_tokens(ids) for _ in range(chance.choice([1, 2])))
                )
                pairs.append((expected, both[0]))
                await asker.wait_until_stored(ids)
            late = prefixes.build_source("kv-events")
            await late.start(queries, fleet)
            second = CacheComparer(url, session, late)
            await second.wait_until_stored(ids)
            assert (
                late.describe_instances()[url]["blocks"]
                == source.describe_instances()[url]["blocks"]
            )
            await late.close()
            async with session.post(f"{url}/reset_prefix_cache") as response:
                assert response.status == 200
            await asker.read_cached_tokens([11])  # an engine tells with its next step
            end = monotonic() + 30
            while asker.predict_cached_tokens(ids):
                assert monotonic() < end
                await asyncio.sleep(0.02)
            pairs.append((asker.predict_cached_tokens(ids), await asker.read_cached_tokens(ids)))
            return pairs, asker.count_feed_events()
        finally:
            await source.close()


def test_index_is_the_engines_cache(small: LiveDeployment) -> None:
    """For prompts with common beginnings, repeated, concurrent or evicted, both count the same tokens."""
    pairs, counts = asyncio.run(compare_prompts(small.front_url))

    assert [pair for pair in pairs if pair[0] != pair[1]] == []
    assert sum(expected > 0 for expected, _ in pairs) > 10
    assert counts["removed"] > 10 and counts["cleared"] == 1
    assert not {"gaps", "lost", "malformed", "orphans", "restarts"} & counts.keys()
