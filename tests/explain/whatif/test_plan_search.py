# SPDX-License-Identifier: Apache-2.0
"""The cheapest plan that holds targets: vLLM's own Scheduler holds them with it, and not with less."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.explain.recorded_window import SMALL, find_truth, learn
from tests.explain.whatif.scheduler_truth import LINEAR, draw_arrivals
from ttft_otel.explain.whatif import plan_search, what_if_text
from ttft_otel.explain.whatif.plan_search import FoundPlan
from ttft_otel.explain.whatif.planned_change import PlannedChange
from ttft_otel.explain.window.request_facts import CannotTellError

pytestmark = pytest.mark.filterwarnings("ignore")
ARRIVALS = draw_arrivals(34, 120, 30_000, (5, 25))
REPETITIONS = 3


def search(targets: str, devices: int = 1, tells_answers: bool = True) -> FoundPlan:
    """The plan for the window of so many instances."""
    learned = learn(ARRIVALS, SMALL, tells_answers, (LINEAR,) * devices)
    calls: list[int] = []
    try:
        return plan_search.search_plan(
            learned,
            plan_search.parse_targets(targets),
            PlannedChange(),
            REPETITIONS,
            calls.append,
        )
    finally:
        assert len(calls) <= plan_search.count_replays(REPETITIONS)


def test_setting() -> None:
    """More places hold the target on the one instance that is there: nothing is bought."""
    (before,) = find_truth(ARRIVALS, SMALL, shares=(0.95,))
    target_ms = before / 1000 / 2
    found = search(f"ttft_p95={target_ms}")
    change = found.answer.change
    assert change.instances == 0 and change.max_num_seqs > SMALL.max_num_seqs
    assert found.held >= 0.9 * REPETITIONS
    limits = replace(
        SMALL,
        max_num_seqs=change.max_num_seqs,
        max_batched_tokens=change.max_batched_tokens or SMALL.max_batched_tokens,
    )
    assert find_truth(ARRIVALS, limits, shares=(0.95,))[0] <= 1000 * target_ms < before
    text = what_if_text.name_found(found)
    assert "plans that holds ttft_p95 <= " in text
    assert f": 1 instance with --max-num-seqs {change.max_num_seqs}" in text


def test_fewer_instances() -> None:
    """Where two hold it easily, one with other settings does, too."""
    found = search("ttft_p95=200,tpot_p99=100", devices=2)
    assert found.answer.change.instances == -1


def test_nothing_holds() -> None:
    """No plan is faster than a prompt's own computing: it says how near the nearest one comes."""
    nearest = "with up to 5 instances holds ttft_p50 <= 1 ms .* nearest"
    with pytest.raises(CannotTellError, match=nearest):
        search("ttft_p50=1")
    with pytest.raises(CannotTellError, match="do not tell the time per output token"):
        search("tpot_p99=5", tells_answers=False)
