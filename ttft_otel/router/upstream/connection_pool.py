# SPDX-License-Identifier: Apache-2.0
"""Kept connections, and the heads of requests on them; upstream_client.py and query_client.py send by it.

aiohttp's connector opens them (names, both address families, TLS). Its session would cost a request as
much as all the rest of the router.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from operator import methodcaller
from typing import Final

import aiohttp
from yarl import URL

from ttft_otel.router import lost_hosts
from ttft_otel.router.time_limits import DeadlineQueue
from ttft_otel.router.timeline import Attempt
from ttft_otel.router.upstream.client_tls import ClientTls
from ttft_otel.router.upstream.instance_connection import (
    PIECE_BYTES,
    InstanceAnswer,
    InstanceConnection,
)

ANY_TIME_S: Final = 1e8  # three years
# Seconds; vLLM closes idle connections after 5, and must not win that race.
KEEPALIVE_S: Final = 4.0
CONNECT_TIMEOUT_S: Final = 10.0  # seconds to connect; a response may take any time
# A tab is allowed in a header's value (RFC 9110 section 5.5); a line break would end it.
_CONTROL_CHARACTER: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


class InstanceOrigin:
    """One instance's address, with what every request to it begins with, and its idle connections."""

    __slots__ = ("request", "path_prefix", "host", "idle")

    def __init__(self, url: str) -> None:
        # encoded: a path prefix is sent as the operator wrote it, without yarl's normalisation.
        parsed = URL(url, encoded=True)
        # only its address is used, to open connections
        self.request = aiohttp.ClientRequest("POST", parsed, loop=asyncio.get_running_loop())
        self.path_prefix = parsed.raw_path.rstrip("/")
        self.host = parsed.host_port_subcomponent
        self.idle: list[InstanceConnection] = []  # the one used last at the end


