# SPDX-License-Identifier: Apache-2.0
"""The data path: a client's request in, the legs' bytes out as they come, times marked.

A raw ASGI endpoint: a framework's request and response objects cost as much as all of this.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any, Final

import aiohttp

from ttft_otel import clock, context, names
from ttft_otel.guard import Guard
from ttft_otel.record import encode
from ttft_otel.router import answer, body, choose, fan, headers, plan
from ttft_otel.router.answer import Send
from ttft_otel.router.fan import Refused, critical
from ttft_otel.router.gate import Gate
from ttft_otel.router.legs import Down, Legs
from ttft_otel.router.pair import Pair
from ttft_otel.router.path import Attempt, Trip, partition
from ttft_otel.router.plan import CHAT
from ttft_otel.router.policies.ttft import Late
from ttft_otel.router.report import Exchange, Reports, tell
from ttft_otel.router.stream import Client, hand_on
from ttft_otel.settings import Settings

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

OPERATIONS: Final[Mapping[str, str]] = {
    CHAT: "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
}
PROMPTS: Final = (*OPERATIONS, "/v1/messages")  # their bodies are work for the engine
OTHERS: Final = "/v1/{path:path}"
LAST: Final = ("decode", "prefill_decode", "mono")  # the leg that answers: the first there is
LARGEST: Final = 128 << 20  # bytes of a body; images travel inside it
GONE: Final = "disconnected"


class Forward:
    """The ASGI endpoint of every POST below /v1; `send` takes a Record's bytes and never waits.

    Without `send` tracing is off: nothing is measured, and trace headers pass as they came.
    """

    def __init__(
        self,
        legs: Legs,
        settings: Settings,
        send: Callable[[bytes], bool] | None,
        reports: Reports | None = None,
        largest: int = LARGEST,
        first_token: str = plan.STRIP,
        gate: Gate | None = None,
    ) -> None:
        self.legs, self.settings, self.largest = legs, settings, largest
        self.gate = gate or Gate(legs)
        self.answered: Counter[str] = Counter()  # by class of status
        self.emit = send
        self.reports = reports if reports is not None else Reports()
        self.encoders = bool(legs.fleet.get("encode"))
        self.first_token, self.pair = first_token, Pair(legs)
        self.last = next(leg for leg in LAST if legs.fleet.get(leg) or leg == LAST[-1])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; whatever happens to it is told when it is over."""
        arrive = clock.now()
        found = headers.sort(scope["headers"], self.emit is not None)
        exchange = self._begin(scope, found, arrive)
        watch: asyncio.Task[None] | None = None
        try:
            self.gate.enter(found, bool(exchange.operation))
            data = await _body(receive, found, self.largest, exchange)
            if data is not None:
                here = asyncio.current_task()
                watch = asyncio.create_task(_watch(receive, exchange, here))
                await self._serve(scope, found, data, exchange, send)
        except asyncio.CancelledError:
            if not exchange.gone:
                exchange.error = "cancelled"
                raise
            exchange.error = GONE
        except (answer.Rejected, Refused, Down) as error:
            await answer.fail(error, exchange, send)
        except Late as error:
            self.legs.routing.late += 1
            await answer.fail(answer.TooLate(error.after), exchange, send)
        except (aiohttp.ClientError, OSError) as error:
            # mid-stream: what is out is out; returning unfinished makes uvicorn cut the connection
            exchange.error = type(error).__name__
            if not exchange.status:
                why = f"The instance failed: {type(error).__name__}."
                await answer.fail(Down(502, why), exchange, send)
        except Exception as error:  # a fault of ours: told and counted too, and uvicorn logs it
            exchange.error = type(error).__name__
            if not exchange.status:
                await answer.fail(Down(500, "The router failed."), exchange, send)
            raise
        finally:
            # once a whole answer is out the watch ends by itself, for less than a cancellation
            if watch is not None and not exchange.done:
                watch.cancel()
            exchange.done = True
            self._end(exchange)

    def _begin(self, scope: Scope, found: headers.Incoming, arrive: int) -> Exchange:
        trace = context.NONE
        if self.emit is not None:
            parent, state = found.get(names.TRACEPARENT), found.get(names.TRACESTATE)
            trace = context.start(parent, state, self.settings)
        path = scope["path"]
        return Exchange(
            trace,
            context.new_id(),
            headers.request_id(found.get(names.REQUEST_HEADER)),
            path,
            path if path in OPERATIONS else OTHERS,
            scope.get("scheme", "http"),
            OPERATIONS.get(path, ""),
            not (self.settings.trust and found.get(names.LEG_HEADER)),
            Trip(arrive),
        )

    async def _serve(
        self, scope: Scope, found: headers.Incoming, data: bytes, exchange: Exchange, send: Send
    ) -> None:
        asks_media = self.encoders and exchange.path == CHAT
        request = body.read(data, asks_media)
        exchange.model, exchange.stream = request.model, request.stream
        exchange.trip.parsed = clock.now()
        if exchange.operation:
            key = found.passed.get("authorization", "")
            await self.gate.look(request, self.last, key)
        asked = self._asked(scope, found, request, exchange)
        made = None
        if self.last == plan.DECODE:
            made = plan.decide(
                exchange.path, request.data, request.stream, bool(request.media), self.first_token
            )
            asked = replace(asked, leg=made.legs[0])
        if exchange.path in PROMPTS:
            media = bool(request.media)
            asked = await self.legs.routing.look(asked, exchange.path, exchange.trip, media)
        if request.media:
            calls = fan.calls(request, asked)
            self.legs.routing.foresee(asked, calls)
            await self._prime(calls, exchange)
        client = Client(exchange, send, found.get(names.ASK) == "1", self._tell_first)
        if made is not None:
            if len(made.legs) > 1:
                await self.pair.serve(made, asked, exchange, client)
                return
            exchange.token = (made.mode, made.reason)
        chain: list[Attempt] = []
        exchange.calls.append(chain)
        exchange.trip.path.append(chain)
        response = await self.legs.open(asked, exchange.context, chain)
        await hand_on(response, chain[-1], client)

    def _asked(
        self, scope: Scope, found: headers.Incoming, request: body.Body, exchange: Exchange
    ) -> choose.Asked:
        query = scope.get("query_string", b"").decode("latin-1")
        path = scope.get("raw_path", exchange.path.encode()).decode("latin-1")
        return choose.Asked(
            self.last,
            f"{path}?{query}" if query else path,
            request.model,
            exchange.request_id,
            found.passed,
            request.data,
            arrived=exchange.trip.arrive,
        )

    async def _prime(self, calls: list[choose.Asked], exchange: Exchange) -> None:
        """Every item to an encoder, at once; the slowest is the one on the critical path."""
        chains: list[list[Attempt]] = [[] for _ in calls]
        exchange.calls.extend(chains)
        try:
            await fan.prime(self.legs, calls, exchange.context, chains)
        finally:
            exchange.trip.path.append(critical(chains))

    def _tell_first(self, exchange: Exchange) -> None:
        if self.emit is None:
            return
        cut = partition(exchange.trip)
        self.reports.put(exchange.request_id, exchange.trip, cut)
        exchange.told = True
        if exchange.context.sampled:
            self.emit(encode(tell(exchange, cut)))

    def _end(self, exchange: Exchange) -> None:
        for attempt in (attempt for chain in exchange.calls for attempt in chain):
            self.legs.fleet.left(attempt)
        self.answered[f"{exchange.status // 100}xx" if exchange.status else exchange.error] += 1
        if self.emit is None:
            return
        with Guard("router.end"):
            end = clock.now()
            cut = None
            if exchange.error and not exchange.given:
                exchange.trip.end = end
            if exchange.error and not (exchange.given and exchange.status < 400):
                exchange.died = _died(exchange.trip)
            if exchange.operation and not exchange.told:
                cut = partition(exchange.trip)
                self.reports.put(exchange.request_id, exchange.trip, cut)
            if exchange.context.sampled:
                self.emit(encode(tell(exchange, cut, end)))


async def _body(
    receive: Receive, found: headers.Incoming, largest: int, exchange: Exchange
) -> bytes | None:
    """The whole request body; None when the client left before its end. Raises TooLarge."""
    length = found.get("content-length")
    if length.isdigit() and int(length) > largest:
        raise answer.TooLarge
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            exchange.error = GONE
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > largest:
            raise answer.TooLarge
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def _watch(receive: Receive, exchange: Exchange, task: asyncio.Task[Any] | None) -> None:
    """Cancel the request's task, and with it its legs, when the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass
    if not exchange.done and task is not None:
        exchange.gone = True
        task.cancel()


def _died(trip: Trip) -> str:
    """The stage it was in: deeper than the hop nobody here can see."""
    if not trip.parsed:
        return "router.receive"
    look = trip.look
    if look is not None and not look.found:
        return "router.lookup" if look.read else "router.tokenize"
    attempts = [attempt for chain in trip.path for attempt in chain]
    return f"router.hop.{attempts[-1].leg}" if attempts else "router.route"
