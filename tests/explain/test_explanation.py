# SPDX-License-Identifier: Apache-2.0
"""Windows with a known cause: it is named with its share, what looks like one is refuted or not told."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import pytest

from benchmarks.answers.known_fleet import (
    SECOND,
    Ask,
    Site,
    Visit,
    change_site,
    draw_asks,
    serve_asks,
)
from benchmarks.answers.known_windows import ROUTED, repeat_stops, slow_down, with_special
from tests.explain.stored_records import make_window
from ttft_otel.explain.explain import cause_kinds
from ttft_otel.explain.explain.explanation import Explanation, divide_lateness, explain_requests
from ttft_otel.explain.explain.late_case import HIGH, LOW
from ttft_otel.explain.explain.late_requests import (
    MIN_LIKE,
    MIN_WINDOW,
    choose_like,
    divide_difference,
    split_window,
)
from ttft_otel.explain.explain.window_answer import list_explanation
from ttft_otel.explain.window.request_facts import (
    HOP,
    MEDIA,
    CannotTellError,
    LostRequests,
    RequestFacts,
)
from ttft_otel.model.names import keys
from ttft_otel.model.stages import UNATTRIBUTED, WAIT_REASONS

SLO_US = 300_000
DELAY_US = 400_000


@dataclass(frozen=True)
class Cause:
    """What makes a request late: a longer stage, and what else is then different of it."""

    stage: str
    reason: str = ""
    tokens: int = 0
    cached: int = -1
    kind: str = ""

    def apply(self, request: RequestFacts, us: int = DELAY_US) -> RequestFacts:
        """The request with the cause."""
        stages = {**request.stages, self.stage: request.stages.get(self.stage, 0) + us}
        reasons = dict(request.reasons)
        if self.reason:
            own = dict(reasons.get(self.stage, {}))
            reasons[self.stage] = {**own, self.reason: own.get(self.reason, 0) + us}
        elif self.stage in reasons:
            del reasons[self.stage]
        return replace(
            request,
            stages=stages,
            tokens=self.tokens or request.tokens,
            cached=request.cached if self.cached < 0 else self.cached,
            kind=self.kind or request.kind,
            reasons=reasons,
            instances={**request.instances, self.stage: request.instances["preprocess"]},
        )


def delay_some(
    window: list[RequestFacts], cause: Cause, every: int = 25, us: int = DELAY_US
) -> list[RequestFacts]:
    """The window with `cause` in every 25th request."""
    return [
        cause.apply(each, us) if number % every == 0 else each for number, each in enumerate(window)
    ]


# Causes by the reason or the stage that they show in.
CASES: dict[str, Cause] = {
    "max_num_seqs": Cause("prefill.queue", "max_num_seqs"),
    "token_budget": Cause("prefill_decode.prefill.queue", "token_budget"),
    "kv_blocks": Cause("prefill.queue", "kv_blocks"),
    "lora": Cause("prefill.queue", "lora"),
    "paused": Cause("prefill.stall", "paused"),
    "media_preprocessing": Cause("preprocess", kind=MEDIA),
}


def test_parts_add_up() -> None:
    """Stages, reasons and instances are parts of the difference of the means, to rounding."""
    for seed in range(5):
        window = delay_some(make_window(seed=seed), CASES["max_num_seqs"])
        compared = split_window(window)
        found = divide_difference(compared)
        means = [
            sum(each.ttft_us for each in side) / len(side)
            for side in (compared.late, compared.typical)
        ]
        assert found.difference_us == pytest.approx(means[0] - means[1])
        assert sum(part.us for part in found.parts) == pytest.approx(found.difference_us)
        assert sum(part.share for part in found.parts) == pytest.approx(1)
        assert sum(share for _, share in found.reasons) == pytest.approx(1)
        assert sum(share for _, share, _ in found.instances) == pytest.approx(1)
        assert sum(share for *_, share in found.instances) == pytest.approx(1)


def test_the_share_is_the_injected_one() -> None:
    """Two causes of known size: three quarters and one quarter of the difference, inside the intervals."""
    window = make_window()
    both = [
        Cause("router.retry").apply(
            CASES["token_budget"].apply(each, DELAY_US * 3 // 4), DELAY_US // 4
        )
        if number % 25 == 0
        else each
        for number, each in enumerate(window)
    ]
    found = explain_requests(split_window(both, SLO_US))
    first, second = found.difference.parts[:2]
    assert (first.name, second.name) == ("prefill_decode.prefill.queue", "router.retry")
    assert first.us == pytest.approx(DELAY_US * 3 / 4, rel=0.01)
    assert second.us == pytest.approx(DELAY_US / 4, rel=0.01)
    assert first.low <= 0.75 <= first.high + 0.02 and found.stage_confidence == HIGH
    assert found.difference.reasons[0][0] == "token_budget"


def test_what_ate_the_slo() -> None:
    """Each late request's time beyond the objective is divided among what was longer; the sum closes."""
    window = delay_some(make_window(), CASES["kv_blocks"])
    compared = split_window(window, SLO_US)
    eaten = divide_lateness(compared, SLO_US)
    lateness = sum(each.ttft_us - SLO_US for each in compared.late)
    assert sum(eaten.values()) == pytest.approx(lateness)
    assert next(iter(eaten)) == "prefill.queue" and eaten["prefill.queue"] > 0.9 * lateness
    assert all(us >= 0 for us in eaten.values())
    # An objective that is far beyond leaves less time to eat, and the same stage that ate it.
    later = divide_lateness(split_window(window, SLO_US + 50_000), SLO_US + 50_000)
    assert sum(later.values()) < lateness and next(iter(later)) == "prefill.queue"


