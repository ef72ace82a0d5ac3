# SPDX-License-Identifier: Apache-2.0
"""What the index computes from a real engine's KV events equals what that engine finds in its cache.

The server of `small` has a cache that is so small that prompts evict each other.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from time import monotonic
from typing import Any

import aiohttp
import pytest

from lab import local_deployment
from lab.local_servers import LocalServer
from tests.live.bench import LiveDeployment, make_parent_header, make_trace_id, read_metric
from tests.live.server_plans import BLOCK_TOKENS
from tests.live.test_routing import list_attribute_values
from ttft_otel.model.endpoints import COMPLETIONS_PATH
from ttft_otel.model.names import env_names, keys, metric_names, span_names
from ttft_otel.router.routing import prefixes
from ttft_otel.router.routing.policies.block_keys import compute_block_keys
from ttft_otel.router.routing.prefixes import PrefixSource
from ttft_otel.router.types import parse_instance_url
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.router.upstream.query_client import QueryClient

pytestmark = pytest.mark.timeout(900)

PROMPTS = 40
ASKED_PROMPTS = 48  # at most, until enough of them are answered in time
ANSWERED_PROMPTS = 7
SETTLE_S = 2.5  # workers write their numbers once a second


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


@pytest.fixture
def workers(small: LiveDeployment) -> Iterator[LocalServer]:
    """A router of two workers, whose index of KV events a third process keeps."""
    sink = {env_names.OTEL_EXPORTER_OTLP_ENDPOINT: small.fleet.get_url("receiver")}
    flags = ("--workers", "2", "--routing-logic", "prefix", "--prefix-index", "kv-events")
    command = local_deployment.build_router_command({"mono": [small.front_url]}, sink, *flags)
    with LocalServer(command) as router:
        yield router


def count_lookups(router: LocalServer, result: str = "") -> float:
    """Lookups that the workers have asked for, those with this result alone if one is given."""
    wanted = f'{{result="{result}"' if result else ""
    return sum(read_metric(router.url, f"{metric_names.ROUTER_INDEX_LOOKUPS}_total{wanted}"))


def count_stored(router: LocalServer) -> float:
    """Blocks that the index of the workers has been told of."""
    return sum(read_metric(router.url, f'{metric_names.ROUTER_KV_EVENTS}_total{{.*event="stored"'))


def store_prompt(small: LiveDeployment, router: LocalServer, asked: dict[str, Any]) -> None:
    """Send a prompt past the router, and wait until the router's index has heard of its blocks."""
    wanted = count_stored(router) + len(asked["extra"]["prompt"]) // BLOCK_TOKENS
    assert small.send_request(small.front_url, **asked).status == 200
    end = monotonic() + 30
    while count_stored(router) < wanted:  # workers are told once a second
        assert monotonic() < end
        time.sleep(0.1)


def test_workers_ask_one_index(small: LiveDeployment, workers: LocalServer) -> None:
    """Of prompts that no worker has sent they expect to be cached what the engine then finds in its cache."""
    chance = random.Random(time.time_ns())
    pairs: list[tuple[int | None, int]] = []
    asked: dict[str, Any] = {"path": COMPLETIONS_PATH, "max_tokens": 1}
    # The first time it may have heard of others only: it begins with what the engine has told before.
    asked["extra"] = {"prompt": [chance.randrange(10, 200) for _ in range(2 * BLOCK_TOKENS)]}
    store_prompt(small, workers, asked)
    while len(pairs) < ASKED_PROMPTS and count_lookups(workers, "answered") < ANSWERED_PROMPTS:
        tokens = [chance.randrange(10, 200) for _ in range((1 + len(pairs) % 4) * BLOCK_TOKENS + 5)]
        asked["extra"] = {"prompt": tokens}
        store_prompt(small, workers, asked)
        trace = make_trace_id()
        headers = make_parent_header(trace)
        assert small.send_request(workers.url, headers=headers, **asked).status == 200
        spans = small.wait_for_trace(
            trace, lambda found: sum(each["name"] == span_names.TTFT for each in found) == 2
        )
        expected = list_attribute_values(spans, "router.route", keys.ROUTE_CACHED_TOKENS)
        (found,) = list_attribute_values(spans, span_names.TTFT, keys.CACHED_TOKENS)
        # Nothing is expected where the lookup was late.
        pairs.append((json.loads(expected[0])[0] if expected else None, found))

    time.sleep(SETTLE_S)
    answered = count_lookups(workers, "answered")
    assert [found for _, found in pairs] == [
        (1 + number % 4) * BLOCK_TOKENS for number in range(len(pairs))
    ]
    # A lookup that is late on a busy machine is decided without the index.
    assert len([pair for pair in pairs if pair[0] != pair[1]]) <= len(pairs) - answered, pairs
    assert answered >= ANSWERED_PROMPTS
