# SPDX-License-Identifier: Apache-2.0
"""A reader of prompts and a source of cached prefixes that know what a test tells them, when it wants."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from ttft_otel.router.fleet import Fleet
from ttft_otel.router.policies.index import History
from ttft_otel.router.policies.state import Options
from ttft_otel.router.prompts.prompt import Prompt
from ttft_otel.router.routing import Routing

SIZE = 16


class Reader:
    """Prompts by the body's key `tokens`; a block's number is the key `from` and its place.

    The key `items`: placeholders of each media part.
    """

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.counts: Counter[str] = Counter()

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Nothing to load."""

    async def close(self) -> None:
        """Nothing to stop."""

    async def read(self, path: str, model: str, body: bytes, size: int) -> Prompt | None:
        """What the body says."""
        await asyncio.sleep(self.delay)
        try:
            said = json.loads(body)
        except ValueError:
            said = {}
        if "tokens" not in said:
            self.counts["failed-unknown"] += 1
            return None
        self.counts["read"] += 1
        tokens, start = said["tokens"], said.get("from", 1) * 1_000_000
        items = tuple(said.get("items", ()))
        return Prompt(tokens, (), tuple(range(start, start + tokens // size)), items)


class Source:
    """History, or what `tells` says."""

    def __init__(self, delay: float = 0.0, tells: dict[str, int] | None = None) -> None:
        self.delay, self.tells = delay, tells
        self.index = History(SIZE, 10_000)
        self.followed = 0

    async def start(self, session: aiohttp.ClientSession, fleet: Fleet) -> None:
        """Nobody to ask."""

    async def close(self) -> None:
        """Nobody was asked."""

    def follow(self) -> None:
        """Count it."""
        self.followed += 1

    async def lookup(
        self, model: str, prompt: Prompt, urls: Sequence[str]
    ) -> dict[str, int] | None:
        """What it was made to tell."""
        await asyncio.sleep(self.delay)
        return self.tells

    def status(self) -> dict[str, Any]:
        """Nothing in particular."""
        return {}


def routing(
    logic: str = "ttft",
    reader: Reader | None = None,
    source: Source | None = None,
    encoders: str = "",
    **options: Any,
) -> Callable[[Fleet], Routing]:
    """What fakes.router takes: a policy with these."""

    def make(fleet: Fleet) -> Routing:
        given = Options(**options)
        known = (reader or Reader(), source or Source())
        return Routing(fleet, logic, given, 60, *known, "round_robin", encoders)

    return make


async def until(so: Callable[[], bool]) -> None:
    """Wait for it; a busy machine may take its time."""
    for _ in range(500):
        if so():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to that")
