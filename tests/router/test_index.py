# SPDX-License-Identifier: Apache-2.0
"""The index of cached blocks against plain sets, and that nothing stays in it."""

from __future__ import annotations

from collections import defaultdict, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from ttft_otel.router.policies.index import History, Holders
from ttft_otel.router.policies.table import PARTS, Table

URLS = ("a", "b", "c")
BLOCKS = st.lists(st.integers(0, 2 * PARTS + 1), max_size=6)
ACTS = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "retire", "tidy"]),
        st.sampled_from(URLS),
        st.integers(0, 1),
        BLOCKS,
    ),
    max_size=30,
)


def prefix(blocks: list[int], held: set[int]) -> int:
    """How many of them, from the first on, are held."""
    return next((at for at, block in enumerate(blocks) if block not in held), len(blocks))


@settings(deadline=None)
@given(ACTS, BLOCKS)
def test_sets(acts: list[tuple[str, str, int, list[int]]], asked: list[int]) -> None:
    """Whatever came and went, of each instance's caches the one with the longest prefix counts."""
    index = Holders(16)
    held: dict[tuple[str, int], set[int]] = defaultdict(set)
    for act, url, rank, blocks in acts:
        if act == "add":
            index.add(url, blocks, rank)
            held[url, rank] |= set(blocks)
        elif act == "remove":
            index.remove(url, blocks, rank)
            held[url, rank] -= set(blocks)
        elif act == "retire":
            index.retire(url, rank, iter(held.pop((url, rank), ())))
        else:
            next(index.tidy(), None)  # left off after one step

    assert index.match(asked, URLS) == [
        max(prefix(asked, held[url, rank]) for rank in (0, 1)) for url in URLS
    ]
    for url in URLS:
        assert index.has(url, 5, 1) == (5 in held[url, 1])
    for (url, rank), own in held.items():
        index.retire(url, rank, iter(own))
    assert not any(index.match(asked, URLS))
    deque(index.tidy(), 0)
    assert len(index) == 0


def test_unlearn() -> None:
    """What an instance was sent counts no more at once; its memory goes in steps."""
    index = History(16, 10_000)
    index.served("a", range(5_000))
    index.served("b", range(4_000, 6_000))

    index.unlearn("a")

    assert index.match(range(5), ["a"]) == [0]
    assert index.sent("a") == 0
    assert len(index) == 6_000
    steps = sum(1 for _ in index.tidy())
    assert steps > 10
    assert len(index) == 2_000
    index.served("a", range(4_000, 4_002))
    assert index.match(range(4_000, 6_000), ["a", "b"]) == [2, 2_000]


@settings(deadline=None)
@given(st.dictionaries(st.integers(0, 1 << 80), st.integers(0, 1 << 63)))
def test_table(plain: dict[int, int]) -> None:
    """It is a dict of integers."""
    table = Table()
    for key, value in plain.items():
        table[key] = value

    assert len(table) == len(plain)
    assert all(key in table and table.get(key) == plain[key] for key in plain)
    for key in list(plain)[::2]:
        assert table.pop(key) == plain.pop(key)
    assert table.get(1 << 81) is None
    assert sorted(table.drain()) == sorted(plain.values())
    assert len(table) == 0


def test_limit() -> None:
    """A lower bound holds for what is there already, in steps."""
    index = History(16, 10_000)
    index.served("a", range(10_000))
    index.limit(100)

    index.served("a", range(10_000, 10_001))
    assert 100 < index.sent("a") < 10_000
    for block in range(10_001, 10_010):
        index.served("a", range(block, block + 1))

    assert index.sent("a") == len(index) == 100
    assert index.match(range(10_000, 10_010), ["a"]) == [10]


def test_too_many_instances() -> None:
    """For one instance too many the oldest counts no more at once; its memory goes in steps."""
    index = History(16, 10_000, instances=2)
    index.served("a", range(10_000))
    index.served("b", range(10_000, 10_001))

    index.served("c", range(10_001, 10_002))

    assert index.match(range(5), ["a"]) == [0]
    assert 9_000 < len(index) < 10_000
    for _ in range(30):
        index.served("c", range(10_001, 10_002))
    assert len(index) == 2
