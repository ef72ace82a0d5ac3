# SPDX-License-Identifier: Apache-2.0
"""Cut one trip into stages that add up, exactly; forward.py marks it, report.py tells it.

Pure. The legs' own stages come from their Server-Timing; a leg that has none is unattributed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ttft_otel import clock
from ttft_otel.breakdown import Breakdown, Cursor
from ttft_otel.stages import NAMES, UNATTRIBUTED
from ttft_otel.timing import Timing

if TYPE_CHECKING:
    from ttft_otel.router.account import Account
    from ttft_otel.router.choose import Choice, Instance

CUT: Final = "cancelled"
_PLACE: Final = {name: place for place, name in enumerate(NAMES)}


@dataclass(slots=True)
class Attempt:
    """One HTTP call to a leg; times in microseconds of CLOCK_MONOTONIC, 0 is not yet.

    `first` closes the leg on the way to the first token: a backend's first body chunk, an encoder's
    whole answer. `lost`: it failed and another instance was tried, or nobody was left; `resumed`:
    the end of the pause before that. `fresh`: its connection was opened for it.
    """

    leg: str
    path: str
    host: str
    port: int
    span_id: str
    sent: int
    number: int = 1
    first: int = 0
    ended: int = 0
    status: int = 0
    error: str = ""
    lost: bool = False
    timing: Timing | None = None
    policy: str = ""
    choice: Choice | None = None
    predicted: float | None = None  # seconds to its first token
    offered: tuple[Instance, ...] = ()
    resumed: int = 0
    fresh: bool = False
    instance: Instance | None = None
    open: bool = False  # counted as in flight at its instance
    trial: bool = False  # the one request of a half-open breaker
    account: Account | None = None  # what its leg's policy has to know

    def cut(self) -> None:
        """It was cancelled: the client left, or another call of the request failed."""
        if not self.ended:
            self.error, self.ended = CUT, clock.now()


@dataclass(slots=True)
class Look:
    """When a prompt was read and looked up, before any leg was asked; 0 is not yet."""

    began: int
    read: int = 0
    found: int = 0


@dataclass(slots=True)
class Trip:
    """Marks of one request; `path` holds the attempts of each leg on the critical path, in order.

    `end`: when the first chunk was given to the client, or when the request died; 0 for a plain
    answer, whose first token came before the end of its last leg.
    """

    arrive: int
    parsed: int = 0
    path: list[list[Attempt]] = field(default_factory=list)
    end: int = 0
    look: Look | None = None


def partition(trip: Trip) -> Breakdown:
    """Cut [arrive, first token out] into stages."""
    cursor = Cursor(trip.arrive)
    cursor.to("router.receive", trip.parsed or trip.end)
    attempts = [attempt for chain in trip.path for attempt in chain]
    if trip.look is not None:
        _look(cursor, trip.look, trip.end)
    for attempt in attempts:
        _attempt(cursor, attempt, trip, attempt is attempts[-1])
    if trip.end:
        cursor.to("router.egress" if attempts else "router.route", max(trip.end, cursor.at))
    totals: dict[str, int] = {}
    for label, low, high in cursor.pieces:
        totals[label] = totals.get(label, 0) + high - low
    lost = totals.pop(UNATTRIBUTED, 0)
    return Breakdown(trip.arrive, cursor.at, cursor.pieces, totals, lost, cursor.clamped)


def _look(cursor: Cursor, look: Look, end: int) -> None:
    cursor.to("router.route", look.began)
    cursor.to("router.tokenize", look.read or end)
    if look.read:
        cursor.to("router.lookup", look.found or end)


def _attempt(cursor: Cursor, attempt: Attempt, trip: Trip, last: bool) -> None:
    cursor.to("router.route", attempt.sent)
    stop = max(attempt.first or attempt.ended or trip.end, cursor.at)
    if attempt.lost:
        cursor.to("router.retry", max(stop, attempt.resumed))
    elif attempt.timing is None or not attempt.first:
        cursor.to(UNATTRIBUTED, stop)
    else:
        rest = attempt.timing.rest or 0
        if last and not trip.end:
            stop, rest = max(stop - rest, cursor.at), 0
        _lay(cursor, attempt.leg, attempt.timing, stop, rest)


def _lay(cursor: Cursor, leg: str, timing: Timing, stop: int, rest: int) -> None:
    """The hop first, then the leg's stages end to end: lengths are known, gaps are not."""
    hop = stop - cursor.at - timing.ttft - rest
    if hop < 0:
        cursor.clamped -= hop
    cursor.to(f"router.hop.{leg}", cursor.at + max(hop, 0))
    known = (name for name in timing.stages if name in _PLACE)
    for name in sorted(known, key=_PLACE.__getitem__):
        cursor.to(f"{leg}.{name}", min(cursor.at + timing.stages[name], stop))
    cursor.to(UNATTRIBUTED, stop)
