# SPDX-License-Identifier: Apache-2.0
"""What a modelled engine works on: its limits, queued prompts, steps and how long they take. Pure.

engine_model.py runs the steps, kv_memory.py gives them blocks, step_fit.py says how long they take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

BLOCK_TOKENS: Final = 16  # of a KV block, where servers do not tell: vLLM's own default


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What vLLM's scheduler may put into a step.

    max_batched_tokens: tokens of a step. max_items: media items that a step encodes, 0 without a limit.
    chunked: a prompt may be computed in several steps. async_scheduling: the next step is composed
    while one runs. kv_tokens: tokens that the KV cache holds, 0 where that is not known; block_tokens: of
    one of its blocks; shares_blocks: requests share some, nobody knows how many: then all have enough.
    """

    max_num_seqs: int
    max_batched_tokens: int
    max_items: int = 0
    chunked: bool = True
    async_scheduling: bool = False
    kv_tokens: int = 0
    block_tokens: int = BLOCK_TOKENS
    shares_blocks: bool = False


@dataclass(slots=True)
class QueuedPrompt:
    """One request at one engine. Times are microseconds of the simulation.

    tokens: to compute, those in the prefix cache are not among them. context: those in the cache.
    items: media items to encode. output_tokens: that it generates; 0: it leaves `hold_us` after
    its first token, as recorded, and `decode_steps` tells how many steps it was in until then.
    done: called when its first token is there. left: called with the time at which its answer ends.
    again: tokens that it had generated when it was preempted, which are computed again like its prompt.
    blocks: of the KV cache that it holds before it decodes. ticket: of its decoding, -1 while it does not.
    last_step: that it decodes in, 0 where that is not known before.
    """

    tokens: int
    context: int = 0
    items: int = 0
    output_tokens: int = 1
    hold_us: int = 0
    done: Callable[[QueuedPrompt], None] | None = None
    left: Callable[[int], None] | None = None
    arrived: int = 0
    scheduled: int = 0
    computed: int = 0
    chunks: int = 0
    first_token: int = 0
    last_token: int = 0
    first_step: int = 0
    last_step: int = 0
    decode_steps: int = 0
    again: int = 0
    blocks: int = 0
    ticket: int = -1
    preemptions: int = 0
    is_running: bool = False
    queue: int = 0
    dispatch: int = 0
    encoder: int = 0
    compute: int = 0
    stall: int = 0
    sample: int = 0
    step_tokens: int = 0
    chunk_end: int = 0

    @property
    def to_compute(self) -> int:
        """Tokens to compute until the next one can be sampled."""
        return self.tokens + self.again


@dataclass(slots=True)
class Step:
    """One step of the engine.

    scheduled: when, in us. parts: prompts, and how many tokens of each. decodes: requests that generate one
    token. tokens: of both together. pairs: of tokens that attention compares. items: media items to encode.
    completed: prompts whose last part this is.
    """

    number: int
    scheduled: int
    parts: list[tuple[QueuedPrompt, int]]
    decodes: int
    tokens: int = 0
    pairs: int = 0
    items: int = 0
    completed: list[QueuedPrompt] = field(default_factory=list)


@dataclass(slots=True)
class StepLength:
    """How long the parts of a step take, microseconds, in this order; `gap` lies between two steps."""

    lead: int
    encoder: int
    forward: int
    sample: int
    gap: int


class StepTimer(Protocol):
    """Says how long steps take; step_time.StepTimes, or a test's."""

    wake_us: int  # from an arrival at an idle engine to its first schedule()

    def measure_step(self, step: Step) -> StepLength:
        """The length of a step that has been composed."""
        ...
