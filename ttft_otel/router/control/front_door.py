# SPDX-License-Identifier: Apache-2.0
"""What all connections of clients share: limits, deadlines and refusals; client_connection.py asks it.

uvicorn_server.py makes one per server.
"""

from __future__ import annotations

from collections import Counter
from operator import methodcaller
from typing import Final

import httptools

from ttft_otel.router.deadlines import DeadlineQueue, Waiter
from ttft_otel.router.errors import RequestRejected
from ttft_otel.router.limits import RouterLimits
from ttft_otel.router.types import HeaderList

MAX_PIPELINED_REQUESTS: Final = 32  # of one connection that wait for an answer
IDLE_S: Final = 5.0  # seconds for which a connection stays open after an answer, as uvicorn's do
MAX_LINGER_S: Final = 30.0  # seconds for which bytes after a refusal are read and thrown away
_SPARE_HEAD_BYTES: Final = 1024  # method, version and blanks, which no limit counts


class FrontDoor:
    """What all connections share. refusal_counts: refusals by reason.

    max_connections: beyond it connections are refused, and beyond some more closed without an answer.
    """

    def __init__(
        self, limits: RouterLimits, refusal_counts: Counter[str], max_connections: int
    ) -> None:
        self.limits, self.refusal_counts = limits, refusal_counts
        self.max_connections = max_connections
        # Some sockets more, so that the first ones beyond the limit can be told why.
        self.max_open_sockets = max_connections + max(1, max_connections // 8)
        self.awaited_heads: DeadlineQueue[Waiter] = DeadlineQueue(limits.head_timeout)
        # Time for a client to read its refusal while it still sends a body.
        self.lingering: DeadlineQueue[Waiter] = DeadlineQueue(MAX_LINGER_S)
        self.idle_clients: DeadlineQueue[Waiter] = DeadlineQueue(
            IDLE_S,
            methodcaller("timeout_keep_alive_handler"),  # uvicorn's, of HttpToolsProtocol
        )

    def forget(self, connection: Waiter) -> None:
        """The connection is lost: nothing is waited for."""
        for queue in (self.awaited_heads, self.lingering, self.idle_clients):
            queue.forget(connection)

    def check_head(self, target: bytes, header_count: int, head_bytes: int) -> None:
        """Raise RequestRejected for a head that is too long, or a part of one.

        head_bytes: of a part, as it came: a header counts before it is complete.
        """
        limits = self.limits
        if len(target) > limits.max_target:
            raise RequestRejected(
                414, f"The target is longer than {limits.max_target} bytes.", reason="target"
            )
        # The parts of a head are counted as they come, target and blanks included.
        max_bytes = limits.max_target + limits.max_header_bytes + _SPARE_HEAD_BYTES
        if header_count > limits.max_headers or head_bytes > max_bytes:
            raise build_header_error(limits)

    def check_header_bytes(self, headers: HeaderList) -> None:
        """Raise RequestRejected for headers that are too long together."""
        if sum(len(name) + len(value) for name, value in headers) > self.limits.max_header_bytes:
            raise build_header_error(self.limits)


def omit_upgrade(headers: HeaderList) -> HeaderList:
    """A request's `headers` without what asks for another protocol."""
    kept: HeaderList = []
    for name, value in headers:
        if name == b"connection":
            words = (word.strip() for word in value.split(b","))
            value = b", ".join(word for word in words if word.lower() != b"upgrade")
        if name != b"upgrade":
            kept.append((name, value))
    return kept


def build_header_error(limits: RouterLimits) -> RequestRejected:
    """Too many headers or trailers, or too long ones."""
    return RequestRejected(
        431,
        f"The request has more than {limits.max_headers} headers or {limits.max_header_bytes} bytes of them.",
        reason="headers",
    )


def build_slow_head_error() -> RequestRejected:
    """A head that did not arrive in time."""
    return RequestRejected(
        408, "The head of the request did not arrive in time.", reason="head_timeout"
    )


def build_connection_error() -> RequestRejected:
    """A connection beyond the limit."""
    return RequestRejected(
        503,
        "The router has too many connections.",
        "UnavailableError",
        retry_after_s=1,
        reason="connections",
    )


def build_pipelining_error() -> RequestRejected:
    """A request beyond those that wait on its connection."""
    return RequestRejected(
        429,
        f"More than {MAX_PIPELINED_REQUESTS} requests wait on this connection.",
        "RateLimitError",
        reason="pipelining",
    )


def find_cause(error: httptools.HttpParserError) -> RequestRejected:
    """What a method of the connection raised while it was called by the parser, or bad HTTP."""
    # What a callback raises is the context of the parser's own error.
    if isinstance(error.__context__, RequestRejected):
        return error.__context__
    return RequestRejected(400, "This is not a valid HTTP request.", reason="http")
