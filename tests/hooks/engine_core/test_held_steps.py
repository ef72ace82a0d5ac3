# SPDX-License-Identifier: Apache-2.0
"""Who held a waiting request: vLLM's own Scheduler, and a reference that adds up every step's fractions.

And what is blamed on a request is what removing it changes (tests/live/test_waits.py: a real server).
"""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hooks.fakes import FakeEngineCore, make_request, with_any_events
from hooks.process import CORE, drop_state, put_back_classes, wrap_methods
from lab.fake_vllm.engine_objects import build_scheduler_output
from ttft_otel.hooks import vllm_fields
from ttft_otel.hooks.engine_core import held_steps, step_log
from ttft_otel.hooks.engine_core.held_steps import HeldRequests
from ttft_otel.hooks.engine_core.step_log import HolderLog, StepWork, describe_step
from ttft_otel.model.breakdown import Marks
from ttft_otel.model.stages import HOLDING_KIND_NAMES, QUEUE_STAGES, STALL_STAGE
from ttft_otel.tracing import carrier

pytestmark = pytest.mark.filterwarnings("ignore")
Shares = dict[tuple[str, str], Fraction]  # (request ID, kind) -> microseconds


def list_segments(steps: list[Any]) -> list[tuple[int, int, Any]]:
    """(begin, end, step) of each step that has ended and of its turnaround, in their order.

    A step begins when the one before it has ended. A turnaround ends when the next step is scheduled; there
    is none with a pause in it.
    """
    segments: list[tuple[int, int, Any]] = []
    last, before = 0, None
    for step in steps:
        if step.end:
            if before is not None and step.scheduled > last and not step.resumed:
                segments.append((last, step.scheduled, before))
            segments.append((max(step.scheduled, last), step.end, step))
            last, before = step.end, step
    return segments


def skip_turnaround(steps: list[Any], start: int) -> int:
    """From when on a request that came at `start` can have been held: not in a turnaround that went on."""
    for low, high, step in list_segments(steps):
        if low == step.end <= start <= high:
            return high
    return start


def count_steps(steps: list[Any], start: int, end: int) -> int:
    """How many steps ran in [start, end]."""
    return sum(low < end and high > start for low, high, _ in list_segments(steps))


def divide_step(step: Any) -> Shares:
    """Each request's share of the step; they add up to 1, or to 0 for a step without work."""
    if step.is_dummy:
        return {("", "other_rank"): Fraction(1)}
    tokens = step.output.num_scheduled_tokens
    total = sum(tokens.values()) + sum(step.embeddings.values())
    shares: Shares = {}
    for request_id, count in tokens.items():
        shares[request_id, "prefill" if count > 1 else "decode"] = Fraction(count, total)
    for request_id, count in step.embeddings.items():
        shares[request_id, "encoder"] = Fraction(count, total)
    return shares


def sum_shares(steps: list[Any], start: int, end: int) -> Shares:
    """Microseconds of each request and kind in [start, end], for a request that came at `start`."""
    sums: Shares = defaultdict(Fraction)
    start = skip_turnaround(steps, start)
    for low, high, step in list_segments(steps):
        length = min(high, end) - max(low, start)
        if length > 0:
            for key, share in divide_step(step).items():
                sums[key] += length * share
    return sums


def sum_kinds(steps: list[Any], own_id: str, start: int, end: int) -> dict[str, Fraction]:
    """Microseconds of each kind of work in [start, end], for the request `own_id`."""
    kinds: dict[str, Fraction] = defaultdict(Fraction)
    for (request_id, kind), length in sum_shares(steps, start, end).items():
        kinds["own" if request_id == own_id else kind] += length
    kinds["idle"] = end - start - sum(kinds.values(), Fraction(0))
    return kinds


def list_holders(steps: list[Any], own_id: str, start: int, end: int) -> list[Fraction]:
    """The shares of all holders, the largest first."""
    shares = sum_shares(steps, start, end)
    return sorted([us for key, us in shares.items() if key[0] not in ("", own_id)], reverse=True)


MakeDriver = Callable[..., Any]


def sum_held(driver: Any, name: str, *stages: str) -> dict[str, int]:
    """Microseconds per kind in `stages` of an answered request."""
    pieces = [piece.lengths for piece in driver.read(name)[0].held if piece.stage in stages]
    sums = map(sum, zip(*pieces, strict=True))
    return {kind: us for kind, us in zip(HOLDING_KIND_NAMES, sums, strict=False) if us}


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
    driver = drive(max_num_seqs=1)
    driver.queue_behind(20)
    driver.step()
    driver.begin_step()
    driver.clock.tick(2_500)
    driver.abort("second")
    timeline = carrier.decode_timeline(CORE.aborted["second"], Marks(1))

    assert timeline is not None
    assert timeline.held[1::6] == [10_000, 2_500] and timeline.held[3::6] == [10_000, 2_500]
    assert timeline.read_details().holders[0][:4] == (12_500, 2, 1, "first")
    assert not CORE.held.unanswered and not CORE.held.log.times


