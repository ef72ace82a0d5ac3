# SPDX-License-Identifier: Apache-2.0
"""Which instance has which blocks of prompts cached; policies ask through state.py.

A block's number stands for all tokens up to its end, so a table of numbers is a trie of prefixes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import reduce
from itertools import islice, repeat
from operator import or_
from typing import Final, Protocol

from ttft_otel.router.policies.table import LOW, Table

CHUNK: Final = 256  # blocks freed in one step
FREED: Final = 4096  # blocks that go at once where the bound was lowered
SENT: Final = -1  # the rank under which stands what an instance was sent, not what it reported


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
    """Who has a block, one bit a cache: one walk down the prompt answers for all instances.

    It learns from what instances report, by `add` and `remove`. An instance with several caches
    (data-parallel ranks) counts as its best one.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._bits: dict[tuple[str, int], int] = {}
        self._masks: dict[str, int] = {}  # an instance's bits
        self._owners: dict[int, tuple[str, int]] = {}  # whose bit it is, by the bit's length
        self._leaving: deque[tuple[int, Iterator[int]]] = deque()  # bits that blocks may still have
        self._holders = Table()

    def __len__(self) -> int:
        return len(self._holders)

    def match(self, blocks: Sequence[int], urls: Sequence[str]) -> list[int]:
        """How many of these blocks, from the first on, each instance has."""
        masks, holders, owners = self._masks, self._holders.parts, self._owners
        left = reduce(or_, map(masks.get, urls, repeat(0)), 0)
        left &= holders[blocks[0] & LOW].get(blocks[0], 0) if blocks else 0
        if not left:
            return [0] * len(urls)
        found: dict[str, int] = {}
        for depth, block in enumerate(blocks):
            still = left & holders[block & LOW].get(block, 0)
            if still == left:
                continue
            gone, left = left ^ still, still
            while gone:  # a later one of the same instance is deeper
                url, bit = owners[gone.bit_length()]
                found[url] = depth
                gone ^= bit
            if not left:
                break
        while left:
            url, bit = owners[left.bit_length()]
            found[url] = len(blocks)
            left ^= bit
        return list(map(found.get, urls, repeat(0)))

    def served(self, url: str, blocks: Sequence[int]) -> None:
        """The instance itself reports what it keeps of it."""

    def has(self, url: str, block: int, rank: int = 0) -> bool:
        """Whether this cache of the instance has it."""
        return bool((self._holders.get(block) or 0) & self._bits.get((url, rank), 0))

    def add(self, url: str, blocks: Iterable[int], rank: int = 0) -> None:
        """It has these now."""
        bit = self._bits.get((url, rank))
        if bit is None:
            used = sum(self._bits.values()) + sum({bit for bit, _ in self._leaving})
            bit = ~used & (used + 1)  # the lowest that nobody has
            self._bits[url, rank] = bit
            self._masks[url] = self._masks.get(url, 0) | bit
            self._owners[bit.bit_length()] = url, bit
        parts = self._holders.parts
        for block in blocks:
            holders = parts[block & LOW]
            holders[block] = holders.get(block, 0) | bit

    def remove(self, url: str, blocks: Iterable[int], rank: int = 0) -> None:
        """It has these no longer."""
        self._sweep(self._bits.get((url, rank), 0), blocks)

    def retire(self, url: str, rank: int, blocks: Iterator[int]) -> None:
        """Forget a cache that had these blocks: nobody finds it any more, `tidy` frees its memory."""
        bit = self._bits.pop((url, rank), 0)
        if bit:
            del self._owners[bit.bit_length()]
            self._masks[url] ^= bit
            if not self._masks[url]:
                del self._masks[url]
            self._leaving.append((bit, blocks))

    def tidy(self) -> Iterator[None]:
        """Free what retired caches held, step by step; may be left off, and gone on with by others."""
        while self._leaving:
            cache = self._leaving[0]
            chunk = list(islice(cache[1], CHUNK))
            self._sweep(cache[0], chunk)
            if not chunk:
                self._leaving.popleft()
            yield

    def _sweep(self, bit: int, blocks: Iterable[int]) -> None:
        parts = self._holders.parts
        for block in blocks:
            holders = parts[block & LOW]
            rest = holders.get(block, 0) & ~bit
            if rest:
                holders[block] = rest
            else:
                holders.pop(block, None)


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
        excess = min(len(self) - self.most, len(new) + FREED)
        gone = [self._blocks.popitem(last=False)[0] for _ in range(excess)]
        return new, gone

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)


class History(Holders):
    """What an instance must have cached, going by what it was sent; for those that report nothing.

    `most` blocks an instance at most, of the latest `instances`.
    """

    def __init__(self, size: int, most: int, instances: int = 1024) -> None:
        super().__init__(size)
        self.most, self.instances = most, instances
        self._recent: dict[str, Recent] = {}
        self._followed: Collection[str] | None = None  # None: whoever is served

    def follow(self, urls: Collection[str]) -> None:
        """These instances and no others; requests still under way elsewhere teach nothing."""
        self._followed = frozenset(urls)
        for url in self._recent.keys() - self._followed:
            self.unlearn(url)

    def served(self, url: str, blocks: Sequence[int]) -> None:
        """This instance has just computed a prompt of these blocks."""
        if self._followed is not None and url not in self._followed:
            return
        recent = self._recent.pop(url, None)
        if recent is None:
            recent = Recent(self.most)
            if len(self._recent) >= self.instances:
                self.unlearn(next(iter(self._recent)))
        self._recent[url] = recent
        new, gone = recent.use(blocks)
        self.add(url, new, SENT)
        self.remove(url, gone, SENT)
        for _ in islice(self.tidy(), 2 + len(new) // CHUNK):  # as much goes as comes
            pass

    def limit(self, most: int) -> None:
        """So many blocks an instance from now on; what is too much goes as others come."""
        self.most = most
        for recent in self._recent.values():
            recent.most = most

    def hint(self, size: int) -> None:
        """An instance's blocks are this long."""
        self.size = size

    def sent(self, url: str) -> int:
        """How many blocks of this instance's are remembered."""
        return len(self._recent.get(url, ()))

    def unlearn(self, url: str) -> None:
        """What it was sent counts no more; `tidy` frees the memory."""
        self.retire(url, SENT, iter(self._recent.pop(url, ())))
