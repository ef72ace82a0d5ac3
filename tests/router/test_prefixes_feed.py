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

from tests.router.engine import Engine, batch, removed, stored
from ttft_otel.router.policies.blocks import extra, number, numbers
from ttft_otel.router.prefixes.events import Stored
from ttft_otel.router.prefixes.feed import Feed
from ttft_otel.router.prefixes.ledger import Ledger
from ttft_otel.router.prefixes.reported import Reported

URL = "http://127.0.0.1:8001"
SIZE = 4
# Few tokens and short prompts: prefixes are shared all the time.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(
    lambda bits: [bit for bit in bits for _ in range(SIZE)]
)
ACTS = st.one_of(
    st.tuples(st.just("serve"), PROMPTS),
    st.tuples(st.just("twice"), PROMPTS),
    st.tuples(st.just("evict"), st.integers(0, 9)),
    st.tuples(st.sampled_from(["clear", "restart", "swap", "meet", "nothing"])),
)
# What happens, and what becomes of the message that tells it.
STEPS = st.lists(
    st.tuples(ACTS, st.sampled_from(["heard", "heard", "lost", "lost", "twice", "later"])),
    min_size=3,
    max_size=30,
)
EVERY = [[bit] * SIZE for bit in (0, 1)]


def prompts(depth: int = 4) -> list[list[int]]:
    """All prompts that the engine may have been asked, up to so many blocks."""
    found: list[list[int]] = [[]]
    for _ in range(depth):
        found += [each + block for each in found for block in EVERY if len(each) // SIZE < depth]
    return [list(each) for each in {tuple(each) for each in found}]


class World:
    """One engine, one feed, and a wire between them that loses and repeats."""

    def __init__(self, engine: Engine, replays: bool = True) -> None:
        self.engine = engine
        self.index = Reported(SIZE, 100)
        self.feed = Feed(Ledger(self.index, URL, 0), engine.replay if replays else None)

    async def step(self, name: str, *rest: Any) -> None:
        """One thing happens."""
        if name in ("restart", "swap"):  # of the latter only that it is away
            self.engine.restart()
        if name == "swap":
            self.feed.part()
        if name in ("restart", "meet"):
            await self.feed.meet()
        if name in ("serve", "twice"):
            self.engine.serve(*rest, twice=name == "twice")
        if name == "evict":
            self.engine.evict(*rest)
        if name == "clear":
            self.engine.clear()

    async def tell(self, fate: str) -> None:
        """The engine says what has happened; or it says it later, with the next."""
        message = None if fate == "later" else self.engine.publish()
        if message is not None and fate != "lost":
            for _ in range(1 + (fate == "twice")):
                await self.feed.hear(*message)

    def found(self, ids: list[int]) -> int:
        """Blocks that the index believes to be there."""
        return self.index.match(numbers(ids, SIZE), [URL])[0]


async def run(world: World, steps: list[tuple[Any, ...]]) -> None:
    """All steps; then a last message that arrives, so that no loss is unheard of."""
    await world.feed.meet()
    for act, fate in steps:
        await world.step(*act)
        await world.tell(fate)
    world.engine.serve([7] * SIZE)
    await world.tell("heard")
    world.engine.serve([8] * SIZE)
    await world.tell("heard")


@settings(max_examples=200, deadline=None)
@given(STEPS, st.booleans())
def test_equal(steps: list[tuple[Any, ...]], arrays: bool) -> None:
    """With everything kept for replay the index equals the cache, whatever was lost on the way."""
    world = World(Engine(SIZE, arrays=arrays))

    asyncio.run(run(world, steps))

    assert {tuple(ids): world.found(ids) for ids in prompts()} == {
        tuple(ids): world.engine.cached(ids) for ids in prompts()
    }
    copies = len(world.engine.copies)
    assert len(world.index) == len(world.feed.ledger) == world.index.held == copies


@settings(max_examples=200, deadline=None)
@given(STEPS, st.integers(1, 3), st.booleans(), st.booleans())
def test_never_more(steps: list[tuple[Any, ...]], keep: int, answers: bool, replays: bool) -> None:
    """With little kept, or no answers, or nobody to ask, it believes in nothing that is not there."""
    world = World(Engine(SIZE, keep=keep, answers=answers), replays=replays)

    asyncio.run(run(world, steps))

    for ids in prompts():
        assert world.found(ids) <= world.engine.cached(ids)
    assert len(world.index) <= len(world.engine.copies)


def test_backwards() -> None:
    """Numbers that begin anew are another engine's, whose messages are all asked for at once."""
    world = World(Engine(SIZE))
    first, second = [1] * 3 * SIZE, [2] * SIZE

    async def hear() -> None:
        await world.feed.meet()
        for ids in (first, second):
            world.engine.serve(ids)
            await world.tell("heard")
        world.engine.restart()
        world.engine.serve(second)
        await world.tell("lost")
        world.engine.serve([3] * SIZE)
        await world.tell("heard")

    asyncio.run(hear())

    assert [world.found(ids) for ids in (first, second, [3] * SIZE)] == [0, 1, 1]
    assert world.feed.counts["restarts"] == 1


def told(*payloads: bytes, replay: bool = False) -> World:
    """A world in which these messages were heard in turn."""
    world = World(Engine(SIZE), replays=replay)

    async def hear() -> None:
        for at, payload in enumerate(payloads):
            await world.feed.hear(at, payload)

    asyncio.run(hear())
    return world


def test_copies() -> None:
    """A block that two requests computed at once is there until both copies are gone."""
    ids = [1, 2, 3, 4]
    world = told(batch(stored([9], ids)), batch(stored([9], ids)), batch(removed(9)))

    assert world.found(ids) == 1
    asyncio.run(world.feed.hear(3, batch(removed(9))))
    assert world.found(ids) == 0
    assert len(world.index) == 0


@pytest.mark.parametrize("arrays", [False, True])
def test_bytes(arrays: bool) -> None:
    """Hashes may be bytes, of which a removal may be told as the integer that they end with."""
    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    names = [bytes(31) + b"\x01", bytes(31) + b"\x02"]
    world = told(
        batch(stored(names[:1], ids[:4]), arrays=arrays),
        batch(stored(names[1:], ids[4:], parent_block_hash=names[0]), arrays=arrays),
    )

    assert world.found(ids) == 2
    asyncio.run(world.feed.hear(2, batch(removed(2), arrays=arrays)))
    assert world.found(ids) == 1


def test_shorter() -> None:
    """Older releases leave fields out at the end, newer ones add some; both are read."""
    older = ["BlockStored", [1], None, [1, 2, 3, 4], 4]
    newer = {**stored([2], [5, 6, 7, 8]), "parent_block_hash": 1, "another": {"field": 1}}
    world = told(batch(), batch(newer))
    assert world.feed.ledger.counts["orphans"] == 1

    import msgspec

    world = told(msgspec.msgpack.encode([0.0, [older]]), batch(newer, {"type": "BlockMoved"}))
    assert world.found([1, 2, 3, 4, 5, 6, 7, 8]) == 2
    assert world.feed.ledger.counts["unknown"] == 1


def test_extra() -> None:
    """Blocks of an adapter, a picture or a salt are no text prompt's, but theirs that has the same."""
    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    keys = [["adapter"], ["adapter", ["picture", 0]]]
    world = told(batch(stored([1, 2], ids, extra_keys=keys, lora_name="adapter")))

    first = number(0, ids[:4], extra(keys[0]))
    both = (first, number(first, ids[4:], extra(keys[1])))
    assert world.found(ids) == 0
    assert world.index.match(both, [URL]) == [2]
    world = told(batch(stored([1, 2], ids, lora_name="adapter")))
    assert world.found(ids) == 0
    assert world.index.match(both, [URL]) == [1]


def test_media() -> None:
    """What is offloaded stays though the GPU's copy goes; media that tell no end do not count."""
    ids = [1, 2, 3, 4]
    offloaded = stored([9], [], 0, medium="CPU")
    world = told(batch(stored([9], ids), offloaded), batch(removed(9)))

    assert world.found(ids) == 1
    asyncio.run(world.feed.hear(2, batch(removed(9, medium="CPU"))))
    assert world.found(ids) == 0
    world = told(batch(stored([9], ids, medium="STORAGE"), offloaded))
    assert world.found(ids) == 0
    assert world.feed.ledger.counts["other_medium"] == 1
    assert world.feed.ledger.counts["orphans"] == 1


def test_groups() -> None:
    """Of a model with several kinds of attention the whole one counts."""
    ids = [1, 2, 3, 4]
    window = stored([9], ids, group_idx=0, kv_cache_spec_kind="sliding_window")
    whole = stored([9], ids, group_idx=1, kv_cache_spec_kind="full_attention")
    world = told(batch(window, whole), batch(removed(9, group_idx=0)))

    assert world.found(ids) == 1
    asyncio.run(world.feed.hear(2, batch(removed(9, group_idx=1))))
    assert world.found(ids) == 0


def test_sizes() -> None:
    """The first instance's block size is the index's; one with another size counts as empty."""
    world = told(batch(stored([1], [*range(8)], 8)))
    assert world.index.size == 8
    other = Feed(Ledger(world.index, "http://other", 0))

    asyncio.run(other.hear(0, batch(stored([1], [1, 2, 3, 4]))))

    assert world.index.match(numbers([*range(8)], 8), [URL, "http://other"]) == [1, 0]
    assert other.ledger.counts["other_size"] == 1
    world.index.leave(URL)
    asyncio.run(other.hear(1, batch(stored([1], [1, 2, 3, 4]))))
    assert world.index.size == 4


def test_ranks() -> None:
    """Of data-parallel ranks the one with the longest prefix counts, never a mixture."""
    ids = [*range(12)]
    one, two = (batch(stored(range(3), ids)), batch(stored(range(3), ids), removed(0)))
    world = told(one)
    second = Feed(Ledger(world.index, URL, 1))
    asyncio.run(second.hear(0, two))

    assert world.found(ids) == 3
    world.feed.ledger.clear()
    assert world.found(ids) == 0
    asyncio.run(second.hear(1, batch(stored([0], ids[:4]))))
    assert world.found(ids) == 3


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93",
        batch({"type": "BlockStored"}),
        batch(stored(["word"], [1, 2, 3, 4])),
        batch(stored([5], [1, 2, 3, -4])),
        batch(stored([5], ["a", "b", "c", "d"])),
        batch(stored([5], [1, 2, 3, 4], extra_keys=[["a"], ["b"]])),
    ],
)
def test_malformed(payload: bytes) -> None:
    """A message that cannot be read may have held a removal: the cache counts as empty, and goes on."""
    ids = [1, 2, 3, 4]
    world = told(batch(stored([9], ids)), payload)

    assert world.found(ids) == 0
    assert world.feed.counts["malformed"] == 1
    asyncio.run(world.feed.hear(2, batch(stored([9], ids))))
    assert world.found(ids) == 1


