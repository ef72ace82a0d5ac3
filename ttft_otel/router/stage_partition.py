# SPDX-License-Identifier: Apache-2.0
"""Partition the times of a request and its attempts (timeline.py) into stages, which records.py exports.

Stages add up exactly to the TTFT; leg_partition.py places those of the attempts.
"""

from __future__ import annotations

from ttft_otel.model.breakdown import Breakdown
from ttft_otel.model.intervals import PartitionCursor
from ttft_otel.model.leg_partition import place_leg
from ttft_otel.model.stages import UNATTRIBUTED
from ttft_otel.router.timeline import PromptLookup, RequestTimeline


def partition_timeline(timeline: RequestTimeline) -> Breakdown:
    """Partition `timeline`, from arrival to the first token sent, into stages."""
    cursor = _place_stages(timeline)
    # A stage may have several pieces, as router.route does where an attempt is repeated.
    totals: dict[str, int] = {}
    for label, low, high in cursor.pieces:
        totals[label] = totals.get(label, 0) + high - low
    lost = totals.pop(UNATTRIBUTED, 0)
    return Breakdown(
        timeline.arrived_us, cursor.position, cursor.pieces, totals, lost, cursor.clamped
    )


def _place_stages(timeline: RequestTimeline) -> PartitionCursor:
    cursor = PartitionCursor(timeline.arrived_us)
    # A request that failed while its body was read was received for all of its time.
    cursor.close_stage("router.receive", timeline.parsed_us or timeline.ended_us)
    attempts = [attempt for chain in timeline.critical_path for attempt in chain]
    if timeline.prompt_lookup is not None:
        _place_prompt_lookup(cursor, timeline.prompt_lookup, timeline.ended_us)
    for attempt in attempts:
        server_timing = attempt.read_server_timing()
        place_leg(cursor, attempt, server_timing, timeline.ended_us, attempt is attempts[-1])
    if timeline.ended_us:
        # Without an attempt (no instance, or none in time) it was refused while it was routed.
        last_stage = "router.egress" if attempts else "router.route"
        cursor.close_stage(last_stage, max(timeline.ended_us, cursor.position))
    return cursor


def _place_prompt_lookup(cursor: PartitionCursor, lookup: PromptLookup, ended_us: int) -> None:
    cursor.close_stage("router.route", lookup.began_us)
    cursor.close_stage("router.tokenize", lookup.tokenized_us or ended_us)
    # Nothing was looked up before the tokens were known: there is no such stage then.
    if lookup.tokenized_us:
        cursor.close_stage("router.lookup", lookup.looked_up_us or ended_us)


def find_failed_stage(timeline: RequestTimeline) -> str:
    """The stage in which the request failed; inside a leg it is the hop, as no more is known."""
    if not timeline.parsed_us:
        return "router.receive"
    lookup = timeline.prompt_lookup
    if lookup is not None and not lookup.looked_up_us:
        return "router.lookup" if lookup.tokenized_us else "router.tokenize"
    attempts = [attempt for chain in timeline.critical_path for attempt in chain]
    return f"router.hop.{attempts[-1].leg}" if attempts else "router.route"
