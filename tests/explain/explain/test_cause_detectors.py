# SPDX-License-Identifier: Apache-2.0
"""Windows that simulated engines have served: the true cause is named, what looks like one refuted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import pytest

from ttft_otel.explain import cause_kinds
from ttft_otel.explain.explain.explanation import Explanation, explain_requests
from ttft_otel.explain.window.late_requests import choose_like, split_window
from ttft_otel.explain.window.request_facts import (
    LostRequests,
    RequestFacts,
)

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


def serve(prompts: Sequence[Prompt], site: Site | None = None, seed: int = 0) -> list[RequestFacts]:
    """The evidence of the requests, in the order of their arrival."""
    site = site or Site()
    chance = numpy.random.default_rng(seed)
    ordered = sorted(prompts, key=lambda each: each.at)
    for number, each in enumerate(ordered):
        each.instance = each.instance if each.instance >= 0 else number % len(site.speeds)
    for instance in range(len(site.speeds)):
        _run_engine([each for each in ordered if each.instance == instance], instance, site, chance)
    return [_build_facts(number, each, site, chance) for number, each in enumerate(ordered)]


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
        count = 1
        stops = [
            (start, start + length) for place, start, length in site.pauses if place == instance
        ]
        if not (waiting or begun or any(start <= now <= end for start, end in stops)):
            # Steps that only decode, until one leaves or comes, or the process stops.
            until = [each.at for each in coming[:1]] + [start for start, _ in stops if start > now]
            most = min(until, default=now + 10**9) - now
            count = min(max(1, -(-most // int(us))), *(each.answer for each in running))
            us *= count
        for place, start, length in site.pauses:
            if place == instance and now <= start + length and now + us > start:
                us += start + length - max(now, start)
        end = now + int(us)
        for each in waiting:
            each.waits[reason] = each.waits.get(reason, 0) + end - now
        for each in list(running):
            each.answer -= count
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


def _build_facts(number: int, one: Prompt, site: Site, chance: Chance) -> RequestFacts:
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
    return RequestFacts(
        f"r{number}",
        EPOCH_NS + start * 1000,
        stages,
        one.tokens,
        one.cached,
        group=one.group,
        model=one.model,
        trace_id=f"{number + 1:032x}",
        reasons={"mono.prefill.queue": {name: us for name, us in one.waits.items() if us}},
        instances=dict.fromkeys(stages, place),
        instance=place,
        chunks=one.chunks,
        step_tokens=one.step_tokens,
        compute_us=one.compute,
    )


SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2)))
SLOW = Site(speeds=(1, 2.4, 1))
STOPS = [(1, at * 1_000_000, 700_000) for at in range(30, 600, 40)]


@functools.cache
def serve_hour(seed: int = 0, speeds: tuple[float, ...] = (1, 1, 1)) -> list[RequestFacts]:
    """Ten minutes of usual prompts; those of seed 1 come after those of seed 0."""
    return serve(draw_prompts(seed, start=600 * seed), Site(speeds=speeds), seed)


def explain(prompts: Iterable[Prompt], site: Site | None = None, seed: int = 0) -> Explanation:
    """The explanation of the slowest hundredth."""
    return explain_requests(split_window(serve(list(prompts), site, seed)))


def explain_after(
    before: list[RequestFacts], window: list[RequestFacts], kind: str, subject: str = ""
) -> dict[str, Any]:
    """The figures of the cause of a window whose time before is known; fails where it is another one."""
    return name_cause(explain_requests(split_window(window), before=before), kind, subject)


def name_cause(found: Explanation, kind: str, subject: str = "") -> dict[str, Any]:
    """The figures of the cause; fails where it is another one."""
    chosen = found.cause.chosen
    assert found.cause.kind == kind and chosen is not None, found.cause
    assert not subject or chosen.subject == subject
    return dict(chosen.figures)


def find_refusal(found: Explanation, kind: str, subject: str = "") -> str:
    """Why a kind was refuted; fails where it was not looked at, or holds."""
    (reason,) = {
        each.refuted for each in found.candidates if each.kind == kind and subject in each.subject
    }
    return reason


def make_size(tokens: int) -> Callable[[Chance], int]:
    return lambda chance: tokens


def delay(
    window: list[RequestFacts], rows: Iterable[int], stage: str, us: int
) -> list[RequestFacts]:
    """The window with `us` in a stage of these requests."""
    found = list(window)
    for row in rows:
        found[row] = replace(found[row], stages={**found[row].stages, stage: us})
    return found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("factor", [1.6, pytest.param(2.4, marks=pytest.mark.full)])
def test_slow_instance(seed: int, factor: float) -> None:
    """One of three is slower: named, with its factor."""
    found = explain(draw_prompts(seed, rate=12.0), Site(speeds=(1, factor, 1)), seed)
    figures = name_cause(found, cause_kinds.SLOW_INSTANCE, "vllm-1")
    assert figures["factor"] == pytest.approx(factor, rel=0.05)


def test_an_instance_with_more_load_is_not_slow() -> None:
    """All late requests are on one instance, where most requests go: its steps are as fast as others'."""
    prompts = draw_prompts(0, 300, rate=30.0)
    for number, each in enumerate(prompts):
        each.instance = 1 if number % 10 < 8 else number % 2 * 2
    found = explain(prompts, Site(places=24))
    assert found.cause.kind != cause_kinds.SLOW_INSTANCE
    assert "as long as those of others" in find_refusal(found, cause_kinds.SLOW_INSTANCE, "vllm-1")


