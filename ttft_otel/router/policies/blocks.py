# SPDX-License-Identifier: Apache-2.0
"""Numbers of a prompt's blocks from its token ids: prompts and KV events are numbered alike, for indexes.

A number stands for all tokens up to its block's end, and for what else the engine's own hash takes in.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Final

import msgspec

NOTHING: Final[Mapping[int, bytes]] = {}
_KEEP: Final = (1 << 63) - 1


def number(parent: int, ids: Sequence[int], extra: bytes = b"") -> int:
    """One block's, after the block numbered `parent`; 0 for none.

    Raises OverflowError or TypeError for ids that are no token ids.
    """
    tokens = _packed(ids)
    data = parent.to_bytes(8, "big") + len(tokens).to_bytes(4, "big") + tokens.tobytes() + extra
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big") & _KEEP


def numbers(ids: Sequence[int], size: int, extra: Mapping[int, bytes] = NOTHING) -> tuple[int, ...]:
    """Of all full blocks of `size` tokens; `extra` by the block's place."""
    tokens = _packed(ids)
    found, parent = [], 0
    for at in range(len(tokens) // size):
        parent = number(parent, tokens[at * size : (at + 1) * size], extra.get(at, b""))
        found.append(parent)
    return tuple(found)


def extra(keys: Iterable[object] | None) -> bytes:
    """A block's extra keys in the order of vLLM's KV events: adapter, (item, offset) pairs, salt."""
    listed = list(keys or ())
    return msgspec.msgpack.encode(listed) if listed else b""


def _packed(ids: Sequence[int]) -> array[int]:
    return ids if isinstance(ids, array) and ids.typecode == "I" else array("I", ids)
