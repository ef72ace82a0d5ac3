# SPDX-License-Identifier: Apache-2.0
"""The wait for the decode instance is cut into steps that add up to it, whatever the instance says."""

from __future__ import annotations

from full_record import change_full_record
from hypothesis import given
from hypothesis import strategies as st

from ttft_otel.exporter.spans.span_content import count_late_pieces, cut_handover, list_late_pieces
from ttft_otel.model.names import keys, span_names
from ttft_otel.model.record import Handover, HandoverCall
from ttft_otel.model.timing import format_server_timing

SAID = format_server_timing({"receive": 100, "kv.transfer": 500}, 80, 680)
times = st.integers(1, 2000)
maybe_times = st.just(0) | times
calls = st.builds(
    HandoverCall,
    st.just("decode"),
    times,
    maybe_times,
    maybe_times,
    st.booleans(),
    maybe_times,
    st.sampled_from(
        ["", SAID, SAID.replace("ttft", "tttt"), "receive;dur=-1", ",,,;dur", SAID * 2]
    ),
)


def list_steps(handover: Handover) -> list[tuple[str, int, int]]:
    """Its steps without the whole: name, start and end."""
    return [(each.name, each.start, each.end) for each in cut_handover(handover)[1:]]


def test_each_step_has_its_place() -> None:
    """Routing, the lost call with its pause, the hop, D's own stages, and what was left after its answer."""
    lost = HandoverCall("decode", 120, 0, 200, True, 260)
    good = HandoverCall("decode", 270, 1000, 3000, server_timing=SAID)

    repeated = list_steps(Handover(100, 1200, True, (lost, good)))

    assert repeated == [
        ("router.route", 100, 120),
        ("router.retry", 120, 260),
        ("router.route", 260, 270),
        ("router.hop.decode", 270, 320),
        ("decode.receive", 320, 420),
        ("decode.kv.transfer", 420, 920),
        ("unattributed", 920, 1000),
        (span_names.FIRST_DECODE, 1000, 1200),
    ]
    assert list_steps(Handover(100, 1200, False, (lost, good)))[-1] == ("router.egress", 1000, 1200)


def test_a_silent_instance_is_unattributed() -> None:
    """Without Server-Timing nobody knows what D did."""
    silent = HandoverCall("decode", 120, 900, 3000)

    assert list_steps(Handover(100, 1000, False, (silent,))) == [
        ("router.route", 100, 120),
        ("unattributed", 120, 900),
        ("router.egress", 900, 1000),
    ]


@given(times, times, st.booleans(), st.lists(calls, max_size=3))
def test_steps_add_up(
    start: int, end: int, is_repeated: bool, some_calls: list[HandoverCall]
) -> None:
    """They touch, fill the wait, and their totals add up to its own; no more of them than was counted."""
    handover = Handover(start, end, is_repeated, tuple(some_calls))

    whole, *steps = cut_handover(handover)

    record = change_full_record(late=(), handover=handover)
    assert list_late_pieces(record) == [whole, *steps]
    assert len(steps) + 1 <= count_late_pieces(record)
    found = dict(whole.attributes)
    total = found.pop(keys.HANDOVER_TOTAL_US)
    assert total == whole.end - whole.start == sum(each.end - each.start for each in steps)
    assert sum(found.values()) == total  # type: ignore[arg-type]
    position = whole.start
    for step in steps:
        assert step.start == position < step.end
        position = step.end
    assert position == whole.end and whole.start == start
