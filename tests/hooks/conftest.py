# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the hooks' tests; each test starts and ends without unfinished requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hooks.device.accelerated_runners import wrap_accelerated_classes
from hooks.fakes import FakeEngineCore, clear_waiting, make_wrapped_core
from hooks.vllm_import import import_from_vllm
from ttft_otel import testing
from ttft_otel.hooks import encoder_runs, wrap
from ttft_otel.hooks.engine_core import ec_kept, scheduler
from ttft_otel.hooks.worker import model_runners


@pytest.fixture
def core(nothing_patched: None, clock: testing.FakeClock) -> Iterator[FakeEngineCore]:
    """A fake engine core; checks that no state of its requests is left."""
    yield make_wrapped_core()(clock)
    left = [*scheduler.awaiting_first_token, *scheduler._freed_requests]
    clear_waiting()  # of requests that the test has not scheduled
    assert not left
    assert not scheduler._in_update[0]


@pytest.fixture(scope="session")
def real_scheduler() -> Any:
    """The driver's module, which imports vLLM."""
    return import_from_vllm("tests.hooks.real_scheduler")[0]


@pytest.fixture
def drive(
    real_scheduler: Any, nothing_patched: None, clock: testing.FakeClock
) -> Iterator[Callable[..., Any]]:
    """Makes a wrapped scheduler with the limits that the test names."""
    real_scheduler.wrap_scheduler()
    yield lambda **limits: real_scheduler.SchedulerDriver(clock, **limits)
    clear_waiting()


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
    """vLLM's encoder-cache connectors, imported once."""
    folder = "vllm.distributed.ec_transfer.ec_connector"
    names = ("example_connector", "mooncake_ec_connector", "cpu.scheduler", "cpu.worker")
    import_from_vllm(
        *(f"{folder}.{name}" for name in names),
        f"{folder}.cpu.session",
        "vllm.v1.worker.gpu.ec_connector",
    )


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


@pytest.fixture(scope="module")
def kinds() -> Iterator[dict[str, Any]]:
    """Both runners with the hooks around them; the classes are put back afterwards."""
    before = dict(wrap.installed_patches)
    yield wrap_accelerated_classes()
    for patches in wrap.installed_patches.values():
        for patch in patches:
            setattr(patch.owner, patch.name, patch.original)
    wrap.installed_patches.clear()
    wrap.installed_patches.update(before)
