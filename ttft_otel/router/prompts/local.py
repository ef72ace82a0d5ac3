# SPDX-License-Identifier: Apache-2.0
"""Read prompts with the model's own tokenizer in a child process; routing asks, instances name models."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import msgspec

from ttft_otel.router.choose import Instance
from ttft_otel.router.fleet import Fleet
from ttft_otel.router.prompts import probe
from ttft_otel.router.prompts.frames import IDS, Ask, Told
from ttft_otel.router.prompts.prompt import Prompt
from ttft_otel.router.prompts.reason import Unreadable
from ttft_otel.router.prompts.worker import PATIENCE, Worker

PATHS: Final = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
PAUSE: Final = 60.0  # before a failed load is tried again
LOOK: Final = 1.0  # between two looks for models nobody has asked for yet
BEGINS: Final = 64  # bytes of a prompt that tell what it is
MOST: Final = 8  # tokenizers at a time, about 100 MB each
MORE: Final = (
    f"more than {MOST} tokenizers are wanted: prompts of the other models are routed without tokens; "
    "give one for all with --tokenizer, or use --tokenize engine"
)

log: Final = logging.getLogger("ttft_otel")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model's tokenizer is, which adapter it is of, and how long its prompts may be."""

    source: str
    adapter: str = ""
    limit: int = 0


class _Body(msgspec.Struct):
    prompt: msgspec.Raw = msgspec.Raw(b"")


_body: Final = msgspec.json.Decoder(_Body)


@dataclass(slots=True)
class Load:
    """One tokenizer's child, how loading it went, and when to try again."""

    worker: Worker
    age: int = 0  # of the child that has it
    task: asyncio.Task[None] | None = None
    ready: bool = False
    again: float = 0.0

    @property
    def loading(self) -> bool:
        """Whether it is not known yet how it goes."""
        return self.task is not None and not self.task.done() and not self.ready


