# SPDX-License-Identifier: Apache-2.0
"""What is known of a prompt, and who finds it out; routing asks, policies and indexes use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import aiohttp


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's length as the engine counts it, placeholders of media included.

    ids: as the engine has them; empty where media's cannot be known.
    blocks: numbers of the full blocks (policies/blocks.py), up to where ids are known.
    encoder_items: placeholders of each media item, in order, repeated ones too; part of `tokens`.
    """

    tokens: int
    ids: Sequence[int]
    blocks: tuple[int, ...]
    encoder_items: tuple[int, ...] = ()

    @property
    def encoder_tokens(self) -> int:
        """Placeholders among `tokens`."""
        return sum(self.encoder_items)


class Reader(Protocol):
    """Anything that reads prompts out of requests."""

    counts: Counter[str]  # read, cached, and failed by reason: failed-REASON

    async def read(self, path: str, model: str, body: bytes, size: int) -> Prompt | None:
        """The prompt of a request; None when it cannot be known, the reason counted.

        size: tokens of a block. Never raises, never blocks the event loop.
        """
        ...

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Begin to load what the fleet's models need."""
        ...

    async def close(self) -> None:
        """Stop what runs."""
        ...
