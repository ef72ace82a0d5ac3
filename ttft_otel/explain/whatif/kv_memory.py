# SPDX-License-Identifier: Apache-2.0
"""KV blocks of one modelled engine: who holds how many, and who is preempted when a step has too few. Pure.

As in vLLM: a running request takes a block when its tokens reach one; where none is free the request that
was admitted last gives all of its own back, and is computed again. A waiting one needs blocks for its
whole prompt. Steps in which enough is free cost the same however many requests run.
Not modelled: blocks that several requests share; cached tokens count for each of them.
"""

from __future__ import annotations

from collections.abc import Callable

from ttft_otel.explain.whatif.engine_parts import EngineLimits, QueuedPrompt


class KvMemory:
    """The blocks of one engine. free: blocks that nobody holds.

    running: requests in the order of their admission; of all but an incomplete one a token is
    computed in each step. preemptions: so far.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self.block_tokens = max(limits.block_tokens, 1)
        # One of vLLM's blocks is a placeholder, which is given to nobody.
        self.free = max(limits.kv_tokens // self.block_tokens - 1, 0)
        self.running: list[QueuedPrompt] = []
        self.preemptions = 0
        self._starts = [0] * self.block_tokens  # decoding requests, by the steps that need a block

    def has_room(self, prompt: QueuedPrompt) -> bool:
        """Whether a waiting prompt finds blocks for all that is to be computed."""
        return self._count_blocks(prompt.context + prompt.to_compute) <= self.free

    def admit(self, prompt: QueuedPrompt) -> None:
        """A prompt begins to run; its chunks take their blocks."""
        self.running.append(prompt)

    def take_chunk(self, prompt: QueuedPrompt) -> None:
        """Blocks for what `prompt.computed` says by now."""
        needed = self._count_blocks(prompt.context + prompt.computed)
        self.free -= needed - prompt.blocks
        prompt.blocks = needed

    def begin_decoding(self, prompt: QueuedPrompt) -> None:
        """From the step after `prompt.first_step` on it has one token in each."""
        self._starts[self._find_start(prompt)] += 1

    def end_decoding(self, prompt: QueuedPrompt) -> None:
        """It is in no further step."""
        self._starts[self._find_start(prompt)] -= 1

    def release(self, prompt: QueuedPrompt, number: int) -> None:
        """An answer has ended in step `number`, or its request was preempted before the next one."""
        self.running.remove(prompt)
        self.free += self.count_held(prompt, number)
        prompt.blocks = 0

    def count_held(self, prompt: QueuedPrompt, number: int) -> int:
        """The blocks that it holds after step `number`."""
        if prompt.ticket < 0:
            return prompt.blocks
        decoded = min(number, prompt.last_step or number) - prompt.first_step
        return self._count_blocks(prompt.context + prompt.to_compute + decoded)

    def make_room(
        self,
        number: int,
        incomplete: QueuedPrompt | None,
        left: int,
        preempt: Callable[[QueuedPrompt, int], None],
    ) -> bool:
        """Give the running requests their blocks for step `number`; False where somebody was preempted.

        incomplete: the one with a chunk to come, `left` tokens at most; it takes them by itself.
        """
        starting, chunk = self._starts[number % self.block_tokens], 0
        if incomplete is not None:
            chunk = self._count_chunk(incomplete, left)
        if starting + chunk <= self.free:
            self.free -= starting
            return True
        at = 0
        while at < len(self.running):
            prompt = self.running[at]
            is_decoding = prompt.ticket >= 0
            needed = self._count_needed(prompt, number) if is_decoding else chunk
            while needed > self.free and prompt.is_running:
                self.preemptions += 1
                # Those that have their blocks for this step come before it; some others have taken
                # their last step, and leave when it ends.
                last = next(
                    each for each in reversed(self.running) if number <= (each.last_step or number)
                )
                preempt(last, number)
            if not prompt.is_running:
                break
            if is_decoding:
                self.free -= needed
            at += 1
        return False

    def _count_needed(self, prompt: QueuedPrompt, number: int) -> int:
        """Blocks that a decoding request needs for its token of step `number`."""
        if prompt.last_step and number > prompt.last_step:
            return 0
        return int(self._find_start(prompt) == number % self.block_tokens)

    def _count_chunk(self, prompt: QueuedPrompt, left: int) -> int:
        taken = min(prompt.to_compute - prompt.computed, max(left, 0))
        return self._count_blocks(prompt.context + prompt.computed + taken) - prompt.blocks

    def _find_start(self, prompt: QueuedPrompt) -> int:
        """The steps, modulo a block's tokens, in which a decoding request needs a block."""
        return (prompt.first_step + 1 - prompt.context - prompt.to_compute) % self.block_tokens

    def _count_blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)
