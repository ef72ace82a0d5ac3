# SPDX-License-Identifier: Apache-2.0
"""A discrete-event model of one vLLM engine: its scheduler's queue, budgets and steps. Pure.

Input: prompts from fleet_model.py, limits and step times of what is to be predicted. Output: when each
prompt got its first token, and its time in each of the engine's stages. tests/explain compares it with
vLLM's own Scheduler, and with queueing theory.

Running requests come first, in the order of their admission, then waiting ones, first come, first served.
A prompt is only admitted when those before it have all of their tokens: so at most one running prompt
is incomplete, the last one, and all others decode. That makes a step cost the same however many run.
Where the size of the KV cache is known, blocks are waited for and requests preempted (kv_memory.py).
Not modelled: priorities, speculative decoding, LoRA.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from ttft_otel.explain.whatif.engine_parts import (
    EngineLimits,
    QueuedPrompt,
    Step,
    StepLength,
    StepTimer,
)
from ttft_otel.explain.whatif.kv_memory import KvMemory

Schedule = Callable[[int, Callable[[int], None]], None]


class EngineModel:
    """One engine.

    peak_running, peak_tokens: the most requests, and KV tokens, at one time; peak_step: tokens of a step.
    memory: None where what requests need of the KV cache is not known: then there is always enough.
    blocked_us: that requests waited for it, all together.
    """

    def __init__(self, limits: EngineLimits, clock: StepTimer, schedule_event: Schedule) -> None:
        self.limits, self.clock, self._schedule_event = limits, clock, schedule_event
        self.waiting: deque[QueuedPrompt] = deque()
        is_known = limits.kv_tokens and not limits.shares_blocks
        self.memory = KvMemory(limits) if is_known else None
        self.running = self.decoding = self.kv_tokens = 0
        self.blocked_us = 0
        self._blocked_since = -1
        self.peak_running = self.peak_tokens = self.steps = self.busy_us = self.peak_step = 0
        self._incomplete: QueuedPrompt | None = None
        self._order = 0
        self._last_steps: list[
            tuple[int, int, QueuedPrompt]
        ] = []  # decodes, by the step that ends them
        self._leaving: list[tuple[int, int, QueuedPrompt]] = []  # likewise, until that step has run
        self._held: list[tuple[int, int, QueuedPrompt]] = []  # by the time at which they leave
        self._in_flight = 0
        self._host_free = self._device_free = 0
        self._shortest = 1 << 62  # of the steps so far
        self._asked_for = -1  # the time of the next look, -1 without one

    def add_prompt(self, prompt: QueuedPrompt, now: int) -> None:
        """A request reaches the engine core at `now`."""
        prompt.arrived = now
        self.waiting.append(prompt)
        # While a step runs the engine core waits for it, or has looked for the next one already.
        if not self._in_flight:
            self._look_at(max(now + self.clock.wake_us, self._host_free))

    def _look_at(self, when: int) -> None:
        if self._asked_for < 0 or when < self._asked_for:
            self._asked_for = when
            self._schedule_event(when, self._start_step)

    def _start_step(self, now: int) -> None:
        """schedule() and, if it finds work, the step."""
        if now != self._asked_for:  # a sooner look has replaced this one
            return
        self._asked_for = -1
        depth = 2 if self.limits.async_scheduling else 1
        if self._in_flight >= depth:
            return
        step = self._compose_step(now)
        if not step.tokens and not step.items:
            return
        self._in_flight += 1
        length = self.clock.measure_step(step)
        begun = max(now + length.lead, self._device_free)
        end = begun + length.encoder + length.forward + length.sample
        self._device_free = end
        self.busy_us += end - begun
        self._shortest = min(self._shortest, end - begun)
        for prompt, _ in step.parts:
            _add_times(prompt, step, length, begun)
        self._schedule_event(end, lambda then: self._finish_step(step, then, length.gap))
        if depth == 2 and self._in_flight < depth:
            self._host_free = now + length.lead
            self._look_at(self._host_free)

    def _compose_step(self, now: int) -> Step:
        self.steps += 1
        number = self.steps
        while self._last_steps and self._last_steps[0][0] < number:
            ending = heapq.heappop(self._last_steps)
            if ending[1] == ending[2].ticket:  # else it was preempted meanwhile
                heapq.heappush(self._leaving, ending)
                self._end_decoding(ending[2])
        left = self.limits.max_batched_tokens - self.decoding
        has_room = self.memory is None or self.memory.make_room(
            number, self._incomplete, left, self._preempt
        )
        step = Step(number, now, [], self.decoding, self.decoding)
        left = self.limits.max_batched_tokens - self.decoding
        if self._incomplete is not None and left > 0:
            left -= self._take_chunk(step, self._incomplete, left)
        # vLLM admits nobody in a step that has preempted somebody.
        if has_room:
            self._admit_waiting(step, left)
        self.peak_running = max(self.peak_running, self.running)
        self.kv_tokens += step.tokens
        self.peak_step = max(self.peak_step, step.tokens)
        self.peak_tokens = max(self.peak_tokens, self.kv_tokens)
        for prompt, _ in step.parts:
            prompt.step_tokens += step.tokens
        return step

    def _admit_waiting(self, step: Step, left: int) -> None:
        now = step.scheduled
        if self._blocked_since >= 0:
            self.blocked_us += (now - self._blocked_since) * len(self.waiting)
            self._blocked_since = -1
        while self.waiting and left > 0 and self.running < self.limits.max_num_seqs:
            prompt = self.waiting[0]
            if not self.limits.chunked and prompt.to_compute > left:
                break
            full = self.limits.max_items and step.items + prompt.items > self.limits.max_items
            if full and prompt.items and step.items:
                break
            if self.memory is not None and not self.memory.has_room(prompt):
                self._blocked_since = now
                break
            self.waiting.popleft()
            self.running += 1
            prompt.is_running = True
            if not prompt.chunks:
                prompt.scheduled, prompt.queue = now, now - prompt.arrived
            step.items += prompt.items
            self.kv_tokens += prompt.context
            if self.memory is not None:
                self.memory.admit(prompt)
            left -= self._take_chunk(step, prompt, left)

    def _take_chunk(self, step: Step, prompt: QueuedPrompt, left: int) -> int:
        taken = min(prompt.to_compute - prompt.computed, left)
        before = prompt.context + prompt.computed
        # Token k attends to k tokens: a trapezoid.
        step.pairs += taken * before + taken * (taken + 1) // 2
        step.parts.append((prompt, taken))
        step.tokens += taken
        prompt.computed += taken
        prompt.chunks += 1
        if self.memory is not None:
            self.memory.take_chunk(prompt)
        is_complete = prompt.computed >= prompt.to_compute
        self._incomplete = None if is_complete else prompt
        if is_complete:
            step.completed.append(prompt)
            self._begin_decoding(prompt, step.number)
        return taken

    def _begin_decoding(self, prompt: QueuedPrompt, number: int) -> None:
        prompt.first_step = number
        self.decoding += 1
        self._order += 1
        prompt.ticket = self._order
        if prompt.output_tokens:
            prompt.last_step = number + prompt.output_tokens - prompt.again - 1
            heapq.heappush(self._last_steps, (prompt.last_step, self._order, prompt))
        if self.memory is not None:
            self.memory.begin_decoding(prompt)

    def _end_decoding(self, prompt: QueuedPrompt) -> None:
        self.decoding -= 1
        if self.memory is not None:
            self.memory.end_decoding(prompt)

    def _preempt(self, prompt: QueuedPrompt, number: int) -> None:
        """Before step `number`: it loses its blocks, and is the next to be admitted."""
        if self.memory is not None:
            self.memory.release(prompt, number - 1)
        self.kv_tokens -= prompt.context + prompt.computed
        if prompt.ticket >= 0:
            self._end_decoding(prompt)
            self.kv_tokens -= number - 1 - prompt.first_step
            prompt.again += number - prompt.first_step
            prompt.ticket = -1
        if prompt is self._incomplete:
            self._incomplete = None
        prompt.computed = prompt.last_step = 0
        prompt.preemptions += 1
        prompt.is_running = False
        self.running -= 1
        self.waiting.appendleft(prompt)

    def _finish_step(self, step: Step, now: int, gap: int) -> None:
        """The step's tokens are sampled: first tokens go out, ended requests leave."""
        self._in_flight -= 1
        for prompt in step.completed:
            if prompt.first_token:  # it was preempted after that
                continue
            prompt.first_token = now
            if not prompt.output_tokens:
                self._order += 1
                heapq.heappush(self._held, (now + prompt.hold_us, self._order, prompt))
            if prompt.done is not None:
                prompt.done(prompt)
        for ended in (self._last_steps, self._leaving):
            while ended and ended[0][0] <= step.number:
                _, ticket, prompt = heapq.heappop(ended)
                if ticket != prompt.ticket:
                    continue
                if ended is self._last_steps:
                    self._end_decoding(prompt)
                self._release(prompt, step.number, now)
        # To the nearest step: an answer's end is seen a little later than its last step.
        while self._held and self._held[0][0] <= now + self._shortest // 2:
            self._end_held(heapq.heappop(self._held)[2], step.number, now)
        self._host_free = max(self._host_free, now + gap)
        self._look_at(self._host_free)

    def _end_held(self, prompt: QueuedPrompt, number: int, now: int) -> None:
        """The recorded time of an answer of unknown length is over, whatever its request is doing."""
        if not prompt.is_running:
            self.waiting.remove(prompt)
            prompt.decode_steps, prompt.last_token = prompt.again - 1, now
            if prompt.left is not None:
                prompt.left(now)
            return
        if prompt.ticket >= 0:
            self._end_decoding(prompt)
        self._release(prompt, number, now)

    def _release(self, prompt: QueuedPrompt, number: int, now: int) -> None:
        decoded = number - prompt.first_step if prompt.ticket >= 0 else -1
        if prompt is self._incomplete:
            self._incomplete = None
        if self.memory is not None:
            self.memory.release(prompt, number)
        prompt.decode_steps = prompt.again + decoded
        prompt.ticket, prompt.is_running = -1, False
        prompt.last_token = now
        self.running -= 1
        self.kv_tokens -= prompt.context + prompt.computed + max(decoded, 0)
        if prompt.left is not None:
            prompt.left(now)


def _add_times(prompt: QueuedPrompt, step: Step, length: StepLength, begun: int) -> None:
    """A step's length to the stages of a prompt in it, as breakdown.py divides a step."""
    if prompt.chunks == 1:
        prompt.dispatch = begun - step.scheduled
    else:
        prompt.stall += begun - prompt.chunk_end
    # The encoder's run is the whole step's, for everybody in it.
    prompt.encoder += length.encoder
    prompt.compute += length.forward
    prompt.chunk_end = begun + length.encoder + length.forward
    prompt.sample = length.sample
