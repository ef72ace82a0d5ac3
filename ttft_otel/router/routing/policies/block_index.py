# SPDX-License-Identifier: Apache-2.0
"""Which instance has which blocks of prompts cached; policies ask through policy_state.py.

A block is identified by a key that stands for all tokens up to its end, so a flat
table of keys works like a trie of prefixes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from hashlib import blake2b
from itertools import islice, repeat
from operator import or_
from typing import Final

import msgspec

NO_EXTRA_KEYS: Final[Mapping[int, bytes]] = {}
# Keys are non-negative 63-bit integers, so 0 is free to mean "no parent".
_KEY_MASK: Final = (1 << 63) - 1


def compute_block_key(parent: int, token_ids: Sequence[int], extra_keys: bytes = b"") -> int:
    """The key of one block: 63 bits of BLAKE2b over the parent's key, its tokens and its extra keys.

    parent: key of the block before, 0 for the first. extra_keys: from `encode_extra_keys`.
    Raises OverflowError or TypeError for values that are not token ids.
    """
    # Fixed width, 32 bits: no two lists of ids have the same bytes.
    tokens = _pack_tokens(token_ids)
    # The length separates tokens from extra keys: no other block has the same bytes.
    data = (
        parent.to_bytes(8, "big") + len(tokens).to_bytes(4, "big") + tokens.tobytes() + extra_keys
    )
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big") & _KEY_MASK


def compute_block_keys(
    token_ids: Sequence[int], block_size: int, extra_keys: Mapping[int, bytes] = NO_EXTRA_KEYS
) -> tuple[int, ...]:
    """The keys of all full blocks of `block_size` tokens; a partial last block has none.

    extra_keys: by the position of the block in the prompt, from `encode_extra_keys`.
    """
    tokens = _pack_tokens(token_ids)
    keys, parent = [], 0
    # vLLM caches only full blocks, too.
    for position in range(len(tokens) // block_size):
        block = tokens[position * block_size : (position + 1) * block_size]
        parent = compute_block_key(parent, block, extra_keys.get(position, b""))
        keys.append(parent)
    return tuple(keys)


def encode_extra_keys(keys: Iterable[object] | None) -> bytes:
    """Encode the extra `keys` of a block, in the order of vLLM's KV events.

    That order is: LoRA adapter, (media item, offset) pairs, cache salt.
    """
    listed = list(keys or ())
    # The same bytes from a prompt and from an event, which tuples and lists both give.
    return msgspec.msgpack.encode(listed) if listed else b""


def _pack_tokens(token_ids: Sequence[int]) -> array[int]:
    # Most callers have one already: a long prompt need not be copied again.
    if isinstance(token_ids, array) and token_ids.typecode == "I":
        return token_ids
    return array("I", token_ids)


# Blocks freed per step of `free_retired`; between two steps the event loop may run other tasks.
BLOCKS_PER_STEP: Final = 256
# Blocks evicted at once after the limit was lowered; evicting all would block the event loop.
MAX_EXCESS_FREED: Final = 4096
# Pseudo data-parallel rank for blocks inferred from prompts sent; reported ones have ranks from 0.
SENT_RANK: Final = -1
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


class BlockHolders:
    """The caches that hold each block, as a bit mask with one bit per cache.

    One walk along the prompt therefore answers for all instances. `add_blocks` and `remove_blocks` keep it
    up to date. An instance with several caches (data-parallel ranks) counts as its best one.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size  # tokens per block
        self._bits: dict[tuple[str, int], int] = {}
        self._masks: dict[str, int] = {}  # the bits of all caches of an instance
        self._owners: dict[int, tuple[str, int]] = {}  # (URL, bit) by `bit.bit_length()`
        # Freed late, because clearing a bit in millions of masks would block the event loop.
        # Bits of removed caches, still set in some masks, and the blocks of these.
        self._retired: deque[tuple[int, Iterator[int]]] = deque()
        self._holders = PartitionedTable()

    def __len__(self) -> int:
        return len(self._holders)

    def match_blocks(self, blocks: Sequence[int], urls: Sequence[str]) -> list[int]:
        """For each of `urls`, the number of leading `blocks` that the instance has cached."""
        masks, holders, owners = self._masks, self._holders.parts, self._owners
        # One integer has the caches of all instances: each block
        # costs one dict look-up and one AND.
        remaining = reduce(or_, map(masks.get, urls, repeat(0)), 0)
        remaining &= holders[blocks[0] & PART_MASK].get(blocks[0], 0) if blocks else 0
        if not remaining:
            return [0] * len(urls)
        depths: dict[str, int] = {}
        for depth, block in enumerate(blocks):
            kept = remaining & holders[block & PART_MASK].get(block, 0)
            # The usual case along a shared prefix: nobody drops out at this block.
            if kept == remaining:
                continue
            lost, remaining = remaining ^ kept, kept
            # An instance with several caches ends with the depth of the one that lasts longest.
            while lost:
                # The highest bit first; owners are found by it without a search.
                url, bit = owners[lost.bit_length()]
                depths[url] = depth
                lost ^= bit
            if not remaining:
                break
        while remaining:
            url, bit = owners[remaining.bit_length()]
            depths[url] = len(blocks)
            remaining ^= bit
        return list(map(depths.get, urls, repeat(0)))

    def record_served(self, url: str, blocks: Sequence[int]) -> None:
        """Ignore it: the instances of this index report their blocks themselves."""

    def has_block(self, url: str, block: int, rank: int = 0) -> bool:
        """Whether the cache of data-parallel `rank` at `url` holds `block`."""
        return bool((self._holders.get(block) or 0) & self._bits.get((url, rank), 0))

    def add_blocks(self, url: str, blocks: Iterable[int], rank: int = 0) -> None:
        """Note that the cache of data-parallel `rank` at `url` now holds `blocks`."""
        bit = self._bits.get((url, rank))
        if bit is None:
            # Bits are distinct powers of two, so their sum is their union.
            used = sum(self._bits.values()) + sum({bit for bit, _ in self._retired})
            # The lowest unused bit. Bits of retired caches count as used until they are cleared.
            bit = ~used & (used + 1)
            self._bits[url, rank] = bit
            self._masks[url] = self._masks.get(url, 0) | bit
            self._owners[bit.bit_length()] = url, bit
        parts = self._holders.parts
        for block in blocks:
            holders = parts[block & PART_MASK]
            holders[block] = holders.get(block, 0) | bit

    def remove_blocks(self, url: str, blocks: Iterable[int], rank: int = 0) -> None:
        """Note that the cache of data-parallel `rank` at `url` no longer holds `blocks`."""
        self._clear_bit(self._bits.get((url, rank), 0), blocks)

    def retire_cache(self, url: str, rank: int, blocks: Iterator[int]) -> None:
        """Remove a cache at once from all answers; `free_retired` clears its bit later.

        blocks: all that the cache held. They are consumed lazily, since there may be millions.
        """
        bit = self._bits.pop((url, rank), 0)
        if bit:
            # No answer names the cache from now on, although masks still have its bit.
            del self._owners[bit.bit_length()]
            self._masks[url] ^= bit
            if not self._masks[url]:
                del self._masks[url]
            self._retired.append((bit, blocks))

    def free_retired(self) -> Iterator[None]:
        """Clear the bits of retired caches, yielding after each step; another iterator may go on with it."""
        while self._retired:
            cache = self._retired[0]
            chunk = list(islice(cache[1], BLOCKS_PER_STEP))
            self._clear_bit(cache[0], chunk)
            if not chunk:
                self._retired.popleft()
            yield

    def _clear_bit(self, bit: int, blocks: Iterable[int]) -> None:
        parts = self._holders.parts
        for block in blocks:
            holders = parts[block & PART_MASK]
            remaining_holders = holders.get(block, 0) & ~bit
            # A block that nobody holds leaves the table: else it
            # would grow with every prompt ever seen.
            if remaining_holders:
                holders[block] = remaining_holders
            else:
                holders.pop(block, None)