def test_a_slower_model_is_no_slow_instance() -> None:
    """Two models on instances of their own: they have no like to be compared with."""
    large = draw_prompts(1, rate=1.0, model="large")
    for each in large:
        each.instance = 1
    small = draw_prompts(0)
    for number, each in enumerate(small):
        each.instance = number % 2 * 2
    found = explain([*small, *large], Site(speeds=(1, 5, 1)))
    assert found.cause.kind == cause_kinds.NOT_KNOWN and "--model large" in found.cause.sentence


@pytest.mark.parametrize("process", ["engine", "api"])
def test_pauses(process: str) -> None:
    """A process that stops for 0.7 s now and then: named with its instance, and no prompt is blamed."""
    site = Site(pauses=STOPS) if process == "engine" else Site(api_pauses=STOPS)
    figures = name_cause(explain(draw_prompts(0), site), cause_kinds.PROCESS_PAUSE)
    assert (figures["process"], figures["instance"]) == (process, "vllm-1")
    assert figures["pauses"] == pytest.approx(15, abs=1) and 500 < figures["longest_ms"] < 750


def test_a_long_step_is_no_pause() -> None:
    """Requests that wait for a long prompt's step go on together, too; its work explains the step."""
    long = draw_prompts(1, rate=0.05, size=make_size(14_000), group="acme")
    found = explain([*draw_prompts(0, rate=24.0), *long], Site(budget=16_384))
    name_cause(found, cause_kinds.HELD_BY_LONG_PROMPTS, "acme")


def test_own_size() -> None:
    """The slowest are the largest, alone on their instances: their size, and nobody held them."""
    long = draw_prompts(1, rate=0.15, size=make_size(9_000))
    found = explain([*draw_prompts(0), *long], Site(speeds=(1,) * 12, budget=16_384))
    name_cause(found, cause_kinds.OWN_SIZE)


def test_a_slow_way() -> None:
    """140 ms more on the way to one instance: the hop and the instance, which itself is as fast as others.

    It is no pause: such hops end at no moment in common, and the process goes on meanwhile.
    """
    found = explain(draw_prompts(0, rate=12.0), Site(hops=(0, 140_000, 0)))
    name_cause(found, cause_kinds.SLOW_HOP, "vllm-1")
    assert find_refusal(found, cause_kinds.SLOW_INSTANCE, "vllm-1")


def test_few_long_hops_are_no_cause() -> None:
    """Two of many requests with a hop of 30 s have most of the lateness; two are chance."""
    window = delay(serve_hour(), (1000, 2000), "router.hop.mono", 30_000_000)
    found = explain_requests(split_window(window))
    assert found.cause.kind in (cause_kinds.NOT_KNOWN, cause_kinds.NOTHING)
    assert find_refusal(found, cause_kinds.SLOW_HOP) and found.stage_confidence != "high"


def test_lost_requests_come_first() -> None:
    """Most clients gave up: that is told, whatever the others say, and nothing is recommended."""
    compared = split_window(serve_hour(0, SLOW.speeds))
    found = explain_requests(compared, lost=LostRequests(total=3000, left=3000))
    assert found.cause.kind == cause_kinds.LOST_REQUESTS and found.remedy is None
    name_cause(explain_requests(compared, lost=LostRequests(total=3)), cause_kinds.SLOW_INSTANCE)


def test_one_request_of_a_slow_instance() -> None:
    """A single request is compared with its like, and its instance with the others of its time."""
    window = serve_hour(0, SLOW.speeds)
    like = [each for each in window if 250 <= each.tokens < 256 and each.instance == "vllm-1"]
    found = explain_requests(choose_like(like[0], window))
    name_cause(found, cause_kinds.SLOW_INSTANCE)
    assert found.cause.confidence != "high"


def test_a_slow_fleet() -> None:
    """All instances slower than in the time before; one that is slower than the others is another cause."""
    figures = explain_after(serve_hour(0), serve_hour(1, (2, 2, 2)), cause_kinds.SLOW_FLEET)
    assert figures["factor"] == pytest.approx(2.0, rel=0.05)
    explain_after(serve_hour(0), serve_hour(1, (1, 2, 1)), cause_kinds.SLOW_INSTANCE)


