# SPDX-License-Identifier: Apache-2.0
"""Engine core: from admission to the first output and what can come between; inputs of a session."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from hooks.fakes import HEADERS, FakeEngineCore, decode_headers, make_request
from hooks.process import CORE, count_state
from ttft_otel.hooks.engine_core import tracer
from ttft_otel.model.breakdown import Marks
from ttft_otel.model.names import header_names
from ttft_otel.tracing import carrier
from ttft_otel.tracing import clock as clocks
from ttft_otel.tracing.carrier import (
    INDEX_OWN,
    SOURCE_ENCODED,
    SOURCE_UNSEEN,
    SOURCES_UNKNOWN,
    EngineTimeline,
)

BOOT = clocks.get_boot_number()
STEP = (BOOT, 5000, 0, 10, 3000, 4000)
UNFINISHED = (*STEP[:2], carrier.ENCODER_UNFINISHED, *STEP[3:])


def add_requests(core: FakeEngineCore, *ids: str, tokens: int = 10, items: int = 0) -> None:
    """Traced requests enter the engine core."""
    core.add(*(make_request(name, tokens, items=items) for name in ids))


def answer(core: FakeEngineCore, name: str = "a", record: Any = STEP, **more: Any) -> Any:
    """A request of ten tokens is answered by its only step; its output's trace headers."""
    step = core.schedule((name,), {name: 10})
    return core.update(step, first=(name,), record=record, **more)[name]


def read_aborted() -> tuple[Marks, EngineTimeline]:
    """What the engine core knows of the request, which has ended without a first token."""
    return decode_headers({header_names.CARRIER_KEY: CORE.answer_aborted("a")})


def test_one_step(core: FakeEngineCore) -> None:
    """A short prompt: added, scheduled, measured, and its first output carries all of it."""
    add_requests(core, "a")  # ipc ends at the entry of the call, which takes 500
    core.clock.tick(100)
    step = core.schedule(new=("a",), tokens={"a": 10})
    core.clock.tick(50)
    out = core.update(step, first=("a",), record=STEP)

    marks, counts = decode_headers(out["a"])
    assert pickle.loads(pickle.dumps(step._ttft_marked)) == core.clock()
    assert (marks.added, marks.scheduled, marks.entered) == (1_000_000, 1_000_600, 1_000_650)
    assert [(each.pairs, each.sampled) for each in marks.steps] == [([(10, 3000, 4000)], 5000)]
    assert (counts.chunks, counts.prompt, counts.rank) == (1, 10, 3)
    assert not marks.encoder_first


@pytest.mark.parametrize(("boot", "is_told"), [(0, True), (1, False)])
def test_encoder_that_ends_later(core: FakeEngineCore, boot: int, is_told: bool) -> None:
    """An encoder that still ran is asked for later; the timeline tells the API server to.

    A worker in a process of its own tells how long it ran with a later step's output, but not one on
    another host, whose clock is another one.
    """
    add_requests(core, "a", "b")
    timeline = decode_headers(answer(core, record=UNFINISHED))[1]
    assert timeline.read_details().kept == carrier.ENCODER_RUN_BIT
    assert CORE.answer_encoder_run("a") == carrier.PENDING_ANSWER
    answer(core, "b", (BOOT + boot, *STEP[1:]), runs={"a": (7, 9), "x": (1, 2)})

    told = [CORE.answer_encoder_run(name) for name in ("a", "x")]
    assert told == (["[7,9]", ""] if is_told else [carrier.PENDING_ANSWER, ""])
    assert (CORE.answer_encoder_run("a") == "") is is_told


def test_traceparent_stays(core: FakeEngineCore) -> None:
    """Where vLLM traces too, its headers travel on beside ours; later outputs carry its own only."""
    core = type(core)(core.clock, tracing="http://collector:4317")
    add_requests(core, "a")
    own = {header_names.TRACEPARENT: HEADERS[header_names.TRACEPARENT]}

    assert answer(core).items() > own.items()
    assert core.requests["a"].trace_headers == own


