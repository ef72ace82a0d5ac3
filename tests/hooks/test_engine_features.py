# SPDX-License-Identifier: Apache-2.0
"""The engine core's hooks under vLLM's features: what is told, and that no state is left behind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tracing_fakes

from hooks.fakes import FakeEngineCore, decode_headers, make_request
from hooks.process import CORE
from ttft_otel.model import breakdown, failed_stage
from ttft_otel.model.breakdown import CODE_FORWARD, Marks
from ttft_otel.tracing import carrier
from ttft_otel.tracing import clock as clocks

pytestmark = pytest.mark.usefixtures("no_state_left")
BOOT = clocks.get_boot_number()


def find_stage(text: str) -> str:
    """The stage in which the request of a serialized timeline ended."""
    marks = Marks(1, render=2, assign=3)
    timeline = carrier.decode_timeline(text, marks)
    assert timeline is not None
    marks.partial = not timeline.complete
    return failed_stage.find_failed_stage(marks)


def wait_for_blocks(core: FakeEngineCore, name: str) -> None:
    """A request whose KV blocks are loaded asynchronously: a connector has found them elsewhere."""
    request = make_request(name)
    core.connector = object()  # type: ignore[attr-defined]
    core.add(request)
    CORE.blocks.record_match(None, (8, True), object(), request)
    assert name in CORE.blocks.tracked


def test_a_kv_load_that_fails_ends_the_request(core: FakeEngineCore) -> None:
    """vLLM ends it within update_from_output() with an output that has no token, but marks."""
    core.add(make_request("other"))
    wait_for_blocks(core, "r")
    step = core.schedule(("other",), {"other": 10})
    headers = core.update(step, first=("other",), finish=("r",))

    assert find_stage(headers["r"]["ttft-otel"]) == "kv.transfer"
    core.free("other")


def test_a_kv_load_that_fails_where_nobody_else_waits(core: FakeEngineCore) -> None:
    """Its output has the marks, too: the hook runs while a traced request waits."""
    wait_for_blocks(core, "r")
    headers = core.update(core.schedule(), finish=("r",))

    assert find_stage(headers["r"]["ttft-otel"]) == "kv.transfer"
    assert CORE.answer_aborted("r") == ""


def test_a_kv_load_that_fails_and_is_recomputed(
    core: FakeEngineCore, clock: tracing_fakes.FakeClock
) -> None:
    """With kv_load_failure_policy=recompute it is scheduled like any other: the wait was in vain."""
    wait_for_blocks(core, "r")
    clock.tick(7_000)
    step = core.schedule(("r",), {"r": 10})
    record = (BOOT, clock.at + 900, 0, CODE_FORWARD, clock.at + 100, clock.at + 800)
    clock.tick(1_000)
    headers = core.update(step, first=("r",), record=record)
    marks, timeline = decode_headers(headers["r"])
    cut = breakdown.partition_marks(marks, clock.at)

    assert timeline.chunks == 1 and not timeline.read_details().moving
    assert cut.stages["prefill.compute"] == 700
    core.free("r")


def test_a_pause_aborts_what_runs_and_what_waits(core: FakeEngineCore) -> None:
    """Outside of update_from_output(), as /pause and sleep mode do; each is asked for once."""
    core.add(make_request("running", tokens=20), make_request("waiting"))
    core.update(core.schedule(("running",), {"running": 5}), record=(BOOT, 0, 0))
    for name in ("running", "waiting"):
        core.free(name)

    assert find_stage(CORE.answer_aborted("running")) == "prefill.compute"
    assert find_stage(CORE.answer_aborted("waiting")) == "prefill.queue"
    assert CORE.answer_aborted("running") == ""


def test_a_pause_that_keeps_is_a_wait(core: FakeEngineCore, clock: tracing_fakes.FakeClock) -> None:
    """With mode=keep nothing is scheduled until /resume: time in the queue, or between two chunks."""
    core.add(make_request("r", tokens=20))
    clock.tick(50_000)
    steps = []
    for name in (("r",), ()):
        if steps:
            CORE.record_pause(None, None, core, SimpleNamespace(name="PAUSED_ALL"))
            clock.tick(30_000)
        step = core.schedule(name, {"r": 10})
        begin = clock.at
        clock.tick(1_000)
        steps.append((BOOT, begin + 900, 0, CODE_FORWARD, begin + 100, begin + 800))
        headers = core.update(step, first=("r",) if not name else (), record=steps[-1])
    marks, _ = decode_headers(headers["r"])
    cut = breakdown.partition_marks(marks, clock.at)

    assert cut.stages["prefill.stall"] == 30_000
    assert {part.reason for part in cut.reasons if part.stage == "prefill.stall"} == {"paused"}
    assert cut.stages["prefill.compute"] == 1_400
    core.free("r")


def test_priority_scheduling_preempts(core: FakeEngineCore) -> None:
    """A more urgent request takes its place: counted, and both are told in full."""
    core.add(make_request("late", tokens=20), make_request("urgent"))
    core.update(core.schedule(("late",), {"late": 10}), record=(BOOT, 0, 0))
    step = core.schedule(("urgent",), {"urgent": 10}, preempted=("late",))
    urgent = core.update(step, first=("urgent",), record=(BOOT, 0, 0))
    late = core.update(core.schedule((), {"late": 20}), first=("late",), record=(BOOT, 0, 0))

    assert decode_headers(urgent["urgent"])[1].read_details().preempted == 0
    _, timeline = decode_headers(late["late"])
    assert (
        timeline.read_details().preempted,
        timeline.read_details().recomputed,
        timeline.chunks,
    ) == (1, 10, 2)
    for name in ("late", "urgent"):
        core.free(name)


def test_drafted_tokens_mark_no_step(core: FakeEngineCore) -> None:
    """Speculative decoding: a decoding request's steps of several tokens are not measured."""
    core.add(make_request("r"))
    core.update(core.schedule(("r",), {"r": 10}), first=("r",), record=(BOOT, 0, 0))
    drafted = core.schedule((), {"r": 4})

    assert not hasattr(drafted, "_ttft_marked") and not CORE.awaiting
    core.free("r")
