# SPDX-License-Identifier: Apache-2.0
"""Encoder-cache connectors of any class, and the worker's side of vLLM's own ECCPUConnector."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tracing_fakes

from hooks.process import PATCHER, WORKER, put_back_classes, wrap_ec_connector
from hooks.worker.runners import FakeEcConnector
from lab.vllm_plugins import join_plugin_paths
from ttft_otel.hooks.worker import model_runners
from ttft_otel.hooks.worker.device import HostClock
from ttft_otel.model.breakdown import CODE_EC_TRANSFER, LOST_ENCODER, LOST_SAVE
from ttft_otel.tracing.engine_timeline import EngineTimeline


@pytest.fixture
def connector(nothing_patched: None, clock: tracing_fakes.FakeClock) -> Iterator[Any]:
    """A connector of a class of its own, as its factory hands it out."""
    ec_connector = type("Mine", (FakeEcConnector,), {})(clock)
    wrap_ec_connector(ec_connector)
    yield ec_connector


class EmptyConnector:
    """In vLLM's base class these do nothing."""

    def get_finished(self, ids: Any) -> None:
        """Nothing to tell."""

    def ensure_cache_available(self, request: Any, computed: int) -> bool:
        """Nothing to wait for."""
        return True

    def start_save_caches(self) -> None:
        """Nothing to publish; the worker was there all the same."""


def test_empty_methods(nothing_patched: None) -> None:
    """vLLM's empty methods of the scheduler's side, and the empty flush, are left alone."""
    base = type("ECConnectorBase", (EmptyConnector,), dict(vars(EmptyConnector)))
    ec_connector = type("Mine", (base,), {"save_caches": lambda self: None})()
    wrap_ec_connector(ec_connector)

    assert {name: len(patches) for name, patches in PATCHER.installed.items()} == {
        "transfer.save": 2
    }


def test_scheduled_already(connector: Any, clock: tracing_fakes.FakeClock) -> None:
    """Once a request is scheduled nothing is noted: vLLM asks on every decode step, too."""
    timeline = EngineTimeline(scheduled=5)
    connector.ensure_cache_available(SimpleNamespace(_ttft_timeline=timeline), 0)

    assert timeline.details is None


def test_older_class(nothing_patched: None) -> None:
    """A class without wait or publishing is wrapped as far as it goes."""

    class Old:
        def save_caches(self) -> str:
            return "saved"

    ec_connector = Old()
    wrap_ec_connector(ec_connector)

    assert ec_connector.save_caches() == "saved"
    assert PATCHER.is_active("transfer.save")
    assert not PATCHER.is_active("transfer.wait")


def test_created_twice(connector: Any, clock: tracing_fakes.FakeClock) -> None:
    """Scheduler's side and worker's side of one class in one process: wrapped once."""
    wrap_ec_connector(connector)
    wrap_ec_connector(type(connector)(clock))

    assert all(len(patches) == 1 for patches in PATCHER.installed.values())


WITHOUT_VLLM = importlib.util.find_spec("vllm") is None
COPY_US, ENCODE_US = 70, 300  # microseconds


@pytest.fixture
def runner(
    connectors: None,
    nothing_patched: None,
    clock: tracing_fakes.FakeClock,
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
    runner: Any, clock: tracing_fakes.FakeClock, encodes: bool, **meta: Any
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


@pytest.mark.skipif(WITHOUT_VLLM, reason="no vLLM in this environment")
def test_save_and_load(runner: Any, clock: tracing_fakes.FakeClock) -> None:
    """A copy out of the device, started at the step's end, and one into it: both are ec.transfer."""
    from hooks.ec_cpu import ROWS, WIDTH

    saved = run_step(runner, clock, True, saves={"cat": [0, 1]})
    before = runner.encoder_cache.pop("cat")
    loaded = run_step(runner, clock, False, loads={"cat": (7, [0, 1], (ROWS, WIDTH))})

    assert saved == (LOST_ENCODER, [COPY_US])  # nothing tells here when the encoder ran
    assert loaded == (0, [COPY_US])
    assert runner.encoder_cache["cat"].equal(before)


@pytest.mark.skipif(WITHOUT_VLLM, reason="no vLLM in this environment")
def test_cpu_flush_unseen(runner: Any, clock: tracing_fakes.FakeClock) -> None:
    """Without the hook of its start the copy is a known gap, not somebody else's time."""
    PATCHER.switch(off=["transfer.flush"])
    lost, pieces = run_step(runner, clock, True, saves={"cat": [0, 1]})
    PATCHER.switch()

    assert lost & LOST_SAVE and not pieces
