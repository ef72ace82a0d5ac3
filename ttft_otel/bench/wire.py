# SPDX-License-Identifier: Apache-2.0
"""One request on a connection of its own: drive.py says when, and gets every piece with its time.

A protocol below any HTTP client: those tell of a piece when their reader's task is woken, which
under load is a turn of the event loop later. Times are CLOCK_MONOTONIC in nanoseconds; a piece has
the time at which the kernel got it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import dataclass, field
from functools import lru_cache
from time import monotonic_ns
from typing import Any, Final
from urllib.parse import urlsplit

import httptools

from ttft_otel.bench.arrival import Stamped

AGENT: Final = "ttft-otel-bench"


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and the headers that each of them has."""

    url: str
    host: str
    port: int
    base: str
    tls: bool
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, url: str, headers: dict[str, str] | None = None) -> Target:
        """Take a URL apart. Raises ValueError."""
        parts = urlsplit(url)
        if "@" in parts.netloc:
            # Not quoted: it holds a password.
            raise ValueError(
                "a URL's user and password are not sent; "
                "give --header 'Authorization: Basic ...' instead"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http:// or https:// URL")
        tls = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        port = parts.port or (443 if tls else 80)
        shown = f"{parts.scheme}://{parts.netloc}{base}"
        return cls(shown, parts.hostname, port, base, tls, headers or {})

    def message(
        self, path: str, body: bytes, headers: dict[str, str], method: str = "POST"
    ) -> bytes:
        """The request's bytes, for one write."""
        every = {
            "host": f"[{self.host}]:{self.port}"
            if ":" in self.host
            else f"{self.host}:{self.port}",
            "user-agent": AGENT,
            "connection": "close",
            "content-type": "application/json",
            "content-length": str(len(body)),
            **self.headers,
            **headers,
        }
        lines = [f"{method} {self.base}{path} HTTP/1.1", *(f"{k}: {v}" for k, v in every.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


@dataclass(slots=True)
class Reply:
    """What came back; `error` is "" for an answer that was read to its end."""

    due_ns: int
    sent_ns: int = 0
    end_ns: int = 0
    connect_us: int = 0
    lag_ns: int = 0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[tuple[int, bytes]] = field(default_factory=list)
    error: str = ""


class Wire(asyncio.Protocol):
    """Note what comes; httptools calls the on_... methods from within `data_received`."""

    def __init__(self, reply: Reply, sock: Stamped) -> None:
        """Nothing has come yet."""
        self.reply, self.sock = reply, sock
        self.now = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.parser: Any = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        """Bytes: their time is the last read's."""
        self.now = self.sock.came_ns
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.finish("no HTTP")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line."""
        self.reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """The headers are in."""
        self.reply.status = self.parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """A piece of the body, without the framing of chunks."""
        self.reply.pieces.append((self.now, data))

    def on_message_complete(self) -> None:
        """The answer is whole."""
        self.finish("")

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed by the other side; too early unless the answer was whole, or only this ends it."""
        self.now = monotonic_ns()
        framed = {"content-length", "transfer-encoding"} & set(self.reply.headers)
        self.finish("cut off" if exc or framed or not self.reply.status else "")

    def finish(self, error: str) -> None:
        """Settle the exchange; the first word counts."""
        if not self.done.done():
            self.reply.end_ns, self.reply.error = self.now, error
            self.done.set_result(None)


async def exchange(target: Target, message: bytes, due_ns: int, timeout: float) -> Reply:
    """Connect at once, write at `due_ns`, wait for the end; a Reply whatever happens."""
    reply = Reply(due_ns)
    try:
        await asyncio.wait_for(_talk(target, message, reply), timeout)
    except asyncio.TimeoutError:
        reply.end_ns, reply.error = monotonic_ns(), "timeout"
    except OSError as error:
        reply.end_ns, reply.error = monotonic_ns(), f"connection: {type(error).__name__}"
    reply.sent_ns = reply.sent_ns or reply.end_ns
    return reply


async def _talk(target: Target, message: bytes, reply: Reply) -> None:
    began = monotonic_ns()
    sock = await _connected(target)
    tls, name = (_tls(), target.host) if target.tls else (None, None)
    try:
        transport, wire = await asyncio.get_running_loop().create_connection(
            lambda: Wire(reply, sock), sock=sock, ssl=tls, server_hostname=name
        )
    except BaseException:
        sock.close()
        raise
    connected = monotonic_ns()
    try:
        await until(reply.due_ns)
        reply.sent_ns = monotonic_ns()
        transport.write(message)
        await wire.done
    finally:
        transport.abort()
    reply.connect_us = (connected - began) // 1000
    # Connecting late is ours, a slow connection is not, writing late on an open one is ours again.
    reply.lag_ns = max(0, began - reply.due_ns) + reply.sent_ns - max(connected, reply.due_ns)


async def _connected(target: Target) -> Stamped:
    """Connect to the first of the target's addresses that answers. Raises OSError."""
    loop, place = asyncio.get_running_loop(), (target.host, target.port)
    refused = OSError(f"no address for {target.host}")
    for family, kind, protocol, _, address in await _addresses(loop, *place):
        sock = Stamped(family, kind, protocol)
        try:
            sock.setblocking(False)
            sock.stamp()
            await loop.sock_connect(sock, address)
        except OSError as error:
            sock.close()
            refused = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise refused


async def _addresses(loop: asyncio.AbstractEventLoop, host: str, port: int) -> list[Any]:
    """A host's addresses; what is one already needs no thread that asks for it."""
    try:
        flags = socket.AI_NUMERICHOST
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except socket.gaierror:
        return await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


async def until(due_ns: int) -> None:
    """Sleep until a time of the monotonic clock."""
    left = (due_ns - monotonic_ns()) / 1e9
    if left > 0:
        await asyncio.sleep(left)
