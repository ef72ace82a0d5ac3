# SPDX-License-Identifier: Apache-2.0
"""Reading a stream: whatever the pieces, the same events, at the time of the piece that ended each."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ttft_otel.bench.load_driver import StreamContent, decode_events

USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
EVENTS: list[Any] = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"content": "né 字"}}]},
    {"choices": [{"delta": {"content": "\n\ndata: no"}}]},
    {"choices": [], "usage": USAGE},
]


def encode_stream(line_end: str) -> bytes:
    """All events with one kind of line end, and a comment among them."""
    lines = [
        f"data: {json.dumps(event, ensure_ascii=False)}{line_end}{line_end}" for event in EVENTS
    ]
    return "".join(
        [f": keep-alive{line_end}{line_end}", *lines, f"data: [DONE]{line_end}{line_end}"]
    ).encode()


def parse_pieces(pieces: list[bytes]) -> StreamContent:
    """The story of pieces that came at 0, 1, 2 ..."""
    content = StreamContent()
    for at, event in decode_events(list(enumerate(pieces))):
        content.record_event(at, event)
    return content


def parse_events(*events: Any) -> StreamContent:
    """The story of events, one a piece."""
    return parse_pieces([b"data: " + json.dumps(event).encode() + b"\n\n" for event in events])


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_any_split(end: str) -> None:
    """However a stream is cut, in characters or line ends too, it tells the same."""
    whole = encode_stream(end)
    splits = [[whole[:cut], whole[cut:]] for cut in range(len(whole))]
    for pieces in (*splits, [whole[at : at + 1] for at in range(len(whole))]):
        story = parse_pieces(pieces)

        assert "".join(story.text_parts) == "né 字\n\ndata: no"
        assert (story.prompt_tokens, story.completion_tokens, story.cached_tokens) == (9, 2, 4)
        assert len(story.token_times_ns) == 2 and story.is_finished and not story.stream_error


def test_no_line_end() -> None:
    """A body of one long line, as a refusal is, has no event, and is not searched from each of its bytes."""
    assert not list(decode_events([(0, b'{"error": "' + b"x" * 1_000_000)]))


def test_time() -> None:
    """An event has the time of the piece that completed it, not of its first byte."""
    data = b'data: {"choices": [{"text": "a"}]}\n\n'

    assert parse_pieces([data[:10], data[10:-1], data[-1:]]).token_times_ns == [2]


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
    assert len(parse_events({"choices": [choice]}).token_times_ns) == tokens


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
    content = StreamContent()
    content.record_refusal(body)

    assert content.server_message == says


def test_finish() -> None:
    """A finish after tokens is none; it ends a stream as [DONE] does."""
    finish = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
    content = parse_events({"choices": [{"delta": {"content": "a"}}]}, finish)

    assert len(content.token_times_ns) == 1 and content.is_finished


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [{"text": "a"}], "usage": 3},
        {"choices": [{"text": 5}], "usage": {"prompt_tokens": "x", "completion_tokens": True}},
        {"choices": ["x", {"text": "a"}], "usage": {"prompt_tokens_details": [1]}},
        {"choices": [{"delta": "a", "text": "a"}], "usage": {"completion_tokens": -1}},
    ],
)
def test_types(event: Any) -> None:
    """A field of another type than expected in a server's answer is treated as missing."""
    content = parse_events(event)

    assert len(content.token_times_ns) == 1
    assert (content.prompt_tokens, content.completion_tokens, content.cached_tokens) == (None,) * 3


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_the_server_ends_it(reason: str) -> None:
    """An answer that the server broke off is a failure, also where it has its end and status 200."""
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    end = {"choices": [{"delta": {"content": ""}, "finish_reason": reason}]}
    story = parse_events(role, end)

    assert story.stream_error == "ended by the server" and story.is_finished


def test_trouble() -> None:
    """An error event and broken JSON are told, and do not end the reading."""
    story = parse_events({"error": {"message": "x"}})
    assert (story.stream_error, story.server_message) == ("error in the stream", "x")
    assert parse_pieces([b"data: {\n\n"]).stream_error == "no JSON in the stream"
