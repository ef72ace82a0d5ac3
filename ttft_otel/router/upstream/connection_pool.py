# SPDX-License-Identifier: Apache-2.0
"""Connections to instances, kept and encrypted; the legs' requests and the router's own questions on them.

upstream_client.py sends requests by ConnectionPool, everybody else asks by QueryClient: health probes, lists
of models, prompts to render, cached prefixes, discovery. aiohttp's connector opens connections (names, both
address families, TLS); its session would cost a request as much as all the rest of the router. command.py and
sources.py name the PEM files, which may be replaced while the router runs. Who is asked may be
hostile: no redirect is followed, and an answer is bounded in bytes, also when it is compressed, and in time.
tests/attack/test_outbound_calls.py fails on another HTTP client in the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from operator import methodcaller
from typing import Final, NamedTuple

import aiohttp
from yarl import URL

from ttft_otel.http.bodies import BodyTooLargeError, unpack_body
from ttft_otel.router.errors import InvalidAnswer
from ttft_otel.router.time_limits import DeadlineQueue, end_with_host, wait_at_most
from ttft_otel.router.timeline import Attempt
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
# Seconds for a question, from the connection to the answer's last byte.
QUERY_TIMEOUT_S: Final = 5.0
MAX_PAGE_BYTES: Final = 8 << 20  # bytes of an answer, unpacked: /metrics is the longest
MAX_HEADER_BYTES: Final = 65_536  # bytes of one header of an answer, unless a flag says otherwise
# Who cannot be asked now, or does not answer so that it can be read. TimeoutError is no OSError before
# Python 3.11.
QUERY_ERRORS: Final = (aiohttp.ClientError, InvalidAnswer, OSError, asyncio.TimeoutError)
log: Final = logging.getLogger("ttft_otel")


class ClientTls:
    """What new connections trust and show. Raises OSError, as SSLError is one, for files that cannot be used.

    Args:
        ca: File of the authorities that are trusted, "" for the system's.
        certificate: File of our own certificate, "" for none.
        key: File of its key, "" where it stands in the same file.
        name: What certificates must be for, "" for the host of the URL.
    """

    def __init__(self, ca: str = "", certificate: str = "", key: str = "", name: str = "") -> None:
        self._ca, self._certificate, self._key, self._name = ca, certificate, key, name
        self._files = [each for each in (ca, certificate, key) if each]
        self._stamps = self._read_stamps()
        self._context = self._load()

    def prepare_request(self, request: aiohttp.ClientRequest) -> aiohttp.ClientRequest:
        """What opens a connection for `request` with the files as they are now."""
        if not request.is_ssl():
            return request
        self._follow_files()
        if request.ssl is self._context:
            return request
        name = self._name or None
        return aiohttp.ClientRequest(
            request.method, request.url, loop=request.loop, ssl=self._context, server_hostname=name
        )

    def _follow_files(self) -> None:
        stamps = self._read_stamps()
        if stamps == self._stamps:
            return
        # Also where they cannot be used: once they can, they have changed again.
        self._stamps = stamps
        files = ", ".join(self._files)
        try:
            # A new one, as a context cannot forget an authority.
            self._context = self._load()
        except OSError as error:
            log.error(
                "ttft-otel: %s cannot be used (%s): connections go on with what was there before",
                files,
                error,
            )
        else:
            log.warning("ttft-otel: new connections use %s, which was replaced", files)

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self._ca or None)
        if self._certificate:
            # With a password, as OpenSSL would ask the terminal for one.
            context.load_cert_chain(self._certificate, self._key or None, password="")
        return context

    def _read_stamps(self) -> list[tuple[int, ...]]:
        """What differs once a file, or a link on the way to it, was replaced."""
        stamps = list[tuple[int, ...]]()
        for path in self._files:
            with contextlib.suppress(OSError):
                status = os.stat(path)
                stamps.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
        return stamps


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
            end_with_host(lease.transport.get_extra_info("socket"))

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


class QueryAnswer(NamedTuple):
    """A whole answer; a redirect is one, too."""

    status: int
    body: bytes  # not compressed


class QueryClient:
    """Asks questions, on connections of its own; made and closed on the event loop.

    Args:
        max_header_bytes: Bytes of one header of an answer.
        tls: For https:// URLs; None for the system's authorities.
        api_key: What whoever is asked is shown, "" for none.

    authorization: the header with that key, which one of the question itself replaces.
    """

    def __init__(
        self,
        max_header_bytes: int = MAX_HEADER_BYTES,
        tls: ClientTls | None = None,
        api_key: str = "",
    ) -> None:
        self.authorization = build_authorization(api_key)
        self._pool = ConnectionPool(max_header_bytes, tls=tls)

    async def __aenter__(self) -> QueryClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._pool.close()

    async def ask(
        self,
        url: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = QUERY_TIMEOUT_S,
        max_bytes: int = MAX_PAGE_BYTES,
    ) -> QueryAnswer:
        """Ask `url`, by POST if there is a `body`, else by GET. Raises QUERY_ERRORS.

        Args:
            url: http:// or https://, with path and query.
            body: JSON.
            headers: More of them.
            timeout_s: Seconds for everything.
            max_bytes: Of the answer's body. 0: only its status is wanted, and its body is not read.
        """
        return await wait_at_most(self._ask(url, body, headers or {}, max_bytes), timeout_s)

    async def _ask(
        self, url: str, body: bytes | None, headers: Mapping[str, str], max_bytes: int
    ) -> QueryAnswer:
        async with self.open_answer(url, body, headers) as answer:
            if not max_bytes:
                return QueryAnswer(answer.status, b"")
            data = await read_at_most(answer, max_bytes)
        try:
            encoding = ",".join(answer.list_values(b"content-encoding"))
            return QueryAnswer(answer.status, unpack_body(data, encoding, max_bytes))
        except BodyTooLargeError as error:
            raise InvalidAnswer(str(error)) from error
        except ValueError as error:
            raise aiohttp.ClientPayloadError(f"the answer cannot be read: {error}") from error

    @asynccontextmanager
    async def open_answer(
        self, url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[InstanceAnswer]:
        """Ask as `ask` does, and give the answer once its head is here; the caller bounds the rest."""
        own = {"Authorization": self.authorization} if self.authorization else {}
        sent = {"Accept-Encoding": "identity", **own, **(headers or {})}
        if body is not None:
            sent.setdefault("Content-Type", "application/json")
        method = "GET" if body is None else "POST"
        try:
            # encoded: an operator's path is sent as it was written.
            answer = await self._pool.send_query(method, URL(url, encoded=True), sent, body)
        except ValueError as error:
            raise aiohttp.InvalidURL(url, str(error)) from error
        try:
            yield answer
        finally:
            answer.close()


async def read_at_most(answer: InstanceAnswer, max_bytes: int) -> bytes:
    """The whole body of `answer`. Raises QUERY_ERRORS, also when it is longer than `max_bytes`."""
    # The announced length saves reading; a chunked answer announces none.
    body, is_longer = bytearray(), answer.content_length > max_bytes
    while not is_longer and (chunk := await answer.readany()):
        body += chunk
        is_longer = len(body) > max_bytes
    if is_longer:
        raise InvalidAnswer(f"its answer is longer than {max_bytes} bytes")
    return bytes(body)


def build_authorization(api_key: str) -> str:
    return f"Bearer {api_key}" if api_key else ""
