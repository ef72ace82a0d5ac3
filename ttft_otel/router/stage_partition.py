# SPDX-License-Identifier: Apache-2.0
"""Partition the times of a request and its attempts (timeline.py) into stages, which records.py exports.

Stages add up exactly to the TTFT; those inside a leg come from its Server-Timing, and a leg without one is
unattributed.
"""

from __future__ import annotations

import functools
from typing import Final

from ttft_otel.breakdown import Breakdown
from ttft_otel.intervals import PartitionCursor
from ttft_otel.router.timeline import Attempt, PromptLookup, RequestTimeline
from ttft_otel.stages import STAGE_NAMES, UNATTRIBUTED
from ttft_otel.timing import ServerTiming

# A breakdown that is longer than its leg by more cannot be placed; by less, it is cut to the leg.
MAX_EXCESS_US: Final = 1000
MAX_STAGE_LISTS: Final = 256  # servers name few combinations of stages, again and again
_STAGE_ORDER: Final = {name: place for place, name in enumerate(STAGE_NAMES)}


def partition_timeline(timeline: RequestTimeline) -> Breakdown:
    """Partition `timeline`, from arrival to the first token sent, into stages."""
    cursor = place_stages(timeline)
    # A stage may have several pieces, as router.route does where an attempt is repeated.
    totals: dict[str, int] = {}
    for label, low, high in cursor.pieces:
        totals[label] = totals.get(label, 0) + high - low
    lost = totals.pop(UNATTRIBUTED, 0)
    return Breakdown(
        timeline.arrived_us, cursor.position, cursor.pieces, totals, lost, cursor.clamped
    )


def place_stages(timeline: RequestTimeline) -> PartitionCursor:
    """Its pieces partition `timeline`; its position is the end of the last one."""
    cursor = PartitionCursor(timeline.arrived_us)
    # A request that failed while its body was read was received for all of its time.
    cursor.close_stage("router.receive", timeline.parsed_us or timeline.ended_us)
    attempts = [attempt for chain in timeline.critical_path for attempt in chain]
    if timeline.prompt_lookup is not None:
        _place_prompt_lookup(cursor, timeline.prompt_lookup, timeline.ended_us)
    for attempt in attempts:
        _place_attempt(cursor, attempt, timeline, attempt is attempts[-1])
    if timeline.ended_us:
        # Without an attempt (no instance, or none in time) it was refused while it was routed.
        cursor.close_stage(
            "router.egress" if attempts else "router.route", max(timeline.ended_us, cursor.position)
        )
    return cursor


def _place_prompt_lookup(cursor: PartitionCursor, lookup: PromptLookup, ended_us: int) -> None:
    cursor.close_stage("router.route", lookup.began_us)
    cursor.close_stage("router.tokenize", lookup.tokenized_us or ended_us)
    # Nothing was looked up before the tokens were known: there is no such stage then.
    if lookup.tokenized_us:
        cursor.close_stage("router.lookup", lookup.looked_up_us or ended_us)


def _place_attempt(
    cursor: PartitionCursor, attempt: Attempt, timeline: RequestTimeline, is_last: bool
) -> None:
    cursor.close_stage("router.route", attempt.sent_us)
    # A cancelled attempt may have neither a first byte nor an end: the request's is its end.
    stop_us = max(attempt.first_byte_us or attempt.ended_us or timeline.ended_us, cursor.position)
    if attempt.is_lost:
        # With its back-off, as neither brought the first token nearer.
        cursor.close_stage("router.retry", max(stop_us, attempt.resumed_us))
    elif (
        attempt.server_timing is None
        or not attempt.first_byte_us
        or _exceeds_leg(attempt.server_timing, stop_us - attempt.sent_us)
    ):
        cursor.close_stage(UNATTRIBUTED, stop_us)
    else:
        rest_us = attempt.server_timing.rest or 0
        # Not streamed: `rest` is what the server did after its first token.
        if is_last and not timeline.ended_us:
            stop_us, rest_us = max(stop_us - rest_us, cursor.position), 0
        _place_leg_stages(cursor, attempt.leg, attempt.server_timing, stop_us, rest_us)


def _exceeds_leg(server_timing: ServerTiming, length_us: int) -> bool:
    """Whether a server accounts for so much more than its leg's `length_us` that it must be wrong."""
    accounted_us = server_timing.ttft + (server_timing.rest or 0)
    return accounted_us > length_us + MAX_EXCESS_US + length_us // 1000  # two clocks' rates differ


def _place_leg_stages(
    cursor: PartitionCursor, leg: str, server_timing: ServerTiming, stop_us: int, rest_us: int
) -> None:
    """Place the network hop, then the leg's stages in their order: only their lengths are known."""
    hop_us = stop_us - cursor.position - server_timing.ttft - rest_us
    # The server says more than there is room for; `clamped` tells by how much.
    if hop_us < 0:
        cursor.clamped -= hop_us
        hop_us = 0
    cursor.close_stage(f"router.hop.{leg}", cursor.position + hop_us)
    lengths = server_timing.stages
    for name, full_name in _order_stages(leg, tuple(lengths)):
        mark = cursor.position + lengths[name]
        cursor.close_stage(full_name, mark if mark < stop_us else stop_us)
    cursor.close_stage(UNATTRIBUTED, stop_us)


@functools.lru_cache(MAX_STAGE_LISTS)
def _order_stages(leg: str, names: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """The known ones of a leg's stages in their order, each with its full name.

    Stages of a newer release have no known place: they stay in what is unattributed.
    """
    known = sorted((name for name in names if name in _STAGE_ORDER), key=_STAGE_ORDER.__getitem__)
    return tuple((name, f"{leg}.{name}") for name in known)


def find_failed_stage(timeline: RequestTimeline) -> str:
    """The stage in which the request failed; inside a leg it is the hop, as no more is known."""
    if not timeline.parsed_us:
        return "router.receive"
    lookup = timeline.prompt_lookup
    if lookup is not None and not lookup.looked_up_us:
        return "router.lookup" if lookup.tokenized_us else "router.tokenize"
    attempts = [attempt for chain in timeline.critical_path for attempt in chain]
    return f"router.hop.{attempts[-1].leg}" if attempts else "router.route"
