# SPDX-License-Identifier: Apache-2.0
"""Send one request on its own connection when it is due; each piece of the response has its time.

Implemented as an asyncio protocol rather than with an HTTP client: a client reports a piece when its
reader's task is woken, which under load is a turn of the event loop later. Times are CLOCK_MONOTONIC
in nanoseconds; a piece has the time at which the kernel received it: an event loop with hundreds of streams
reads a piece up to some milliseconds after that, which would be counted as the server's time.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from time import monotonic_ns, time_ns
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import httptools

if TYPE_CHECKING:
    from typing_extensions import Buffer

HTTP_OK: Final = 200
USER_AGENT: Final = "ttft-otel-bench"
SO_TIMESTAMPNS: Final = 35  # of <asm-generic/socket.h>; Python's socket module lacks it
# Native sizes: the kernel writes its own struct timespec, two longs.
TIMESPEC: Final = struct.Struct("@ll")
ANCILLARY_BYTES: Final = socket.CMSG_SPACE(TIMESPEC.size)


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """A server's address, and the headers of every request to it."""

    url: str
    host: str
    port: int
    base_path: str  #: stands before every path of the API
    uses_tls: bool
    headers: dict[str, str] = field(default_factory=dict)  #: those that --header gives

    @classmethod
    def parse_url(cls, url: str, headers: dict[str, str] | None = None) -> BenchTarget:
        """Take a URL apart. Raises ValueError."""
        parts = urlsplit(url)
        if "@" in parts.netloc:
            # Not quoted: it holds a password.
            raise ValueError(
                "a URL's user and password are not sent; "
                "give --header 'Authorization: Basic ...' instead"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// URL")
        uses_tls = parts.scheme == "https"
        # Clients of OpenAI are configured with /v1 at the end: both forms are accepted.
        base_path = parts.path.rstrip("/").removesuffix("/v1")
        port = parts.port or (443 if uses_tls else 80)
        public_url = f"{parts.scheme}://{parts.netloc}{base_path}"
        return cls(public_url, parts.hostname, port, base_path, uses_tls, headers or {})

    def encode_request(
        self, path: str, body: bytes, headers: dict[str, str], method: str = "POST"
    ) -> bytes:
        """The bytes of a request, to be sent with one write. `headers` take precedence over ours."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        all_headers = {
            "host": f"{host}:{self.port}",
            "user-agent": USER_AGENT,
            "connection": "close",  # one request per connection
            "content-type": "application/json",
            "content-length": str(len(body)),
            # After ours, so that --header can replace Host where a gateway routes by it.
            **self.headers,
            **headers,
        }
        lines = [
            f"{method} {self.base_path}{path} HTTP/1.1",
            *(f"{k}: {v}" for k, v in all_headers.items()),
        ]
        # Head and body in one write: the TTFT begins right before it, with nothing left to hand over.
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


@dataclass(slots=True)
class RawResponse:
    """A response; times are nanoseconds of CLOCK_MONOTONIC."""

    due_ns: int  #: when the request was to be written
    sent_ns: int = 0  #: when it was written
    end_ns: int = 0  #: when the response's last byte came
    lag_ns: int = 0  #: how late this process itself sent the request
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)  #: names in lower case
    #: of the body, with arrival times
    pieces: list[tuple[int, bytes]] = field(default_factory=list)
    error: str = ""  #: "" when it was read to its end


class TimestampedSocket(socket.socket):
    """A socket that notes when the data of its last read arrived."""

    #: Arrival of the last byte, or of the end of the stream after it; CLOCK_MONOTONIC. Without a kernel
    #: timestamp it is the time of the read; it is never later than that.
    last_byte_ns = 0

    def enable_timestamps(self) -> None:
        """Turn the kernel's receive timestamps on (Linux only)."""
        if sys.platform == "linux":
            self.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """As socket.recv(), and note the arrival time."""
        # asyncio's selector loop reads plain sockets with recv(), so overriding that is enough.
        data, ancillary_data, _, _ = self.recvmsg(size, ANCILLARY_BYTES, flags)
        self.last_byte_ns = read_arrival_ns(ancillary_data)
        return data

    def recv_into(self, buffer: Buffer, size: int = 0, flags: int = 0, /) -> int:
        """As socket.recv_into(), and note the arrival time; TLS reads with this one."""
        # 0 means the whole buffer, as in socket.recv_into().
        wanted = memoryview(buffer)[: size or None]
        count, ancillary_data, _, _ = self.recvmsg_into([wanted], ANCILLARY_BYTES, flags)
        self.last_byte_ns = read_arrival_ns(ancillary_data)
        return count


@contextmanager
def keep_timestamps_enabled() -> Iterator[None]:
    """Keep the kernel's receive timestamps active while the block runs.

    The kernel takes timestamps only while some socket asks for them, and begins some time after the
    first one does: without this, each of a series of connections would miss its first pieces.
    """
    with TimestampedSocket() as sock:
        # Not connected and never read: asking is enough to keep the kernel stamping.
        sock.enable_timestamps()
        yield


def read_arrival_ns(ancillary_data: Iterable[tuple[int, int, bytes]]) -> int:
    """Arrival time on CLOCK_MONOTONIC, converted from the kernel's timestamp in CLOCK_REALTIME.

    ancillary_data: of recvmsg(); without a timestamp in it the time is now.
    """
    # Both clocks right beside each other, since their difference converts the stamp.
    wall_ns = time_ns()
    now_ns = monotonic_ns()
    for level, kind, data in ancillary_data:
        if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS and len(data) == TIMESPEC.size:
            seconds, nanoseconds = map(int, TIMESPEC.unpack(data))
            # A step of the wall clock in between may put the stamp into
            # the future: never later than the read.
            return min(now_ns, now_ns - wall_ns + seconds * 1_000_000_000 + nanoseconds)
    return now_ns


class ResponseProtocol(asyncio.Protocol):
    """Fills a RawResponse; httptools calls the on_... methods from within `data_received`."""

    def __init__(self, response: RawResponse, sock: TimestampedSocket) -> None:
        self.response = response
        self.sock = sock  # it knows when its last byte arrived
        self.last_byte_ns = 0
        self.completed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.parser: Any = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        """Parse `data`, which arrived at the time of the socket's last read."""
        # Of TLS only whole records can be read: then it is the time of the read that completed one.
        self.last_byte_ns = self.sock.last_byte_ns
        try:
            self.parser.feed_data(data)
        # Not raised: asyncio would log it, and the request would only seem to be cut off.
        except httptools.HttpParserError:
            self.finish_response("no HTTP")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line."""
        self.response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """The headers are complete."""
        self.response.status = self.parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """A piece of the body, without chunked encoding."""
        self.response.pieces.append((self.last_byte_ns, data))

    def on_message_complete(self) -> None:
        """The response is complete."""
        self.finish_response("")

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection was closed: an error, unless only closing marks the end of the body."""
        self.last_byte_ns = monotonic_ns()
        # RFC 9112: without either, the body ends with the connection, and nobody can tell if it is whole.
        framing_headers = {"content-length", "transfer-encoding"} & set(self.response.headers)
        self.finish_response(
            "cut off" if exc or framing_headers or not self.response.status else ""
        )

    def finish_response(self, error: str) -> None:
        """End the exchange with `error` ("" for success); later calls do nothing."""
        if not self.completed.done():
            self.response.end_ns, self.response.error = self.last_byte_ns, error
            self.completed.set_result(None)


async def perform_exchange(
    target: BenchTarget,
    message: bytes,
    due_ns: int,
    timeout_s: float,
    response: RawResponse | None = None,
) -> RawResponse:
    """Connect now, send `message` at `due_ns`, wait for the end of the response.

    timeout_s: for all of it. response: an empty one to fill, which others may watch meanwhile. Does not
    raise: failures are in the response's `error`.
    """
    response = response or RawResponse(due_ns)
    try:
        await asyncio.wait_for(_send_and_receive(target, message, response), timeout_s)
    except asyncio.TimeoutError:
        response.end_ns, response.error = monotonic_ns(), "timeout"
    except OSError as error:
        response.end_ns, response.error = monotonic_ns(), f"connection: {type(error).__name__}"
    # 0 would be a time before the run, and become the start of LoadRun.
    response.sent_ns = response.sent_ns or response.end_ns
    return response


async def _send_and_receive(target: BenchTarget, message: bytes, response: RawResponse) -> None:
    began_ns = monotonic_ns()
    # Closed however it ends: the time-out of perform_exchange() cancels a handshake, too.
    with await _connect_socket(target) as sock:
        transport, protocol = await asyncio.get_running_loop().create_connection(
            lambda: ResponseProtocol(response, sock),
            # The loop reads through our socket's recv(): that is where the kernel's timestamp is taken.
            sock=sock,
            ssl=_create_tls_context() if target.uses_tls else None,
            server_hostname=target.host if target.uses_tls else None,
        )
        connected_ns = monotonic_ns()
        try:
            # The connection is open by now: the TTFT contains neither TCP's nor TLS's handshake.
            await sleep_until(response.due_ns)
            response.sent_ns = monotonic_ns()  # right before the write: the TTFT starts here
            transport.write(message)
            await protocol.completed
        finally:
            # Not close(), which would wait until what is left to send has been sent.
            transport.abort()
    # Our own lateness: beginning to connect after the due time, and writing late on a connection that
    # is open. The time that connecting takes is the server's and the network's.
    response.lag_ns = (
        max(0, began_ns - response.due_ns) + response.sent_ns - max(connected_ns, response.due_ns)
    )


async def _connect_socket(target: BenchTarget) -> TimestampedSocket:
    """Connect to the first of the target's addresses that answers. Raises OSError."""
    loop, place = asyncio.get_running_loop(), (target.host, target.port)
    last_error = OSError(f"no address for {target.host}")
    # One after the other: localhost often has ::1 first, and few servers listen on both.
    for family, kind, protocol, _, address in await _resolve_addresses(loop, *place):
        with ExitStack() as failure:
            sock = failure.enter_context(TimestampedSocket(family, kind, protocol))
            sock.setblocking(False)
            # Before connecting, so that no segment arrives without one.
            sock.enable_timestamps()
            try:
                await loop.sock_connect(sock, address)
            except OSError as error:
                last_error = error
            else:
                failure.pop_all()
                return sock
    raise last_error


async def _resolve_addresses(loop: asyncio.AbstractEventLoop, host: str, port: int) -> list[Any]:
    """A host's addresses; a numeric one is parsed here, names are resolved in a thread."""
    try:
        # No thread for a numeric address: with hundreds of requests due, waiting for one makes them late.
        flags = socket.AI_NUMERICHOST
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except socket.gaierror:
        return await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)


@lru_cache(maxsize=1)
def _create_tls_context() -> ssl.SSLContext:
    # Cached: loading the system's certificates takes tens of milliseconds or more.
    return ssl.create_default_context()


async def sleep_until(due_ns: int) -> None:
    """Sleep until `due_ns` of CLOCK_MONOTONIC; returns at once when that has passed."""
    remaining_s = (due_ns - monotonic_ns()) / 1e9
    if remaining_s > 0:
        await asyncio.sleep(remaining_s)
