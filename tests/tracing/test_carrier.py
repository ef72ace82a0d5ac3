# SPDX-License-Identifier: Apache-2.0
"""What an engine core tells of a request: timeline, media items, the string in vLLM's trace headers."""

from __future__ import annotations

import random

import pytest

from ttft_otel.model.breakdown import (
    CODE_EC_TRANSFER,
    CODE_ENCODER,
    CODE_FORWARD,
    EngineStep,
    Marks,
)
from ttft_otel.model.names import keys
from ttft_otel.tracing import carrier, clock
from ttft_otel.tracing.carrier import (
    BIT_ANNOUNCED,
    BIT_AWAITED,
    BIT_CACHED,
    MAX_STEPS,
    SOURCE_ENCODED,
    SOURCE_LOCAL,
    SOURCE_REMOTE,
    SOURCE_SKIPPED,
    SOURCE_UNSEEN,
    SOURCES_UNKNOWN,
    EngineTimeline,
    ItemCounts,
    count_items,
    list_item_attributes,
    summarize_items,
)

BOOT = clock.get_boot_number()


def make_timeline() -> EngineTimeline:
    """A request with a wait and two steps."""
    made = EngineTimeline(added=100, scheduled=900, entered=5000)
    made.open_details().encoder_first = True
    made.open_details().waits += (CODE_EC_TRANSFER, 200, 300)
    made.add_step((BOOT, 0, 0, CODE_ENCODER, 1000, 1500, CODE_FORWARD, 1600, 2000))
    made.add_step((BOOT, 4000, 4, CODE_FORWARD, 3000, 3900))
    made.prompt, made.own_tokens, made.rank = 77, 70, 2
    return made


def send(made: EngineTimeline) -> tuple[EngineTimeline, Marks]:
    """What the API server reads of it."""
    marks = Marks(1)
    found = carrier.decode_timeline(carrier.encode_timeline(made), marks)
    assert found is not None
    return found, marks


def test_round_trip() -> None:
    """Times go into the marks, counts come back."""
    made = make_timeline()
    found, marks = send(made)

    assert found == made and made.sent
    assert (marks.added, marks.scheduled, marks.entered, marks.encoder_first) == (
        100,
        900,
        5000,
        True,
    )
    assert marks.waits == [("ec.transfer", 200, 300)]
    assert [step.pairs for step in marks.steps] == [
        [(CODE_ENCODER, 1000, 1500), (CODE_FORWARD, 1600, 2000)],
        [(CODE_FORWARD, 3000, 3900)],
    ]
    assert (marks.steps[1].sampled, marks.steps[1].lost) == (4000, 4)
    assert not marks.foreign and not marks.truncated


def test_one_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """The short way of a record with one interval by the host's clock is that of all others."""
    made = EngineTimeline(added=100, scheduled=900, entered=5000)
    began = (carrier.CODE_SENT, 910, 0, carrier.CODE_TAKEN, 950, 0)
    made.add_step((BOOT, 4000, 0, CODE_FORWARD, 1000, 3900, *began))
    text = carrier.encode_timeline(made)
    short, long = Marks(1), Marks(1)
    carrier.decode_timeline(text, short)
    note = carrier.read_clock(made)
    monkeypatch.setattr(carrier, "_has_one_interval", lambda *_: False)
    carrier.decode_timeline(text, long)

    assert [*map(tuple, short.steps[0].pairs)] == [(CODE_FORWARD, 1000, 3900)]
    short.steps[0].pairs = long.steps[0].pairs
    assert short == long and (long.steps[0].sent, long.steps[0].taken) == (910, 950)
    assert note == carrier.read_clock(made)


def test_parts() -> None:
    """What the host saw inside a step: sent, taken, the agreement of the ranks; and its drafter."""
    made, marks = EngineTimeline(added=100, scheduled=900, entered=5000), Marks(1)
    began = (carrier.CODE_SENT, 910, 0, carrier.CODE_TAKEN, 950, 970)
    parts = (carrier.CODE_DRAFT, 4000, 4100, carrier.CODE_SYNC, 955, 965)
    device = (carrier.CODE_CLOCK, clock.CLOCK_DEVICE, 30)
    made.add_step((BOOT, 4000, 0, CODE_FORWARD, 1000, 3900, *parts, *began, *device))
    carrier.decode_timeline(carrier.encode_timeline(made), marks)

    pairs = [(CODE_FORWARD, 1000, 3900)]
    step = EngineStep(pairs, 4000, 0, 950, 970, 910, 4000, 4100, 955, 965)
    assert marks.steps == [step]


def test_other_host() -> None:
    """A worker with another boot makes the marks foreign."""
    made = make_timeline()
    made.add_step((BOOT ^ 1, 0, 0))

    assert send(made)[1].foreign


def test_plain_header() -> None:
    """It is plain text that any header may carry, however long the way."""
    made = make_timeline()
    for number in range(2000):
        made.add_step((BOOT, number, 0, CODE_FORWARD, number, number + 1))
    text = carrier.encode_timeline(made)

    assert text.isascii() and text.isprintable()
    assert len(made.steps) == MAX_STEPS and made.read_details().truncated


def test_media() -> None:
    """Media items come back as they were; a list too short to be one is refused."""
    made = make_timeline()
    made.open_details().media = [1, 2, 64, 0, 12, 19]
    found, _ = send(made)

    assert found.details == made.details
    assert keys.EC_ITEMS not in carrier.list_timeline_attributes(found)
    assert carrier.list_timeline_attributes(found)[keys.ENCODER_OWN_ITEMS] == 1
    made.open_details().media = [1, 2]
    assert carrier.decode_timeline(carrier.encode_timeline(made), Marks(1)) is None


