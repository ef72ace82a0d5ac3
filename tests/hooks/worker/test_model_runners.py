# SPDX-License-Identifier: Apache-2.0
"""Both model runners through the real hooks: one record per marked step, on that step's output."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import tracing_fakes

from hooks.fakes import drop_taken
from hooks.process import HOOKS, PATCHER, WORKER, put_back_classes
from hooks.vllm_import import import_from_vllm
from hooks.worker.runners import (
    DRAFTER_US,
    EMPTY,
    ENCODER_US,
    FORWARD_US,
    LOGITS_US,
    PREPARE_US,
    SAMPLER_US,
    SAVE_US,
    SYNC_US,
    PendingOutput,
    RunnerV1,
    connect_ec,
    make_scheduler_output,
    wrap_runner_classes,
)
from ttft_otel.hooks.targets import TARGETS_BY_NAME
from ttft_otel.hooks.worker import device, model_runners
from ttft_otel.model import breakdown
from ttft_otel.tracing import carrier
from ttft_otel.tracing import clock as clocks
from ttft_otel.tracing.engine_timeline import EngineTimeline

RunnerMaker = Callable[..., Any]
START_US = 1_000_000
E, F, C = breakdown.CODE_ENCODER, breakdown.CODE_FORWARD, breakdown.CODE_EC_TRANSFER


@pytest.fixture(params=["V1", "V2"])
def make_runner(
    request: pytest.FixtureRequest, clock: tracing_fakes.FakeClock
) -> Iterator[RunnerMaker]:
    """A runner of either kind; the wrapped classes are put back afterwards."""
    before = dict(PATCHER.installed)
    kind = wrap_runner_classes()[request.param]
    yield lambda **more: kind(clock, **more)
    put_back_classes()
    PATCHER.installed.clear()
    PATCHER.installed.update(before)


def run_step(runner: Any, step: Any) -> Any:
    """Both calls of a step, as vLLM's executor makes them."""
    output = runner.execute_model(step)
    return runner.sample_tokens() if output is None else output


