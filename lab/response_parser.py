# SPDX-License-Identifier: Apache-2.0
"""Parse responses that ttft_client.py has read: events with their times, text, Server-Timing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httptools


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """One server-sent event: arrival of its last byte in us after the request, and its data."""

    at_us: int
    data: str


class ParsedResponse:
    """An HTTP response parsed from a connection's bytes; each body piece has its arrival time.

    httptools calls the on_... methods while `from_readings` feeds it.
    """

    def __init__(self) -> None:
        """Start before the first byte."""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.headers_ns = 0
        self.body: list[tuple[int, bytes]] = []
        self.reading_ns = 0
        # The parser of uvicorn: chunked encoding, headers in pieces and the like are solved there.
        self.parser = httptools.HttpResponseParser(self)

    @classmethod
    def from_readings(cls, readings: list[tuple[int, bytes]]) -> ParsedResponse:
        """Parse (time in ns, bytes) pairs; a truncated response gives what there is of it."""
        response = cls()
        # The loop variable is the attribute that on_body() reads: httptools has no place for a time.
        for response.reading_ns, piece in readings:
            response.parser.feed_data(piece)
        return response

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line."""
        # Latin-1 decodes any byte, as HTTP/1.1 allows in values; names have no case.
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """The status is known and the headers are in."""
        self.status = self.parser.get_status_code()
        self.headers_ns = self.reading_ns

    def on_body(self, data: bytes) -> None:
        """A piece of the body, without chunked encoding."""
        # The time of the reading that completed it: nothing was known of it before.
        self.body.append((self.reading_ns, data))


def find_first_data_us(readings: list[tuple[int, bytes]], started_ns: int) -> int | None:
    """Microseconds to the first body data that is not a keep-alive comment."""
    for at_ns, piece in readings:
        # Lines that begin with a colon are comments in server-sent events; proxies send them as keep-alive.
        if piece.strip() and not piece.startswith(b":"):
            return (at_ns - started_ns) // 1000
    return None


def split_events(readings: list[tuple[int, bytes]], started_ns: int) -> tuple[TimedEvent, ...]:
    """Split `readings` into events; an event's time is that of the piece that completes it."""
    events: list[TimedEvent] = []
    rest = b""
    for at_ns, piece in readings:
        # A piece may end inside an event; what follows the last empty line waits for the next piece.
        # Servers may end lines with CR LF, and a pair may be split between two pieces.
        *blocks, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for block in blocks:
            # An event may have several data lines, which the standard joins with line feeds.
            lines = [line[5:].strip() for line in block.split(b"\n") if line[:5] == b"data:"]
            if lines:
                events.append(TimedEvent((at_ns - started_ns) // 1000, b"\n".join(lines).decode()))
    return tuple(events)


def extract_event_text(event: TimedEvent) -> str:
    """The piece of text in one event of any of the three APIs."""
    # The end of a stream in OpenAI's chat and completions; the Responses API has none.
    if event.data == "[DONE]":
        return ""
    data = json.loads(event.data)
    if data.get("type") == "response.output_text.delta":
        return str(data["delta"])
    return "".join(map(extract_choice_text, data.get("choices") or ()))


def extract_choice_text(choice: dict[str, Any]) -> str:
    """The text of one choice, streamed or plain, chat or completion."""
    # Streamed chats have `delta`, plain ones `message`, completions `text`.
    message = choice.get("delta") or choice.get("message") or {}
    # `reasoning` is vLLM's, for models that think first.
    return choice.get("text") or message.get("content") or message.get("reasoning") or ""


def extract_body_text(body: bytes) -> str:
    """The text of a plain answer, or nothing where the body is no such answer."""
    try:
        data = json.loads(body)
    except ValueError:
        return ""
    if not isinstance(data, dict):
        return ""
    # `output` is the Responses API's; other answers have `choices`.
    parts = [part for item in data.get("output") or () for part in item.get("content") or ()]
    text = "".join(part.get("text", "") for part in parts)
    return text + "".join(map(extract_choice_text, data.get("choices") or ()))


def parse_timing(header: str) -> dict[str, float]:
    """A W3C Server-Timing header as name -> milliseconds; entries without `dur` count as 0."""
    timing: dict[str, float] = {}
    for entry in header.split(","):
        name, *params = (part.strip() for part in entry.split(";"))
        if name:
            # A value may be quoted, and names of parameters have no case.
            durations = [part[4:] for part in params if part.lower().startswith("dur=")]
            timing[name] = float(durations[0].strip('"')) if durations else 0.0
    return timing
