# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine as a discrete-event model: scheduler, KV blocks, LoRA places, encoder and a device.

Input: Jobs in the order of their arrival, from known_fleet.py. Output: the same Jobs, with all that the hooks
of a real engine would have measured. It shares no code with ttft_otel. Times are integer microseconds.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy

Chance = numpy.random.Generator
Span = tuple[int, int]  # begin and end

BLOCK: Final = 16  # tokens of a KV block
NOISES: Final = 4096  # drawn at once
MAX_LUMP: Final = 16  # steps of nothing but decodes that are taken together
HELD_FROM: Final = 15_000  # us of waiting, from which on its holders are looked for
MAX_HOLDERS: Final = 5
MAX_HELD_STEPS: Final = 200
COMMON: Final = ("max_num_seqs", "token_budget", "kv_blocks", "encoder_budget", "paused", "other")


@dataclass(slots=True)
class Job:
    """A request at an engine; above what it asks for, below what became of it."""

    at: int  #: the engine has it
    tokens: int
    cached: int = 0
    answer: int = 50
    adapter: str = ""
    items: int = 0  #: media items that this engine has to encode
    ready: int = 0  #: before it the grammar is not compiled
    gives_up: int = 0  #: 0: never
    name: int = 0
    #: What became of it.
    taken: int = -1
    first: int = 0  #: its first token is sampled
    ended: int = 0
    compute: int = 0
    encoder: int = 0
    step_items: int = 0
    dispatch: int = 0
    stall: int = 0
    sample: int = 0
    chunks: int = 0
    own_tokens: int = 0
    step_tokens: int = 0
    preemptions: int = 0
    recomputed: int = 0
    left_at: int = 0  #: its client gave up then
    reasons: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    holders: list[tuple[int, int, Job]] = field(default_factory=list)  #: us, tokens, whose
    #: The scheduler's own notes.
    left: int = 0
    done: int = 0  #: tokens that are computed, or were cached
    generated: int = 0
    last_step: int = 0
    finish: int = 0
    chunk_end: int = 0
    base: list[int] | None = None
    aside: int = 0