def test_bounded() -> None:
    """A cache that claims more blocks than any has is not believed further."""
    world = World(Engine(SIZE), replays=False)
    world.feed.ledger.most = 10

    async def hear() -> None:
        for at in range(100):
            await world.feed.hear(at, batch(stored([at], [at] * SIZE)))

    asyncio.run(hear())
    assert len(world.index) == len(world.feed.ledger) == 10
    assert world.feed.ledger.counts["dropped"] == 90


def test_total() -> None:
    """All caches together hold so many blocks; what one gives up another may have."""
    index = Reported(SIZE, 100, total=10)
    feeds = [Feed(Ledger(index, f"http://{number}", 0)) for number in range(3)]

    def hear(at: int, number: int, *events: Any) -> list[int]:
        asyncio.run(feeds[at].hear(number, batch(*events)))
        return [len(feed.ledger) for feed in feeds]

    for at in range(3):
        known = hear(at, 0, stored(range(6), [*range(at, at + 6 * SIZE)]))
    assert known == [6, 4, 0] and len(index) == index.held == 10
    assert [feed.ledger.counts["dropped"] for feed in feeds] == [0, 2, 6]
    hear(1, 1, removed(0, 1, 5))  # of which it never had the last
    assert hear(2, 1, stored(range(6), [*range(6 * SIZE)])) == [6, 2, 2]
    feeds[0].clear()
    deque(index.tidy(), 0)
    assert hear(2, 2, stored(range(10, 16), [*range(9, 9 + 6 * SIZE)])) == [0, 2, 8]
    assert index.held == 10


@pytest.mark.full
def test_memory() -> None:
    """A million blocks that instances report are held in 300 MB; of those that are gone their tables stay."""
    index = Reported(16, 100)
    tracemalloc.start()
    try:
        ledgers = [Ledger(index, f"http://{number}", 0) for number in range(64)]
        for at, ledger in enumerate(ledgers):
            for start in range(0, 1_000_000 // 64, 125):
                # as long as an engine's, and no two prompts alike
                hashes = tuple((1 << 62) + (at << 20) + start + number for number in range(125))
                ids = [at, start, *range(16 * 125 - 2)]
                deque(ledger.apply(Stored(hashes, None, ids, 16)), 0)
        used, _ = tracemalloc.get_traced_memory()
        assert len(index) == index.held == 1_000_000
        assert used < 300e6
        for ledger in ledgers:
            ledger.clear()
        deque(index.tidy(), 0)
        assert tracemalloc.get_traced_memory()[0] < 0.3 * used
        assert len(index) == index.held == 0
    finally:
        tracemalloc.stop()
