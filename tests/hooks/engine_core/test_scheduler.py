# SPDX-License-Identifier: Apache-2.0
"""Engine core: from admission to the first output, and whatever can come between."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import tracing_fakes

from hooks.fakes import HEADERS, FakeEngineCore, decode_headers, make_request
from hooks.process import CORE
from ttft_otel.hooks.engine_core import tracer
from ttft_otel.model.names import header_names
from ttft_otel.tracing import carrier
from ttft_otel.tracing import clock as clocks
from ttft_otel.tracing.media_items import INDEX_OWN, SOURCE_ENCODED, SOURCE_UNSEEN, SOURCES_UNKNOWN

BOOT = clocks.get_boot_number()
STEP = (BOOT, 5000, 0, 10, 3000, 4000)


def add_requests(core: FakeEngineCore, *ids: str, tokens: int = 10, items: int = 0) -> None:
    """Traced requests enter the engine core."""
    for name in ids:
        core.add(make_request(name, tokens, items=items))


def test_one_step(core: FakeEngineCore, clock: tracing_fakes.FakeClock) -> None:
    """A short prompt: added, scheduled, measured, and its first output carries all of it."""
    add_requests(core, "a")
    clock.tick(100)  # and 500 in the input thread
    step = core.schedule(new=("a",), tokens={"a": 10})
    clock.tick(50)
    out = core.update(step, first=("a",), record=STEP)

    marks, counts = decode_headers(out["a"])
    assert pickle.loads(pickle.dumps(step._ttft_marked)) == clock()
    assert (marks.added, marks.scheduled, marks.entered) == (1_000_000, 1_000_600, 1_000_650)
    assert [(each.pairs, each.sampled) for each in marks.steps] == [([(10, 3000, 4000)], 5000)]
    assert (counts.chunks, counts.prompt, counts.rank) == (1, 10, 3)
    assert not marks.encoder_first


def test_encoder_unfinished(core: FakeEngineCore) -> None:
    """An encoder that still ran is asked for later; the timeline tells the API server to."""
    add_requests(core, "a")
    record = (*STEP[:2], carrier.ENCODER_UNFINISHED, *STEP[3:])
    out = core.update(core.schedule(("a",), {"a": 10}), first=("a",), record=record)

    assert decode_headers(out["a"])[1].read_details().kept == carrier.ENCODER_RUN_BIT


@pytest.mark.parametrize(("boot", "is_told"), [(0, True), (1, False)])
def test_encoder_run_told_later(core: FakeEngineCore, boot: int, is_told: bool) -> None:
    """A worker in a process of its own tells how long the encoder ran with a later step's output.

    Not one on another host, whose clock is another one.
    """
    add_requests(core, "a", "b")
    record = (*STEP[:2], carrier.ENCODER_UNFINISHED, *STEP[3:])
    core.update(core.schedule(("a",), {"a": 10}), first=("a",), record=record)
    assert CORE.answer_encoder_run("a") == carrier.PENDING_ANSWER
    later = (clocks.get_boot_number() + boot, *STEP[1:])
    core.update(
        core.schedule(("b",), {"b": 10}),
        first=("b",),
        record=later,
        runs={"a": (7, 9), "x": (1, 2)},
    )

    told = [CORE.answer_encoder_run(name) for name in ("a", "x")]
    assert told == (["[7,9]", ""] if is_told else [carrier.PENDING_ANSWER, ""])
    assert (CORE.answer_encoder_run("a") == "") is is_told


def test_traceparent_stays(clock: tracing_fakes.FakeClock, core: FakeEngineCore) -> None:
    """Where vLLM traces too, its headers travel on beside ours; later outputs carry its own only."""
    core = type(core)(clock, tracing="http://collector:4317")
    add_requests(core, "a")
    out = core.update(core.schedule(("a",), {"a": 10}), first=("a",), record=STEP)

    assert out["a"][header_names.TRACEPARENT] == HEADERS[header_names.TRACEPARENT]
    assert core.requests["a"].trace_headers == {
        header_names.TRACEPARENT: HEADERS[header_names.TRACEPARENT]
    }


def test_after_the_first_output(core: FakeEngineCore) -> None:
    """A request marks no step any more, carries no headers, and aborted it has nothing left to say."""
    add_requests(core, "a")
    out = core.update(core.schedule(("a",), {"a": 10}), first=("a",), record=STEP)
    assert list(out["a"]) == [header_names.CARRIER_KEY]
    assert core.requests["a"].trace_headers is None
    assert not hasattr(core.schedule(tokens={"a": 1}), "_ttft_marked")
    assert not CORE.awaiting
    core.free("a")
    assert CORE.answer_aborted("a") == ""


def test_chunks(core: FakeEngineCore) -> None:
    """A long prompt in three chunks keeps one record per chunk."""
    add_requests(core, "a", tokens=30)
    for number in range(3):
        step = core.schedule(("a",) if not number else (), {"a": 10})
        out = core.update(step, first=("a",) if number == 2 else (), record=STEP)

    marks, counts = decode_headers(out["a"])
    assert len(marks.steps) == counts.chunks == 3
    assert counts.own_tokens == counts.step_tokens == 30
    assert counts.read_details().recomputed == 0


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


def test_encoder(core: FakeEngineCore, clock: tracing_fakes.FakeClock) -> None:
    """A step that encodes one of its items makes the wait an encoder's queue; items are counted."""
    add_requests(core, "a", "b", items=3)
    step = core.schedule(("a", "b"), {"a": 4, "b": 4}, encode={"a": [0, 1], "b": [0]})
    out = core.update(step, first=("a", "b"), record=STEP)

    marks, counts = decode_headers(out["a"])
    assert marks.encoder_first
    assert counts.read_details().media == [
        2,
        3,
        0,
        SOURCES_UNKNOWN,
        SOURCE_ENCODED,
        SOURCE_ENCODED,
        SOURCE_UNSEEN,
    ]
    assert (counts.own_tokens, counts.step_tokens) == (4, 8)


