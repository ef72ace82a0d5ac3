# SPDX-License-Identifier: Apache-2.0
"""The index of cached blocks and its keys, and what it believes of an engine after any order of KV events."""

from __future__ import annotations

import asyncio
import itertools
import tracemalloc
from array import array
from collections import defaultdict, deque
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.fake_vllm.prefix_cache import (
    FakeEngine,
    build_removed_event,
    build_stored_event,
    encode_batch,
)
from ttft_otel.router.routing.policies.block_index import (
    PART_COUNT,
    BlockHolders,
    SentHistory,
    compute_block_key,
    compute_block_keys,
    encode_extra_keys,
)
from ttft_otel.router.routing.prefixes.kv_events import (
    BlockLedger,
    BlocksStored,
    EventFeed,
    ReportedIndex,
)

URLS = ("a", "b", "c")
BLOCK_LISTS = st.lists(st.integers(0, 2 * PART_COUNT + 1), max_size=6)
ACTION_LISTS = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "retire", "tidy"]),
        st.sampled_from(URLS),
        st.integers(0, 1),
        BLOCK_LISTS,
    ),
    max_size=30,
)


def count_held_prefix(blocks: list[int], held: set[int]) -> int:
    """How many of them, from the first on, are held."""
    return next((at for at, block in enumerate(blocks) if block not in held), len(blocks))


@settings(deadline=None)
@given(ACTION_LISTS, BLOCK_LISTS)
def test_sets(acts: list[tuple[str, str, int, list[int]]], asked: list[int]) -> None:
    """After any order of updates an instance's match is the longest of its caches', as with plain sets."""
    index = BlockHolders(16)
    held: dict[tuple[str, int], set[int]] = defaultdict(set)
    for act, url, rank, blocks in acts:
        if act == "add":
            index.add_blocks(url, blocks, rank)
            held[url, rank] |= set(blocks)
        elif act == "remove":
            index.remove_blocks(url, blocks, rank)
            held[url, rank] -= set(blocks)
        elif act == "retire":
            index.retire_cache(url, rank, iter(held.pop((url, rank), ())))
        else:
            next(index.free_retired(), None)  # left off after one step

    assert index.match_blocks(asked, URLS) == [
        max(count_held_prefix(asked, held[url, rank]) for rank in (0, 1)) for url in URLS
    ]
    for url in URLS:
        assert index.has_block(url, 5, 1) == (5 in held[url, 1])
    for (url, rank), own in held.items():
        index.retire_cache(url, rank, iter(own))
    assert not any(index.match_blocks(asked, URLS))
    deque(index.free_retired(), 0)
    assert len(index) == 0


def test_unlearn() -> None:
    """Blocks of a removed instance count no more at once; their memory is freed in steps."""
    index = SentHistory(16, 10_000)
    index.record_served("a", range(5_000))
    index.record_served("b", range(4_000, 6_000))

    index.forget_instance("a")

    assert index.match_blocks(range(5), ["a"]) == [0]
    assert index.count_blocks("a") == 0
    assert len(index) == 6_000
    steps = sum(1 for _ in index.free_retired())
    assert steps > 10
    assert len(index) == 2_000
    index.record_served("a", range(4_000, 4_002))
    assert index.match_blocks(range(4_000, 6_000), ["a", "b"]) == [2, 2_000]


def test_limit() -> None:
    """A lower limit also holds for blocks that are already there, and is reached in steps."""
    index = SentHistory(16, 10_000)
    index.record_served("a", range(10_000))
    index.set_max_blocks(100)

    index.record_served("a", range(10_000, 10_001))
    assert 100 < index.count_blocks("a") < 10_000
    for block in range(10_001, 10_010):
        index.record_served("a", range(block, block + 1))

    assert index.count_blocks("a") == len(index) == 100
    assert index.match_blocks(range(10_000, 10_010), ["a"]) == [10]


def test_too_many_instances() -> None:
    """For one instance too many the oldest counts no more at once; its memory goes in steps."""
    index = SentHistory(16, 10_000, max_instances=2)
    index.record_served("a", range(10_000))
    index.record_served("b", range(10_000, 10_001))

    index.record_served("c", range(10_001, 10_002))

    assert index.match_blocks(range(5), ["a"]) == [0]
    assert 9_000 < len(index) < 10_000
    for _ in range(30):
        index.record_served("c", range(10_001, 10_002))
    assert len(index) == 2


