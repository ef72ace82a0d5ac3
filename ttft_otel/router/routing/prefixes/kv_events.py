# SPDX-License-Identifier: Apache-2.0
"""The blocks that engines have cached, from vLLM's KV events; kv_events_source.py receives the messages.

A message is a msgpack batch: an array of timestamp, events and data-parallel rank (vLLM:
distributed/kv_events.py). Events are maps with a `type`, or in releases up to 0.20 arrays that begin
with it; trailing fields may be missing. Block hashes are integers, or bytes of which the last eight are
used.
Engines identify a block by their own hash, and a removal names only that hash; the ledger of a cache maps it
to the router's block key and updates the index (ReportedIndex), which all ledgers share. A block may be
cached several times, because concurrent requests each compute it, and the engine reports the removal of each
copy.
Messages are numbered from 0 at the start of the engine. Missing ones are requested again; if that
fails the cache is assumed empty, because a removal may have been lost. A restarted engine may reach
the same numbers again, so a replay includes the last applied message, which must be unchanged.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass
from time import monotonic
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta, Raw

from ttft_otel.router.errors import MalformedEvents, ReplayFailed
from ttft_otel.router.routing.policies.block_index import (
    PartitionedTable,
    SentHistory,
    compute_block_key,
    encode_extra_keys,
)
from ttft_otel.router.routing.prefixes.prefix_source import run_sliced

REMOVED_FIELDS: Final = ("block_hashes", "medium", "group_idx")
# vLLM's batches are those of one step; lists have their length in front, so that longer ones cost nothing.
MAX_EVENTS: Final = 200_000  # of a message
MAX_EVENT_BLOCKS: Final = 1 << 17
MAX_EVENT_TOKENS: Final = 1 << 20
MAX_EXTRA_KEYS: Final = 256  # of one block
# Of an extra key that is a list, such as a media item and its place.
MAX_EXTRA_LIST_BYTES: Final = 512
MAX_FIELDS: Final = 64  # of a batch or an event
_HASH_MASK: Final = (1 << 64) - 1
_PARSE_ERRORS: Final = (
    msgspec.MsgspecError,
    ValueError,
    TypeError,
    LookupError,
    RecursionError,  # lists in lists
)

# Fields are decoded by their types, one at a time: nothing is built of what is not read.
RawEvent: TypeAlias = "dict[str, Raw] | list[Raw]"


def _build_decoder(kind: Any) -> Callable[[bytes | Raw], Any]:
    return msgspec.msgpack.Decoder(kind).decode


_decode_batch: Final = _build_decoder(
    Annotated[dict[str, Raw], Meta(max_length=MAX_FIELDS)]
    | Annotated[list[Raw], Meta(max_length=MAX_FIELDS)]
)
_decode_event: Final = _decode_batch
_decode_events: Final = _build_decoder(Annotated[list[Raw], Meta(max_length=MAX_EVENTS)])
_decode_text: Final = _build_decoder(str)
_decode_block_keys: Final = _build_decoder(
    Annotated[list[Raw], Meta(max_length=MAX_EXTRA_KEYS)] | None
)
_decode_any: Final = _build_decoder(Any)
_decode_bytes: Final = _build_decoder(bytes)
_decode_optional_text: Final = _build_decoder(str | None)
_decode_optional_number: Final = _build_decoder(int | None)
# In the order of a stored event that is an array.
_FIELD_DECODERS: Final[Mapping[str, Callable[[bytes | Raw], Any]]] = {
    "block_hashes": _build_decoder(Annotated[list[int | bytes], Meta(max_length=MAX_EVENT_BLOCKS)]),
    "parent_block_hash": _build_decoder(int | bytes | None),
    "token_ids": _build_decoder(Annotated[list[int], Meta(max_length=MAX_EVENT_TOKENS)]),
    "block_size": _build_decoder(int),
    "lora_id": _build_decoder(int | str | None),
    "medium": _decode_optional_text,
    "lora_name": _decode_optional_text,
    "extra_keys": _build_decoder(Annotated[list[Raw], Meta(max_length=MAX_EVENT_BLOCKS)] | None),
    "group_idx": _decode_optional_number,
    "kv_cache_spec_kind": _decode_optional_text,
}


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks were stored."""

    hashes: tuple[int, ...]
    parent_hash: int | None  # of the block before them; None if they begin a prompt
    token_ids: Sequence[int]  # of all blocks together
    block_size: int
    medium: str = "GPU"
    extra_keys: Sequence[Raw] = ()  # one per block, for `decode_extra_keys`, or none
    cache_group: int = 0  # the KV cache group of a hybrid model
    cache_kind: str = ""  # its kind of attention, "" in releases that do not say


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """One copy of each of these blocks was evicted."""

    hashes: tuple[int, ...]
    medium: str = "GPU"
    cache_group: int = 0


# Events without blocks: the whole cache was reset, or one of a later release.
KvEvent: TypeAlias = "BlocksStored | BlocksRemoved | Literal['cleared', 'unknown']"