class ConnectionPool:
    """Connections to all instances; made, used and closed on the event loop.

    Args:
        max_header_bytes: Bytes of one header of an answer.
        total_timeout_s: Seconds for a whole answer, 0 for any time.
        idle_timeout_s: Seconds without a byte of an answer that has begun, 0 for any time.
        tls: For https:// URLs; None for the system's authorities.
    """

    def __init__(
        self,
        max_header_bytes: int,
        total_timeout_s: float = 0.0,
        idle_timeout_s: float = 0.0,
        tls: ClientTls | None = None,
    ) -> None:
        # No limit of connections: the engines queue, not the router.
        self._connector = aiohttp.TCPConnector(limit=0)
        self._tls = tls
        self._max_header_bytes = max_header_bytes
        self._origins: dict[str, InstanceOrigin] = {}
        self._idle_since: DeadlineQueue[InstanceConnection] = DeadlineQueue(
            KEEPALIVE_S, methodcaller("close")
        )
        self._open: DeadlineQueue[InstanceConnection] = DeadlineQueue(
            idle_timeout_s or ANY_TIME_S, methodcaller("check_progress")
        )
        self._total_timeout_s = total_timeout_s
        # `connect` bounds all of it, the name's lookup too, `sock_connect` the connection itself.
        self._timeout = aiohttp.ClientTimeout(
            connect=total_timeout_s or None, sock_connect=CONNECT_TIMEOUT_S
        )

    async def send_request(
        self, attempt: Attempt, target: str, headers: Mapping[str, str], body: Sequence[bytes]
    ) -> InstanceAnswer:
        """POST to the instance of `attempt`, and wait for the head of its answer.

        target: path and query. body: its parts. Notes in `attempt` when it was sent: when its connection
        was requested or, if an open one is used, obtained. Raises UPSTREAM_ERRORS.
        """
        origin = self._get_origin(attempt.instance.url)
        length = sum(map(len, body))
        head = _encode_head(origin, "POST", target, headers, length)
        connection = self._take_idle(origin)
        # Before it is opened, so that the time which that takes counts to the hop.
        attempt.record_sent(is_new_connection=connection is None)
        if connection is None:
            connection = await self._open_connection(origin)
        return await self._exchange(connection, head, body, length)

    async def send_query(
        self, method: str, url: URL, headers: Mapping[str, str], body: bytes | None
    ) -> InstanceAnswer:
        """Send a question to `url`, and wait for the head of its answer. Raises UPSTREAM_ERRORS.

        A kept connection that its server has closed is replaced: questions may be asked twice.
        """
        origin = self._get_origin(str(url.origin()))
        length = None if body is None else len(body)
        head = _encode_head(origin, method, url.raw_path_qs, headers, length)
        while True:
            kept = self._take_idle(origin)
            connection = kept or await self._open_connection(origin)
            try:
                return await self._exchange(connection, head, (body or b"",), length or 0)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                # Ends: there is one kept connection less after each turn.
                if kept is None:
                    raise

    def _get_origin(self, url: str) -> InstanceOrigin:
        origin = self._origins.get(url)
        if origin is None:
            origin = self._origins[url] = InstanceOrigin(url)
        return origin

    async def _exchange(
        self, connection: InstanceConnection, head: bytes, body: Sequence[bytes], length: int
    ) -> InstanceAnswer:
        # A small body leaves with its head, in one write; a large one gives others their turn.
        is_large = length > PIECE_BYTES
        answer = connection.send_request((head,) if is_large else (head, *body))
        if self._total_timeout_s:
            answer.limit_time(self._total_timeout_s)
        try:
            if is_large:
                await connection.send_large_body(answer, body)
            await answer.wait_head()
        # At a cancellation too: what this request is answered must not meet the next one's reader.
        except BaseException:
            answer.close()
            raise
        return answer

    async def close(self) -> None:
        """Close all connections; requests under way fail."""
        for origin in self._origins.values():
            for connection in origin.idle:
                self._idle_since.forget(connection)
                connection.close()
        self._origins.clear()
        await self._connector.close()

    def _take_idle(self, origin: InstanceOrigin) -> InstanceConnection | None:
        while origin.idle:
            # The one used last: it is the least likely to be closed by the server in this moment.
            connection = origin.idle.pop()
            self._idle_since.forget(connection)
            # A close that is on its way shows after the send: failures.is_idle_close_race().
            if connection.is_open:
                return connection
        return None

    async def _open_connection(self, origin: InstanceOrigin) -> InstanceConnection:
        if self._tls is not None:
            origin.request = self._tls.prepare_request(origin.request)
        try:
            lease = await self._connector.connect(origin.request, [], self._timeout)
        except asyncio.TimeoutError as error:
            # As aiohttp's session would raise it: failures.py knows then that nothing was sent.
            raise aiohttp.ConnectionTimeoutError(
                f"Connection timeout to host {origin.host}"
            ) from error
        if lease.transport is not None:
            lost_hosts.end_with_host(lease.transport.get_extra_info("socket"))

        def keep(connection: InstanceConnection) -> None:
            origin.idle.append(connection)
            self._idle_since.watch(connection)

        return InstanceConnection(lease, origin.request, self._max_header_bytes, keep, self._open)


def _encode_head(
    origin: InstanceOrigin, method: str, target: str, headers: Mapping[str, str], length: int | None
) -> bytes:
    """The head of a request; `length`: of its body, None for none.

    Raises ValueError for what would be more than a header.
    """
    lines = [f"{name}: {value}" for name, value in headers.items()]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    # Clients choose both: a line break in them would begin a header, or a request, of their own.
    if _CONTROL_CHARACTER.search("".join(lines)) or " " in target:
        raise ValueError("control characters in the headers of a request")
    start = f"{method} {origin.path_prefix}{target} HTTP/1.1\r\nHost: {origin.host}\r\n"
    return (start + "\r\n".join(lines) + "\r\n\r\n").encode()
