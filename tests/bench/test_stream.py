# SPDX-License-Identifier: Apache-2.0
"""Reading a stream: whatever the pieces, the same events, at the time of the piece that ended each."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ttft_otel.bench.stream import Reader, Story

USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
EVENTS: list[Any] = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"content": "né 字"}}]},
    {"choices": [{"delta": {"content": "\n\ndata: no"}}]},
    {"choices": [], "usage": USAGE},
]


def stream(end: str) -> bytes:
    """All events with one kind of line end, and a comment among them."""
    lines = [f"data: {json.dumps(event, ensure_ascii=False)}{end}{end}" for event in EVENTS]
    return "".join([f": keep-alive{end}{end}", *lines, f"data: [DONE]{end}{end}"]).encode()


def read(pieces: list[bytes]) -> Story:
    """The story of pieces that came at 0, 1, 2 ..."""
    reader = Reader()
    for at, piece in enumerate(pieces):
        reader.feed(at, piece)
    return reader.story


def told(*events: Any) -> Story:
    """The story of events, one a piece."""
    return read([b"data: " + json.dumps(event).encode() + b"\n\n" for event in events])


@given(some.sampled_from(["\n", "\r\n", "\r"]), some.sets(some.integers(1, 400)))
def test_any_split(end: str, cuts: set[int]) -> None:
    """However a stream is cut, in characters or line ends too, it tells the same."""
    whole = stream(end)
    places = [0, *sorted(cut for cut in cuts if cut < len(whole)), len(whole)]
    pieces = [whole[a:b] for a, b in zip(places, places[1:], strict=False)]

    story = read(pieces)

    assert "".join(story.text) == "né 字\n\ndata: no"
    assert (story.prompt, story.answer, story.cached) == (9, 2, 4)
    assert len(story.tokens_ns) == 2 and story.done and not story.trouble


def test_time() -> None:
    """An event has the time of the piece that completed it, not of its first byte."""
    data = b'data: {"choices": [{"text": "a"}]}\n\n'

    assert read([data[:10], data[10:-1], data[-1:]]).tokens_ns == [2]


@pytest.mark.parametrize(
    ("choice", "tokens"),
    [
        ({"delta": {"role": "assistant", "content": ""}}, 0),
        ({"delta": {"role": "assistant", "content": "a"}}, 1),
        ({"delta": {"reasoning": "a"}}, 1),
        ({"delta": {"tool_calls": [{"index": 0}]}}, 1),
        ({"text": ""}, 1),
        ({"text": "", "finish_reason": "length"}, 1),
    ],
)
def test_token(choice: dict[str, Any], tokens: int) -> None:
    """A role alone is no token; an empty text is one, for half a character has none yet."""
    assert len(told({"choices": [choice]}).tokens_ns) == tokens


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"error": {"message": "m", "code": 400}}', "m"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"message": "m"}', "m"),
        (b"<html>" + b"x" * 999, "<html>" + "x" * 294),
        (b"\xff", "\ufffd"),
        (b"", ""),
        (b"[1]", "[1]"),
        (b"a\r\n\x1b[2Jb", "a   [2Jb"),
        (b'{"error": "\\u001b]0;x\\u0007"}', "]0;x"),
    ],
)
def test_refused(body: bytes, says: str) -> None:
    """What a refusal says is found in the forms of servers and proxies, and is never long."""
    reader = Reader()
    reader.refused(body)

    assert reader.story.says == says


def test_finish() -> None:
    """A finish after tokens is none."""
    finish = {"choices": [{"delta": {}, "finish_reason": "stop"}]}

    assert len(told({"choices": [{"delta": {"content": "a"}}]}, finish).tokens_ns) == 1


def test_trouble() -> None:
    """An error event and broken JSON are told, and do not end the reading."""
    story = told({"error": {"message": "x"}})
    assert (story.trouble, story.says) == ("error in the stream", "x")
    assert read([b"data: {\n\n"]).trouble == "no JSON in the stream"