def test_history() -> None:
    """What was sent counts as cached; the latest blocks stay, ends of prompts go before beginnings."""
    index = SentHistory(16, 6)
    index.record_served("a", range(4))
    index.record_served("b", range(2))

    assert index.match_blocks(range(5), URLS) == [4, 2, 0]
    index.record_served("a", range(10, 14))
    assert index.match_blocks(range(5), URLS) == [2, 2, 0]
    for number in range(0, 10_000, 3):
        index.record_served("a", range(number, number + 3))
        index.record_served("b", range(number, number + 3))
    assert len(index) == 6


def test_history_memory() -> None:
    """A million blocks of history are held in 300 MB."""
    count = 20_000
    index = SentHistory(16, count)
    tracemalloc.start()
    try:
        for start in range(0, count, 100):
            index.record_served("a", tuple((start + n) * 2**40 + 7 for n in range(100)))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(index) == count
    assert used / count < 300


TOKEN_ID_LISTS = st.lists(st.integers(0, 2**32 - 1), max_size=70)


@given(TOKEN_ID_LISTS, st.integers(1, 9))
def test_chain(ids: list[int], size: int) -> None:
    """All numbers at once are those that come one after the other, of full blocks only."""
    parent, chain = 0, []
    for at in range(0, len(ids) - size + 1, size):
        parent = compute_block_key(parent, ids[at : at + size])
        chain.append(parent)

    assert (
        compute_block_keys(ids, size) == tuple(chain) == compute_block_keys(array("q", ids), size)
    )
    assert all(0 < each < 2**63 for each in chain)


@given(TOKEN_ID_LISTS, TOKEN_ID_LISTS, st.integers(1, 9))
def test_prefix(one: list[int], other: list[int], size: int) -> None:
    """Two prompts share as many numbers as they share full blocks from the first token on."""
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    pairs = zip(compute_block_keys(one, size), compute_block_keys(other, size), strict=False)

    assert [a == b for a, b in pairs].count(True) == shared // size


def test_extra_keys() -> None:
    """What else the engine hashes changes the block and all after it, and none before it."""
    plain = compute_block_keys(range(12), 4)
    image = compute_block_keys(range(12), 4, {1: encode_extra_keys([("item", 0)])})

    assert image[0] == plain[0]
    assert not {*image[1:]} & {*plain[1:]}


def test_keys() -> None:
    """Decoded events have lists where vLLM had tuples; neither order nor type of keys is lost."""
    assert encode_extra_keys((("item", 3), "salt")) == encode_extra_keys([["item", 3], "salt"])
    assert len({*map(encode_extra_keys, (["a", "b"], ["b", "a"], ["ab"], [b"ab"]))}) == 4


@pytest.mark.parametrize("ids", [[-1], [2**32], ["a"], [1.5]])
def test_no_ids(ids: Any) -> None:
    """What cannot be a token id is an error, not another block's number."""
    with pytest.raises((OverflowError, TypeError)):
        compute_block_key(0, ids)


INSTANCE_URL = "http://127.0.0.1:8001"
BLOCK_TOKENS = 4
# Few tokens and short prompts: prefixes are shared all the time.
PROMPT_IDS = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(
    lambda bits: [bit for bit in bits for _ in range(BLOCK_TOKENS)]
)
ENGINE_ACTIONS = st.one_of(
    st.tuples(st.just("serve"), PROMPT_IDS),
    st.tuples(st.just("twice"), PROMPT_IDS),
    st.tuples(st.just("evict"), st.integers(0, 9)),
    st.tuples(st.sampled_from(["clear", "restart", "swap", "meet", "nothing"])),
)
# What happens, and what becomes of the message that tells it.
STEP_LISTS = st.lists(
    st.tuples(
        ENGINE_ACTIONS, st.sampled_from(["heard", "heard", "lost", "lost", "twice", "later"])
    ),
    min_size=3,
    max_size=30,
)
DISTINCT_BLOCKS = [[bit] * BLOCK_TOKENS for bit in (0, 1)]


def list_prompts(depth: int = 4) -> list[list[int]]:
    """All prompts that the engine may have been asked, up to so many blocks."""
    return [
        [token for block in blocks for token in block]
        for length in range(depth + 1)
        for blocks in itertools.product(DISTINCT_BLOCKS, repeat=length)
    ]


