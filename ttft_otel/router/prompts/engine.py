# SPDX-License-Identifier: Apache-2.0
"""Ask an instance how it reads a prompt (vLLM's render endpoints); local.py answers where none does."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections import Counter
from io import BytesIO
from typing import Any, Final

import aiohttp
import msgspec

from ttft_otel.router.choose import Instance
from ttft_otel.router.fleet import Fleet
from ttft_otel.router.policies.blocks import numbers
from ttft_otel.router.prompts.local import PATHS, Local
from ttft_otel.router.prompts.media import Span, extras
from ttft_otel.router.prompts.prompt import Prompt
from ttft_otel.router.prompts.reason import Unreadable
from ttft_otel.router.prompts.worker import PATIENCE

RENDERED: Final = (*PATHS, "/v1/responses", "/v1/messages")
PAUSE: Final = 60.0  # seconds before an instance that refused is asked again
REST: Final = 5.0  # and one that was late or not there
MOST: Final = 32  # asked at once
LARGEST: Final = 32 << 20  # bytes of an answer
_REFUSED: Final = (401, 403, 404, 405, 501)  # it has no such endpoint, or keeps it closed
_KEY: Final = (401,)


class _Place(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[_Place]]


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    features: _Features | None = None
    cache_salt: str | None = None


_one: Final = msgspec.json.Decoder(_Rendered)
_several: Final = msgspec.json.Decoder(list[_Rendered])


class Engine:
    """The instance with the fewest requests is asked; `local` reads where all refuse or are away."""

    def __init__(self, local: Local, fleet: Fleet, key: str = "") -> None:
        self.counts: Counter[str] = local.counts
        self._local, self._fleet, self._key = local, fleet, key
        self._session: aiohttp.ClientSession | None = None
        self._resting: dict[Instance, float] = {}  # until when nobody asks it
        self._asking = 0

    async def start(self, session: aiohttp.ClientSession) -> None:
        """The tokenizers load only when no instance answers."""
        self._session = session
        await self._local.start(session, lazy=True)

    async def close(self) -> None:
        """End what the local one runs."""
        await self._local.close()

    async def read(self, path: str, model: str, body: bytes, size: int) -> Prompt | None:
        """The prompt of a request; None when it cannot be known, the reason counted."""
        end = asyncio.get_running_loop().time() + PATIENCE
        while (instance := self._instance(model)) is not None:
            left = end - asyncio.get_running_loop().time()
            if left <= 0:
                self.counts["failed-late"] += 1
                return None
            try:
                found = await self._read(instance, path, body, size, model, left)
            except asyncio.TimeoutError:
                self._rest(instance, REST)
                self.counts["failed-late"] += 1
                return None
            except (aiohttp.ClientError, OSError):
                self._rest(instance, REST)
                self.counts["failed-unreachable"] += 1
            except Unreadable as error:
                self.counts[f"failed-{error.reason}"] += 1
                return None
            else:
                if found is not None:
                    return found
        return await self._local.read(path, model, body, size)

    async def _read(
        self, instance: Instance, path: str, body: bytes, size: int, model: str, left: float
    ) -> Prompt | None:
        """None: that instance does not say."""
        route = next((each for each in RENDERED if path.endswith(each)), "")
        if not route or size < 1:
            raise Unreadable("path")
        if self._asking >= MOST:
            raise Unreadable("busy")
        self._asking += 1
        try:
            status, answer = await self._ask(instance, route, body, left)
        finally:
            self._asking -= 1
        if status in _REFUSED:
            self._refuse(instance, status)
            return None
        if status != 200:
            raise Unreadable("refused")
        return self._prompt(route, model, answer, size)

    def _instance(self, model: str) -> Instance | None:
        now = asyncio.get_running_loop().time()
        for each, again in list(self._resting.items()):
            if again < now:
                del self._resting[each]
        offered = self._fleet.offered(self._fleet.prefilling, model)
        asked = [each for each in offered if each not in self._resting]
        return min(asked, key=lambda each: each.in_flight, default=None)

    async def _ask(
        self, instance: Instance, route: str, body: bytes, left: float
    ) -> tuple[int, bytes]:
        named = {"Content-Type": "application/json"}
        if self._key:
            named["Authorization"] = f"Bearer {self._key}"
        if self._session is None:
            raise Unreadable("closed")
        patience = aiohttp.ClientTimeout(total=left)
        sent = BytesIO(_light(body))  # in chunks: long bodies hold up nobody
        async with self._session.post(
            f"{instance.url}{route}/render", data=sent, headers=named, timeout=patience
        ) as answer:
            if answer.status != 200:
                return answer.status, b""
            found = bytearray()
            async for chunk in answer.content.iter_any():
                found += chunk
                if len(found) > LARGEST:
                    return 413, b""
            return 200, bytes(found)

    def _prompt(self, route: str, model: str, answer: bytes, size: int) -> Prompt:
        try:
            several = PATHS.get(route) == "completion"
            every = _several.decode(answer) if several else [_one.decode(answer)]
            first = every[0]
            ids = array("I", first.token_ids)
            place = self._local.place(model)
            adapter = place.adapter if place else ""
            spans = _spans(first.features)
        except (msgspec.MsgspecError, IndexError, OverflowError) as error:
            raise Unreadable("malformed") from error
        more = extras(spans, size, adapter, first.cache_salt or "", len(ids) // size)
        blocks = numbers(ids, size, more)
        self.counts["read"] += 1
        items = tuple(span.length for span in spans)
        if (
            len(every) > 1
        ):  # as many requests in the engine; of all the work, the first one's blocks
            return Prompt(sum(len(each.token_ids) for each in every), array("I"), blocks, items)
        return Prompt(len(ids), ids, blocks, items)

    def _rest(self, instance: Instance, seconds: float) -> None:
        self._resting[instance] = asyncio.get_running_loop().time() + seconds

    def _refuse(self, instance: Instance, status: int) -> None:
        self._rest(instance, PAUSE)
        what = f"{instance.url} does not render prompts ({status}), they are tokenized here"
        remedy = (
            "give its key with --upstream-key"
            if status in _KEY
            else "start it with --enable-scale-out"
        )
        self._local.say(instance.url, f"{what}; {remedy}")


def _light(body: bytes) -> bytes:
    """The same request, its pixels not wanted back."""
    start = body.lstrip()
    return b'{"mm_payload":"none",' + start[1:] if start[:1] == b"{" else body


def _spans(features: _Features | None) -> list[Span]:
    """The media in order; their keys are the engine's own."""
    if features is None:
        return []
    found: list[Any] = []
    for modality, places in features.mm_placeholders.items():
        with contextlib.suppress(KeyError, ValueError):
            keys: Any = zip(places, features.mm_hashes[modality], strict=True)
            found += [Span(place.offset, place.length, key) for place, key in keys]
    return sorted(found, key=lambda span: span.start)
