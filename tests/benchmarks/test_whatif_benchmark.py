# SPDX-License-Identifier: Apache-2.0
"""The what-if benchmark's load and its judgement, without servers."""

from __future__ import annotations

import random

from benchmarks.whatif import build_figures
from benchmarks.whatif_changes import Outcome
from benchmarks.whatif_servers import BLOCK_TOKENS, build_request, plan_load


def make_outcome(predicted: list[float], repeated: float = 1.0) -> Outcome:
    """repeated: the unchanged window once more, relative to what it was before."""
    return Outcome(
        *("rate", [100.0, 300.0], predicted, [[0, 1], [0, 1]], [0.0, 0.0]),
        measured=[150.0, 600.0],
        repeated=[100 * repeated, 300 * repeated],
    )


def test_figures() -> None:
    """The mean error over p50 and p95 decides; a wrong prediction misses the goal."""
    right = build_figures([make_outcome([150.0, 660.0])])
    wrong = build_figures([make_outcome([110.0, 400.0])])

    assert right["mean_error"]["value"] == 0.05 and right["mean_error"]["met"]
    assert right["mean_error_of_no_change"]["value"] == 0.417
    assert not wrong["mean_error"]["met"]


def test_drift() -> None:
    """A machine that was another one afterwards does not judge, whichever way it went."""
    wrong = [110.0, 400.0]
    assert build_figures([make_outcome(wrong, 0.95)])["mean_error"]["met"] is False
    for factor in (0.8, 1.25):
        figures = build_figures([make_outcome(wrong, factor)])
        assert figures["judged"]["value"] == 0 and "mean_error" not in figures
        both = build_figures([make_outcome(wrong, factor), make_outcome([150.0, 660.0])])
        assert both["judged"]["value"] == 1 and both["mean_error"]["value"] == 0.05


def test_cached_prompts() -> None:
    """Prompts share whole blocks of their beginning, as much as is asked for; the rest is their own."""
    planned = plan_load(200, 80)
    prompts = [
        build_request(each, random.Random(number), 0.4).extra["prompt"]
        for number, each in enumerate(planned)
    ]
    longest = max(prompts, key=len)
    shared = [
        next((at for at, (a, b) in enumerate(zip(each, longest, strict=False)) if a != b), 0)
        // BLOCK_TOKENS
        * BLOCK_TOKENS
        for each in prompts
        if each is not longest
    ]

    assert [len(each) for each in prompts] == [each.tokens for each in planned]
    assert 0.36 < sum(shared) / sum(len(each) for each in prompts if each is not longest) < 0.44


def test_load() -> None:
    """Every run has the same arrivals and lengths; prompts have one to four chunks."""
    planned = plan_load(200, 80)

    assert planned == plan_load(200, 80)
    assert {-(-each.tokens // 512) for each in planned} == {1, 2, 3, 4}
    assert all(a.at_s <= b.at_s for a, b in zip(planned, planned[1:], strict=False))
