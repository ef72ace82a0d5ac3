# SPDX-License-Identifier: Apache-2.0
"""The protocol of sources of cached prefixes; routing_service.py starts one, policies read its index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ttft_otel.router.routing.policies.block_index import PrefixIndex
from ttft_otel.router.types import Instance
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.router.upstream.query_client import QueryClient

if TYPE_CHECKING:
    from ttft_otel.router.routing.prompts.prompt_reader import Prompt


class PrefixSource(Protocol):
    """Keeps an index of the prompt blocks that instances have cached."""

    @property
    def index(self) -> PrefixIndex:
        """The index that policies read, on the event loop."""
        ...

    async def start(self, queries: QueryClient, pool: InstancePool) -> None:
        """Start to follow the instances of `pool`. Raises ValueError, with the remedy, if misconfigured.

        queries: for questions to instances; the caller closes it.
        """
        ...

    async def close(self) -> None:
        """End all background tasks."""
        ...

    def sync_instances(self) -> None:
        """Follow instances added to the pool, and drop what is known of removed ones."""
        ...

    async def look_up(
        self, model: str, prompt: Prompt, urls: Sequence[str]
    ) -> dict[str, int] | None:
        """Cached tokens of `prompt` by URL, from an external service; None: use the index."""
        ...

    def describe_problem(self) -> str:
        """Why less is known than could be, for /readyz; "" if nothing is wrong."""
        ...

    def describe_instances(self) -> dict[str, Any]:
        """The state of each instance by URL, for GET /instances; has `source` and `blocks`."""
        ...


def list_prefilling(pool: InstancePool | None) -> tuple[Instance, ...]:
    """The instances of `pool` that prefill, whose caches hold prefixes."""
    return () if pool is None else pool.get(pool.prefilling_leg)
