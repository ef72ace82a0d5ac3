# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware around a vLLM server: arrival, first chunk, end; Server-Timing for those who ask.

hooks/frontend.py puts it outermost; recorder.py keeps what it sees. It holds `http.response.start`
only for a caller that asked (and early events of a stream, until its first token).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, Final, TypeAlias

from ttft_otel import carrier, clock, handoff, meter, names, recorder
from ttft_otel.guard import Guard
from ttft_otel.settings import Settings
from ttft_otel.trip import Trip

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
Ask: TypeAlias = Callable[[Any, Trip, str], Awaitable[str]]

HOLD_LIMIT: Final = 65536  # bytes of early events held back for a caller that asked
ASK_LIMIT: Final = 256  # questions to the engine core under way at once
ASK_SECONDS: Final = 5.0
KEPT_LIMIT: Final = 1024  # answered requests whose blocks another instance has not fetched yet
PLAIN_WITH_EGRESS: Final = ("encode", "prefill")


class Middleware:
    """Traces POST requests that reach the engine, and those that fail on the way to it."""

    def __init__(self, app: App, settings: Settings, know: Callable[[Any], None], ask: Ask) -> None:
        self.app = app
        self.settings = settings
        self.know = know
        self.ask = ask
        self.late: set[asyncio.Task[None]] = set()
        self.kept: set[asyncio.Task[None]] = set()
        meter.watch(recorder.awaiting, handoff.counts)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one ASGI event."""
        trip = None
        if scope["type"] == "lifespan":
            with Guard("asgi know"):
                self.know(scope["app"])
        if scope["type"] == "http" and scope["method"] == "POST":
            with Guard("asgi begin"):
                trip = self._begin(scope)
        # Also when there is none: a pipelined request starts in the context of the one before it.
        recorder.current.set(trip)
        if trip is None:
            await self.app(scope, receive, send)
            return
        error = "error"
        try:
            await self.app(scope, receive, Sending(trip, send).send)
            error = ""
        except asyncio.CancelledError:
            error = "cancelled"
            raise
        finally:
            with Guard("asgi end"):
                self._end(scope, trip, error)

    def _begin(self, scope: MutableMapping[str, Any]) -> Trip | None:
        trip = recorder.begin(scope["headers"], self.settings)
        if trip is not None:
            trip.method, trip.path = scope["method"], scope["path"]
            trip.scheme = scope.get("scheme", "http")
        return trip

    def _end(self, scope: MutableMapping[str, Any], trip: Trip, error: str) -> None:
        trip.end = clock.now()
        trip.route = getattr(scope.get("route"), "path", "")
        recorder.forget(trip)
        if not trip.engines and trip.path not in recorder.OPERATIONS:
            return  # not a generating endpoint
        if trip.status >= 500 or (error and trip.cut is None):
            trip.error = str(trip.status) if trip.status >= 400 else error
        if trip.cut is None and trip.first is not None:
            recorder.close(trip, 0)
        if trip.cut is not None:
            recorder.hand(trip, handoff.sender(), server=True)
            if recorder.keeps(trip) and len(self.kept) < KEPT_LIMIT:
                self._later(self._fetched(scope["app"], trip), self.kept)
            return
        trip.error = str(trip.status) if trip.status >= 400 else error or "cancelled"
        if trip.engines and trip.status < 400 and len(self.late) < ASK_LIMIT:
            self._later(self._buried(scope["app"], trip), self.late)
            return
        recorder.fail(trip, trip.end)
        recorder.hand(trip, handoff.sender(), server=True)

    def _later(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.ensure_future(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _fetched(self, app: Any, trip: Trip) -> None:
        """Blocks are kept for another instance: the record has gone, a span of their own follows it."""
        with Guard("asgi kept"):
            found = carrier.kept(await self.ask(app, trip, carrier.SENT))
            if found is not None:
                recorder.follow(trip, found, handoff.sender())

    async def _buried(self, app: Any, trip: Trip) -> None:
        """Aborted before its first token: ask the engine core where it was, then send the record."""
        marks = ""
        with Guard("asgi ask"):
            try:
                marks = await asyncio.wait_for(self.ask(app, trip, carrier.DIED), ASK_SECONDS)
            except asyncio.TimeoutError:
                marks = ""
        with Guard("asgi end"):
            recorder.fail(trip, trip.end, marks)
            recorder.hand(trip, handoff.sender(), server=True)


class Sending:
    """Stands in for `send` until the first chunk is out; after that it only passes on."""

    __slots__ = ("held", "out", "past", "size", "trip")

    def __init__(self, trip: Trip, out: Send) -> None:
        self.trip = trip
        self.out = out
        self.held: list[Message] = []
        self.size = 0
        self.past = False

    async def send(self, message: Message) -> None:
        """Pass a message on; notice the start and the first chunk."""
        if self.past:
            await self.out(message)
            return
        wait = False
        with Guard("asgi send"):
            wait = self._notice(message)
        if wait:
            self.held.append(message)
            return
        held, self.held = self.held, []
        for early in held:
            await self.out(early)
        await self.out(message)
        if self._told():
            with Guard("asgi hand"):
                recorder.hand(self.trip, handoff.sender(), server=False)

    def _told(self) -> bool:
        return self.past and self.trip.streamed

    def _notice(self, message: Message) -> bool:
        """Tell whether the message has to wait."""
        trip = self.trip
        if message["type"] == "http.response.start":
            trip.status = message["status"]
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            trip.streamed = trip.status < 400 and kind.startswith(b"text/event-stream")
            return trip.asked and trip.status < 400
        if message["type"] != "http.response.body":
            return False
        body = message.get("body", b"")
        last = not message.get("more_body", False)
        if trip.streamed and trip.first is None and not last and recorder.identity.sees():
            # Keep-alive comments and opening events come before the first token.
            self.size += len(body)
            return bool(self.held) and self.size <= HOLD_LIMIT
        if not body and not last:
            return bool(self.held)
        if trip.streamed and body.startswith(b":") and not last:
            return bool(self.held)
        self.past = True
        self._first()
        return False

    def _first(self) -> None:
        trip = self.trip
        now = clock.now()
        egress = trip.streamed or recorder.role(trip) in PLAIN_WITH_EGRESS
        blind = egress and trip.status < 400 and not recorder.identity.sees()
        if trip.first is None and not blind:
            return
        recorder.close(trip, now if egress else 0)
        if self.held:
            text = recorder.header(trip, now)
            headers = [*self.held[0].get("headers", ()), (names.TIMING.encode(), text.encode())]
            self.held[0]["headers"] = headers
