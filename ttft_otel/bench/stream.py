# SPDX-License-Identifier: Apache-2.0
"""Read a streamed answer: wire.py gives pieces with their times, figures.py gets a Story.

A piece may end anywhere: in a line, between CR and LF, in a character, in the JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

DONE = "[DONE]"
LONGEST = 300  # characters of an error message that are kept


@dataclass(slots=True)
class Story:
    """What a stream said: when its tokens came (ns, one entry an event), counts, text, complaint.

    trouble: the kind of it. says: the server's own words. done: it said that this was all.
    """

    tokens_ns: list[int] = field(default_factory=list)
    prompt: int | None = None
    cached: int | None = None
    answer: int | None = None
    text: list[str] = field(default_factory=list)
    trouble: str = ""
    says: str = ""
    done: bool = False


class Lines:
    """Server-sent events out of bytes: `feed` gives the data of every event that a piece completes."""

    def __init__(self) -> None:
        """Nothing has come yet."""
        self.rest = b""
        self.data: list[bytes] = []
        self.after_cr = False

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that end in this piece; lines end with CR, LF or both."""
        if self.after_cr and piece[:1] == b"\n":
            piece = piece[1:]
        if piece:
            self.after_cr = piece[-1:] == b"\r"
        text = (self.rest + piece).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self.rest = text.split(b"\n")
        return [event for line in lines if (event := self._line(line)) is not None]

    def _line(self, line: bytes) -> bytes | None:
        """One line; a blank one ends an event that has data."""
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self.data.append(value.removeprefix(b" "))
            return None
        event = b"\n".join(self.data) if self.data else None
        self.data = []
        return event


class Reader:
    """Fill a Story from the pieces of one body."""

    def __init__(self) -> None:
        """An empty story."""
        self.lines = Lines()
        self.story = Story()
        self.last_ns = 0

    def feed(self, at: int, piece: bytes) -> None:
        """A piece that came at `at`; every event that it completes has this time."""
        for event in self.lines.feed(piece):
            self._event(at, event.decode("utf-8", "replace"))

    def refused(self, body: bytes) -> None:
        """The body of an answer with another status than 200."""
        try:
            self.story.says = _words(json.loads(body))
        except ValueError:
            self.story.says = plain(body.decode("utf-8", "replace"))

    def _event(self, at: int, data: str) -> None:
        if data == DONE:
            self.story.done = True
            return
        try:
            said = json.loads(data)
        except (ValueError, RecursionError):
            self.story.trouble = self.story.trouble or "no JSON in the stream"
            return
        if not isinstance(said, dict):
            return
        if said.get("error"):
            self.story.trouble = "error in the stream"
            self.story.says = self.story.says or _words(said)
        self._usage(_object(said.get("usage")))
        told = said.get("choices")
        choices = [_object(each) for each in told] if isinstance(told, list) else []
        self._text(choices)
        self.story.done = self.story.done or _ended(choices)
        # A finish alone is a token only where none came before it: one whose text is empty.
        if any(map(_token, choices)) or (choices and _ended(choices) and not self.story.tokens_ns):
            self.story.tokens_ns.append(at)

    def _usage(self, usage: dict[str, Any]) -> None:
        self.story.prompt = _count(usage.get("prompt_tokens"), self.story.prompt)
        self.story.answer = _count(usage.get("completion_tokens"), self.story.answer)
        details = _object(usage.get("prompt_tokens_details"))
        self.story.cached = _count(details.get("cached_tokens"), self.story.cached)

    def _text(self, choices: list[dict[str, Any]]) -> None:
        for choice in choices:
            delta = _object(choice.get("delta"))
            self.story.text.append(str(choice.get("text") or delta.get("content") or ""))


def _words(said: Any) -> str:
    """The message of an error as vLLM, OpenAI and FastAPI write it."""
    error = said.get("error", said) if isinstance(said, dict) else said
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or ""
    return plain(str(error))


def plain(text: str) -> str:
    """A stranger's words on one line, without what would steer a terminal, and never long."""
    return "".join(each if each.isprintable() else " " for each in text).strip()[:LONGEST]


def _object(value: Any) -> dict[str, Any]:
    """A JSON object; {} for whatever else a server says in its place."""
    return value if isinstance(value, dict) else {}


def _count(value: Any, before: int | None) -> int | None:
    """A number of tokens; what is none leaves what was said before."""
    return value if type(value) is int and value >= 0 else before


def _token(choice: dict[str, Any]) -> bool:
    """Whether an event of this choice brought a token: not a role alone, not a finish alone."""
    delta = _object(choice.get("delta"))
    said = choice.get("text") or any(value for key, value in delta.items() if key != "role")
    silent = "role" not in delta and not choice.get("finish_reason")
    return bool(said) or silent


def _ended(choices: list[dict[str, Any]]) -> bool:
    return any(choice.get("finish_reason") for choice in choices)
