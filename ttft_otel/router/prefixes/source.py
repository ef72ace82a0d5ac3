# SPDX-License-Identifier: Apache-2.0
"""Where knowledge of cached prefixes comes from; routing.py starts one, policies read its index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp

from ttft_otel.router.choose import Instance
from ttft_otel.router.fleet import Fleet
from ttft_otel.router.policies.index import Index

if TYPE_CHECKING:
    from ttft_otel.router.prompts.prompt import Prompt


class Source(Protocol):
    """Who has which blocks of prompts cached."""

    @property
    def index(self) -> Index:
        """What policies read, on the event loop."""
        ...

    async def start(self, session: aiohttp.ClientSession, fleet: Fleet) -> None:
        """Begin to learn. Raises ValueError, with the remedy, where it cannot work as configured."""
        ...

    async def close(self) -> None:
        """Learn nothing any more."""
        ...

    def follow(self) -> None:
        """The fleet changed: learn of who is new, forget who is gone."""
        ...

    async def lookup(
        self, model: str, prompt: Prompt, urls: Sequence[str]
    ) -> dict[str, int] | None:
        """Tokens that each instance has cached, asked elsewhere; None: the index knows."""
        ...

    def status(self) -> dict[str, Any]:
        """What is known of each instance, by URL, for operators."""
        ...


def prefilling(fleet: Fleet | None) -> tuple[Instance, ...]:
    """The instances whose caches matter."""
    return () if fleet is None else fleet.get(fleet.prefilling)