def test_one_instance() -> None:
    """A cause on one of two instances is told with its instance; on both it is not."""
    window = make_window()
    both = explain_requests(split_window(delay_some(window, CASES["lora"]), SLO_US))
    assert both.difference.instance == ""
    one = explain_requests(split_window(delay_some(window, CASES["lora"], every=26), SLO_US))
    assert one.difference.instance == "chat-0"
    # A stage that only one instance has is no sign against that instance.
    places = [replace(each, instances=dict.fromkeys(each.instances, "chat-0")) for each in window]
    only = explain_requests(split_window(delay_some(places, CASES["lora"]), SLO_US))
    assert only.difference.instance == "" and len(only.difference.instances) == 1
    assert "on chat-0" in " ".join(list_explanation(one))


def test_sentences() -> None:
    """The first line is the answer; six lines at most, and with --verbose what was looked at and refuted."""
    window = delay_some(make_window(), CASES["max_num_seqs"])
    found = explain_requests(split_window(window, SLO_US), SLO_US)
    lines = list_explanation(found)
    text = "\n".join(lines)
    assert lines[0].startswith("Setting limit: all places of the batch were taken")
    assert len(lines) <= 6 and "reason max_num_seqs" in text
    assert "12 of 300 requests were later than 300 ms" in text and "12 bursts" in text
    assert "Try: Raise --max-num-seqs" in text and "Price: " in text
    details = "\n".join(list_explanation(found, verbose=True))
    assert "What ate the 300 ms: " in details and " ms off" not in details
    assert "Looked at own_size: median " in details and "refuted: " in details
    # Marks of two clocks: what may be off is told.
    window = [replace(each, clock_error_us=2_000) for each in window]
    found = explain_requests(split_window(window, SLO_US))
    assert "up to 2.0 ms off" in " ".join(list_explanation(found, verbose=True))


def test_a_limit_that_few_run_into() -> None:
    """The same reason in one burst of the window: what ran then needs a cause, and no setting is named."""
    window = make_window()
    burst = delay_some(window, CASES["max_num_seqs"], every=1)[100:112]
    found = explain_requests(split_window([*window[:100], *burst, *window[112:]], SLO_US), SLO_US)
    assert found.cause.kind == cause_kinds.NOT_KNOWN and found.remedy is None
    (limit,) = (each for each in found.candidates if each.kind == cause_kinds.SETTING_LIMIT)
    assert limit.refuted.startswith("4% of the requests waited for it, in ")


