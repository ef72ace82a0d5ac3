# SPDX-License-Identifier: Apache-2.0
"""Replay recorded requests through modelled engines, behind the router's own policies. Pure.

Input: ReplayRequests, limits and step times from what_if.py. Output: the stages that each request would have.
What happens outside of the engines (receive, preprocess, hops, output, egress) takes as long as it did.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from ttft_otel.explain.whatif.engine_model import EngineLimits, EngineModel, QueuedPrompt
from ttft_otel.explain.whatif.replay_facts import MODELLED_STAGES, EngineVisit, ReplayRequest
from ttft_otel.explain.whatif.step_fit import StepTimes
from ttft_otel.model.endpoints import COMPLETIONS_PATH
from ttft_otel.router import types
from ttft_otel.router.routing.policies.block_index import BlockHolders
from ttft_otel.router.routing.policies.policy_registry import POLICIES
from ttft_otel.router.routing.policies.policy_state import US_PER_SECOND, PolicyState

# They decide by what prompts share, or by sessions, which traces do not show.
BLIND_POLICIES: Final = ("session", "prefix", "kvaware")
MODEL_NAME: Final = "model"


# Limits and step times by the name of an engine: that of the recorded instance; "+1", "+2" of those added.
PlannedEngines = Mapping[str, tuple[EngineLimits, StepTimes]]


# Of the recorded engine's name, a key, a prompt and a moment: the number of the engine that gets it.
Chooser = Callable[[str, str, QueuedPrompt, int], int]


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
