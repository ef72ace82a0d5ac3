# SPDX-License-Identifier: Apache-2.0
"""Both model runners through the real hooks: one record per marked step, on that step's output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ttft_otel import breakdown, testing
from ttft_otel import clock as clocks
from ttft_otel.hooks import worker, wrap

from .runners import (
    EMPTY,
    ENCODER,
    FORWARD,
    LOGITS,
    PREPARE,
    SAMPLER,
    SAVE,
    Pending,
    connect,
    fresh_classes,
    scheduled,
)

Make = Callable[..., Any]
START = 1_000_000
E, F, C = breakdown.ENCODER, breakdown.FORWARD, breakdown.CACHE


@pytest.fixture(params=["V1", "V2"])
def make(request: pytest.FixtureRequest, clock: testing.Clock) -> Iterator[Make]:
    """A runner of either kind; the wrapped classes are put back afterwards."""
    before = dict(wrap.installed)
    kind = fresh_classes()[request.param]
    yield lambda **more: kind(clock, **more)
    for patches in wrap.installed.values():
        for patch in patches:
            setattr(patch.owner, patch.name, patch.original)
    wrap.installed.clear()
    wrap.installed.update(before)


def run(runner: Any, step: Any) -> Any:
    """Both calls of a step, as vLLM's executor makes them."""
    output = runner.execute_model(step)
    return runner.sample_tokens() if output is None else output


def test_marked(make: Make) -> None:
    """A step's record says when its forward ran and when its sampler was done."""
    output = run(make(), scheduled({"a": 10}))

    begin = START + PREPARE
    end = begin + FORWARD
    boot, sampled, lost, *pairs = output._ttft
    assert (boot, lost) == (clocks.boot_once(), 0)
    assert pairs[:2] == [F, begin]
    assert pairs[2] - end in (0, LOGITS)  # V2's forward ends with execute_model
    assert sampled == end + LOGITS + SAMPLER
    assert not worker.opened


def test_unmarked(make: Make) -> None:
    """A step without a traced request leaves nothing on its output, and no state."""
    output = run(make(), scheduled({"a": 1}, marked=False))

    assert not hasattr(output, "_ttft")
    assert not worker.opened and not worker._clock


def test_encoder(make: Make) -> None:
    """Items are encoded before the forward, as a pair of their own."""
    output = run(make(), scheduled({"a": 10}, {"a": [0]}))

    begin = START + PREPARE
    assert output._ttft[3:6] == (E, begin, begin + ENCODER)
    assert output._ttft[6:8] == (F, begin + ENCODER)


def test_encode_only(make: Make) -> None:
    """An encoder instance's output is final after the first call."""
    runner = make()
    runner.encode_only = True
    output = run(runner, scheduled({}, {"a": [0]}))

    assert output._ttft[1:] == (0, 0, E, START + PREPARE, START + PREPARE + ENCODER)
    assert not worker.opened


def test_save(make: Make, clock: testing.Clock) -> None:
    """What a connector does inside the encoder is a pair too; none of it is lost."""
    runner = make(connector=connect(clock))
    step = scheduled({"a": 10}, {"a": [0]})
    step.ec_connector_metadata = object()
    output = run(runner, step)

    saved = START + PREPARE + ENCODER
    assert output._ttft[2] == 0
    assert output._ttft[3:6] == (C, saved, saved + SAVE)
    assert output._ttft[6:9] == (E, START + PREPARE, saved + SAVE)


@pytest.mark.parametrize(
    ("off", "lost"),
    [
        ("worker.encoder", breakdown.LOST_ENCODER),
        ("worker.forward", breakdown.LOST_FORWARD),
        ("transfer.load", breakdown.LOST_LOAD),
        ("transfer.save", breakdown.LOST_SAVE),
    ],
)
def test_taken_out(make: Make, clock: testing.Clock, off: str, lost: int) -> None:
    """A target that is gone is told as lost with the step."""
    runner = make(connector=connect(clock))
    step = scheduled({"a": 10}, {"a": [0]})
    step.ec_connector_metadata = object()
    wrap.switch(off=[off])
    output = run(runner, step)
    wrap.switch()

    assert output._ttft[2] == lost


def test_sampler_gone(make: Make) -> None:
    """Without the sampler's hook its mark is missing, nothing else."""
    wrap.switch(off=["worker.sample"])
    output = run(make(), scheduled({"a": 10}))
    wrap.switch()

    assert output._ttft[1:3] == (0, 0)


def test_async(make: Make) -> None:
    """An asynchronous output gets its step's record when it is read, in whatever order."""
    runner = make(pending=True)
    first = run(runner, scheduled({"a": 10}))
    second = run(runner, scheduled({"b": 10}))
    third = run(runner, scheduled({"c": 1}, marked=False))

    assert len(worker.bound) == 2
    assert isinstance(first, Pending)
    late, early = second.get_output(), first.get_output()
    assert not hasattr(third.get_output(), "_ttft")
    assert early._ttft[4] < late._ttft[4]
    assert not worker.bound


def test_async_unread(make: Make) -> None:
    """Outputs that nobody reads do not pile up."""
    runner = make(pending=True)
    for _ in range(worker.BOUND_LIMIT + 10):
        run(runner, scheduled({"a": 10}))

    assert len(worker.bound) == worker.BOUND_LIMIT


def test_empty(make: Make) -> None:
    """The empty output that all steps share is never touched."""
    output = run(make(), scheduled({}))

    assert output is EMPTY
    assert not hasattr(EMPTY, "_ttft")
    assert not worker.opened


def test_raised(make: Make) -> None:
    """After a step that raised in the host, the next one's record is its own."""
    runner = make()
    runner.raises = True
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.execute_model(scheduled({"a": 10}))
    runner.raises = False
    idle = run(runner, scheduled({"a": 1}, marked=False))
    output = run(runner, scheduled({"a": 10}))

    assert not hasattr(idle, "_ttft")
    assert len(output._ttft) == 6
    assert not worker.opened


def test_sampler_raised(make: Make) -> None:
    """The same when the second call raised."""
    runner = make()
    assert runner.execute_model(scheduled({"a": 10})) is None
    output = run(runner, scheduled({"b": 10}))

    assert len(output._ttft) == 6
    assert not worker.opened


def test_unready(make: Make) -> None:
    """A device that is not done yet costs the step its marks, and says so."""

    class Unready:
        def stamp(self) -> int:
            return 0

        def place(self, stamps: list[Any]) -> None:
            return None

    worker._clock.append(Unready())
    output = run(make(), scheduled({"a": 10}))

    assert output._ttft == (clocks.boot_once(), 0, breakdown.LOST_FORWARD)


def test_partition(make: Make) -> None:
    """The record's pairs cut a step into stages that add up."""
    boot, sampled, lost, *flat = run(make(), scheduled({"a": 10}, {"a": [0]}))._ttft
    pairs = list(zip(flat[0::3], flat[1::3], flat[2::3], strict=True))
    marks = breakdown.Marks(START - 40, START - 30, START - 20, START - 10, START)
    marks.steps.append(breakdown.Step(pairs, sampled, lost))
    marks.output = sampled + 11
    cut = breakdown.partition(marks)

    assert cut.unattributed == 0
    assert sum(cut.stages.values()) == cut.end - cut.start
    assert cut.stages["encoder.compute"] == ENCODER
    assert cut.stages["dispatch"] == PREPARE
    assert cut.stages["output"] == 11
