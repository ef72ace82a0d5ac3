# SPDX-License-Identifier: Apache-2.0
"""The blocks that one cache of an engine holds, from its KV events; event_feed.py applies them.

Engines identify a block by their own hash, and a removal names only that hash; the ledger maps it to
the router's block key and updates the index (ReportedIndex), which all ledgers share. A block may be cached
several times, because concurrent requests each compute it, and the engine reports the removal of each copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from ttft_otel.router.errors import MalformedEvents
from ttft_otel.router.routing.policies.block_index import (
    PartitionedTable,
    SentHistory,
    compute_block_key,
    encode_extra_keys,
)
from ttft_otel.router.routing.prefixes.kv_event_parser import (
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    decode_extra_keys,
)

MAX_BLOCKS_PER_CACHE: Final = 2_000_000  # further blocks are counted as dropped, and as not cached
# Media whose removals vLLM reports; blocks on others would seem to stay forever. The values mark hashes
# (64 bits) by medium, since a block may be on both.
MEDIUM_MARKS: Final = {"GPU": 0, "CPU": 1 << 64}
# KV cache kinds in which a block attends to all tokens before it, so that it implies its whole prefix;
# sliding-window groups, for instance, keep blocks without their prefix. "": releases that do not say.
PREFIX_CACHE_KINDS: Final = ("", "full_attention", "mla_attention", "sink_full_attention")
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
        self.max_reported = max_reported
        self.reported_blocks = 0
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


class BlockLedger:
    """The blocks of one data-parallel rank.

    counts: events by what became of them, for /metrics. cache_group: the KV cache group that is tracked, the
    first with a kind in PREFIX_CACHE_KINDS; None until one was seen.
    """

    def __init__(
        self, index: ReportedIndex, url: str, rank: int, max_blocks: int = MAX_BLOCKS_PER_CACHE
    ) -> None:
        self.index = index
        self.url = url
        self.rank = rank
        self.max_blocks = max_blocks
        self.counts: Counter[str] = Counter()
        self.cache_group: int | None = None
        self._size = 0
        self._keys_by_hash = PartitionedTable()  # the router's key by engine hash | medium mark
        # Copies beyond the first, by engine hash | medium mark.
        self._extra_copies: dict[int, int] = {}
        # Engine hashes or media beyond the first, by block key.
        self._extra_hashes: dict[int, int] = {}

    def __len__(self) -> int:
        return self._size

    def apply_event(self, event: KvEvent) -> Iterator[None]:
        """Apply `event`, yielding after each block and at its end so that other tasks can run.

        Raises MalformedEvents.
        """
        if isinstance(event, BlocksRemoved):
            yield from self._remove_blocks(event)
        elif isinstance(event, BlocksStored):
            yield from self._store_blocks(event)
        else:
            self.counts[event] += 1
            if event == "cleared":
                self.clear_blocks()
                # Each cache that waits to be freed makes the masks of all others longer.
                yield from self.index.free_retired()
        yield

    def clear_blocks(self) -> None:
        """Forget all blocks at once; the memory of the index is freed later, by `free_retired`."""
        self.index.blocks_by_url[self.url] -= self._size
        self.index.retire_cache(
            self.url, self.rank, self.index.release_blocks(self._keys_by_hash.drain_values())
        )
        self._keys_by_hash = PartitionedTable()
        self._extra_copies = {}
        self._extra_hashes = {}
        self._size = 0

    def _store_blocks(self, event: BlocksStored) -> Iterator[None]:
        mark = self._find_medium_mark(event)
        if mark is None:
            return
        # Offloaded to the CPU: the GPU may or may not hold it still.
        if mark:
            yield from self._store_copies(event, mark)
            return
        # 0: the block begins a prompt (block_index.py).
        parent_key = 0 if event.parent_hash is None else self._find_key(event.parent_hash)
        size, ids, keys = event.block_size, event.token_ids, event.extra_keys
        # An orphan follows a block that was never reported: its prefix, hence its key, is unknown.
        if parent_key is None:
            self.counts["orphans"] += len(event.hashes)
        elif size <= 0 or len(ids) != size * len(event.hashes):
            self.counts["odd"] += len(event.hashes)
        elif not self.index.set_instance_block_size(self.url, size):
            self.counts["other_size"] += len(event.hashes)
        else:
            for position, key in enumerate(event.hashes):
                tokens = ids[position * size : (position + 1) * size]
                try:
                    extra = encode_extra_keys(decode_extra_keys(keys[position])) if keys else b""
                    parent_key = compute_block_key(parent_key, tokens, extra)
                except (TypeError, OverflowError) as error:
                    raise MalformedEvents("invalid token ids") from error
                self._add_block(key, parent_key)
                yield

    def _store_copies(self, event: BlocksStored, mark: int) -> Iterator[None]:
        # Events of offloaded blocks lack token ids and extra keys: only blocks that were on the GPU before
        # can be identified.
        for key in event.hashes:
            block_key = self._find_key(key)
            if block_key is None:
                self.counts["orphans"] += 1
            elif key | mark not in self._keys_by_hash:
                self._add_block(key | mark, block_key)
            yield

    def _add_block(self, key: int, block_key: int) -> None:
        # Two requests computed it side by side; it is cached until both copies are gone.
        if key in self._keys_by_hash:
            self._extra_copies[key] = self._extra_copies.get(key, 0) + 1
        elif self._size >= self.max_blocks or self.index.is_full_for(self.url):
            self.counts["dropped"] += 1
        else:
            self._keys_by_hash[key] = block_key
            self._size += 1
            self.index.reported_blocks += 1
            self.index.blocks_by_url[self.url] += 1
            self.counts["stored"] += 1
            # Two engine hashes with one key of ours, or GPU and CPU:
            # the index keeps one bit for both.
            if self.index.has_block(self.url, block_key, self.rank):
                self._extra_hashes[block_key] = self._extra_hashes.get(block_key, 0) + 1
            else:
                self.index.add_blocks(self.url, (block_key,), self.rank)

    def _remove_blocks(self, event: BlocksRemoved) -> Iterator[None]:
        mark = MEDIUM_MARKS.get(event.medium)
        # What was not counted when it was stored must not be taken away.
        if mark is None or event.cache_group != self.cache_group:
            return
        for block_hash in event.hashes:
            key = block_hash | mark
            if not _take_one_away(self._extra_copies, key) and key in self._keys_by_hash:
                self.counts["removed"] += 1
                self._size -= 1
                self.index.reported_blocks -= 1
                self.index.blocks_by_url[self.url] -= 1
                block_key = self._keys_by_hash.pop(key)
                if not _take_one_away(self._extra_hashes, block_key):
                    self.index.remove_blocks(self.url, (block_key,), self.rank)
            yield

    def _find_medium_mark(self, event: BlocksStored) -> int | None:
        """The mark of the event's medium; None if medium or cache group is not tracked."""
        mark = MEDIUM_MARKS.get(event.medium)
        if mark is None:
            self.counts["other_medium"] += len(event.hashes)
        elif event.cache_kind not in PREFIX_CACHE_KINDS or self.cache_group not in (
            None,
            event.cache_group,
        ):
            self.counts["other_group"] += len(event.hashes)
            return None
        else:
            self.cache_group = event.cache_group
        return mark

    def _find_key(self, block_hash: int) -> int | None:
        # The GPU first: a block is usually there.
        for mark in MEDIUM_MARKS.values():
            block_key = self._keys_by_hash.get(block_hash | mark)
            if block_key is not None:
                return block_key
        return None


def _take_one_away(counts: dict[int, int], key: int) -> bool:
    """Decrement the count of `key`, removing it at zero; False if there was none."""
    count = counts.get(key, 0)
    if count > 1:
        counts[key] = count - 1
    elif count:
        del counts[key]
    return count > 0
