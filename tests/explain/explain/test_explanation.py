# SPDX-License-Identifier: Apache-2.0
"""Windows with a known cause: its share is right, sums close, and what cannot be told is refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.explain.sample_windows import CASES, DELAY_US, Cause, delay_some, make_window
from ttft_otel.explain import cause_kinds
from ttft_otel.explain.explain.cause_choice import HIGH, LOW
from ttft_otel.explain.explain.cause_findings import divide_difference
from ttft_otel.explain.explain.explanation import divide_lateness, explain_requests
from ttft_otel.explain.explain.explanation_text import list_explanation
from ttft_otel.explain.window.late_requests import (
    MIN_LIKE,
    MIN_WINDOW,
    choose_like,
    split_window,
)
from ttft_otel.explain.window.request_facts import CannotTellError, RequestFacts

SLO_US = 300_000


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
    assert found.cause.chosen is not None
    assert (found.cause.kind, found.cause.chosen.subject) == (cause_kinds.SET_ASIDE, "paused")
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
