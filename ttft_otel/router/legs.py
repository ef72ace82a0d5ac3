# SPDX-License-Identifier: Apache-2.0
"""Call the instances: forward.py asks for a leg; choose, send, try another, mark times."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

import aiohttp
from yarl import URL

from ttft_otel import clock, context, names, timing
from ttft_otel.router import choose, retry, wire
from ttft_otel.router.choose import ENCODE
from ttft_otel.router.fleet import Fleet
from ttft_otel.router.health import Health
from ttft_otel.router.path import Attempt
from ttft_otel.router.routing import Routing

PREFILL: Final = "prefill"
WHOLE: Final = (ENCODE, PREFILL)  # their whole answer is what the next leg waits for
CONNECT: Final = 10.0  # seconds; an answer itself may take as long as it takes
IDLE: Final = 4.0  # seconds; vLLM closes idle connections after 5, and must not win that race
_AUTO: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


class Down(Exception):
    """No instance answered; `status` is for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Legs:
    """The fleet and the one client session to it; started and closed on the event loop."""

    def __init__(
        self,
        fleet: Fleet | Mapping[str, Sequence[choose.Instance]],
        routing: Routing | None = None,
        retries: int = retry.RETRIES,
        budget: float = retry.RATIO,
        health: Health | None = None,
    ) -> None:
        self.fleet = fleet if isinstance(fleet, Fleet) else Fleet(fleet)
        self.routing = routing or Routing(self.fleet)
        self.retries, self.budget = retries, retry.Budget(budget)
        self.health = health or Health(self.fleet)
        self.retried: dict[str, int] = {}
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the session."""
        self._session = aiohttp.ClientSession(
            connector=wire.Connector(IDLE),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_AUTO,
        )
        await self.health.start(self._session)
        await self.routing.start(self._session)

    async def follow(self) -> None:
        """The fleet's instances are others now."""
        self.routing.follow()
        await self.health.follow()

    async def close(self) -> None:
        """Close every connection."""
        await self.routing.close()
        await self.health.close()
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
        self,
        asked: choose.Asked,
        trace: context.Context,
        chain: list[Attempt],
        only: choose.Instance | None = None,
    ) -> aiohttp.ClientResponse:
        """Send one leg, and again elsewhere where retry.py allows it. Raises Down.

        `only`: to this instance and no other. Whoever calls ends the response, and tells
        `fleet.left` of every attempt in `chain`. Raises Late, too, where the policy does.
        """
        self.budget.earn()
        offered = (only,) if only else self.fleet.offered(asked.leg, asked.model)
        if chain and not only:
            offered = _others(offered, chain)
        if not offered:
            raise Down(503, f"No {asked.leg} instance can take the request now.")
        desk = self.routing.at(asked.leg)
        while True:
            again = bool(chain) and chain[-1].lost
            choice = desk.policy.choose(asked, offered, clock.now(), again)
            try:
                response = await self._send(asked, trace, choice, offered, chain)
            except (aiohttp.ClientError, OSError) as error:
                offered = self.after(asked, chain, error, only)
                if not offered:
                    raise down(chain[-1], error) from error
            else:
                if not retry.unable(asked.leg, response.status):
                    self.fleet.good(choice.instance)
                    return response
                offered = self._refused(asked, chain, only)
                if not offered:
                    return response
                response.close()
            await self.pause(chain)

    def after(
        self,
        asked: choose.Asked,
        chain: list[Attempt],
        error: BaseException,
        only: choose.Instance | None = None,
    ) -> tuple[choose.Instance, ...]:
        """Note a connection that failed; where to try again, if anywhere."""
        attempt = chain[-1]
        attempt.lost, attempt.error, attempt.ended = True, type(error).__name__, clock.now()
        unsent, raced = retry.unsent(error), retry.raced(attempt, error)
        if not raced:
            self._bad(attempt, f"{type(error).__name__}: {error}", unsent)
        others = () if only else _others(self.fleet.offered(asked.leg, asked.model), chain)
        if raced and attempt.instance is not None:
            # nobody's fault, and read by nobody: the same instance will do, but only once
            return self._allowed(asked, others or (attempt.instance,), chain, retry.RACES)
        if only or not (unsent or asked.leg == ENCODE):
            return ()
        return self._allowed(asked, others, chain, self.retries)

    def _refused(
        self, asked: choose.Asked, chain: list[Attempt], only: choose.Instance | None
    ) -> tuple[choose.Instance, ...]:
        """Note an answer that says "not now"; where to try again, if anywhere."""
        attempt = chain[-1]
        self._bad(attempt, f"it answered {attempt.status}", False)
        if only or asked.final:
            return ()
        attempt.lost = True
        others = _others(self.fleet.offered(asked.leg, asked.model), chain)
        others = self._allowed(asked, others, chain, self.retries)
        if others:
            attempt.ended = clock.now()
        else:
            attempt.lost = False  # it is the client's answer
        return others

    def _bad(self, attempt: Attempt, why: str, unreachable: bool) -> None:
        if attempt.instance is not None:
            self.fleet.bad(attempt.instance, why, unreachable)

    def _allowed(
        self,
        asked: choose.Asked,
        others: tuple[choose.Instance, ...],
        chain: list[Attempt],
        most: int,
    ) -> tuple[choose.Instance, ...]:
        """The others, if this request and the budget still have a retry."""
        if asked.leg == ENCODE:
            most = min(most, retry.ENCODES)
        if not others or sum(each.lost for each in chain) > most or not self.budget.spend():
            return ()
        self.retried[asked.leg] = self.retried.get(asked.leg, 0) + 1
        return others

    async def pause(self, chain: list[Attempt]) -> None:
        """Wait a little before the next attempt; the lost one goes on until then."""
        attempt = chain[-1]
        self.fleet.left(attempt)
        try:
            await asyncio.sleep(retry.wait(attempt.number))
        finally:
            attempt.resumed = clock.now()

    async def _send(
        self,
        asked: choose.Asked,
        trace: context.Context,
        choice: choose.Choice,
        offered: tuple[choose.Instance, ...],
        chain: list[Attempt],
    ) -> aiohttp.ClientResponse:
        to = choice.instance
        span_id = context.new_id()
        extra = {names.REQUEST_HEADER: asked.request_id}
        if trace.trace_id:
            extra[names.TRACEPARENT] = trace.parent(span_id)
            extra[names.ASK], extra[names.LEG_HEADER] = "1", asked.leg
        if trace.state:
            extra[names.TRACESTATE] = trace.state
        url = URL(to.url + asked.path, encoded=True)
        path = asked.path.partition("?")[0][:256]
        attempt = Attempt(
            asked.leg, path, to.host, to.port, span_id, clock.now(), number=len(chain) + 1
        )
        attempt.offered = offered
        chain.append(attempt)
        self.fleet.take(attempt, to)
        desk = self.routing.at(asked.leg)
        desk.book(asked, choice, attempt)
        if attempt.account and desk.policy.learns and not trace.trace_id:
            # one that asks itself gets what it asked for
            attempt.account.asks = asked.headers.get(names.ASK) != "1"
            extra[names.ASK] = "1"
        try:
            with wire.Sending(attempt):
                response = await self.session.post(
                    url,
                    data=asked.body,
                    headers={**asked.headers, **extra},
                    allow_redirects=False,
                )
        except asyncio.CancelledError:
            attempt.cut()
            raise
        attempt.status = response.status
        if response.status >= 400:
            attempt.error = str(response.status)
        return response


def learn(attempt: Attempt, response: aiohttp.ClientResponse) -> None:
    """Read the server's breakdown, and tell the policy; after the first chunk: it is nobody's hop."""
    attempt.timing = timing.read(", ".join(response.headers.getall(names.TIMING, ())))
    if attempt.account is not None and attempt.status < 400:
        streaming = attempt.leg in WHOLE or response.content_type == "text/event-stream"
        attempt.account.first(attempt.first, attempt.timing, streaming)


def _others(
    offered: tuple[choose.Instance, ...], chain: Sequence[Attempt]
) -> tuple[choose.Instance, ...]:
    tried = [attempt.instance for attempt in chain]
    return tuple(each for each in offered if each not in tried)


def down(attempt: Attempt, error: BaseException) -> Down:
    """For the client: which leg and what; addresses are the operator's, in span and log."""
    status = 503 if isinstance(error, aiohttp.ConnectionTimeoutError) else 502
    return Down(status, f"The {attempt.leg} instance failed: {type(error).__name__}.")
