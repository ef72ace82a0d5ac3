# SPDX-License-Identifier: Apache-2.0
"""The index of cached blocks against plain sets, and the numbers of blocks, wherever they were read from."""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttft_otel.router.routing.policies.block_index import (
    PART_COUNT,
    BlockHolders,
    PartitionedTable,
    SentHistory,
    compute_block_key,
    compute_block_keys,
    encode_extra_keys,
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


@settings(deadline=None)
@given(st.dictionaries(st.integers(0, 1 << 80), st.integers(0, 1 << 63)))
def test_table(plain: dict[int, int]) -> None:
    """The table of the index is a dict of integers."""
    table = PartitionedTable()
    for key, value in plain.items():
        table[key] = value

    assert len(table) == len(plain)
    assert all(key in table and table.get(key) == plain[key] for key in plain)
    for key in list(plain)[::2]:
        assert table.pop(key) == plain.pop(key)
    assert table.get(1 << 81) is None
    assert sorted(table.drain_values()) == sorted(plain.values())
    assert len(table) == 0


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


def test_extra() -> None:
    """What else the engine hashes changes the block and all after it, and none before it."""
    plain = compute_block_keys(range(12), 4)
    image = compute_block_keys(range(12), 4, {1: encode_extra_keys([("item", 0)])})

    assert image[0] == plain[0]
    assert not {*image[1:]} & {*plain[1:]}


def test_keys() -> None:
    """Decoded events have lists where vLLM had tuples; neither order nor type of keys is lost."""
    assert encode_extra_keys((("item", 3), "salt")) == encode_extra_keys([["item", 3], "salt"])
    assert (
        len(
            {
                encode_extra_keys(["a", "b"]),
                encode_extra_keys(["b", "a"]),
                encode_extra_keys(["ab"]),
                encode_extra_keys([b"ab"]),
            }
        )
        == 4
    )


@pytest.mark.parametrize("ids", [[-1], [2**32], ["a"], [1.5]])
def test_no_ids(ids: Any) -> None:
    """What cannot be a token id is an error, not another block's number."""
    with pytest.raises((OverflowError, TypeError)):
        compute_block_key(0, ids)
