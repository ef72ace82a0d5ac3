# SPDX-License-Identifier: Apache-2.0
"""Parse a streamed response (server-sent events) from pieces with their arrival times.

A piece may end anywhere: within a line, between CR and LF, within a character, within the JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

DONE_MARKER = "[DONE]"
# Finish reasons of an answer that the server broke off: a pause, sleep mode, a failed KV load.
SERVER_ENDS = ("abort", "error")
MAX_ERROR_CHARS = 300  # characters of an error message that are kept


@dataclass(slots=True)
class StreamContent:
    """The content of a stream. Numbers of tokens are the server's, None when it did not send them."""

    #: Arrival of each event with a token; an event may hold several tokens.
    token_times_ns: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    text_parts: list[str] = field(default_factory=list)
    stream_error: str = ""  #: kind of error
    server_message: str = ""  #: the server's error message
    is_finished: bool = False  #: whether it was complete


class EventDecoder:
    """Decodes server-sent events from pieces of a byte stream."""

    def __init__(self) -> None:
        self.incomplete_line = b""
        self.data_lines: list[bytes] = []
        self.ends_with_cr = False

    def decode_piece(self, piece: bytes) -> list[bytes]:
        """The data of the events that end in `piece`; lines end with CR, LF or both."""
        # CR and LF in two pieces: one line end, not an empty line that would end the event.
        if self.ends_with_cr and piece[:1] == b"\n":
            piece = piece[1:]
        if piece:
            self.ends_with_cr = piece[-1:] == b"\r"
        # Bytes, not text: a piece may end within a character.
        text = (self.incomplete_line + piece).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self.incomplete_line = text.split(b"\n")
        return [event for line in lines if (event := self._decode_line(line)) is not None]

    def _decode_line(self, line: bytes) -> bytes | None:
        """Decode one line; an empty one ends an event, whose data is returned if it has any."""
        if line:
            # Comments (": ping") and other fields have no data and end here.
            name, _, value = line.partition(b":")
            if name == b"data":
                self.data_lines.append(value.removeprefix(b" "))
            return None
        event = b"\n".join(self.data_lines) if self.data_lines else None
        self.data_lines = []
        return event


class StreamParser:
    """Fill a StreamContent from the pieces of one body."""

    def __init__(self) -> None:
        self.decoder = EventDecoder()
        self.content = StreamContent()
        self.last_ns = 0

    def parse_piece(self, received_ns: int, piece: bytes) -> None:
        """Parse a piece that arrived at `received_ns`, which is the time of all events that it ends."""
        for event in self.decoder.decode_piece(piece):
            self._parse_event(received_ns, event.decode("utf-8", "replace"))

    def parse_refusal(self, body: bytes) -> None:
        """Take the error message from the `body` of a response with a status other than 200."""
        try:
            self.content.server_message = _extract_message(json.loads(body))
        except ValueError:
            self.content.server_message = _sanitize_text(body.decode("utf-8", "replace"))

    def _parse_event(self, received_ns: int, data: str) -> None:
        if data == DONE_MARKER:
            self.content.is_finished = True
            return
        try:
            payload = json.loads(data)
        # The stream is read on: later tokens still have their times.
        except (ValueError, RecursionError):
            self.content.stream_error = self.content.stream_error or "no JSON in the stream"
            return
        # Valid JSON, but of no API: neither a token nor an error.
        if not isinstance(payload, dict):
            return
        if payload.get("error"):
            self.content.stream_error = "error in the stream"
            self.content.server_message = self.content.server_message or _extract_message(payload)
        # vLLM's last event has usage and no choices.
        self._record_usage(_coerce_object(payload.get("usage")))
        raw_choices = payload.get("choices")
        choices = (
            [_coerce_object(choice) for choice in raw_choices]
            if isinstance(raw_choices, list)
            else []
        )
        self._record_text(choices)
        # HTTP has answered 200 by then: only the finish reason tells it.
        if any(choice.get("finish_reason") in SERVER_ENDS for choice in choices):
            self.content.stream_error = self.content.stream_error or "ended by the server"
        self.content.is_finished = self.content.is_finished or _has_finished(choices)
        # An event with only a finish reason counts as a token if none came before: the only token of
        # the answer then has an empty text.
        if any(map(_has_token, choices)) or (
            choices and _has_finished(choices) and not self.content.token_times_ns
        ):
            self.content.token_times_ns.append(received_ns)

    def _record_usage(self, usage: dict[str, Any]) -> None:
        self.content.prompt_tokens = _parse_count(
            usage.get("prompt_tokens"), self.content.prompt_tokens
        )
        self.content.completion_tokens = _parse_count(
            usage.get("completion_tokens"), self.content.completion_tokens
        )
        details = _coerce_object(usage.get("prompt_tokens_details"))
        self.content.cached_tokens = _parse_count(
            details.get("cached_tokens"), self.content.cached_tokens
        )

    def _record_text(self, choices: list[dict[str, Any]]) -> None:
        for choice in choices:
            delta = _coerce_object(choice.get("delta"))
            self.content.text_parts.append(str(choice.get("text") or delta.get("content") or ""))


def _extract_message(payload: Any) -> str:
    """The message of an error in the formats of vLLM, OpenAI and FastAPI."""
    error = payload.get("error", payload) if isinstance(payload, dict) else payload
    if isinstance(error, dict):
        # FastAPI's own refusals have `detail`.
        error = error.get("message") or error.get("detail") or ""
    return _sanitize_text(str(error))


def _sanitize_text(text: str) -> str:
    """Foreign text as one line of at most MAX_ERROR_CHARS, without control characters."""
    printable = "".join(each if each.isprintable() else " " for each in text)
    return printable.strip()[:MAX_ERROR_CHARS]


def _coerce_object(value: Any) -> dict[str, Any]:
    """`value` if it is a JSON object, else {}."""
    return value if isinstance(value, dict) else {}


def _parse_count(value: Any, previous: int | None) -> int | None:
    """`value` if it is a number of tokens, else `previous`."""
    # type() and not isinstance(): true is an int to Python.
    return value if type(value) is int and value >= 0 else previous


def _has_token(choice: dict[str, Any]) -> bool:
    """Whether a choice of an event holds a token, rather than only a role or a finish reason."""
    delta = _coerce_object(choice.get("delta"))
    # Any other key: reasoning and tool calls are tokens as well.
    has_content = choice.get("text") or any(value for key, value in delta.items() if key != "role")
    # A token that is only a part of a character has an empty text.
    has_silent_token = "role" not in delta and not choice.get("finish_reason")
    return bool(has_content) or has_silent_token


def _has_finished(choices: list[dict[str, Any]]) -> bool:
    return any(choice.get("finish_reason") for choice in choices)
