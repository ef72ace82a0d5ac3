# SPDX-License-Identifier: Apache-2.0
"""Both model runners through the real hooks: one record per marked step, on that step's output.

Their work takes as long as it is told, on a still clock. At the end: vLLM's own agreements of ranks, and its
asynchronous outputs.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from tracing_fakes import FakeClock

from hooks.device.accelerated_runners import (
    PREPARE_DEVICE_US,
    AcceleratedEcConnector,
    AcceleratedKvConnector,
    AcceleratedRunnerV1,
    AsyncRunnerOutput,
    StepWork,
    wrap_accelerated_classes,
)
from hooks.device.accelerator import SimulatedDevice, SimulatedHost
from hooks.device.accelerator_cases import list_entries, make_step
from hooks.fakes import import_from_vllm
from hooks.process import (
    HOOKS,
    PATCHER,
    WORKER,
    put_back_classes,
    wrap_ec_connector,
    wrap_kv_connector,
    wrap_methods,
)
from ttft_otel.hooks.targets import TARGETS_BY_NAME
from ttft_otel.hooks.worker import device, model_runners
from ttft_otel.model import breakdown
from ttft_otel.tracing import carrier
from ttft_otel.tracing import clock as clocks
from ttft_otel.tracing.carrier import EngineTimeline

RunnerMaker = Callable[..., Any]
START_US = 1_000_000
ENCODER_US, FORWARD_US, SAMPLER_US, DRAFTER_US, LOAD_US = 300, 1000, 7, 60, 400
WORK = StepWork(FORWARD_US, ENCODER_US, SAMPLER_US).scale_host(0)
BEGIN_US = START_US + int(PREPARE_DEVICE_US)
E, F, C = breakdown.CODE_ENCODER, breakdown.CODE_FORWARD, breakdown.CODE_EC_TRANSFER
KV = breakdown.CODE_KV_TRANSFER


class StillDevice:
    """A device, its stream and its host in one: whatever is asked of it takes as long as it is told."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.main = self.host = self
        self.chance = SimpleNamespace(uniform=max)

    def work(self, us: float) -> None:
        self.clock.tick(int(us))

    queue_work = work  # and on the device, while everybody waits

    def mark(self) -> int:
        return self.clock.at

    def make_stream(self) -> Any:
        """One more, beside which this one goes on."""
        return StillDevice(FakeClock())

    def wait_stream(self, other: Any) -> None:
        """It is done."""

    def make_awaited(self) -> Any:
        return SimpleNamespace(synchronize=lambda: None)


class EcConnector(AcceleratedEcConnector):
    """Of an instance that encodes and takes encodings."""

    is_consumer = True

    def start_load_caches(self, runner: Any) -> None:
        """Nothing was announced."""


class KvConnector(AcceleratedKvConnector):
    """One that takes its time to load, and to save."""

    def start_load_kv(self, runner: Any) -> None:
        runner.device.host.work(LOAD_US)


@pytest.fixture(params=["V1", "V2"])
def make_runner(
    request: pytest.FixtureRequest, nothing_patched: None, clock: FakeClock
) -> Iterator[RunnerMaker]:
    """A runner of either kind; the wrapped classes are put back afterwards."""
    kind = wrap_accelerated_classes()[request.param]
    yield lambda work=WORK, asynchronous=False, **more: kind(
        StillDevice(clock), work, asynchronous=asynchronous, **more
    )
    put_back_classes()


def start_step(runner: Any, step: Any, tensors: Any = None) -> Any:
    """Both calls of a step, as vLLM's executor makes them."""
    output = runner.execute_model(step, tensors)
    return runner.sample_tokens() if output is None else output


def run_step(runner: Any, step: Any, tensors: Any = None) -> Any:
    """A step whose output is read at once; V2's are always asynchronous."""
    output = start_step(runner, step, tensors)
    return output.get_output() if isinstance(output, AsyncRunnerOutput) else output


def run_prompt(runner: Any) -> tuple[int, ...]:
    """The record of a step with a prompt."""
    record: tuple[int, ...] = run_step(runner, make_step())._ttft_record
    return record


