# SPDX-License-Identifier: Apache-2.0
"""A block's number says which tokens came up to its end, wherever they were read from."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttft_otel.router.routing.policies.block_keys import (
    compute_block_key,
    compute_block_keys,
    encode_extra_keys,
)

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


def test_parent() -> None:
    """The same tokens after others are another block."""
    assert compute_block_key(0, [1, 2]) != compute_block_key(compute_block_key(0, [1, 2]), [1, 2])


def test_extra() -> None:
    """What else the engine hashes changes the block and all after it, and none before it."""
    plain = compute_block_keys(range(12), 4)
    image = compute_block_keys(range(12), 4, {1: encode_extra_keys([("item", 0)])})

    assert image[0] == plain[0]
    assert not {*image[1:]} & {*plain[1:]}


@pytest.mark.parametrize("keys", [(), None, [], iter(())])
def test_nothing(keys: Any) -> None:
    """A block without extra keys is the same however that is said."""
    assert compute_block_key(0, [1], encode_extra_keys(keys)) == compute_block_key(0, [1])


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
