# SPDX-License-Identifier: Apache-2.0
"""Partition the time of a call to a leg into stages, by what its instance says in Server-Timing. Pure.

router/timeline.py passes a request's attempts, exporter/spans/span_content.py those of a Record.
A leg without Server-Timing is unattributed.
"""

from __future__ import annotations

import functools
from typing import Final, Protocol

from ttft_otel.model.intervals import PartitionCursor
from ttft_otel.model.stages import STAGE_NAMES, UNATTRIBUTED
from ttft_otel.model.timing import ServerTiming

# A breakdown that is longer than its leg by more cannot be placed; by less, it is cut to the leg.
MAX_EXCESS_US: Final = 1000
MAX_STAGE_LISTS: Final = 256  # servers name few combinations of stages, again and again
_STAGE_ORDER: Final = {name: place for place, name in enumerate(STAGE_NAMES)}


class LegTimes(Protocol):
    """Times of one call to a leg, microseconds of one clock; 0 if not reached.

    first_byte_us: the end of the leg on the way to the first token. is_lost: it failed, and another call
    followed at resumed_us.
    """

    @property
    def leg(self) -> str: ...
    @property
    def sent_us(self) -> int: ...
    @property
    def first_byte_us(self) -> int: ...
    @property
    def ended_us(self) -> int: ...
    @property
    def is_lost(self) -> bool: ...
    @property
    def resumed_us(self) -> int: ...


def place_leg(
    cursor: PartitionCursor,
    times: LegTimes,
    server_timing: ServerTiming | None,
    ended_us: int,
    is_last: bool,
) -> None:
    """Move `cursor` to the end of a call, over the routing before it, the hop and the leg's stages.

    server_timing: what the instance says, None for nothing. ended_us: when the partitioned time ends, 0
    where only the last call tells it (`is_last`), because the answer is not streamed.
    """
    cursor.close_stage("router.route", times.sent_us)
    # A cancelled call may have neither a first byte nor an end: the request's is its end.
    stop_us = max(times.first_byte_us or times.ended_us or ended_us, cursor.position)
    if times.is_lost:
        # With its back-off, as neither brought the first token nearer.
        cursor.close_stage("router.retry", max(stop_us, times.resumed_us))
    elif (
        server_timing is None
        or not times.first_byte_us
        or _exceeds_leg(server_timing, stop_us - times.sent_us)
    ):
        cursor.close_stage(UNATTRIBUTED, stop_us)
    else:
        rest_us = server_timing.rest or 0
        # Not streamed: `rest` is what the server did after its first token.
        if is_last and not ended_us:
            stop_us, rest_us = max(stop_us - rest_us, cursor.position), 0
        _place_leg_stages(cursor, times.leg, server_timing, stop_us, rest_us)


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