def list_intervals(record: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(code, begin, end) in their order, without when the step was sent and taken, which have to be there."""
    entries = list_entries(record)
    kept = [each for each in entries if each[0] not in (carrier.CODE_SENT, carrier.CODE_TAKEN)]
    assert len(entries) - len(kept) == 2, record
    return kept


def list_lengths(record: tuple[int, ...]) -> list[tuple[int, int]]:
    """(code, length) in their order."""
    return [(code, end - begin) for code, begin, end in list_intervals(record)]


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
    runner = make_runner(StepWork(FORWARD_US, drafter_us=DRAFTER_US).scale_host(0))
    record = run_prompt(runner)
    begin = record[carrier.RECORD_SAMPLED]
    drafts = [each for each in list_intervals(record) if each[0] == carrier.CODE_DRAFT]

    is_v1 = isinstance(runner, AcceleratedRunnerV1)
    assert drafts == [(carrier.CODE_DRAFT, begin, begin + DRAFTER_US)] * is_v1


def test_unmarked(make_runner: RunnerMaker) -> None:
    """A step without a traced request leaves nothing on its output, and no state."""
    output = run_step(make_runner(), make_step(marked=False))

    assert not hasattr(output, "_ttft_record")
    assert not WORKER.open_steps and WORKER.clock is None


def test_encoded_before(make_runner: RunnerMaker) -> None:
    """Items of a step that need no encoding, for which V2 does not call the encoder, are not told as lost."""
    runner = make_runner()
    step = make_step(items=True)
    runner.prepare_inputs = step.scheduled_encoder_inputs.clear  # once the hook has seen them
    record = run_step(runner, step)._ttft_record

    assert record[2] == 0
    assert not any(length for code, length in list_lengths(record) if code == E)


def run_connected(runner: Any) -> tuple[int, ...]:
    """The record of a step with an item, whose encoder-cache connector has something to do."""
    wrap_ec_connector(runner.ec_connector)
    step = make_step(items=True)
    step.ec_connector_metadata = object()
    record: tuple[int, ...] = run_step(runner, step)._ttft_record
    return record


def test_save(make_runner: RunnerMaker) -> None:
    """What a connector does around the encoder, or inside it (V1), is recorded; none of it is lost."""
    record = run_connected(runner := make_runner(ec_connector=EcConnector(False)))
    found = list_lengths(record)[:-1]

    assert record[2] == 0
    if isinstance(runner, AcceleratedRunnerV1):
        assert found == [(C, 10), (E, ENCODER_US + 10)]
    else:
        assert found == [(C, 5), (E, ENCODER_US), (C, 10), (C, 40)]


@pytest.mark.parametrize(
    ("off", "lost"),
    [
        ("worker.encoder", breakdown.LOST_ENCODER),
        ("worker.forward", breakdown.LOST_FORWARD),
        ("transfer.load", breakdown.LOST_LOAD),
        ("transfer.save", breakdown.LOST_SAVE),
        ("worker.sample", 0),  # its mark alone is missing
    ],
)
def test_taken_out(make_runner: RunnerMaker, off: str, lost: int) -> None:
    """A target that is gone is told as lost with the step."""
    runner = make_runner(ec_connector=EcConnector(False))
    wrap_ec_connector(runner.ec_connector)
    PATCHER.switch(off=[off])

    record = run_connected(runner)
    assert record[2] == lost and (record[1] == 0) is (off == "worker.sample")


def test_async(make_runner: RunnerMaker) -> None:
    """An asynchronous output gets its step's record when it is read, in whatever order."""
    runner = make_runner(asynchronous=True)
    first = start_step(runner, make_step())
    second = start_step(runner, make_step(1))
    third = start_step(runner, make_step(2, marked=False))

    assert len(WORKER.bound_steps) == 2
    assert isinstance(first, AsyncRunnerOutput)
    late, early = second.get_output(), first.get_output()
    assert not hasattr(third.get_output(), "_ttft_record")
    assert early._ttft_record[4] < late._ttft_record[4]
    assert not WORKER.bound_steps


def test_async_read_too_late(make_runner: RunnerMaker) -> None:
    """An output that is read after so many others tells nothing: its events are others' by then."""
    runner = make_runner(asynchronous=True)
    outputs = [start_step(runner, make_step()) for _ in range(model_runners.MAX_BOUND_STEPS + 1)]
    assert len(WORKER.bound_steps) == model_runners.MAX_BOUND_STEPS
    late, last = outputs[0].get_output(), outputs[-1].get_output()

    assert not hasattr(late, "_ttft_record") and last._ttft_record[3] == F


def test_empty(make_runner: RunnerMaker) -> None:
    """The empty output that all steps share is never touched."""
    output = run_step(make_runner(encode_only=True), make_step(tokens=False))

    assert output.req_ids == [] and not hasattr(output, "_ttft_record")
    assert not WORKER.open_steps


def test_raised(make_runner: RunnerMaker) -> None:
    """After a step that raised in the host, the next one's record is its own."""
    runner = make_runner()
    error = RuntimeError("out of memory")
    with (
        mock.patch.object(runner, "prepare_inputs", side_effect=error),
        pytest.raises(RuntimeError, match="out of memory"),
    ):
        runner.execute_model(make_step())
    idle = run_step(runner, make_step(marked=False))

    assert not hasattr(idle, "_ttft_record")
    assert len(list_intervals(run_prompt(runner))) == 1
    assert not WORKER.open_steps


class PartlyReached(device.StepClock):
    """A device that has reached the first stamps of a step and is behind with the others."""

    def __init__(self, reached: int) -> None:
        super().__init__(clocks.CLOCK_DEVICE)
        self.reached = reached

    def find_queued(self, stamps: list[int], index: int) -> int:
        return stamps[index]

    def place_stamps(self, stamps: list[int]) -> device.Placement:
        """Only the first ones have a place; the reading is later than all of them."""
        places = [*stamps[: self.reached], *(0 for _ in stamps[self.reached :])]
        return places, READ_AT, 17


READ_AT = START_US + 5000
CLOCK_ENTRY = (carrier.CODE_CLOCK, clocks.CLOCK_DEVICE, 17)


def test_late_stamp(make_runner: RunnerMaker) -> None:
    """One stamp that is late costs its own interval; a device that is behind with all, the step's."""
    runner = make_runner()
    WORKER.clock = PartlyReached(0)
    boot = clocks.get_boot_number()
    record = run_prompt(runner)
    assert record[:3] == (boot, 0, breakdown.LOST_FORWARD)
    assert list_intervals(record) == [CLOCK_ENTRY]

    begin = clocks.now_us() + PREPARE_DEVICE_US
    WORKER.clock = PartlyReached(2)
    record = run_prompt(runner)
    assert record[1:3] == (0, 0)
    assert list_intervals(record) == [(F, begin, begin + FORWARD_US), CLOCK_ENTRY]


@pytest.mark.parametrize("reached", [0, 1, 2])
def test_encode_only_unfinished(make_runner: RunnerMaker, reached: int) -> None:
    """An encoder instance answers before its encoder has ended: its time ends with the reading.

    Not begun: the time until then was dispatch. Begun: it ran until then. Ended: as it was.
    """
    WORKER.clock = PartlyReached(reached)
    output = run_step(make_runner(encode_only=True), make_step(items=True, tokens=False))

    begin = BEGIN_US if reached else READ_AT
    end = begin + ENCODER_US if reached == 2 else READ_AT
    flags = 0 if reached == 2 else carrier.ENCODER_UNFINISHED
    assert output._ttft_record[1:3] == (0, flags)
    assert list_intervals(output._ttft_record) == [(E, begin, end), CLOCK_ENTRY]


def test_run_travels_with_a_later_output(make_runner: RunnerMaker) -> None:
    """How long such an encoder ran leaves with the next step, on vLLM's own output, between processes."""
    outputs = pytest.importorskip("vllm.v1.outputs", reason="no vLLM: run scripts/install")
    runner = make_runner(encode_only=True)
    runner.make_output = lambda: outputs.ModelRunnerOutput(
        req_ids=list(runner.scheduled.scheduled_encoder_inputs), req_id_to_index={}
    )
    step_clock = PartlyReached(1)
    WORKER.clock = step_clock
    first = run_step(runner, make_step(items=True, tokens=False))
    step_clock.reached = 2
    second = run_step(runner, make_step(1, items=True, tokens=False))
    third = pickle.loads(pickle.dumps(run_step(runner, make_step(2, items=True, tokens=False))))

    run = {"r0": (BEGIN_US, BEGIN_US + ENCODER_US)}
    assert first._ttft_record[2] & carrier.ENCODER_UNFINISHED and not hasattr(first, "_ttft_runs")
    assert pickle.loads(pickle.dumps(second))._ttft_runs == run
    assert third._ttft_record and not hasattr(third, "_ttft_runs")


def test_when_the_worker_took_the_step(make_runner: RunnerMaker) -> None:
    """By the host's clock; on a device also when the first work was queued, which may begin later."""
    runner = make_runner()
    taken = (carrier.CODE_TAKEN, START_US, 0)
    assert run_prompt(runner)[-6:] == (carrier.CODE_SENT, START_US, 0, *taken)  # one process

    step = make_step()
    step._ttft_marked = START_US - 7  # as the worker reads a StepMark
    record = run_step(runner, step)._ttft_record
    assert record[-6:-3] == (carrier.CODE_SENT, START_US - 7, 0)

    WORKER.clock = PartlyReached(2)
    code, began, launched = run_prompt(runner)[-6:-3]
    assert code == carrier.CODE_TAKEN
    assert launched - began == PREPARE_DEVICE_US


@pytest.fixture
def kv_runner(nothing_patched: None, clock: FakeClock) -> Iterator[Any]:
    """V1 with a KV connector that takes its time."""
    work = StepWork(FORWARD_US, kv_save_us=270).scale_host(0)
    kind = wrap_accelerated_classes()["V1"]
    connector = KvConnector()
    wrap_kv_connector(connector)
    yield kind(StillDevice(clock), work, asynchronous=False, kv_connector=connector)
    put_back_classes()


def run_kv_step(runner: Any, sync: bool) -> tuple[int, ...]:
    """The record of a step whose load, if `sync`, the forward needs."""
    step = make_step(kv=True)
    step.has_sync_kv_loads = sync
    record: tuple[int, ...] = run_step(runner, step)._ttft_record
    return record


@pytest.mark.parametrize("first", [True, False])
def test_step_loads(kv_runner: Any, first: bool) -> None:
    """A load that the forward needs comes before it; those for other requests after it, as saves do."""
    both = [(KV, LOAD_US), (F, FORWARD_US)]
    record = run_kv_step(kv_runner, first)

    assert record[2] == 0
    assert list_lengths(record) == [*(both if first else both[::-1]), (KV, 300)]


def test_step_of_nothing(kv_runner: Any) -> None:
    """Most connectors find nothing to do in a step: that makes no stage of its own."""
    kv_runner.kv_connector = AcceleratedKvConnector()
    kv_runner.work = WORK
    record = run_kv_step(kv_runner, True)

    assert record[2] == 0 and list_lengths(record) == [(F, FORWARD_US)]


@pytest.mark.parametrize(
    ("gone", "sync", "lost"),
    [
        ("kv.load", True, breakdown.LOST_BEFORE | breakdown.LOST_AFTER),
        ("kv.load", False, breakdown.LOST_AFTER),
        ("kv.save", True, breakdown.LOST_AFTER),
    ],
)
def test_step_unseen(kv_runner: Any, gone: str, sync: bool, lost: int) -> None:
    """Without its hook nobody knows where a load or a save was."""
    PATCHER.switch(off=[gone])

    assert run_kv_step(kv_runner, sync)[2] == lost


LATE_US = 40_000
MODULES = ("vllm.v1.worker.dp_utils", "vllm.v1.worker.gpu.dp_utils")


@pytest.fixture(params=MODULES)
def ranks(nothing_patched: None, request: pytest.FixtureRequest, clock: FakeClock) -> Iterator[Any]:
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


def test_a_late_rank(ranks: Any, clock: FakeClock) -> None:
    """Of a marked step the wait for the other rank is known; of others nothing is kept."""
    agree(ranks)
    assert not WORKER.open_steps

    step = WORKER.open_step(None, make_step())
    began = clock.at
    agree(ranks)
    clock.tick(100)
    agree(ranks)  # a drafter's, which is not before the work
    WORKER.open_steps.clear()
    assert step is not None
    step.close_interval(F, step.take_stamp())
    record = WORKER.resolve_step(step)
    found = breakdown.Marks(1)
    text = carrier.encode_timeline(EngineTimeline(steps=[record], boot=record[0]))
    carrier.decode_timeline(text, found)

    assert [(each.sync_start, each.sync_end) for each in found.steps] == [(began, began + LATE_US)]


TAIL_US = 3_000  # of get_output() after the wait
CLASSES = {
    "V1": ("vllm.v1.worker.gpu_model_runner", "AsyncGPUModelRunnerOutput"),
    "V2": ("vllm.v1.worker.gpu.async_utils", "AsyncOutput"),
}


@pytest.fixture(params=CLASSES)
def pending(
    nothing_patched: None, request: pytest.FixtureRequest
) -> Iterator[tuple[Any, SimulatedHost, str]]:
    """An output as vLLM's class would be, but for its constructor, which needs a CUDA device."""
    module, name = CLASSES[request.param]
    kind = getattr(import_from_vllm(module)[0], name)
    host = SimulatedHost()
    output = kind.__new__(kind)
    lists = SimpleNamespace(
        tolists=lambda *_: host.sleep(TAIL_US), tolist=lambda: [[7]], shape=(1, 1)
    )
    result = SimpleNamespace(req_ids=["a"])
    fields: dict[str, Any] = {
        "V1": {
            **dict.fromkeys(("_logprobs_tensors", "_sampled_token_ids", "_num_nans")),
            **dict.fromkeys(("_num_nans_cpu", "_has_fault")),
            "sampled_token_ids_cpu": lists,
            "_logprobs_tensors_cpu": lists,
            "_invalid_req_indices": [],
            "_model_runner_output": result,
        },
        "V2": {
            **dict.fromkeys(("num_nans", "logprobs_tensors", "pending_aux_output", "_has_fault")),
            "sampled_token_ids": lists,
            "num_sampled_tokens_np": SimpleNamespace(tolist=lambda: [1]),
            "sampling_mask_tensors": lists,
            "prompt_logprobs_dict": {},
            "prompt_token_id_logprobs_dict": {},
            "model_runner_output": result,
        },
    }
    vars(output).update(fields[request.param])
    wrap_methods(kind, {"worker.output": "get_output"})
    with host.replace_clock():
        yield output, host, "copy_event" if request.param == "V2" else "async_copy_ready_event"
    put_back_classes()


def make_late_step(host: SimulatedHost) -> tuple[model_runners.StepStamps, SimulatedDevice]:
    """A step behind 40 ms of other work."""
    simulated = SimulatedDevice(host)
    simulated.main.queue_work(40_000)
    step_clock = device.DeviceClock(simulated.make_event, simulated.is_idle)
    return model_runners.StepStamps(step_clock, False, False, 0), simulated


def test_end_of_the_wait(pending: tuple[Any, SimulatedHost, str]) -> None:
    """The step is placed as if get_output() did nothing after its wait."""
    output, host, event = pending
    step, simulated = make_late_step(host)
    begin = step.take_stamp()
    simulated.main.queue_work(5_000)
    step.close_interval(F, begin)
    copied = simulated.make_event()
    copied.record()
    setattr(output, event, copied)
    step.tokens = True
    WORKER._attach_step(output, step)
    result = output.get_output()

    assert result.sampled_token_ids == [[7]] and getattr(output, event) is copied
    assert host.at - copied.at >= TAIL_US
    (_, _, end), (_, _, told) = list_intervals(result._ttft_record)
    assert abs(end - copied.at) <= device.READING_US
    assert told <= device.READING_US


def test_a_wait_that_raises(pending: tuple[Any, SimulatedHost, str]) -> None:
    """What vLLM's wait raises passes; a look at the clock that fails does not reach vLLM."""
    output, host, event = pending
    step, _ = make_late_step(host)
    step.take_stamp()
    setattr(output, event, mock.Mock(**{"synchronize.side_effect": RuntimeError("gone")}))
    WORKER._attach_step(output, step)

    with pytest.raises(RuntimeError, match="gone"):
        output.get_output()
    assert clocks.now_us() == host()
