# SPDX-License-Identifier: Apache-2.0
"""A client's connection: uvicorn's HTTP protocol, with bounds on what precedes a request's body.

The HTTP ports of the router (control/uvicorn_server.py) and of `ttft-otel serve` (report_server.py)
make one per connection; their applications get the requests.
"""

from __future__ import annotations

from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ttft_otel.http.head_checks import (
    FETCH_SITE,
    HOST,
    ORIGIN,
    CallerRules,
    HeadLimits,
    HeadRefused,
)

MAX_SLICE_BYTES: Final = 16_384  # parsed before the limits are checked
MAX_PIPELINED_REQUESTS: Final = 32  # of one connection that wait for an answer
# What the parser expects next. No Enum: several comparisons per request.
REQUEST, HEAD, BODY = range(3)
_EXPECT: Final = b"expect"
_NOTED: Final = frozenset((HOST, ORIGIN, FETCH_SITE, _EXPECT))  # headers that are looked at


class _AnyLength(int):
    """For uvicorn's count of the bytes that are still due: any number may come."""

    def __lt__(self, _: object) -> bool:
        return False

    def __sub__(self, _: int) -> _AnyLength:
        return self

    def __ne__(self, _: object) -> bool:
        return False

    __hash__ = int.__hash__


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's protocol, which by itself neither bounds a request's head nor asks who sent it.

    Upgrades are ignored, as HTTP allows. A client of HTTP/1.0 gets no chunks: the connection ends its answer.
    phase: REQUEST, HEAD or BODY. is_refused: the connection ends, and what arrives is thrown away.
    """

    def __init__(
        self, *args: Any, head_limits: HeadLimits, callers: CallerRules, **kwargs: Any
    ) -> None:
        # The parser finds its callbacks when it is made. A body may come in chunks of one byte, and a call
        # of a method for each would hold up everybody.
        self._body_parts: list[bytes] = []
        self.on_body = self._body_parts.append  # type: ignore[assignment,method-assign]
        super().__init__(*args, **kwargs)
        self.head_limits = head_limits
        self.callers = callers
        self._noted: dict[bytes, bytes] = {}  # of the head that is being read
        self.phase = REQUEST
        self.is_refused = False
        self._head_bytes = 0  # of the unfinished head, or since the last part of a body

    def refuse(self, error: HeadRefused) -> None:
        """End the connection with `error`; a request that is under way ends without an answer."""
        self.is_refused = True
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            self.transport.close()
            return
        data = f"{error}\n".encode()
        head = b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[error.status] + head % len(data) + data)
        # Closing at once would cost the client the answer, while it sends: the server closes what waits.
        self.transport.write_eof()

    def start_request(self) -> None:
        """The head is complete: start its request, or let it wait for those before it."""
        if len(self.pipeline) >= MAX_PIPELINED_REQUESTS:
            raise HeadRefused(
                429, f"More than {MAX_PIPELINED_REQUESTS} requests wait on this connection."
            )
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = _AnyLength()

    def data_received(self, data: bytes) -> None:
        """Parse `data`; requests start as their heads are complete."""
        if not self.is_refused:
            self._unset_keepalive_if_required()
            self.parse_data(data)

    def parse_data(self, data: bytes) -> bool:
        """Parse `data` in slices so short that one of nothing but headers takes a moment only.

        Returns False if the connection has to end.
        """
        if len(data) <= MAX_SLICE_BYTES:
            is_good = self._parse_slice(data)
        else:
            view = memoryview(data)
            starts = range(0, len(data), MAX_SLICE_BYTES)
            is_good = all(self._parse_slice(view[at : at + MAX_SLICE_BYTES]) for at in starts)
        if is_good and self._body_parts:
            self._take_body()
        return is_good

    def _parse_slice(self, data: bytes | memoryview) -> bool:
        was_in_body = self.phase == BODY
        part_count = len(self._body_parts)
        try:
            self.parser.feed_data(data)
            if self.phase == HEAD:
                # A header is in `headers` when it is complete, but its bytes are in memory before.
                self._head_bytes += 0 if was_in_body else len(data)
                self.head_limits.check_head(self.url, len(self.headers), self._head_bytes)
            elif self.phase == BODY and len(self._body_parts) == part_count:
                # Trailers, which the parser holds as it holds headers.
                self._head_bytes += len(data)
                self.head_limits.check_head(b"", len(self.headers), self._head_bytes)
            else:
                self._head_bytes = 0
        except httptools.HttpParserUpgrade as upgrade:
            return self._parse_without_upgrade(memoryview(data), upgrade)
        except (HeadRefused, httptools.HttpParserError) as error:
            self.refuse(_find_cause(error))
            return False
        return True

    def _take_body(self) -> None:
        """Give the application what has arrived of the body."""
        data = b"".join(self._body_parts)
        self._body_parts.clear()
        HttpToolsProtocol.on_body(self, data)

    # Events of the parser, in the order of a request; exceptions end the parsing.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.phase = HEAD
        self._head_bytes = 0
        self._noted = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header is complete, or a trailer."""
        name = name.lower()
        if name in _NOTED:
            before = self._noted.get(name)
            self._noted[name] = value if before is None else b"%b,%b" % (before, value)
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # _parse_slice() parses it again
        self.head_limits.check_head(self.url, len(self.headers), self._head_bytes)
        # A head that came in few slices cannot be too long.
        if self._head_bytes + MAX_SLICE_BYTES > self.head_limits.max_header_bytes:
            self.head_limits.check_headers(self.headers)
        noted = self._noted
        if expected := noted.pop(_EXPECT, b""):
            self.expect_100_continue = expected.lower() == b"100-continue"
        parser = self.parser
        self.callers.check_request(parser.get_method(), parser.get_http_version(), noted)
        self.start_request()
        self.phase = BODY
        self._head_bytes = 0
        # The application has the other list: trailers do not get there.
        self.headers = []

    def on_message_complete(self) -> None:
        if self.phase != BODY:
            return  # of a request that wants an upgrade, and is parsed again
        if self.headers:
            self.head_limits.check_headers(self.headers)
        if self._body_parts:
            self._take_body()
        super().on_message_complete()
        self.phase = REQUEST

    # Upgrades; httptools would take the body for another protocol.

    def _should_upgrade(self) -> bool:
        """Make uvicorn's methods skip a request that httptools took for an upgrade."""
        return True

    def _parse_without_upgrade(
        self, data: memoryview, upgrade: httptools.HttpParserUpgrade
    ) -> bool:
        """Parse the head again without its upgrade, and what follows it in `data`."""
        try:
            while True:
                if self.parser.get_method() == b"CONNECT":
                    raise HeadRefused(400, "This server is no tunnel.")
                data = data[upgrade.args[0] :]
                head = self._render_head_without_upgrade()
                self.parser = httptools.HttpRequestParser(self)
                try:
                    self.parser.feed_data(head)
                    self.parser.feed_data(data)
                except httptools.HttpParserUpgrade as another:
                    upgrade = another
                else:
                    return True
        except (HeadRefused, httptools.HttpParserError) as error:
            self.refuse(_find_cause(error))
        return False

    def _render_head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                words = (word.strip() for word in value.split(b","))
                value = b", ".join(word for word in words if word.lower() != b"upgrade")
            if name != b"upgrade":
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])


def _find_cause(error: Exception) -> HeadRefused:
    """What a method of the connection raised, or bad HTTP."""
    # What a callback raises is the context of the parser's own error.
    for each in (error, error.__context__):
        if isinstance(each, HeadRefused):
            return each
    return HeadRefused(400, "This is not a valid HTTP request.")
