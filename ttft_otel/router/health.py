# SPDX-License-Identifier: Apache-2.0
"""Ask every instance how it is and which models it has; tells fleet.py, app.py starts and ends it."""

from __future__ import annotations

import asyncio
import random
from typing import Any, Final

import aiohttp

from ttft_otel.router.choose import Instance
from ttft_otel.router.fleet import Fleet

INTERVAL: Final = 5.0  # seconds between two probes of an instance that is well
SOON: Final = 1.0  # of one that failed
ASK: Final = aiohttp.ClientTimeout(total=5.0)
MISSES: Final = 2  # probes in a row that time out; a busy server may be late once
EVERY: Final = 6  # probes between two looks at its models
_FAILED: Final = (aiohttp.ClientError, OSError, asyncio.TimeoutError)


class Health:
    """One task per instance, until `close`."""

    def __init__(self, fleet: Fleet, interval: float = INTERVAL, key: str = "") -> None:
        self.fleet, self.interval = fleet, interval
        self.key = f"Bearer {key}" if key else ""
        self._session: aiohttp.ClientSession | None = None
        self._tasks: dict[Instance, asyncio.Task[None]] = {}
        self._soon: dict[Instance, asyncio.Event] = {}

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Begin to watch whoever is in the fleet."""
        self._session = session
        self.fleet.wake = self._wake
        await self.follow()

    async def close(self) -> None:
        """Watch nobody any more."""
        await self._end(list(self._tasks))

    async def follow(self) -> None:
        """The fleet's instances are others now: watch those."""
        now = set(self.fleet)
        await self._end([each for each in self._tasks if each not in now])
        for each in set(self.fleet) - set(self._tasks):  # others again, maybe, after that
            self._soon[each] = asyncio.Event()
            self._tasks[each] = asyncio.create_task(self._watch(each))

    async def ready(self) -> None:
        """Return when every instance was asked at least once."""
        await asyncio.gather(*(self.probe(each) for each in self.fleet if not each.probed))

    async def _end(self, gone: list[Instance]) -> None:
        tasks = [self._tasks.pop(each) for each in gone]
        for each in gone:
            self._soon.pop(each, None)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _wake(self, instance: Instance) -> None:
        if instance in self._soon:
            self._soon[instance].set()

    async def _watch(self, each: Instance) -> None:
        soon = self._soon[each]
        number = 0
        while True:
            if await self.probe(each) and (each.models is None or number % EVERY == 0):
                await self.learn(each)
            number += 1
            soon.clear()
            pause = min(self.interval, SOON) if each.state == "failed" else self.interval
            try:
                # jitter: many routers, or many instances, shall not beat in time
                await asyncio.wait_for(soon.wait(), pause * random.uniform(0.8, 1.2))
            except asyncio.TimeoutError:
                continue
            await asyncio.sleep(min(self.interval, SOON) / 2)  # it failed just now

    async def probe(self, each: Instance) -> bool:
        """GET /health; any answer below 500 is one. Moves it between healthy and failed."""
        why, late = "", False
        try:
            async with self.session.get(f"{each.url}/health", timeout=ASK) as response:
                if response.status >= 500:
                    why = f"its /health answered {response.status}"
        except asyncio.TimeoutError:
            why, late = "its /health did not answer in time", True
        except _FAILED as error:
            why = f"{type(error).__name__}: {error}"
        each.probed = True
        each.missed = each.missed + 1 if why else 0
        if not why:
            self.fleet.heal(each)
        elif not late or each.missed >= MISSES:
            self.fleet.fail(each, why)
        return not why

    async def learn(self, each: Instance, authorization: str = "") -> int:
        """GET /v1/models, with our own key or else a client's; its status, 0 for no such answer."""
        status, cards = await self._models(each, authorization)
        if cards is None:
            return status
        models = frozenset(str(card.get("id")) for card in cards)
        if models != each.models:
            each.models = models
            self.fleet.changed()
        each.cards = cards
        return status

    async def _models(
        self, each: Instance, authorization: str
    ) -> tuple[int, tuple[dict[str, Any], ...] | None]:
        url = f"{each.url}/v1/models"
        key = self.key or authorization
        named = {"Authorization": key} if key else {}
        try:
            async with self.session.get(url, timeout=ASK, headers=named) as response:
                if response.status != 200:
                    return response.status, None
                body = await response.json()
        except (*_FAILED, ValueError):
            return 0, None
        data = body.get("data") if isinstance(body, dict) else None
        if not isinstance(data, list):
            return 0, None
        return 200, tuple(card for card in data if isinstance(card, dict))

    @property
    def session(self) -> aiohttp.ClientSession:
        """The legs' session."""
        if self._session is None:
            raise RuntimeError("Health.start() has not run; serve the app with its lifespan on")
        return self._session