def iterate_kv_events(payload: bytes) -> Iterator[KvEvent]:
    """Parse a message event by event, in order.

    payload: msgpack. Each step takes a few tens of milliseconds at most, whatever is in it. Raises
    MalformedEvents, possibly after some events.
    """
    try:
        batch = _decode_batch(payload)
        # As a map, or in the order (timestamp, events, rank).
        events = _decode_events(batch["events"] if isinstance(batch, dict) else batch[1])
        for raw in events:
            yield _parse_event(_decode_event(raw))
    except _PARSE_ERRORS as error:
        raise MalformedEvents(
            f"{type(error).__name__} in a message of {len(payload)} bytes"
        ) from error


def decode_extra_keys(raw: Raw) -> list[Any]:
    """The extra keys of one block. Raises MalformedEvents."""
    try:
        return [_decode_extra_key(key) for key in _decode_block_keys(raw) or ()]
    except _PARSE_ERRORS as error:
        raise MalformedEvents("invalid extra keys") from error


def _decode_extra_key(raw: Raw) -> Any:
    """A number, a text, bytes, or a short list of these; texts come from clients and may be long."""
    if memoryview(raw).nbytes <= MAX_EXTRA_LIST_BYTES:
        return _decode_any(raw)
    try:
        return _decode_text(raw)
    except msgspec.ValidationError:
        return _decode_bytes(raw)


def _parse_event(raw: RawEvent) -> KvEvent:
    tag = _decode_text(raw["type"] if isinstance(raw, dict) else raw[0])
    if tag == "BlockRemoved":
        fields = _decode_fields(raw, REMOVED_FIELDS)
        return BlocksRemoved(
            _read_hashes(fields), fields.get("medium") or "GPU", fields.get("group_idx") or 0
        )
    if tag == "BlockStored":
        return _parse_stored(_decode_fields(raw, _FIELD_DECODERS))
    return "cleared" if tag == "AllBlocksCleared" else "unknown"


def _decode_fields(raw: RawEvent, names: Collection[str]) -> Mapping[str, Any]:
    # Shorter if a release lacks a field or omits defaults, longer if it has more fields.
    named = raw if isinstance(raw, dict) else dict(zip(names, raw[1:], strict=False))
    return {name: _FIELD_DECODERS[name](named[name]) for name in names if name in named}


def _parse_stored(fields: Mapping[str, Any]) -> BlocksStored:
    hashes, parent = _read_hashes(fields), fields.get("parent_block_hash")
    # Older releases tell only the adapter's number.
    adapter = fields.get("lora_name") or fields.get("lora_id")
    # Releases without `extra_keys` only report the adapter.
    extra = fields.get("extra_keys") or (
        [Raw(msgspec.msgpack.encode([adapter]))] * len(hashes) if adapter else ()
    )
    if extra and len(extra) != len(hashes):
        raise ValueError("extra_keys must have one entry per block")
    return BlocksStored(
        hashes,
        None if parent is None else _shorten_hash(parent),
        fields["token_ids"],
        fields["block_size"],
        fields.get("medium") or "GPU",
        extra,
        fields.get("group_idx") or 0,
        fields.get("kv_cache_spec_kind") or "",
    )


