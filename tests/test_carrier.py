# SPDX-License-Identifier: Apache-2.0
"""The string in vLLM's trace headers: everything comes back, nothing foreign is believed."""

from __future__ import annotations

import random

import pytest

from ttft_otel import carrier, clock
from ttft_otel.breakdown import CACHE, ENCODER, FORWARD, LOST_FORWARD, Marks

BOOT = clock.boot_once()


def journey() -> carrier.Journey:
    """A request with a wait and two steps."""
    made = carrier.Journey(added=100, scheduled=900, entered=5000)
    made.encoder_first = True
    made.waits += (CACHE, 200, 300)
    made.step((BOOT, 0, 0, ENCODER, 1000, 1500, FORWARD, 1600, 2000))
    made.step((BOOT, 4000, 4, FORWARD, 3000, 3900))
    made.prompt, made.own_tokens, made.rank = 77, 70, 2
    return made


def test_round_trip() -> None:
    """Times go into the marks, counts come back."""
    made, marks = journey(), Marks(1)
    found = carrier.unfold(carrier.fold(made), marks)

    assert found == made and made.sent
    assert (marks.added, marks.scheduled, marks.entered, marks.encoder_first) == (
        100,
        900,
        5000,
        True,
    )
    assert marks.waits == [("ec.transfer", 200, 300)]
    assert [step.pairs for step in marks.steps] == [
        [(ENCODER, 1000, 1500), (FORWARD, 1600, 2000)],
        [(FORWARD, 3000, 3900)],
    ]
    assert (marks.steps[1].sampled, marks.steps[1].lost) == (4000, 4)
    assert not marks.foreign and not marks.truncated


def test_other_host() -> None:
    """A worker with another boot makes the marks foreign."""
    made, marks = journey(), Marks(1)
    made.step((BOOT ^ 1, 0, 0))
    carrier.unfold(carrier.fold(made), marks)

    assert marks.foreign


def test_lost_step() -> None:
    """A step without a record is a step whose forward was lost, in its place."""
    made, marks = journey(), Marks(1)
    made.step(None)
    carrier.unfold(carrier.fold(made), marks)

    assert [step.lost for step in marks.steps] == [0, 4, LOST_FORWARD]


def test_unknown_stage() -> None:
    """A wait of a stage that this version does not know is left out."""
    made, marks = journey(), Marks(1)
    made.waits += (99, 400, 500)
    carrier.unfold(carrier.fold(made), marks)

    assert marks.waits == [("ec.transfer", 200, 300)]


def test_plain_header() -> None:
    """It is plain text that any header may carry, however long the way."""
    made = journey()
    for number in range(2000):
        made.step((BOOT, number, 0, FORWARD, number, number + 1))
    text = carrier.fold(made)

    assert text.isascii() and text.isprintable()
    assert len(made.steps) == carrier.STEPS and made.truncated


@pytest.mark.parametrize("text", ["", "1", "x", "{}", "[99]", "null", '["a"]', "[2,[]]", "é"])
def test_foreign_text(text: str) -> None:
    """What is not ours, or not of this version, is refused."""
    assert carrier.unfold(text, Marks(1)) is None


def test_damaged() -> None:
    """A damaged string is refused or read; it never raises."""
    text, chance = carrier.fold(journey()), random.Random(5)
    for _ in range(500):
        at = chance.randrange(len(text))
        carrier.unfold(text[:at] + chance.choice("0-,x[]") + text[at + 1 :], Marks(1))
        carrier.unfold(text[:at], Marks(1))