def test_encode_only(core: FakeEngineCore) -> None:
    """An encoder instance schedules an item without a token, and the empty answer carries marks."""
    add_requests(core, "a", items=1)
    step = core.schedule(("a",), {}, encode={"a": [0]})
    out = core.update(step, finish=("a",), record=STEP)

    assert decode_headers(out["a"])[1].read_details().media[INDEX_OWN] == 1


def test_cached(core: FakeEngineCore) -> None:
    """Tokens found in the prefix cache are counted, not computed."""
    add_requests(core, "a", tokens=10)
    core.requests["a"].num_computed_tokens = 6
    out = core.update(core.schedule(("a",), {"a": 4}), first=("a",), record=STEP)

    counts = decode_headers(out["a"])[1]
    assert (counts.cached, counts.own_tokens, counts.read_details().recomputed) == (6, 4, 0)


def test_preempted_and_resumed(core: FakeEngineCore) -> None:
    """A preempted request computes its tokens again, which is counted; its chunks still join."""
    add_requests(core, "a", tokens=20)
    core.update(core.schedule(("a",), {"a": 10}), record=STEP)
    core.update(core.schedule(preempted=("a",)))
    step = core.schedule(tokens={"a": 20})
    out = core.update(step, first=("a",), record=STEP)

    counts = decode_headers(out["a"])[1]
    assert (counts.read_details().preempted, counts.read_details().recomputed, counts.chunks) == (
        1,
        10,
        2,
    )


def test_ended_without_output(core: FakeEngineCore) -> None:
    """One that ends inside the update without an output is kept for the asking, once."""
    add_requests(core, "a")
    core.update(core.schedule(("a",), {"a": 10}), silent=("a",), record=STEP)

    assert "a" not in CORE.awaiting
    marks, _ = decode_headers({header_names.CARRIER_KEY: CORE.answer_aborted("a")})
    assert len(marks.steps) == 1
    assert CORE.answer_aborted("a") == ""


@pytest.mark.parametrize("chunks", [0, 1])
def test_aborted(core: FakeEngineCore, chunks: int) -> None:
    """In the queue it says when it came, and that no step held it; between its chunks what it had."""
    add_requests(core, "a", tokens=20)
    for _ in range(chunks):
        core.update(core.schedule(("a",), {"a": 10}), record=STEP)
    core.free("a")
    marks, counts = decode_headers({header_names.CARRIER_KEY: CORE.answer_aborted("a")})
    assert marks.added and bool(marks.scheduled) == bool(chunks)
    assert len(marks.steps) == counts.chunks == chunks