def test_after_the_first_output(core: FakeEngineCore) -> None:
    """A request marks no step any more, carries no headers, and aborted it has nothing left to say."""
    add_requests(core, "a")
    assert list(answer(core)) == [header_names.CARRIER_KEY]
    assert core.requests["a"].trace_headers is None
    assert not hasattr(core.schedule(tokens={"a": 1}), "_ttft_marked")
    assert not CORE.awaiting
    core.free("a")
    assert CORE.answer_aborted("a") == ""


def test_async_order(core: FakeEngineCore) -> None:
    """Under async scheduling step 2 is scheduled before step 1's output: the join stays right."""
    add_requests(core, "a", tokens=20)
    one = core.schedule(("a",), {"a": 10})
    two = core.schedule(tokens={"a": 10})
    core.update(one, record=(BOOT, 0, 0, 10, 1, 2))
    three = core.schedule(tokens={"a": 1})  # a decode token is scheduled ahead
    out = core.update(two, first=("a",), record=(BOOT, 9, 0, 10, 5, 6))
    core.update(three, first=("a",), record=(BOOT, 99, 0, 10, 50, 60))

    marks, counts = decode_headers(out["a"])
    assert [step.pairs for step in marks.steps] == [[(10, 1, 2)], [(10, 5, 6)]]
    assert counts.chunks == 2


def test_encoder(core: FakeEngineCore) -> None:
    """A step that encodes one of its items makes the wait an encoder's queue; items are counted."""
    add_requests(core, "a", "b", items=3)
    step = core.schedule(("a", "b"), {"a": 4, "b": 4}, encode={"a": [0, 1], "b": [0]})
    out = core.update(step, first=("a", "b"), record=STEP)

    marks, counts = decode_headers(out["a"])
    assert marks.encoder_first
    sources = [SOURCE_ENCODED, SOURCE_ENCODED, SOURCE_UNSEEN]
    assert counts.read_details().media == [2, 3, 0, SOURCES_UNKNOWN, *sources]
    assert (counts.own_tokens, counts.step_tokens) == (4, 8)


def test_encode_only(core: FakeEngineCore) -> None:
    """An encoder instance schedules an item without a token, and the empty answer carries marks."""
    add_requests(core, "a", items=1)
    step = core.schedule(("a",), {}, encode={"a": [0]})
    out = core.update(step, finish=("a",), record=STEP)

    assert decode_headers(out["a"])[1].read_details().media[INDEX_OWN] == 1


def test_cached(core: FakeEngineCore) -> None:
    """Tokens found in the prefix cache are counted, not computed."""
    add_requests(core, "a")
    core.requests["a"].num_computed_tokens = 6
    out = core.update(core.schedule(("a",), {"a": 4}), first=("a",), record=STEP)

    counts = decode_headers(out["a"])[1]
    assert (counts.cached, counts.own_tokens, counts.read_details().recomputed) == (6, 4, 0)


def test_preempted_and_resumed(core: FakeEngineCore) -> None:
    """A preempted request computes its tokens again, which is counted; its chunks still join."""
    add_requests(core, "a", tokens=20)
    core.update(core.schedule(("a",), {"a": 10}), record=STEP)
    core.update(core.schedule(preempted=("a",)))
    out = core.update(core.schedule(tokens={"a": 20}), first=("a",), record=STEP)

    counts = decode_headers(out["a"])[1]
    details = counts.read_details()
    assert (details.preempted, details.recomputed, counts.chunks) == (1, 10, 2)


def test_ended_without_output(core: FakeEngineCore) -> None:
    """One that ends inside the update without an output is kept for the asking, once."""
    add_requests(core, "a")
    core.update(core.schedule(("a",), {"a": 10}), silent=("a",), record=STEP)

    assert "a" not in CORE.awaiting
    assert len(read_aborted()[0].steps) == 1
    assert CORE.answer_aborted("a") == ""


@pytest.mark.parametrize("chunks", [0, 1])
def test_aborted(core: FakeEngineCore, chunks: int) -> None:
    """In the queue it says when it came, and that no step held it; between its chunks what it had."""
    add_requests(core, "a", tokens=20)
    for _ in range(chunks):
        core.update(core.schedule(("a",), {"a": 10}), record=STEP)
    core.free("a")
    marks, counts = read_aborted()
    assert marks.added and bool(marks.scheduled) == bool(chunks)
    assert len(marks.steps) == counts.chunks == chunks


