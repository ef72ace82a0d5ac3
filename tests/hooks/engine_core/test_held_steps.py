# SPDX-License-Identifier: Apache-2.0
"""Who held a waiting request: vLLM's own Scheduler, and a reference that adds up every step's fractions."""

from __future__ import annotations

import tracemalloc
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from hooks.engine_core import blame_reference
from hooks.engine_core.scheduler_events import with_any_events
from hooks.fakes import FakeEngineCore, make_request
from hooks.process import CORE, put_back_classes, wrap_methods
from ttft_otel.hooks import vllm_fields
from ttft_otel.hooks.engine_core import held_steps, holders
from ttft_otel.model.stages import HOLDING_KIND_NAMES, QUEUE_STAGES, STALL_STAGE

pytestmark = pytest.mark.filterwarnings("ignore")
MakeDriver = Callable[..., Any]


def sum_held(driver: Any, name: str, *stages: str) -> dict[str, int]:
    """Microseconds per kind in `stages` of an answered request."""
    cut, _ = driver.read(name)
    sums = dict.fromkeys(HOLDING_KIND_NAMES, 0)
    for piece in cut.held:
        if piece.stage in stages:
            for kind, length in zip(HOLDING_KIND_NAMES, piece.lengths, strict=True):
                sums[kind] += length
    return {kind: length for kind, length in sums.items() if length}


def read_holders(driver: Any, name: str) -> list[tuple[int, int, str, str]]:
    """(microseconds, tokens, kind, request ID) of an answered request's holders."""
    driver.read(name)
    return [
        (us, tokens, HOLDING_KIND_NAMES[kind], request_id)
        for us, tokens, kind, request_id, _ in driver.timelines[name].read_details().holders
    ]


def test_long_prompt(drive: MakeDriver) -> None:
    """A short prompt behind a long one: the long one has held it, with the tokens of those steps."""
    driver = drive(max_num_batched_tokens=64)
    driver.add("long", tokens=64 * 5)
    driver.step()
    driver.clock.tick(1_000)
    driver.add("short", tokens=8)
    driver.run_until_answered("long", "short")

    assert sum_held(driver, "short", *QUEUE_STAGES) == {"prefill": 40_000}
    assert read_holders(driver, "short") == [(40_000, 256, "prefill", "long")]
    # Between its chunks no step left it out: that is its own turnaround.
    assert sum_held(driver, "long", STALL_STAGE) == {}


def test_decoding(drive: MakeDriver) -> None:
    """One place: who decodes has held it, though it has ended when the wait ends."""
    driver = drive(max_num_seqs=1)
    driver.queue_behind(40)
    driver.run_until_answered("second")

    assert sum_held(driver, "second", *QUEUE_STAGES) == {"decode": 390_000}
    assert read_holders(driver, "second") == [(390_000, 39, "decode", "first")]


def test_came_in_a_step(drive: MakeDriver) -> None:
    """Of the step in which it came only the rest counts; nobody waited when that step was scheduled."""
    driver = drive()
    driver.add("first", tokens=100, traced=False)
    step = driver.begin_step()
    driver.clock.tick(3_000)
    late = driver.build("late")
    driver.clock.tick(7_000)
    driver.end_step(step)
    driver.scheduler.add_request(late)
    driver.clock.tick(500)
    driver.run_until_answered("late")

    assert sum_held(driver, "late", *QUEUE_STAGES) == {"prefill": 7_500}
    assert read_holders(driver, "late") == [(7_500, 100, "prefill", "first")]


def test_encoding(drive: MakeDriver) -> None:
    """A step's time is divided by tokens and embeddings."""
    driver = drive()
    driver.limit_encoder(64)
    for number in range(3):
        driver.add(f"image{number}", tokens=80, images=(64,), answer=1)
    driver.run_until_answered("image2")
    held = sum_held(driver, "image2", *QUEUE_STAGES)

    # Each step encodes 64 and computes 80 tokens of one request, and one token of those before.
    assert held.keys() == {"prefill", "encoder", "decode"} or held.keys() == {"prefill", "encoder"}
    assert sum(held.values()) == 20_000
    assert held["encoder"] / 20_000 == pytest.approx(64 / 144, abs=0.01)
    assert {kind for _, _, kind, _ in read_holders(driver, "image2")} == {"prefill", "encoder"}


def test_other_rank(drive: MakeDriver) -> None:
    """Who comes while its engine core runs a batch for another rank waits for that and its turnaround."""
    driver = drive()
    driver.clock.tick(5_000)
    driver.run_dummy()  # nobody has come yet
    driver.clock.tick(200)
    late = driver.build("late")
    driver.clock.tick(300)
    driver.scheduler.add_request(late)
    driver.run_dummy()
    driver.clock.tick(700)
    driver.run_until_answered("late")

    assert sum_held(driver, "late", *QUEUE_STAGES) == {"idle": 300, "other_rank": 10_700}
    assert read_holders(driver, "late") == []
    assert not CORE.held.log.times


