# SPDX-License-Identifier: Apache-2.0
"""The prompt of a request and the protocol of its readers; routing_service.py asks them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ttft_otel.router.upstream.query_client import QueryClient


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the engine will see it."""

    tokens: int  # its length, placeholder tokens of media included
    token_ids: Sequence[int]  # empty if the ids of media placeholders are unknown
    # Keys of the full blocks (policies/block_index.py), as far as ids are known.
    block_keys: tuple[int, ...]
    # Placeholder tokens of each media item, in order, repeated items included.
    encoder_items: tuple[int, ...] = ()


class PromptReader(Protocol):
    """Reads the prompts of requests."""

    counts: Counter[str]  # results: read, cached, failed-REASON

    async def read_prompt(
        self, path: str, model: str, body: bytes, block_size: int
    ) -> Prompt | None:
        """The prompt of a request; None if it cannot be read, with the reason in `counts`.

        It never raises and never blocks the event loop.

        Args:
            path: of the request.
            model: name of its model, "" for any.
            body: its JSON.
            block_size: tokens per block of the keys.
        """

    async def start(self, queries: QueryClient) -> None:
        """Start loading what the models of the instances need; `queries` is for questions to instances."""

    async def close(self) -> None:
        """End background tasks and child processes."""
