# SPDX-License-Identifier: Apache-2.0
"""Which instance has which blocks of prompts cached; policies ask through state.py.

A block's number stands for all tokens up to its end, so a table of numbers is a trie of prefixes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol


class Index(Protocol):
    """Anything that knows; `size` is the tokens of a block."""

    size: int

    def match(self, blocks: Sequence[int], urls: Sequence[str]) -> list[int]:
        """How many of these blocks, from the first on, each instance has."""
        ...

    def served(self, url: str, blocks: Sequence[int]) -> None:
        """This instance has just computed a prompt of these blocks."""
        ...


class Holders:
    """Who has a block, one bit an instance: one walk down the prompt answers for all of them.

    It learns from what instances report, by `add` and `remove`.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._bits: dict[str, int] = {}
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def match(self, blocks: Sequence[int], urls: Sequence[str]) -> list[int]:
        """How many of these blocks, from the first on, each instance has."""
        places = {bit: at for at, url in enumerate(urls) if (bit := self._bits.get(url))}
        found = [0] * len(urls)
        left = sum(places)
        for depth, block in enumerate(blocks):
            still = left & self._holders.get(block, 0)
            if still != left:
                gone = left ^ still
                while gone:
                    bit = gone & -gone
                    found[places[bit]] = depth
                    gone ^= bit
                left = still
                if not left:
                    return found
        for bit, at in places.items():
            if bit & left:
                found[at] = len(blocks)
        return found

    def served(self, url: str, blocks: Sequence[int]) -> None:
        """The instance itself reports what it keeps of it."""

    def add(self, url: str, blocks: Iterable[int]) -> None:
        """It has these now."""
        bit = self._bits.get(url)
        if bit is None:
            used = sum(self._bits.values())
            bit = self._bits[url] = ~used & (used + 1)  # the lowest that nobody has
        for block in blocks:
            self._holders[block] = self._holders.get(block, 0) | bit

    def remove(self, url: str, blocks: Iterable[int]) -> None:
        """It has these no longer."""
        bit = self._bits.get(url, 0)
        for block in blocks:
            rest = self._holders.get(block, 0) & ~bit
            if rest:
                self._holders[block] = rest
            else:
                self._holders.pop(block, None)

    def forget(self, url: str) -> None:
        """It has nothing, or is gone. Looks at every block, 50 ns each."""
        bit = self._bits.get(url, 0)
        self.remove(url, [block for block, holders in self._holders.items() if holders & bit])
        self._bits.pop(url, None)


class Recent:
    """The last blocks that one instance used, at most `most`: what its own cache would keep."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, blocks: Sequence[int]) -> int:
        """How many of these, from the first on, are there."""
        for depth, block in enumerate(blocks):
            if block not in self._blocks:
                return depth
        return len(blocks)

    def use(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """These are the latest; what came in and what went out for it."""
        new = [block for block in blocks if block not in self._blocks]
        for block in reversed(blocks):  # the end of a prompt goes before its beginning
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        gone = [self._blocks.popitem(last=False)[0] for _ in range(len(self) - self.most)]
        return new, gone


class History(Holders):
    """What an instance must have cached, going by what it was sent; for those that report nothing.

    `most` blocks an instance at most, of the latest `instances`.
    """

    def __init__(self, size: int, most: int, instances: int = 1024) -> None:
        super().__init__(size)
        self.most, self.instances = most, instances
        self._recent: dict[str, Recent] = {}

    def served(self, url: str, blocks: Sequence[int]) -> None:
        """This instance has just computed a prompt of these blocks."""
        recent = self._recent.pop(url, None)
        if recent is None:
            recent = Recent(self.most)
            if len(self._recent) >= self.instances:
                self.forget(next(iter(self._recent)))
        self._recent[url] = recent
        new, gone = recent.use(blocks)
        self.add(url, new)
        self.remove(url, gone)

    def forget(self, url: str) -> None:
        """It has nothing, or is gone."""
        self._recent.pop(url, None)
        super().forget(url)