def test_many_holders(drive: MakeDriver) -> None:
    """Of more prompts than are kept, the largest three are still exact."""
    driver = drive(max_num_batched_tokens=96, max_num_seqs=2)
    sizes = [20 + 17 * number % 70 for number in range(3 * step_log.MAX_HOLDERS)]
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
    files = ("held_steps", "step_log")
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
    assert len(CORE.held.log.holders.holders) <= step_log.MAX_HOLDERS
    assert sum(each.size for each in ours.statistics("filename")) <= 1 << 20
    for each in waiting:
        core.free(each.request_id)
    assert waiting[0]._ttft_timeline.held and not waiting[-1]._ttft_timeline.held


def check_blame(driver: Any, name: str) -> None:
    """The kinds of an answered request add up to its stages, and are those of the reference."""
    cut, marks = driver.read(name)
    for piece in cut.held:
        assert sum(piece.lengths) == piece.end - piece.start and min(piece.lengths) >= 0
        truth = sum_kinds(driver.steps, name, piece.start, piece.end)
        # Whole microseconds for each step and its turnaround, and for each segment at the ends.
        rounding_us = 4 + 2 * count_steps(driver.steps, piece.start, piece.end)
        for kind, length in zip(HOLDING_KIND_NAMES, piece.lengths, strict=True):
            if piece.stage in QUEUE_STAGES:
                assert abs(length - truth[kind]) <= rounding_us, (name, piece, kind, dict(truth))
    waiting_stages = (*QUEUE_STAGES, STALL_STAGE)
    assert [(piece.stage, piece.start, piece.end) for piece in cut.held] == [
        each for each in cut.pieces if each[0] in waiting_stages
    ]
    if driver.timelines[name].read_details().holders_lost:
        shares = sum_shares(driver.steps, marks.added, marks.scheduled)
        for us, _, kind, request_id in read_holders(driver, name):
            if kind != "decode":
                assert abs(us - shares[request_id, kind]) <= 2
        return
    told = [each[0] for each in driver.timelines[name].read_details().holders]
    expected = list_holders(driver.steps, name, marks.added, marks.scheduled)
    expected = [us for us in expected if us >= 2][: step_log.MAX_NAMED]
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
    drop_state()
    driver = drive(max_num_seqs=places, max_num_batched_tokens=tokens, blocks=512)
    driver.limit_encoder(48)
    facts = vllm_fields.get_facts(driver.scheduler)
    facts.overlaps = facts.is_pipeline = overlapping
    running: deque[Any] = deque()

    def end_oldest(length_us: int) -> None:
        driver.clock.tick(length_us)
        driver.end_step(running.popleft())

    for number, (what, size, gap) in enumerate(events):
        driver.clock.tick(gap)
        if what in ("add", "other", "image"):
            images = (1 + size % 48, 20) if what == "image" else ()
            options = {"answer": 1 + size % 7, "images": images, "traced": what != "other"}
            driver.add(f"r{number}", size, **options)
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
    for name in driver.headers:
        check_blame(driver, name)
    assert_nothing_kept()


def abort_request(driver: Any, number: int, running: Sequence[Any]) -> None:
    """Abort a request that is in no step that runs.

    Of one that is, the scheduler forgets at once whose token it was: its last step's share has no name.
    """
    busy = {each for step in running for each in step.output.num_scheduled_tokens}
    ids = [each for each in driver.scheduler.requests if each not in busy]
    if ids:
        driver.abort(ids[number % len(ids)])


def test_turnaround(drive: MakeDriver) -> None:
    """What passes until the next step is scheduled is the step's before, also for one that ended with it."""
    driver = drive(max_num_seqs=1)
    driver.queue_behind(10)
    while "second" not in driver.headers:
        driver.step(idle_us=700)

    # Nine steps, and nine turnarounds: in that of the first step it came, and after the last its own begins.
    assert sum_held(driver, "second", *QUEUE_STAGES) == {"decode": 9 * 10_700, "idle": 700}
    assert read_holders(driver, "second") == [(9 * 10_700, 9, "decode", "first")]


