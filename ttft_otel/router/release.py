# SPDX-License-Identifier: Apache-2.0
"""Give P its KV blocks back when no D will fetch them; pair.py starts it, in the background.

P keeps a request's blocks for D until a time-out (NIXL: half a minute to eight, by release). A D
that refuses a request with P's parameters tells P at once; so a D gets one that it must refuse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import aiohttp
import msgspec

from ttft_otel import context, names
from ttft_otel.router.choose import Instance
from ttft_otel.router.legs import Legs
from ttft_otel.router.plan import COMPLETIONS, DECODE

NOBODY: Final = "ttft-otel-nobody"  # no model has this name
LATE: Final = aiohttp.ClientTimeout(total=10.0)
LAST: Final = 2.0  # seconds for them when the router stops
_RIGHTS: Final = ("authorization",)
MOST: Final = 256  # under way; more are left to P's own time-out


class Releases:
    """The releases of one router that are under way."""

    def __init__(self, legs: Legs) -> None:
        self._legs = legs
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, params: dict[str, Any], client: Mapping[str, str]) -> None:
        """Release what these parameters name, with the client's right to; without a D nothing can."""
        fleet = self._legs.fleet
        # one whose breaker is open can still refuse, and there may be no other
        offered = fleet.offered(DECODE) or fleet.get(DECODE)
        if offered and len(self._tasks) < MOST:
            task = asyncio.create_task(self._refuse(offered[0], params, client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def end(self) -> None:
        """The router stops: those under way still reach D, or are given up."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST)

    async def _refuse(
        self, instance: Instance, params: dict[str, Any], client: Mapping[str, str]
    ) -> None:
        fields = {"model": NOBODY, "prompt": "-", "max_tokens": 1, "kv_transfer_params": params}
        # a trace of its own, not sampled: no client asked for this request
        headers = {name: client[name] for name in _RIGHTS if name in client}
        parent = f"00-{context.new_id() * 2}-{context.new_id()}-00"
        try:
            async with self._legs.session.post(
                f"{instance.url}{COMPLETIONS}",
                data=msgspec.json.encode(fields),
                headers={
                    **headers,
                    "content-type": "application/json",
                    names.TRACEPARENT: parent,
                },
                timeout=LATE,
            ) as response:
                await response.read()
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
            return  # its time-out remains