class Local:
    """A child for each tokenizer: one that loads for long holds up nobody else's prompts."""

    def __init__(self, tokenizer: str | None, fleet: Fleet, key: str = "") -> None:
        self.counts: Counter[str] = Counter()
        self._tokenizer, self._fleet, self._key = tokenizer, fleet, key
        self._loads: dict[str, Load] = {}
        self._said: dict[str, str] = {}  # the last failure of each source: said once
        self._session: aiohttp.ClientSession | None = None
        self._looking: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    async def start(self, session: aiohttp.ClientSession, lazy: bool = False) -> None:
        """Load each model's tokenizer as soon as an instance names it; lazy: when it is asked for."""
        self._session = session
        self._looking = asyncio.create_task(self._look(lazy))

    async def close(self) -> None:
        """End the children."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        for source in list(self._loads):
            self._end(source)
        await asyncio.gather(*self._ending)

    async def read(self, path: str, model: str, body: bytes, size: int) -> Prompt | None:
        """The prompt of a request; None when it cannot be known, the reason counted."""
        task = asyncio.create_task(self._read(path, model, body, size))
        try:
            # wait_for of Python 3.10 and 3.11 swallows the cancellation of a client that leaves just now
            await asyncio.wait({task}, timeout=PATIENCE)
            if task.done():
                return task.result()
            self.counts["failed-late"] += 1
        except Unreadable as error:
            self.counts[f"failed-{error.reason}"] += 1
        finally:
            task.cancel()
        return None

    async def _read(self, path: str, model: str, body: bytes, size: int) -> Prompt:
        kind = next((PATHS[each] for each in PATHS if path.endswith(each)), "")
        if not kind or size < 1:
            raise Unreadable("path")
        place = self.place(model)
        if place is None:
            raise Unreadable("model")
        source, load = place.source, self.load(place.source)
        if not (load and load.ready) and kind == PATHS["/v1/completions"] and _numbered(body):
            source, load = IDS, await self._beside()
        if load is None or not load.ready:
            raise Unreadable("loading" if load and load.loading else "load")
        ask = Ask(0, source, kind, body, size, place.adapter, place.limit)
        told = await load.worker.ask(ask)
        if told.error:
            raise Unreadable(told.error)
        self.counts["read"] += 1
        if told.cached:
            self.counts["cached"] += 1
        ids = array("I")
        ids.frombytes(told.ids)
        return Prompt(told.tokens, ids, told.blocks, told.items)

    async def _beside(self) -> Load | None:
        """The child that reads token ids, beside one that loads a tokenizer or cannot."""
        load = self.load(IDS)
        if load and load.task and load.loading:
            await asyncio.wait({load.task})
        return load

    def place(self, model: str) -> Place | None:
        """Where this model's tokenizer is; None while no instance has named the model."""
        for _, card, cards in self._cards():
            if not model or card.get("id") == model:
                return self._place(card, cards)
        return Place(self._tokenizer) if self._tokenizer else None

    def load(self, source: str) -> Load | None:
        """How it stands with this tokenizer; it is loaded if it was not, a failed one after a pause."""
        load = self._loads.get(source)
        if load is None:
            if source != IDS and len(self._loads.keys() - {IDS}) >= MOST:
                self.say("", MORE)
                return None
            load = self._loads[source] = Load(Worker())
        if load.ready and load.age != load.worker.age:
            load.ready = False  # its child died
        now = asyncio.get_running_loop().time()
        if not load.ready and not load.loading and now >= load.again:
            load.task = asyncio.create_task(self._load(source, load))
        return load

    async def _load(self, source: str, load: Load) -> None:
        try:
            told = await load.worker.ask(Ask(0, source))
        except Unreadable as error:
            told = Told(0, error.reason, f"the tokenizer's process: {error.reason}")
        load.age = load.worker.age
        if told.error == "closed":
            return
        if told.error:
            load.again = asyncio.get_running_loop().time() + PAUSE
            self.say(source, f"prompts are routed without tokens: {told.detail}")
            return
        load.ready = True
        self._said.pop(source, None)
        await self._compare(source, load)

    def _end(self, source: str) -> None:
        """In a task of its own: who is cancelled meanwhile leaves no process behind."""
        self._said.pop(source, None)
        task = asyncio.create_task(_closed(self._loads.pop(source)))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _compare(self, source: str, load: Load) -> None:
        """An instance started with another template or tokenizer reads chats in another way."""
        for instance, card, cards in list(self._cards()):
            place = self._place(card, cards)
            if place.source != source or place.adapter or self._session is None:
                continue
            model = str(card.get("id"))
            theirs = await probe.ask(self._session, instance.url, model, self._key)
            if theirs is None:
                continue
            with contextlib.suppress(Unreadable):
                told = await load.worker.ask(Ask(0, source, "chat", probe.body(model), 1))
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

    async def _look(self, lazy: bool) -> None:
        while True:
            wanted = {self._place(card, cards).source for _, card, cards in self._cards()}
            if self._tokenizer:
                wanted = {self._tokenizer}
            for source in () if lazy else wanted:
                self.load(source)
            for source in set(self._loads) - wanted - {IDS}:  # its last instance is gone
                self._end(source)
            await asyncio.sleep(LOOK)

    def _cards(self) -> Iterator[tuple[Instance, dict[str, Any], tuple[dict[str, Any], ...]]]:
        return ((each, card, each.cards) for each in self._fleet for card in each.cards)

    def _place(self, card: dict[str, Any], cards: tuple[dict[str, Any], ...]) -> Place:
        """An adapter has its base model's tokenizer, and blocks of its own."""
        parent = card.get("parent")
        base = next((each for each in cards if parent and each.get("id") == parent), card)
        limit = base.get("max_model_len")
        source = self._tokenizer or str(base.get("root") or base.get("id"))
        adapter = str(card.get("id")) if base is not card else ""
        return Place(source, adapter, limit if isinstance(limit, int) else 0)


def _numbered(body: bytes) -> bool:
    """Whether the prompt is token ids, or a list of such."""
    try:
        prompt = memoryview(_body.decode(body).prompt)[:BEGINS].tobytes()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return prompt[:1] == b"[" and prompt.lstrip(b"[ \t\r\n")[:1].isdigit()


async def _closed(load: Load) -> None:
    await load.worker.close()
    if load.task is not None:
        load.task.cancel()
        await asyncio.gather(load.task, return_exceptions=True)
