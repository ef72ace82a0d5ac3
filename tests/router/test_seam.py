# SPDX-License-Identifier: Apache-2.0
"""P's token and D's stream become one plain stream, however D cuts its text and its chunks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from ttft_otel.router.plan import CONTINUE, STRIP, Plan
from ttft_otel.router.seam import DONE, Seam, Token, broken, opening, token

BOTH = ("prefill", "decode")
USAGE = {"prompt_tokens": 10, "total_tokens": 11, "completion_tokens": 1}


def answer(text: str = "Hel", finish: str = "length", chat: bool = True, **more: Any) -> bytes:
    """P's plain answer of one token."""
    own = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    choice = {"index": 0, **own, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    top = {"id": "cmpl-1", "created": 100, "model": "tiny", "choices": [choice], "usage": USAGE}
    return json.dumps({**top, **more}).encode()


def one(*args: Any, **more: Any) -> Token:
    """P's token."""
    found = token(answer(*args, **more), more.get("chat", True))
    assert found is not None
    return found


def event(
    text: str | None, finish: str | None = None, chat: bool = True, role: str = "", **more: Any
) -> bytes:
    """One event of D's stream."""
    delta: dict[str, Any] = {"content": text} if text is not None else {}
    delta = {"role": role, **delta} if role else delta
    choice = {"index": 0, "delta": delta} if chat else {"index": 0, "text": text}
    top = {"id": "cmpl-1", "created": 100, "model": "tiny"}
    top |= {"choices": [choice | {"finish_reason": finish}], **more}
    return b"data: " + json.dumps(top).encode() + b"\n\n"


ROLE = event("", role="assistant")
END = event("", "length")


def texts(data: bytes) -> list[str | None]:
    """The text of every event that has one; [DONE] as it is."""
    found: list[str | None] = []
    for each in data.split(b"\n\n")[:-1]:
        if each == b"data: [DONE]":
            found.append("[DONE]")
            continue
        choice = json.loads(each[6:])["choices"][0]
        found.append(choice["text"] if "text" in choice else choice["delta"].get("content"))
    return found


def join(joint: Seam, chunks: Iterable[bytes]) -> bytes:
    """All that the client gets of D's chunks."""
    return b"".join([joint.feed(chunk) for chunk in chunks]) + joint.end()


def strip(text: str, chunks: Sequence[bytes], chat: bool = True) -> tuple[list[str | None], Seam]:
    """What is left of D's stream after P's text in strip, and the seam."""
    joint = Seam(one(text, chat=chat), Plan(BOTH, STRIP, chat=chat))
    return texts(join(joint, chunks)), joint


def test_the_duplicate_goes_the_rest_stays() -> None:
    """One token per event: preamble and duplicate are dropped, everything else is as it came."""
    rest = event("lo") + END + DONE
    joint = Seam(one(), Plan(BOTH, STRIP, chat=True))
    assert join(joint, [ROLE + event("Hel"), event("lo"), END, DONE]) == rest
    assert not joint.mismatch
    joint = Seam(one(chat=False), Plan(BOTH, STRIP))
    assert join(joint, [event("Hel", chat=False), event("lo", chat=False), DONE]) == (
        event("lo", chat=False) + DONE
    )


@pytest.mark.parametrize(
    ("chunks", "left"),
    [
        ([ROLE, event("Hello, "), event("you"), END], ["lo, ", "you", ""]),
        ([ROLE, event(""), event("Hel"), event("lo"), END], ["lo", ""]),
        ([ROLE, event("H"), event("el"), event("lo"), END], ["lo", ""]),
        ([ROLE, event("H"), event("ello"), END], ["lo", ""]),
        ([ROLE, event("Hello", "stop")], ["lo"]),
        ([ROLE, event("Hel", "stop")], [""]),
        ([event("Hello", role="assistant"), END], ["lo", ""]),
    ],
)
def test_only_the_duplicates_text_goes(chunks: list[bytes], left: list[str]) -> None:
    """D's first event may hold several tokens, a part of one, none, or the end of the answer."""
    found, joint = strip("Hel", chunks)
    assert found == left and not joint.mismatch


@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
def test_any_cut_of_the_bytes_gives_the_same(size: int) -> None:
    """Chunks need not be events: cut anywhere, the client gets the same events."""
    whole = ROLE + event("Hé") + event("llo 😀") + event("you") + END + DONE
    found, _ = strip("Hé", [whole[at : at + size] for at in range(0, len(whole), size)])
    assert found == ["llo 😀", "you", "", "[DONE]"]


def test_after_the_seam_bytes_pass_as_they_are() -> None:
    """Once the duplicate is gone nothing is parsed or held back, not even half an event."""
    joint = Seam(one(), Plan(BOTH, STRIP, chat=True))
    assert joint.feed(ROLE + event("Hel") + b"data: {ha") == b"data: {ha"
    assert joint.feed(b"lf") == b"lf" and joint.raw


@pytest.mark.parametrize(
    ("chunks", "left"),
    [
        ([ROLE, event("Tra"), event("lala"), END], ["lala", ""]),
        ([ROLE, event("He"), event("y"), event("ho"), END], ["ho", ""]),
        ([ROLE, event("", "stop")], [""]),
    ],
)
def test_another_first_token_is_noticed(chunks: list[bytes], left: list[str]) -> None:
    """D's first token, where it is another one, is replaced by P's; the seam says so."""
    found, joint = strip("Hel", chunks)
    assert joint.mismatch and found == left


def test_a_token_that_d_takes_for_reasoning_is_a_mismatch() -> None:
    """Where D's parser puts the token elsewhere, its event goes on as it is."""
    other = b'data: {"id": "cmpl-1", "created": 100, "choices": [{"delta": {"reasoning": "Hel"}}]}'
    joint = Seam(one(), Plan(BOTH, STRIP, chat=True))
    out = join(joint, [ROLE, other + b"\n\n", END])
    assert b'"reasoning"' in out and joint.mismatch


def test_one_id_and_one_time() -> None:
    """D's own id and time become those of P's events, in every event, never inside a text."""
    mine = {"id": "cmpl-9", "created": 105}
    quoted = '"created":105 and "id":"cmpl-9"'
    chunks = [event("Hel", **mine), event(quoted, **mine), event("", "length", **mine), DONE]
    compact = [chunk.replace(b'": ', b'":') for chunk in chunks]
    joint = Seam(one(), Plan(BOTH, STRIP, chat=True))
    events = [json.loads(each[6:]) for each in join(joint, compact).split(b"\n\n")[:-2]]
    assert {(each["id"], each["created"]) for each in events} == {("cmpl-1", 100)}
    assert events[0]["choices"][0]["delta"]["content"] == quoted


def test_continued_streams_lose_nothing_but_the_preamble() -> None:
    """Continue: D's first event is the second token; usage counts P's token as an answer's."""
    joint = Seam(one(), Plan(BOTH, CONTINUE, chat=True, usage=True))
    usage = {"prompt_tokens": 11, "total_tokens": 14, "completion_tokens": 3}
    last = b'data: {"choices":[],"usage":' + json.dumps(usage).encode() + b"}\n\n"
    out = join(joint, [ROLE + event("Hel"), event("lo"), END, last, DONE])
    assert texts(out.replace(last, b"")[: out.index(b'data: {"choices":[]')]) == ["Hel", "lo", ""]
    said = json.loads(out[out.index(b'{"choices":[]') :].split(b"\n\n")[0])["usage"]
    assert said == {"prompt_tokens": 10, "total_tokens": 14, "completion_tokens": 4}
    assert out.endswith(DONE)


def test_the_opening_is_a_servers_own() -> None:
    """Chat: preamble, then the token; completions: the token; nothing ends."""
    events = [
        json.loads(each[6:])
        for each in opening(one(), Plan(BOTH, STRIP, chat=True)).split(b"\n\n")[:-1]
    ]
    assert [each["choices"][0]["delta"] for each in events] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
    ]
    assert {each["object"] for each in events} == {"chat.completion.chunk"}
    assert all(each["choices"][0]["finish_reason"] is None for each in events)
    (event,) = opening(one(chat=False), Plan(BOTH, STRIP)).split(b"\n\n")[:-1]
    assert json.loads(event[6:])["choices"][0]["text"] == "Hel"