class FeedHarness:
    """One engine, one feed, and a wire between them that loses and repeats."""

    def __init__(self, engine: FakeEngine, with_replays: bool = True) -> None:
        self.engine = engine
        self.index = ReportedIndex(BLOCK_TOKENS, 100)
        self.feed = EventFeed(
            BlockLedger(self.index, INSTANCE_URL, 0),
            engine.replay_messages if with_replays else None,
        )

    async def apply_action(self, name: str, *rest: Any) -> None:
        """One thing happens."""
        if name in ("restart", "swap"):  # of the latter only that it is away
            self.engine.restart()
        if name == "swap":
            self.feed.handle_disconnected()
        if name in ("restart", "meet"):
            await self.feed.handle_connected()
        if name in ("serve", "twice"):
            self.engine.compute_prompt(*rest, twice=name == "twice")
        if name == "evict":
            self.engine.evict_block(*rest)
        if name == "clear":
            self.engine.clear_cache()

    async def deliver_events(self, fate: str) -> None:
        """The engine says what has happened; or it says it later, with the next."""
        message = None if fate == "later" else self.engine.take_message()
        if message is not None and fate != "lost":
            for _ in range(1 + (fate == "twice")):
                await self.feed.receive_message(*message)

    def count_indexed_blocks(self, ids: list[int]) -> int:
        """Blocks that the index believes to be there."""
        return self.index.match_blocks(compute_block_keys(ids, BLOCK_TOKENS), [INSTANCE_URL])[0]


async def run_steps(harness: FeedHarness, steps: list[tuple[Any, ...]]) -> None:
    """All steps; then a last message that arrives, so that no loss is unheard of."""
    await harness.feed.handle_connected()
    for act, fate in steps:
        await harness.apply_action(*act)
        await harness.deliver_events(fate)
    harness.engine.compute_prompt([7] * BLOCK_TOKENS)
    await harness.deliver_events("heard")
    harness.engine.compute_prompt([8] * BLOCK_TOKENS)
    await harness.deliver_events("heard")


@settings(max_examples=2 * settings.default.max_examples, deadline=None)
@given(STEP_LISTS, st.booleans())
def test_equal(steps: list[tuple[Any, ...]], arrays: bool) -> None:
    """When all messages can be replayed, the index equals the engine's cache, whatever was lost."""
    world = FeedHarness(FakeEngine(BLOCK_TOKENS, as_arrays=arrays))

    asyncio.run(run_steps(world, steps))

    assert {tuple(ids): world.count_indexed_blocks(ids) for ids in list_prompts()} == {
        tuple(ids): world.engine.count_cached_blocks(ids) for ids in list_prompts()
    }
    copies = len(world.engine.block_copies)
    assert len(world.index) == len(world.feed.ledger) == world.index.reported_blocks == copies


@settings(max_examples=2 * settings.default.max_examples, deadline=None)
@given(STEP_LISTS, st.integers(1, 3), st.booleans(), st.booleans())
def test_never_more(
    steps: list[tuple[Any, ...]], guard_keeps: int, answers: bool, replays: bool
) -> None:
    """When messages cannot be replayed, the index has no block that the engine does not have."""
    world = FeedHarness(
        FakeEngine(BLOCK_TOKENS, max_kept_messages=guard_keeps, answers_replays=answers),
        with_replays=replays,
    )

    asyncio.run(run_steps(world, steps))

    for ids in list_prompts():
        assert world.count_indexed_blocks(ids) <= world.engine.count_cached_blocks(ids)
    assert len(world.index) <= len(world.engine.block_copies)


async def test_backwards() -> None:
    """Numbers that begin anew are another engine's, whose messages are all asked for at once."""
    world = FeedHarness(FakeEngine(BLOCK_TOKENS))
    first, second = [1] * 3 * BLOCK_TOKENS, [2] * BLOCK_TOKENS

    await world.feed.handle_connected()
    for ids in (first, second):
        world.engine.compute_prompt(ids)
        await world.deliver_events("heard")
    world.engine.restart()
    world.engine.compute_prompt(second)
    await world.deliver_events("lost")
    world.engine.compute_prompt([3] * BLOCK_TOKENS)
    await world.deliver_events("heard")

    assert [world.count_indexed_blocks(ids) for ids in (first, second, [3] * BLOCK_TOKENS)] == [
        0,
        1,
        1,
    ]
    assert world.feed.counts["restarts"] == 1


