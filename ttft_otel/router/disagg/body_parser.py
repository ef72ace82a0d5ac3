# SPDX-License-Identifier: Apache-2.0
"""Parse bodies without holding the event loop: the heavy ones in a thread, and those beyond all bounds not.

endpoint.py passes every body. A parser holds the interpreter for as long as one call of it lasts, in
whatever thread: MAX_STRUCTURE keeps each call below 50 ms, and in the thread the loop has its turn
between one call and the next.

What parsing costs depends on the structure far more than on the bytes: a text costs 0.4 ms per MB, as
many bytes of short names 100. So the structure is counted first. Strings are told from what is between
them exactly, and nothing that a text contains counts. Of bytes that are no JSON any numbers may come;
their parser ends at the first byte that is wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, ParamSpec, TypeVar

from ttft_otel.router.disagg.request_body import RequestBody, parse_body

P = ParamSpec("P")
T = TypeVar("T")
# Whatever a body of so many bytes consists of, all that is done with it takes less than 25 ms.
MAX_SMALL_BYTES: Final = 64 << 10
# Larger ones are counted, up to here on the loop: it takes 0.4 ms per MB, or ends early.
MAX_COUNTED_BYTES: Final = 1 << 20
# Small enough that other threads get their turn soon, while one window is counted.
_WINDOW_BYTES: Final = 128 << 10
_BEGINS_OBJECT: Final = b"{ \t\r\n"


@dataclass(slots=True)
class JsonStructure:
    """What one call of the parser costs besides the bytes."""

    outside_bytes: int = 0  # outside strings
    parts: int = 0  # members of objects, objects and lists
    quotes: int = 0  # two per string
    escapes: int = 0  # backslashes

    def exceeds(self, limit: JsonStructure) -> bool:
        """Whether any count is above its `limit`."""
        return (
            self.outside_bytes > limit.outside_bytes
            or self.parts > limit.parts
            or self.quotes > limit.quotes
            or self.escapes > limit.escapes
        )


def count_structure(data: bytes, limit: JsonStructure) -> JsonStructure:
    """Count `data` from its beginning until one count exceeds its `limit`."""
    found = JsonStructure()
    is_inside, open_escape = 0, b""
    for start in range(0, len(data), _WINDOW_BYTES):
        window = open_escape + data[start : start + _WINDOW_BYTES]
        open_escape = b""
        if b"\\" in window:
            found.escapes += window.count(b"\\")
            if (len(window) - len(window.rstrip(b"\\"))) % 2:  # its character is in the next window
                window, open_escape = window[:-1], b"\\"
                found.escapes -= 1
            # pairs first: in \\" the quote ends the string
            window = window.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = window.split(b'"')
        outside = b"".join(pieces[is_inside::2])
        # An odd number of quotes means that the next window begins on the other side.
        is_inside ^= (len(pieces) - 1) % 2
        found.quotes += len(pieces) - 1
        found.outside_bytes += len(outside)
        found.parts += outside.count(b":") + outside.count(b"{") + outside.count(b"[")
        if found.exceeds(limit):
            break
    return found


# What is parsed on the loop, too, as it is hardly more than a small body.
LIGHT_STRUCTURE: Final = JsonStructure(512 << 10, 5_000, 20_000, 100_000)
# What is parsed at all: 8 MiB of numbers are a million token ids, 50 000 parts several thousand messages.
MAX_STRUCTURE: Final = JsonStructure(8 << 20, 50_000, 400_000, 4_000_000)
_TOO_MANY: Final = (
    f"The body has more than {MAX_STRUCTURE.parts} objects, lists and members, "
    f"{MAX_STRUCTURE.quotes // 2} strings, {MAX_STRUCTURE.escapes} escapes, or "
    f"{MAX_STRUCTURE.outside_bytes} bytes outside strings."
)


class BodyParser:
    """One thread for heavy bodies, one after the other; without such a body there is no thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "ttft-otel-json")

    async def parse(self, data: bytes, path: str = "") -> RequestBody:
        """As parse_body(); a body whose structure exceeds MAX_STRUCTURE has a `problem`."""
        if len(data) <= MAX_SMALL_BYTES or data[0] not in _BEGINS_OBJECT:
            return parse_body(data, path)  # of what is no object only the first byte is read
        if len(data) <= MAX_COUNTED_BYTES:
            found = count_structure(data, LIGHT_STRUCTURE)
            if not found.exceeds(LIGHT_STRUCTURE):
                return parse_body(data, path)
        return await self._run_beside(_parse_heavy, data, path)

    async def run_on(
        self, body: RequestBody, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """What `function`, which parses `body` once more, returns; beside the loop if it is heavy."""
        if not body.is_heavy:
            return function(*args, **kwargs)
        return await self._run_beside(function, *args, **kwargs)

    async def _run_beside(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        call = self._thread.submit(function, *args, **kwargs)
        # A client that leaves takes its call out of the queue.
        return await asyncio.wrap_future(call)


def _parse_heavy(data: bytes, path: str) -> RequestBody:
    if count_structure(data, MAX_STRUCTURE).exceeds(MAX_STRUCTURE):
        return RequestBody(data, problem=_TOO_MANY)
    parsed = parse_body(data, path)
    parsed.is_heavy = True
    return parsed
