# SPDX-License-Identifier: Apache-2.0
"""The worker's side of vLLM's own ECCPUConnector, in the order in which its V2 model runner calls it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hooks.process import PATCHER, WORKER, put_back_classes, wrap_ec_connector
from lab.vllm_plugins import join_plugin_paths
from ttft_otel import testing
from ttft_otel.hooks.worker import model_runners
from ttft_otel.hooks.worker.device import HostClock
from ttft_otel.model.breakdown import CODE_EC_TRANSFER, LOST_ENCODER, LOST_SAVE

WITHOUT_VLLM = importlib.util.find_spec("vllm") is None
pytestmark = pytest.mark.skipif(WITHOUT_VLLM, reason="no vLLM in this environment")
COPY_US, ENCODE_US = 70, 300  # microseconds


@pytest.fixture
def runner(
    connectors: None,
    nothing_patched: None,
    clock: testing.FakeClock,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Any]:
    """vLLM's ActiveECConnector around a worker's ECCPUConnector; the copy is the host's, and slow."""
    import torch
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
    from vllm.distributed.ec_transfer.ec_connector.cpu import worker as module
    from vllm.distributed.ec_transfer.ec_connector.cpu.connector import ECCPUConnector
    from vllm.v1.worker.gpu.ec_connector import ActiveECConnector

    from hooks.ec_cpu import make_vllm_config

    monkeypatch.syspath_prepend(join_plugin_paths("ec_cpu"))
    plugin: Any = importlib.import_module("ttft_ec_cpu")

    def copy_slowly(*args: Any, **kwargs: Any) -> None:
        clock.tick(COPY_US)
        plugin.copy_blocks(*args, **kwargs)

    monkeypatch.setattr(module, "swap_blocks_batch", copy_slowly)
    monkeypatch.setattr(module.ECCPUWorker, "_acquire_event", plugin.acquire_event)
    monkeypatch.setattr(torch.Tensor, "record_stream", plugin.ignore_stream)
    monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(module, "get_pcp_group", lambda: SimpleNamespace(rank_in_group=0))
    active_connector: Any = object.__new__(ActiveECConnector)
    active_connector.ec_connector = ECCPUConnector(
        make_vllm_config("ec_both", "w"), ECConnectorRole.WORKER
    )
    active_connector.encoder_cache, active_connector.save_new_caches = {}, True
    wrap_ec_connector(active_connector.ec_connector)
    yield active_connector
    active_connector.ec_connector.shutdown()
    put_back_classes()
    del sys.modules["ttft_ec_cpu"]


def run_step(
    runner: Any, clock: testing.FakeClock, encodes: bool, **meta: Any
) -> tuple[int, list[int]]:
    """A marked step: what it lost, and the lengths of its `ec.transfer` pieces that took any time."""
    import torch
    from vllm.distributed.ec_transfer.ec_connector.cpu.common import ECCPUConnectorMetadata

    from hooks.ec_cpu import ROWS, WIDTH

    step = model_runners.StepStamps(HostClock(), encodes, True, 0)
    WORKER.open_steps.append(step)
    plan = SimpleNamespace(
        ec_connector_metadata=ECCPUConnectorMetadata(**meta), finished_req_ids=set()
    )
    with runner.maybe_get_output(plan) as output:
        if encodes:
            clock.tick(ENCODE_US)
            runner.encoder_cache["cat"] = torch.full((ROWS, WIDTH), 3.0, dtype=torch.float16)
    WORKER.open_steps.clear()
    run_of = output.ec_connector_worker_meta
    assert run_of is not None and bool(run_of.completed_saves) == encodes
    _, _, lost, *flat = WORKER.resolve_step(step)
    pairs = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
    return lost, [
        end - start for code, start, end in pairs if code == CODE_EC_TRANSFER and end > start
    ]


def test_save_and_load(runner: Any, clock: testing.FakeClock) -> None:
    """A copy out of the device, started at the step's end, and one into it: both are ec.transfer."""
    from hooks.ec_cpu import ROWS, WIDTH

    saved = run_step(runner, clock, True, saves={"cat": [0, 1]})
    before = runner.encoder_cache.pop("cat")
    loaded = run_step(runner, clock, False, loads={"cat": (7, [0, 1], (ROWS, WIDTH))})

    assert saved == (LOST_ENCODER, [COPY_US])  # nothing tells here when the encoder ran
    assert loaded == (0, [COPY_US])
    assert runner.encoder_cache["cat"].equal(before)


def test_flush_unseen(runner: Any, clock: testing.FakeClock) -> None:
    """Without the hook of its start the copy is a known gap, not somebody else's time."""
    PATCHER.switch(off=["transfer.flush"])
    lost, pieces = run_step(runner, clock, True, saves={"cat": [0, 1]})
    PATCHER.switch()

    assert lost & LOST_SAVE and not pieces