def _read_hashes(fields: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(map(_shorten_hash, fields["block_hashes"]))


def _shorten_hash(value: int | bytes) -> int:
    # 64 bits are plenty for one cache, and an int takes less memory than bytes.
    return int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value & _HASH_MASK


# Media whose removals vLLM reports; blocks on others would seem to stay forever. The values mark hashes
# (64 bits) by medium, since a block may be on both.
MEDIUM_MARKS: Final = {"GPU": 0, "CPU": 1 << 64}
# KV cache kinds in which a block attends to all tokens before it, so that it implies its whole prefix;
# sliding-window groups, for instance, keep blocks without their prefix. "": releases that do not say.
PREFIX_CACHE_KINDS: Final = ("", "full_attention", "mla_attention", "sink_full_attention")
# Reported blocks of all caches together: about 1 GB. Further ones are counted as dropped, and as not cached.
MAX_REPORTED_BLOCKS: Final = 4_000_000


class ReportedIndex(SentHistory):
    """Instances in `reporting` have their blocks reported; one block size holds for the whole index.

    Keys of blocks of another size never match a prompt's, so blocks of such instances are not added.
    max_blocks: estimated blocks per instance that reports none. max_reported: limit of reported blocks of
    all ledgers together, counted in `reported_blocks` until their memory is freed. blocks_by_url: those that
    are in ledgers now.
    """

    def __init__(self, block_size: int, max_blocks: int) -> None:
        super().__init__(block_size, max_blocks)
        self.max_reported = MAX_REPORTED_BLOCKS
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

    def __init__(self, index: ReportedIndex, url: str, rank: int) -> None:
        self.index = index
        self.url = url
        self.rank = rank
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
        elif self.index.is_full_for(self.url):
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


NO_MESSAGE: Final = -1  # the number before that of the first message


ReplayRequest = Callable[[int], AsyncGenerator[tuple[int, bytes], None]]


class EventFeed:
    """The messages of one data-parallel rank; its methods must not run concurrently, so take its lock.

    replay: requests all messages from a number on; None if the publisher has no replay socket.
    counts: events and incidents, for /metrics. last_applied: message number; None: accept any as next.
    is_connected, changed_at_s: whether it is connected, and the monotonic time since when, or of its start;
    its receiver sets them, at once also while a message is handled. task: that receives its messages.
    """

    task: asyncio.Task[None]

    def __init__(self, ledger: BlockLedger, replay: ReplayRequest | None = None) -> None:
        self.ledger = ledger
        self.replay = replay
        self.last_applied: int | None = None if replay is None else NO_MESSAGE
        self.counts: Counter[str] = Counter()
        # A replay awaits: without it the next message would be applied in the middle of that.
        self.lock = asyncio.Lock()
        self.is_connected = False
        self.changed_at_s = monotonic()
        self._is_disconnected = False
        self._last_heard = NO_MESSAGE
        self._last_payload = b""  # of the last applied message

    @property
    def is_live(self) -> bool:
        return self.is_connected and not self.task.done()

    async def handle_connected(self) -> None:
        """The connection to the publisher is up, for the first time or again."""
        self._is_disconnected = False
        if self.replay is None:
            # Messages published in between are lost, and the engine may have restarted.
            self.clear_state()
        else:
            await self._replay_missed()

    def handle_disconnected(self) -> None:
        """The connection is down: the next message may be of a restarted engine."""
        # Nothing is cleared yet: after a short interruption the replay fills the gap.
        self._is_disconnected = True
        self.counts["disconnects"] += 1

    async def receive_message(self, number: int, payload: bytes) -> None:
        """Handle a published message.

        number: counted by the engine from 0. payload: a batch of events in msgpack.
        """
        # A message can overtake the monitor's event that says the connection is back.
        if self._is_disconnected:
            await self.handle_connected()
        elif number <= self._last_heard:
            # The engine restarted, or the message arrived twice: the replay tells.
            await self._replay_missed()
        # What was heard, not what was applied: a replay may have run ahead of it.
        self._last_heard = number
        if self.last_applied is not None and number > self.last_applied + 1:
            self.counts["gaps"] += 1
            await self._replay_missed()
            # The replay did not fill the gap: a removal may have been lost.
            if self.last_applied is not None and number > self.last_applied + 1:
                self.clear_state()
        if self.last_applied is None or number > self.last_applied:
            await self._apply_message(number, payload)

    async def _replay_missed(self) -> None:
        """Request and apply all messages from the last applied one on; that one detects a restart."""
        if self.replay is None:
            self.clear_state()
            return
        self.counts["replays"] += 1
        try:
            # Closed at once when the rest is of no use, so that its socket is free.
            async with aclosing(self.replay(max(0, self.last_applied or 0))) as missed:
                is_same_engine = await self._apply_missed(missed)
        except ReplayFailed:
            self.counts["lost"] += 1
            self.clear_state()
            return
        if not is_same_engine:
            self.counts["restarts"] += 1
            self._last_heard = NO_MESSAGE
            self.clear_state()
            # From 0 now, since clear_state() has forgotten the
            # number: all that the new engine keeps.
            await self._replay_missed()
        elif self.last_applied is None:
            self.last_applied = NO_MESSAGE  # the engine has published nothing yet

    async def _apply_missed(self, missed: AsyncIterator[tuple[int, bytes]]) -> bool:
        """Apply replayed messages; returns whether they come from the same start of the engine."""
        last_applied = self.last_applied
        has_proof = last_applied is None or last_applied == NO_MESSAGE
        async for number, payload in missed:
            if not has_proof:
                has_proof = True
                if number == last_applied and payload != self._last_payload:
                    return False
                if number != last_applied:  # the engine no longer keeps the messages in between
                    self.clear_state()
            if self.last_applied is None or number > self.last_applied:
                await self._apply_message(number, payload)
        return has_proof

    async def _apply_message(self, number: int, payload: bytes) -> None:
        self.counts["messages"] += 1
        try:
            await run_sliced(self._apply_events(payload))
        except MalformedEvents:
            # Part of the message may be applied, and a removal may be in the rest.
            self.counts["malformed"] += 1
            self.clear_state()
        self.last_applied = number
        self._last_payload = payload
        # Between messages, so that memory of cleared caches does not pile up.
        await run_sliced(self.ledger.index.free_retired())

    def _apply_events(self, payload: bytes) -> Iterator[None]:
        for event in iterate_kv_events(payload):
            self.counts["events"] += 1
            yield from self.ledger.apply_event(event)

    def clear_state(self) -> None:
        """Assume an empty cache, and accept any message as the next."""
        if len(self.ledger):
            self.counts["clears"] += 1
        self.ledger.clear_blocks()
        self.last_applied = None
