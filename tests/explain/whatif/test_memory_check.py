# SPDX-License-Identifier: Apache-2.0
"""Windows and changes in which KV blocks are scarce, against vLLM's own Scheduler."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.explain.recorded_window import SMALL, find_truth, predict, record
from tests.explain.whatif.scheduler_truth import draw_arrivals
from ttft_otel.explain.whatif.planned_change import PlannedChange
from ttft_otel.explain.window.request_facts import CannotTellError
from ttft_otel.model.names import keys

pytestmark = pytest.mark.filterwarnings("ignore")


SCARCE = replace(SMALL, max_num_seqs=16, kv_tokens=2400)


@pytest.mark.parametrize("tells_answers", [False, True])
def test_more_memory(tells_answers: bool) -> None:
    """A window that waits for KV blocks, with twice as many: as in vLLM's Scheduler."""
    arrivals = draw_arrivals(19, 300, 40_000, (20, 60))
    recording = record(arrivals, SCARCE, tells_answers=tells_answers)
    answer, predicted = predict(recording, PlannedChange(kv_cache=2.0))
    truth = find_truth(arrivals, replace(SCARCE, kv_tokens=4800))

    assert predicted == pytest.approx(truth, rel=0.05)
    assert truth[1] < 0.9 * find_truth(arrivals, SCARCE)[1]
    assert max(abs(each) for each in answer.errors) < 0.05
    assert any("KV blocks are scarce" in each for each in answer.notes)
    assert sum(each.main.preemptions for each in recording.requests) > 3


def test_less_memory() -> None:
    """Where the change makes memory scarce that was not, the answer is right and says what is new."""
    arrivals = draw_arrivals(19, 300, 120_000, (20, 60))
    faster = [replace(each, at_us=round(each.at_us / 3)) for each in arrivals]
    limits, change = replace(SCARCE, kv_tokens=4000), PlannedChange(rate=3.0)
    answer, predicted = predict(record(arrivals, limits), change)
    truth = find_truth(faster, limits)

    assert predicted == pytest.approx(truth, rel=0.06)
    assert any("nothing of that was recorded" in each for each in answer.warnings)
    # Counter-test: without the cache's size it is wrong.
    _, wrong = predict(record(arrivals, replace(limits, kv_tokens=0)), change)
    assert wrong[1] < 0.9 * truth[1]


def test_shared_blocks() -> None:
    """Prefixes that requests share take less memory than the model thinks: it is left out, and told."""
    arrivals = draw_arrivals(11, 300, 40_000, (5, 25))
    recording = record(arrivals, SMALL)
    reported = {**recording.settings["chat-1"], keys.ENGINE_KV_TOKENS: 2400}
    sharing = [replace(each, main=replace(each.main, cached=500)) for each in recording.requests]
    sharing_window = replace(recording, requests=tuple(sharing), settings={"chat-1": reported})
    answer, _ = predict(sharing_window, PlannedChange())
    assert any("share cached tokens" in each for each in answer.notes)
    assert max(abs(each) for each in answer.errors) < 0.05
    with pytest.raises(CannotTellError, match="how many of them requests share"):
        predict(sharing_window, PlannedChange(max_num_seqs=10, rate=1.3))
