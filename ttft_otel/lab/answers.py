# SPDX-License-Identifier: Apache-2.0
"""Parse what client.py read from a socket: events with their times, text, Server-Timing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httptools


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event: when its last byte came, and what stood after `data:`."""

    at_us: int
    data: str


class Reply:
    """An HTTP answer out of the bytes of a connection, each body piece with its time.

    httptools calls the on_... methods while `of` feeds it.
    """

    def __init__(self) -> None:
        """Nothing has come yet."""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.headers_ns = 0
        self.body: list[tuple[int, bytes]] = []
        self.now = 0
        self.parser = httptools.HttpResponseParser(self)

    @classmethod
    def of(cls, readings: list[tuple[int, bytes]]) -> Reply:
        """Parse what was read; a connection cut short gives what there is of it."""
        reply = cls()
        for reply.now, piece in readings:
            reply.parser.feed_data(piece)
        return reply

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """The status is known and the headers are in."""
        self.status = self.parser.get_status_code()
        self.headers_ns = self.now

    def on_body(self, data: bytes) -> None:
        """A piece of the body, without the framing of chunks."""
        self.body.append((self.now, data))


def first_data(readings: list[tuple[int, bytes]], started: int) -> int | None:
    """Microseconds to the first body data that is not a keep-alive comment."""
    for at, piece in readings:
        if piece.strip() and not piece.startswith(b":"):
            return (at - started) // 1000
    return None


def split_events(readings: list[tuple[int, bytes]], started: int) -> tuple[Event, ...]:
    """Cut the stream into events; each gets the time of the piece that completed it."""
    events: list[Event] = []
    rest = b""
    for at, piece in readings:
        *whole, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for block in whole:
            lines = [line[5:].strip() for line in block.split(b"\n") if line[:5] == b"data:"]
            if lines:
                events.append(Event((at - started) // 1000, b"\n".join(lines).decode()))
    return tuple(events)


def text_of(event: Event) -> str:
    """The piece of text in one event of any of the three APIs."""
    if event.data == "[DONE]":
        return ""
    data = json.loads(event.data)
    if data.get("type") == "response.output_text.delta":
        return str(data["delta"])
    return "".join(map(choice_text, data.get("choices") or ()))


def choice_text(choice: dict[str, Any]) -> str:
    """The text of one choice, streamed or plain, chat or completion."""
    message = choice.get("delta") or choice.get("message") or {}
    return choice.get("text") or message.get("content") or message.get("reasoning") or ""


def plain_text(body: bytes) -> str:
    """The text of a plain answer, or nothing where the body is no such answer."""
    try:
        data = json.loads(body)
    except ValueError:
        return ""
    if not isinstance(data, dict):
        return ""
    parts = [part for item in data.get("output") or () for part in item.get("content") or ()]
    said = "".join(part.get("text", "") for part in parts)
    return said + "".join(map(choice_text, data.get("choices") or ()))


def parse_timing(header: str) -> dict[str, float]:
    """A W3C Server-Timing header as name -> milliseconds; entries without `dur` count as 0."""
    timing: dict[str, float] = {}
    for entry in header.split(","):
        name, *params = (part.strip() for part in entry.split(";"))
        if name:
            found = [part[4:] for part in params if part.lower().startswith("dur=")]
            timing[name] = float(found[0].strip('"')) if found else 0.0
    return timing
