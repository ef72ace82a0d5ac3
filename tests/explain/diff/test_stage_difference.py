# SPDX-License-Identifier: Apache-2.0
"""Two windows of made requests with a known difference: it is named with its size, chance is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy
import pytest

from ttft_otel.explain.diff.difference_text import list_notes
from ttft_otel.explain.diff.stage_difference import (
    MIN_REQUESTS,
    MIX,
    compare_windows,
)
from ttft_otel.explain.window.request_facts import (
    MEDIA,
    MIN_PER_WINDOW,
    TEXT,
    UNMATCHED,
    CannotTellError,
    RequestFacts,
    assign_strata,
)
from ttft_otel.model import statistics

SECOND_NS = 1_000_000_000
Chance = numpy.random.Generator


def make_request(chance: Chance, number: int, media_share: float = 0.3) -> RequestFacts:
    """A request whose times follow its size, with the skew of real ones."""
    kind = MEDIA if chance.random() < media_share else TEXT
    tokens = int(chance.choice([100, 400, 3000]))
    preprocess = 30_000 if kind == MEDIA else 2_000
    return RequestFacts(
        f"r{number}",
        1_700_000_000 * SECOND_NS + number * SECOND_NS,
        {
            "preprocess": round(preprocess * chance.lognormal(0, 0.3)),
            "prefill.queue": round(chance.exponential(20_000)),
            "prefill.compute": round(tokens * 40 * chance.lognormal(0, 0.1)),
            "unattributed": round(chance.exponential(300)),
        },
        tokens=tokens,
        cached=0,
        kind=kind,
    )


def make_window(seed: int, count: int = 300, media_share: float = 0.3) -> list[RequestFacts]:
    """A window of `count` requests, a second apart."""
    chance = numpy.random.default_rng(seed)
    return [make_request(chance, number, media_share) for number in range(count)]


def delay_stage(
    window: list[RequestFacts], stage: str, us: int, affects: Callable[[int, RequestFacts], bool]
) -> list[RequestFacts]:
    """The window with `us` more in a stage of those requests that `affects(index, request)` takes."""
    return [
        replace(each, stages={**each.stages, stage: each.stages[stage] + us})
        if affects(index, each)
        else each
        for index, each in enumerate(window)
    ]


def test_a_delay_is_named_with_its_size() -> None:
    """41 ms more in one stage of B: that stage alone is named, and its size is right to 5 %."""
    before = make_window(1)
    # The same requests, so that the size is known; other draws come in test_intervals_hold.
    after = delay_stage(before, "prefill.compute", 41_000, lambda *_: True)
    found = compare_windows(before, after)
    assert [change.name for change in found.named] == ["prefill.compute"]
    assert found.named[0].change_us == pytest.approx(41_000, rel=0.05)
    assert found.p50.named and found.p50.change_us == pytest.approx(41_000, rel=0.2)
    assert (found.named[0].kind, found.named[0].since_ns) == ("", 0)


def test_parts_add_up() -> None:
    """Changes of the stages and of the mix are the change of the mean, whatever the windows."""
    for seed in range(4):
        a, b = make_window(seed, 50), make_window(seed + 100, 80, media_share=0.8)
        found = compare_windows(a, b)
        total = sum(change.change_us for change in found.stages) + found.mix.change_us
        assert total == pytest.approx(found.ttft.change_us)
        means = [sum(each.ttft_us for each in window) / len(window) for window in (a, b)]
        assert found.ttft.change_us == pytest.approx(means[1] - means[0])


def test_a_changed_mix_is_called_a_mix() -> None:
    """More media requests, each as fast as before: the mean rises, and no stage is named."""
    a, b = make_window(3), make_window(4, media_share=0.9)
    found = compare_windows(a, b)
    assert [change.name for change in found.named] == [MIX]
    changed = sum(each.kind == MEDIA for each in b) - sum(each.kind == MEDIA for each in a)
    # A media request takes 30 ms instead of 2 in preprocess, and a lognormal's mean is 5 % above.
    assert found.mix.low_us < changed / 300 * 28_000 * 1.046 < found.mix.high_us


def test_whose_and_since_when() -> None:
    """A delay of media requests that begins in the middle of B is told as such."""
    after = delay_stage(
        make_window(6, 600),
        "preprocess",
        40_000,
        lambda index, each: each.kind == MEDIA and index >= 300,
    )
    found = compare_windows(make_window(5, 600), after)
    (change,) = found.named
    assert (change.name, change.kind) == ("preprocess", MEDIA)
    began_s = (change.since_ns - after[0].start_ns) / SECOND_NS
    assert 300 <= began_s <= 306  # the first media request from then on


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(each, marks=pytest.mark.full) for each in (1, 2))]
)
def test_intervals_hold(seed: int) -> None:
    """Windows of different requests: the true size of an injected delay is inside of its interval."""
    after = delay_stage(make_window(seed + 20), "prefill.queue", 30_000, lambda *_: True)
    found = compare_windows(make_window(seed + 10), after)
    (queue,) = (change for change in found.stages if change.name == "prefill.queue")
    assert queue.low_us <= 30_000 <= queue.high_us and queue.named


def count_false_alarms(trials: int) -> int:
    """How many of so many windows name something when compared with another one of the same kind."""
    return sum(
        bool(compare_windows(make_window(2 * trial, 120), make_window(2 * trial + 1, 120)).named)
        for trial in range(1000, 1000 + trials)
    )


def test_nothing_against_itself() -> None:
    """Two windows of one system name nothing, in nearly all of 12 fixed trials; --full has 500."""
    assert count_false_alarms(12) <= 1


@pytest.mark.full
def test_nothing_against_itself_often() -> None:
    """A against A names nothing in at least 94 % of 500 trials."""
    assert count_false_alarms(500) <= 30


def test_too_few() -> None:
    """A window that cannot tell is refused, and the sentence says which."""
    with pytest.raises(CannotTellError, match="window B has 5 requests"):
        compare_windows(make_window(1), make_window(2, 5))
    assert compare_windows(make_window(1, MIN_REQUESTS), make_window(2, MIN_REQUESTS))


def test_strata_need_both_windows() -> None:
    """A stratum that a window has too few of is joined with others; a kind of one window is unmatched."""
    text, media = make_window(1, 40, media_share=0), make_window(2, 40, media_share=1)
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


def set_model(window: list[RequestFacts], large_share: float) -> list[RequestFacts]:
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
    found = compare_windows(set_model(make_window(1), 0.1), set_model(make_window(2), 0.5))
    assert [change.name for change in found.named] == [MIX]
    assert found.mix.change_us > 20_000


def test_two_models_are_compared() -> None:
    """Windows without a common model, as of a model that was renamed: like requests are of like prompts."""
    one, other = (
        [replace(each, model=name) for each in make_window(seed)]
        for seed, name in ((1, "a"), (2, "b"))
    )
    found = compare_windows(one, delay_stage(other, "prefill.queue", 30_000, lambda *_: True))
    assert [change.name for change in found.named] == ["prefill.queue"]
    assert found.unmatched_share == 0


def test_clock_errors() -> None:
    """A change that is no larger than what the clocks may be off: told with it."""
    slower = delay_stage(make_window(2), "prefill.queue", 30_000, lambda *_: True)
    for error_us in (5_000, 40_000):
        b = [replace(each, clock_error_us=error_us) for each in slower]
        found = compare_windows(make_window(1), b)
        assert [change.name for change in found.named] == ["prefill.queue"]
        assert ("40.0 ms off" in " ".join(list_notes(found))) == (error_us == 40_000)
