# SPDX-License-Identifier: Apache-2.0
"""Parse vLLM's KV cache events, in the encodings of all supported releases; event_feed.py uses it.

A message is a msgpack batch: an array of timestamp, events and data-parallel rank (vLLM:
distributed/kv_events.py). Events are maps with a `type`, or in releases up to 0.20 arrays that begin
with it; trailing fields may be missing. Block hashes are integers, or bytes of which the last eight are
used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta, Raw

from ttft_otel.router.errors import MalformedEvents

REMOVED_FIELDS: Final = ("block_hashes", "medium", "group_idx")
# vLLM's batches are those of one step; lists have their length in front, so that longer ones cost nothing.
MAX_EVENTS: Final = 200_000  # of a message
MAX_EVENT_BLOCKS: Final = 1 << 17
MAX_EVENT_TOKENS: Final = 1 << 20
MAX_EXTRA_KEYS: Final = 256  # of one block
# Of an extra key that is a list, such as a media item and its place.
MAX_EXTRA_LIST_BYTES: Final = 512
MAX_FIELDS: Final = 64  # of a batch or an event
_HASH_MASK: Final = (1 << 64) - 1
_PARSE_ERRORS: Final = (
    msgspec.MsgspecError,
    ValueError,
    TypeError,
    LookupError,
    RecursionError,  # lists in lists
)

# Fields are decoded by their types, one at a time: nothing is built of what is not read.
RawEvent: TypeAlias = "dict[str, Raw] | list[Raw]"


def _build_decoder(kind: Any) -> Callable[[bytes | Raw], Any]:
    return msgspec.msgpack.Decoder(kind).decode


_decode_batch: Final = _build_decoder(
    Annotated[dict[str, Raw], Meta(max_length=MAX_FIELDS)]
    | Annotated[list[Raw], Meta(max_length=MAX_FIELDS)]
)
_decode_event: Final = _decode_batch
_decode_events: Final = _build_decoder(Annotated[list[Raw], Meta(max_length=MAX_EVENTS)])
_decode_text: Final = _build_decoder(str)
_decode_block_keys: Final = _build_decoder(
    Annotated[list[Raw], Meta(max_length=MAX_EXTRA_KEYS)] | None
)
_decode_any: Final = _build_decoder(Any)
_decode_bytes: Final = _build_decoder(bytes)
_decode_optional_text: Final = _build_decoder(str | None)
_decode_optional_number: Final = _build_decoder(int | None)
# In the order of a stored event that is an array.
_FIELD_DECODERS: Final[Mapping[str, Callable[[bytes | Raw], Any]]] = {
    "block_hashes": _build_decoder(Annotated[list[int | bytes], Meta(max_length=MAX_EVENT_BLOCKS)]),
    "parent_block_hash": _build_decoder(int | bytes | None),
    "token_ids": _build_decoder(Annotated[list[int], Meta(max_length=MAX_EVENT_TOKENS)]),
    "block_size": _build_decoder(int),
    "lora_id": _build_decoder(int | str | None),
    "medium": _decode_optional_text,
    "lora_name": _decode_optional_text,
    "extra_keys": _build_decoder(Annotated[list[Raw], Meta(max_length=MAX_EVENT_BLOCKS)] | None),
    "group_idx": _decode_optional_number,
    "kv_cache_spec_kind": _decode_optional_text,
}


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks were stored."""

    hashes: tuple[int, ...]
    parent_hash: int | None  # of the block before them; None if they begin a prompt
    token_ids: Sequence[int]  # of all blocks together
    block_size: int
    medium: str = "GPU"
    extra_keys: Sequence[Raw] = ()  # one per block, for `decode_extra_keys`, or none
    cache_group: int = 0  # the KV cache group of a hybrid model
    cache_kind: str = ""  # its kind of attention, "" in releases that do not say


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """One copy of each of these blocks was evicted."""

    hashes: tuple[int, ...]
    medium: str = "GPU"
    cache_group: int = 0


# Events without blocks: the whole cache was reset, or one of a later release.
KvEvent: TypeAlias = "BlocksStored | BlocksRemoved | Literal['cleared', 'unknown']"


def iterate_kv_events(payload: bytes) -> Iterator[KvEvent]:
    """Parse a message event by event, in order.

    payload: msgpack. Each step takes a few tens of milliseconds at most, whatever is in it. Raises
    MalformedEvents, possibly after some events.
    """
    try:
        batch = _decode_batch(payload)
        # As a map, or in the order (timestamp, events, rank).
        events = _decode_events(batch["events"] if isinstance(batch, dict) else batch[1])
        for raw in events:
            yield _parse_event(_decode_event(raw))
    except _PARSE_ERRORS as error:
        raise MalformedEvents(
            f"{type(error).__name__} in a message of {len(payload)} bytes"
        ) from error


def decode_extra_keys(raw: Raw) -> list[Any]:
    """The extra keys of one block. Raises MalformedEvents."""
    try:
        return [_decode_extra_key(key) for key in _decode_block_keys(raw) or ()]
    except _PARSE_ERRORS as error:
        raise MalformedEvents("invalid extra keys") from error


def _decode_extra_key(raw: Raw) -> Any:
    """A number, a text, bytes, or a short list of these; texts come from clients and may be long."""
    if memoryview(raw).nbytes <= MAX_EXTRA_LIST_BYTES:
        return _decode_any(raw)
    try:
        return _decode_text(raw)
    except msgspec.ValidationError:
        return _decode_bytes(raw)


def _parse_event(raw: RawEvent) -> KvEvent:
    tag = _decode_text(raw["type"] if isinstance(raw, dict) else raw[0])
    if tag == "BlockRemoved":
        fields = _decode_fields(raw, REMOVED_FIELDS)
        return BlocksRemoved(
            _read_hashes(fields), fields.get("medium") or "GPU", fields.get("group_idx") or 0
        )
    if tag == "BlockStored":
        return _parse_stored(_decode_fields(raw, _FIELD_DECODERS))
    return "cleared" if tag == "AllBlocksCleared" else "unknown"


def _decode_fields(raw: RawEvent, names: Collection[str]) -> Mapping[str, Any]:
    # Shorter if a release lacks a field or omits defaults, longer if it has more fields.
    named = raw if isinstance(raw, dict) else dict(zip(names, raw[1:], strict=False))
    return {name: _FIELD_DECODERS[name](named[name]) for name in names if name in named}


def _parse_stored(fields: Mapping[str, Any]) -> BlocksStored:
    hashes, parent = _read_hashes(fields), fields.get("parent_block_hash")
    # Older releases tell only the adapter's number.
    adapter = fields.get("lora_name") or fields.get("lora_id")
    # Releases without `extra_keys` only report the adapter.
    extra = fields.get("extra_keys") or (
        [Raw(msgspec.msgpack.encode([adapter]))] * len(hashes) if adapter else ()
    )
    if extra and len(extra) != len(hashes):
        raise ValueError("extra_keys must have one entry per block")
    return BlocksStored(
        hashes,
        None if parent is None else _shorten_hash(parent),
        fields["token_ids"],
        fields["block_size"],
        fields.get("medium") or "GPU",
        extra,
        fields.get("group_idx") or 0,
        fields.get("kv_cache_spec_kind") or "",
    )


def _read_hashes(fields: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(map(_shorten_hash, fields["block_hashes"]))


def _shorten_hash(value: int | bytes) -> int:
    # 64 bits are plenty for one cache, and an int takes less memory than bytes.
    return int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value & _HASH_MASK
