# SPDX-License-Identifier: Apache-2.0
"""engine_timeline.py: what lies between the chunks of a prompt, as the engine core tells it step by step."""

from __future__ import annotations

import pytest

from ttft_otel.tracing.engine_timeline import MAX_STEPS, EngineTimeline

RECORD = (1, 2, 0, 10, 3, 4)


def play_steps(events: str) -> EngineTimeline:
    """Play events, 10 us apart: a step with it (S) or without it (s) is scheduled; their outputs (E, e)."""
    timeline = EngineTimeline()
    for number, event in enumerate(events, start=1):
        now = 10 * number
        if event == "S":
            if timeline.scheduled:
                timeline.begin_turn(now)
            timeline.scheduled = timeline.scheduled or now
            timeline.chunks += 1
        elif event == "s":
            timeline.open_details().left_out = now
        elif event == "E":
            timeline.add_step(RECORD, now)
        else:
            timeline.note_other_step(now)
    return timeline


@pytest.mark.parametrize(
    ("events", "turns"),
    [
        ("SE", []),
        ("SESESE", [20, 0, 40, 0]),  # alone: each chunk is taken at once
        ("SEseSE", [20, 50]),  # one step without it, and then the schedule() that takes it
        ("SEsesesSE", [20, 80]),
        ("SEseSESE", [20, 50, 60, 0]),
        ("SSEE", [30, 0]),  # async scheduling: taken before the step before has ended
        ("SSESEE", [30, 0, 50, 0]),
        ("SsESeE", [30, 50]),  # the other one's end comes after its next chunk was scheduled
        ("SsESeSEE", [30, 50, 70, 0]),
    ],
)
def test_turns(events: str, turns: list[int]) -> None:
    """For each later chunk: when the step before had ended, and until when others were worked for."""
    assert play_steps(events).read_details().turns == turns


def test_long_prompts_are_bounded() -> None:
    """As many turns as steps less one are kept; the last one is the last chunk's."""
    timeline = play_steps("SE" * (MAX_STEPS + 5))

    assert len(timeline.steps) == MAX_STEPS and timeline.read_details().truncated
    assert len(timeline.read_details().turns) == 2 * (MAX_STEPS - 1)
    assert timeline.read_details().turns[-2] == timeline.entered - 20
