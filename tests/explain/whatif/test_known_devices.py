# SPDX-License-Identifier: Apache-2.0
"""What-if answers where devices are no straight line, not alike, or stop, against vLLM's Scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy
import pytest

from tests.explain.recorded_window import BEFORE_US, find_truth, predict, record, serve
from tests.explain.whatif.scheduler_truth import LINEAR, Arrival, Device, draw_arrivals
from ttft_otel.explain.whatif.engine_model import EngineLimits
from ttft_otel.explain.whatif.planned_change import PlannedChange
from ttft_otel.explain.whatif.step_fit import StepSamples
from ttft_otel.explain.whatif.what_if_figures import TTFT
from ttft_otel.explain.window.request_facts import CannotTellError

pytestmark = pytest.mark.filterwarnings("ignore")
LIMITS = EngineLimits(16, 512)
SLOW = replace(LINEAR, speed=2.5)
READING = replace(LINEAR, context_us=2.0)
PAUSED = replace(LINEAR, pauses=((2_000_000, 2_900_000), (6_000_000, 6_700_000)))
ROOFLINE = Device(base_us=1000, floor_us=6000, token_us=90)


def hasten(arrivals: list[Arrival], rate: float) -> list[Arrival]:
    """The same, so many times as fast."""
    return [replace(each, at_us=round(each.at_us / rate)) for each in arrivals]


@dataclass
class Case:
    """A window and a change. then: arrivals, limits and devices after it."""

    arrivals: list[Arrival]
    devices: tuple[Device, ...]
    change: PlannedChange
    then: Callable[[Case], tuple[list[Arrival], EngineLimits, tuple[Device, ...]]]
    limits: EngineLimits = LIMITS


def rate_case(arrivals: list[Arrival], *devices: Device, rate: float = 1.5) -> Case:
    return Case(
        arrivals,
        devices,
        PlannedChange(rate=rate),
        lambda case: (hasten(case.arrivals, rate), case.limits, case.devices),
    )


def more_case(arrivals: list[Arrival], limits: EngineLimits) -> Case:
    return Case(
        arrivals,
        (LINEAR,),
        PlannedChange(instances=1),
        lambda case: (case.arrivals, case.limits, (LINEAR, LINEAR)),
        limits,
    )


CASES = {
    # Its slowness was in the noise of all instances and in its own speed.
    "slow_instance": rate_case(draw_arrivals(31, 450, 14_000, (5, 25)), LINEAR, LINEAR, SLOW),
    # A pass had no term for what decodes read.
    "contexts": rate_case(draw_arrivals(32, 300, 60_000, (20, 80)), READING),
    "heavy_tail": rate_case(draw_arrivals(33, 300, 22_000, (5, 25), sigma=1.8), LINEAR),
    "kv_blocks": more_case(
        draw_arrivals(19, 300, 40_000, (20, 60)), replace(LIMITS, kv_tokens=2400)
    ),
    # More came than was served: the arrivals are known all the same.
    "overload": more_case(draw_arrivals(34, 300, 16_000, (5, 25)), replace(LIMITS, max_num_seqs=4)),
}


@pytest.mark.parametrize("name", CASES)
def test_known_device(name: str) -> None:
    """p50 and p95 within 10 %, p95 in its interval, time per output token within 15 %."""
    case = CASES[name]
    answer, predicted = predict(
        record(case.arrivals, case.limits, tells_answers=True, devices=case.devices), case.change
    )
    arrivals, limits, devices = case.then(case)
    truth = find_truth(arrivals, limits, devices)
    before = find_truth(case.arrivals, case.limits, case.devices)
    assert abs(truth[1] / before[1] - 1) > 0.1, "a change that changes nothing would test nothing"
    assert predicted == pytest.approx(truth, rel=0.1)
    assert answer.figures[TTFT][1].low <= truth[1] <= answer.figures[TTFT][1].high
    times = [
        (one.end - one.first_token) / (each.answer - 1)
        for each, one in zip(arrivals, serve(arrivals, limits, devices), strict=True)
    ]
    assert [each.predicted for each in answer.token_time] == pytest.approx(
        numpy.quantile(times, (0.5, 0.95, 0.99)), rel=0.15
    )


def test_speeds() -> None:
    """A slow instance is slow by its factor; the others, and one that is added, are as the line says."""
    arrivals = CASES["slow_instance"].arrivals
    recording = record(arrivals, LIMITS, tells_answers=True, devices=(LINEAR, LINEAR, SLOW))
    fit = StepSamples([each.main for each in recording.requests], False, {}).fit
    assert fit.speeds == {
        "chat-1": pytest.approx(1, rel=0.03),
        "chat-2": pytest.approx(1, rel=0.03),
        "chat-3": pytest.approx(2.5, rel=0.05),
    }
    assert fit.unexplained < 0.03 and fit.build_times("+1", None).speed == 1


def test_pauses() -> None:
    """Times in which an engine's process stood still are found, and are as long after a change."""
    arrivals = draw_arrivals(35, 300, 40_000, (5, 25))
    recording = record(arrivals, LIMITS, devices=(PAUSED,))
    found = StepSamples([each.main for each in recording.requests], False, {}).pauses["chat-1"]
    assert numpy.array(found) == pytest.approx(numpy.array(PAUSED.pauses), abs=60_000)
    answer, _ = predict(recording, PlannedChange(max_batched_tokens=256))
    truth = find_truth(arrivals, replace(LIMITS, max_batched_tokens=256), (PAUSED,), (0.95, 0.99))
    assert truth[1] > 500_000
    assert [each.predicted for each in answer.figures[TTFT][1:]] == pytest.approx(truth, rel=0.1)


@pytest.mark.full
def test_extrapolation() -> None:
    """Intervals grow with the distance from what was seen, and hold the truth there."""
    arrivals = draw_arrivals(36, 300, 60_000, (5, 25), sigma=1.6)
    small = replace(LIMITS, max_batched_tokens=128)
    recording = record(arrivals, small, tells_answers=True, devices=(ROOFLINE,))
    widths = []
    for budget in (160, 512):
        figure = predict(recording, PlannedChange(max_batched_tokens=budget), repetitions=10)[
            0
        ].figures[TTFT][1]
        truth = find_truth(arrivals, replace(small, max_batched_tokens=budget), (ROOFLINE,))[1]
        assert figure.low <= truth <= figure.high
        widths.append((figure.high - figure.low) / figure.predicted)
    assert widths[1] > 1.3 * widths[0]


def test_overload() -> None:
    """An overloaded window has no answer while it stays overloaded."""
    case = CASES["overload"]
    recording = record(case.arrivals, case.limits)
    with pytest.raises(CannotTellError, match="in the prediction more requests arrive"):
        predict(recording, PlannedChange())


def test_lead_of_chunks() -> None:
    """Prompts of several chunks have the host's part of each in `dispatch`; a step has it once."""
    lead_us, chunks = 3000, 4
    requests = record(draw_arrivals(37, 200), LIMITS).requests
    visits = [
        replace(
            each.main,
            chunks=chunks,
            stages={**each.main.stages, "dispatch": chunks * lead_us, "kv.transfer": 9000},
        )
        for each in requests
    ]
    times = StepSamples(visits, False, {}).fit.build_times("chat-1", None)
    assert times.leads[0] + times.gap_us == pytest.approx(lead_us, rel=0.01)
    assert BEFORE_US < lead_us
