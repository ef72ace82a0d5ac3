# SPDX-License-Identifier: Apache-2.0
"""What the index believes after any order of events, gaps, repetitions and restarts, against the engine."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections import deque
from typing import Any

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
    compute_block_key,
    compute_block_keys,
    encode_extra_keys,
)
from ttft_otel.router.routing.prefixes.block_ledger import BlockLedger, ReportedIndex
from ttft_otel.router.routing.prefixes.event_feed import EventFeed
from ttft_otel.router.routing.prefixes.kv_event_parser import BlocksStored

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
    prompt_lists: list[list[int]] = [[]]
    for _ in range(depth):
        prompt_lists += [
            each + block
            for each in prompt_lists
            for block in DISTINCT_BLOCKS
            if len(each) // BLOCK_TOKENS < depth
        ]
    return [list(each) for each in {tuple(each) for each in prompt_lists}]


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


def hear_payloads(*payloads: bytes, with_replays: bool = False) -> FeedHarness:
    """A world in which these messages were heard in turn."""
    harness = FeedHarness(FakeEngine(BLOCK_TOKENS), with_replays=with_replays)

    async def hear_all() -> None:
        for at, payload in enumerate(payloads):
            await harness.feed.receive_message(at, payload)

    asyncio.run(hear_all())
    return harness


@pytest.mark.parametrize("arrays", [False, True])
def test_bytes(arrays: bool) -> None:
    """Hashes may be bytes, of which a removal may be told as the integer that they end with."""
    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    names = [bytes(31) + b"\x01", bytes(31) + b"\x02"]
    world = hear_payloads(
        encode_batch(build_stored_event(names[:1], ids[:4]), as_arrays=arrays),
        encode_batch(
            build_stored_event(names[1:], ids[4:], parent_block_hash=names[0]), as_arrays=arrays
        ),
    )

    assert world.count_indexed_blocks(ids) == 2
    asyncio.run(
        world.feed.receive_message(2, encode_batch(build_removed_event(2), as_arrays=arrays))
    )
    assert world.count_indexed_blocks(ids) == 1


def test_shorter() -> None:
    """Older releases leave fields out at the end, newer ones add some; both are read."""
    older = ["BlockStored", [1], None, [1, 2, 3, 4], 4]
    newer = {
        **build_stored_event([2], [5, 6, 7, 8]),
        "parent_block_hash": 1,
        "another": {"field": 1},
    }
    world = hear_payloads(encode_batch(), encode_batch(newer))
    assert world.feed.ledger.counts["orphans"] == 1

    import msgspec

    world = hear_payloads(
        msgspec.msgpack.encode([0.0, [older]]), encode_batch(newer, {"type": "BlockMoved"})
    )
    assert world.count_indexed_blocks([1, 2, 3, 4, 5, 6, 7, 8]) == 2
    assert world.feed.ledger.counts["unknown"] == 1


def test_extra() -> None:
    """Blocks of an adapter, a picture or a salt are no text prompt's, but theirs that has the same."""
    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    keys = [["adapter"], ["adapter", ["picture", 0]]]
    world = hear_payloads(
        encode_batch(build_stored_event([1, 2], ids, extra_keys=keys, lora_name="adapter"))
    )

    first = compute_block_key(0, ids[:4], encode_extra_keys(keys[0]))
    both = (first, compute_block_key(first, ids[4:], encode_extra_keys(keys[1])))
    assert world.count_indexed_blocks(ids) == 0
    assert world.index.match_blocks(both, [INSTANCE_URL]) == [2]
    world = hear_payloads(encode_batch(build_stored_event([1, 2], ids, lora_name="adapter")))
    assert world.count_indexed_blocks(ids) == 0
    assert world.index.match_blocks(both, [INSTANCE_URL]) == [1]


def test_media() -> None:
    """What is offloaded stays though the GPU's copy goes; media that tell no end do not count."""
    ids = [1, 2, 3, 4]
    offloaded = build_stored_event([9], [], 0, medium="CPU")
    world = hear_payloads(
        encode_batch(build_stored_event([9], ids), offloaded), encode_batch(build_removed_event(9))
    )

    assert world.count_indexed_blocks(ids) == 1
    asyncio.run(world.feed.receive_message(2, encode_batch(build_removed_event(9, medium="CPU"))))
    assert world.count_indexed_blocks(ids) == 0
    world = hear_payloads(encode_batch(build_stored_event([9], ids, medium="STORAGE"), offloaded))
    assert world.count_indexed_blocks(ids) == 0
    assert world.feed.ledger.counts["other_medium"] == 1
    assert world.feed.ledger.counts["orphans"] == 1


def test_groups() -> None:
    """Of a model with several kinds of attention the whole one counts."""
    ids = [1, 2, 3, 4]
    window = build_stored_event([9], ids, group_idx=0, kv_cache_spec_kind="sliding_window")
    whole = build_stored_event([9], ids, group_idx=1, kv_cache_spec_kind="full_attention")
    world = hear_payloads(
        encode_batch(window, whole), encode_batch(build_removed_event(9, group_idx=0))
    )

    assert world.count_indexed_blocks(ids) == 1
    asyncio.run(world.feed.receive_message(2, encode_batch(build_removed_event(9, group_idx=1))))
    assert world.count_indexed_blocks(ids) == 0


