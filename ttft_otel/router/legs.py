# SPDX-License-Identifier: Apache-2.0
"""Call the instances: forward.py asks for a leg; choose, send, try another, mark times."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp
from yarl import URL

from ttft_otel import clock, context, names, timing
from ttft_otel.router import choose, headers
from ttft_otel.router.path import Attempt

TRIES: Final = 3  # instances tried before giving up
AT_ONCE: Final = 64  # encoder calls of one request in flight
CONNECT: Final = 10.0  # seconds; an answer itself may take as long as it takes
IDLE: Final = 4.0  # seconds; vLLM closes idle connections after 5, and must not win that race
_AUTO: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


class Down(Exception):
    """No instance answered; `status` is for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Refused(Exception):
    """An encoder answered with an error; the client gets exactly that."""

    def __init__(self, status: int, raw: list[tuple[bytes, bytes]], body: bytes) -> None:
        super().__init__(f"encoder answered {status}")
        self.status, self.headers, self.body = status, raw, body


class Legs:
    """The fleet and the one client session to it; started and closed on the event loop."""

    def __init__(
        self, fleet: Mapping[str, Sequence[choose.Instance]], policy: choose.Policy | None = None
    ) -> None:
        self.fleet = {leg: tuple(instances) for leg, instances in fleet.items()}
        self.policy: choose.Policy = policy or choose.RoundRobin()
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the session; limit=0 because the engines queue, not the router."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_AUTO,
            trace_configs=[_wire()],
        )

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The session, for the control plane's own questions."""
        if self._session is None:
            raise RuntimeError("Legs.start() has not run; serve the app with its lifespan on")
        return self._session

    async def open(
        self, asked: choose.Asked, trace: context.Context, chain: list[Attempt]
    ) -> aiohttp.ClientResponse:
        """Send one leg; on to the next instance only when nothing was sent. Raises Down."""
        left = list(self.fleet.get(asked.leg, ()))
        failure = Down(503, f"no {asked.leg} instance is configured")
        while left and len(chain) < TRIES:
            choice = self.policy.choose(asked, left, clock.now())
            candidates = len(left)
            left.remove(choice.instance)
            try:
                return await self._send(asked, trace, choice, candidates, chain)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                late = isinstance(error, aiohttp.ConnectionTimeoutError)
                failure = _lost(chain[-1], error, 503 if late else 502)
            except (aiohttp.ClientError, OSError) as error:
                # it may have been read: a request that kills an engine must not go on to the next
                raise _lost(chain[-1], error, 502) from error
        raise failure

    async def _send(
        self,
        asked: choose.Asked,
        trace: context.Context,
        choice: choose.Choice,
        candidates: int,
        chain: list[Attempt],
    ) -> aiohttp.ClientResponse:
        to = choice.instance
        span_id = context.new_id()
        extra = {
            names.TRACEPARENT: trace.parent(span_id),
            names.REQUEST_HEADER: asked.request_id,
            names.ASK: "1",
            names.LEG_HEADER: asked.leg,
        }
        if trace.state:
            extra[names.TRACESTATE] = trace.state
        url = URL(to.url + asked.path, encoded=True)
        path = asked.path.partition("?")[0][:256]
        attempt = Attempt(
            asked.leg, path, to.host, to.port, span_id, clock.now(), number=len(chain) + 1
        )
        attempt.policy, attempt.candidates = choice.reason, candidates
        chain.append(attempt)
        try:
            response = await self.session.post(
                url,
                data=asked.body,
                headers={**asked.headers, **extra},
                allow_redirects=False,
                trace_request_ctx=attempt,
            )
        except asyncio.CancelledError:
            attempt.cut()
            raise
        attempt.status = response.status
        if response.status >= 400:
            attempt.error = str(response.status)
        return response

    async def prime(
        self,
        asked: Sequence[choose.Asked],
        trace: context.Context,
        chains: Sequence[list[Attempt]],
    ) -> None:
        """Call encoders for all items at once; a failure ends the others. Raises Refused, Down."""
        if len(asked) == 1:
            await self._encode(asked[0], trace, chains[0])
            return
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(ask: choose.Asked, chain: list[Attempt]) -> None:
            async with gate:
                await self._encode(ask, trace, chain)

        tasks = [
            asyncio.create_task(one(ask, chain)) for ask, chain in zip(asked, chains, strict=True)
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            await _end(tasks)
        for failure in [task.exception() for task in tasks if not task.cancelled()]:
            if failure is not None:
                raise failure

    async def _encode(
        self, asked: choose.Asked, trace: context.Context, chain: list[Attempt]
    ) -> None:
        try:
            response = await self.open(asked, trace, chain)
            body = await response.read()  # closes its connection when it is cut short
        except asyncio.CancelledError:
            if chain:
                chain[-1].cut()
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise _lost(chain[-1], error, 502) from error
        chain[-1].first = chain[-1].ended = clock.now()
        learn(chain[-1], response)
        if response.status >= 400:
            raise Refused(response.status, headers.down(response.raw_headers), body)


def learn(attempt: Attempt, response: aiohttp.ClientResponse) -> None:
    """Read the server's breakdown; after its first chunk, so that reading it is nobody's hop."""
    attempt.timing = timing.read(", ".join(response.headers.getall(names.TIMING, ())))


def _wire() -> aiohttp.TraceConfig:
    """A leg begins when its connection is asked for, or when its bytes go to one that is open.

    What the client library does before that is the router's own work, `router.route`.
    """

    async def connecting(_: Any, context: Any, __: Any) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx.sent = clock.now()
            context.trace_request_ctx = None

    config = aiohttp.TraceConfig()
    config.on_connection_create_start.append(connecting)
    config.on_request_headers_sent.append(connecting)
    return config


def critical(chains: Sequence[list[Attempt]]) -> list[Attempt]:
    """The encoder leg that decided: one that failed, else one still running, else the slowest."""
    started = [chain for chain in chains if chain]
    return max(started, key=_decides, default=[])


def _decides(chain: list[Attempt]) -> tuple[bool, bool, int]:
    last = chain[-1]
    failed = last.lost or last.status >= 400
    return failed, not last.first, last.first


def _lost(attempt: Attempt, error: BaseException, status: int) -> Down:
    attempt.lost, attempt.error = True, type(error).__name__
    attempt.ended = clock.now()
    return Down(status, f"{attempt.leg} instance {attempt.host}:{attempt.port}: {error}")


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
