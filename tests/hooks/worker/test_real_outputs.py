# SPDX-License-Identifier: Apache-2.0
"""vLLM's own asynchronous outputs under the hooks: the wait's end is stamped, not get_output()'s."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from hooks.device.accelerator import SimulatedDevice, SimulatedHost
from hooks.process import WORKER, put_back_classes, wrap_methods
from hooks.vllm_import import import_from_vllm
from ttft_otel.hooks.worker import device, model_runners
from ttft_otel.model import breakdown
from ttft_otel.tracing import carrier, clock

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
    fields: dict[str, Any] = {
        "V1": {
            "sampled_token_ids_cpu": lists,
            "_logprobs_tensors": None,
            "_sampled_token_ids": None,
            "_logprobs_tensors_cpu": lists,
            "_invalid_req_indices": [],
            "_num_nans": None,
            "_num_nans_cpu": None,
            "_has_fault": None,
            "_model_runner_output": SimpleNamespace(req_ids=["a"]),
        },
        "V2": {
            "sampled_token_ids": lists,
            "num_sampled_tokens_np": SimpleNamespace(tolist=lambda: [1]),
            "sampling_mask_tensors": lists,
            "num_nans": None,
            "logprobs_tensors": None,
            "prompt_logprobs_dict": {},
            "prompt_token_id_logprobs_dict": {},
            "pending_aux_output": None,
            "_has_fault": None,
            "model_runner_output": SimpleNamespace(req_ids=["a"]),
        },
    }
    vars(output).update(fields[request.param])
    wrap_methods(kind, {"worker.output": "get_output"})
    with host.replace_clock():
        yield output, host, "copy_event" if request.param == "V2" else "async_copy_ready_event"
    put_back_classes()


def test_end_of_the_wait(pending: tuple[Any, SimulatedHost, str]) -> None:
    """A step behind 40 ms of other work is placed as if get_output() did nothing after its wait."""
    output, host, event = pending
    simulated = SimulatedDevice(host)
    simulated.main.queue_work(40_000)
    step = model_runners.StepStamps(
        device.DeviceClock(simulated.make_event, simulated.is_idle), False, False, 0
    )
    begin = step.take_stamp()
    simulated.main.queue_work(5_000)
    step.close_interval(breakdown.CODE_FORWARD, begin)
    copied = simulated.make_event()
    copied.record()
    setattr(output, event, copied)
    step.tokens = True
    WORKER._attach_step(output, step)
    result = output.get_output()

    assert result.sampled_token_ids == [[7]] and getattr(output, event) is copied
    assert host.at - copied.at >= TAIL_US
    record = result._ttft_record
    ((_, _, told),) = [
        (code, kind, error)
        for code, kind, error in zip(record[3::3], record[4::3], record[5::3], strict=True)
        if code == carrier.CODE_CLOCK
    ]
    assert record[3] == breakdown.CODE_FORWARD
    assert abs(record[5] - copied.at) <= device.READING_US
    assert told <= device.READING_US


def test_a_wait_that_raises(pending: tuple[Any, SimulatedHost, str]) -> None:
    """What vLLM's wait raises passes; a look at the clock that fails does not reach vLLM."""
    output, host, event = pending
    simulated = SimulatedDevice(host)
    simulated.main.queue_work(40_000)
    step = model_runners.StepStamps(
        device.DeviceClock(simulated.make_event, simulated.is_idle), False, False, 0
    )
    step.take_stamp()
    broken = mock.Mock(
        spec=["synchronize"], synchronize=mock.Mock(side_effect=RuntimeError("gone"))
    )
    setattr(output, event, broken)
    WORKER._attach_step(output, step)

    with pytest.raises(RuntimeError, match="gone"):
        output.get_output()
    assert clock.now_us() == host()
