# SPDX-License-Identifier: Apache-2.0
"""What an instance says of its KV cache and its release; pair.py asks before D goes on after P's token."""

from __future__ import annotations

import asyncio
import functools
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
_VERSION: Final = re.compile(rb'"version":\s*"(\d+)\.(\d+)')
_LABEL: Final = re.compile(rb'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Cache:
    """block: tokens of one KV block, 0 if unknown. prefix: whether prefixes are kept.

    version: the release's first two numbers.
    """

    block: int = 0
    prefix: bool = False
    version: tuple[int, int] = (0, 0)


_UNKNOWN: Final = (0, Cache())


class Caches:
    """Every instance's Cache, read when first needed and, behind the requests, once a minute."""

    def __init__(self, legs: Legs) -> None:
        self._legs = legs
        self._known: dict[Instance, tuple[int, Cache]] = {}
        self._asking: dict[Instance, asyncio.Task[None]] = {}

    def renew(self, instances: tuple[Instance, ...]) -> None:
        """Ask, in the background, where the answer is not known or too old."""
        now = clock.now()
        for each in instances:
            if self._known.get(each, _UNKNOWN)[0] <= now and each not in self._asking:
                task = asyncio.create_task(self._ask(each))
                self._asking[each] = task
                task.add_done_callback(functools.partial(self._asked, each))

    async def of(self, instances: tuple[Instance, ...]) -> list[Cache]:
        """Their caches, in the same order; waits only for what was never known."""
        waiting = [
            self._asking[each]
            for each in instances
            if each in self._asking and each not in self._known
        ]
        if waiting:
            await asyncio.wait(waiting)
        return [self._known.get(each, _UNKNOWN)[1] for each in instances]

    def _asked(self, instance: Instance, _: asyncio.Task[None]) -> None:
        del self._asking[instance]

    async def _ask(self, instance: Instance) -> None:
        found = Cache()
        try:
            pages = await asyncio.gather(
                *(self._page(f"{instance.url}/{page}") for page in ("metrics", "version"))
            )
            found = read(*pages)
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
            found = Cache()
        for gone in self._known.keys() - set(self._legs.fleet):
            del self._known[gone]
        self._known[instance] = (clock.now() + (FRESH if found.block else AGAIN), found)

    async def _page(self, url: str) -> bytes:
        async with self._legs.session.get(url, timeout=WAIT) as response:
            return await response.read()


def read(metrics: bytes, version: bytes) -> Cache:
    """Find the cache's configuration in a /metrics page, and the release in a /version answer."""
    line = _INFO.search(metrics)
    release = _VERSION.search(version)
    labels = dict(_LABEL.findall(line[1])) if line else {}
    size = labels.get(b"block_size", b"")
    block = int(size) if size.isdigit() else 0
    return Cache(
        block,
        labels.get(b"enable_prefix_caching") == b"True",
        (int(release[1]), int(release[2])) if release else (0, 0),
    )
