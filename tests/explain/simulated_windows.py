# SPDX-License-Identifier: Apache-2.0
"""Windows of requests that simulated engines have served, with a known cause; for tests of explain and diff.

The engines share no code with the package: steps of decodes and chunks, first come first served, whose
length is no straight line in tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from ttft_otel.explain.window.request_facts import RequestEvidence, RequestFacts, StepWork

EPOCH_NS = 1_700_000_000 * 10**9
Chance = numpy.random.Generator


@dataclass
class Prompt:
    """A request before it is served; microseconds."""

    at: int
    tokens: int
    answer: int = 60
    cached: int = 0
    group: str = ""
    model: str = "m"
    instance: int = -1  #: -1: in turn
    #: What the server gives it.
    taken: int = 0
    done: int = 0
    compute: int = 0
    chunks: int = 0
    step_tokens: int = 0
    left: int = 0
    waits: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Site:
    """Servers behind a router."""

    speeds: Sequence[float] = (1.0, 1.0, 1.0)  #: how much longer steps take, by instance
    places: int = 64
    budget: int = 2048
    pauses: Sequence[tuple[int, int, int]] = ()  #: (instance, start, length) of the engine process
    api_pauses: Sequence[tuple[int, int, int]] = ()  #: the same of the API process
    hops: Sequence[int] = ()  #: microseconds more on the way, by instance


def draw_prompts(
    seed: int,
    seconds: float = 600,
    rate: Callable[[float], float] | float = 8.0,
    size: Callable[[Chance], int] = lambda chance: int(300 * chance.lognormal(0, 0.5)) + 16,
    start: float = 0,
    **more: Any,
) -> list[Prompt]:
    """Prompts that come by chance, `rate` (a number, or a function of the second) in a second."""
    chance = numpy.random.default_rng(seed)
    highest = rate if isinstance(rate, float) else max(rate(at) for at in range(int(seconds)))
    prompts, at = [], 0.0
    while (at := at + chance.exponential(1 / highest)) < seconds:
        if isinstance(rate, float) or chance.random() < rate(at) / highest:
            answer = int(chance.exponential(50)) + 2
            prompts.append(Prompt(int((start + at) * 1e6), size(chance), answer, **more))
    return prompts


def serve(
    prompts: Sequence[Prompt], site: Site | None = None, seed: int = 0
) -> list[RequestEvidence]:
    """The evidence of the requests, in the order of their arrival."""
    site = site or Site()
    chance = numpy.random.default_rng(seed)
    ordered = sorted(prompts, key=lambda each: each.at)
    for number, each in enumerate(ordered):
        each.instance = each.instance if each.instance >= 0 else number % len(site.speeds)
    for instance in range(len(site.speeds)):
        _run_engine([each for each in ordered if each.instance == instance], instance, site, chance)
    return [_build_evidence(number, each, site, chance) for number, each in enumerate(ordered)]


def _run_engine(prompts: list[Prompt], instance: int, site: Site, chance: Chance) -> None:
    now, begun, running, waiting, coming = 0, [], [], [], list(prompts)  # type: ignore[var-annotated]
    while coming or waiting or begun or running:
        if not (waiting or begun or running):
            now = max(now, coming[0].at)
        while coming and coming[0].at <= now:
            each = coming.pop(0)
            each.left = each.tokens - each.cached
            each.waits["in_step"] = now - each.at
            waiting.append(each)
        room, parts = site.budget - len(running), []
        for each in begun:
            part = min(each.left, room)
            if part > 0:
                parts.append((each, part))
                room -= part
        while waiting and room > 0 and len(running) + len(begun) < site.places:
            each = waiting.pop(0)
            each.taken = now
            begun.append(each)
            parts.append((each, min(each.left, room)))
            room -= parts[-1][1]
        reason = "token_budget" if room <= 0 else "max_num_seqs"
        tokens = sum(part for _, part in parts)
        us = (3500 + 35 * tokens**0.97 + 22 * len(running)) * site.speeds[instance]
        us = us * chance.lognormal(0, 0.04)
        for place, start, length in site.pauses:
            if place == instance and now <= start + length and now + us > start:
                us = max(start + length, now) - now + us
        end = now + int(us)
        for each in waiting:
            each.waits[reason] = each.waits.get(reason, 0) + end - now
        for each in list(running):
            each.answer -= 1
            if each.answer <= 0:
                running.remove(each)
        for each, part in parts:
            each.left -= part
            each.chunks += 1
            each.compute += end - now
            each.step_tokens += tokens + len(running)
            if not each.left:
                each.done = end
                begun.remove(each)
                running.append(each)
        now = end


def _build_evidence(number: int, one: Prompt, site: Site, chance: Chance) -> RequestEvidence:
    host = {
        name: round(us * chance.lognormal(0, 0.3))
        for name, us in (("preprocess", 1500), ("output", 400))
    }
    hop = round(300 * chance.lognormal(0, 0.3)) + (site.hops[one.instance] if site.hops else 0)
    stages = {
        "router.hop.mono": hop,
        "mono.preprocess": host["preprocess"],
        "mono.prefill.queue": one.taken - one.at,
        "mono.prefill.compute": one.compute,
        "mono.prefill.stall": one.done - one.taken - one.compute,
        "mono.output": host["output"],
    }
    start = one.at - hop - host["preprocess"]
    for place, begin, length in site.api_pauses:
        if place != one.instance:
            continue
        for name, at in (("mono.preprocess", one.at), ("mono.output", one.done)):
            if begin - host[name.removeprefix("mono.")] <= at < begin + length:
                stages[name] += begin + length - at
    place = f"vllm-{one.instance}"
    return RequestEvidence(
        RequestFacts(
            f"r{number}",
            EPOCH_NS + start * 1000,
            stages,
            one.tokens,
            one.cached,
            group=one.group,
            model=one.model,
        ),
        trace_id=f"{number + 1:032x}",
        closed=True,
        reasons={"mono.prefill.queue": {name: us for name, us in one.waits.items() if us}},
        instances=dict.fromkeys(stages, place),
        work=StepWork(place, one.chunks, one.step_tokens, one.compute),
    )