@pytest.mark.parametrize("text", ["", "1", "x", "{}", "[99]", "null", '["a"]', "[2,[]]", "é"])
def test_foreign_text(text: str) -> None:
    """What is not ours, or not of this version, is refused."""
    assert carrier.decode_timeline(text, Marks(1)) is None


def test_damaged() -> None:
    """A damaged string is refused or read; it never raises."""
    text, chance = carrier.encode_timeline(make_timeline()), random.Random(5)
    for _ in range(500):
        at = chance.randrange(len(text))
        carrier.decode_timeline(text[:at] + chance.choice("0-,x[]") + text[at + 1 :], Marks(1))
        carrier.decode_timeline(text[:at], Marks(1))


def test_clock_entry() -> None:
    """A worker's record tells which clock placed it; of several steps the greatest error counts."""
    boot = clock.get_boot_number()
    first = (boot, 0, 0, 10, 100, 200, carrier.CODE_CLOCK, clock.CLOCK_DEVICE, 17)
    second = (boot, 400, 0, 10, 300, 390, carrier.CODE_CLOCK, clock.CLOCK_DEVICE, 23)
    timeline, marks = send(EngineTimeline(steps=[first, second]))
    attributes = carrier.list_timeline_attributes(timeline)

    assert [step.pairs for step in marks.steps] == [[(10, 100, 200)], [(10, 300, 390)]]
    assert (attributes[keys.CLOCK], attributes[keys.CLOCK_ERROR_US]) == ("device", 23)
    assert keys.ENCODER_UNFINISHED not in attributes and not marks.foreign


def test_clock_of_a_later_version() -> None:
    """A worker on another host may have a later release, with a clock that this one does not know."""
    record = (5, 400, 0, 10, 300, 390, carrier.CODE_CLOCK, len(keys.CLOCK_WORDS), 23)
    timeline, marks = send(EngineTimeline(steps=[record]))

    assert marks.foreign and marks.steps[0].pairs == [(10, 300, 390)]
    assert carrier.read_clock(timeline) == ("lengths", 0)


def test_clock_lengths() -> None:
    """Where events have lengths and no places, the worker counts as one with a foreign clock."""
    flags = carrier.ENCODER_UNFINISHED
    record = (clock.get_boot_number(), 0, flags, carrier.CODE_CLOCK, clock.CLOCK_LENGTHS, 0)
    timeline, marks = send(EngineTimeline(steps=[record]))
    attributes = carrier.list_timeline_attributes(timeline)

    assert marks.foreign and attributes[keys.CLOCK] == "lengths"
    assert attributes[keys.ENCODER_UNFINISHED] is True and keys.CLOCK_ERROR_US not in attributes


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


def make_media(*codes: int, unmatched: int = 0, size: int = 0) -> list[int]:
    """A filled EngineTimeline.media."""
    return [0, 0, size, unmatched, *codes]


def test_each_way() -> None:
    """One item of each kind; what was skipped is in no count but the items', and not encoded here."""
    found = count_items(
        make_media(
            SOURCE_SKIPPED | BIT_ANNOUNCED,
            SOURCE_LOCAL | BIT_ANNOUNCED | BIT_CACHED,
            SOURCE_REMOTE | BIT_ANNOUNCED,
            SOURCE_ENCODED,
            SOURCE_UNSEEN,
            size=64,
        ),
        complete=True,
        encoded_before=False,
    )

    assert found == ItemCounts(5, 4, 1, 2, 0, 64)


@pytest.mark.parametrize(
    ("codes", "unmatched", "before", "recomputed"),
    [
        ((SOURCE_ENCODED,), 0, False, 0),
        ((SOURCE_ENCODED,), 0, True, 1),
        ((SOURCE_ENCODED | BIT_ANNOUNCED,), 0, False, 1),
        ((SOURCE_ENCODED | BIT_ANNOUNCED, SOURCE_ENCODED), 0, True, 1),
        ((SOURCE_ENCODED, SOURCE_ENCODED), 1, False, 1),
        ((SOURCE_ENCODED | BIT_ANNOUNCED, SOURCE_ENCODED, SOURCE_ENCODED), 5, True, 3),
        ((SOURCE_REMOTE | BIT_ANNOUNCED, SOURCE_ENCODED), 0, True, 0),
        ((SOURCE_LOCAL,), 3, True, 0),
    ],
)
def test_recomputed(codes: tuple[int, ...], unmatched: int, before: bool, recomputed: int) -> None:
    """Item by item where the request names items; else by the router's word."""
    found = count_items(make_media(*codes, unmatched=unmatched), True, before)

    assert found.recomputed == recomputed


def test_awaited() -> None:
    """An item that another request has loaded while this one waited for it came from elsewhere."""
    codes = (
        SOURCE_UNSEEN | BIT_AWAITED | BIT_ANNOUNCED,
        SOURCE_UNSEEN | BIT_ANNOUNCED,
        SOURCE_LOCAL | BIT_AWAITED,
    )

    assert count_items(make_media(*codes), True, False)[2:4] == (1, 2)
    assert count_items(make_media(*codes), False, False)[2:4] == (0, 1)


def test_nobody_saw() -> None:
    """Where nobody saw the items' ways only their number is known."""
    found = count_items(
        make_media(SOURCE_ENCODED, SOURCE_UNSEEN, unmatched=SOURCES_UNKNOWN), True, True
    )

    assert found == ItemCounts(2, 1, None, None, None, 0)
    assert summarize_items(found) is None
    assert list_item_attributes(found, "") == {keys.ENCODER_CACHED_ITEMS: 1}
    assert list_item_attributes(found, "X") == {
        keys.ENCODER_CACHED_ITEMS: 1,
        keys.EC_CONNECTOR: "X",
        keys.EC_ITEMS: 2,
    }
