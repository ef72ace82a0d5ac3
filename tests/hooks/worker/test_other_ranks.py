# SPDX-License-Identifier: Apache-2.0
"""vLLM's own agreement of data-parallel ranks, of both runners, under the hooks; another rank comes late."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from hooks.process import HOOKS, PATCHER, WORKER, put_back_classes
from hooks.vllm_import import import_from_vllm
from hooks.worker.runners import make_scheduler_output
from ttft_otel import testing
from ttft_otel.hooks.targets import TARGETS_BY_NAME

LATE_US = 40_000
MODULES = ("vllm.v1.worker.dp_utils", "vllm.v1.worker.gpu.dp_utils")


@pytest.fixture(params=MODULES)
def ranks(
    nothing_patched: None, request: pytest.FixtureRequest, clock: testing.FakeClock
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


def test_a_late_rank(ranks: Any, clock: testing.FakeClock) -> None:
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
