# SPDX-License-Identifier: Apache-2.0
"""Two windows of made requests: a change is named with its size, cause and verdict, and chance is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import numpy
import pytest

from tests.explain.stored_records import SECOND_NS, make_window
from ttft_otel.explain.diff.change_answer import (
    MAX_LINES,
    ChangeAnswer,
    compare_sides,
    list_notes,
    list_sentences,
)
from ttft_otel.explain.diff.window_difference import (
    AS_ASKED,
    MIN_REQUESTS,
    MIX,
    UNKNOWN,
    WORSE,
    Condition,
    build_junit,
    build_markdown,
    compare_windows,
    describe_gate,
    find_outcome,
    judge_windows,
    parse_condition,
)
from ttft_otel.explain.explain import cause_kinds
from ttft_otel.explain.window.request_facts import (
    MEDIA,
    MIN_PER_WINDOW,
    TEXT,
    UNMATCHED,
    CannotTellError,
    LostRequests,
    RequestFacts,
    assign_strata,
)
from ttft_otel.explain.window.window_reading import WindowReading
from ttft_otel.model import statistics
from ttft_otel.report.report_types import LATE, LOST, OTHER, REFUSED, Coverage

Window = list[RequestFacts]


def make_sized_window(seed: int, count: int = 300, media_share: float = 0.3) -> Window:
    """Requests a second apart whose times follow their sizes, with the skew of real ones."""
    chance, window = numpy.random.default_rng(seed), []
    for number in range(count):
        kind = MEDIA if chance.random() < media_share else TEXT
        tokens = int(chance.choice([100, 400, 3000]))
        preprocess = 30_000 if kind == MEDIA else 2_000
        stages = {
            "preprocess": round(preprocess * chance.lognormal(0, 0.3)),
            "prefill.queue": round(chance.exponential(20_000)),
            "prefill.compute": round(tokens * 40 * chance.lognormal(0, 0.1)),
            "unattributed": round(chance.exponential(300)),
        }
        start_ns = 1_700_000_000 * SECOND_NS + number * SECOND_NS
        window.append(RequestFacts(f"r{number}", start_ns, stages, tokens=tokens, kind=kind))
    return window


def everybody(*_: object) -> bool:
    return True


def delay_stage(
    window: Window,
    stage: str,
    us: int,
    affects: Callable[[int, RequestFacts], bool] = everybody,
) -> Window:
    """The window with `us` more in a stage of those requests that `affects(index, request)` takes."""
    return [
        replace(each, stages={**each.stages, stage: each.stages[stage] + us})
        if affects(index, each)
        else each
        for index, each in enumerate(window)
    ]


def test_a_delay_is_named_with_its_size() -> None:
    """41 ms more in one stage of B: that stage alone is named, and its size is right to 5 %."""
    before = make_sized_window(1)
    # The same requests, so that the size is known; other draws come in test_intervals_hold.
    after = delay_stage(before, "prefill.compute", 41_000)
    found = compare_windows(before, after)
    assert [change.name for change in found.named] == ["prefill.compute"]
    assert found.named[0].change_us == pytest.approx(41_000, rel=0.05)
    assert found.p50.named and found.p50.change_us == pytest.approx(41_000, rel=0.2)
    assert (found.named[0].kind, found.named[0].since_ns) == ("", 0)


def test_parts_add_up() -> None:
    """Changes of the stages and of the mix are the change of the mean, whatever the windows."""
    for seed in range(4):
        a, b = make_sized_window(seed, 50), make_sized_window(seed + 100, 80, media_share=0.8)
        found = compare_windows(a, b)
        total = sum(change.change_us for change in found.stages) + found.mix.change_us
        assert total == pytest.approx(found.ttft.change_us)
        means = [sum(each.ttft_us for each in window) / len(window) for window in (a, b)]
        assert found.ttft.change_us == pytest.approx(means[1] - means[0])


def test_a_changed_mix_is_called_a_mix() -> None:
    """More media requests, each as fast as before: the mean rises, and no stage is named."""
    a, b = make_sized_window(3), make_sized_window(4, media_share=0.9)
    found = compare_windows(a, b)
    assert [change.name for change in found.named] == [MIX]
    changed = sum(each.kind == MEDIA for each in b) - sum(each.kind == MEDIA for each in a)
    # A media request takes 30 ms instead of 2 in preprocess, and a lognormal's mean is 5 % above.
    assert found.mix.low_us < changed / 300 * 28_000 * 1.046 < found.mix.high_us


def test_whose_and_since_when() -> None:
    """A delay of media requests that begins in the middle of B is told as such."""
    after = delay_stage(
        make_sized_window(6, 600),
        "preprocess",
        40_000,
        lambda index, each: each.kind == MEDIA and index >= 300,
    )
    found = compare_windows(make_sized_window(5, 600), after)
    (change,) = found.named
    assert (change.name, change.kind) == ("preprocess", MEDIA)
    began_s = (change.since_ns - after[0].start_ns) / SECOND_NS
    assert 300 <= began_s <= 306  # the first media request from then on


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(each, marks=pytest.mark.full) for each in (1, 2))]
)
def test_intervals_hold(seed: int) -> None:
    """Windows of different requests: the true size of an injected delay is inside of its interval."""
    after = delay_stage(make_sized_window(seed + 20), "prefill.queue", 30_000)
    found = compare_windows(make_sized_window(seed + 10), after)
    (queue,) = (change for change in found.stages if change.name == "prefill.queue")
    assert queue.low_us <= 30_000 <= queue.high_us and queue.named


@pytest.mark.parametrize(
    ("trials", "alarms"), [(12, 1), pytest.param(500, 30, marks=pytest.mark.full)]
)
def test_nothing_against_itself(trials: int, alarms: int) -> None:
    """Two windows of one system name nothing, in at least 94 % of fixed trials."""
    found = sum(
        bool(compare_windows(*(make_sized_window(seed, 120) for seed in (at, at + 1))).named)
        for at in range(2000, 2000 + 2 * trials, 2)
    )
    assert found <= alarms


def test_too_few() -> None:
    """A window that cannot tell is refused, and the sentence says which."""
    with pytest.raises(CannotTellError, match="window B has 5 requests"):
        compare_windows(make_sized_window(1), make_sized_window(2, 5))
    assert compare_windows(make_sized_window(1, MIN_REQUESTS), make_sized_window(2, MIN_REQUESTS))


def test_strata_need_both_windows() -> None:
    """A stratum that a window has too few of is joined with others; a kind of one window is unmatched."""
    text, media = make_sized_window(1, 40, media_share=0), make_sized_window(2, 40, media_share=1)
    for_a, for_b = assign_strata(text, [*text, *media])
    assert UNMATCHED not in for_a and set(for_b[40:]) == {UNMATCHED}
    rare = [replace(text[0], tokens=50_000)] * (MIN_PER_WINDOW - 1)
    largest = max(text, key=lambda each: each.tokens)
    for_a, _ = assign_strata([*text, *rare], text)
    assert for_a[-1] == for_a[text.index(largest)]  # too few of its size: the nearest one's
    for_a, _ = assign_strata([*text, *rare], [*text, *rare, rare[0], replace(rare[0], tokens=9)])
    assert for_a[-1] == for_a[text.index(largest)]


def test_no_change_point_in_noise() -> None:
    """What is there from the start on has no beginning, however it is spread."""
    chance = numpy.random.default_rng(1)
    for _ in range(50):
        values = 40_000 + 10_000 * chance.standard_normal(200)
        assert statistics.find_start([(at, us, 1.0) for at, us in enumerate(values)]) == 0
    assert statistics.find_start([(1, 5.0, 1.0)] * 5) == 0


def set_model(window: Window, large_share: float) -> Window:
    """The window with so many of its requests for a larger model, which computes three times as long."""
    every = round(1 / large_share)
    return [
        replace(
            each,
            model="large",
            stages={**each.stages, "prefill.compute": 3 * each.stages["prefill.compute"]},
        )
        if number % every == 0
        else replace(each, model="small")
        for number, each in enumerate(window)
    ]


def test_other_models_are_mix() -> None:
    """More requests for a larger model: no stage of like requests became longer."""
    found = compare_windows(
        set_model(make_sized_window(1), 0.1), set_model(make_sized_window(2), 0.5)
    )
    assert [change.name for change in found.named] == [MIX]
    assert found.mix.change_us > 20_000


def test_two_models_are_compared() -> None:
    """Windows without a common model, as of a model that was renamed: like requests are of like prompts."""
    one, other = (
        [replace(each, model=name) for each in make_sized_window(seed)]
        for seed, name in ((1, "a"), (2, "b"))
    )
    found = compare_windows(one, delay_stage(other, "prefill.queue", 30_000))
    assert [change.name for change in found.named] == ["prefill.queue"]
    assert found.unmatched_share == 0


def test_clock_errors() -> None:
    """A change that is no larger than what the clocks may be off: told with it."""
    slower = delay_stage(make_sized_window(2), "prefill.queue", 30_000)
    for error_us in (5_000, 40_000):
        b = [replace(each, clock_error_us=error_us) for each in slower]
        found = compare_windows(make_sized_window(1), b)
        assert [change.name for change in found.named] == ["prefill.queue"]
        assert ("40.0 ms off" in " ".join(list_notes(found))) == (error_us == 40_000)


def change_some(
    window: Window,
    affects: Callable[[int, RequestFacts], bool],
    factor: float = 1.0,
    wait_us: int = 0,
    work: float = 1.0,
    **fields: Any,
) -> Window:
    """The window with longer steps, a longer queue or other fields of the requests that `affects` takes.

    work: so many times as many tokens in a step.
    """

    def change(each: RequestFacts) -> RequestFacts:
        compute = round(each.stages["prefill.compute"] * factor)
        queue = each.stages["prefill.queue"] + wait_us
        stages = {**each.stages, "prefill.compute": compute, "prefill.queue": queue}
        tokens = round(work * each.step_tokens)
        return replace(each, stages=stages, compute_us=compute, step_tokens=tokens, **fields)

    return [change(each) if affects(at, each) else each for at, each in enumerate(window)]


def move(window: Window, instance: str, affects: Callable[[int], bool]) -> Window:
    """The window with so many of its requests at one instance."""
    return [
        replace(each, instance=instance, instances=dict.fromkeys(each.instances, instance))
        if affects(number)
        else each
        for number, each in enumerate(window)
    ]


def compare(a: Window, b: Window, lost: LostRequests | None = None) -> ChangeAnswer:
    counts = dict.fromkeys((LATE, OTHER, LOST, REFUSED), 100)
    coverage = Coverage(counts, counts, 0, SECOND_NS, 2 * SECOND_NS)
    return compare_sides(
        WindowReading(a, LostRequests(), coverage),
        WindowReading(b, lost or LostRequests(), coverage),
    )


def is_second(_: int, each: RequestFacts) -> bool:
    return each.instance == "chat-1"


def make_shifted() -> tuple[Window, Window]:
    """Simpson: chat-1 is slow, has most of the requests afterwards, and both are faster than before."""
    a = move(make_window(), "chat-0", lambda number: number % 10 != 1)
    b = move(make_window(seed=2), "chat-1", lambda number: number % 10 != 2)
    return change_some(a, is_second, 3.0), change_some(
        change_some(b, is_second, 3.0), everybody, 0.95
    )


def make_lost() -> tuple[Window, Window]:
    """chat-1 serves nothing from the 150th request on, and the others wait."""
    b = move(make_window(seed=2), "chat-0", lambda number: number >= 150)
    return make_window(), change_some(b, lambda number, _: number >= 150, wait_us=60_000)


def make_busy() -> tuple[Window, Window]:
    """The same requests in a third of the time."""
    b = [
        replace(each, start_ns=each.start_ns - number * 2 * SECOND_NS // 3)
        for number, each in enumerate(make_window(seed=2))
    ]
    return make_window(), change_some(b, everybody, wait_us=60_000)


def make_larger() -> tuple[Window, Window]:
    """Every second prompt is eight times as long, and takes so long."""
    b = make_window(seed=2)
    large = change_some(b, everybody, 8.0, work=8.0)
    return make_window(), [
        replace(many, tokens=8 * many.tokens) if number % 2 == 0 else each
        for number, (each, many) in enumerate(zip(b, large, strict=True))
    ]


def make_cold() -> tuple[Window, Window]:
    """Most of a prompt was in the cache, and is not from the 100th request on: four times the work."""
    b = change_some(make_window(seed=2), lambda at, _: at < 100, cached=480)
    return change_some(make_window(), everybody, cached=480), change_some(
        b, lambda at, _: at >= 100, 4.0, work=4.0, cached=0
    )


@pytest.mark.parametrize(
    ("windows", "kind", "words"),
    [
        (
            lambda: (make_window(), change_some(make_window(seed=2), lambda at, _: at >= 150, 4.0)),
            cause_kinds.SLOW_FLEET,
            " times as long as before for the same work since ",
        ),
        (
            lambda: (make_window(), change_some(make_window(seed=2), is_second, 2.0)),
            cause_kinds.SLOW_INSTANCE,
            "steps of chat-1 take ",
        ),
        (make_shifted, cause_kinds.INSTANCE_SHIFT, "other instances served them (chat-1: 10% to 9"),
        (make_lost, cause_kinds.LOST_INSTANCE, "chat-1 served no more requests since "),
        (make_busy, cause_kinds.LOAD_INCREASE, "3.01 requests came in a second, 1 before"),
        (make_larger, cause_kinds.MIX_CHANGE, "other requests came: mean prompt "),
        (make_cold, cause_kinds.COLD_PREFIX_CACHE, "prefix-cache hits fell from 6"),
        (lambda: (make_window(), make_window(seed=2)), cause_kinds.NOTHING, "B is no later than A"),
        (
            lambda: (change_some(make_window(), everybody, 2.0), make_window(seed=2)),
            cause_kinds.NOTHING,
            "B is no later than A",
        ),
    ],
)
def test_cause(windows: Callable[[], tuple[Window, Window]], kind: str, words: str) -> None:
    """The cause is the first sentence, with its figures, in an answer of six lines."""
    answer = compare(*windows())
    sentences = list_sentences(answer)
    assert answer.cause.kind == kind, sentences
    assert words in sentences[0] and len(sentences) <= MAX_LINES
    assert " A: 400 requests from " in sentences[0]


def test_two_of_three_are_slow() -> None:
    """Neither is told as the only one; of one alone that is said."""
    a, b = (
        move(make_window(seed=seed), "chat-2", lambda number: number % 3 == 0) for seed in (1, 2)
    )
    two = compare(a, change_some(b, lambda _, each: each.instance != "chat-2", 3.0)).cause
    one = compare(a, change_some(b, is_second, 3.0)).cause
    assert (two.kind, one.kind) == (cause_kinds.SLOW_INSTANCE,) * 2
    assert "those of others do not" not in two.sentence
    assert "as those of some others do" in two.sentence
    assert "those of others do not" in one.sentence


def test_an_encoder_that_nobody_needs() -> None:
    """An encoder that serves nothing while no media come is not lost, however late the others are."""

    def encode(window: Window, *places: str) -> Window:
        return [
            replace(each, instances={**each.instances, "encode.encoder.compute": place})
            if (place := places[number % len(places)])
            else each
            for number, each in enumerate(window)
        ]

    b = change_some(make_window(seed=2), everybody, wait_us=60_000)
    unneeded = compare(encode(make_window(), "encoder-0", ""), b)
    assert unneeded.cause.kind != cause_kinds.LOST_INSTANCE, list_sentences(unneeded)
    # Counter-test: requests that need one, and have none of it.
    cause = compare(encode(make_window(), "encoder-0", "encoder-1"), encode(b, "encoder-1")).cause
    assert (cause.kind, cause.subject) == (cause_kinds.LOST_INSTANCE, "encoder-0")


def test_an_instance_whose_work_kept_nobody_waiting() -> None:
    """One serves no more, and each request is late in a stage that no other request makes longer."""
    b = move(make_window(seed=2), "chat-0", lambda number: number >= 150)
    late = [
        *b[:150],
        *(replace(each, stages={**each.stages, "dispatch": 60_000}) for each in b[150:]),
    ]
    assert compare(make_window(), late).cause.kind != cause_kinds.LOST_INSTANCE


def test_lost_first() -> None:
    """Where a tenth is lost, what the others say is no answer: percentiles are bounded with the lost ones."""
    lost = LostRequests(total=40, left=40, lengths_us=(5_000_000,) * 20)
    answer = compare(make_window(), make_window(seed=2), lost)
    assert answer.cause.kind == cause_kinds.LOST_REQUESTS and answer.remedy is None
    assert "40 of B's 340 requests ended without a first token" in answer.cause.sentence
    assert "p95 at least 5.00 s" in answer.cause.sentence


P95 = parse_condition("ttft.p95 > +10%")
MEAN = parse_condition("prefill.queue.mean > +20ms")


def make_queued_window(
    seed: int, factor: float = 1.0, longer_us: int = 0, count: int = 400
) -> Window:
    """Requests a second apart, each of whose queues is like the one before: an AR(1) of its logarithm."""
    chance = numpy.random.default_rng(seed)
    state, window = chance.normal(), []
    for number in range(count):
        state = 0.7 * state + 0.51**0.5 * chance.normal()  # its variance stays 1
        queue = 30_000 * numpy.exp(0.4 * state)
        window.append(
            RequestFacts(
                f"r{seed}-{number}",
                number * 10**9,
                {
                    "prefill.queue": round(queue * factor) + longer_us,
                    "prefill.compute": round(40_000 * factor),
                },
            )
        )
    return window


def judge(condition: Condition, seeds: int, **change: Any) -> list[str]:
    """The verdicts over pairs of windows of which the second one has this change."""
    return [
        judge_windows(
            [condition], make_queued_window(seed), make_queued_window(1000 + seed, **change)
        )[0].outcome
        for seed in range(seeds)
    ]


@pytest.mark.parametrize("seeds", [10, pytest.param(60, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("condition", "change", "wanted"),
    [
        (P95, {"factor": 1.5}, WORSE),
        (P95, {"factor": 0.9}, AS_ASKED),
        (MEAN, {"longer_us": 35_000}, WORSE),
        (MEAN, {}, AS_ASKED),
    ],
)
def test_clear_changes(
    condition: Condition, change: dict[str, Any], wanted: str, seeds: int
) -> None:
    """Far from the threshold nearly all windows get the true verdict, and none the opposite one."""
    outcomes = judge(condition, seeds, **change)
    assert outcomes.count(wanted) >= 0.9 * seeds, outcomes
    assert set(outcomes) <= {wanted, UNKNOWN}


@pytest.mark.parametrize("seeds", [20, pytest.param(60, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("condition", "change"), [(P95, {"factor": 1.1}), (MEAN, {"longer_us": 20_000})]
)
def test_at_the_threshold(condition: Condition, change: dict[str, Any], seeds: int) -> None:
    """A change that is the threshold itself is neither, although neighbours in time are alike."""
    outcomes = judge(condition, seeds, **change)
    # 3 % are expected to be decided; drawn by request instead of by block, a quarter is.
    assert outcomes.count(UNKNOWN) >= 0.85 * seeds, outcomes


def test_what_cannot_be_told() -> None:
    """Few requests, lost ones, a stage that nobody has, a percentage of nothing: each says which."""
    window = make_queued_window(1)
    few = judge_windows([P95], window[:99], window)[0]
    assert (few.outcome, few.reason) == (UNKNOWN, "A has 99 requests with ttft, 100 are needed")
    lost = judge_windows([P95], window, make_queued_window(2), (0.0, 0.02))[0]
    assert lost.outcome == UNKNOWN and "2.0% of B's requests" in lost.reason
    unknown = parse_condition("encoder.compute.mean > 5%")
    assert "B has 0 requests" not in judge_windows([unknown], window, window)[0].reason
    assert "A has 0 requests" in judge_windows([unknown], window, window)[0].reason
    idle = [RequestFacts("r", number, {"prefill.queue": 0}) for number in range(100)]
    nothing = judge_windows([parse_condition("prefill.queue.mean > 5%")], idle, idle)[0]
    assert nothing.outcome == UNKNOWN and "0 in A" in nothing.reason


@pytest.mark.parametrize(
    "text", ["ttft", "ttft.p95", "ttft.p95 < 5%", "ttft.p95 > 5", "ttft.p0 > 1%"]
)
def test_wrong_conditions(text: str) -> None:
    """Refused with the text in it."""
    with pytest.raises(ValueError, match="condition|percentile") as error:
        parse_condition(text)
    assert text in str(error.value)


def test_forms() -> None:
    """One worse condition decides for all; JUnit, Markdown and JSON have every verdict."""
    conditions = [
        P95,
        parse_condition("prefill.queue.mean > +60ms"),
        parse_condition("x|y.mean > 1s"),
    ]
    verdicts = judge_windows(conditions, make_queued_window(1), make_queued_window(2, factor=1.5))
    assert [each.outcome for each in verdicts] == [WORSE, AS_ASKED, UNKNOWN]
    assert find_outcome(verdicts) == WORSE and find_outcome(verdicts[1:]) == UNKNOWN
    suite = ElementTree.fromstring(build_junit(verdicts))
    assert [suite.get(name) for name in ("tests", "failures", "errors")] == ["3", "1", "1"]
    assert [case[0].tag for case in suite] == ["failure", "system-out", "error"]
    table = build_markdown(verdicts, ["+1 ms <b>x</b>."])
    assert "| `ttft.p95 > +10%` | worse | " in table and "`x\\|y.mean > 1s`" in table
    assert "\\<b\\>" in table
    described = describe_gate(verdicts)["conditions"]
    assert described[0]["unit"] == "%" and 30 < described[0]["change"] < 80
    assert described[1]["low"] < described[1]["change"] < described[1]["high"] < 60


def test_weights() -> None:
    """A request of a sample counts for as many as it stands for: half of the fast ones says the same."""
    whole = make_queued_window(1) + make_queued_window(2, longer_us=90_000)
    sample = [
        replace(each, weight=2.0) if number < 400 else each
        for number, each in enumerate(whole)
        if number % 2 == 0 or number >= 400
    ]
    of_whole, of_sample = (
        describe_gate(judge_windows([MEAN], make_queued_window(3), window))["conditions"][0]
        for window in (whole, sample)
    )
    assert of_sample["b_ms"] == pytest.approx(of_whole["b_ms"], rel=0.03)