class HeardFeed(FeedHarness):
    """An engine whose messages are the test's own, numbered from 0 on; none can be replayed."""

    def __init__(self, *batches: bytes) -> None:
        super().__init__(FakeEngine(BLOCK_TOKENS), with_replays=False)
        self.heard_count = 0
        self.ledger = self.feed.ledger
        self.hear(*batches)

    def hear(self, *batches: bytes) -> None:
        """These messages arrive in turn."""
        for batch in batches:
            asyncio.run(self.feed.receive_message(self.heard_count, batch))
            self.heard_count += 1


@pytest.mark.parametrize("arrays", [False, True])
def test_bytes(arrays: bool) -> None:
    """Hashes may be bytes, of which a removal may be told as the integer that they end with."""
    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    names = [bytes(31) + b"\x01", bytes(31) + b"\x02"]
    later = build_stored_event(names[1:], ids[4:], parent_block_hash=names[0])
    world = HeardFeed(
        encode_batch(build_stored_event(names[:1], ids[:4]), as_arrays=arrays),
        encode_batch(later, as_arrays=arrays),
    )

    assert world.count_indexed_blocks(ids) == 2
    world.hear(encode_batch(build_removed_event(2), as_arrays=arrays))
    assert world.count_indexed_blocks(ids) == 1


def test_shorter() -> None:
    """Older releases leave fields out at the end, newer ones add some; both are read."""
    older = ["BlockStored", [1], None, [1, 2, 3, 4], 4]
    newer = {
        **build_stored_event([2], [5, 6, 7, 8]),
        "parent_block_hash": 1,
        "another": {"field": 1},
    }
    assert HeardFeed(encode_batch(), encode_batch(newer)).ledger.counts["orphans"] == 1

    world = HeardFeed(
        msgspec.msgpack.encode([0.0, [older]]), encode_batch(newer, {"type": "BlockMoved"})
    )
    assert world.count_indexed_blocks([1, 2, 3, 4, 5, 6, 7, 8]) == 2
    assert world.ledger.counts["unknown"] == 1


def test_extra() -> None:
    """Blocks of an adapter, a picture or a salt are no text prompt's, but theirs that has the same."""
    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    keys = [["adapter"], ["adapter", ["picture", 0]]]
    first = compute_block_key(0, ids[:4], encode_extra_keys(keys[0]))
    both = (first, compute_block_key(first, ids[4:], encode_extra_keys(keys[1])))

    # Releases without extra keys tell the adapter alone.
    for more, blocks in (({"extra_keys": keys}, 2), ({}, 1)):
        stored = build_stored_event([1, 2], ids, lora_name="adapter", **more)
        world = HeardFeed(encode_batch(stored))
        assert world.count_indexed_blocks(ids) == 0
        assert world.index.match_blocks(both, [INSTANCE_URL]) == [blocks]


def test_media() -> None:
    """What is offloaded stays though the GPU's copy goes; media that tell no end do not count."""
    ids = [1, 2, 3, 4]
    offloaded = build_stored_event([9], [], 0, medium="CPU")
    world = HeardFeed(
        encode_batch(build_stored_event([9], ids), offloaded), encode_batch(build_removed_event(9))
    )

    assert world.count_indexed_blocks(ids) == 1
    world.hear(encode_batch(build_removed_event(9, medium="CPU")))
    assert world.count_indexed_blocks(ids) == 0
    world = HeardFeed(encode_batch(build_stored_event([9], ids, medium="STORAGE"), offloaded))
    assert world.count_indexed_blocks(ids) == 0
    assert world.ledger.counts["other_medium"] == world.ledger.counts["orphans"] == 1


def test_groups() -> None:
    """Of a model with several kinds of attention the whole one counts."""
    ids = [1, 2, 3, 4]
    window = build_stored_event([9], ids, group_idx=0, kv_cache_spec_kind="sliding_window")
    whole = build_stored_event([9], ids, group_idx=1, kv_cache_spec_kind="full_attention")
    world = HeardFeed(
        encode_batch(window, whole), encode_batch(build_removed_event(9, group_idx=0))
    )

    assert world.count_indexed_blocks(ids) == 1
    world.hear(encode_batch(build_removed_event(9, group_idx=1)))
    assert world.count_indexed_blocks(ids) == 0


def test_sizes() -> None:
    """The first instance's block size is the index's; one with another size counts as empty."""
    world = HeardFeed(encode_batch(build_stored_event([1], [*range(8)], 8)))
    assert world.index.block_size == 8
    other = EventFeed(BlockLedger(world.index, "http://other", 0))
    stored = encode_batch(build_stored_event([1], [1, 2, 3, 4]))

    asyncio.run(other.receive_message(0, stored))

    keys = compute_block_keys([*range(8)], 8)
    assert world.index.match_blocks(keys, [INSTANCE_URL, "http://other"]) == [1, 0]
    assert other.ledger.counts["other_size"] == 1
    world.index.stop_reporting(INSTANCE_URL)
    asyncio.run(other.receive_message(1, stored))
    assert world.index.block_size == 4


