# SPDX-License-Identifier: Apache-2.0
"""What-if answers where devices are no straight line, not alike, or stop, against vLLM's Scheduler."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy
import pytest

from tests.explain.recorded_window import ask, find_token_times, find_truth, learn
from tests.explain.whatif.scheduler_truth import LINEAR, Arrival, Device, draw_arrivals, hasten
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


@dataclass
class Case:
    """A window, how many times as fast its requests come, and how many instances there are more."""

    arrivals: tuple[Arrival, ...]
    devices: tuple[Device, ...] = (LINEAR,)
    limits: EngineLimits = LIMITS
    rate: float = 1.0
    more: int = 0


CASES = {
    # Its slowness was in the noise of all instances and in its own speed.
    "slow_instance": Case(
        draw_arrivals(31, 450, 14_000, (5, 25)), (LINEAR, LINEAR, SLOW), rate=1.5
    ),
    # A pass had no term for what decodes read.
    "contexts": Case(draw_arrivals(32, 300, 60_000, (20, 80)), (READING,), rate=1.5),
    "heavy_tail": Case(draw_arrivals(33, 300, 22_000, (5, 25), sigma=1.8), rate=1.5),
    "kv_blocks": Case(
        draw_arrivals(19, 300, 40_000, (20, 60)), limits=replace(LIMITS, kv_tokens=2400), more=1
    ),
    # More came than was served: the arrivals are known all the same.
    "overload": Case(
        draw_arrivals(34, 200, 16_000, (5, 25)), limits=replace(LIMITS, max_num_seqs=4), more=1
    ),
}
FULL = ("heavy_tail", "kv_blocks")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.full] * (each in FULL)) for each in CASES]
)
def test_known_device(name: str) -> None:
    """p50 and p95 within 10 %, p95 in its interval, time per output token within 15 %."""
    case = CASES[name]
    answer, predicted = ask(
        learn(case.arrivals, case.limits, True, case.devices),
        PlannedChange(rate=case.rate, instances=case.more),
        4,
    )
    after = hasten(case.arrivals, case.rate), case.limits, case.devices + (LINEAR,) * case.more
    truth = find_truth(*after)
    before = find_truth(case.arrivals, case.limits, case.devices)
    assert abs(truth[1] / before[1] - 1) > 0.1, "a change that changes nothing would test nothing"
    assert predicted == pytest.approx(truth, rel=0.1)
    assert answer.figures[TTFT][1].low <= truth[1] <= answer.figures[TTFT][1].high
    assert [each.predicted for each in answer.token_time] == pytest.approx(
        find_token_times(*after), rel=0.15
    )


def test_speeds() -> None:
    """A slow instance is slow by its factor; the others, and one that is added, are as the line says."""
    case = CASES["slow_instance"]
    fit = learn(case.arrivals, case.limits, True, case.devices).samples.fit
    assert fit.speeds == {
        "chat-1": pytest.approx(1, rel=0.03),
        "chat-2": pytest.approx(1, rel=0.03),
        "chat-3": pytest.approx(2.5, rel=0.05),
    }
    assert fit.unexplained < 0.03 and fit.build_times("+1", None).speed == 1


def test_pauses() -> None:
    """Times in which an engine's process stood still are found, and are as long after a change."""
    arrivals = draw_arrivals(35, 250, 40_000, (5, 25))
    learned = learn(arrivals, LIMITS, devices=(PAUSED,))
    found = learned.samples.pauses["chat-1"]
    assert numpy.array(found) == pytest.approx(numpy.array(PAUSED.pauses), abs=60_000)
    answer, _ = ask(learned, PlannedChange(max_batched_tokens=256))
    truth = find_truth(arrivals, replace(LIMITS, max_batched_tokens=256), (PAUSED,), (0.95, 0.99))
    assert truth[1] > 500_000
    assert [each.predicted for each in answer.figures[TTFT][1:]] == pytest.approx(truth, rel=0.1)


@pytest.mark.full
def test_extrapolation() -> None:
    """Intervals grow with the distance from what was seen, and hold the truth there."""
    arrivals = draw_arrivals(36, 300, 60_000, (5, 25), sigma=1.6)
    small = replace(LIMITS, max_batched_tokens=128)
    widths = []
    for budget in (160, 512):
        learned = learn(arrivals, small, True, (ROOFLINE,))
        figure = ask(learned, PlannedChange(max_batched_tokens=budget), 10)[0].figures[TTFT][1]
        truth = find_truth(arrivals, replace(small, max_batched_tokens=budget), (ROOFLINE,))[1]
        assert figure.low <= truth <= figure.high
        widths.append((figure.high - figure.low) / figure.predicted)
    assert widths[1] > 1.3 * widths[0]


def test_overload() -> None:
    """An overloaded window has no answer while it stays overloaded."""
    case = CASES["overload"]
    with pytest.raises(CannotTellError, match="in the prediction more requests arrive"):
        ask(learn(case.arrivals, case.limits, True), PlannedChange())


def test_lead_of_chunks() -> None:
    """Prompts of several chunks have the host's part of each in `dispatch`; a step has it once."""
    lead_us, chunks = 3000, 4
    visits = [
        replace(
            each.main,
            chunks=chunks,
            stages={**each.main.stages, "dispatch": chunks * lead_us, "kv.transfer": 9000},
        )
        for each in learn().requests
    ]
    times = StepSamples(visits, False, {}).fit.build_times("chat-1", None)
    assert times.leads[0] + times.gap_us == pytest.approx(lead_us, rel=0.01)