def test_other_rank_of_a_real_engine_core(drive: MakeDriver) -> None:
    """The hook is around the method that DPEngineCoreProc calls, and its failure is vLLM's own."""
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCore

    driver = drive()
    core = DPEngineCoreProc.__new__(DPEngineCoreProc)
    core.scheduler = driver.scheduler

    def execute_dummy_batch() -> None:
        driver.clock.tick(2_000)
        driver.add("late")
        driver.clock.tick(3_000)

    core.model_executor = SimpleNamespace(execute_dummy_batch=execute_dummy_batch)
    wrap_methods(EngineCore, {"engine.dummy": "execute_dummy_batch"})
    try:
        core.execute_dummy_batch()
        core.model_executor = None
        with pytest.raises(AttributeError):
            core.execute_dummy_batch()
        driver.run_until_answered("late")
    finally:
        put_back_classes()

    assert sum_held(driver, "late", *QUEUE_STAGES) == {"other_rank": 3_000}


def test_alone(drive: MakeDriver) -> None:
    """Nobody else is there: no step ran, and nobody is named."""
    driver = drive()
    driver.add("only", tokens=50)
    driver.clock.tick(300)
    driver.run_until_answered("only")

    assert sum_held(driver, "only", *QUEUE_STAGES) == {"idle": 300}
    assert read_holders(driver, "only") == []
    assert not CORE.held.log.times


