# SPDX-License-Identifier: Apache-2.0
"""An instance of fleet_simulation.py: the engine of ttft-otel whatif, a prefix cache and made step times."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import Final

from benchmarks.routing.mooncake_traces import CONTEXT_READ_S, PREFILL_COST, TRACE_BLOCK_TOKENS
from ttft_otel.explain.whatif.engine_model import (
    EngineLimits,
    EngineModel,
    QueuedPrompt,
    Schedule,
    Step,
    StepLength,
)
from ttft_otel.router import types
from ttft_otel.router.routing.policies.block_index import RecentBlocks
from ttft_otel.router.routing.policies.policy_state import US_PER_SECOND
from ttft_otel.router.routing.policies.prefill_model import compute_work

# Of vLLM on an H100: places, and tokens of a step.
LIMITS: Final = EngineLimits(max_num_seqs=1024, max_batched_tokens=8192)
ADAPTER_LOAD_S: Final = 0.1  # of a LoRA adapter into the GPU; the whole step waits


class SimulatedInstance:
    """One simulated instance; `speed` 1 is PREFILL_COST.

    cache: the blocks that it keeps. adapters: how many LoRA adapters it keeps loaded. noise: sigma of a
    log-normal factor on each step, which no policy sees. chance: draws it. schedule_event: of the simulation.
    """

    def __init__(
        self,
        instance: types.Instance,
        speed: float,
        cache: RecentBlocks,
        adapters: int,
        noise: float,
        chance: random.Random,
        schedule_event: Schedule,
    ) -> None:
        self.instance, self.speed, self.cache = instance, speed, cache
        self.engine = EngineModel(LIMITS, self.measure_step, 0, schedule_event)
        self.step_ends_us = 0
        self.prompts: dict[str, tuple[types.RoutingRequest, QueuedPrompt]] = {}
        self._noise, self._chance = noise, chance
        self._adapters, self._loading = RecentBlocks(adapters), 0

    @property
    def kv_tokens(self) -> int:
        """What its KV cache holds."""
        return self.cache.max_blocks * TRACE_BLOCK_TOKENS

    def add_request(
        self,
        request: types.RoutingRequest,
        output_tokens: int,
        now_us: int,
        on_first_token: Callable[[SimulatedInstance, types.RoutingRequest, QueuedPrompt], None],
        on_end: Callable[[types.RoutingRequest, QueuedPrompt], None],
    ) -> None:
        """A request arrives, and generates `output_tokens`."""

        def match_cache(prompt: QueuedPrompt) -> None:
            prompt.context = self.count_cached_tokens(request, ())
            prompt.tokens = request.prompt_tokens - prompt.context
            self._loading += len(self._adapters.record_use(list_adapters(request))[0])

        def report(prompt: QueuedPrompt) -> None:
            del self.prompts[request.request_id]
            on_first_token(self, request, prompt)

        prompt = QueuedPrompt(
            request.prompt_tokens, output_tokens=output_tokens, match=match_cache, done=report
        )
        prompt.left = lambda _: on_end(request, prompt)
        self.prompts[request.request_id] = request, prompt
        self.engine.add_prompt(prompt, now_us)

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

    def measure_step(self, step: Step) -> StepLength:
        """How long a step takes."""
        seconds = self.compute_steps_s(1, step.tokens, step.pairs, step.contexts)
        seconds += self._loading * ADAPTER_LOAD_S
        self._loading = 0
        seconds *= self._chance.lognormvariate(0, self._noise)  # median 1
        length_us = round(seconds * US_PER_SECOND)
        self.step_ends_us = step.scheduled + length_us
        return StepLength(0, 0, length_us, 0, 0)

    def compute_steps_s(self, steps: float, tokens: float, pairs: float, contexts: float) -> float:
        """Seconds of `steps`, without noise: tokens, pairs and contexts of all of them."""
        a, b, d, _ = PREFILL_COST
        return (a * steps + b * tokens + d * pairs + CONTEXT_READ_S * contexts) / self.speed

    def predict_ttft_s(self, request: types.RoutingRequest, now_us: int) -> float:
        """Seconds until the first token of a request that arrives now, without noise of later steps."""
        coming_blocks = set[int]()
        tokens = pairs = 0
        for waiting, prompt in self.prompts.values():
            cached = prompt.context + prompt.computed
            if not prompt.is_running:
                cached = self.count_cached_tokens(waiting, coming_blocks)
            # What waits there will be cached before this request's turn.
            coming_blocks.update(waiting.block_keys)
            work = compute_work(waiting.prompt_tokens, cached)
            tokens, pairs = tokens + work.tokens_to_compute, pairs + work.pairs
        own = compute_work(request.prompt_tokens, self.count_cached_tokens(request, coming_blocks))
        engine = self.engine
        room = max(LIMITS.max_batched_tokens - engine.decoding, 1)
        steps = max((tokens + own.tokens_to_compute) / room, 1.0)
        adapters = list_adapters(request)
        loads_s = (len(adapters) - self._adapters.match_blocks(adapters)) * ADAPTER_LOAD_S
        running_s = max(self.step_ends_us - now_us, 0) / US_PER_SECOND
        return (
            loads_s
            + running_s
            + self.compute_steps_s(
                steps,
                tokens + own.tokens_to_compute + steps * engine.decoding,
                pairs + own.pairs,
                steps * engine.kv_tokens,
            )
        )


def list_adapters(request: types.RoutingRequest) -> tuple[int, ...]:
    """The LoRA adapter of a request, if it names one; as in vLLM it stands in place of the model."""
    return (int(request.model),) if request.model.isdigit() else ()
