# SPDX-License-Identifier: Apache-2.0
"""Why requests wait: vLLM's own Scheduler is driven into each reason alone, and into any by chance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from hooks.fakes import with_any_events
from hooks.process import CORE, HOOKS, PATCHER, drop_state
from ttft_otel.hooks.engine_core import queue_reasons
from ttft_otel.hooks.targets import TARGETS_BY_NAME
from ttft_otel.hooks.vllm_fields import SchedulerFacts
from ttft_otel.model.stages import (
    HOLDING_KIND_NAMES,
    QUEUE_STAGES,
    STALL_STAGE,
    WAIT_REASON_NAMES,
)
from ttft_otel.model.waits import divide_waits
from ttft_otel.tracing import carrier

pytestmark = pytest.mark.filterwarnings("ignore")
MakeDriver = Callable[..., Any]


def assert_reason(driver: Any, name: str, reason: str, *stages: str) -> None:
    """Once it is answered, at least 95 % of its wait has this reason, and reasons' times are the stages'."""
    driver.run_until_answered(name)
    stages = stages or QUEUE_STAGES
    sums = driver.sum_reasons(name, *stages)
    cut, _ = driver.read(name)
    total = sum(cut.stages.get(stage, 0) for stage in stages)

    assert sum(sums.values()) == total > 0
    assert sums.get(reason, 0) >= 0.95 * total, sums


def test_in_step(drive: MakeDriver) -> None:
    """It comes while a step runs, and the next one takes it: all of its wait is that step."""
    driver = drive()
    driver.add("first", answer=4)
    driver.scheduler.schedule()
    late = driver.build("late")
    driver.clock.tick(7_000)
    driver.scheduler.add_request(late)
    driver.run_until_answered("late")

    assert driver.sum_reasons("late", *QUEUE_STAGES) == {"in_step": 7_000}


def test_token_budget(drive: MakeDriver) -> None:
    """Few tokens a step: behind a long prompt, a short one waits for its last chunk."""
    driver = drive(max_num_batched_tokens=64)
    driver.add("long", tokens=64 * 30)
    driver.step()
    driver.add("short", tokens=8)
    driver.run_until_answered("long")

    assert_reason(driver, "short", "token_budget")
    # Nobody was worked for between its chunks but itself.
    cut, _ = driver.read("long")
    assert STALL_STAGE not in cut.stages and cut.stages["dispatch"] > 0
    assert not driver.sum_reasons("long", STALL_STAGE)


def test_no_chunks(drive: MakeDriver) -> None:
    """Without chunks a prompt waits for a step that has room for all of it."""
    driver = drive(max_num_batched_tokens=2048, max_model_len=2048, enable_chunked_prefill=False)
    for number in range(30):
        driver.add(f"other{number}", tokens=2000, answer=1)
    driver.step()
    driver.add("last", tokens=500)

    assert_reason(driver, "last", "token_budget")


def test_kv_blocks(drive: MakeDriver) -> None:
    """Few blocks: a prompt waits until answers that fill them have ended."""
    driver = drive(blocks=14)  # one is vLLM's own
    driver.add("holder", tokens=100, answer=60)
    driver.step()
    driver.add("waiter", tokens=120)

    assert_reason(driver, "waiter", "kv_blocks")


def test_preempted(drive: MakeDriver) -> None:
    """A prompt that loses its blocks between two chunks waits for them again."""
    driver = drive(blocks=14, max_num_seqs=4, max_num_batched_tokens=16)
    driver.add("holder", tokens=60, answer=90)
    driver.run_until_answered("holder")
    driver.add("waiter", tokens=140)

    assert_reason(driver, "waiter", "kv_blocks", STALL_STAGE)
    assert driver.timelines["waiter"].read_details().preempted


def test_encoder_budget(drive: MakeDriver) -> None:
    """One image a step: behind twenty of them a request with an image waits for the encoder."""
    driver = drive()
    driver.limit_encoder(64)
    for number in range(20):
        driver.add(f"image{number}", tokens=80, images=(64,), answer=1)
    driver.clock.tick(1)  # else the first step is the one in which it came

    assert_reason(driver, "image19", "encoder_budget")


def test_late_encoding(drive: MakeDriver) -> None:
    """An encoder-cache connector says "not yet": what the scheduler tells is what `ec.transfer` has."""
    target, hook = TARGETS_BY_NAME["transfer.wait"], HOOKS["transfer.wait"]
    PATCHER.patch_attribute(target, FakeEcConnector, "ensure_cache_available", hook)
    driver = drive()
    driver.scheduler.ec_connector = connector = FakeEcConnector()
    connector.missing.add("late")
    driver.add("late", tokens=80, images=(64,))
    driver.limit_encoder(64)
    driver.run_steps(30)
    connector.missing.clear()
    driver.run_until_answered("late")
    cut, marks = driver.read("late")
    (whole,) = divide_waits([("prefill.queue", marks.added, marks.scheduled)], marks.reasons)

    assert whole.reason == "remote_ec"
    assert cut.stages["ec.transfer"] == 300_000 == whole.end - whole.start
    assert not driver.sum_reasons("late")


class FakeEcConnector:
    """The scheduler's side of an encoder-cache connector: what is missing is said to come later."""

    def __init__(self) -> None:
        self.missing: set[str] = set()

    def ensure_cache_available(self, request: Any, computed: int) -> bool:
        return request.request_id not in self.missing

    def request_finished(self, request: Any) -> tuple[bool, None]:
        return False, None

    def __getattr__(self, name: str) -> Any:
        """All else finds nothing."""
        return lambda *args, **kwargs: None if "stats" in name or "meta" in name else ()