def test_traced_holder(drive: MakeDriver) -> None:
    """The holder's own trace context is told, also once its headers are gone; an untraced one has none."""
    driver = drive(max_num_seqs=2)
    driver.add("traced", answer=20)
    driver.add("untraced", answer=20, traced=False)
    driver.step()
    driver.add("waiter")
    driver.run_until_answered("waiter")
    driver.read("waiter")
    parents = {each[3]: each[4] for each in driver.timelines["waiter"].read_details().holders}

    assert parents == {"traced": "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "untraced": ""}


def test_aborted(drive: MakeDriver) -> None:
    """A request that ends while it waits keeps what is known, also of the step that runs."""
    from vllm.v1.request import RequestStatus

    from ttft_otel.model.breakdown import Marks
    from ttft_otel.tracing import carrier

    driver = drive(max_num_seqs=1)
    driver.queue_behind(20)
    driver.step()
    driver.begin_step()
    driver.clock.tick(2_500)
    driver.scheduler.finish_requests(["second"], RequestStatus.FINISHED_ABORTED)
    timeline = carrier.decode_timeline(CORE.aborted["second"], Marks(1))

    assert timeline is not None
    assert timeline.held[1::6] == [10_000, 2_500] and timeline.held[3::6] == [10_000, 2_500]
    assert timeline.read_details().holders[0][:4] == (12_500, 2, 1, "first")
    assert not CORE.held.unanswered and not CORE.held.log.times


def test_untraced(drive: MakeDriver) -> None:
    """While only others wait nothing is kept."""
    driver = drive(max_num_seqs=1)
    for number in range(4):
        driver.add(f"r{number}", traced=False)
        driver.step()

    assert not (CORE.held.unanswered or CORE.held.unmarked or CORE.held.log.times)


def test_many_holders(drive: MakeDriver) -> None:
    """Of more prompts than are kept, the largest three are still exact."""
    driver = drive(max_num_batched_tokens=96, max_num_seqs=2)
    sizes = [20 + 17 * number % 70 for number in range(3 * holders.MAX_HOLDERS)]
    for number, size in enumerate(sizes):
        driver.add(f"r{number}", tokens=size, answer=1, traced=False)
    driver.add("last", tokens=8)
    driver.run_until_answered("last")
    check_blame(driver, "last")
    driver.read("last")

    assert not driver.timelines["last"].read_details().holders_lost


def test_memory(core: FakeEngineCore) -> None:
    """However many wait and however long: at most 1 MB, and those that are not followed say nothing."""
    others = [make_request(f"other{number}", 10**9, traced=False) for number in range(40)]
    core.add(*others)
    waiting = [make_request(f"w{number}") for number in range(2 * held_steps.MAX_FOLLOWED)]
    files = ("held_steps", "holders", "step_log", "step_work")
    tracemalloc.start()
    try:
        for number in range(2000):
            if number < len(waiting):
                core.add(waiting[number])
            chunks = {each.request_id: 50 for each in others[number % 32 : number % 32 + 8]}
            core.update(core.schedule(new=(f"other{number % 40}",), tokens=chunks))
        snapshot = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    ours = snapshot.filter_traces([tracemalloc.Filter(True, f"*/{name}.py") for name in files])

    assert len(CORE.held.followed) == held_steps.MAX_FOLLOWED
    assert len(CORE.held.log.holders.holders) <= holders.MAX_HOLDERS
    assert sum(each.size for each in ours.statistics("filename")) <= 1 << 20
    for each in waiting:
        core.free(each.request_id)
    assert waiting[0]._ttft_timeline.held and not waiting[-1]._ttft_timeline.held
    assert not CORE.held.unanswered and not CORE.held.log.times


def check_blame(driver: Any, name: str) -> None:
    """The kinds of an answered request add up to its stages, and are those of the reference."""
    cut, marks = driver.read(name)
    for piece in cut.held:
        assert sum(piece.lengths) == piece.end - piece.start and min(piece.lengths) >= 0
        truth = blame_reference.sum_kinds(driver.steps, name, piece.start, piece.end)
        # Whole microseconds for each step and its turnaround, and for each segment at the ends.
        rounding_us = 4 + 2 * blame_reference.count_steps(driver.steps, piece.start, piece.end)
        for kind, length in zip(HOLDING_KIND_NAMES, piece.lengths, strict=True):
            if piece.stage in QUEUE_STAGES:
                assert abs(length - truth[kind]) <= rounding_us, (name, piece, kind, dict(truth))
    waiting_stages = (*QUEUE_STAGES, STALL_STAGE)
    assert [(piece.stage, piece.start, piece.end) for piece in cut.held] == [
        each for each in cut.pieces if each[0] in waiting_stages
    ]
    if driver.timelines[name].read_details().holders_lost:
        shares = blame_reference.sum_shares(driver.steps, marks.added, marks.scheduled)
        for us, _, kind, request_id in read_holders(driver, name):
            if kind != "decode":
                assert abs(us - shares[request_id, kind]) <= 2
        return
    told = [each[0] for each in driver.timelines[name].read_details().holders]
    expected = blame_reference.list_holders(driver.steps, name, marks.added, marks.scheduled)
    expected = [us for us in expected if us >= 2][: holders.MAX_NAMED]
    for us, right in zip(told, expected, strict=False):
        assert abs(us - right) <= 2, (name, driver.timelines[name].read_details().holders, expected)
    assert len(told) >= len(expected)


@pytest.mark.parametrize("overlapping", [False, True])
@with_any_events(
    ["add", "add", "other", "image", "step", "step", "begin", "abort", "pause", "dummy"]
)
def test_any_steps(
    drive: MakeDriver,
    overlapping: bool,
    events: list[tuple[str, int, int]],
    places: int,
    tokens: int,
) -> None:
    """Whatever happens, the reference gives the same division, and the same three holders.

    overlapping: a step may be scheduled while another one runs, as with pipeline stages.
    """
    CORE.drop_all()
    driver = drive(max_num_seqs=places, max_num_batched_tokens=tokens, blocks=512)
    driver.limit_encoder(48)
    facts = vllm_fields.get_facts(driver.scheduler)
    facts.overlaps = facts.is_pipeline = overlapping
    running: deque[Any] = deque()
    names = []

    def end_oldest(length_us: int) -> None:
        driver.clock.tick(length_us)
        driver.end_step(running.popleft())

    for number, (what, size, gap) in enumerate(events):
        driver.clock.tick(gap)
        name = f"r{number}"
        if what in ("add", "other", "image"):
            images = (1 + size % 48, 20) if what == "image" else ()
            driver.add(
                name, tokens=size, answer=1 + size % 7, images=images, traced=what != "other"
            )
            names += [name] if what != "other" else []
        elif what == "abort":
            abort_request(driver, size, running)
        elif what == "pause":
            driver.pause(size)
        elif what == "dummy":
            if not running:  # the engine core makes one only where no step ran
                driver.run_dummy(size * 10)
        else:
            running.append(driver.begin_step())
            if what == "step" or not overlapping or len(running) > 1:
                end_oldest(size * 10)
    while running:
        end_oldest(1_000)
    while driver.scheduler.requests:
        driver.step(1_000)
    for name in names:
        if name in driver.headers:
            check_blame(driver, name)
    assert not CORE.held.unanswered and not CORE.held.followed and not CORE.held.log.times


def abort_request(driver: Any, number: int, running: Sequence[Any]) -> None:
    """Abort a request that is in no step that runs.

    Of one that is, the scheduler forgets at once whose token it was: its last step's share has no name.
    """
    from vllm.v1.request import RequestStatus

    busy = {each for step in running for each in step.output.num_scheduled_tokens}
    ids = [each for each in driver.scheduler.requests if each not in busy]
    if ids:
        driver.scheduler.finish_requests([ids[number % len(ids)]], RequestStatus.FINISHED_ABORTED)