def test_an_answer_that_ends_on_p_is_whole() -> None:
    """P's finish reason, usage if it was asked for, and [DONE]."""
    for usage in (False, True):
        plan = Plan(BOTH, STRIP, chat=True, usage=usage)
        out = opening(one("", "stop", system_fingerprint="f"), plan)
        *events, done, end = out.split(b"\n\n")
        assert (done, end) == (b"data: [DONE]", b"")
        found = [json.loads(each[6:]) for each in events]
        assert found[1]["choices"][0]["finish_reason"] == "stop"
        assert [each.get("usage") for each in found] == [None, None] + [USAGE] * usage
        assert [each.get("system_fingerprint") for each in found][-1] == "f"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (one("ok"), ""),
        (one(""), "character"),
        (one("h\ufffd"), "character"),
        (one("", "stop"), ""),
        (one("x", "error"), "finish_reason"),
        (one("a\n"), "stop"),
        (one("aST"), "stop"),
        (one("STOPPED"), ""),
        (one("x", usage={"completion_tokens_details": {"reasoning_tokens": 0}}), "reasoning"),
    ],
)
def test_some_tokens_are_not_handed_out(given: Token, reason: str) -> None:
    """Half a character, the possible start of a stop string, and what a parser may have split."""
    assert given.refusal(Plan(BOTH, STRIP, chat=True, stops=("\n\n", "STOP"))) == reason


def test_what_is_no_answer_of_one_token_is_none() -> None:
    """Another shape of answer is not guessed at."""
    for data in (b"", b"[]", b"{}", b'{"choices": [{}, {}]}', b'{"choices": [{"message": 3}]}'):
        assert token(data, True) is None and token(data, False) is None


def test_transfer_parameters_and_ids_are_read() -> None:
    """Where chat and completions put them; none is None."""
    found = token(answer(kv_transfer_params={"a": 1}, prompt_token_ids=[1, 2]), True)
    assert found is not None and (found.params, found.prompt) == ({"a": 1}, [1, 2])
    assert one().params is None


@pytest.mark.parametrize(
    "strange",
    [
        b"{oops",
        b'{"choices": [{"index": 0}]}',
        b'{"choices": [{"index": 0, "delta": null}]}',
        b'{"choices": {"a": 1}}',
        b'{"choices": [{"index": 0, "delta": {"content": "\xff"}}]}',
    ],
)
@pytest.mark.parametrize("mode", [STRIP, CONTINUE])
def test_an_event_of_another_shape_goes_on_as_it_came(mode: str, strange: bytes) -> None:
    """What no vLLM writes is the client's to read, and does not cut its stream off."""
    joint = Seam(one(), Plan(BOTH, mode, chat=True))
    sent = b"data: " + strange + b"\n\n" + DONE
    assert joint.feed(sent) + joint.end() == sent


def test_a_stream_that_breaks_says_why() -> None:
    """D's own error, else ours, then [DONE]: as a server ends a stream that failed."""
    out = broken(b'{"error": {"message": "no", "code": 400}}', "x")
    assert out == b'data: {"error":{"message":"no","code":400}}\n\n' + DONE
    assert b'"message":"gone"' in broken(b"<html>", "gone")
