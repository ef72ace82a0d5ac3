# SPDX-License-Identifier: Apache-2.0
"""One publisher's messages in order, whatever is lost on the way; wire.py brings them, ledger.py learns.

Messages are numbered from 0 since the engine's start. What is missing is asked for again; where that
fails the cache is taken for empty, since a removal may be among what was lost. Whether a number that
goes on is still the same engine's is proved by the last message, which must come the same once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Final

from ttft_otel.router.prefixes.events import Malformed, read
from ttft_otel.router.prefixes.ledger import Ledger
from ttft_otel.router.prefixes.slices import sliced

NONE: Final = -1  # the number before the first


class Lost(Exception):
    """What was asked for again did not come."""


Replay = Callable[[int], AsyncGenerator[tuple[int, bytes], None]]


class Feed:
    """One rank of one instance; not for two tasks at once. `replay` gives all from a number on."""

    def __init__(self, ledger: Ledger, replay: Replay | None = None) -> None:
        self.ledger, self.replay = ledger, replay
        self.last: int | None = None if replay is None else NONE  # applied; None: any may be next
        self.counts: Counter[str] = Counter()
        self._apart = False
        self._heard = NONE
        self._proof = b""  # the last message

    async def meet(self) -> None:
        """The publisher is reached, for the first time or again."""
        self._apart = False
        if self.replay is None:
            # What was said in between is lost, a restart perhaps with it.
            self.clear()
        else:
            await self._recover()

    def part(self) -> None:
        """The publisher is away: whoever speaks next may be another one."""
        self._apart = True

    async def hear(self, number: int, payload: bytes) -> None:
        """One message as it is published."""
        if self._apart:
            await self.meet()
        elif number <= self._heard:
            # Another engine's, or the same message twice.
            await self._recover()
        self._heard = number
        if self.last is not None and number > self.last + 1:
            self.counts["gaps"] += 1
            await self._recover()
            if self.last is not None and number > self.last + 1:
                self.clear()
        if self.last is None or number > self.last:
            await self._take(number, payload)

    async def _recover(self) -> None:
        """Bring in all from the last message on, that one for proof."""
        if self.replay is None:
            self.clear()
            return
        self.counts["replays"] += 1
        try:
            async with aclosing(self.replay(max(0, self.last or 0))) as missed:
                same = await self._catch(missed)
        except Lost:
            self.counts["lost"] += 1
            self.clear()
            return
        if not same:
            self.counts["restarts"] += 1
            self._heard = NONE
            self.clear()
            await self._recover()
        elif self.last is None:
            self.last = NONE  # it has said nothing yet

    async def _catch(self, missed: AsyncIterator[tuple[int, bytes]]) -> bool:
        """Take what was missed; whether it is the same engine that says it."""
        last = self.last
        proved = last is None or last == NONE
        async for number, payload in missed:
            if not proved:
                proved = True
                if number == last and payload != self._proof:
                    return False
                if number != last:  # what lies between is not kept any more
                    self.clear()
            if self.last is None or number > self.last:
                await self._take(number, payload)
        return proved

    async def _take(self, number: int, payload: bytes) -> None:
        self.counts["messages"] += 1
        try:
            await sliced(self._apply(payload))
        except Malformed:
            self.counts["malformed"] += 1
            self.clear()
        self.last, self._proof = number, payload
        await sliced(self.ledger.index.tidy())

    def _apply(self, payload: bytes) -> Iterator[None]:
        for event in read(payload):
            self.counts["events"] += 1
            yield from self.ledger.apply(event)

    def clear(self) -> None:
        """Nothing is known of it any more; whatever comes next is where it goes on."""
        if len(self.ledger):
            self.counts["clears"] += 1
        self.ledger.clear()
        self.last = None
