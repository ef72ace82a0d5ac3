# SPDX-License-Identifier: Apache-2.0
"""Which holders a wait can name, straight from HolderLog; held steps drive it in test_held_steps.py."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec

from lab.fake_vllm.engine_objects import build_scheduler_output
from ttft_otel.hooks.engine_core.held_steps import HeldRequests
from ttft_otel.hooks.engine_core.holders import HolderLog
from ttft_otel.hooks.engine_core.step_work import StepWork, describe_step


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
