# SPDX-License-Identifier: Apache-2.0
"""Keys of prompt blocks, computed from token ids: the same for prompts and for KV events.

A key stands for all tokens up to the end of its block, and for whatever else goes into the engine's
own block hash (adapter, media items, cache salt). vLLM's hashes cannot be used: they depend on a seed
and a hash function that are configured per engine.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
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
        parent = compute_block_key(
            parent,
            tokens[position * block_size : (position + 1) * block_size],
            extra_keys.get(position, b""),
        )
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
    return (
        token_ids
        # Most callers have one already: a long prompt need not be copied again.
        if isinstance(token_ids, array) and token_ids.typecode == "I"
        else array("I", token_ids)
    )