def test_bursts_that_the_router_holds() -> None:
    """A burst that waits in the router has the same cause as one that waits in an engine: the load."""
    bursts = draw_prompts(0, 400, rate=lambda at: 120.0 if at % 40 < 2 else 5.0)
    held = [
        replace(
            each,
            stages={
                "router.queue" if name.endswith("prefill.queue") else name: us
                for name, us in each.stages.items()
            },
            reasons={},
        )
        for each in serve(bursts, Site(speeds=(1.0,)))
    ]
    found = explain_requests(split_window(held))
    assert found.difference.word == "router.queue"
    name_cause(found, cause_kinds.LOAD_INCREASE)


def test_lost_hits() -> None:
    """All of like prompts were cached before, and nothing is now: no like of theirs has hits."""
    sizes = make_size(3000)
    usual = serve(draw_prompts(0, rate=3.0, size=sizes, cached=2800))
    window = serve(draw_prompts(1, rate=3.0, size=sizes, start=600))
    assert explain_after(usual, window, cause_kinds.COLD_PREFIX_CACHE)["hits_to"] == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_an_instance_slow_for_a_while(seed: int) -> None:
    """Slow in a tenth of the time, which the mean of all its steps hides."""
    parts = [
        serve(draw_prompts(3 * seed, 270), seed=seed),
        serve(draw_prompts(3 * seed + 1, 60, start=270), Site(speeds=(1, 3, 1)), seed),
        serve(draw_prompts(3 * seed + 2, 270, start=330), seed=seed),
    ]
    found = explain_requests(split_window([each for part in parts for each in part]))
    name_cause(found, cause_kinds.SLOW_INSTANCE, "vllm-1")


@pytest.mark.parametrize("seed", SEEDS)
def test_large_prompts_of_a_usual_spread(seed: int) -> None:
    """The slowest are the largest of sizes that vary much: as in any window, and nothing is recommended."""
    prompts = draw_prompts(
        seed, rate=4.0, size=lambda chance: int(400 * chance.lognormal(0, 1.0)) + 16
    )
    found = explain(prompts, seed=seed)
    assert found.cause.kind in (cause_kinds.NOTHING, cause_kinds.NOT_KNOWN)
    assert found.remedy is None


def test_long_prompts_of_one_burst() -> None:
    """The slowest are all of one burst of long prompts; that these hold others up, the whole window tells."""
    long = draw_prompts(1, 120, rate=0.1, size=make_size(14_000), group="acme")
    burst = [
        Prompt(60_000_000 + 100_000 * at, 14_000, 30, group="acme", instance=0) for at in range(5)
    ]
    found = explain([*draw_prompts(0, 120, rate=10.0), *long, *burst], Site(speeds=(1, 1)))
    name_cause(found, cause_kinds.HELD_BY_LONG_PROMPTS, "acme")


@pytest.mark.parametrize("seed", [2, pytest.param(4, marks=pytest.mark.full)])
def test_chance_is_no_load(seed: int) -> None:
    """Queues of a small budget are longest where chance brings most: as much as any window has of it."""
    before, window = (
        serve(
            draw_prompts(seed + at, 120, rate=11.0, size=make_size(1800), start=120 * at),
            Site(speeds=(1, 1), budget=budget),
        )
        for at, budget in enumerate((2048, 128))
    )
    explain_after(before, window, cause_kinds.SETTING_LIMIT)


def test_a_fleet_slow_since_a_moment() -> None:
    """All instances are slower from the middle on, and nothing is stored of the time before."""
    parts = [
        serve(draw_prompts(at, 300, start=300 * at), Site(speeds=(speed,) * 3))
        for at, speed in enumerate((1.0, 3.0))
    ]
    found = explain_requests(split_window([each for part in parts for each in part]))
    figures = name_cause(found, cause_kinds.SLOW_FLEET)
    assert figures["factor"] == pytest.approx(3.0, rel=0.1)


def test_nothing_and_few_extremes() -> None:
    """A healthy window says so, by itself and beside the time before; three requests far beyond are told."""
    before, window = serve_hour(0), serve_hour(1)
    compared = split_window(window)
    assert explain_requests(compared).cause.kind == cause_kinds.NOTHING
    assert explain_requests(compared, before=before).cause.kind == cause_kinds.NOTHING
    late = split_window(delay(window, (1000, 2000, 2010), "mono.output", 900_000))
    found = explain_requests(late, before=before).cause
    assert found.kind == cause_kinds.NOT_KNOWN and "3 requests took more than 2" in found.sentence


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 5))
def test_nothing(seed: int) -> None:
    """Other healthy windows."""
    compared = split_window(serve_hour(seed))
    assert explain_requests(compared).cause.kind == cause_kinds.NOTHING
    found = explain_requests(compared, before=serve_hour(seed + 10)).cause
    assert found.kind == cause_kinds.NOTHING
