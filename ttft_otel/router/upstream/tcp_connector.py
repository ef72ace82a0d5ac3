# SPDX-License-Identifier: Apache-2.0
"""An aiohttp connector that notes when an attempt is sent; upstream_client.py uses it.

An attempt begins when its connection is requested or, if an open one is reused, when it was obtained;
all before that counts as `router.route`. aiohttp's trace signals could do the same, but would cost a
tenth of the router's time per request.
"""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import Final

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.tracing import Trace

from ttft_otel.router.timeline import Attempt

_current_attempts: Final[ContextVar[tuple[()] | list[Attempt]]] = ContextVar("sending", default=())


class AttemptScope:
    """Context manager within which connections of the current task belong to `attempt`."""

    __slots__ = ("_attempts", "_token")

    def __init__(self, attempt: Attempt) -> None:
        self._attempts = [attempt]

    def __enter__(self) -> None:
        self._token = _current_attempts.set(self._attempts)

    def __exit__(self, *_: object) -> None:
        _current_attempts.reset(self._token)
        self._attempts.clear()  # a connection made here keeps a reference to this context


class TimedConnector(aiohttp.TCPConnector):
    """Sets `sent_us` and `is_new_connection` of the current attempt.

    keepalive_s: seconds for which idle connections stay open.
    """

    def __init__(self, keepalive_s: float) -> None:
        super().__init__(
            limit=0, keepalive_timeout=keepalive_s
        )  # the engines queue, not the router
        self._used_protocols: weakref.WeakSet[ResponseHandler] = weakref.WeakSet()

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        """Reuse or open a connection, as aiohttp does, noting the time."""
        attempts = _current_attempts.get()
        for attempt in attempts:
            attempt.record_sent(is_new_connection=True)
        connection = await super().connect(req, traces, timeout)
        protocol = connection.protocol
        if protocol in self._used_protocols:
            for attempt in attempts:
                attempt.record_sent(is_new_connection=False)
        elif protocol is not None:
            self._used_protocols.add(protocol)
        return connection
