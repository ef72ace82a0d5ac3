# SPDX-License-Identifier: Apache-2.0
"""Every decision of vLLM's schedule() that leaves a request out is known, with the reason that it gives.

lab/schedule_decisions.py has the list, and reads the sources of each supported release.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hooks.engine_core.test_queue_reasons import MakeDriver, assert_reason
from hooks.test_target_check import VERSIONS, find_package
from lab.schedule_decisions import DECISIONS, NO_WAIT, list_decisions, list_unknown
from lab.source_check import SourceResult, format_source_result
from ttft_otel.hooks.engine_core import queue_reasons
from ttft_otel.hooks.vllm_fields import SchedulerFacts
from ttft_otel.model.stages import STALL_STAGE, WAIT_REASON_NAMES

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("version", VERSIONS)
def test_every_decision_is_known(version: str) -> None:
    """A release that leaves requests out for a new reason fails here."""
    unknown = list_unknown(find_package(version))
    assert not unknown, "\n" + "\n".join(unknown)


def test_every_known_decision_exists() -> None:
    """No row of DECISIONS is left over from a release that is not supported; its reasons are names."""
    conditions = {
        condition
        for version in VERSIONS
        if not version.marks
        for _, condition in list_decisions(find_package(str(version.values[0])))
    }
    unused = [
        known for known in DECISIONS if not any(each.startswith(known) for each in conditions)
    ]
    # Only in the release whose sources may not be here.
    assert set(unused) <= {
        "self.policy == SchedulingPolicy.PRIORITY and request.status == RequestStatus.PREEMPTED"
    }
    assert set(DECISIONS.values()) - {NO_WAIT} <= set(WAIT_REASON_NAMES)


def test_a_new_decision_is_named(tmp_path: Path) -> None:
    """A condition that no release has fails, with its line and the file to edit."""
    folder = tmp_path / "v1" / "core" / "sched"
    folder.mkdir(parents=True)
    (folder / "scheduler.py").write_text(
        "class Scheduler:\n  def schedule(self):\n    while self.waiting:\n"
        "      if self.is_monday:\n        break\n"
    )
    (told,) = list_unknown(tmp_path)
    whole = SourceResult(tmp_path, "", (), ())
    found = replace(whole, decisions=(told,))
    assert whole.complete and not found.complete
    assert told in format_source_result(found)
    assert "line 5" in told and "`self.is_monday`" in told and "queue_reasons.py" in told


def hold_prefills_back(driver: Any) -> None:
    """From now on the engine core asks each schedule() to hold prefills back."""
    driver.scheduler.schedule = partial(driver.scheduler.schedule, True)


@pytest.mark.parametrize("images", [(), (16,)], ids=["text", "image"])
def test_prefill_interval(drive: MakeDriver, images: tuple[int, ...]) -> None:
    """Beside an answer a prompt is held back: not the encoder's budget, and not unknown."""
    driver = drive()
    driver.limit_encoder(64)
    driver.add("old", answer=60)
    driver.step()
    original = driver.scheduler.schedule
    hold_prefills_back(driver)
    driver.clock.tick(1)
    driver.add("held", tokens=40, images=images)
    for _ in range(20):
        driver.step()
    driver.scheduler.schedule = original
    driver.run_until_answered("held")

    assert_reason(driver, "held", "prefill_interval")


def test_prefill_interval_between_chunks(drive: MakeDriver) -> None:
    """A prompt that has begun is held back as well: a stall, with this reason."""
    driver = drive(max_num_batched_tokens=64)
    driver.add("old", answer=60)
    driver.step()
    driver.add("held", tokens=150)
    driver.step()
    original = driver.scheduler.schedule
    # The first chunk left the rest waiting in no queue: the scheduler may hold it back.
    driver.scheduler.prefill_capacity_bound = False
    hold_prefills_back(driver)
    for _ in range(10):
        driver.step()
    driver.scheduler.schedule = original
    driver.run_until_answered("held")
    cut, _ = driver.read("held")

    assert cut.stages[STALL_STAGE] >= 90_000
    assert_reason(driver, "held", "prefill_interval", STALL_STAGE)


def test_stale_output(drive: MakeDriver) -> None:
    """A request whose output is in flight is set aside: for that, whatever connectors there are."""
    driver = drive()
    driver.add("old", answer=60)
    driver.step()
    request = driver.add("stale", lora_request=SimpleNamespace(lora_int_id=2))
    request.num_stale_output_tokens, request.drop_stale_output = 1, False
    for _ in range(10):
        driver.step()
    request.num_stale_output_tokens = 0
    driver.run_until_answered("stale")

    assert_reason(driver, "stale", "stale_output")


def find_reason(scheduler: Any, throttled: bool = False, tokens: int = 1) -> str:
    """The reason of a queue, from a scheduler's state after a step of so many tokens."""
    output = SimpleNamespace(
        total_num_scheduled_tokens=tokens, num_scheduled_tokens={}, scheduled_encoder_inputs={}
    )
    facts = SchedulerFacts(scheduler)
    found = queue_reasons.find_common_reason(scheduler, facts, output, None, throttled)
    return WAIT_REASON_NAMES[found]


def make_scheduler(**state: Any) -> Any:
    """The fields of a scheduler of vLLM 0.33 with one answer and one prompt that waits."""
    pool = SimpleNamespace(get_num_free_blocks=lambda: 10)
    waiting = SimpleNamespace(num_tokens=100, num_computed_tokens=0, mm_features=None)
    fields: dict[str, Any] = {
        "prefill_capacity_bound": False,
        "local_prefill_interval": 4,
        "num_executed_steps": 12,
        "last_prefill_step": 10,
        "running": [SimpleNamespace(is_prefill_chunk=False)],
        "waiting": [waiting],
        "block_size": 16,
        "kv_cache_manager": SimpleNamespace(block_pool=pool),
    }
    return SimpleNamespace(**(fields | state))


@pytest.mark.parametrize(
    ("state", "tokens", "expected"),
    [
        ({}, 1, "prefill_interval"),
        ({"last_prefill_step": 12}, 1, "other"),  # this step computed a prompt
        ({"last_prefill_step": 8}, 1, "other"),  # four steps ago: none is held back
        ({"last_prefill_step": 9}, 0, "other"),  # a step without tokens counts as the next one
        ({"last_prefill_step": 12}, 0, "prefill_interval"),
        ({"prefill_capacity_bound": True}, 1, "other"),
        ({"running": [SimpleNamespace(is_prefill_chunk=True)]}, 1, "other"),
        ({"local_prefill_interval": 1}, 1, "other"),
    ],
)
def test_local_interval(state: dict[str, Any], tokens: int, expected: str) -> None:
    """vLLM 0.33 counts the steps since the last one with a prompt by itself."""
    assert find_reason(make_scheduler(**state), tokens=tokens) == expected


def test_the_head_is_where_the_scheduler_looks() -> None:
    """Requests that hold blocks come first: what they lack is what the queue waits for."""
    holder = SimpleNamespace(num_tokens=1000, num_computed_tokens=200, mm_features=None)
    quiet = {"local_prefill_interval": 1}

    assert find_reason(make_scheduler(**quiet)) == "other"
    assert find_reason(make_scheduler(kv_holding_waiting=[holder], **quiet)) == "kv_blocks"
