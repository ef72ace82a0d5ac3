# SPDX-License-Identifier: Apache-2.0
"""The what-if benchmark's load and its judgement, without servers."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import whatif_known
from benchmarks.whatif import build_figures
from benchmarks.whatif_changes import Outcome
from benchmarks.whatif_known import Judged
from benchmarks.whatif_servers import BLOCK_TOKENS, build_request, plan_load
from ttft_otel.explain.whatif.planned_change import PlannedChange


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


@pytest.mark.parametrize(
    ("missed", "changed"),
    [
        ("", {}),
        ("p95_error", {"errors": [0.0, 0.08, 0.0]}),
        ("inside", {"inside": [True, False, True]}),
        ("silent_misses", {"errors": [0.0, 0.0, 0.4]}),
        ("token_time_error", {"token_errors": [0.0, 0.2, 0.0]}),
    ],
)
def test_known_figures(missed: str, changed: dict[str, Any]) -> None:
    """Against a known engine each goal is missed by answers that are wrong in its way alone."""
    right = Judged("rate", errors=[0.0] * 3, inside=[True] * 3, token_errors=[0.0] * 3)
    figures = whatif_known.build_figures([replace(right, **changed)])
    assert [name for name, each in figures.items() if not each["met"]] == [missed] * bool(missed)


def test_known_window() -> None:
    """The engine's own account of a window adds up, and an unchanged one is predicted as it was."""
    window = replace(whatif_known.WINDOWS["usual"], count=120, changes=(PlannedChange(),))
    (judged,) = whatif_known.judge_window("usual", window, 3, 4)
    assert not judged.refusal and max(map(abs, judged.errors)) < 0.15
