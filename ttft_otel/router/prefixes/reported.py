# SPDX-License-Identifier: Apache-2.0
"""The index behind KV events: what engines report, and what the others were sent; policies read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ttft_otel.router.policies.index import History

TOTAL: Final = 4_000_000  # blocks that all caches may report: 1 GB


class Reported(History):
    """Instances in `reporting` are known by their events; their block size is the index's.

    Numbers of blocks of another size would never match a prompt's: such instances are told off.
    `held` counts the blocks of all ledgers, until their memory is freed; more than `total` are too many.
    """

    def __init__(self, size: int, most: int, total: int = TOTAL) -> None:
        super().__init__(size, most)
        self.total, self.held = total, 0
        self.reporting: set[str] = set()
        self.sizes: dict[str, int] = {}

    def served(self, url: str, blocks: Sequence[int]) -> None:
        """Who reports has said, or will say, itself what it keeps of it."""
        if url not in self.reporting:
            super().served(url, blocks)

    def hint(self, size: int) -> None:
        """What an instance says elsewhere; good until one reports."""
        if size and not self.sizes:
            self.size = size

    @property
    def full(self) -> bool:
        """Whether ledgers may hold no more."""
        return self.held >= self.total

    def freed(self, blocks: Iterator[int]) -> Iterator[int]:
        """What a ledger held, which leaves as it is given."""
        for block in blocks:
            self.held -= 1
            yield block

    def learn(self, url: str, size: int) -> bool:
        """An instance's blocks are this long; whether the index can hold them."""
        if self.sizes.get(url) == size == self.size:
            return True
        self.sizes[url] = size
        if self.size not in self.sizes.values():
            self.size = size
        return size == self.size

    def report(self, url: str) -> None:
        """It reports from now on: what it was sent counts no more."""
        if url not in self.reporting:
            self.reporting.add(url)
            self.unlearn(url)

    def leave(self, url: str) -> None:
        """It reports no longer."""
        self.reporting.discard(url)
        self.sizes.pop(url, None)
