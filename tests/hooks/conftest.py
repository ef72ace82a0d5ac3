# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the hooks' tests; each test starts and ends without unfinished requests."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from ttft_otel import testing
from ttft_otel.hooks import ec_kept, encoder_runs, model_runners, scheduler, waiting, wrap

from .fakes import FakeEngineCore, make_wrapped_core


@pytest.fixture
def core(nothing_patched: None, clock: testing.FakeClock) -> Iterator[FakeEngineCore]:
    """A fake engine core; checks that no state of its requests is left."""
    yield make_wrapped_core()(clock)
    scheduler.aborted_timelines.clear()
    waiting.arrived.clear()  # of requests that the test has not scheduled
    waiting.waiting_requests.clear()
    assert not scheduler.awaiting_first_token
    assert not scheduler._freed_requests
    assert not scheduler._in_update[0]


@pytest.fixture(autouse=True)
def no_step_open() -> Iterator[None]:
    """Every test starts and ends with no step open."""
    model_runners.ec_roles.clear()
    yield
    model_runners.ec_roles.clear()
    model_runners._step_clocks.clear()
    model_runners.open_steps.clear()
    model_runners.bound_steps.clear()
    encoder_runs.unfinished_steps.clear()
    encoder_runs.told_runs.clear()


@pytest.fixture(scope="session")
def connectors() -> None:
    """vLLM's encoder-cache connectors, imported once: 15 s, and warnings of other people's code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("example_connector", "mooncake_ec_connector", "cpu.scheduler", "cpu.worker"):
            importlib.import_module(f"vllm.distributed.ec_transfer.ec_connector.{name}")
        importlib.import_module("vllm.distributed.ec_transfer.ec_connector.cpu.session")
        importlib.import_module("vllm.v1.worker.gpu.ec_connector")


@pytest.fixture
def pair(connectors: None, nothing_patched: None, clock: testing.FakeClock) -> Iterator[Any]:
    """An encoder and a consumer with vLLM's ECCPUConnector; its classes are put back afterwards."""
    from .ec_cpu import InstancePair  # imports vLLM

    made = InstancePair(clock)
    yield made
    made.close()
    for patches in wrap.installed_patches.values():
        for patch in patches:
            setattr(patch.owner, patch.name, patch.original)
    for state in (
        ec_kept.leases,
        ec_kept.leases_by_hash,
        ec_kept.unasked_answers,
        ec_kept.fetched_hashes,
    ):
        state.clear()
