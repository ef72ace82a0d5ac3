# SPDX-License-Identifier: Apache-2.0
"""Cached prefixes estimated from the prompts sent: --prefix-index history, and the base of others.

router_options.py builds the source that the flag names; routing_service.py starts it and asks its index.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, Final

from ttft_otel.router.routing.policies.block_index import SentHistory
from ttft_otel.router.types import Instance
from ttft_otel.router.upstream.connection_pool import QUERY_ERRORS, QueryClient
from ttft_otel.router.upstream.instance_pool import InstancePool

DEFAULT_BLOCK_SIZE: Final = 16  # tokens per block until an engine reports its own; vLLM's default
MAX_HISTORY_BLOCKS: Final = 65_536  # blocks per instance: a million tokens at 16 each
MAX_TOTAL_BLOCKS: Final = 1_000_000  # blocks of all instances together: about 200 MB
RETRY_INTERVAL_S: Final = 10.0  # seconds before asking for the block size again
# A gauge of value 1 whose labels are the fields of vLLM's cache configuration.
_BLOCK_SIZE_PATTERN: Final = re.compile(
    rb'^vllm:cache_config_info\{(?:.*,)?block_size="(\d+)"', re.MULTILINE
)
# Seconds of work before other tasks run: the delay that a request may see.
SLICE_S: Final = 0.001


async def run_sliced(steps: Iterator[object]) -> None:
    """Exhaust `steps`, letting other tasks run after each SLICE_S."""
    end = perf_counter() + SLICE_S
    for _ in steps:
        if perf_counter() > end:
            # One turn of the event loop, without a timer.
            await asyncio.sleep(0)
            end = perf_counter() + SLICE_S


def parse_block_size(metrics_page: bytes) -> int:
    """Tokens per KV block of the instance whose /metrics answered this; 0 if it does not say."""
    found = _BLOCK_SIZE_PATTERN.search(metrics_page)
    return int(found[1]) if found else 0


class PrefixSource:
    """Keeps an index of the prompt blocks that instances have cached.

    This one remembers the blocks of prompts that each instance has answered, most recent first; sources that
    know more derive from it.
    """

    _queries: QueryClient  # from start() on
    _pool: InstancePool

    def __init__(self, index: SentHistory) -> None:
        self.index = index
        self._max_blocks = index.max_blocks
        self._urls: set[str] = set()
        self._size_task: asyncio.Future[None] | None = None
        self._free_task: asyncio.Future[None] | None = None
        self._remove_listener: Callable[[], None] | None = None

    async def start(self, queries: QueryClient, pool: InstancePool) -> None:
        """Follow the instances of `pool`. Raises ValueError, with the remedy, if misconfigured.

        queries: for questions to instances; the caller closes it.
        """
        self._pool = pool
        self._queries = queries
        # A restarted instance has an empty cache, and cannot say so.
        self._remove_listener = pool.return_listeners.add(self._handle_return)
        self._size_task = asyncio.ensure_future(self._learn_block_size(queries))
        self.sync_instances()

    async def close(self) -> None:
        if self._remove_listener is not None:
            self._remove_listener()
        tasks = [each for each in (self._free_task, self._size_task) if each is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def sync_instances(self) -> None:
        """Drop removed instances, and share the memory limit among the present ones."""
        urls = self._urls = self._list_urls()
        self.index.sync_instances(urls)
        # A share for each: the limit is of the process, however many instances there are.
        self.index.set_max_blocks(min(self._max_blocks, MAX_TOTAL_BLOCKS // max(1, len(urls))))
        self.free_memory()

    def _list_urls(self) -> set[str]:
        """The instances that prefill, whose caches hold prefixes."""
        return {each.url for each in self._pool.get(self._pool.prefilling_leg)}

    def _handle_return(self, instance: Instance) -> None:
        """Drop the estimate of an `instance` that was unreachable: it may have been restarted."""
        self.index.forget_instance(instance.url)
        self.free_memory()

    def free_memory(self) -> None:
        # One at a time: a running one goes on with what is retired meanwhile.
        if self._free_task is None or self._free_task.done():
            self._free_task = asyncio.ensure_future(run_sliced(self.index.free_retired()))

    async def _learn_block_size(self, queries: QueryClient) -> None:
        """Ask instances for their block size until one reports it; it holds for the index."""
        while True:
            # A copy, since instances may change while one is asked.
            for url in tuple(self._urls):
                try:
                    page = (await queries.ask(f"{url}/metrics")).body
                except QUERY_ERRORS:
                    continue
                if size := parse_block_size(page):
                    self.index.set_block_size(size)
                    return
            await asyncio.sleep(RETRY_INTERVAL_S)

    def describe_instances(self) -> dict[str, Any]:
        """The state of each instance by URL, for GET /instances; has `source` and `blocks`."""
        return {
            url: {"source": "history", "blocks": self.index.count_blocks(url)} for url in self._urls
        }