class RecentBlocks(OrderedDict[int, None]):
    """The most recently used blocks of one instance, at most `max_blocks`: an LRU model of its cache."""

    def __init__(self, max_blocks: int) -> None:
        super().__init__()
        self.max_blocks = max_blocks

    def match_blocks(self, blocks: Sequence[int]) -> int:
        """The number of leading `blocks` that are present."""
        for depth, block in enumerate(blocks):
            if block not in self:
                return depth
        return len(blocks)

    def record_use(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Mark `blocks` as just used. Returns the blocks added and the blocks evicted for them."""
        added = [block for block in blocks if block not in self]
        # In reverse, so that the end of a prompt is evicted before its beginning, as vLLM does.
        for block in reversed(blocks):
            self[block] = None
            # Assigning to a key that is there does not move it.
            self.move_to_end(block)
        # Negative while there is room: range() is empty then.
        excess = min(len(self) - self.max_blocks, len(added) + MAX_EXCESS_FREED)
        evicted = [self.popitem(last=False)[0] for _ in range(excess)]
        return added, evicted


class SentHistory(BlockHolders):
    """Cached blocks estimated from the prompts sent, for instances that report nothing.

    Args:
        block_size: tokens per block.
        max_blocks: limit per instance.
        max_instances: instances remembered, each of which is a bit of every block's holders; the one that
            was used least recently is dropped first.
    """

    def __init__(self, block_size: int, max_blocks: int, max_instances: int = 1024) -> None:
        super().__init__(block_size)
        self.max_blocks = max_blocks
        self.max_instances = max_instances
        self._recent_by_url: dict[str, RecentBlocks] = {}
        self._followed_urls: Collection[str] | None = None  # None: no restriction

    def sync_instances(self, urls: Collection[str]) -> None:
        """Track exactly the instances in `urls`; later completions at others are ignored."""
        # An answer that comes late must not bring a removed instance back: see record_served().
        self._followed_urls = frozenset(urls)
        for url in self._recent_by_url.keys() - self._followed_urls:
            self.forget_instance(url)

    def record_served(self, url: str, blocks: Sequence[int]) -> None:
        """Note that the instance at `url` has just computed a prompt of `blocks`."""
        if self._followed_urls is not None and url not in self._followed_urls:
            return
        # Taken out and put in again: dicts keep the order of insertion, here that of use.
        recent = self._recent_by_url.pop(url, None)
        if recent is None:
            recent = RecentBlocks(self.max_blocks)
            if len(self._recent_by_url) >= self.max_instances:
                self.forget_instance(next(iter(self._recent_by_url)))
        self._recent_by_url[url] = recent
        added, evicted = recent.record_use(blocks)
        self.add_blocks(url, added, SENT_RANK)
        self.remove_blocks(url, evicted, SENT_RANK)
        # Free at least as many blocks as were added, so that memory is bounded without a task.
        for _ in islice(self.free_retired(), 2 + len(added) // BLOCKS_PER_STEP):
            pass

    def set_max_blocks(self, max_blocks: int) -> None:
        """Set the limit per instance to `max_blocks`; the excess is evicted as new blocks are added."""
        self.max_blocks = max_blocks
        for recent in self._recent_by_url.values():
            recent.max_blocks = max_blocks

    def set_block_size(self, block_size: int) -> None:
        """Use blocks of `block_size` tokens, as an instance reported."""
        # Keys of the former size stay and match nothing; newer ones push them out.
        self.block_size = block_size

    def count_blocks(self, url: str) -> int:
        """The number of blocks remembered for the instance at `url`."""
        return len(self._recent_by_url.get(url, ()))

    def forget_instance(self, url: str) -> None:
        """Drop what the instance at `url` was sent; `free_retired` frees the memory."""
        self.retire_cache(url, SENT_RANK, iter(self._recent_by_url.pop(url, ())))