def test_update_raised(core: FakeEngineCore) -> None:
    """A step whose update raised in the host leaves the state as any other step would."""
    add_requests(core, "a")
    with pytest.raises(RuntimeError, match="the host's own"):
        core.update(core.schedule(("a",), {"a": 10}), record=STEP, fail=True)
    core.free("a")

    assert CORE.answer_aborted("a")


def test_no_record(core: FakeEngineCore) -> None:
    """A step without a record of the worker is reported as lost, not as empty."""
    add_requests(core, "a")
    out = core.update(core.schedule(("a",), {"a": 10}), first=("a",))

    (step,) = decode_headers(out["a"])[0].steps
    assert not step.pairs and step.lost


def test_input_hook_gone(core: FakeEngineCore) -> None:
    """Without the input thread's hook the request is still followed; its entry is a missing mark."""
    core.requests["a"] = make_request("a")
    out = core.update(core.schedule(("a",), {"a": 10}), first=("a",), record=STEP)

    marks, _ = decode_headers(out["a"])
    assert marks.added == 0 and marks.scheduled


def test_bounded_running(core: FakeEngineCore) -> None:
    """However many requests wait for a first token, the state has a bound, and drops are counted."""
    before = CORE.dropped_requests
    ids = [f"r{number}" for number in range(tracer.MAX_AWAITING_REQUESTS + 5)]
    add_requests(core, *ids)
    core.schedule(tuple(ids), dict.fromkeys(ids, 10))

    assert len(CORE.awaiting) == tracer.MAX_AWAITING_REQUESTS
    assert CORE.dropped_requests == before + 5
    for name in ids:
        core.free(name)


def test_bounded_dead(core: FakeEngineCore) -> None:
    """Of aborted requests that are never asked for, the newest few are kept."""
    for number in range(tracer.MAX_ABORTED_REQUESTS + 5):
        add_requests(core, f"r{number}")
        core.free(f"r{number}")

    assert len(CORE.aborted) == tracer.MAX_ABORTED_REQUESTS
    assert CORE.answer_aborted("r0") == ""


def test_bounded_chunks(core: FakeEngineCore) -> None:
    """A prompt of very many chunks keeps the first and the last, and says so."""
    add_requests(core, "a", tokens=2000)
    out: dict[str, Any] = {}
    for number in range(600):
        step = core.schedule(("a",) if not number else (), {"a": 2})
        out = core.update(step, first=("a",) if number == 599 else (), record=(BOOT, number, 0))

    marks, counts = decode_headers(out["a"])
    assert len(marks.steps) == 512 and marks.truncated and counts.chunks == 600
    assert marks.steps[-1].sampled == 599


def test_long_ids_of_aborted_requests(core: FakeEngineCore) -> None:
    """Their request IDs, which clients choose, are kept in part, and still told apart."""
    long_ids = [f"{'x' * 60_000}-{number}" for number in range(2)]
    for name in long_ids:
        add_requests(core, name)
        core.free(name)

    assert all(len(each) <= tracer.MAX_ID_CHARS for each in CORE.aborted)
    assert len(CORE.aborted) == 2
    assert all(CORE.answer_aborted(name) for name in long_ids)


def test_entry_counts(core: FakeEngineCore, clock: tracing_fakes.FakeClock) -> None:
    """IPC ends at the entry of the call, not at its end."""
    made = core.preprocess_add_request(make_request("a"))[0]

    assert clock.at == 1_000_500
    assert made._ttft_timeline.added == 1_000_000


def test_untraced_arrival(core: FakeEngineCore) -> None:
    """What the API server has marked as untraced has no timeline, and vLLM's own headers alone."""
    made = make_request("a", traced=False)
    made.trace_headers = {header_names.TRACEPARENT: "x", **made.trace_headers}
    for request, left in (
        (made, {header_names.TRACEPARENT: "x"}),
        (make_request("b", traced=False), None),
    ):
        arrived = core.preprocess_add_request(request)[0]

        assert not hasattr(arrived, "_ttft_timeline")
        assert arrived.trace_headers == left
