# SPDX-License-Identifier: Apache-2.0
"""Verdicts over made windows whose true change is known: a wrong one is as rare as its interval says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import numpy
import pytest

from ttft_otel.explain.diff.release_gate import (
    AS_ASKED,
    UNKNOWN,
    WORSE,
    Condition,
    build_junit,
    build_markdown,
    describe_gate,
    find_outcome,
    judge_windows,
    parse_condition,
)
from ttft_otel.explain.window.request_facts import RequestFacts

P95 = parse_condition("ttft.p95 > +10%")
MEAN = parse_condition("prefill.queue.mean > +20ms")


def make_window(
    seed: int, factor: float = 1.0, longer_us: int = 0, count: int = 400
) -> list[RequestFacts]:
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
        judge_windows([condition], make_window(seed), make_window(1000 + seed, **change))[0].outcome
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
    window = make_window(1)
    few = judge_windows([P95], window[:99], window)[0]
    assert (few.outcome, few.reason) == (UNKNOWN, "A has 99 requests with ttft, 100 are needed")
    lost = judge_windows([P95], window, make_window(2), (0.0, 0.02))[0]
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
    verdicts = judge_windows(conditions, make_window(1), make_window(2, factor=1.5))
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
    whole = make_window(1) + make_window(2, longer_us=90_000)
    sample = [
        replace(each, weight=2.0) if number < 400 else each
        for number, each in enumerate(whole)
        if number % 2 == 0 or number >= 400
    ]
    of_whole, of_sample = (
        describe_gate(judge_windows([MEAN], make_window(3), window))["conditions"][0]
        for window in (whole, sample)
    )
    assert of_sample["b_ms"] == pytest.approx(of_whole["b_ms"], rel=0.03)
