# SPDX-License-Identifier: Apache-2.0
"""An engine's prefix cache as vLLM keeps it, and how it tells of it: for the tests of prefixes/."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import msgspec

from ttft_otel.router.prefixes.feed import Lost

FIELDS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
        *("lora_name", "extra_keys", "group_idx"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


def stored(hashes: Iterable[Any], ids: Iterable[int], size: int = 4, **more: Any) -> dict[str, Any]:
    """An event of blocks that came."""
    plain = {"parent_block_hash": None, "lora_id": None, "medium": "GPU", "lora_name": None}
    told = {"block_hashes": [*hashes], "token_ids": [*ids], "block_size": size}
    return {"type": "BlockStored", **plain, **told, "extra_keys": None, "group_idx": 0, **more}


def removed(*hashes: Any, **more: Any) -> dict[str, Any]:
    """An event of blocks that went."""
    return {
        "type": "BlockRemoved",
        "block_hashes": [*hashes],
        "medium": "GPU",
        "group_idx": 0,
        **more,
    }


def batch(*events: dict[str, Any], at: float = 0.0, arrays: bool = False) -> bytes:
    """A message; `arrays`: as releases up to 0.20 write it."""
    told = [positional(each) for each in events] if arrays else list(events)
    return msgspec.msgpack.encode([at, told, 0])


def positional(event: dict[str, Any]) -> list[Any]:
    """The same as an array."""
    return [event["type"], *(event[name] for name in FIELDS[event["type"]])]


@dataclass
class Engine:
    """Blocks by hash with how many copies there are; `kept` messages can be asked for again."""

    size: int = 4
    keep: int = 10_000
    arrays: bool = False
    copies: dict[int, int] = field(default_factory=dict)
    said: list[bytes] = field(default_factory=list)
    answers: bool = True
    starts: int = 0
    _pending: list[dict[str, Any]] = field(default_factory=list)

    def restart(self) -> None:
        """Another process, which has nothing and counts from 0."""
        self.copies, self.said, self._pending = {}, [], []
        self.starts += 1

    def hashes(self, ids: list[int]) -> list[int]:
        """The engine's own name for each full block."""
        found, parent = [], b""
        for at in range(0, len(ids) - len(ids) % self.size, self.size):
            parent = sha256(parent + repr(ids[at : at + self.size]).encode()).digest()
            found.append(int.from_bytes(parent[-8:], "big"))
        return found

    def cached(self, ids: list[int]) -> int:
        """Blocks from the first on that a request would find."""
        for depth, each in enumerate(self.hashes(ids)):
            if each not in self.copies:
                return depth
        return len(ids) // self.size

    def serve(self, ids: list[int], twice: bool = False) -> None:
        """Compute a prompt; `twice`: two requests at once, which see nothing of each other."""
        found = self.cached(ids)
        hashes = self.hashes(ids)
        for _ in range(1 + twice):
            new = hashes[found:]
            for each in new:
                self.copies[each] = self.copies.get(each, 0) + 1
            if new:
                tokens = ids[found * self.size : len(hashes) * self.size]
                parent = hashes[found - 1] if found else None
                self._pending.append(stored(new, tokens, self.size, parent_block_hash=parent))

    def evict(self, at: int) -> None:
        """One copy of some block goes."""
        if self.copies:
            each = sorted(self.copies)[at % len(self.copies)]
            self.copies[each] -= 1
            if not self.copies[each]:
                del self.copies[each]
            self._pending.append(removed(each))

    def clear(self) -> None:
        """The prefix cache is reset."""
        self.copies = {}
        self._pending.append({"type": "AllBlocksCleared"})

    def publish(self) -> tuple[int, bytes] | None:
        """The next message, if there is anything to say."""
        if not self._pending:
            return None
        at = self.starts * 1000.0 + len(self.said)
        self.said.append(batch(*self._pending, at=at, arrays=self.arrays))
        self._pending = []
        return len(self.said) - 1, self.said[-1]

    async def replay(self, start: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """What is still kept, from a number on."""
        if not self.answers:
            raise Lost("no answer")
        for number, payload in list(enumerate(self.said))[-self.keep :]:
            if number >= start:
                yield number, payload
