# SPDX-License-Identifier: Apache-2.0
"""A worker's connection to the process that keeps the index of KV events; kept_source.py asks through it.

A lookup never waits for longer than DEADLINE_S: without an answer the worker decides by what it knows.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Final, cast

import msgspec

from ttft_otel.router.routing.prefixes.keeper_frames import (
    Depths,
    Follow,
    FrameSplitter,
    Lookup,
    Status,
    WorkerMessage,
    frame_message,
    keeper_decoder,
    pack_keys,
)

# Seconds that a request waits for an answer, which takes a tenth of a millisecond where nothing else runs.
DEADLINE_S: Final = 0.008
GRACE_S: Final = 0.001  # more, to read what arrived while this worker itself was busy
MAX_LOOKUPS: Final = 64  # lookups that wait; further requests are decided without
MAX_UNSENT_BYTES: Final = 1 << 20  # that a keeper has not read yet; then the same
MAX_LATE: Final = 3  # answers in a row that are late, before lookups pause
LATE_PAUSE_S: Final = 1.0  # seconds without lookups after that
RECONNECT_S: Final = 0.1  # seconds between two attempts to connect
WARNING_INTERVAL_S: Final = 60.0

log: Final = logging.getLogger("ttft_otel")


class KeeperChannel(asyncio.Protocol):
    """Connects to the keeper at `path`, for ever; list_urls: the instances that prefill.

    take_status: gets what the keeper says each second, None when the connection is lost. counts: lookups by
    result: answered; late; skipped, because too many wait or were late; away, because there is no keeper.
    """

    def __init__(
        self,
        path: Path,
        list_urls: Callable[[], Sequence[str]],
        take_status: Callable[[Status | None], None],
    ) -> None:
        self.path, self.list_urls, self.take_status = path, list_urls, take_status
        self.counts: Counter[str] = Counter(
            dict.fromkeys(("answered", "late", "skipped", "away"), 0)
        )
        self._waiting: dict[int, asyncio.Future[dict[str, int] | None]] = {}
        self._numbers = itertools.count(1)
        self._transport: asyncio.Transport | None = None
        self._lost = asyncio.Event()
        self._splitter = FrameSplitter()
        self._late_in_row, self._paused_until_s = 0, 0.0
        self._warned_s = -WARNING_INTERVAL_S
        self._task = asyncio.create_task(self._connect_forever())

    @property
    def is_connected(self) -> bool:
        """Whether there is a keeper that could be asked."""
        return self._transport is not None

    async def close(self) -> None:
        """End the connection."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._transport is not None:
            self._transport.abort()

    async def look_up(self, keys: Sequence[int]) -> dict[str, int] | None:
        """Leading blocks of `keys` that each reporting instance has, by URL; None without a timely answer."""
        transport = self._transport
        if transport is None:
            self.counts["away"] += 1
            return None
        is_busy = transport.get_write_buffer_size() > MAX_UNSENT_BYTES
        if is_busy or len(self._waiting) >= MAX_LOOKUPS or monotonic() < self._paused_until_s:
            self.counts["skipped"] += 1
            return None
        number, loop = next(self._numbers), asyncio.get_running_loop()
        answer: asyncio.Future[dict[str, int] | None] = loop.create_future()
        self._waiting[number] = answer
        timer = loop.call_later(DEADLINE_S, self._begin_grace, number)
        transport.write(frame_message(Lookup(number, pack_keys(keys))))
        try:
            depths = await answer
        finally:
            timer.cancel()
            self._waiting.pop(number, None)
        self._note_answer(depths)
        return depths

    def tell_urls(self) -> None:
        """Tell the keeper which instances there are now."""
        self._send(Follow(list(self.list_urls())))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Introduce this worker."""
        self._transport = cast(asyncio.Transport, transport)
        self._splitter, self._late_in_row, self._paused_until_s = FrameSplitter(), 0, 0.0
        self.tell_urls()

    def data_received(self, data: bytes) -> None:
        """Take in what the keeper says."""
        try:
            for frame in self._splitter.split_frames(data):
                message = keeper_decoder.decode(frame)
                if isinstance(message, Depths):
                    self._end_lookup(message.number, message.depths)
                else:
                    self.take_status(message)
        except (ValueError, msgspec.MsgspecError) as error:
            log.warning("ttft-otel: the keeper of the KV-event index is not understood: %s", error)
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Decide without it, from the requests on that wait."""
        self._transport = None
        for number in list(self._waiting):
            self._end_lookup(number, None)
        self.take_status(None)
        self._lost.set()

    async def _connect_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._lost.clear()
            try:
                await loop.create_unix_connection(lambda: self, str(self.path))
            # It is being started, or replaced.
            except OSError:
                await asyncio.sleep(RECONNECT_S)
            else:
                await self._lost.wait()

    def _send(self, message: WorkerMessage) -> None:
        if self._transport is not None:
            self._transport.write(frame_message(message))

    def _begin_grace(self, number: int) -> None:
        # uvloop runs timers before it reads sockets: after a long turn the answer may be there already.
        asyncio.get_running_loop().call_later(GRACE_S, self._end_lookup, number, None)

    def _end_lookup(self, number: int, depths: dict[str, int] | None) -> None:
        answer = self._waiting.pop(number, None)
        if answer is not None and not answer.done():
            answer.set_result(depths)

    def _note_answer(self, depths: dict[str, int] | None) -> None:
        if depths is not None:
            self.counts["answered"] += 1
            self._late_in_row = 0
        elif self._transport is None:
            self.counts["away"] += 1
        else:
            self.counts["late"] += 1
            self._late_in_row += 1
            if self._late_in_row >= MAX_LATE:
                self._pause()

    def _pause(self) -> None:
        """Do not let every request wait for a keeper that is stuck."""
        moment = monotonic()
        self._late_in_row, self._paused_until_s = 0, moment + LATE_PAUSE_S
        if moment - self._warned_s >= WARNING_INTERVAL_S:
            self._warned_s = moment
            log.warning(
                "ttft-otel: the process that keeps the index of KV events does not answer within %g ms: "
                "meanwhile cached prefixes are estimated from the prompts sent; give it a core",
                DEADLINE_S * 1000,
            )
