# SPDX-License-Identifier: Apache-2.0
"""HTTP headers on their way through: forward.py gets the client's sorted, and the legs' cleaned."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from ttft_otel import context, names

Raw = Iterable[tuple[bytes, bytes]]

# RFC 9110 section 7.6.1, and what each side's HTTP library writes itself.
_HOP: Final = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade".split()
)
_OURS: Final = {
    name.encode(): name
    for name in (
        names.ASK,
        names.LEG_HEADER,
        names.REQUEST_HEADER,
        names.TRACEPARENT,
        names.TRACESTATE,
        "content-length",
        "connection",
    )
}
# With tracing off these are nobody's here, and go on as they came.
_PLAIN: Final = {
    key: name
    for key, name in _OURS.items()
    if name in (names.REQUEST_HEADER, "content-length", "connection")
}
_NOT_UP: Final = _HOP | {b"host", b"expect"}
_TIMING: Final = names.TIMING.encode()
_NOT_DOWN: Final = _HOP | {names.REQUEST_HEADER.encode()}
_ID: Final = re.compile(r"[\x21-\x7e]{1,256}")


@dataclass(slots=True)
class Incoming:
    """The client's headers: `ours` are read by the router, `passed` go to every leg."""

    ours: dict[str, str] = field(default_factory=dict)
    passed: dict[str, str] = field(default_factory=dict)

    def get(self, name: str) -> str:
        """One of our own headers; repeated ones are joined by commas, "" if absent."""
        return self.ours.get(name, "")


def sort(raw: Raw, traced: bool = True) -> Incoming:
    """Part the client's headers; what cannot be sent on as it came is left out, never an error."""
    found, ours = Incoming(), _OURS if traced else _PLAIN
    for key, value in raw:
        name = ours.get(key)
        if name is not None:
            text = value.decode("latin-1")
            found.ours[name] = f"{found.ours[name]},{text}" if name in found.ours else text
        elif key not in _NOT_UP:
            _pass(found.passed, key, value)
    for word in found.get("connection").split(","):
        found.passed.pop(word.strip().lower(), None)
    return found


def _pass(passed: dict[str, str], key: bytes, value: bytes) -> None:
    # aiohttp writes headers as UTF-8 and refuses control characters
    try:
        name, text = key.decode("ascii"), value.decode("utf-8")
    except UnicodeDecodeError:
        return
    if not text.isprintable() and not text.replace("\t", "").isprintable():
        return
    if name in passed:
        text = f"{passed[name]}{'; ' if name == 'cookie' else ', '}{text}"
    passed[name] = text


def down(raw: Raw, traced: bool = True) -> list[tuple[bytes, bytes]]:
    """A leg's response headers for the client; bodies pass unmodified, so content-length stays."""
    kept: list[tuple[bytes, bytes]] = []
    named: set[bytes] = set()
    for name, value in raw:
        key = name.lower()
        if key == b"connection":
            named.update(word.strip().lower() for word in value.split(b","))
        elif key not in _NOT_DOWN and not (traced and key == _TIMING):  # its timing was for us
            kept.append((key, value))
    return [(key, value) for key, value in kept if key not in named] if named else kept


def request_id(text: str) -> str:
    """Keep a caller's id of visible ASCII, at most 256 characters; make one otherwise."""
    return text if _ID.fullmatch(text) else context.new_trace()
