# SPDX-License-Identifier: Apache-2.0
"""Read prompts with the model's own tokenizer in a child process; routing asks, instances name models."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from array import array
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from ttft_otel.router.choose import Instance
from ttft_otel.router.fleet import Fleet
from ttft_otel.router.prompts import probe
from ttft_otel.router.prompts.frames import Ask, Told
from ttft_otel.router.prompts.prompt import Prompt
from ttft_otel.router.prompts.reason import Unreadable
from ttft_otel.router.prompts.worker import Worker

PATHS: Final = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
PATIENCE: Final = 1.0  # seconds that a request waits for its tokens
PAUSE: Final = 60.0  # before a failed load is tried again
LOOK: Final = 1.0  # between two looks for models nobody has asked for yet
MOST: Final = 64  # tokenizers remembered, loaded or failed

log: Final = logging.getLogger("ttft_otel")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model's tokenizer is, which adapter it is of, and how long its prompts may be."""

    source: str
    adapter: str = ""
    limit: int = 0


@dataclass(slots=True)
class Load:
    """How loading a tokenizer went, in which child, and when to try again."""

    age: int
    task: asyncio.Task[None] | None = None
    ready: bool = False
    again: float = 0.0


class Local:
    """One child for all models; what it cannot say is None."""

    def __init__(
        self, tokenizer: str | None, fleet: Fleet, key: str = "", worker: Worker | None = None
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._tokenizer, self._fleet, self._key = tokenizer, fleet, key
        self._worker = worker or Worker()
        self._loads: dict[str, Load] = {}
        self._said: dict[str, str] = {}  # the last failure of each source: said once
        self._session: aiohttp.ClientSession | None = None
        self._looking: asyncio.Task[None] | None = None

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Load each model's tokenizer as soon as an instance names it."""
        self._session = session
        self._looking = asyncio.create_task(self._look())

    async def close(self) -> None:
        """End the child."""
        tasks = [self._looking, *(load.task for load in self._loads.values())]
        for task in tasks:
            if task is not None:
                task.cancel()
        await asyncio.gather(*(task for task in tasks if task), return_exceptions=True)
        await self._worker.close()

    async def read(self, path: str, model: str, body: bytes, size: int) -> Prompt | None:
        """The prompt of a request; None when it cannot be known, the reason counted."""
        try:
            return await self._read(path, model, body, size)
        except asyncio.TimeoutError:
            self.counts["failed-late"] += 1
        except Unreadable as error:
            self.counts[f"failed-{error.reason}"] += 1
        return None

    async def _read(self, path: str, model: str, body: bytes, size: int) -> Prompt:
        kind = next((PATHS[each] for each in PATHS if path.endswith(each)), "")
        if not kind or size < 1:
            raise Unreadable("path")
        place = self.place(model)
        if place is None:
            raise Unreadable("model")
        if not self.ready(place.source):
            raise Unreadable("loading" if self._loading(place.source) else "load")
        ask = Ask(0, place.source, kind, body, size, place.adapter, place.limit)
        told = await asyncio.wait_for(self._worker.ask(ask), PATIENCE)
        if told.error:
            raise Unreadable(told.error)
        self.counts["read"] += 1
        if told.cached:
            self.counts["cached"] += 1
        ids = array("I")
        ids.frombytes(told.ids)
        return Prompt(told.tokens, ids, told.blocks, told.encoder)

    def place(self, model: str) -> Place | None:
        """Where this model's tokenizer is; None while no instance has named the model."""
        for _, card, cards in self._cards():
            if not model or card.get("id") == model:
                return self._place(card, cards)
        return Place(self._tokenizer) if self._tokenizer else None

    def ready(self, source: str) -> bool:
        """Whether it is loaded; if not, it is tried, but not again and again."""
        load = self._loads.get(source)
        now = asyncio.get_running_loop().time()
        if load is not None and load.age == self._worker.age and load.ready:
            return True
        busy = load is not None and load.task is not None and not load.task.done()
        if busy or (load is not None and not load.ready and now < load.again):
            return False
        if load is None and len(self._loads) >= MOST:
            return False
        load = self._loads[source] = Load(self._worker.age)
        load.task = asyncio.create_task(self._load(source, load))
        return False

    def _loading(self, source: str) -> bool:
        load = self._loads.get(source)
        return load is not None and load.task is not None and not load.task.done()

    async def _load(self, source: str, load: Load) -> None:
        try:
            told = await self._worker.ask(Ask(0, source))
        except Unreadable as error:
            told = Told(0, error.reason, f"the tokenizer's process: {error.reason}")
        load.age = self._worker.age
        if told.error:
            load.again = asyncio.get_running_loop().time() + PAUSE
            self.say(source, f"prompts are routed without tokens: {told.detail}")
            return
        load.ready = True
        self._said.pop(source, None)
        await self._compare(source)

    async def _compare(self, source: str) -> None:
        """An instance started with another template or tokenizer reads chats in another way."""
        for instance, card, cards in self._cards():
            place = self._place(card, cards)
            if place.source != source or place.adapter or self._session is None:
                continue
            model = str(card.get("id"))
            theirs = await probe.ask(self._session, instance.url, model, self._key)
            if theirs is None:
                continue
            with contextlib.suppress(Unreadable):
                told = await self._worker.ask(Ask(0, source, "chat", probe.body(model), 1))
                ours = array("I")
                ours.frombytes(told.ids)
                if list(ours) != theirs:
                    self.counts["differs"] += 1
                    self.say(source, probe.DIFFERS.format(url=instance.url, source=source))
            return

    def say(self, source: str, what: str) -> None:
        """A warning, once until it is another one."""
        if self._said.get(source) != what:
            self._said[source] = what
            log.warning("ttft-otel: %s", what)

    async def _look(self) -> None:
        while True:
            for _, card, cards in self._cards():
                self.ready(self._place(card, cards).source)
            if self._tokenizer:
                self.ready(self._tokenizer)
            await asyncio.sleep(LOOK)

    def _cards(self) -> list[tuple[Instance, dict[str, Any], tuple[dict[str, Any], ...]]]:
        return [(each, card, each.cards) for each in self._fleet for card in each.cards]

    def _place(self, card: dict[str, Any], cards: tuple[dict[str, Any], ...]) -> Place:
        """An adapter has its base model's tokenizer, and blocks of its own."""
        parent = card.get("parent")
        base = next((each for each in cards if parent and each.get("id") == parent), card)
        limit = base.get("max_model_len")
        source = self._tokenizer or str(base.get("root") or base.get("id"))
        adapter = str(card.get("id")) if base is not card else ""
        return Place(source, adapter, limit if isinstance(limit, int) else 0)
