# SPDX-License-Identifier: Apache-2.0
"""Requests of the simulated device as a user sees them, when their engine cores run on other hosts.

The steps are those of accelerator_cases.py; each host has a clock of its own, which is off and drifts. A
request makes the whole trip: worker's record, engine core's string, API server's division, span attributes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest

from hooks.device.accelerator_cases import CASES, find_percentile, run_case
from hooks.device.accelerator_loops import LOOPS, StepOutcome
from hooks.device.test_accelerator import LAUNCH_AND_READ_US, MAX_PLACE_ERROR_US
from ttft_otel.hooks.worker import device
from ttft_otel.model import breakdown
from ttft_otel.model.names import keys
from ttft_otel.tracing import carrier, clock, clock_offsets, recorder
from ttft_otel.tracing.context import start_context
from ttft_otel.tracing.engine_timeline import EngineTimeline
from ttft_otel.tracing.request_trace import RequestTrace
from ttft_otel.tracing.settings import Settings

CASES_BY_NAME = {case.name: case for case in CASES}
WORKER_STAGES = ("dispatch", "encoder.compute", "prefill.compute", "prefill.stall", "sample")
MAX_STAGE_ERROR_US = 200
NO_CLOCK, HOST_CLOCK = map(device.StepClock, (clock.CLOCK_NONE, clock.CLOCK_HOST))
TEN_DAYS_US = 864_000_000_000
ON_THE_WAY_US = (80, 250)  # a message to the engine core, or back


@dataclass(frozen=True, slots=True)
class SimulatedClock:
    """A host's clock against the API server's: `offset` us ahead, and drift_ppm faster."""

    boot: int
    offset: int = 0
    drift_ppm: float = 0.0

    def read(self, at: float) -> int:
        """What it shows when the API server's shows `at`."""
        return round(at + self.offset + at * self.drift_ppm * 1e-6)


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """One request as its user sees it, beside the truth. told_us: ttft.clock_error_us of its span."""

    cut: breakdown.Breakdown
    true_cut: breakdown.Breakdown
    told_us: int
    attributes: dict[str, Any]


OWN_HOST = SimulatedClock(clock.get_boot_number())
REMOTE_HOSTS = (SimulatedClock(7, TEN_DAYS_US, 40.0), SimulatedClock(8, -400_000, -35.0))


@pytest.fixture(autouse=True)
def no_bounds() -> Iterator[None]:
    """No engine core is known yet."""
    clock_offsets._bounds.clear()
    yield
    clock_offsets._bounds.clear()


def convert_record(record: tuple[int, ...], worker: SimulatedClock) -> tuple[int, ...]:
    """A worker's record by the clock of its host."""
    sampled = record[1] and worker.read(record[1])
    flat = list(record[3:])
    for index in range(0, len(flat), 3):
        if flat[index] != carrier.CODE_CLOCK:  # also when the worker took the step
            flat[index + 1 : index + 3] = map(worker.read, flat[index + 1 : index + 3])
    return (worker.boot, sampled, record[2], *flat)


def see_request(
    steps: list[StepOutcome],
    core: SimulatedClock,
    worker: SimulatedClock,
    chance: random.Random,
) -> SeenRequest:
    """Send the marks of one request's `steps` through the package; the truth is divided beside it."""
    scheduled = steps[0].scheduled_at
    added = scheduled - 50
    assign = added - chance.randint(*ON_THE_WAY_US)
    entered = steps[-1].output_at - 200
    received = entered + chance.randint(*ON_THE_WAY_US)
    trace = RequestTrace(assign - 3_000, start_context("", "", Settings(on=True)), True)
    trace.render, trace.assign_times = assign - 2_500, {"e": assign}
    recorder.register_engine_request(trace, "e")
    timeline = EngineTimeline(
        added=core.read(added),
        scheduled=core.read(scheduled),
        entered=core.read(entered),
        complete=True,
    )
    true = breakdown.Marks(trace.arrive, trace.render, assign, added, scheduled)
    true.entered, true.received, true.output = entered, received, received + 40
    true.egress = received + 90
    for step in steps:
        assert step.record is not None
        if timeline.steps:  # no step of others lies between
            timeline.open_details().turns += (core.read(step.scheduled_at), 0)
            true.turns.append((step.scheduled_at, 0))
        timeline.add_step(convert_record(step.record, worker))
        pairs = [(code, round(begin), round(end)) for code, begin, end in step.truth.intervals]
        true.steps.append(breakdown.EngineStep(pairs, round(step.truth.sampled), step.record[2]))
    with mock.patch.object(clock, "get_boot_number", return_value=core.boot):
        text = carrier.encode_timeline(timeline)
    recorder.record_first_output("e", text, received, true.output)
    cut = recorder.close_ttft(trace, true.egress)
    recorder.forget_trace(trace)
    assert trace.timeline is not None
    attributes = carrier.list_timeline_attributes(trace.timeline, trace.clock_error)
    told = attributes.get(keys.CLOCK_ERROR_US, 0)
    assert isinstance(told, int)
    return SeenRequest(cut, breakdown.partition_marks(true), told, attributes)


