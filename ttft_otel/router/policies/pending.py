# SPDX-License-Identifier: Apache-2.0
"""What each instance has been sent and has not begun to answer; state.py tells it, policies read it.

An entry leaves at its first token, error, disconnect or time-out. Sums are integers: they end at zero.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

from ttft_otel.router.policies.work import Work

Key = tuple[str, str]  # leg, request id
SECOND: Final = 1_000_000  # microseconds
PATIENCE: Final = (
    600 * SECOND
)  # nobody waits longer for a first token; the safety net, not the rule
WINDOW: Final = 60  # seconds over which arrivals are counted


@dataclass(frozen=True, slots=True)
class Entry:
    """One request without a first token; `predicted` is its TTFT in seconds, if a policy knew."""

    url: str
    sent: int
    work: Work
    blocks: tuple[int, ...]
    predicted: float | None


@dataclass(slots=True)
class Load:
    """One instance's entries in the order of sending, and their sums."""

    entries: dict[Key, Entry] = field(default_factory=dict)
    fresh: int = 0
    pairs: int = 0
    since: int = 0  # the one before the first entry left then
    queued: Counter[int] = field(default_factory=Counter)  # blocks that will be cached
    seconds: deque[list[int]] = field(default_factory=deque)  # [second, arrivals]

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
        self._loads: dict[str, Load] = {}
        self._entries: dict[Key, Entry] = {}  # in the order of sending

    def __len__(self) -> int:
        return len(self._entries)

    def at(self, url: str) -> Load:
        """One instance's load; an empty one for an instance that was sent nothing."""
        return self._loads.get(url, NOTHING)

    def sent(self, key: Key, entry: Entry) -> None:
        """A request goes there now; sent before, it is no longer where it was."""
        self.left(key, entry.sent)
        self.expire(entry.sent)
        load = self._loads.get(entry.url) or self._add(entry.url, entry.sent)
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
        del load.entries[key]
        load.fresh -= entry.work.fresh
        load.pairs -= entry.work.pairs
        for block in entry.blocks:
            if load.queued[block] == 1:
                del load.queued[block]
            else:
                load.queued[block] -= 1
        return entry

    def expire(self, now: int) -> None:
        """Forget what nobody has told us the end of."""
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if now - entry.sent < self.patience:
                return
            self.left(key, now)

    def _add(self, url: str, now: int) -> Load:
        """A new instance is the moment to forget those that are gone."""
        for other, load in list(self._loads.items()):
            if not load.entries and not load.arrivals(now, self.window):
                del self._loads[other]
        load = self._loads[url] = Load()
        return load
