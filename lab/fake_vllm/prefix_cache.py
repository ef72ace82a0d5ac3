# SPDX-License-Identifier: Apache-2.0
"""A model of vLLM's prefix cache and its KV events, for the tests of routing/prefixes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import msgspec

from ttft_otel.router.errors import ReplayFailed

EVENT_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


def build_stored_event(
    hashes: Iterable[Any], ids: Iterable[int], block_size: int = 4, **more: Any
) -> dict[str, Any]:
    """A BlockStored event; `more` overrides its fields."""
    plain = {"parent_block_hash": None, "lora_id": None, "medium": "GPU", "lora_name": None}
    required = {"block_hashes": [*hashes], "token_ids": [*ids], "block_size": block_size}
    return {"type": "BlockStored", **plain, **required, "extra_keys": None, "group_idx": 0, **more}


def build_removed_event(*hashes: Any, **more: Any) -> dict[str, Any]:
    """A BlockRemoved event; `more` overrides its fields."""
    return {
        "type": "BlockRemoved",
        "block_hashes": [*hashes],
        "medium": "GPU",
        "group_idx": 0,
        **more,
    }


def encode_batch(*events: dict[str, Any], timestamp: float = 0.0, as_arrays: bool = False) -> bytes:
    """Encode a message; `as_arrays`: in the encoding of releases up to 0.20."""
    encoded_events = [encode_as_array(each) for each in events] if as_arrays else list(events)
    return msgspec.msgpack.encode([timestamp, encoded_events, 0])


def encode_as_array(event: dict[str, Any]) -> list[Any]:
    """Convert `event` to the array encoding."""
    return [event["type"], *(event[name] for name in EVENT_FIELDS[event["type"]])]


@dataclass
class FakeEngine:
    """Cached blocks with their number of copies; the last `max_kept_messages` can be replayed."""

    block_size: int = 4
    max_kept_messages: int = 10_000
    as_arrays: bool = False
    block_copies: dict[int, int] = field(default_factory=dict)
    messages: list[bytes] = field(default_factory=list)
    answers_replays: bool = True
    start_count: int = 0
    _pending_events: list[dict[str, Any]] = field(default_factory=list)

    def restart(self) -> None:
        """Simulate a restart: an empty cache, and messages numbered from 0."""
        self.block_copies = {}
        self.messages = []
        self._pending_events = []
        self.start_count += 1

    def hash_blocks(self, ids: list[int]) -> list[int]:
        """The engine's hash of each full block of the prompt `ids`."""
        hashes = []
        parent = b""
        for position in range(0, len(ids) - len(ids) % self.block_size, self.block_size):
            parent = sha256(
                parent + repr(ids[position : position + self.block_size]).encode()
            ).digest()
            hashes.append(int.from_bytes(parent[-8:], "big"))
        return hashes

    def count_cached_blocks(self, ids: list[int]) -> int:
        """The leading blocks of `ids` that are cached."""
        for depth, each in enumerate(self.hash_blocks(ids)):
            if each not in self.block_copies:
                return depth
        return len(ids) // self.block_size

    def compute_prompt(self, ids: list[int], twice: bool = False) -> None:
        """Compute the prompt `ids`; `twice`: by two concurrent requests, which do not share blocks."""
        cached_blocks = self.count_cached_blocks(ids)
        hashes = self.hash_blocks(ids)
        for _ in range(1 + twice):
            new = hashes[cached_blocks:]
            for each in new:
                self.block_copies[each] = self.block_copies.get(each, 0) + 1
            if new:
                tokens = ids[cached_blocks * self.block_size : len(hashes) * self.block_size]
                parent = hashes[cached_blocks - 1] if cached_blocks else None
                self._pending_events.append(
                    build_stored_event(new, tokens, self.block_size, parent_block_hash=parent)
                )

    def evict_block(self, index: int) -> None:
        """Evict one copy of a block, chosen by `index`."""
        if self.block_copies:
            block_hash = sorted(self.block_copies)[index % len(self.block_copies)]
            self.block_copies[block_hash] -= 1
            if not self.block_copies[block_hash]:
                del self.block_copies[block_hash]
            self._pending_events.append(build_removed_event(block_hash))

    def clear_cache(self) -> None:
        """The prefix cache is reset."""
        self.block_copies = {}
        self._pending_events.append({"type": "AllBlocksCleared"})

    def take_message(self) -> tuple[int, bytes] | None:
        """The next message and its number; None without new events."""
        if not self._pending_events:
            return None
        timestamp = self.start_count * 1000.0 + len(self.messages)
        self.messages.append(
            encode_batch(*self._pending_events, timestamp=timestamp, as_arrays=self.as_arrays)
        )
        self._pending_events = []
        return len(self.messages) - 1, self.messages[-1]

    async def replay_messages(self, start: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """The kept messages from number `start` on."""
        if not self.answers_replays:
            raise ReplayFailed("no answer")
        for number, payload in list(enumerate(self.messages))[-self.max_kept_messages :]:
            if number >= start:
                yield number, payload