@pytest.mark.parametrize("steady", [True, False])
def test_same_requests_decode(drive: MakeDriver, steady: bool) -> None:
    """Steps in which the same requests decode are one segment, with turnarounds; a prompt divides it."""
    driver = drive(max_num_seqs=2)
    driver.add("first", answer=60, traced=False)
    driver.add("one", answer=60 if steady else 3, traced=False)
    driver.step()
    if not steady:
        for number in range(10):
            driver.add(f"other{number}", answer=3, traced=False)
    driver.add("last")
    driver.step(idle_us=500)
    before = len(CORE.held.log.times)
    for _ in range(20):
        driver.step(idle_us=500)
    edges = len(CORE.held.log.times) - before
    driver.run_until_answered("last")

    assert (edges <= 2) == steady
    held = sum_held(driver, "last", *QUEUE_STAGES)
    # In the first turnaround it came.
    assert (held == {"decode": 59 * 10_000 + 20 * 500, "idle": 500}) == steady


def make_step(tokens: dict[str, int], new: tuple[str, ...] = ()) -> StepWork:
    """A step as the scheduler has put it together, in which nobody has more than one token."""
    return describe_step(None, build_scheduler_output(tokens, new), 0)


def test_plain_step() -> None:
    """A step in which all decode is noted without describe_step(), as that would describe it."""
    work = make_step({"a": 1, "b": 1})
    work.scheduled, work.is_plain = 7, True
    held = HeldRequests()
    held.note_schedule(None, work.output, 7)

    assert msgspec.structs.asdict(held.log.in_flight[-1]) == msgspec.structs.asdict(work)


def test_not_begun() -> None:
    """A request whose first step has not ended has held nobody, however complete its prompt looks.

    Its start is a sum that is never reached: what lies between is no time, and no integer of 64 bits.
    """
    log = HolderLog()
    decoding = make_step({"old": 1})
    start = log.start_wait(decoding, 0)
    log.close_step(decoding, 1000)
    running = make_step({"old": 1, "cached": 1}, new=("cached",))
    log.open_step(running, {})
    states = [
        SimpleNamespace(request_id=each, num_computed_tokens=9, num_prompt_tokens=9)
        for each in ("old", "cached")
    ]

    assert log.list_holders(start, "own", states, running, 0) == [(1000, 1, 1, "old", "")]


def assert_nothing_kept() -> None:
    """No request and no step is known."""
    assert not CORE.held.unanswered and not CORE.held.followed
    assert not CORE.held.unmarked and not CORE.held._ended
    log = CORE.held.log
    assert not log.times and not log.in_flight and not log.holders.started and not log.ending
    assert not CORE.queue.arrived and not CORE.queue.waiting


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("tokens", [8, 300])
def test_aborted_in_first_step(drive: MakeDriver, tokens: int, overlapping: bool) -> None:
    """Aborts are taken while the step runs, also the first one, which has a part or all of the prompt."""
    driver = drive(max_num_batched_tokens=64)
    vllm_fields.get_facts(driver.scheduler).overlaps = overlapping
    driver.add("gone", tokens=tokens)
    step = driver.begin_step()
    driver.clock.tick(3_000)
    driver.abort("gone")
    assert_nothing_kept()
    driver.clock.tick(3_000)
    driver.end_step(step)
    driver.step()
    assert_nothing_kept()

    # With another one that waits: what follows is still told of it.
    driver.add("first", tokens=tokens, answer=3)
    driver.add("second", tokens=200, answer=3)
    step = driver.begin_step()
    driver.clock.tick(3_000)
    driver.abort("first")
    driver.end_step(step)
    driver.run_until_answered("second")
    while driver.scheduler.requests:
        driver.step()
    cut, _ = driver.read("second")
    # Beside few tokens of the first one its own first chunk has room at once.
    assert bool(cut.held) == (tokens > 8)
    assert_nothing_kept()


def test_schedule_raises(drive: MakeDriver) -> None:
    """An error of vLLM's own in schedule() or update_from_output() is passed on, and nothing is kept."""
    driver = drive(max_num_seqs=1)
    driver.add("first", answer=30)
    driver.step()
    driver.add("second")
    driver.step()
    policy, driver.scheduler.policy = driver.scheduler.policy, None
    waiting_queue, driver.scheduler.waiting = driver.scheduler.waiting, None
    with pytest.raises((AttributeError, TypeError)):
        driver.scheduler.schedule()
    driver.scheduler.policy, driver.scheduler.waiting = policy, waiting_queue
    with pytest.raises((AttributeError, TypeError)):
        driver.scheduler.update_from_output(driver.begin_step().output, None)
    driver.abort("first", "second")
    driver.step()
    assert_nothing_kept()


