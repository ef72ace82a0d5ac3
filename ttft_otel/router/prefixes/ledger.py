# SPDX-License-Identifier: Apache-2.0
"""What one cache of an engine holds, from its events; feed.py tells, the fleet's index learns from it.

Engines name a block by a hash of their own, of which a removal says nothing more; here stands which
of our numbers each one is. A block may be there several times: requests that run at once each compute
it, and the engine reports each copy's end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from ttft_otel.router.policies.blocks import extra, number
from ttft_otel.router.policies.table import Table
from ttft_otel.router.prefixes.events import Cleared, Event, Malformed, Removed, Stored
from ttft_otel.router.prefixes.reported import Reported

MOST: Final = 2_000_000  # blocks of one cache; more are not counted as cached
# Others tell no removals: what they once stored would seem to stay for ever.
MEDIA: Final = {"GPU": 0, "CPU": 1 << 64}
# Only where each token needs all before it does a block that is there mean a prefix that is there.
WHOLE: Final = ("", "full_attention", "mla_attention", "sink_full_attention")


class Ledger:
    """One data-parallel rank's blocks; `apply` yields where other work may come in between."""

    def __init__(self, index: Reported, url: str, rank: int, most: int = MOST) -> None:
        self.index, self.url, self.rank, self.most = index, url, rank, most
        self.counts: Counter[str] = Counter()
        self.group: int | None = None  # the KV cache group that counts
        self._size = 0
        self._held = Table()  # our number by the engine's hash and the medium
        self._copies: dict[int, int] = {}  # further ones, of those that are there more than once
        self._again: dict[int, int] = {}  # further hashes or media of a number

    def __len__(self) -> int:
        return self._size

    def apply(self, event: Event) -> Iterator[None]:
        """Learn what it says. Raises Malformed for what no engine says."""
        if isinstance(event, Removed):
            yield from self._remove(event)
        elif isinstance(event, Stored):
            yield from self._store(event)
        elif isinstance(event, Cleared):
            self.counts["cleared"] += 1
            self.clear()
        else:
            self.counts["unknown"] += 1

    def clear(self) -> None:
        """Nothing is there, from now on; the index's memory is tidied later."""
        self.index.retire(self.url, self.rank, self.index.freed(self._held.drain()))
        self._held, self._copies, self._again, self._size = Table(), {}, {}, 0

    def _store(self, event: Stored) -> Iterator[None]:
        place = self._place(event)
        if place is None:
            return
        if place:
            yield from self._copied(event, place)
            return
        parent = 0 if event.parent is None else self._known(event.parent)
        size, ids, keys = event.size, event.ids, event.extra
        if parent is None:
            self.counts["orphans"] += len(event.hashes)
        elif size <= 0 or len(ids) != size * len(event.hashes):
            self.counts["odd"] += len(event.hashes)
        elif not self.index.learn(self.url, size):
            self.counts["other_size"] += len(event.hashes)
        else:
            for at, key in enumerate(event.hashes):
                tokens = ids[at * size : (at + 1) * size]
                try:
                    parent = number(parent, tokens, extra(keys[at]) if keys else b"")
                except (TypeError, OverflowError) as error:
                    raise Malformed("its token ids are none") from error
                self._add(key, parent)
                yield

    def _copied(self, event: Stored, place: int) -> Iterator[None]:
        # Offloading tells neither all tokens nor all keys: only what the GPU has told can be known.
        for key in event.hashes:
            known = self._known(key)
            if known is None:
                self.counts["orphans"] += 1
            elif key | place not in self._held:
                self._add(key | place, known)
            yield

    def _add(self, key: int, known: int) -> None:
        if key in self._held:
            self._copies[key] = self._copies.get(key, 0) + 1
        elif self._size >= self.most or self.index.full:
            self.counts["dropped"] += 1
        else:
            self._held[key] = known
            self._size += 1
            self.index.held += 1
            self.counts["stored"] += 1
            if self.index.has(self.url, known, self.rank):
                self._again[known] = self._again.get(known, 0) + 1
            else:
                self.index.add(self.url, (known,), self.rank)

    def _remove(self, event: Removed) -> Iterator[None]:
        place = MEDIA.get(event.medium)
        if place is None or event.group != self.group:
            return
        for short in event.hashes:
            key = short | place
            if not _one_less(self._copies, key) and key in self._held:
                self.counts["removed"] += 1
                self._size -= 1
                self.index.held -= 1
                known = self._held.pop(key)
                if not _one_less(self._again, known):
                    self.index.remove(self.url, (known,), self.rank)
            yield

    def _place(self, event: Stored) -> int | None:
        """The medium's mark on keys; None for what is not to be counted."""
        place = MEDIA.get(event.medium)
        if place is None:
            self.counts["other_medium"] += len(event.hashes)
        elif event.kind not in WHOLE or self.group not in (None, event.group):
            self.counts["other_group"] += len(event.hashes)
            return None
        else:
            self.group = event.group
        return place

    def _known(self, short: int) -> int | None:
        for place in MEDIA.values():
            found = self._held.get(short | place)
            if found is not None:
                return found
        return None


def _one_less(counts: dict[int, int], key: int) -> bool:
    """Take one away; False if there was none."""
    left = counts.get(key, 0)
    if left > 1:
        counts[key] = left - 1
    elif left:
        del counts[key]
    return left > 0