@pytest.mark.parametrize("calls", ["nothing", "own", "super"])
def test_runner_of_another_package(
    make_runner: RunnerMaker, calls: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A runner that replaces execute_model() is named at the worker's start, one that extends it is not."""
    runner = make_runner()

    class Own(type(runner)):  # type: ignore[misc]
        if calls == "own":

            def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
                return None

        elif calls == "super":

            def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
                return super().execute_model(scheduler_output)

    runner.__class__ = Own
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    HOOKS["worker.start"].after(None, None, worker)  # type: ignore[misc]

    assert (f"{__name__}.test_runner_of_another_package.<locals>.Own has an" in caplog.text) == (
        calls == "own"
    )


def test_drafter(make_runner: RunnerMaker) -> None:
    """V1's drafter is part of what follows the sampler; V2's runs once the output has gone."""
    runner = make_runner()
    runner.speculative_config = object()
    record = run_step(runner, make_scheduler_output({"a": 10}))._ttft_record
    begin = record[carrier.RECORD_SAMPLED] + LOGITS_US
    entries = [record[at : at + 3] for at in range(carrier.RECORD_INTERVALS, len(record), 3)]

    drafts = [entry for entry in entries if entry[0] == carrier.CODE_DRAFT]
    is_v1 = isinstance(runner, RunnerV1)
    assert drafts == [(carrier.CODE_DRAFT, begin, begin + DRAFTER_US)] * is_v1


def test_other_ranks(make_runner: RunnerMaker) -> None:
    """The first agreement with other ranks, as the host saw it; a drafter's is not before the work."""
    runner = make_runner()
    runner.ranks = 3  # two agreements
    record = run_step(runner, make_scheduler_output({"a": 10}))._ttft_record
    marks = EngineTimeline(steps=[record], boot=record[0])
    found = breakdown.Marks(1)
    carrier.decode_timeline(carrier.encode_timeline(marks), found)
    (step,) = found.steps

    begin = START_US + PREPARE_US
    assert (step.sync_start, step.sync_end) == (begin, begin + SYNC_US)
    assert [pair[:2] for pair in step.pairs] == [(F, begin + 2 * SYNC_US)]
    runner.ranks = 1
    plain = run_step(runner, make_scheduler_output({"a": 10}))._ttft_record
    assert carrier.CODE_SYNC not in plain[carrier.RECORD_INTERVALS :: 3]


def test_unmarked(make_runner: RunnerMaker) -> None:
    """A step without a traced request leaves nothing on its output, and no state."""
    output = run_step(make_runner(), make_scheduler_output({"a": 1}, marked=False))

    assert not hasattr(output, "_ttft_record")
    assert not WORKER.open_steps and WORKER.clock is None


def test_encoded_before(make_runner: RunnerMaker) -> None:
    """Items of a step that need no encoding, for which V2 does not call the encoder, are not told as lost."""
    runner = make_runner()
    runner.has_encoded = True
    output = run_step(runner, make_scheduler_output({"a": 10}, {"a": [0]}))

    assert output._ttft_record[2] == 0
    pairs = drop_taken(output._ttft_record)[3:]
    encoded_us = sum(
        pairs[at + 2] - pairs[at + 1] for at in range(0, len(pairs), 3) if pairs[at] == E
    )
    assert encoded_us == 0


def test_save(make_runner: RunnerMaker, clock: tracing_fakes.FakeClock) -> None:
    """What a connector does inside the encoder is a pair too; none of it is lost."""
    runner = make_runner(connector=connect_ec(clock))
    step = make_scheduler_output({"a": 10}, {"a": [0]})
    step.ec_connector_metadata = object()
    output = run_step(runner, step)

    saved = START_US + PREPARE_US + ENCODER_US
    assert output._ttft_record[2] == 0
    assert output._ttft_record[3:6] == (C, saved, saved + SAVE_US)
    assert output._ttft_record[6:9] == (E, START_US + PREPARE_US, saved + SAVE_US)


@pytest.mark.parametrize(
    ("off", "lost"),
    [
        ("worker.encoder", breakdown.LOST_ENCODER),
        ("worker.forward", breakdown.LOST_FORWARD),
        ("transfer.load", breakdown.LOST_LOAD),
        ("transfer.save", breakdown.LOST_SAVE),
    ],
)
def test_taken_out(
    make_runner: RunnerMaker, clock: tracing_fakes.FakeClock, off: str, lost: int
) -> None:
    """A target that is gone is told as lost with the step."""
    runner = make_runner(connector=connect_ec(clock))
    step = make_scheduler_output({"a": 10}, {"a": [0]})
    step.ec_connector_metadata = object()
    PATCHER.switch(off=[off])
    output = run_step(runner, step)
    PATCHER.switch()

    assert output._ttft_record[2] == lost


def test_sampler_gone(make_runner: RunnerMaker) -> None:
    """Without the sampler's hook its mark is missing, nothing else."""
    PATCHER.switch(off=["worker.sample"])
    output = run_step(make_runner(), make_scheduler_output({"a": 10}))
    PATCHER.switch()

    assert output._ttft_record[1:3] == (0, 0)


def test_async(make_runner: RunnerMaker) -> None:
    """An asynchronous output gets its step's record when it is read, in whatever order."""
    runner = make_runner(pending=True)
    first = run_step(runner, make_scheduler_output({"a": 10}))
    second = run_step(runner, make_scheduler_output({"b": 10}))
    third = run_step(runner, make_scheduler_output({"c": 1}, marked=False))

    assert len(WORKER.bound_steps) == 2
    assert isinstance(first, PendingOutput)
    late, early = second.get_output(), first.get_output()
    assert not hasattr(third.get_output(), "_ttft_record")
    assert early._ttft_record[4] < late._ttft_record[4]
    assert not WORKER.bound_steps


def test_async_read_too_late(make_runner: RunnerMaker) -> None:
    """An output that is read after so many others tells nothing: its events are others' by then."""
    runner = make_runner(pending=True)
    outputs = [
        run_step(runner, make_scheduler_output({"a": 10}))
        for _ in range(model_runners.MAX_BOUND_STEPS + 1)
    ]
    assert len(WORKER.bound_steps) == model_runners.MAX_BOUND_STEPS
    late, last = outputs[0].get_output(), outputs[-1].get_output()

    assert not hasattr(late, "_ttft_record") and last._ttft_record[3] == F


def test_empty(make_runner: RunnerMaker) -> None:
    """The empty output that all steps share is never touched."""
    output = run_step(make_runner(), make_scheduler_output({}))

    assert output is EMPTY
    assert not hasattr(EMPTY, "_ttft_record")
    assert not WORKER.open_steps


def test_raised(make_runner: RunnerMaker) -> None:
    """After a step that raised in the host, the next one's record is its own."""
    runner = make_runner()
    runner.raises = True
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.execute_model(make_scheduler_output({"a": 10}))
    runner.raises = False
    idle = run_step(runner, make_scheduler_output({"a": 1}, marked=False))
    output = run_step(runner, make_scheduler_output({"a": 10}))

    assert not hasattr(idle, "_ttft_record")
    assert len(drop_taken(output._ttft_record)) == 6
    assert not WORKER.open_steps


class PartlyReached(device.HostClock):
    """A device that has reached the first stamps of a step and is behind with the others."""

    kind = clocks.CLOCK_DEVICE

    def __init__(self, reached: int) -> None:
        self.reached = reached

    def find_queued(self, stamps: list[int], index: int) -> int:
        """The host's time at the stamp."""
        return stamps[index]

    def place_stamps(self, stamps: list[int]) -> device.Placement:
        """Only the first ones have a place; the reading is later than all of them."""
        places = [*stamps[: self.reached], *(0 for _ in stamps[self.reached :])]
        return device.Placement(places, READ_AT, 17)


READ_AT = START_US + 5000
CLOCK_ENTRY = (carrier.CODE_CLOCK, clocks.CLOCK_DEVICE, 17)


def test_late_stamp(make_runner: RunnerMaker) -> None:
    """One stamp that is late costs its own interval; a device that is behind with all, the step's."""
    WORKER.clock = PartlyReached(0)
    output = run_step(make_runner(), make_scheduler_output({"a": 10}))
    boot = clocks.get_boot_number()
    assert drop_taken(output._ttft_record) == (boot, 0, breakdown.LOST_FORWARD, *CLOCK_ENTRY)

    begin = clocks.now_us() + PREPARE_US
    WORKER.clock = PartlyReached(2)
    output = run_step(make_runner(), make_scheduler_output({"a": 10}))
    assert output._ttft_record[1:3] == (0, 0)
    assert output._ttft_record[3:5] == (F, begin)
    assert len(drop_taken(output._ttft_record)) == 9


@pytest.mark.parametrize("reached", [0, 1, 2])
def test_encode_only_unfinished(make_runner: RunnerMaker, reached: int) -> None:
    """An encoder instance answers before its encoder has ended: its time ends with the reading.

    Not begun: the time until then was dispatch. Begun: it ran until then. Ended: as it was.
    """
    runner = make_runner()
    runner.encode_only = True
    WORKER.clock = PartlyReached(reached)
    output = run_step(runner, make_scheduler_output({}, {"a": [0]}))

    begin = START_US + PREPARE_US if reached else READ_AT
    end = begin + ENCODER_US if reached == 2 else READ_AT
    flags = 0 if reached == 2 else carrier.ENCODER_UNFINISHED
    assert drop_taken(output._ttft_record)[1:] == (0, flags, E, begin, end, *CLOCK_ENTRY)


def test_run_travels_with_a_later_output(make_runner: RunnerMaker) -> None:
    """How long such an encoder ran leaves with the next step, on vLLM's own output, between processes."""
    outputs = pytest.importorskip("vllm.v1.outputs", reason="no vLLM: run scripts/install")
    runner = make_runner()
    runner.encode_only = True
    runner.make_output = lambda: outputs.ModelRunnerOutput(
        req_ids=list(runner.state.scheduled_encoder_inputs), req_id_to_index={}
    )
    step_clock = PartlyReached(1)
    WORKER.clock = step_clock
    first = run_step(runner, make_scheduler_output({}, {"a": [0]}))
    step_clock.reached = 2
    second = run_step(runner, make_scheduler_output({}, {"b": [0]}))
    third = pickle.loads(pickle.dumps(run_step(runner, make_scheduler_output({}, {"c": [0]}))))

    begin = START_US + PREPARE_US
    assert first._ttft_record[2] & carrier.ENCODER_UNFINISHED and not hasattr(first, "_ttft_runs")
    assert pickle.loads(pickle.dumps(second))._ttft_runs == {"a": (begin, begin + ENCODER_US)}
    assert third._ttft_record and not hasattr(third, "_ttft_runs")


def test_late_pipeline_stage(make_runner: RunnerMaker) -> None:
    """The last stage saw neither the encoder nor what the stages before it did; it claims neither."""
    runner = make_runner()
    runner.execute_model(make_scheduler_output({"a": 10}, {"a": [0]}), object())
    output = runner.sample_tokens()

    assert output._ttft_record[2] == breakdown.LATE_STAGE
    assert output._ttft_record[3] == F


def test_partition(make_runner: RunnerMaker) -> None:
    """The record's pairs cut a step into stages that add up."""
    output = run_step(make_runner(), make_scheduler_output({"a": 10}, {"a": [0]}))
    boot, sampled, lost, *flat = drop_taken(output._ttft_record)
    pairs = list(zip(flat[0::3], flat[1::3], flat[2::3], strict=True))
    marks = breakdown.Marks(START_US - 40, START_US - 30, START_US - 20, START_US - 10, START_US)
    marks.steps.append(breakdown.EngineStep(pairs, sampled, lost))
    marks.output = sampled + 11
    cut = breakdown.partition_marks(marks)

    assert cut.unattributed == 0
    assert sum(cut.stages.values()) == cut.end - cut.start
    assert cut.stages["encoder.compute"] == ENCODER_US
    assert cut.stages["prefill.compute"] - FORWARD_US in (0, LOGITS_US)  # V2's ends with its call
    assert cut.stages["prefill.compute"] + cut.stages["sample"] == (
        FORWARD_US + LOGITS_US + SAMPLER_US
    )
    assert cut.stages["dispatch"] == PREPARE_US
    assert cut.stages["output"] == 11


def test_when_the_worker_took_the_step(make_runner: RunnerMaker) -> None:
    """By the host's clock; on a device also when the first work was queued, which may begin later."""
    taken = (carrier.CODE_TAKEN, START_US, 0)
    output = run_step(make_runner(), make_scheduler_output({"a": 10}))
    assert output._ttft_record[-6:] == (carrier.CODE_SENT, START_US, 0, *taken)  # one process

    step = make_scheduler_output({"a": 10})
    step._ttft_marked = START_US - 7  # as the worker reads a StepMark
    output = run_step(make_runner(), step)
    assert output._ttft_record[-6:-3] == (carrier.CODE_SENT, START_US - 7, 0)

    WORKER.clock = PartlyReached(2)
    output = run_step(make_runner(), make_scheduler_output({"a": 10}))
    code, taken, launched = output._ttft_record[-6:-3]
    assert code == carrier.CODE_TAKEN
    assert launched - taken == PREPARE_US


LATE_US = 40_000
MODULES = ("vllm.v1.worker.dp_utils", "vllm.v1.worker.gpu.dp_utils")


@pytest.fixture(params=MODULES)
def ranks(
    nothing_patched: None, request: pytest.FixtureRequest, clock: tracing_fakes.FakeClock
) -> Iterator[Any]:
    """The module of a runner, whose function is wrapped; the other rank has as many tokens, and is late."""
    (module,) = import_from_vllm(request.param)

    def all_reduce(tensor: Any, group: Any) -> None:
        clock.tick(LATE_US)
        tensor[:, 1] = tensor[:, 0]

    target = TARGETS_BY_NAME["worker.dp_sync"]
    (place,) = [each for each in target.places if each.module == request.param]
    PATCHER.patch_attribute(target, module, place.name, HOOKS[target.name])
    group = SimpleNamespace(device="cpu", device_group=None, cpu_group=None)
    with (
        mock.patch.object(module.dist, "all_reduce", all_reduce),
        mock.patch.object(module, "get_dp_group", lambda: group),
    ):
        yield module
    put_back_classes()


def agree(module: Any) -> None:
    """As the module's runner calls it, for an eager step of ten tokens; vLLM's answer is right."""
    if module.__name__ == MODULES[0]:
        config = SimpleNamespace(
            data_parallel_size=2,
            data_parallel_rank=0,
            disable_nccl_for_dp_synchronization=True,
            num_ubatches=1,
        )
        answer = module.coordinate_batch_across_dp(10, False, config)
        assert answer[1].tolist() == [10, 10]
        return
    _, state = module.dispatch_cg_and_sync_dp(None, 1, 10, None, 2, 0, need_eager=True)
    assert state.num_tokens_across_dp.tolist() == [10, 10]


def test_a_late_rank(ranks: Any, clock: tracing_fakes.FakeClock) -> None:
    """Of a marked step the wait for the other rank is known; of others nothing is kept."""
    agree(ranks)
    assert not WORKER.open_steps

    step = WORKER.open_step(None, make_scheduler_output({"a": 10}))
    began = clock.at
    agree(ranks)
    clock.tick(100)
    agree(ranks)  # a drafter's
    WORKER.open_steps.clear()

    assert step is not None and step.synced == (began, began + LATE_US)