def test_long_ids(core: FakeEngineCore) -> None:
    """The IDs of requests that have ended, which clients choose, are kept only in part: at most 1 MB."""
    core.add(make_request("waiter"))
    for number in range(300):
        name = (
            f"{number:03d}" + "x" * 200_000
        )  # a client names its request, in megabytes if it likes
        other = make_request(name, 50, traced=False)
        other.num_output_tokens = 5
        core.add(other)
        core.update(core.schedule(new=(name,), tokens={name: 50}))
        core.update(core.schedule(tokens={name: 1}))
        core.free(name)
    holders = CORE.held.log.holders
    kept = [*(each.request_id for each in holders.holders), *(each[0] for each in holders.ended)]
    kept += [*holders.started, *(key[0] for key in holders.open)]
    assert len(kept) > 40
    assert sum(map(len, kept)) <= 1 << 20
    core.free("waiter")
    assert_nothing_kept()


class VllmRequest(SimpleNamespace):
    """One that a weak reference can point to."""

    __hash__ = object.__hash__


def test_requests_are_not_kept(core: FakeEngineCore) -> None:
    """Where nobody tells of a request's end, what we keep of it is small: not its prompt, nor its images."""
    core.add(VllmRequest(**vars(make_request("a"))))
    core.schedule(("a",), {"a": 4})
    gone = weakref.ref(core.requests["a"])
    CORE.awaiting.clear()
    assert CORE.held.unanswered
    del core.requests["a"]
    gc.collect()

    assert gone() is None


BLAMED_STEP_US, TOKEN_US, TURNAROUND_US = 1_500, 60, 300
SMALL_COUNT = 40


def run_load(driver: Any, injected: dict[int, dict[str, Any]], every_us: int) -> dict[str, int]:
    """The wait of each small request in microseconds; one comes every `every_us`.

    A step takes a fixed time and some for each token, as a model would, and a turnaround follows it.
    injected: time -> fields of a request.
    """
    start = driver.clock.at
    arrivals = [(start + at, f"injected{at}", fields) for at, fields in injected.items()]
    arrivals += [
        (start + number * every_us + 7_000, f"small{number}", {"tokens": 16, "answer": 3})
        for number in range(SMALL_COUNT)
    ]
    arrivals.sort(key=lambda each: each[0])
    while arrivals or driver.scheduler.requests:
        if not driver.scheduler.requests:
            driver.clock.tick(max(0, arrivals[0][0] - driver.clock.at))
        while arrivals and arrivals[0][0] <= driver.clock.at:
            _, name, fields = arrivals.pop(0)
            driver.add(name, **fields)
        step = driver.begin_step()
        end = driver.clock.at + BLAMED_STEP_US + TOKEN_US * step.output.total_num_scheduled_tokens
        late = []
        # Those that come while the step runs reach the scheduler after it.
        while arrivals and arrivals[0][0] <= end:
            at, name, fields = arrivals.pop(0)
            driver.clock.tick(at - driver.clock.at)
            late.append(driver.build(name, **fields))
        driver.clock.tick(end - driver.clock.at)
        driver.end_step(step)
        for request in late:
            driver.scheduler.add_request(request)
        driver.clock.tick(TURNAROUND_US)
    found = {name: driver.read(name)[1] for name in driver.headers if name.startswith("small")}
    return {name: marks.scheduled - marks.added for name, marks in found.items()}


LONG_ANSWER = {"tokens": 8, "answer": 200}


@pytest.mark.parametrize(
    ("injected", "every_us", "limits"),
    [
        ({150_000: {"tokens": 4096, "answer": 1}}, 20_000, {"max_num_batched_tokens": 1024}),
        # Few wait, so that few wait for others that have waited: that is their blame, not the answers'.
        pytest.param(
            {150_000: LONG_ANSWER, 150_001: LONG_ANSWER},
            60_000,
            {"max_num_seqs": 2},
            marks=pytest.mark.full,  # as long as the other one
        ),
    ],
    ids=["one long prompt", "long answers that take both places"],
)
def test_blame_is_what_removing_it_changes(
    drive: MakeDriver, injected: dict[int, dict[str, Any]], every_us: int, limits: dict[str, int]
) -> None:
    """The same load twice: what is blamed on the injected requests is how much longer others wait."""
    without = run_load(drive(**limits), {}, every_us)
    drop_state()
    driver = drive(**limits)
    waits = run_load(driver, injected, every_us)
    changed = {name: wait - without[name] for name, wait in waits.items()}
    blamed = {
        name: sum(us for us, _, _, other in read_holders(driver, name) if "injected" in other)
        for name in waits
    }
    delayed = [name for name, us in changed.items() if us > 10 * BLAMED_STEP_US]

    assert len(delayed) >= 4
    total = sum(changed[name] for name in delayed)
    assert sum(blamed[name] for name in delayed) == pytest.approx(total, rel=0.05)
    # Who came before it is not delayed, and blames nobody for it.
    assert blamed["small0"] == changed["small0"] == 0