def test_grammar(drive: MakeDriver) -> None:
    """A grammar that is being compiled; also where all places are taken meanwhile."""
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    driver = drive(max_num_seqs=1)
    driver.add("first", answer=10)
    sampling = SamplingParams(
        max_tokens=2, ignore_eos=True, structured_outputs=StructuredOutputsParams(regex="a")
    )
    request = driver.add("formal", sampling=sampling)
    grammar: Future[Any] = Future()
    request.structured_output_request.grammar = grammar
    driver.run_steps(40)
    grammar.set_result(SimpleNamespace())

    assert_reason(driver, "formal", "grammar")


def test_lora(drive: MakeDriver) -> None:
    """One adapter at a time: the request of another one waits."""
    driver = drive()
    driver.scheduler.lora_config = SimpleNamespace(max_loras=1)
    driver.add("first", answer=40, lora_request=SimpleNamespace(lora_int_id=1))
    driver.step()
    driver.add("second", lora_request=SimpleNamespace(lora_int_id=2))

    assert_reason(driver, "second", "lora")


def test_priority(drive: MakeDriver) -> None:
    """Those that come later with a higher priority go first, one after the other."""
    driver = drive(max_num_seqs=1, policy="priority")
    driver.add("low", priority=5)
    for number in range(30):
        driver.add(f"high{number}", priority=1, arrival_time=driver.clock.at / 1e6 + 1 + number)

    assert_reason(driver, "low", "priority")


@pytest.mark.parametrize("images", [(), (16,)], ids=["text", "image"])
def test_prefill_interval(drive: MakeDriver, images: tuple[int, ...]) -> None:
    """Beside an answer a prompt is held back: not the encoder's budget, and not unknown."""
    driver = drive()
    driver.limit_encoder(64)
    driver.add("old", answer=60)
    driver.step()
    driver.clock.tick(1)
    driver.add("held", tokens=40, images=images)
    hold_prefills_back(driver, 20)

    assert_reason(driver, "held", "prefill_interval")


def test_prefill_interval_between_chunks(drive: MakeDriver) -> None:
    """A prompt that has begun is held back as well: a stall, with this reason."""
    driver = drive(max_num_batched_tokens=64)
    driver.add("old", answer=60)
    driver.step()
    driver.add("held", tokens=150)
    driver.step()
    # The first chunk left the rest waiting in no queue: the scheduler may hold it back.
    driver.scheduler.prefill_capacity_bound = False
    hold_prefills_back(driver, 10)

    assert_reason(driver, "held", "prefill_interval", STALL_STAGE)
    assert driver.read("held")[0].stages[STALL_STAGE] >= 90_000


