# SPDX-License-Identifier: Apache-2.0
"""A prompt reader and a prefix source with scripted results and delays, for tests."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ttft_otel.router.routing.policies.block_index import SentHistory
from ttft_otel.router.routing.policies.policy_state import PolicyOptions, PolicyState
from ttft_otel.router.routing.policies.prefill_model import compute_work
from ttft_otel.router.routing.prompts.prompt_parts import Prompt
from ttft_otel.router.routing.routing_service import RoutingService
from ttft_otel.router.upstream.connection_pool import QueryClient
from ttft_otel.router.upstream.instance_pool import InstancePool

BLOCK_TOKENS = 16


def teach_speed(state: PolicyState, url: str, token_s: float = 1e-3) -> None:
    """Let a policy have seen prefills there that took `token_s` seconds a token."""
    for tokens in range(100, 2100, 100):
        state.models.add_sample("tiny", url, compute_work(tokens, 0), tokens * token_s)


class ScriptedReader:
    """Takes the prompt's length from the key `tokens` of the body, and its block keys from `from`.

    The key `items` has the placeholder tokens of each media part. delay_s: seconds per prompt.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.counts: Counter[str] = Counter()

    async def start(self, queries: QueryClient) -> None:
        """Nothing to load."""

    async def close(self) -> None:
        """Nothing to stop."""

    async def read_prompt(
        self, path: str, model: str, body: bytes, block_size: int
    ) -> Prompt | None:
        """The prompt that `body` describes; None without the key `tokens`."""
        await asyncio.sleep(self.delay_s)
        try:
            fields = json.loads(body)
        except ValueError:
            fields = {}
        if "tokens" not in fields:
            self.counts["failed-unknown"] += 1
            return None
        self.counts["read"] += 1
        tokens, start = fields["tokens"], fields.get("from", 1) * 1_000_000
        items = tuple(fields.get("items", ()))
        blocks = tuple(range(start, start + tokens // block_size))
        return Prompt(tokens=tokens, block_keys=blocks, item_tokens=items)


class ScriptedIndex(SentHistory):
    """Finds `cached_by_url`; None: what was sent."""

    cached_by_url: dict[str, int] | None = None

    def match_blocks(self, block_keys: Sequence[int], urls: Sequence[str]) -> list[int]:
        """The scripted result in blocks."""
        if self.cached_by_url is None:
            return super().match_blocks(block_keys, urls)
        return [self.cached_by_url.get(url, 0) // BLOCK_TOKENS for url in urls]


class ScriptedSource:
    """A source with a ScriptedIndex."""

    def __init__(self, cached_by_url: dict[str, int] | None = None) -> None:
        self.index = ScriptedIndex(BLOCK_TOKENS, 10_000)
        self.index.cached_by_url = cached_by_url
        self.sync_count = 0

    async def start(self, queries: QueryClient, pool: InstancePool) -> None:
        """Do nothing: there is no instance to ask."""

    async def close(self) -> None:
        """Do nothing."""

    def sync_instances(self) -> None:
        """Count the call."""
        self.sync_count += 1

    def describe_instances(self) -> dict[str, Any]:
        """Nothing is known of instances."""
        return {}


def build_routing_factory(
    policy_name: str = "ttft",
    reader: ScriptedReader | None = None,
    source: ScriptedSource | None = None,
    encoders: str = "",
    **options: Any,
) -> Callable[[InstancePool], RoutingService]:
    """A factory of routing services for `fake_instances.run_router`.

    options: fields of PolicyOptions. encoders: policy of the encode leg.
    """

    def build_routing(fleet: InstancePool) -> RoutingService:
        policy_options = PolicyOptions(**options)
        knowledge = (reader or ScriptedReader(), source or ScriptedSource())
        return RoutingService(
            fleet, policy_name, policy_options, *knowledge, "round_robin", encoders
        )

    return build_routing