def test_update_raised(core: FakeEngineCore) -> None:
    """A step whose update raised in the host leaves the state as any other step would."""
    add_requests(core, "a")
    with pytest.raises(RuntimeError, match="the host's own"):
        answer(core, fail=True)
    core.free("a")

    assert CORE.answer_aborted("a")


def test_no_record(core: FakeEngineCore) -> None:
    """A step without a record of the worker is reported as lost, not as empty."""
    add_requests(core, "a")
    (step,) = decode_headers(answer(core, record=None))[0].steps

    assert not step.pairs and step.lost


def test_input_hook_gone(core: FakeEngineCore) -> None:
    """Without the input thread's hook the request is still followed; its entry is a missing mark."""
    core.requests["a"] = make_request("a")
    marks, _ = decode_headers(answer(core))

    assert marks.added == 0 and marks.scheduled


def test_bounded_running(core: FakeEngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests wait for a first token, the state has a bound, and drops are counted."""
    monkeypatch.setattr(tracer, "MAX_AWAITING_REQUESTS", 10)
    ids = [f"r{number}" for number in range(15)]
    add_requests(core, *ids)
    core.schedule(tuple(ids), dict.fromkeys(ids, 10))

    assert len(CORE.awaiting) == 10
    assert CORE.dropped_requests == 5
    for name in ids:
        core.free(name)


def test_bounded_dead(core: FakeEngineCore) -> None:
    """Of aborted requests that nobody asks for few are kept, and in part the IDs, which clients choose."""
    ids = [f"{'x' * 1_000}-{number}" for number in range(tracer.MAX_ABORTED_REQUESTS + 5)]
    add_requests(core, *ids)
    for name in ids:
        core.free(name)

    assert len(CORE.aborted) == tracer.MAX_ABORTED_REQUESTS
    assert all(len(each) <= tracer.MAX_ID_CHARS for each in CORE.aborted)
    answers = [CORE.answer_aborted(name) for name in (ids[0], *ids[-2:])]
    assert [bool(each) for each in answers] == [False, True, True]


def test_bounded_chunks(core: FakeEngineCore) -> None:
    """A prompt of very many chunks keeps the first and the last, and says so."""
    add_requests(core, "a", tokens=2000)
    out: dict[str, Any] = {}
    for number in range(600):
        step = core.schedule(("a",) if not number else (), {"a": 2})
        out = core.update(step, first=("a",) if number == 599 else (), record=(BOOT, number, 0))

    marks, counts = decode_headers(out["a"])
    assert len(marks.steps) == 512 and marks.truncated and counts.chunks == 600
    assert counts.own_tokens == counts.step_tokens == 1200
    assert marks.steps[-1].sampled == 599


def test_untraced_arrival(core: FakeEngineCore) -> None:
    """What the API server has marked as untraced has no timeline, and vLLM's own headers alone."""
    made, bare = (make_request(name, traced=False) for name in "ab")
    own = {header_names.TRACEPARENT: "x"}
    made.trace_headers = {**own, **made.trace_headers}
    core.add(made, bare)

    assert not hasattr(made, "_ttft_timeline") and not hasattr(bare, "_ttft_timeline")
    assert (made.trace_headers, bare.trace_headers) == (own, None)


# Streams of inputs, as /v1/realtime has them, in vLLM's own scheduler: a timeline for each input.

STEP_US = 10_000
LATER = {**HEADERS, header_names.CARRIER_KEY: carrier.LATER_INPUT}
NAME = "session"


def add_input(driver: Any, *, later: bool = True, answer: int = 3, traced: bool = True) -> None:
    """An input of the session comes."""
    headers = {"headers": dict(LATER)} if later and traced else {"traced": traced}
    driver.add(NAME, answer=answer, resumable=True, **headers)


def read_answer(driver: Any) -> tuple[dict[str, int], Any]:
    """Stages and marks of the input that is answered next; the one after it can be read then."""
    driver.run_until_answered(NAME)
    cut, marks = driver.read(NAME)
    del driver.headers[NAME]
    assert sum(cut.stages.values()) + cut.unattributed == cut.end - cut.start
    return cut.stages, marks


@pytest.mark.parametrize("overlapping", [False, True])
def test_input_after_an_answer(drive: Any, overlapping: bool) -> None:
    """It begins when it comes: the pause before it is nobody's, and its steps are its own ones."""
    driver = drive(async_scheduling=overlapping)
    add_input(driver, later=False)
    for number in range(4):
        if number:
            driver.clock.tick(500_000)
            add_input(driver)
        came = driver.clock.at
        found, marks = read_answer(driver)
        for _ in range(4):
            driver.step()
        assert marks.added == came
        assert found["prefill.compute"] == pytest.approx(STEP_US, abs=1)
        assert found.get("prefill.queue", 0) == 0
        assert len(marks.steps) == 1
    assert not any(count_state().values())


@pytest.mark.parametrize("answer", [1, 5])
def test_inputs_at_once(drive: Any, answer: int) -> None:
    """Those behind the first wait in their queues for the answers before them, for no named reason."""
    driver = drive()
    add_input(driver, later=False, answer=answer)
    for _ in range(2):
        add_input(driver, answer=answer)
    came = driver.clock.at
    for number in range(3):
        driver.run_until_answered(NAME)
        waited = number * answer * STEP_US
        assert driver.sum_reasons(NAME) == ({"other": waited} if number else {})
        found, marks = read_answer(driver)
        assert marks.added == came
        assert found.get("prefill.queue", 0) == waited
        assert found["prefill.compute"] == pytest.approx(STEP_US, abs=1)
    for _ in range(answer):
        driver.step()
    assert not any(count_state().values())


def test_steps_in_flight(drive: Any) -> None:
    """A step that was scheduled for the answer before it, and ends later, is not the input's."""
    driver = drive(async_scheduling=True)
    add_input(driver, later=False)
    read_answer(driver)
    for _ in range(3):
        driver.step()
    add_input(driver)
    own = driver.begin_step()
    # One of which vLLM drops what it has sampled: it ran while the answer ended by a stop token.
    CORE.record_step(driver.scheduler, copy.copy(own.output), SimpleNamespace())
    CORE.attach_timelines(None, {}, driver.scheduler)
    driver.clock.tick(STEP_US)
    driver.end_step(own)
    assert len(read_answer(driver)[1].steps) == 1


def test_no_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the hook of steps is missing, sessions whose next input began are bounded, and counted."""
    monkeypatch.setattr(tracer, "MAX_AWAITING_REQUESTS", 2)
    for number in range(5):
        session = SimpleNamespace(request_id=f"session-{number}")
        own = SimpleNamespace(_ttft_input=(EngineTimeline(added=1), HEADERS))
        CORE.record_input(True, None, None, session, SimpleNamespace(sampling_params=own))
    assert list(CORE.resumed) == ["session-3", "session-4"] and CORE.dropped_requests == 3


@pytest.mark.parametrize("traced", [(True, False, True), (False, True, False), (False, True, True)])
def test_some_are_not_traced(drive: Any, traced: tuple[bool, ...]) -> None:
    """Whether an input is traced is decided for each."""
    driver = drive()
    for number, is_traced in enumerate(traced):
        add_input(driver, later=number > 0, traced=is_traced)
        for _ in range(4):
            driver.step()
        assert (NAME in driver.headers) is is_traced
        driver.headers.clear()
    assert not any(count_state().values())


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_aborted_session(drive: Any, steps: int) -> None:
    """A session that ends with inputs in its queue leaves nothing behind."""
    driver = drive()
    add_input(driver, later=False)
    for _ in range(2):
        add_input(driver)
    for _ in range(steps):
        driver.step()
    driver.abort(NAME)
    driver.step()
    driver.clock.tick(STEP_US)
    CORE.answer_aborted(NAME)
    assert not any(count_state().values())
