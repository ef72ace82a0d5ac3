# SPDX-License-Identifier: Apache-2.0
"""Filters HTTP headers of requests and responses on their way through; the proxy uses it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from ttft_otel.model.names import header_names
from ttft_otel.tracing import context

RawHeaders = Iterable[tuple[bytes, bytes]]

# RFC 9110 section 7.6.1, and what each side's HTTP library writes itself.
_HOP_BY_HOP: Final = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade".split()
)
_OWN_HEADERS: Final = {
    name.encode(): name
    for name in (
        header_names.ASK_TIMING,
        header_names.LEG,
        header_names.MEDIA_ENCODED,
        header_names.REQUEST_ID,
        header_names.TRACEPARENT,
        header_names.TRACESTATE,
        "content-length",
        "connection",
    )
}
# With tracing off only these are handled by the router; trace headers are forwarded unchanged.
_UNTRACED_HEADERS: Final = {
    key: name
    for key, name in _OWN_HEADERS.items()
    if name in (header_names.REQUEST_ID, "content-length", "connection")
}
# The instance's Host is another one, and uvicorn answers `Expect: 100-continue` itself.
_NOT_FORWARDED: Final = _HOP_BY_HOP | {b"host", b"expect"}
_SERVER_TIMING: Final = header_names.SERVER_TIMING.encode()
_NOT_RETURNED: Final = _HOP_BY_HOP | {header_names.REQUEST_ID.encode()}
# Visible ASCII only: it gets into logs, spans and the path of /ttft_report.
_REQUEST_ID_PATTERN: Final = re.compile(r"[\x21-\x7e]{1,256}")


class ClientHeaders(msgspec.Struct):
    """The client's headers: `router_headers` are read by the router, `forwarded` go to every leg."""

    router_headers: dict[str, str] = {}
    forwarded: dict[str, str] = {}

    def get(self, name: str) -> str:
        """The router header `name`; repeated ones are joined by commas, "" if absent."""
        return self.router_headers.get(name, "")


def split_headers(raw_headers: RawHeaders, is_traced: bool = True) -> ClientHeaders:
    """Split the client's headers; those that cannot be forwarded unchanged are dropped.

    raw_headers: lower-case names, as ASGI has them. is_traced: with tracing off, trace headers are forwarded.
    """
    headers = ClientHeaders()
    own_names = _OWN_HEADERS if is_traced else _UNTRACED_HEADERS
    repeated: dict[str, list[str]] = {}  # joined once at the end: there may be many of one name
    for key, value in raw_headers:
        name = own_names.get(key)
        if name is not None:
            text = value.decode("latin-1")
            kept = headers.router_headers
        elif key not in _NOT_FORWARDED:
            try:  # aiohttp writes headers as UTF-8 and refuses control characters
                name = key.decode("ascii")
                text = value.decode("utf-8")
            except UnicodeDecodeError:
                continue
            if not text.isprintable() and not text.replace("\t", "").isprintable():
                continue
            kept = headers.forwarded
        else:
            continue
        if name in kept:
            repeated.setdefault(name, [kept[name]]).append(text)
        else:
            kept[name] = text
    for name, texts in repeated.items():
        if name in headers.router_headers:
            headers.router_headers[name] = ",".join(texts)
        # Repeated cookies alone are joined by semicolons (RFC 9113 section 8.2.3).
        else:
            headers.forwarded[name] = ("; " if name == "cookie" else ", ").join(texts)
    # What this header names is meant for one hop only (RFC 9110 section 7.6.1).
    for word in headers.get("connection").split(","):
        headers.forwarded.pop(word.strip().lower(), None)
    return headers


def filter_response_headers(
    raw_headers: RawHeaders, is_traced: bool = True
) -> list[tuple[bytes, bytes]]:
    """Response headers of a leg for the client; content-length stays, as bodies pass unmodified.

    is_traced: drop Server-Timing, which the router requested for itself.
    """
    kept: list[tuple[bytes, bytes]] = []
    connection_names: set[bytes] = set()
    for name, value in raw_headers:
        key = name.lower()
        if key == b"connection":
            connection_names.update(word.strip().lower() for word in value.split(b","))
        elif key not in _NOT_RETURNED and not (
            is_traced and key == _SERVER_TIMING
        ):  # requested by the router
            kept.append((key, value))
    return (
        [(key, value) for key, value in kept if key not in connection_names]
        if connection_names
        else kept
    )


def build_buffered_headers(forwarded: Mapping[str, str]) -> dict[str, str]:
    """A client's headers for a request of the router's own body, whose answer is read here."""
    headers = {**forwarded, "content-type": "application/json"}
    # The new body is not compressed, and its answer is parsed without decompressing it.
    for name in ("content-encoding", "accept-encoding"):
        headers.pop(name, None)
    return headers


def choose_request_id(text: str, trace: context.TraceContext) -> str:
    """Return the caller's ID in `text` if it is 1 to 256 visible ASCII characters, else a new one.

    It is the traceparent of `trace`: vLLM's Rust front-end hands a request's ID on to the engine core, and no
    trace headers.
    """
    if _REQUEST_ID_PATTERN.fullmatch(text):
        return text
    return trace.format_traceparent() if trace.trace_id else context.new_trace_id()
