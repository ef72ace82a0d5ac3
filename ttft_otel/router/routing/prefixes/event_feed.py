# SPDX-License-Identifier: Apache-2.0
"""Applies one publisher's messages in order; kv_events_source.py receives them, block_ledger.py learns.

Messages are numbered from 0 at the start of the engine. Missing ones are requested again; if that
fails the cache is assumed empty, because a removal may have been lost. A restarted engine may reach
the same numbers again, so a replay includes the last applied message, which must be unchanged.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from time import monotonic
from typing import Final

from ttft_otel.router.errors import MalformedEvents, ReplayFailed
from ttft_otel.router.routing.prefixes.block_ledger import BlockLedger
from ttft_otel.router.routing.prefixes.kv_event_parser import iterate_kv_events
from ttft_otel.router.routing.prefixes.prefix_source import run_sliced

NO_MESSAGE: Final = -1  # the number before that of the first message


ReplayRequest = Callable[[int], AsyncGenerator[tuple[int, bytes], None]]


class EventFeed:
    """The messages of one data-parallel rank; its methods must not run concurrently.

    replay: requests all messages from a number on; None if the publisher has no replay socket.
    counts: events and incidents, for /metrics. last_applied: message number; None: accept any as next.
    is_connected, changed_at_s: whether it is connected, and the monotonic time since when, or of its start;
    its receiver sets them, at once also while a message is handled. task: that receives its messages.
    """

    task: asyncio.Task[None]

    def __init__(self, ledger: BlockLedger, replay: ReplayRequest | None = None) -> None:
        self.ledger = ledger
        self.replay = replay
        self.last_applied: int | None = None if replay is None else NO_MESSAGE
        self.counts: Counter[str] = Counter()
        self.is_connected = False
        self.changed_at_s = monotonic()
        self._is_disconnected = False
        self._last_heard = NO_MESSAGE
        self._last_payload = b""  # of the last applied message

    @property
    def is_live(self) -> bool:
        return self.is_connected and not self.task.done()

    async def handle_connected(self) -> None:
        """The connection to the publisher is up, for the first time or again."""
        self._is_disconnected = False
        if self.replay is None:
            # Messages published in between are lost, and the engine may have restarted.
            self.clear_state()
        else:
            await self._replay_missed()

    def handle_disconnected(self) -> None:
        """The connection is down: the next message may be of a restarted engine."""
        # Nothing is cleared yet: after a short interruption the replay fills the gap.
        self._is_disconnected = True
        self.counts["disconnects"] += 1

    async def receive_message(self, number: int, payload: bytes) -> None:
        """Handle a published message.

        number: counted by the engine from 0. payload: msgpack, see kv_event_parser.py.
        """
        # A message can overtake the monitor's event that says the connection is back.
        if self._is_disconnected:
            await self.handle_connected()
        elif number <= self._last_heard:
            # The engine restarted, or the message arrived twice: the replay tells.
            await self._replay_missed()
        # What was heard, not what was applied: a replay may have run ahead of it.
        self._last_heard = number
        if self.last_applied is not None and number > self.last_applied + 1:
            self.counts["gaps"] += 1
            await self._replay_missed()
            # The replay did not fill the gap: a removal may have been lost.
            if self.last_applied is not None and number > self.last_applied + 1:
                self.clear_state()
        if self.last_applied is None or number > self.last_applied:
            await self._apply_message(number, payload)

    async def _replay_missed(self) -> None:
        """Request and apply all messages from the last applied one on; that one detects a restart."""
        if self.replay is None:
            self.clear_state()
            return
        self.counts["replays"] += 1
        try:
            # Closed at once when the rest is of no use, so that its socket is free.
            async with aclosing(self.replay(max(0, self.last_applied or 0))) as missed:
                is_same_engine = await self._apply_missed(missed)
        except ReplayFailed:
            self.counts["lost"] += 1
            self.clear_state()
            return
        if not is_same_engine:
            self.counts["restarts"] += 1
            self._last_heard = NO_MESSAGE
            self.clear_state()
            # From 0 now, since clear_state() has forgotten the
            # number: all that the new engine keeps.
            await self._replay_missed()
        elif self.last_applied is None:
            self.last_applied = NO_MESSAGE  # the engine has published nothing yet

    async def _apply_missed(self, missed: AsyncIterator[tuple[int, bytes]]) -> bool:
        """Apply replayed messages; returns whether they come from the same start of the engine."""
        last_applied = self.last_applied
        has_proof = last_applied is None or last_applied == NO_MESSAGE
        async for number, payload in missed:
            if not has_proof:
                has_proof = True
                if number == last_applied and payload != self._last_payload:
                    return False
                if number != last_applied:  # the engine no longer keeps the messages in between
                    self.clear_state()
            if self.last_applied is None or number > self.last_applied:
                await self._apply_message(number, payload)
        return has_proof

    async def _apply_message(self, number: int, payload: bytes) -> None:
        self.counts["messages"] += 1
        try:
            await run_sliced(self._apply_events(payload))
        except MalformedEvents:
            # Part of the message may be applied, and a removal may be in the rest.
            self.counts["malformed"] += 1
            self.clear_state()
        self.last_applied = number
        self._last_payload = payload
        # Between messages, so that memory of cleared caches does not pile up.
        await run_sliced(self.ledger.index.free_retired())

    def _apply_events(self, payload: bytes) -> Iterator[None]:
        for event in iterate_kv_events(payload):
            self.counts["events"] += 1
            yield from self.ledger.apply_event(event)

    def clear_state(self) -> None:
        """Assume an empty cache, and accept any message as the next."""
        if len(self.ledger):
            self.counts["clears"] += 1
        self.ledger.clear_blocks()
        self.last_applied = None
