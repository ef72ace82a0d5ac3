# SPDX-License-Identifier: Apache-2.0
"""Read what vLLM publishes about its KV cache, in every release's encoding; feed.py hands it to ledger.py.

A message is a batch: an array of time, events and rank. Its events are maps with a `type`, or arrays
that begin with it (releases up to 0.20); fields at the end may be missing. Hashes are integers, or
bytes whose last eight are that integer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

STORED: Final = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
)
REMOVED: Final = ("block_hashes", "medium", "group_idx")
_WIDTH: Final = (1 << 64) - 1
_decode: Final = msgspec.msgpack.Decoder().decode


class Malformed(ValueError):
    """A message that is no batch of events."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that follow one another are in the cache; `extra` holds each one's further keys."""

    hashes: tuple[int, ...]
    parent: int | None
    ids: Sequence[int]
    size: int
    medium: str = "GPU"
    extra: Sequence[Any] = ()
    group: int = 0
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Removed:
    """One copy of each of these blocks has left the cache."""

    hashes: tuple[int, ...]
    medium: str = "GPU"
    group: int = 0


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is in the cache any more."""


Event = Stored | Removed | Cleared | None


def read(payload: bytes) -> list[Event]:
    """A message's events in order, None for one of a kind unknown to us. Raises Malformed."""
    try:
        batch = _decode(payload)
        events = batch["events"] if isinstance(batch, dict) else batch[1]
        return [_event(each) for each in events]
    except (msgspec.DecodeError, ValueError, TypeError, LookupError) as error:
        raise Malformed(f"{type(error).__name__} in a message of {len(payload)} bytes") from error


def _event(raw: Any) -> Event:
    tag = raw["type"] if isinstance(raw, dict) else raw[0]
    if tag == "BlockRemoved":
        fields = _fields(raw, REMOVED)
        return Removed(_hashes(fields), fields.get("medium") or "GPU", fields.get("group_idx") or 0)
    if tag == "BlockStored":
        return _stored(_fields(raw, STORED))
    return Cleared() if tag == "AllBlocksCleared" else None


def _fields(raw: Any, names: Sequence[str]) -> Mapping[str, Any]:
    # Shorter where a release has no such field yet or left defaults out, longer where it has more.
    return raw if isinstance(raw, dict) else dict(zip(names, raw[1:], strict=False))


def _stored(fields: Mapping[str, Any]) -> Stored:
    hashes, parent = _hashes(fields), fields.get("parent_block_hash")
    adapter = fields.get("lora_name") or fields.get("lora_id")
    extra = fields.get("extra_keys") or ([[adapter]] * len(hashes) if adapter else ())
    if extra and len(extra) != len(hashes):
        raise ValueError("as many lists of extra keys as blocks were expected")
    return Stored(
        hashes,
        None if parent is None else _short(parent),
        fields["token_ids"],
        int(fields["block_size"]),
        fields.get("medium") or "GPU",
        extra,
        fields.get("group_idx") or 0,
        fields.get("kv_cache_spec_kind") or "",
    )


def _hashes(fields: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(map(_short, fields["block_hashes"]))


def _short(value: int | bytes) -> int:
    return int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value & _WIDTH
