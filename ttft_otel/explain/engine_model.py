# SPDX-License-Identifier: Apache-2.0
"""A discrete-event model of one vLLM engine: its scheduler's queue, budgets and steps. Pure.

Input: prompts from fleet_model.py, limits and step times of what is to be predicted. Output: when each
prompt got its first token, and its time in each of the engine's stages. tests/explain compares it with
vLLM's own Scheduler, and with queueing theory.

Running requests come first, in the order of their admission, then waiting ones, first come, first served.
A prompt is only admitted when those before it have all of their tokens: so at most one running prompt
is incomplete, the last one, and all others decode. That makes a step cost the same however many run.
Not modelled: preemption (KV blocks are taken as sufficient), priorities, speculative decoding, LoRA.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

Schedule = Callable[[int, Callable[[int], None]], None]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What vLLM's scheduler may put into a step.

    max_batched_tokens: tokens of a step. max_items: media items that a step encodes, 0 without a limit.
    chunked: a prompt may be computed in several steps. async_scheduling: the next step is composed
    while one runs. kv_tokens: tokens that the KV cache holds, 0 where that is not known.
    """

    max_num_seqs: int
    max_batched_tokens: int
    max_items: int = 0
    chunked: bool = True
    async_scheduling: bool = False
    kv_tokens: int = 0


@dataclass(slots=True)
class QueuedPrompt:
    """One request at one engine. Times are microseconds of the simulation.

    tokens: to compute, those in the prefix cache are not among them. context: those in the cache.
    items: media items to encode. output_tokens: that it generates; 0: it leaves `hold_us` after
    its first token, as recorded, and `decode_steps` tells how many steps it was in until then.
    done: called when its first token is there. left: called with the time at which its answer ends.
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
    first_step: int = 0
    decode_steps: int = 0
    queue: int = 0
    dispatch: int = 0
    encoder: int = 0
    compute: int = 0
    stall: int = 0
    sample: int = 0
    step_tokens: int = 0
    chunk_end: int = 0


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


class EngineModel:
    """One engine.

    peak_running, peak_tokens: the most requests, and KV tokens, at one time; peak_step: tokens of a step.
    """

    def __init__(self, limits: EngineLimits, clock: StepTimer, schedule_event: Schedule) -> None:
        self.limits, self.clock, self._schedule_event = limits, clock, schedule_event
        self.waiting: deque[QueuedPrompt] = deque()
        self.running = self.decoding = self.kv_tokens = 0
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
            heapq.heappush(self._leaving, heapq.heappop(self._last_steps))
            self.decoding -= 1
        step = Step(number, now, [], self.decoding, self.decoding)
        left = self.limits.max_batched_tokens - self.decoding
        if self._incomplete is not None and left > 0:
            left -= self._take_chunk(step, self._incomplete, left)
        while self.waiting and left > 0 and self.running < self.limits.max_num_seqs:
            prompt = self.waiting[0]
            if not self.limits.chunked and prompt.tokens > left:
                break
            full = self.limits.max_items and step.items + prompt.items > self.limits.max_items
            if full and prompt.items and step.items:
                break
            self.waiting.popleft()
            self.running += 1
            prompt.scheduled, prompt.queue = now, now - prompt.arrived
            step.items += prompt.items
            self.kv_tokens += prompt.context
            left -= self._take_chunk(step, prompt, left)
        self.peak_running = max(self.peak_running, self.running)
        self.kv_tokens += step.tokens
        self.peak_step = max(self.peak_step, step.tokens)
        self.peak_tokens = max(self.peak_tokens, self.kv_tokens)
        for prompt, _ in step.parts:
            prompt.step_tokens += step.tokens
        return step

    def _take_chunk(self, step: Step, prompt: QueuedPrompt, left: int) -> int:
        taken = min(prompt.tokens - prompt.computed, left)
        before = prompt.context + prompt.computed
        # Token k attends to k tokens: a trapezoid.
        step.pairs += taken * before + taken * (taken + 1) // 2
        step.parts.append((prompt, taken))
        step.tokens += taken
        prompt.computed += taken
        prompt.chunks += 1
        is_complete = prompt.computed >= prompt.tokens
        self._incomplete = None if is_complete else prompt
        if is_complete:
            step.completed.append(prompt)
            self._begin_decoding(prompt, step.number)
        return taken

    def _begin_decoding(self, prompt: QueuedPrompt, number: int) -> None:
        prompt.first_step = number
        self.decoding += 1
        self._order += 1
        if prompt.output_tokens:
            last = number + prompt.output_tokens - 1
            heapq.heappush(self._last_steps, (last, self._order, prompt))

    def _finish_step(self, step: Step, now: int, gap: int) -> None:
        """The step's tokens are sampled: first tokens go out, ended requests leave."""
        self._in_flight -= 1
        for prompt in step.completed:
            prompt.first_token = now
            if not prompt.output_tokens:
                self._order += 1
                heapq.heappush(self._held, (now + prompt.hold_us, self._order, prompt))
            if prompt.done is not None:
                prompt.done(prompt)
        for ended in (self._last_steps, self._leaving):
            while ended and ended[0][0] <= step.number:
                self.decoding -= ended is self._last_steps
                self._release(heapq.heappop(ended)[2], step.number, now)
        # To the nearest step: an answer's end is seen a little later than its last step.
        while self._held and self._held[0][0] <= now + self._shortest // 2:
            self.decoding -= 1
            self._release(heapq.heappop(self._held)[2], step.number, now)
        self._host_free = max(self._host_free, now + gap)
        self._look_at(self._host_free)

    def _release(self, prompt: QueuedPrompt, number: int, now: int) -> None:
        prompt.decode_steps = number - prompt.first_step
        self.running -= 1
        self.kv_tokens -= prompt.context + prompt.tokens + prompt.decode_steps
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