def hold_prefills_back(driver: Any, steps: int) -> None:
    """For so many steps the engine core asks each schedule() to hold prefills back."""
    original = driver.scheduler.schedule
    driver.scheduler.schedule = partial(original, True)
    driver.run_steps(steps)
    driver.scheduler.schedule = original


def test_stale_output(drive: MakeDriver) -> None:
    """A request whose output is in flight is set aside: for that, whatever connectors there are."""
    driver = drive()
    driver.add("old", answer=60)
    driver.step()
    request = driver.add("stale", lora_request=SimpleNamespace(lora_int_id=2))
    request.num_stale_output_tokens, request.drop_stale_output = 1, False
    driver.run_steps(10)
    request.num_stale_output_tokens = 0

    assert_reason(driver, "stale", "stale_output")


def test_prompts_that_have_begun_go_on_while_new_ones_are_held_back(drive: MakeDriver) -> None:
    """PAUSED_NEW leaves no chunk out: what lies between them is turnaround, and no stall for a pause."""
    driver = drive(max_num_batched_tokens=64)
    driver.add("long", tokens=200)
    driver.step()
    driver.set_pause("PAUSED_NEW")
    driver.step(idle_us=3_000)
    driver.run_until_answered("long")
    cut, _ = driver.read("long")

    assert STALL_STAGE not in cut.stages and cut.stages["dispatch"] >= 3_000


@pytest.mark.parametrize("state", ["PAUSED_ALL", "PAUSED_NEW"])
def test_paused(drive: MakeDriver, state: str) -> None:
    """Whether the engine core still runs steps while it is paused, or none until it goes on."""
    driver = drive()
    driver.set_pause(state)
    driver.add("paused")
    driver.run_steps(40 if state == "PAUSED_NEW" else 0)
    driver.clock.tick(400_000)
    driver.set_pause("UNPAUSED")

    assert_reason(driver, "paused", "paused")


def test_paused_while_waiting(drive: MakeDriver) -> None:
    """One place, and a pause in which no step runs: it is told from the queue before and after it."""
    driver = drive(max_num_seqs=1)
    driver.queue_behind(8)
    driver.run_steps(3)
    driver.pause(400_000)
    driver.run_until_answered("second")
    sums = driver.sum_reasons("second", *QUEUE_STAGES)

    assert sums == {"max_num_seqs": 70_000, "paused": 400_000}


def test_paused_between_chunks(drive: MakeDriver) -> None:
    """A prompt that has begun is left out by a pause in which no step runs: a stall, with this reason."""
    driver = drive(max_num_batched_tokens=64)
    driver.add("long", tokens=200)
    driver.step()
    driver.pause(30_000)
    driver.run_until_answered("long")

    assert driver.sum_reasons("long", STALL_STAGE) == {"paused": 30_000}


def test_unknown_scheduler(drive: MakeDriver) -> None:
    """A scheduler with none of the fields: the reason is "other", and nothing is raised."""
    driver = drive(max_num_seqs=1)
    driver.queue_behind(20)
    output = SimpleNamespace(
        scheduled_new_reqs=[], num_scheduled_tokens={}, total_num_scheduled_tokens=0
    )
    bare = SimpleNamespace(requests=driver.scheduler.requests, vllm_config=None)
    driver.clock.tick(1)
    CORE.queue.record_queue(bare, output, None, driver.clock.at, False)

    assert CORE.queue._changes == [(driver.clock.at, WAIT_REASON_NAMES.index("other"))]


def find_reason(state: dict[str, Any], tokens: int = 1) -> str:
    """The reason of a queue behind an answer, after a step of so many tokens.

    state: fields of a scheduler of vLLM 0.33 in which one prompt waits.
    """
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
    scheduler = SimpleNamespace(**(fields | state))
    output = SimpleNamespace(
        total_num_scheduled_tokens=tokens, num_scheduled_tokens={}, scheduled_encoder_inputs={}
    )
    facts = SchedulerFacts(scheduler)
    return WAIT_REASON_NAMES[queue_reasons.find_common_reason(scheduler, facts, output, None)]


