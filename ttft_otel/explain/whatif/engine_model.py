# SPDX-License-Identifier: Apache-2.0
"""Discrete-event models of one vLLM engine, its scheduler's queue, budgets and steps, and of a fleet. Pure.

Input: recorded requests, limits and step times of what is to be predicted, from what_if.py. Output: the
stages that each request would have, of its engine and of the whole, behind the router's own policies. What
happens outside of the engines (receive, preprocess, hops, output, egress) takes as long as it did.
tests/explain compares the engine with vLLM's own Scheduler, and with queueing theory.

Running requests come first, in the order of their admission, then waiting ones, first come, first served.
A prompt is only admitted when those before it have all of their tokens: so at most one running prompt
is incomplete, the last one, and all others decode. That makes a step cost the same however many run.
Where the size of the KV cache is known, blocks are waited for and requests preempted (KvMemory).
Not modelled: priorities, speculative decoding, LoRA.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol, TypeAlias

from ttft_otel.explain.whatif.replay_facts import MODELLED_STAGES, EngineVisit, ReplayRequest
from ttft_otel.model.endpoints import COMPLETIONS_PATH
from ttft_otel.router import types
from ttft_otel.router.routing.policies.block_index import BlockHolders
from ttft_otel.router.routing.policies.policy_registry import POLICIES
from ttft_otel.router.routing.policies.policy_state import US_PER_SECOND, PolicyState

# Blocks where it is not known how many there are, or how many requests share.
UNLIMITED: Final = 1 << 62
BLOCK_TOKENS: Final = 16  # of a KV block, where servers do not say: vLLM's own default
# They decide by what prompts share, or by sessions, which traces do not show.
BLIND_POLICIES: Final = ("session", "prefix", "kvaware")
MODEL_NAME: Final = "model"
# Limits and step times by the name of an engine: that of the recorded instance; "+1", "+2" of those added.
PlannedEngines: TypeAlias = "Mapping[str, tuple[EngineLimits, StepCosts]]"
# Of the recorded engine's name, a key, a prompt and a moment: the number of the engine that gets it.
Chooser: TypeAlias = "Callable[[str, str, QueuedPrompt, int], int]"


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What vLLM's scheduler may put into a step."""

    max_num_seqs: int
    max_batched_tokens: int  #: tokens of a step
    max_items: int = 0  #: media items that a step encodes, 0 without a limit
    chunked: bool = True  #: a prompt may be computed in several steps
    async_scheduling: bool = False  #: the next step is composed while one runs
    kv_tokens: int = 0  #: tokens that the KV cache takes, 0 where that is not known
    block_tokens: int = BLOCK_TOKENS  #: of one of its blocks
    shares_blocks: bool = False  #: requests share some, nobody knows how many: then all have enough


@dataclass(slots=True, eq=False)
class QueuedPrompt:
    """One request at one engine. Times are microseconds of the simulation."""

    tokens: int  #: to compute, without those in the prefix cache
    context: int = 0  #: tokens in the prefix cache
    items: int = 0  #: media items to encode
    #: That it generates; 0: it leaves `answer_us` after its first token, as recorded.
    output_tokens: int = 1
    answer_us: int = 0
    #: Called when it could be admitted, to say what is in the prefix cache by then.
    match: Callable[[QueuedPrompt], None] | None = None
    done: Callable[[QueuedPrompt], None] | None = None  #: called when its first token is there
    left: Callable[[int], None] | None = None  #: called with the time at which its answer ends
    arrived: int = 0
    scheduled: int = 0
    computed: int = 0
    chunks: int = 0
    first_token: int = 0
    last_token: int = 0
    first_step: int = 0
    last_step: int = 0  #: that it decodes in, 0 where that is not known before
    decode_steps: int = 0  #: in which it has been when it leaves
    #: Tokens generated before a preemption, which are computed again like its prompt.
    again: int = 0
    blocks: int = 0  #: of the KV cache that it has before it decodes
    ticket: int = -1  #: of its decoding, -1 while it does not
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
    chunk_step: int = 0

    @property
    def to_compute(self) -> int:
        """Tokens to compute until the next one can be sampled."""
        return self.tokens + self.again


