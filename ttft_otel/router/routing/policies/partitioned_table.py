# SPDX-License-Identifier: Apache-2.0
"""A dict of integers, split into parts so that no single resize is long; block indexes use it.

Resizing or freeing one dict of a million entries blocks the event loop for about 100 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

# A part of four million blocks has 62 500: resizing that takes a few milliseconds.
PART_COUNT: Final = 64
PART_MASK: Final = PART_COUNT - 1


class PartitionedTable:
    """A dict whose entries are in `parts` by the lowest bits of the key; hot loops read `parts` directly."""

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: tuple[dict[int, int], ...] = tuple({} for _ in range(PART_COUNT))

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __contains__(self, key: int) -> bool:
        return key in self.parts[key & PART_MASK]

    def __setitem__(self, key: int, value: int) -> None:
        self.parts[key & PART_MASK][key] = value

    def get(self, key: int) -> int | None:
        """The value of `key`, or None."""
        # Keys are hashes, so their lowest bits spread evenly.
        return self.parts[key & PART_MASK].get(key)

    def pop(self, key: int) -> int:
        """Remove `key` and return its value. Raises KeyError."""
        return self.parts[key & PART_MASK].pop(key)

    def drain_values(self) -> Iterator[int]:
        """Iterate over all values, removing each, so that memory is freed step by step."""
        for part in self.parts:
            while part:
                yield part.popitem()[1]
