# SPDX-License-Identifier: Apache-2.0
"""What each instance has been sent and has not begun to answer; state.py tells it, policies read it.

An entry leaves at its first token, error, disconnect or time-out. Sums are integers: they end at zero.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ttft_otel.router.choose import Instance
from ttft_otel.router.policies.model import Line
from ttft_otel.router.policies.work import Work

Key = tuple[str, str]  # leg, request id
SECOND: Final = 1_000_000  # microseconds
PATIENCE: Final = (
    600 * SECOND
)  # nobody waits longer for a first token; the safety net, not the rule
WINDOW: Final = 60  # seconds over which arrivals are counted
FULL: Final = 0.95  # instances count as no busier than this, or what comes next would be endless


@dataclass(frozen=True, slots=True)
class Entry:
    """One request without a first token; `predicted` is its TTFT in seconds, if a policy knew."""

    url: str
    sent: int
    work: Work
    blocks: tuple[int, ...]
    predicted: float | None


class Until(NamedTuple):
    """When an instance will have done its entries by this line: at `end`, not within `least` seconds."""

    line: Line
    end: float
    least: float


@dataclass(slots=True)
class Load:
    """One instance's entries in the order of sending, and their sums."""

    entries: dict[Key, Entry] = field(default_factory=dict)
    fresh: int = 0
    pairs: int = 0
    since: int = 0  # the one before the first entry left then
    queued: Counter[int] = field(default_factory=Counter)  # blocks that will be cached
    seconds: deque[list[int]] = field(default_factory=deque)  # [second, arrivals]
    lately: int = 0  # tokens to compute sent here, half as much after each window
    until: Until | None = None  # what a policy has worked out of the entries; gone when they change

    def arrivals(self, now: int, window: int) -> int:
        """How many were sent here within the last `window` seconds."""
        while self.seconds and self.seconds[0][0] <= now // SECOND - window:
            self.seconds.popleft()
        return sum(count for _, count in self.seconds)

    def running(self, now: int) -> tuple[Work, float] | None:
        """What it computes now, if it takes one after the other, and for how many seconds already."""
        if not self.entries:
            return None
        entry = next(iter(self.entries.values()))
        began = entry.sent if entry.sent > self.since else self.since
        return entry.work, (now - began) / SECOND if now > began else 0.0


NOTHING: Final = Load()


class Pending:
    """Every instance's load. `patience` in microseconds, `window` in seconds."""

    def __init__(self, patience: int = PATIENCE, window: int = WINDOW) -> None:
        self.patience, self.window = patience, window
        self._loads: dict[str, Load] = {}  # of instances that were sent something
        self._entries: dict[Key, Entry] = {}  # in the order of sending
        self._working = 0  # instances with entries
        self._busy = self._rate = (
            0.0  # averages of these, and of arrivals a second, over the window
        )
        self._at = self._halved = 0

    def __len__(self) -> int:
        return len(self._entries)

    def at(self, url: str) -> Load:
        """One instance's load; an empty one for an instance that was sent nothing."""
        return self._loads.get(url, NOTHING)

    def of(self, instances: Iterable[Instance]) -> list[Load]:
        """Those of several."""
        loads = self._loads
        return [loads.get(each.url, NOTHING) for each in instances]

    def crowd(self, now: int, count: int) -> float:
        """How many who come later a second more of work on one of `count` busy instances delays, a second.

        In a queue with `rate` arrivals that is busy for `share` of the time a wait lasts for as many as
        come until it is empty: rate / (1 - share) for each second. As far as others are idle now nobody
        need wait, so that the part of instances that are busy counts.
        """
        self._average(now)
        count = max(count, len(self._loads))
        return self._rate / count / (1 - min(FULL, self._busy / count)) * self._working / count

    def sent(self, key: Key, entry: Entry) -> None:
        """A request goes there now; sent before, it is no longer where it was."""
        self.left(key, entry.sent)
        self.expire(entry.sent)
        load = self._loads.get(entry.url) or self._add(entry.url, entry.sent)
        self._average(entry.sent)
        self._rate += 1 / self.window
        self._working += not load.entries
        load.lately += entry.work.fresh
        load.until = None
        self._entries[key] = load.entries[key] = entry
        load.fresh += entry.work.fresh
        load.pairs += entry.work.pairs
        load.queued.update(entry.blocks)
        second = entry.sent // SECOND
        if load.seconds and load.seconds[-1][0] == second:
            load.seconds[-1][1] += 1
        else:
            load.arrivals(entry.sent, self.window)
            load.seconds.append([second, 1])

    def left(self, key: Key, now: int) -> Entry | None:
        """It has its first token, or will never have one. Idempotent."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        load = self._loads[entry.url]
        if next(iter(load.entries)) == key:
            load.since = now
        self._average(now)
        del load.entries[key]
        self._working -= not load.entries
        load.until = None
        load.fresh -= entry.work.fresh
        load.pairs -= entry.work.pairs
        queued = load.queued
        for block in entry.blocks:
            count = queued[block]
            if count == 1:
                queued.pop(block)  # a Counter's own `del` costs more
            else:
                queued[block] = count - 1
        return entry

    def expire(self, now: int) -> None:
        """Forget what nobody has told us the end of."""
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if now - entry.sent < self.patience:
                return
            self.left(key, now)

    def _average(self, now: int) -> None:
        """Bring the averages up to now."""
        if now <= self._at:
            return
        span = self.window * SECOND
        keep = math.exp((self._at - now) / span)
        self._rate *= keep
        self._busy = self._busy * keep + self._working * (1 - keep)
        self._at = now
        if now >= self._halved + span:
            self._halved = now
            for load in self._loads.values():
                load.lately //= 2

    def _add(self, url: str, now: int) -> Load:
        """A new instance is the moment to forget those that are gone."""
        for other, load in list(self._loads.items()):
            if not load.entries and not load.arrivals(now, self.window):
                del self._loads[other]
        load = self._loads[url] = Load()
        return load
