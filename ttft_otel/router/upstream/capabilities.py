# SPDX-License-Identifier: Apache-2.0
"""An instance's KV cache configuration and vLLM release; prefill_decode.py needs them.

They decide whether a decode instance can continue after the prefill instance's token.
"""

from __future__ import annotations

import asyncio
import functools
import re
from dataclasses import dataclass
from typing import Final

from ttft_otel.router.types import Instance
from ttft_otel.router.upstream.query_client import QUERY_ERRORS
from ttft_otel.router.upstream.upstream_client import UpstreamClient
from ttft_otel.tracing import clock

# A gauge of value 1 whose labels are the fields of vLLM's cache configuration.
_CACHE_INFO_PATTERN: Final = re.compile(rb"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_VERSION_PATTERN: Final = re.compile(rb'"version":\s*"(\d+)\.(\d+)')
# Escaped quotes are not understood: the values that are read here have none.
# \b: a long word is looked through once, not once from each of its letters.
_LABEL_PATTERN: Final = re.compile(rb'\b(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class InstanceCapabilities:
    """block_size: tokens of one KV block, 0 if unknown. prefix_caching: whether prefixes are kept.

    version: the release's first two numbers.
    """

    block_size: int = 0
    prefix_caching: bool = False
    version: tuple[int, int] = (0, 0)


def parse_capabilities(metrics_page: bytes, version_body: bytes) -> InstanceCapabilities:
    """Parse an instance's capabilities; zeros where they are missing.

    metrics_page: body of /metrics, with the labels of vllm:cache_config_info. version_body: of /version.
    """
    line = _CACHE_INFO_PATTERN.search(metrics_page)
    release = _VERSION_PATTERN.search(version_body)
    labels = dict(_LABEL_PATTERN.findall(line[1])) if line else {}
    size = labels.get(b"block_size", b"")
    # Labels hold Python's str() of a field: "True" below, and "None" where it is not set.
    block = int(size) if size.isdigit() else 0
    return InstanceCapabilities(
        block,
        labels.get(b"enable_prefix_caching") == b"True",
        (int(release[1]), int(release[2])) if release else (0, 0),
    )


# Microseconds; an instance may be restarted with another configuration.
MAX_AGE_US: Final = 60_000_000
RETRY_DELAY_US: Final = 5_000_000  # microseconds before a failed query is repeated
CAPABILITY_TIMEOUT_S: Final = 2.0  # seconds for each page


# When to ask again (0: at once), and what is known until then.
_UNKNOWN: Final = (0, InstanceCapabilities())


class CapabilityCache:
    """Capabilities by instance, queried when first needed and refreshed in the background."""

    def __init__(self, upstream: UpstreamClient) -> None:
        self._upstream = upstream
        self._known: dict[Instance, tuple[int, InstanceCapabilities]] = {}
        self._queries: dict[Instance, asyncio.Task[None]] = {}

    def refresh_stale(self, instances: tuple[Instance, ...]) -> None:
        """Query, in the background, those of `instances` whose capabilities are unknown or too old."""
        now_us = clock.now_us()
        for each in instances:
            if self._known.get(each, _UNKNOWN)[0] <= now_us and each not in self._queries:
                task = asyncio.create_task(self._query_instance(each))
                self._queries[each] = task
                task.add_done_callback(functools.partial(self._end_query, each))

    async def get_capabilities(self, instances: tuple[Instance, ...]) -> list[InstanceCapabilities]:
        """Capabilities of `instances`, in their order; waits only for running first queries."""
        # An old answer is good enough: only an instance of which nothing is known is worth a wait.
        waiting = [
            self._queries[each]
            for each in instances
            if each in self._queries and each not in self._known
        ]
        if waiting:
            await asyncio.wait(waiting)
        return [self._known.get(each, _UNKNOWN)[1] for each in instances]

    def _end_query(self, instance: Instance, _: asyncio.Task[None]) -> None:
        del self._queries[instance]

    async def _query_instance(self, instance: Instance) -> None:
        capabilities = InstanceCapabilities()
        try:
            pages = await asyncio.gather(
                *(self._fetch_page(f"{instance.url}/{page}") for page in ("metrics", "version"))
            )
            capabilities = parse_capabilities(*pages)
        except QUERY_ERRORS:
            capabilities = InstanceCapabilities()
        # Those that left the pool, or the dict would grow with every rollout.
        for removed in self._known.keys() - set(self._upstream.pool):
            del self._known[removed]
        # Without a block size nothing was learnt: it may be starting, so it is asked again soon.
        self._known[instance] = (
            clock.now_us() + (MAX_AGE_US if capabilities.block_size else RETRY_DELAY_US),
            capabilities,
        )

    async def _fetch_page(self, url: str) -> bytes:
        answer = await self._upstream.queries.ask(url, timeout_s=CAPABILITY_TIMEOUT_S)
        return answer.body