def test_sizes() -> None:
    """The first instance's block size is the index's; one with another size counts as empty."""
    world = hear_payloads(encode_batch(build_stored_event([1], [*range(8)], 8)))
    assert world.index.block_size == 8
    other = EventFeed(BlockLedger(world.index, "http://other", 0))

    asyncio.run(other.receive_message(0, encode_batch(build_stored_event([1], [1, 2, 3, 4]))))

    assert world.index.match_blocks(
        compute_block_keys([*range(8)], 8), [INSTANCE_URL, "http://other"]
    ) == [1, 0]
    assert other.ledger.counts["other_size"] == 1
    world.index.stop_reporting(INSTANCE_URL)
    asyncio.run(other.receive_message(1, encode_batch(build_stored_event([1], [1, 2, 3, 4]))))
    assert world.index.block_size == 4


def test_ranks() -> None:
    """With several data-parallel ranks the longest prefix of one rank counts, never a mixture."""
    ids = [*range(12)]
    one, two = (
        encode_batch(build_stored_event(range(3), ids)),
        encode_batch(build_stored_event(range(3), ids), build_removed_event(0)),
    )
    world = hear_payloads(one)
    second = EventFeed(BlockLedger(world.index, INSTANCE_URL, 1))
    asyncio.run(second.receive_message(0, two))

    assert world.count_indexed_blocks(ids) == 3
    world.feed.ledger.clear_blocks()
    assert world.count_indexed_blocks(ids) == 0
    asyncio.run(second.receive_message(1, encode_batch(build_stored_event([0], ids[:4]))))
    assert world.count_indexed_blocks(ids) == 3


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93",
        encode_batch({"type": "BlockStored"}),
        encode_batch(build_stored_event(["word"], [1, 2, 3, 4])),
        encode_batch(build_stored_event([5], [1, 2, 3, -4])),
        encode_batch(build_stored_event([5], ["a", "b", "c", "d"])),
        encode_batch(build_stored_event([5], [1, 2, 3, 4], extra_keys=[["a"], ["b"]])),
    ],
)
def test_malformed(payload: bytes) -> None:
    """A message that cannot be read may have held a removal: the cache counts as empty, and goes on."""
    ids = [1, 2, 3, 4]
    world = hear_payloads(encode_batch(build_stored_event([9], ids)), payload)

    assert world.count_indexed_blocks(ids) == 0
    assert world.feed.counts["malformed"] == 1
    asyncio.run(world.feed.receive_message(2, encode_batch(build_stored_event([9], ids))))
    assert world.count_indexed_blocks(ids) == 1


async def test_bounded() -> None:
    """Blocks beyond the largest possible cache of an instance are not counted."""
    world = FeedHarness(FakeEngine(BLOCK_TOKENS), with_replays=False)
    world.feed.ledger.max_blocks = 10

    for at in range(100):
        await world.feed.receive_message(
            at, encode_batch(build_stored_event([at], [at] * BLOCK_TOKENS))
        )
    assert len(world.index) == len(world.feed.ledger) == 10
    assert world.feed.ledger.counts["dropped"] == 90


def test_total() -> None:
    """Half of the index is for whoever comes first; of the rest each instance has its share, and no more."""
    index = ReportedIndex(BLOCK_TOKENS, 100, max_reported=12)
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
    assert hear_batch(
        2, 1, build_stored_event(range(10, 16), [*range(9, 9 + 6 * BLOCK_TOKENS)])
    ) == [0, 1, 5]
    assert index.reported_blocks == 6
    assert index.blocks_by_url == {"http://0": 0, "http://1": 1, "http://2": 5}


@pytest.mark.full
def test_memory() -> None:
    """A million blocks that instances report are held in 300 MB; of those that are gone their tables stay."""
    index = ReportedIndex(16, 100)
    tracemalloc.start()
    try:
        ledgers = [BlockLedger(index, f"http://{number}", 0) for number in range(64)]
        for at, ledger in enumerate(ledgers):
            for start in range(0, 1_000_000 // 64, 125):
                # as long as an engine's, and no two prompts alike
                hashes = tuple((1 << 62) + (at << 20) + start + number for number in range(125))
                ids = [at, start, *range(16 * 125 - 2)]
                deque(ledger.apply_event(BlocksStored(hashes, None, ids, 16)), 0)
        used, _ = tracemalloc.get_traced_memory()
        assert len(index) == index.reported_blocks == 1_000_000
        assert used < 300e6
        for ledger in ledgers:
            ledger.clear_blocks()
        deque(index.free_retired(), 0)
        assert tracemalloc.get_traced_memory()[0] < 0.3 * used
        assert len(index) == index.reported_blocks == 0
    finally:
        tracemalloc.stop()
