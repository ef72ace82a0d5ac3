# SPDX-License-Identifier: Apache-2.0
"""Engine core: from admission to the first output, and whatever can come between."""

from __future__ import annotations

from typing import Any

import pytest

from ttft_otel import clock as clocks
from ttft_otel import names, testing
from ttft_otel.hooks import engine, scheduler

from .fakes import HEADERS, Core, request, told

BOOT = clocks.boot_once()
STEP = (BOOT, 5000, 0, 10, 3000, 4000)


def start(core: Core, *ids: str, tokens: int = 10, items: int = 0) -> None:
    """Traced requests enter the engine core."""
    for name in ids:
        core.add(request(name, tokens, items=items))


def test_one_step(core: Core, clock: testing.Clock) -> None:
    """A short prompt: added, scheduled, measured, and its first output carries all of it."""
    start(core, "a")
    clock.tick(100)  # and 500 in the input thread
    step = core.schedule(new=("a",), tokens={"a": 10})
    clock.tick(50)
    out = core.update(step, first=("a",), record=STEP)

    marks, counts = told(out["a"])
    assert step._ttft is True
    assert (marks.added, marks.scheduled, marks.entered) == (1_000_000, 1_000_600, 1_000_650)
    assert [(each.pairs, each.sampled) for each in marks.steps] == [([(10, 3000, 4000)], 5000)]
    assert (counts.chunks, counts.prompt, counts.rank) == (1, 10, 3)
    assert not marks.encoder_first


def test_traceparent_stays(clock: testing.Clock, core: Core) -> None:
    """Where vLLM traces too, its headers travel on beside ours; later outputs carry its own only."""
    core = type(core)(clock, tracing="http://collector:4317")
    start(core, "a")
    out = core.update(core.schedule(("a",), {"a": 10}), first=("a",), record=STEP)

    assert out["a"][names.TRACEPARENT] == HEADERS[names.TRACEPARENT]
    assert core.requests["a"].trace_headers == {names.TRACEPARENT: HEADERS[names.TRACEPARENT]}


def test_nothing_rides_along(core: Core) -> None:
    """Where vLLM does not trace, the first output carries our marks and later ones nothing."""
    start(core, "a")
    out = core.update(core.schedule(("a",), {"a": 10}), first=("a",), record=STEP)

    assert list(out["a"]) == [names.CARRIER]
    assert core.requests["a"].trace_headers is None


def test_decode_steps_are_free(core: Core) -> None:
    """After its first output a request marks no step."""
    start(core, "a")
    core.update(core.schedule(("a",), {"a": 10}), first=("a",), record=STEP)
    later = core.schedule(tokens={"a": 1})

    assert not hasattr(later, "_ttft")
    assert not scheduler.running


def test_untraced(core: Core) -> None:
    """A request without our header leaves no state and marks no step."""
    core.add(request("a", traced=False))
    step = core.schedule(("a",), {"a": 10})

    assert not hasattr(step, "_ttft")
    assert not scheduler.running


def test_chunks(core: Core) -> None:
    """A long prompt in three chunks keeps one record per chunk."""
    start(core, "a", tokens=30)
    for number in range(3):
        step = core.schedule(("a",) if not number else (), {"a": 10})
        out = core.update(step, first=("a",) if number == 2 else (), record=STEP)

    marks, counts = told(out["a"])
    assert len(marks.steps) == counts.chunks == 3
    assert counts.own_tokens == counts.step_tokens == 30
    assert counts.recomputed == 0


def test_async_order(core: Core) -> None:
    """Under async scheduling step 2 is scheduled before step 1's output: the join stays right."""
    start(core, "a", tokens=20)
    one = core.schedule(("a",), {"a": 10})
    two = core.schedule(tokens={"a": 10})
    core.update(one, record=(BOOT, 0, 0, 10, 1, 2))
    three = core.schedule(tokens={"a": 1})  # a decode token is scheduled ahead
    out = core.update(two, first=("a",), record=(BOOT, 9, 0, 10, 5, 6))
    core.update(three, first=("a",), record=(BOOT, 99, 0, 10, 50, 60))

    marks, counts = told(out["a"])
    assert [step.pairs for step in marks.steps] == [[(10, 1, 2)], [(10, 5, 6)]]
    assert counts.chunks == 2


def test_encoder(core: Core, clock: testing.Clock) -> None:
    """A step that encodes one of its items makes the wait an encoder's queue; items are counted."""
    start(core, "a", "b", items=3)
    step = core.schedule(("a", "b"), {"a": 4, "b": 4}, encode={"a": [0, 1], "b": [0]})
    out = core.update(step, first=("a", "b"), record=STEP)

    marks, counts = told(out["a"])
    assert marks.encoder_first
    assert (counts.items, counts.own_items, counts.step_items) == (3, 2, 3)
    assert (counts.own_tokens, counts.step_tokens) == (4, 8)


def test_encode_only(core: Core) -> None:
    """An encoder instance schedules an item without a token, and the empty answer carries marks."""
    start(core, "a", items=1)
    step = core.schedule(("a",), {}, encode={"a": [0]})
    out = core.update(step, finish=("a",), record=STEP)

    assert told(out["a"])[1].own_items == 1


