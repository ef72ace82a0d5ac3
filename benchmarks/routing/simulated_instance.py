# SPDX-License-Identifier: Apache-2.0
"""An instance of fleet_simulation.py: its queue, its cache, and what a prefill takes there."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from benchmarks.routing.mooncake_traces import PREFILL_COST, TRACE_BLOCK_TOKENS
from ttft_otel.router import types
from ttft_otel.router.routing.policies.block_index import RecentBlocks
from ttft_otel.router.routing.policies.prefill_model import compute_work


@dataclass(slots=True)
class SimulatedInstance:
    """One simulated instance; `speed` 1 is PREFILL_COST."""

    instance: types.Instance
    speed: float
    cache: RecentBlocks
    waiting: deque[types.RoutingRequest] = field(default_factory=deque)
    busy: float = 0.0
    free: bool = True
    running: types.RoutingRequest | None = None
    prefill_ends_us: int = 0

    def count_cached_tokens(
        self, request: types.RoutingRequest, coming_blocks: Collection[int]
    ) -> int:
        """Tokens that it need not compute, if it gets these blocks before."""
        depth, blocks = self.cache.match_blocks(request.block_keys), request.block_keys
        # Prompts that wait there will be cached by then, as the real server computes them in order.
        while depth < len(blocks) and blocks[depth] in coming_blocks:
            depth += 1
        # vLLM computes at least the last token, for its logits: the block with it is never a hit.
        return min(depth, (request.prompt_tokens - 1) // TRACE_BLOCK_TOKENS) * TRACE_BLOCK_TOKENS

    def compute_prefill_s(self, request: types.RoutingRequest, cached: int) -> float:
        """What the prefill takes, without noise; `cached` of its tokens are there."""
        return (
            PREFILL_COST.predict_seconds(compute_work(request.prompt_tokens, cached)) / self.speed
        )