def test_set_aside() -> None:
    """A pause has the time: no limit is behind it, no setting is named; without the reason, no cause."""
    window = delay_some(make_window(), CASES["paused"], every=100)
    found = explain_requests(choose_like(window[0], window))
    assert (found.cause.kind, found.cause.subject) == (cause_kinds.SET_ASIDE, "paused")
    assert found.remedy is not None and not found.remedy.settings
    bare = delay_some(make_window(), replace(CASES["paused"], reason=""), every=100)
    assert explain_requests(choose_like(bare[0], bare)).cause.kind == cause_kinds.NOT_KNOWN


def test_a_single_request() -> None:
    """Against its like: how unusual it is, and the stage that is longer; a usual one has no cause."""
    window = delay_some(make_window(), CASES["max_num_seqs"], every=100)
    found = explain_requests(choose_like(window[0], window))
    text = "\n".join(list_explanation(found))
    assert found.is_unusual and found.cause.kind == cause_kinds.SETTING_LIMIT
    assert "r0: first token after " in text and "same kind, prompt length" in text
    middle = sorted(make_window(), key=lambda each: each.ttft_us)[190]
    usual = explain_requests(choose_like(middle, make_window()))
    reported = "\n".join(list_explanation(usual))
    assert not usual.is_unusual and "Not unusual" in reported and "Try:" not in reported


def test_one_id_for_all() -> None:
    """A client that sends the same request ID every time gets the same answer as one that does not."""
    window = delay_some(make_window(), CASES["max_num_seqs"], every=100)
    same = [replace(each, request_id="same") for each in window]
    found, expected = (explain_requests(choose_like(each[0], each)) for each in (same, window))
    assert found.difference.parts == expected.difference.parts
    assert len(found.difference.compared.window) == len(expected.difference.compared.window)


def test_like_is_compared_with_like() -> None:
    """A long prompt among short ones is compared with long ones only."""
    window = make_window()
    long_ones = [Cause("prefill.compute", tokens=6000).apply(each) for each in window[:50]]
    odd = CASES["max_num_seqs"].apply(long_ones[0])
    found = explain_requests(choose_like(odd, [*window[50:], *long_ones[1:]]))
    assert found.difference.word == "prefill.queue"
    # Compared with all, most of the difference would be the prompt's length.
    alone = explain_requests(choose_like(odd, [*window[50:], long_ones[1]]))
    assert alone.difference.compared.likeness == "same kind"
    assert {part.name for part in alone.difference.parts[:2]} == {
        "prefill.queue",
        "prefill.compute",
    }


def set_unclosed(window: list[RequestFacts], count: int) -> list[RequestFacts]:
    """The window with `count` requests whose sums are wrong."""
    return [replace(each, closed=number >= count) for number, each in enumerate(window)]


@pytest.mark.parametrize(
    ("window", "slo_us", "reported"),
    [
        (make_window(MIN_WINDOW - 1), 0, "are needed to say what is usual"),
        (make_window(), 10**9, "none of 300 requests took longer"),
        (delay_some(make_window(), CASES["lora"], every=100), SLO_US, "only 3 of 300"),
        (set_unclosed(make_window(), 4), 0, "do not add up to the TTFT"),
        (delay_some(make_window(), Cause("unattributed")), SLO_US, "is unattributed"),
        (make_window(), 1, "too few others to say what is usual"),
    ],
)
def test_refusals(window: list[RequestFacts], slo_us: int, reported: str) -> None:
    """Too little evidence is refused with what is missing."""
    with pytest.raises(CannotTellError, match=reported):
        explain_requests(split_window(window, slo_us), slo_us)


