# SPDX-License-Identifier: Apache-2.0
"""What an instance's /metrics says of its KV cache; pair.py asks before D goes on after P's token."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Final

import aiohttp

from ttft_otel import clock
from ttft_otel.router.choose import Instance
from ttft_otel.router.legs import Legs

FRESH: Final = 60_000_000  # microseconds; an instance may come back with another configuration
AGAIN: Final = 5_000_000  # after a question without an answer
WAIT: Final = aiohttp.ClientTimeout(total=2.0)
_INFO: Final = re.compile(rb"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_LABEL: Final = re.compile(rb'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Cache:
    """block: tokens of one KV block, 0 if unknown. prefix: whether prefixes are kept."""

    block: int = 0
    prefix: bool = False


class Caches:
    """Every instance's Cache, read when first needed and again once a minute."""

    def __init__(self, legs: Legs) -> None:
        self._legs = legs
        self._known: dict[Instance, tuple[int, Cache]] = {}

    async def of(self, instances: tuple[Instance, ...]) -> list[Cache]:
        """Their caches, in the same order; asks only where the answer is not known or too old."""
        now = clock.now()
        old = [each for each in instances if self._known.get(each, (0,))[0] <= now]
        if old:
            for gone in self._known.keys() - set(self._legs.fleet):
                del self._known[gone]
            await asyncio.gather(*map(self._ask, old))
        return [self._known[each][1] for each in instances]

    async def _ask(self, instance: Instance) -> None:
        found = Cache()
        try:
            url = f"{instance.url}/metrics"
            async with self._legs.session.get(url, timeout=WAIT) as response:
                found = read(await response.read())
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
            found = Cache()
        self._known[instance] = (clock.now() + (FRESH if found.block else AGAIN), found)


def read(text: bytes) -> Cache:
    """Find the cache's configuration in a /metrics page."""
    line = _INFO.search(text)
    labels = dict(_LABEL.findall(line[1])) if line else {}
    size = labels.get(b"block_size", b"")
    block = int(size) if size.isdigit() else 0
    return Cache(block, labels.get(b"enable_prefix_caching") == b"True")