def test_cached(core: Core) -> None:
    """Tokens found in the prefix cache are counted, not computed."""
    start(core, "a", tokens=10)
    core.requests["a"].num_computed_tokens = 6
    out = core.update(core.schedule(("a",), {"a": 4}), first=("a",), record=STEP)

    counts = told(out["a"])[1]
    assert (counts.cached, counts.own_tokens, counts.recomputed) == (6, 4, 0)


def test_preempted_and_resumed(core: Core) -> None:
    """A preempted request computes its tokens again, which is counted; its chunks still join."""
    start(core, "a", tokens=20)
    core.update(core.schedule(("a",), {"a": 10}), record=STEP)
    core.update(core.schedule(preempted=("a",)))
    step = core.schedule(tokens={"a": 20})
    out = core.update(step, first=("a",), record=STEP)

    counts = told(out["a"])[1]
    assert (counts.preempted, counts.recomputed, counts.chunks) == (1, 10, 2)


def test_finished_in_update(core: Core) -> None:
    """A request that ends with its first token (max_tokens=1) carries its marks all the same."""
    start(core, "a")
    out = core.update(core.schedule(("a",), {"a": 10}), finish=("a",), record=STEP)

    assert told(out["a"])[0].scheduled
    assert not scheduler.dead


def test_ended_without_output(core: Core) -> None:
    """One that ends inside the update without an output is kept for the asking, once."""
    start(core, "a")
    core.update(core.schedule(("a",), {"a": 10}), silent=("a",), record=STEP)

    assert "a" not in scheduler.running
    marks, _ = told({names.CARRIER: engine.died(core, "a")})
    assert len(marks.steps) == 1
    assert engine.died(core, "a") == ""


def test_aborted_waiting(core: Core) -> None:
    """One that is aborted in the queue says when it came, and that no step held it."""
    start(core, "a")
    core.free("a")

    marks, _ = told({names.CARRIER: engine.died(core, "a")})
    assert marks.added and not marks.scheduled and not marks.steps


def test_aborted_running(core: Core) -> None:
    """One that is aborted between its chunks says what it had."""
    start(core, "a", tokens=20)
    core.update(core.schedule(("a",), {"a": 10}), record=STEP)
    core.free("a")

    marks, counts = told({names.CARRIER: engine.died(core, "a")})
    assert marks.scheduled and counts.chunks == 1


def test_aborted_after_first(core: Core) -> None:
    """One that is aborted after its first token has nothing left to say."""
    start(core, "a")
    core.update(core.schedule(("a",), {"a": 10}), first=("a",), record=STEP)
    core.free("a")

    assert engine.died(core, "a") == ""


def test_update_raised(core: Core) -> None:
    """A step whose update raised in the host leaves the state as any other step would."""
    start(core, "a")
    with pytest.raises(RuntimeError, match="the host's own"):
        core.update(core.schedule(("a",), {"a": 10}), record=STEP, fail=True)
    core.free("a")

    assert engine.died(core, "a")


def test_no_record(core: Core) -> None:
    """A step of which the worker said nothing is told as lost, not as empty."""
    start(core, "a")
    out = core.update(core.schedule(("a",), {"a": 10}), first=("a",))

    (step,) = told(out["a"])[0].steps
    assert not step.pairs and step.lost


def test_input_hook_gone(core: Core) -> None:
    """Without the input thread's hook the request is still followed; its entry is a missing mark."""
    core.requests["a"] = request("a")
    out = core.update(core.schedule(("a",), {"a": 10}), first=("a",), record=STEP)

    marks, _ = told(out["a"])
    assert marks.added == 0 and marks.scheduled


def test_bounded_running(core: Core) -> None:
    """However many requests wait for a first token, the state has a bound, and drops are counted."""
    before = scheduler.dropped
    ids = [f"r{number}" for number in range(scheduler.AWAITING_LIMIT + 5)]
    start(core, *ids)
    core.schedule(tuple(ids), dict.fromkeys(ids, 10))

    assert len(scheduler.running) == scheduler.AWAITING_LIMIT
    assert scheduler.dropped == before + 5
    for name in ids:
        core.free(name)


def test_bounded_dead(core: Core) -> None:
    """Of those that nobody asks for, the newest few are kept."""
    for number in range(scheduler.DEAD_LIMIT + 5):
        start(core, f"r{number}")
        core.free(f"r{number}")

    assert len(scheduler.dead) == scheduler.DEAD_LIMIT
    assert engine.died(core, "r0") == ""


def test_bounded_chunks(core: Core) -> None:
    """A prompt of very many chunks keeps the first and the last, and says so."""
    start(core, "a", tokens=2000)
    out: dict[str, Any] = {}
    for number in range(600):
        step = core.schedule(("a",) if not number else (), {"a": 2})
        out = core.update(step, first=("a",) if number == 599 else (), record=(BOOT, number, 0))

    marks, counts = told(out["a"])
    assert len(marks.steps) == 512 and marks.truncated and counts.chunks == 600
    assert marks.steps[-1].sampled == 599