def test_just_enough() -> None:
    """Counter-test of the refusals: the same windows with a little more evidence are explained."""
    assert explain_requests(split_window(delay_some(make_window(MIN_WINDOW + 4), CASES["lora"], 5)))
    assert explain_requests(split_window(set_unclosed(delay_some(make_window(), CASES["lora"]), 3)))
    with pytest.raises(CannotTellError, match="no longer than usual"):
        window = make_window()
        quickest = min(window, key=lambda each: each.ttft_us)
        explain_requests(choose_like(quickest, window))
    with pytest.raises(CannotTellError, match="other requests of its kind"):
        window = make_window(MIN_LIKE * 3)
        odd = CASES["media_preprocessing"].apply(window[0])
        explain_requests(choose_like(odd, window[1:]))


def test_confidence_falls_with_two_causes() -> None:
    """Half of the late for one reason, half for another of the same size: not told as certain."""
    window = make_window()
    mixed = [
        (CASES["paused"] if number % 50 else Cause("router.retry")).apply(each)
        if number % 25 == 0
        else each
        for number, each in enumerate(window)
    ]
    found = explain_requests(split_window(mixed, SLO_US))
    assert found.stage_confidence == LOW
    assert found.top.share == pytest.approx(0.5, abs=0.1)


def test_one_cause_in_two_legs_is_one() -> None:
    """Where both legs prepare an image, chance makes the one or the other slower: told with confidence."""
    both = [Cause("encode.preprocess"), Cause("prefill_decode.preprocess")]
    chance = random.Random(7)
    late = []
    for number, each in enumerate(make_window()):
        if number % 25 == 0:
            for cause in both:
                each = cause.apply(each, round(DELAY_US * chance.uniform(0.95, 1.05)))
        late.append(each)
    found = explain_requests(split_window(late, SLO_US))

    assert found.top.share == pytest.approx(0.5, abs=0.05)
    assert found.difference.first_share == 1 and found.stage_confidence == HIGH
    assert found.difference.word == "preprocess"


def test_two_models() -> None:
    """The slowest are those of a larger model: no cause, and no setting; by itself it has none either."""
    large = [
        Cause("prefill.compute").apply(replace(each, model="large"), us=200_000)
        if number % 10 == 0
        else replace(each, model="small")
        for number, each in enumerate(make_window())
    ]
    found = explain_requests(split_window(large, 150_000))
    text = " ".join(list_explanation(found))
    assert found.cause.kind == cause_kinds.NOT_KNOWN
    assert "--model large" in text and "Try:" not in text
    # Late requests of both models are late for another reason.
    late = explain_requests(split_window(delay_some(large, CASES["max_num_seqs"], 7), SLO_US))
    assert late.cause.kind == cause_kinds.SETTING_LIMIT


EPOCH_NS = 1_700_000_000 * 10**9
SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2)))
LENGTH = 240  # seconds of a window
STOPS = repeat_stops(15, 20, 0.7, LENGTH)
SLOW = with_special(ROUTED, 1, slow=slow_down(2.4))


def draw(
    seed: int, seconds: float = LENGTH, rate: Any = 8.0, start: float = 0, **more: Any
) -> list[Ask]:
    """What clients send from `start` on, as draw_asks() has it."""
    asks = draw_asks(numpy.random.default_rng(seed), seconds, rate, **more)
    return [replace(each, at=each.at + int(start * SECOND)) for each in asks]


def serve(asks: Sequence[Ask], site: Site = ROUTED, seed: int = 0) -> list[RequestFacts]:
    """The evidence of the requests at a site of the suite of known windows, in the order of their arrival."""
    return [build_facts(each) for each in serve_asks(asks, site, numpy.random.default_rng(seed))]


