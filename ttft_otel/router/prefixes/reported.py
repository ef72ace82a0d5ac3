# SPDX-License-Identifier: Apache-2.0
"""The index behind KV events: what engines report, and what the others were sent; policies read it."""

from __future__ import annotations

from collections.abc import Sequence

from ttft_otel.router.policies.index import History


class Reported(History):
    """Instances in `reporting` are known by their events; their block size is the index's.

    Numbers of blocks of another size would never match a prompt's: such instances are told off.
    """

    def __init__(self, size: int, most: int) -> None:
        super().__init__(size, most)
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