def see_case(
    kinds: dict[str, Any],
    name: str,
    loop: str,
    cores: tuple[SimulatedClock, ...],
    workers: tuple[SimulatedClock, ...] = (),
    make_clock: Callable[..., device.StepClock] = device.DeviceClock,
) -> list[SeenRequest]:
    """All requests of a case, its engine core's turns taken by `cores`; workers: none is beside its core."""
    case = CASES_BY_NAME[name]
    outcomes = run_case(case, kinds, "V2", loop, make_clock).outcomes
    chance = random.Random(11)
    seen: list[SeenRequest] = []
    for number in range(len(outcomes) // case.chunks):
        steps = outcomes[number * case.chunks : (number + 1) * case.chunks]
        turn = number % len(cores)
        worker = (workers or cores)[turn]
        seen.append(see_request(steps, cores[turn], worker, chance))
    return seen


def list_boundary_errors(seen: SeenRequest) -> list[int]:
    """How far each stage's begin and end are from the true ones; of several pieces the first and last."""
    ours, true = ({} for _ in range(2))
    for found, cut in ((ours, seen.cut), (true, seen.true_cut)):
        for stage, begin, end in cut.pieces:
            found[stage] = (found.get(stage, (begin, end))[0], end)
    # A piece of a few microseconds can be missing in one of the two.
    return [
        abs(mark - true_mark)
        for stage in ours.keys() & true.keys()
        for mark, true_mark in zip(ours[stage], true[stage], strict=True)
    ]


# What is between the two comes with --full.
LOOPS_TRIED = [
    pytest.param(loop, marks=pytest.mark.full if loop == "async" else ()) for loop in LOOPS
]
CASES_ON_HOSTS = (
    "one request at a time, 40 ms",
    "device-bound, 40 ms",
    "images, 30 ms encoder, 20 ms forward",
)


@pytest.mark.parametrize("loop", LOOPS_TRIED)
@pytest.mark.parametrize("name", CASES_ON_HOSTS)
def test_engine_cores_on_two_hosts(kinds: dict[str, Any], name: str, loop: str) -> None:
    """Data parallel over hosts, clocks ten days apart and drifting: places to 150 us, stages to 200 us."""
    seen = see_case(kinds, name, loop, REMOTE_HOSTS)
    errors: list[float] = []
    for each in seen:
        assert sum(each.cut.stages.values()) == each.cut.end - each.cut.start
        assert each.cut.end - each.cut.start == each.true_cut.end - each.true_cut.start
        errors += list_boundary_errors(each)
        assert max(list_boundary_errors(each)) <= each.told_us + LAUNCH_AND_READ_US
        assert each.attributes[keys.CLOCK] == "device"
        for stage in WORKER_STAGES:
            length = each.true_cut.stages.get(stage, 0)
            assert abs(each.cut.stages.get(stage, 0) - length) <= MAX_STAGE_ERROR_US, stage

    assert find_percentile(errors, 0.99) <= MAX_PLACE_ERROR_US
    assert len(seen) >= 100


def test_marks_taken_as_local(kinds: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a release without offsets would tell of another host's marks: nothing is right, or all is lost."""
    monkeypatch.setattr(clock_offsets, "align_marks", lambda *_: None)
    for each in see_case(kinds, "device-bound, 40 ms", "async", (REMOTE_HOSTS[1],)):
        length = each.true_cut.stages["prefill.compute"]
        assert abs(each.cut.stages.get("prefill.compute", 0) - length) > length / 2


def test_worker_on_a_third_host(kinds: dict[str, Any]) -> None:
    """An engine over several hosts: the worker's lengths are the device's, the gaps are unattributed."""
    seen = see_case(
        kinds, "images, 30 ms encoder, 20 ms forward", "async", (OWN_HOST,), REMOTE_HOSTS[:1]
    )
    for each in seen:
        total = each.cut.end - each.cut.start
        assert sum(each.cut.stages.values()) + each.cut.unattributed == total
        for stage in ("encoder.compute", "prefill.compute"):
            # Ten events' rounding, and two clocks' drift over the step.
            assert abs(each.cut.stages[stage] - each.true_cut.stages[stage]) <= 10, stage
        gaps = sum(each.true_cut.stages.get(stage, 0) for stage in ("dispatch", "sample", "output"))
        assert abs(each.cut.unattributed - gaps) <= MAX_STAGE_ERROR_US
        assert "dispatch" not in each.cut.stages and "output" not in each.cut.stages
        assert each.attributes[keys.CLOCK] == "lengths"


@pytest.mark.parametrize("loop", LOOPS_TRIED)
@pytest.mark.parametrize(
    "name", ["last of two pipeline stages, 15 ms each", "last pipeline stage, images"]
)
def test_pipeline_stages(kinds: dict[str, Any], name: str, loop: str) -> None:
    """The last stage's own work has its true length; the earlier stages' is `pipeline`, and nothing else."""
    case = CASES_BY_NAME[name]
    for each in see_case(kinds, name, loop, (OWN_HOST,)):
        length = each.true_cut.stages["prefill.compute"]
        total = each.cut.end - each.cut.start

        assert sum(each.cut.stages.values()) + each.cut.unattributed == total
        assert abs(each.cut.stages["prefill.compute"] - length) <= 10
        assert each.cut.unattributed == 0 and "encoder.compute" not in each.cut.stages
        pipeline, sent = each.cut.stages["pipeline"], each.cut.stages.get("dispatch", 0)
        assert pipeline >= case.receive_us - MAX_STAGE_ERROR_US
        # The truth does not know when the step was sent.
        assert abs(pipeline + sent - each.true_cut.stages["pipeline"]) <= MAX_STAGE_ERROR_US


@pytest.mark.parametrize("loop", LOOPS_TRIED)
def test_lengths_alone(kinds: dict[str, Any], loop: str) -> None:
    """A platform whose events nobody has placed: the work's lengths are true, the rest is unattributed."""
    name = "images, 30 ms encoder, 20 ms forward"
    seen = see_case(
        kinds, name, loop, (OWN_HOST,),
        make_clock=lambda make_event, is_idle: device.LengthsClock(make_event),
    )  # fmt: skip
    for each in seen:
        total = each.cut.end - each.cut.start
        assert sum(each.cut.stages.values()) + each.cut.unattributed == total
        for stage in ("encoder.compute", "prefill.compute"):
            assert abs(each.cut.stages[stage] - each.true_cut.stages[stage]) <= 10, stage
        assert not {"dispatch", "sample", "output"} & each.cut.stages.keys()
        assert each.attributes[keys.CLOCK] == "lengths"
        assert keys.CLOCK_ERROR_US not in each.attributes


def test_without_a_clock(kinds: dict[str, Any]) -> None:
    """A platform without timing events: the worker's time is unattributed; no launch is told as compute."""
    seen = see_case(
        kinds,
        "device-bound, 40 ms",
        "async",
        (OWN_HOST,),
        make_clock=lambda *_: NO_CLOCK,
    )
    for each in seen:
        worker_us = sum(each.true_cut.stages.get(stage, 0) for stage in (*WORKER_STAGES, "output"))
        assert each.cut.unattributed == worker_us
        assert not set(WORKER_STAGES) & each.cut.stages.keys()
        assert each.attributes[keys.CLOCK] == "none"


def test_launches_told_as_work(kinds: dict[str, Any]) -> None:
    """What a host's clock would tell of a device: a tenth of the forward pass, the rest as output."""
    seen = see_case(
        kinds,
        "device-bound, 40 ms",
        "async",
        (OWN_HOST,),
        make_clock=lambda *_: HOST_CLOCK,
    )
    for each in seen:
        assert each.cut.stages["prefill.compute"] < each.true_cut.stages["prefill.compute"] / 10
