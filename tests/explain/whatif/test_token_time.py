# SPDX-License-Identifier: Apache-2.0
"""The predicted time per output token, against vLLM's own Scheduler with the changed setting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy
import pytest

from tests.explain.recorded_window import predict, record
from tests.explain.whatif.scheduler_truth import Arrival, draw_arrivals, run_scheduler
from ttft_otel.explain.whatif.engine_model import EngineLimits
from ttft_otel.explain.whatif.planned_change import PlannedChange

pytestmark = pytest.mark.filterwarnings("ignore")


def find_token_times(arrivals: list[Arrival], limits: EngineLimits) -> Any:
    """p50 and p99 of the time per output token that vLLM's Scheduler gives."""
    times = [
        (one.end - one.first_token) / (each.answer - 1)
        for each, one in zip(arrivals, run_scheduler(arrivals, limits), strict=True)
    ]
    return numpy.quantile(times, [0.5, 0.99])


def test_token_time() -> None:
    """The price: with larger steps running answers get their tokens later, as in vLLM's Scheduler."""
    arrivals, small = draw_arrivals(11, 300, 40_000, (5, 25)), EngineLimits(8, 96)
    recording = record(arrivals, small, tells_answers=True)
    answer, _ = predict(recording, PlannedChange(max_batched_tokens=384))
    before, truth = (
        find_token_times(arrivals, each) for each in (small, replace(small, max_batched_tokens=384))
    )

    assert [each.recorded for each in answer.token_time[::2]] == pytest.approx(before, rel=0.001)
    assert [each.predicted for each in answer.token_time[::2]] == pytest.approx(truth, rel=0.05)
    assert 1 + answer.token_time[2].change == pytest.approx(truth[1] / before[1], rel=0.05)
    assert truth[1] > 1.1 * before[1], "a price that is none would test nothing"
    assert max(abs(each) for each in answer.token_errors) < 0.05
    # Without the spans' word nothing is said.
    assert not predict(record(arrivals, small), PlannedChange())[0].token_time