def test_ranks() -> None:
    """With several data-parallel ranks the longest prefix of one rank counts, never a mixture."""
    ids = [*range(12)]
    stored = build_stored_event(range(3), ids)
    world = HeardFeed(encode_batch(stored))
    second = EventFeed(BlockLedger(world.index, INSTANCE_URL, 1))
    asyncio.run(second.receive_message(0, encode_batch(stored, build_removed_event(0))))

    assert world.count_indexed_blocks(ids) == 3
    world.ledger.clear_blocks()
    assert world.count_indexed_blocks(ids) == 0
    asyncio.run(second.receive_message(1, encode_batch(build_stored_event([0], ids[:4]))))
    assert world.count_indexed_blocks(ids) == 3


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        encode_batch({"type": "BlockStored"}),
        encode_batch(build_stored_event(["word"], [1, 2, 3, 4])),
        encode_batch(build_stored_event([5], [1, 2, 3, -4])),
        encode_batch(build_stored_event([5], [1, 2, 3, 4], extra_keys=[["a"], ["b"]])),
    ],
)
def test_malformed(payload: bytes) -> None:
    """A message that cannot be read may have held a removal: the cache counts as empty, and goes on."""
    ids = [1, 2, 3, 4]
    stored = encode_batch(build_stored_event([9], ids))
    world = HeardFeed(stored, payload)

    assert world.count_indexed_blocks(ids) == 0
    assert world.feed.counts["malformed"] == 1
    world.hear(stored)
    assert world.count_indexed_blocks(ids) == 1


def test_total() -> None:
    """Half of the index is for whoever comes first; of the rest each instance has its share, and no more."""
    index = ReportedIndex(BLOCK_TOKENS, 100)
    index.max_reported = 12
    feeds = [EventFeed(BlockLedger(index, f"http://{number}", 0)) for number in range(3)]
    index.reporting |= {feed.ledger.url for feed in feeds}

    def hear_batch(at: int, number: int, *events: Any) -> list[int]:
        asyncio.run(feeds[at].receive_message(number, encode_batch(*events)))
        return [len(feed.ledger) for feed in feeds]

    for at in range(3):
        known = hear_batch(at, 0, build_stored_event(range(6), [*range(at, at + 6 * BLOCK_TOKENS)]))
    assert known == [6, 2, 2] and len(index) == index.reported_blocks == 10
    assert [feed.ledger.counts["dropped"] for feed in feeds] == [0, 4, 4]
    assert hear_batch(1, 1, build_removed_event(0, 5)) == [6, 1, 2]  # it never had the last
    feeds[0].clear_state()
    deque(index.free_retired(), 0)
    later = build_stored_event(range(10, 16), [*range(9, 9 + 6 * BLOCK_TOKENS)])
    assert hear_batch(2, 1, later) == [0, 1, 5]
    assert index.reported_blocks == 6
    assert index.blocks_by_url == {"http://0": 0, "http://1": 1, "http://2": 5}


@pytest.mark.full
def test_memory() -> None:
    """A million blocks that instances report are held in 300 MB; of those that are gone their tables stay."""
    count, index = 125_000, ReportedIndex(16, 100)
    ledgers = [BlockLedger(index, f"http://{number}", 0) for number in range(8)]
    tracemalloc.start()
    try:
        for at, ledger in enumerate(ledgers):
            for start in range(0, count // len(ledgers), 125):
                # as long as an engine's, and no two prompts alike
                hashes = tuple((1 << 62) + (at << 20) + start + number for number in range(125))
                ids = [at, start, *range(16 * 125 - 2)]
                deque(ledger.apply_event(BlocksStored(hashes, None, ids, 16)), 0)
        used, _ = tracemalloc.get_traced_memory()
        assert len(index) == index.reported_blocks == count
        assert used / count < 300
        for ledger in ledgers:
            ledger.clear_blocks()
        deque(index.free_retired(), 0)
        assert tracemalloc.get_traced_memory()[0] < 0.3 * used
        assert len(index) == index.reported_blocks == 0
    finally:
        tracemalloc.stop()