HOLDER = SimpleNamespace(num_tokens=1000, num_computed_tokens=200, mm_features=None)


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
        # Requests that hold blocks come first: what they lack is what the queue waits for.
        ({"local_prefill_interval": 1, "kv_holding_waiting": [HOLDER]}, 1, "kv_blocks"),
    ],
)
def test_head_of_the_queue(state: dict[str, Any], tokens: int, expected: str) -> None:
    """vLLM 0.33 counts the steps since the last one with a prompt by itself."""
    assert find_reason(state, tokens) == expected


def ask_what_waits(driver: Any) -> tuple[dict[str, int], list[tuple[Any, ...]]]:
    """Counts by reason, and the holders, as the engine core answers between two steps."""
    text = CORE.answer_waiting(driver.scheduler)
    report = carrier.decode_answer(carrier.QueueReport, text)
    assert report is not None
    return {WAIT_REASON_NAMES[code]: n for code, n in report.reasons.items()}, report.holders


def count_queued(driver: Any) -> Iterator[bool]:
    """Of each request in vLLM's queues: whether it has no token yet."""
    for queue in (driver.scheduler.waiting, driver.scheduler.kv_holding_waiting):
        for request in queue:
            yield not request.num_output_tokens


def test_what_waits_now(drive: MakeDriver) -> None:
    """While they wait, the engine core tells how many do for which reason, and who holds the first one up."""
    driver = drive(max_num_seqs=1)
    assert ask_what_waits(driver) == ({}, [])
    driver.queue_behind(40)
    driver.add("third")
    assert ask_what_waits(driver) == ({"in_step": 2}, [])
    driver.run_steps(10)
    counts, holders = ask_what_waits(driver)
    assert counts == {"max_num_seqs": 2}
    (holder,) = holders
    assert holder[3] == "first" and HOLDING_KIND_NAMES[holder[2]] == "decode"
    assert holder[0] == pytest.approx(100_000, rel=0.15)

    driver.set_pause("PAUSED_ALL")
    driver.add("fourth")
    assert ask_what_waits(driver)[0] == {"paused": 3}
    driver.set_pause("UNPAUSED")
    driver.run_until_answered("second", "third", "fourth")
    assert ask_what_waits(driver) == ({}, [])


@with_any_events(["add", "step", "pause", "resume", "abort", "image"])
def test_sums(
    drive: MakeDriver, events: list[tuple[str, int, int]], places: int, tokens: int
) -> None:
    """Whatever happens, the reasons of a stage add up to it, to the microsecond."""
    drop_state()
    driver = drive(max_num_seqs=places, max_num_batched_tokens=tokens, blocks=64)
    driver.limit_encoder(48)
    for number, (what, size, gap) in enumerate(events):
        driver.clock.tick(gap)
        perform_event(driver, what, f"r{number}", size)
        counted = ask_what_waits(driver)[0].values()
        assert sum(counted) == sum(count_queued(driver))
    driver.set_pause("UNPAUSED")
    for _ in range(400):
        driver.step(1_000)
    for name in driver.headers:
        cut, _ = driver.read(name)
        for stage in (*QUEUE_STAGES, STALL_STAGE):
            assert sum(driver.sum_reasons(name, stage).values()) == cut.stages.get(stage, 0)
    assert not CORE.queue.waiting and not CORE.queue.arrived
    assert not CORE.held.unanswered and not CORE.held.followed and not CORE.held.log.edge


def perform_event(driver: Any, what: str, name: str, size: int) -> None:
    if what == "add":
        driver.add(name, tokens=size, answer=1 + size % 7)
    elif what == "image":
        driver.add(name, tokens=size, images=(1 + size % 48, 20), answer=2)
    elif what == "step":
        driver.step(size * 10)
    elif what == "abort":
        driver.abort(*[each for each in driver.scheduler.requests if size % 2][:1])
    else:
        driver.set_pause("PAUSED_NEW" if what == "pause" else "UNPAUSED")
