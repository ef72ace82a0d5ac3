# SPDX-License-Identifier: Apache-2.0
"""The index behind KV events: reported blocks, and estimates for instances that report none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from ttft_otel.router.routing.policies.block_index import SentHistory

MAX_REPORTED_BLOCKS: Final = 4_000_000  # reported blocks of all caches together: about 1 GB


class ReportedIndex(SentHistory):
    """Instances in `reporting` have their blocks reported; one block size holds for the whole index.

    Keys of blocks of another size never match a prompt's, so blocks of such instances are not added.
    max_blocks: estimated blocks per instance that reports none. max_reported: limit of reported blocks of
    all ledgers together, counted in `reported_blocks` until their memory is freed. blocks_by_url: those that
    are in ledgers now.
    """

    def __init__(
        self, block_size: int, max_blocks: int, max_reported: int = MAX_REPORTED_BLOCKS
    ) -> None:
        super().__init__(block_size, max_blocks)
        self.max_reported, self.reported_blocks = max_reported, 0
        self.blocks_by_url: Counter[str] = Counter()
        self.reporting: set[str] = set()
        self.block_sizes: dict[str, int] = {}

    def record_served(self, url: str, blocks: Sequence[int]) -> None:
        """Add the estimate for `url`, unless it reports its blocks itself."""
        if url not in self.reporting:
            super().record_served(url, blocks)

    def set_block_size(self, block_size: int) -> None:
        """Use `block_size` from /metrics as long as no instance has reported its own in an event."""
        # Events are the better source: they tell the size of the very blocks that are reported.
        if block_size and not self.block_sizes:
            self.block_size = block_size

    def is_full_for(self, url: str) -> bool:
        """Whether ledgers of the instance at `url` must not add further blocks.

        Half of the limit is for whoever comes first; of the other half each instance has its share, which
        one that reports without end cannot take from it.
        """
        half = self.max_reported // 2
        if self.reported_blocks < half:
            return False
        share = half // max(1, len(self.reporting))
        return self.reported_blocks >= self.max_reported or self.blocks_by_url[url] >= share

    def release_blocks(self, blocks: Iterator[int]) -> Iterator[int]:
        """Pass on `blocks` of a cleared ledger, uncounting each when it is consumed."""
        for block in blocks:
            # Only now is the memory free; the limit is about memory.
            self.reported_blocks -= 1
            yield block

    def set_instance_block_size(self, url: str, block_size: int) -> bool:
        """Note the `block_size` in events of `url`. Returns whether the index holds that size.

        The index switches to a new size when no instance has the current one any more.
        """
        if self.block_sizes.get(url) == block_size == self.block_size:
            return True
        self.block_sizes[url] = block_size
        # As long as one instance has it, its blocks in the index are of use.
        if self.block_size not in self.block_sizes.values():
            self.block_size = block_size
        return block_size == self.block_size

    def start_reporting(self, url: str) -> None:
        """Mark `url` as reporting, and drop its estimate."""
        if url not in self.reporting:
            self.reporting.add(url)
            self.forget_instance(url)

    def stop_reporting(self, url: str) -> None:
        """Mark `url` as not reporting; from now on its blocks are estimated."""
        self.reporting.discard(url)
        self.block_sizes.pop(url, None)
        # A Counter keeps keys with 0 for ever.
        if not self.blocks_by_url[url]:
            del self.blocks_by_url[url]