def build_facts(visit: Visit) -> RequestFacts:
    """What window_reading.py would read of its spans."""
    (leg,), said = visit.legs, visit.legs[0].attributes
    stages = {**(visit.router or leg.stages), UNATTRIBUTED: visit.unattributed}
    waits = [keys.name_reason_attribute("prefill.queue", reason) for reason in WAIT_REASONS]
    reasons = {
        reason: said[name] for reason, name in zip(WAIT_REASONS, waits, strict=True) if name in said
    }
    return RequestFacts(
        f"r{visit.number}",
        EPOCH_NS + visit.ask.at * 1000,
        stages,
        visit.ask.tokens,
        said[keys.CACHED_TOKENS],
        group=visit.ask.tenant,
        model=visit.ask.model,
        trace_id=f"{visit.number + 1:032x}",
        reasons={f"{leg.role}.prefill.queue": reasons},
        instances={name: leg.instance for name in stages if name.startswith((HOP, f"{leg.role}."))},
        instance=leg.instance,
        chunks=said[keys.PREFILL_CHUNKS],
        step_tokens=said[keys.PREFILL_STEP_TOKENS],
        compute_us=leg.stages["prefill.compute"],
    )


@functools.cache
def serve_hour(seed: int = 0, site_name: str = "usual") -> list[RequestFacts]:
    """A window of usual prompts; that of seed 1 comes after that of seed 0."""
    fleet = replace(ROUTED, settings=replace(ROUTED.settings, slow=slow_down(2.0)))
    sites = {"usual": ROUTED, "slow": SLOW, "slow fleet": fleet}
    return serve(draw(seed, start=LENGTH * seed), sites[site_name], seed)


def explain(asks: Sequence[Ask], site: Site = ROUTED, seed: int = 0) -> Explanation:
    """The explanation of the slowest hundredth."""
    return explain_requests(split_window(serve(asks, site, seed)))


def explain_after(
    before: list[RequestFacts], window: list[RequestFacts], kind: str, subject: str = ""
) -> dict[str, Any]:
    """The figures of the cause of a window whose time before is known; fails where it is another one."""
    return name_cause(explain_requests(split_window(window), before=before), kind, subject)


def name_cause(found: Explanation, kind: str, subject: str = "") -> dict[str, Any]:
    """The figures of the cause; fails where it is another one."""
    assert found.cause.kind == kind, found.cause
    assert not subject or found.cause.subject == subject
    return dict(found.cause.figures)


def find_refusal(found: Explanation, kind: str, subject: str = "") -> str:
    """Why a kind was refuted; fails where it was not looked at, or holds."""
    (reason,) = {
        each.refuted for each in found.candidates if each.kind == kind and subject in each.subject
    }
    return reason


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
    site = with_special(ROUTED, 1, slow=slow_down(factor))
    figures = name_cause(explain(draw(seed), site, seed), cause_kinds.SLOW_INSTANCE, "vllm-1")
    assert figures["factor"] == pytest.approx(factor, rel=0.1)


def test_an_instance_with_more_load_is_not_slow() -> None:
    """All late requests are on one instance, where most requests go: its steps are as fast as others'."""
    site = change_site(ROUTED, shares=(0.1, 0.8, 0.1), max_num_seqs=16)
    found = explain(draw(0, rate=16.0), site)
    assert found.cause.kind != cause_kinds.SLOW_INSTANCE
    assert "as long as those of others" in find_refusal(found, cause_kinds.SLOW_INSTANCE, "vllm-1")


def test_a_slower_model_is_no_slow_instance() -> None:
    """Two models on instances of their own: they have no like to be compared with."""
    site = replace(with_special(ROUTED, 1, slow=slow_down(5)), models={1: "large"})
    found = explain([*draw(0), *draw(1, rate=1.0, model="large")], site)
    assert found.cause.kind == cause_kinds.NOT_KNOWN and "--model large" in found.cause.sentence


