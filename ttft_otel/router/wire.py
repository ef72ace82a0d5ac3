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

# What this task's request is an attempt of; nobody's for probes and the like.
sending: Final[ContextVar[Attempt | None]] = ContextVar("sending", default=None)


class Connector(aiohttp.TCPConnector):
    """Marks when the attempt was sent, and whether its connection was new."""

    def __init__(self, keepalive: float) -> None:
        super().__init__(limit=0, keepalive_timeout=keepalive)  # the engines queue, not the router
        self._used: weakref.WeakSet[ResponseHandler] = weakref.WeakSet()

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        """Take an open connection, or make one."""
        attempt = sending.get()
        if attempt is not None:
            attempt.sent, attempt.fresh = clock.now(), True
        connection = await super().connect(req, traces, timeout)
        protocol = connection.protocol
        if protocol in self._used:
            if attempt is not None:
                attempt.sent, attempt.fresh = clock.now(), False
        elif protocol is not None:
            self._used.add(protocol)
        return connection
