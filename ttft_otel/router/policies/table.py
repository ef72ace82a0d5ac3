# SPDX-License-Identifier: Apache-2.0
"""Integers by integer, millions of them, that grow and shrink in small steps; indexes of blocks use it.

One dict of a million would be copied in one go as it grows, and freed in one go: 100 ms each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

PARTS: Final = 64
LOW: Final = PARTS - 1


class Table:
    """A dict in `parts`, by the key's lowest bits; who is in a hurry reads them itself."""

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: tuple[dict[int, int], ...] = tuple({} for _ in range(PARTS))

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __contains__(self, key: int) -> bool:
        return key in self.parts[key & LOW]

    def __setitem__(self, key: int, value: int) -> None:
        self.parts[key & LOW][key] = value

    def get(self, key: int) -> int | None:
        """The value, if there is one."""
        return self.parts[key & LOW].get(key)

    def pop(self, key: int) -> int:
        """The value, which leaves."""
        return self.parts[key & LOW].pop(key)

    def drain(self) -> Iterator[int]:
        """All values; each leaves as it is given."""
        for part in self.parts:
            while part:
                yield part.popitem()[1]