@pytest.mark.parametrize("process", ["engine", "api"])
def test_pauses(process: str) -> None:
    """A process that stops for 0.7 s now and then: named with its instance, and no prompt is blamed."""
    engine = with_special(ROUTED, 1, stops=STOPS)
    site = engine if process == "engine" else replace(ROUTED, api_stops={1: STOPS})
    figures = name_cause(explain(draw(0), site), cause_kinds.PROCESS_PAUSE)
    assert (figures["process"], figures["instance"]) == (process, "vllm-1")
    assert figures["pauses"] == pytest.approx(len(STOPS), abs=2)
    assert 500 < figures["longest_ms"] < 800


def test_a_long_step_is_no_pause() -> None:
    """Requests that wait for a long prompt's step go on together, too; its work explains the step."""
    long = draw(1, rate=0.1, tokens=14_000, tenant="acme")
    site = change_site(ROUTED, max_num_batched_tokens=16_384)
    name_cause(
        explain([*draw(0, rate=16.0), *long], site), cause_kinds.HELD_BY_LONG_PROMPTS, "acme"
    )


def test_own_size() -> None:
    """The slowest are the largest, alone on their instances: their size, and nobody held them."""
    site = change_site(replace(ROUTED, instances=12), max_num_batched_tokens=16_384)
    name_cause(explain([*draw(0), *draw(1, rate=0.15, tokens=9_000)], site), cause_kinds.OWN_SIZE)


def test_a_slow_way() -> None:
    """140 ms more on the way to one instance: the hop and the instance, which itself is as fast as others.

    It is no pause: such hops end at no moment in common, and the process goes on meanwhile.
    """
    found = explain(draw(0), replace(ROUTED, hops={1: 140_000}))
    name_cause(found, cause_kinds.SLOW_HOP, "vllm-1")
    assert find_refusal(found, cause_kinds.SLOW_INSTANCE, "vllm-1")


def test_few_long_hops_are_no_cause() -> None:
    """Two of many requests with a hop of 30 s have most of the lateness; two are chance."""
    window = delay(serve_hour(), (500, 1000), "router.hop.mono", 30_000_000)
    found = explain_requests(split_window(window))
    assert found.cause.kind in (cause_kinds.NOT_KNOWN, cause_kinds.NOTHING)
    assert find_refusal(found, cause_kinds.SLOW_HOP) and found.stage_confidence != "high"


def test_lost_requests_come_first() -> None:
    """Most clients gave up: that is told, whatever the others say, and nothing is recommended."""
    compared = split_window(serve_hour(0, "slow"))
    found = explain_requests(compared, lost=LostRequests(total=3000, left=3000))
    assert found.cause.kind == cause_kinds.LOST_REQUESTS and found.remedy is None
    name_cause(explain_requests(compared, lost=LostRequests(total=3)), cause_kinds.SLOW_INSTANCE)


def test_one_request_of_a_slow_instance() -> None:
    """A single request is compared with its like, and its instance with the others of its time."""
    window = serve_hour(0, "slow")
    like = [each for each in window if 280 <= each.tokens < 300 and each.instance == "vllm-1"]
    found = explain_requests(choose_like(like[0], window))
    name_cause(found, cause_kinds.SLOW_INSTANCE)
    assert found.cause.confidence != "high"


def test_a_slow_fleet() -> None:
    """All instances slower than in the time before; one that is slower than the others is another cause."""
    figures = explain_after(serve_hour(0), serve_hour(1, "slow fleet"), cause_kinds.SLOW_FLEET)
    assert figures["factor"] == pytest.approx(2.0, rel=0.1)
    explain_after(serve_hour(0), serve_hour(1, "slow"), cause_kinds.SLOW_INSTANCE)


def test_bursts_that_the_router_holds() -> None:
    """A burst that waits in the router has the same cause as one that waits in an engine: the load."""
    bursts = draw(0, 400, rate=lambda at: 80.0 if at % 40 < 2 else 4.0)
    held = [
        replace(
            each,
            stages={
                "router.queue" if name.endswith("prefill.queue") else name: us
                for name, us in each.stages.items()
            },
            reasons={},
        )
        for each in serve(bursts, replace(ROUTED, instances=1))
    ]
    found = explain_requests(split_window(held))
    assert found.difference.word == "router.queue"
    name_cause(found, cause_kinds.LOAD_INCREASE)