@dataclass(slots=True)
class Step:
    number: int
    scheduled: int  #: when, in us
    parts: list[tuple[QueuedPrompt, int]]  #: prompts, and how many tokens of each
    decodes: int  #: requests that generate one token
    tokens: int = 0  #: of both together
    pairs: int = 0  #: of tokens that attention compares
    contexts: int = 0  #: tokens that its decodes read
    items: int = 0  #: media items to encode
    completed: list[QueuedPrompt] = field(default_factory=list)  #: prompts whose last part this is


@dataclass(slots=True)
class StepLength:
    """How long the parts of a step take, microseconds, in this order; `gap` lies between two steps."""

    lead: int
    encoder: int
    forward: int
    sample: int
    gap: int


class StepCosts(Protocol):
    """How long an engine's steps take, and how soon after an arrival one begins: StepTimes of step_fit.py."""

    wake_us: int

    def measure_step(self, step: Step) -> StepLength: ...


class KvMemory:
    """The KV blocks of one engine: who has how many, and who is preempted when a step has too few.

    As in vLLM: a running request takes a block when its tokens reach one; where none is free the request that
    was admitted last gives all of its own back, and is computed again. A waiting one needs blocks for its
    whole prompt. Steps in which enough is free cost the same however many requests run.
    Not modelled: blocks that several requests share; cached tokens count for each of them.

    free: blocks that nobody has. running: requests in the order of their admission; of all but an incomplete
    one a token is computed in each step.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self.block_tokens = max(limits.block_tokens, 1)
        is_known = limits.kv_tokens and not limits.shares_blocks
        # One of vLLM's blocks is a placeholder, which is given to nobody.
        self.free = max(limits.kv_tokens // self.block_tokens - 1, 0) if is_known else UNLIMITED
        self.running: list[QueuedPrompt] = []
        self._starts = [0] * self.block_tokens  # decoding requests, by the steps that need a block

    def has_room(self, prompt: QueuedPrompt) -> bool:
        """Whether a waiting prompt finds blocks for all that is to be computed."""
        return self._count_blocks(prompt.context + prompt.to_compute) <= self.free

    def take_chunk(self, prompt: QueuedPrompt) -> None:
        """Blocks for what `prompt.computed` says by now."""
        needed = self._count_blocks(prompt.context + prompt.computed)
        self.free -= needed - prompt.blocks
        prompt.blocks = needed

    def begin_decoding(self, prompt: QueuedPrompt) -> None:
        """From the step after `prompt.first_step` on it has one token in each."""
        self._starts[self._find_start(prompt)] += 1

    def end_decoding(self, prompt: QueuedPrompt) -> None:
        self._starts[self._find_start(prompt)] -= 1

    def release(self, prompt: QueuedPrompt, number: int) -> None:
        """An answer has ended in step `number`, or its request was preempted before the next one."""
        self.running.remove(prompt)
        self.free += self.count_owned(prompt, number)
        prompt.blocks = 0

    def count_owned(self, prompt: QueuedPrompt, number: int) -> int:
        """The blocks that it has after step `number`."""
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
        starting = self._starts[number % self.block_tokens]
        chunk = self._count_chunk(incomplete, left) if incomplete is not None else 0
        if starting + chunk <= self.free:
            self.free -= starting
            return True
        at = 0
        while at < len(self.running):
            prompt = self.running[at]
            is_decoding = prompt.ticket >= 0
            needed = self._count_needed(prompt, number) if is_decoding else chunk
            while needed > self.free and prompt.is_running:
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


Schedule = Callable[[int, Callable[[int], None]], None]


class EngineModel:
    """One engine.

    peak_running, peak_tokens: the most requests, and KV tokens, at one time; peak_step: tokens of a step.
    Where it is not known what requests need of the KV cache, there is always enough.
    blocked_us: that requests waited for it, all together.
    """

    def __init__(
        self,
        limits: EngineLimits,
        measure_step: Callable[[Step], StepLength],
        wake_us: int,
        schedule_event: Schedule,
    ) -> None:
        self.limits = limits
        self._measure_step = measure_step
        self._wake_us = wake_us
        self._schedule_event = schedule_event
        self.waiting: deque[QueuedPrompt] = deque()
        self.memory = KvMemory(limits)
        self.running = self.decoding = self.kv_tokens = 0
        self.blocked_us = 0
        self._blocked_since = -1
        self.peak_running = self.peak_tokens = self.steps = self.peak_step = 0
        self._incomplete: QueuedPrompt | None = None
        self._order = 0
        self._last_steps: list[
            tuple[int, int, QueuedPrompt]
        ] = []  # decodes, by the step that ends them
        self._leaving: list[tuple[int, int, QueuedPrompt]] = []  # likewise, until that step has run
        self._timed: list[tuple[int, int, QueuedPrompt]] = []  # by the time at which they leave
        self._in_flight = 0
        self._host_free = self._device_free = 0
        self._shortest = 1 << 62  # of the steps so far
        self._asked_for = -1  # the time of the next look, -1 without one

    def add_prompt(self, prompt: QueuedPrompt, now: int) -> None:
        prompt.arrived = now
        self.waiting.append(prompt)
        # While a step runs the engine core waits for it, or has looked for the next one already.
        if not self._in_flight:
            self._look_at(max(now + self._wake_us, self._host_free))

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
        length = self._measure_step(step)
        # Until then other steps were scheduled, or ran.
        free = max(now, self._device_free)
        begun = max(now + length.lead, free)
        end = begun + length.encoder + length.forward + length.sample
        self._device_free = end
        self._shortest = min(self._shortest, end - begun)
        for prompt, _ in step.parts:
            _add_times(prompt, step, length, begun, free)
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
        has_room = self.memory.make_room(number, self._incomplete, left, self._preempt)
        step = Step(number, now, [], self.decoding, self.decoding)
        step.contexts = self.kv_tokens
        if self._incomplete is not None:
            step.contexts -= self._incomplete.context + self._incomplete.computed
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
            if prompt.match is not None and not prompt.again:
                prompt.match(prompt)
            if not self.limits.chunked and prompt.to_compute > left:
                break
            full = self.limits.max_items and step.items + prompt.items > self.limits.max_items
            if full and prompt.items and step.items:
                break
            if not self.memory.has_room(prompt):
                self._blocked_since = now
                break
            self.waiting.popleft()
            self.running += 1
            prompt.is_running = True
            if not prompt.chunks:
                prompt.scheduled, prompt.queue = now, now - prompt.arrived
            step.items += prompt.items
            self.kv_tokens += prompt.context
            self.memory.running.append(prompt)
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
        self.memory.begin_decoding(prompt)

    def _end_decoding(self, prompt: QueuedPrompt) -> None:
        self.decoding -= 1
        self.memory.end_decoding(prompt)

    def _preempt(self, prompt: QueuedPrompt, number: int) -> None:
        """Before step `number`: it loses its blocks, and is the next to be admitted."""
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
                heapq.heappush(self._timed, (now + prompt.answer_us, self._order, prompt))
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
        while self._timed and self._timed[0][0] <= now + self._shortest // 2:
            prompt = heapq.heappop(self._timed)[2]
            if prompt.ticket >= 0:
                self._end_decoding(prompt)
            self._release(prompt, step.number, now)
        self._host_free = max(self._host_free, now + gap)
        self._look_at(self._host_free)

    def _release(self, prompt: QueuedPrompt, number: int, now: int) -> None:
        """Its answer has ended; one of unknown length ends whatever its request is doing."""
        decoded = number - prompt.first_step if prompt.ticket >= 0 else -1
        if prompt.is_running:
            if prompt is self._incomplete:
                self._incomplete = None
            self.memory.release(prompt, number)
            self.running -= 1
            self.kv_tokens -= prompt.context + prompt.computed + max(decoded, 0)
        else:
            self.waiting.remove(prompt)
        prompt.decode_steps = prompt.again + decoded
        prompt.ticket = -1
        prompt.is_running = False
        prompt.last_token = now
        if prompt.left is not None:
            prompt.left(now)


def _add_times(prompt: QueuedPrompt, step: Step, length: StepLength, begun: int, free: int) -> None:
    """A step's length to the stages of a prompt in it, as breakdown.py divides a step.

    free: until then other steps were scheduled, or ran. begun: from then on the device works for this one.
    """
    if prompt.chunks == 1:
        prompt.dispatch = begun - step.scheduled
    else:
        left_out = step.number - prompt.chunk_step > 1
        stall = max(min(free, begun) - prompt.chunk_end - prompt.sample, 0) if left_out else 0
        prompt.stall += stall
        prompt.dispatch += begun - prompt.chunk_end - stall
    prompt.chunk_step = step.number
    # The encoder's run is the whole step's, for everybody in it.
    prompt.encoder += length.encoder
    prompt.compute += length.forward
    prompt.chunk_end = begun + length.encoder + length.forward
    prompt.sample = length.sample


def _build_chooser(names: Iterable[str], policy: str, seed: int) -> Chooser:
    """Chooses the recorded engine, or one by a policy, which learns of each request as the real one does."""
    numbers = {name: number for number, name in enumerate(names)}
    if not policy:
        return lambda name, *_: numbers[name]
    instances = [
        types.parse_instance_url(f"http://127.0.0.1:{9000 + number}", "mono")
        for number in numbers.values()
    ]
    positions = {each.url: number for number, each in enumerate(instances)}
    # Blocks of one token: what is cached is given with each request.
    state = PolicyState(BlockHolders(1), tie_breaker=random.Random(f"ties {seed}"))
    chosen = POLICIES[policy](state)

    def choose(_: str, key: str, prompt: QueuedPrompt, now: int) -> int:
        request = types.RoutingRequest(
            "mono",
            COMPLETIONS_PATH,
            MODEL_NAME,
            key,
            {},
            b"",
            prompt_tokens=prompt.context + prompt.tokens,
            cached_tokens_by_url={each.url: prompt.context for each in instances},
        )
        choice = chosen.choose_instance(request, instances, now, False)
        state.record_sent(request, choice, now)
        choice.instance.in_flight += 1

        def end_prefill(prompt: QueuedPrompt) -> None:
            share = prompt.tokens / max(prompt.step_tokens, prompt.tokens)
            seconds = prompt.compute * share / US_PER_SECOND
            state.record_first_token(request, prompt.first_token, seconds, prompt.context)

        def leave(_: int) -> None:
            choice.instance.in_flight -= 1

        prompt.done, prompt.left = end_prefill, leave
        return positions[choice.instance.url]

    return choose


class FleetModel:
    """One replay; `prompts` has the requests at the main engine, in the order of the recording.

    cached: tokens in the prefix cache, by request. outputs: tokens that each generates; 0 where it leaves
    after as long as it did. policy, encoder_policy: "" where requests go to the engine that they went to.
    rate: arrivals come so many times as fast.
    """

    def __init__(
        self,
        requests: Sequence[ReplayRequest],
        engines: PlannedEngines,
        encoders: PlannedEngines,
        cached: Sequence[int],
        outputs: Sequence[int],
        policy: str = "",
        encoder_policy: str = "",
        rate: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.requests = requests
        self._events: list[tuple[int, int, Callable[[int], None]]] = []
        self._order = itertools.count()
        self.engines, self.encoders = (
            [
                EngineModel(limits, times.measure_step, times.wake_us, self._add_event)
                for limits, times in planned.values()
            ]
            for planned in (engines, encoders)
        )
        self._choose_engine = _build_chooser(engines, policy, seed)
        self._choose_encoder = _build_chooser(encoders, encoder_policy, seed)
        self.starts = [round(each.start / rate) for each in requests]
        self.prompts = [
            QueuedPrompt(
                each.main.computed + each.main.cached - known,
                context=known,
                items=each.main.items,
                output_tokens=generated,
                answer_us=max(each.main.answer_us, 0),
            )
            for each, known, generated in zip(requests, cached, outputs, strict=True)
        ]
        #: Of each request, when it has its first token: a preemption after that does not count.
        self.stages: list[dict[str, int]] = [{} for _ in requests]

    def _add_event(self, when: int, action: Callable[[int], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), action))

    def run(self) -> FleetModel:
        """Replay all requests, to the end of the last answer."""
        for number, start in enumerate(self.starts):
            self._add_event(start, partial(self._send_request, number))
        while self._events:
            when, _, action = heapq.heappop(self._events)
            action(when)
        return self

    def _send_request(self, number: int, now: int) -> None:
        request = self.requests[number]
        if not request.encodes:
            self._send_main(number, now, request.main.arrived - request.start)
            return
        ends: list[int] = []
        recorded_end = max(each.sampled + each.after_us for each in request.encodes)
        for each in request.encodes:
            self._send_encode(number, each, now, ends, recorded_end)

    def _send_encode(
        self, number: int, visit: EngineVisit, now: int, ends: list[int], recorded_end: int
    ) -> None:
        """One encoder's part. When the last one of the request is done, the main engine is asked."""
        request, prompt = self.requests[number], QueuedPrompt(1, items=max(visit.items, 1))
        at = self._choose_encoder(visit.instance, f"{number} {visit.arrived}", prompt, now)
        report_done = prompt.done

        def finish(done: QueuedPrompt) -> None:
            if report_done is not None:
                report_done(done)
            ends.append(done.first_token + visit.after_us)
            if len(ends) == len(request.encodes):
                slowest = max(ends)
                self._send_main(number, slowest, max(request.main.arrived - recorded_end, 0))

        prompt.done = finish
        when = now + visit.arrived - request.start
        self._add_event(when, partial(self.encoders[at].add_prompt, prompt))

    def _send_main(self, number: int, now: int, delay: int) -> None:
        """The main engine gets the request `delay` after `now`."""
        request, prompt = self.requests[number], self.prompts[number]
        at = self._choose_engine(request.main.instance, str(number), prompt, now)
        report_done = prompt.done

        def finish(done: QueuedPrompt) -> None:
            if report_done is not None:
                report_done(done)
            self.stages[number] = merge_stages(request, done, self.starts[number])

        prompt.done = finish
        self._add_event(now + delay, partial(self.engines[at].add_prompt, prompt))


def merge_stages(request: ReplayRequest, prompt: QueuedPrompt, start: int) -> dict[str, int]:
    """The recorded stages with the engine's own replaced; behind encoders, with their change as well."""
    prefix = request.prefix
    replaced = {f"{prefix}{name}" for name in MODELLED_STAGES}
    merged = {name: us for name, us in request.stages.items() if name not in replaced}
    queue = "encoder.queue" if prompt.items else "prefill.queue"
    for name, us in (
        (queue, prompt.queue),
        ("dispatch", prompt.dispatch),
        ("encoder.compute", prompt.encoder),
        ("prefill.compute", prompt.compute),
        ("prefill.stall", prompt.stall),
        ("sample", prompt.sample),
    ):
        if us or f"{prefix}{name}" in request.stages:
            merged[f"{prefix}{name}"] = us
    if request.encodes:
        # Which encoder is the slowest may change: what its stages do together counts as its queue.
        shift = (prompt.arrived - start) - (request.main.arrived - request.start)
        merged["encode.encoder.queue"] = merged.get("encode.encoder.queue", 0) + shift
    return merged
