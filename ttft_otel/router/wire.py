# SPDX-License-Identifier: Apache-2.0
"""When a leg begins: its connection is asked for, or its bytes go to one that is open; legs.py sends.

What the client library does before that is the router's own work, `router.route`. A connector of our
own because the library's trace signals cost a tenth of all that a request costs the router.
"""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import Final

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.tracing import Trace

from ttft_otel import clock
from ttft_otel.router.path import Attempt

_sending: Final[ContextVar[tuple[()] | list[Attempt]]] = ContextVar("sending", default=())


class Sending:
    """While it is entered, what this task sends is this attempt; probes and the like are nobody's."""

    __slots__ = ("_held", "_token")

    def __init__(self, attempt: Attempt) -> None:
        self._held = [attempt]

    def __enter__(self) -> None:
        self._token = _sending.set(self._held)

    def __exit__(self, *_: object) -> None:
        _sending.reset(self._token)
        self._held.clear()  # the context lives on with the connection that was made in it


class Connector(aiohttp.TCPConnector):
    """Marks when the attempt was sent, and whether its connection was new."""

    def __init__(self, keepalive: float) -> None:
        super().__init__(limit=0, keepalive_timeout=keepalive)  # the engines queue, not the router
        self._used: weakref.WeakSet[ResponseHandler] = weakref.WeakSet()

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        """Take an open connection, or make one."""
        sending = _sending.get()
        for attempt in sending:
            attempt.sent, attempt.fresh = clock.now(), True
        connection = await super().connect(req, traces, timeout)
        protocol = connection.protocol
        if protocol in self._used:
            for attempt in sending:
                attempt.sent, attempt.fresh = clock.now(), False
        elif protocol is not None:
            self._used.add(protocol)
        return connection