def test_lost_hits() -> None:
    """All of like prompts were cached before, and nothing is now: no like of theirs has hits."""
    site = replace(ROUTED, warm=True)
    usual = serve(draw(0, rate=3.0, tokens=3000, prefix="shared", prefix_tokens=2800), site)
    window = serve(draw(1, rate=3.0, tokens=3000, start=LENGTH))
    assert explain_after(usual, window, cause_kinds.COLD_PREFIX_CACHE)["hits_to"] == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_an_instance_slow_for_a_while(seed: int) -> None:
    """Slow in a tenth of the time, which the mean of all its steps hides."""
    site = with_special(ROUTED, 1, slow=slow_down(3.0, 200, 245))
    name_cause(explain(draw(seed, 450), site, seed), cause_kinds.SLOW_INSTANCE, "vllm-1")


@pytest.mark.parametrize("seed", SEEDS)
def test_large_prompts_of_a_usual_spread(seed: int) -> None:
    """The slowest are the largest of sizes that vary much: as in any window, and nothing is recommended."""
    asks = draw(seed, rate=4.0, tokens=lambda chance: 400 * chance.lognormal(0, 1.0) + 16)
    found = explain(asks, seed=seed)
    assert found.cause.kind in (cause_kinds.NOTHING, cause_kinds.NOT_KNOWN)
    assert found.remedy is None


def test_long_prompts_of_one_burst() -> None:
    """The slowest are all of one burst of long prompts; that these hold others up, the whole window tells."""
    long = draw(1, 120, rate=0.1, tokens=14_000, tenant="acme")
    burst = [
        Ask(60 * SECOND + 100_000 * at, 14_000, 30, tenant="acme", instance=0) for at in range(5)
    ]
    found = explain([*draw(0, 120, rate=10.0), *long, *burst], replace(ROUTED, instances=2))
    name_cause(found, cause_kinds.HELD_BY_LONG_PROMPTS, "acme")


@pytest.mark.parametrize("seed", [2, pytest.param(4, marks=pytest.mark.full)])
def test_chance_is_no_load(seed: int) -> None:
    """Queues of a small budget are longest where chance brings most: as much as any window has of it."""
    before, window = (
        serve(
            draw(seed + at, 120, rate=11.0, tokens=1800, answer=20, start=120 * at),
            change_site(replace(ROUTED, instances=2), max_num_batched_tokens=budget),
        )
        for at, budget in enumerate((2048, 128))
    )
    explain_after(before, window, cause_kinds.SETTING_LIMIT)


def test_a_fleet_slow_since_a_moment() -> None:
    """All instances are slower from the middle on, and nothing is stored of the time before."""
    slow = replace(ROUTED.settings, slow=slow_down(3.0, LENGTH / 2))
    figures = name_cause(explain(draw(0), replace(ROUTED, settings=slow)), cause_kinds.SLOW_FLEET)
    assert figures["factor"] == pytest.approx(3.0, rel=0.1)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(at, marks=pytest.mark.full) for at in (2, 3, 4))]
)
def test_nothing(seed: int) -> None:
    """A healthy window says so, by itself and beside the time before."""
    compared = split_window(serve_hour(seed + 1))
    assert explain_requests(compared).cause.kind == cause_kinds.NOTHING
    found = explain_requests(compared, before=serve_hour(10 * (seed > 0) + seed))
    assert found.cause.kind == cause_kinds.NOTHING


def test_few_extremes() -> None:
    """Three requests far beyond all of the time before are told."""
    late = split_window(delay(serve_hour(1), (500, 1000, 1010), "mono.output", 3_000_000))
    found = explain_requests(late, before=serve_hour(0)).cause
    assert found.kind == cause_kinds.NOT_KNOWN and "3 requests took more than 2" in found.sentence
