# SPDX-License-Identifier: Apache-2.0
"""How many requests each worker has under way at each instance, in memory that all workers share.

own_loads.py counts, sibling_loads.py reads what has changed. A store of 8 bytes is never seen in halves, and
each number has one writer, so that nothing is locked, sent or lost.
"""

from __future__ import annotations

import mmap
from typing import Final

MAX_PLACES: Final = 4096  # instances of a worker; what is under way at others is not told
# Changed numbers that a reader may be behind; then it looks at all of them.
MAX_CHANGES: Final = 4096
_HEAD_WORDS: Final = 8  # a cache line, so that the writer slows no reader of another seat
_CHANGES_AT: Final = _HEAD_WORDS
_COUNTS_AT: Final = _CHANGES_AT + MAX_CHANGES
_SEAT_WORDS: Final = _COUNTS_AT + 2 * MAX_PLACES
_WORD_BYTES: Final = 8


class LoadCounts:
    """The numbers of `seats` workers, in anonymous memory that forked processes share."""

    def __init__(self, seats: int) -> None:
        memory = mmap.mmap(-1, seats * _SEAT_WORDS * _WORD_BYTES)
        self.words = memoryview(memory).cast("q")


class CountWriter:
    """The numbers of `seat`, by index: requests in flight, and requests ever sent."""

    def __init__(self, counts: LoadCounts, seat: int) -> None:
        self._words, self._start = counts.words, seat * _SEAT_WORDS

    def clear(self) -> None:
        """Set all to 0: what a predecessor had under way ended with it."""
        begin = self._start + _COUNTS_AT
        self._words[begin : begin + 2 * MAX_PLACES] = memoryview(
            bytes(2 * MAX_PLACES * _WORD_BYTES)
        ).cast("q")

    def count_sent(self, index: int) -> None:
        """One more is in flight."""
        words, start = self._words, self._start
        at = start + _COUNTS_AT + 2 * index
        words[at] += 1
        words[at + 1] += 1
        # As _note_change() does, without the call: this is done for every request.
        changes = words[start]
        words[start + _CHANGES_AT + changes % MAX_CHANGES] = index
        words[start] = changes + 1

    def count_ended(self, index: int) -> None:
        """One less is in flight."""
        self._words[self._start + _COUNTS_AT + 2 * index] -= 1
        self._note_change(index)

    def reset_index(self, index: int) -> None:
        """Set both numbers of `index` to 0."""
        at = self._start + _COUNTS_AT + 2 * index
        self._words[at] = self._words[at + 1] = 0

    def get_counts(self, index: int) -> tuple[int, int]:
        """Requests in flight, and requests ever sent."""
        at = self._start + _COUNTS_AT + 2 * index
        return self._words[at], self._words[at + 1]

    def _note_change(self, index: int) -> None:
        words, start = self._words, self._start
        changes = words[start]
        words[start + _CHANGES_AT + changes % MAX_CHANGES] = index
        # Last: who sees it finds the numbers changed.
        words[start] = changes + 1


class CountReader:
    """What has changed in the numbers of another `seat`."""

    def __init__(self, counts: LoadCounts, seat: int) -> None:
        self._words, self._start = counts.words, seat * _SEAT_WORDS
        self._changes = self._words[self._start]
        self._reads_all = False

    def has_news(self) -> bool:
        """Whether there is anything to read."""
        return self._words[self._start] != self._changes or self._reads_all

    def read_all_next(self) -> None:
        """Have the next read take all numbers: the indices mean other instances now."""
        self._reads_all = True

    def read_changes(self, used: int) -> list[tuple[int, int, int]]:
        """Index, requests in flight and ever sent, of what has changed since the last call.

        used: the indices from 0 that are in use, as far as the reader knows.
        """
        words, start, before = self._words, self._start, self._changes
        self._changes = changes = words[start]
        # Half of them, since the writer goes on meanwhile.
        if self._reads_all or changes - before > MAX_CHANGES // 2:
            self._reads_all = False
            indices = set(range(used))
        else:
            at = start + _CHANGES_AT
            indices = {words[at + number % MAX_CHANGES] for number in range(before, changes)}
        at = start + _COUNTS_AT
        return [(each, words[at + 2 * each], words[at + 2 * each + 1]) for each in indices]
