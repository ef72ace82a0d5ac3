# SPDX-License-Identifier: Apache-2.0
"""A block's number says which tokens came up to its end, wherever they were read from."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttft_otel.router.policies.blocks import extra, number, numbers

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=70)


@given(IDS, st.integers(1, 9))
def test_chain(ids: list[int], size: int) -> None:
    """All numbers at once are those that come one after the other, of full blocks only."""
    parent, chain = 0, []
    for at in range(0, len(ids) - size + 1, size):
        parent = number(parent, ids[at : at + size])
        chain.append(parent)

    assert numbers(ids, size) == tuple(chain) == numbers(array("q", ids), size)
    assert all(0 < each < 2**63 for each in chain)


@given(IDS, IDS, st.integers(1, 9))
def test_prefix(one: list[int], other: list[int], size: int) -> None:
    """Two prompts share as many numbers as they share full blocks from the first token on."""
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    pairs = zip(numbers(one, size), numbers(other, size), strict=False)

    assert [a == b for a, b in pairs].count(True) == shared // size


def test_parent() -> None:
    """The same tokens after others are another block."""
    assert number(0, [1, 2]) != number(number(0, [1, 2]), [1, 2])


def test_extra() -> None:
    """What else the engine hashes changes the block and all after it, and none before it."""
    plain = numbers(range(12), 4)
    image = numbers(range(12), 4, {1: extra([("item", 0)])})

    assert image[0] == plain[0]
    assert not {*image[1:]} & {*plain[1:]}


@pytest.mark.parametrize("keys", [(), None, [], iter(())])
def test_nothing(keys: Any) -> None:
    """A block without extra keys is the same however that is said."""
    assert number(0, [1], extra(keys)) == number(0, [1])


def test_keys() -> None:
    """Decoded events have lists where vLLM had tuples; neither order nor type of keys is lost."""
    assert extra((("item", 3), "salt")) == extra([["item", 3], "salt"])
    assert len({extra(["a", "b"]), extra(["b", "a"]), extra(["ab"]), extra([b"ab"])}) == 4


@pytest.mark.parametrize("ids", [[-1], [2**32], ["a"], [1.5]])
def test_no_ids(ids: Any) -> None:
    """What cannot be a token id is an error, not another block's number."""
    with pytest.raises((OverflowError, TypeError)):
        number(0, ids)