@dataclass(frozen=True, slots=True)
class Device:
    """How long a step takes: a floor for the weights, tiles of tokens, attention, decoded contexts."""

    floor: float = 8_000.0
    token: float = 58.0
    tile: int = 64
    attention: float = 0.0035  #: per token of a chunk and token before it
    context: float = 0.018  #: per token that decodes read
    item: float = 22_000.0  #: of the encoder, the first one; further ones of a step cost less
    adapter: float = 0.06  #: more for each adapter in a step
    noise: float = 0.03

    def measure_step(self, tokens: int, contexts: float, attended: float, adapters: int) -> float:
        """Microseconds of a forward pass."""
        tiles = -(-tokens // self.tile) * self.tile if tokens > self.tile else tokens
        dense = float((self.floor**3 + (self.token * tiles) ** 3) ** (1 / 3))
        length = dense + self.attention * attended + self.context * contexts
        return length * (1 + self.adapter * adapters)

    def measure_items(self, items: int) -> float:
        """Microseconds of an encoder's run."""
        return self.item * (1 + 0.7 * (items - 1)) if items else 0.0


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Of a scheduler, vLLM's names; and what goes wrong in the engine's process."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    kv_tokens: int = 400_000
    max_loras: int = 0
    max_items: int = 4  #: the encoder's budget of a step
    long_threshold: int = 0
    device: Device = Device()
    stops: tuple[Span, ...] = ()  #: the process does not run
    paused: tuple[Span, ...] = ()  #: the scheduler is paused
    slow: tuple[tuple[int, int, float], ...] = ()  #: from, until, how many times as slow


def pass_stops(moment: int, work: int, stops: Sequence[Span]) -> int:
    """When work that begins at `moment` is done, of a process that does not run during `stops`."""
    end = moment + work
    for begin, until in stops:
        if until > moment and begin < end:
            end += until - max(begin, moment)
    return end


class KnownEngine:
    """Serves Jobs: running ones first, then the queue, as vLLM's scheduler does."""

    def __init__(self, settings: EngineSettings, chance: Chance) -> None:
        self.settings = settings
        self.chance = chance
        self.noises: list[float] = []
        self.waiting: deque[Job] = deque()
        self.prefilling: list[Job] = []
        self.running: list[Job] = []  #: in the order of their admission, prefilling ones among them
        self.finishes: list[tuple[int, int, Job]] = []
        self.decoding = 0
        self.contexts = 0.0
        self.used = 0  #: tokens of KV cache
        self.step = 0
        self.waited = [0] * len(COMMON)  #: microseconds of the queue by its common reason
        #: Of all steps: begin, end, and the time of prompts and of answers until its end.
        self.begins: list[int] = []
        self.ends: list[int] = []
        self.prefill_sums: list[float] = [0.0]
        self.decode_sums: list[float] = [0.0]
        self.encoder_sums: list[float] = [0.0]
        self.parts: list[list[tuple[Job, int]]] = []

    def serve(self, jobs: Sequence[Job]) -> None:
        """Serve all of them, in the order of their arrival."""
        coming = deque(jobs)
        now = 0
        while coming or self.waiting or self.running:
            if not (self.waiting or self.running):
                now = max(now, coming[0].at)
            while coming and coming[0].at <= now:
                job = coming.popleft()
                job.left = job.tokens - job.cached
                job.done = job.cached
                job.reasons["in_step"] = now - job.at
                job.base = list(self.waited)
                self.waiting.append(job)
            self._drop_those_who_left(now)
            until = coming[0].at if coming else 1 << 60
            now = self._run_step(now, until)

    def _drop_those_who_left(self, now: int) -> None:
        if any(0 < job.gives_up <= now for job in self.waiting):
            for job in self.waiting:
                if 0 < job.gives_up <= now:
                    job.left_at = now
                    self._note_wait(job, now)
            self.waiting = deque(job for job in self.waiting if not job.left_at)

    def _draw_noise(self, count: int = 1) -> float:
        if not self.noises:
            self.noises = self.chance.normal(0, self.settings.device.noise, NOISES).tolist()
        # Bounded from below: a step is never much faster than its work, and now and then slower.
        return 1 + abs(self.noises.pop()) * 1.2 / math.sqrt(count)

    def _run_step(self, now: int, until: int) -> int:
        """One step, or several of nothing but decodes; returns when the next one can be scheduled."""
        settings = self.settings
        for begin, end in settings.paused:
            if begin <= now < end:
                # It goes on asking, so that who comes meanwhile is seen.
                later = max(min(end, until), now + 500)
                self._note_common("paused", later - now, ())
                return later
        skipped: list[Job] = []
        parts, reason, items = self._schedule(now, skipped)
        if not parts and not self.decoding:
            return self._wait_idle(now, until, skipped)
        tokens = sum(part for _, part in parts) + self.decoding
        lump = 1 if parts or self.waiting else self._count_like_steps(until - now)
        attended = sum(part * (job.done + part / 2) for job, part in parts)
        adapters = len({job.adapter for job in self.running if job.adapter})
        speed = next((f for begin, end, f in settings.slow if begin <= now < end), 1.0)
        contexts = self.contexts + self.decoding * (lump - 1) / 2
        forward = settings.device.measure_step(tokens, contexts, attended, adapters)
        forward = int(forward * speed * self._draw_noise(lump) * lump)
        encoder = int(settings.device.measure_items(items) * speed)
        lead = int(350 + 4 * len(self.running) + 250 * self.chance.random())
        tail = int(300 + 2 * self.decoding + 150 * self.chance.random())
        begun = now + lead
        computed = pass_stops(begun, encoder + forward, settings.stops)
        end = pass_stops(computed, tail, settings.stops)
        self._log_step(now, end, parts, items, encoder / max(encoder + forward, 1))
        self._note_common(reason, end - now, skipped)
        finished_prompts = self._note_parts(
            parts, tokens, (now, begun, computed, end), encoder, items
        )
        self._advance_decodes(lump, end)
        for job in finished_prompts:
            self._begin_decoding(job, end)
        return end

    def _count_like_steps(self, room: int) -> int:
        """How many steps of decodes alone are alike: until one ends, somebody comes, or a stop begins."""
        if not self.finishes or self.used + MAX_LUMP * self.decoding > self.settings.kv_tokens:
            return 1
        length = self.settings.device.measure_step(self.decoding, self.contexts, 0, 0) + 1200
        if self.settings.stops or self.settings.slow:
            return 1
        return max(1, min(MAX_LUMP, self.finishes[0][0] - self.step, int(room / (1.1 * length))))

    def _wait_idle(self, now: int, until: int, skipped: Sequence[Job]) -> int:
        """Nothing can run although something waits: until a grammar is ready, or somebody comes."""
        ready = [job.ready for job in self.waiting if job.ready > now]
        leaves = [job.gives_up for job in self.waiting if job.gives_up > now]
        later = min([until, now + 1_000_000, *ready, *leaves])
        self._note_common("other", later - now, skipped)
        return max(later, now + 1)

    def _note_common(self, reason: str, length: int, skipped: Sequence[Job]) -> None:
        at = COMMON.index(reason)
        self.waited[at] += length
        for job in skipped:  # it has a reason of its own, not the queue's
            assert job.base is not None
            job.base[at] += length
            own = "grammar" if job.aside == 1 else "lora"
            job.reasons[own] = job.reasons.get(own, 0) + length

    def _schedule(self, now: int, skipped: list[Job]) -> tuple[list[tuple[Job, int]], str, int]:
        """Parts of prompts in this step, why the rest of the queue waits, and media items."""
        settings = self.settings
        room = settings.max_num_batched_tokens - self.decoding
        alone = len(self.waiting) + len(self.running) <= 1
        bound = settings.long_threshold if settings.long_threshold and not alone else 1 << 60
        preempted = self._preempt(now)
        parts: list[tuple[Job, int]] = []
        items = 0
        for job in self.prefilling:
            part = min(job.left, room, bound)
            if part > 0:
                parts.append((job, part))
                room -= part
        if preempted:
            return parts, "kv_blocks", items
        adapters = {job.adapter for job in self.running if job.adapter}
        held: deque[Job] = deque()
        reason = "other"
        while self.waiting:
            job = self.waiting[0]
            if len(self.running) >= settings.max_num_seqs:
                reason = "max_num_seqs"
                break
            if room <= 0:
                reason = "token_budget"
                break
            places = settings.max_loras
            lacks_place = places and job.adapter and job.adapter not in adapters
            if job.ready > now or (lacks_place and len(adapters) >= places):
                job.aside = 1 if job.ready > now else 2
                skipped.append(job)
                held.append(self.waiting.popleft())
                continue
            needed = -(-(job.tokens + job.generated) // BLOCK) * BLOCK
            if self.used + needed > settings.kv_tokens:
                reason = "kv_blocks"
                break
            if job.items and items + job.items > settings.max_items and items:
                reason = "encoder_budget"
                break
            self.waiting.popleft()
            items += job.items
            self._admit(job, now, needed)
            adapters |= {job.adapter} if job.adapter else set()
            part = min(job.left, room, bound)
            parts.append((job, part))
            room -= part
        self.waiting.extendleft(reversed(held))
        return parts, reason, items

    def _admit(self, job: Job, now: int, needed: int) -> None:
        self.used += needed
        self.running.append(job)
        self.prefilling.append(job)
        if job.taken < 0:
            self._note_wait(job, now)
            job.taken = now
        else:  # it comes back after a preemption
            job.stall += now - job.chunk_end if not job.first else 0
            job.chunk_end = now

    def _preempt(self, now: int) -> bool:
        """Take blocks from those who came last, where the answers need more than there are."""
        found = False
        while self.used + self.decoding > self.settings.kv_tokens and len(self.running) > 1:
            job = self.running.pop()
            found = True
            job.preemptions += 1
            if job in self.prefilling:
                self.prefilling.remove(job)
                self.used -= -(-(job.tokens + job.generated) // BLOCK) * BLOCK
                job.recomputed += job.done
            else:
                self._stop_decoding(job)
                job.recomputed += job.tokens + job.generated if not job.first else 0
            job.done, job.left = 0, job.tokens + job.generated
            job.finish = 0
            self.waiting.appendleft(job)
        return found

    def _stop_decoding(self, job: Job) -> None:
        generated = self.step - job.last_step
        # It held the prompt's and the former answer's blocks, and those of its tokens since.
        self.used -= -(-(job.tokens + job.generated) // BLOCK) * BLOCK + generated
        self.contexts -= job.tokens + job.generated + generated
        self.decoding -= 1
        job.generated += generated

    def _note_parts(
        self,
        parts: Sequence[tuple[Job, int]],
        tokens: int,
        moments: tuple[int, int, int, int],
        encoder: int,
        items: int,
    ) -> list[Job]:
        """What a step measured for the prompts in it; returns those that are complete."""
        now, begun, computed, end = moments
        complete = []
        for job, part in parts:
            if not job.first:
                if not job.chunks:
                    job.step_items = items if job.items else 0
                elif now > job.chunk_end:
                    job.stall += now - job.chunk_end
                job.dispatch += begun - now
                # The worker measures steps: everybody in one has its encoder's run.
                job.encoder += encoder
                job.compute += computed - begun - encoder
                job.chunks += 1
                job.own_tokens += part
                job.step_tokens += tokens
                job.chunk_end = end
                if job.left > part:
                    job.dispatch += end - computed  # the turnaround to its next chunk
            job.done += part
            job.left -= part
            if not job.left:
                complete.append(job)
                self.prefilling.remove(job)
                if not job.first:
                    job.sample = end - computed
                    job.first = end
        return complete

    def _begin_decoding(self, job: Job, end: int) -> None:
        rest = job.answer - job.generated - 1
        if rest <= 0:
            self.used -= -(-(job.tokens + job.generated) // BLOCK) * BLOCK
            self.running.remove(job)
            job.ended = end
            return
        job.last_step = self.step
        job.finish = self.step + rest
        heapq.heappush(self.finishes, (job.finish, id(job), job))
        self.decoding += 1
        self.contexts += job.tokens + job.generated

    def _advance_decodes(self, steps: int, end: int) -> None:
        self.step += steps
        self.contexts += self.decoding * steps
        self.used += self.decoding * steps
        while self.finishes and self.finishes[0][0] <= self.step:
            finish, _, job = heapq.heappop(self.finishes)
            if job.finish != finish:  # it was preempted meanwhile
                continue
            self._stop_decoding(job)
            self.running.remove(job)
            job.finish = 0
            job.ended = end

    def _log_step(
        self, now: int, end: int, parts: list[tuple[Job, int]], items: int, encoder_share: float
    ) -> None:
        length = end - now
        encoder = length * encoder_share
        prefill = sum(part for _, part in parts)
        whole = max(prefill + self.decoding, 1)
        self.begins.append(now)
        self.ends.append(end)
        self.encoder_sums.append(self.encoder_sums[-1] + encoder)
        self.prefill_sums.append(self.prefill_sums[-1] + (length - encoder) * prefill / whole)
        self.decode_sums.append(self.decode_sums[-1] + (length - encoder) * self.decoding / whole)
        self.parts.append(parts)

    def _note_wait(self, job: Job, now: int) -> None:
        """Divide a queue's time by reason, and by what the engine worked on meanwhile."""
        assert job.base is not None
        for at, reason in enumerate(COMMON):
            length = self.waited[at] - job.base[at]
            if length > 0:
                job.reasons[reason] = length
        whole = now - job.at
        known = sum(job.reasons.values())
        if known != whole:  # of a preempted one, or one that came while nothing ran
            job.reasons["in_step"] = job.reasons.get("in_step", 0) + whole - known
        for kind, sums in (
            ("prefill", self.prefill_sums),
            ("decode", self.decode_sums),
            ("encoder", self.encoder_sums),
        ):
            us = int(self._read_sum(sums, now) - self._read_sum(sums, job.at))
            if us > 0:
                job.held[kind] = us
        rest = whole - sum(job.held.values())
        if rest > 0:
            job.held["idle"] = rest
        if whole >= HELD_FROM:
            job.holders = self._find_holders(job.at, now)

    def _read_sum(self, sums: Sequence[float], moment: int) -> float:
        """A running sum at a moment, evenly within its step."""
        at = bisect_right(self.ends, moment)
        if at >= len(self.ends):
            return sums[-1]
        begin, end = self.begins[at], self.ends[at]
        part = min(max((moment - begin) / max(end - begin, 1), 0.0), 1.0)
        return sums[at] + (sums[at + 1] - sums[at]) * part

    def _find_holders(self, since: int, until: int) -> list[tuple[int, int, Job]]:
        first, last = bisect_right(self.ends, since), bisect_left(self.begins, until)
        found: dict[int, list[Any]] = {}
        for at in range(first, min(last, first + MAX_HELD_STEPS)):
            length = self.ends[at] - max(self.begins[at], since)
            whole = sum(part for _, part in self.parts[at]) + 1
            for job, part in self.parts[at]:
                entry = found.setdefault(id(job), [0, 0, job])
                entry[0] += length * part // whole
                entry[1] += part
        ordered = sorted(found.values(), key=lambda entry: -entry[0])[:MAX_HOLDERS]
        return [(us, tokens, job) for us, tokens, job in ordered if us > 0]
