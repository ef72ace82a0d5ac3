# SPDX-License-Identifier: Apache-2.0
"""Two windows that differ in one thing: `diff` says which, and a window like the other one has no cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.explain.sample_windows import SECOND_NS, make_window
from ttft_otel.explain import cause_kinds
from ttft_otel.explain.diff.change_cause import ChangeAnswer, compare_sides
from ttft_otel.explain.diff.difference_text import MAX_LINES, list_sentences
from ttft_otel.explain.window.request_facts import LostRequests, RequestFacts
from ttft_otel.explain.window.window_reading import WindowReading
from ttft_otel.report.window_sample import LATE, LOST, OTHER, REFUSED, Coverage

Window = list[RequestFacts]


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


def everybody(*_: object) -> bool:
    return True


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
    assert cause.kind == cause_kinds.LOST_INSTANCE and cause.chosen is not None
    assert cause.chosen.subject == "encoder-0"


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
