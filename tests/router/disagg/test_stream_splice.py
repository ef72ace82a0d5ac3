# SPDX-License-Identifier: Apache-2.0
"""The prefill token and the decode stream become one plain stream, however text and chunks are cut."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import pytest

from tests.router.disagg.prefill_answers import BOTH_LEGS, USAGE, build_token
from ttft_otel.router.disagg.request_plan import LegPlan
from ttft_otel.router.disagg.stream_splice import (
    DONE_EVENT,
    StreamSplicer,
    render_first_events,
    render_stream_error,
)
from ttft_otel.router.types import MODE_STRIP


def build_event(
    text: str | None, finish: str | None = None, chat: bool = True, role: str = "", **more: Any
) -> bytes:
    """One event of the decode stream."""
    delta: dict[str, Any] = {"content": text} if text is not None else {}
    delta = {"role": role, **delta} if role else delta
    choice = {"index": 0, "delta": delta} if chat else {"index": 0, "text": text}
    top = {"id": "cmpl-1", "created": 100, "model": "tiny"}
    top |= {"choices": [choice | {"finish_reason": finish}], **more}
    return b"data: " + json.dumps(top).encode() + b"\n\n"


ROLE_EVENT = build_event("", role="assistant")
END_EVENT = build_event("", "length")


def list_texts(data: bytes) -> list[str | None]:
    """The text of every event that has one; [DONE] as it is."""
    event_texts: list[str | None] = []
    for event_bytes in data.split(b"\n\n")[:-1]:
        if event_bytes == b"data: [DONE]":
            event_texts.append("[DONE]")
            continue
        choice = json.loads(event_bytes[6:])["choices"][0]
        event_texts.append(choice["text"] if "text" in choice else choice["delta"].get("content"))
    return event_texts


def splice_chunks(splicer: StreamSplicer, chunks: Iterable[bytes]) -> bytes:
    """All that the client gets of the decode chunks."""
    return b"".join([splicer.splice_chunk(chunk) for chunk in chunks]) + splicer.flush_rest()


def splice_stripped(
    text: str, chunks: Sequence[bytes], chat: bool = True
) -> tuple[list[str | None], StreamSplicer]:
    """What is left of the decode stream after the prefill text in strip, and the seam."""
    splicer = StreamSplicer(
        build_token(text, chat=chat), LegPlan(BOTH_LEGS, MODE_STRIP, is_chat=chat)
    )
    return list_texts(splice_chunks(splicer, chunks)), splicer


def test_the_duplicate_goes_the_rest_stays() -> None:
    """One token per event: preamble and duplicate are dropped, everything else is as it came."""
    rest = build_event("lo") + END_EVENT + DONE_EVENT
    joint = StreamSplicer(build_token(), LegPlan(BOTH_LEGS, MODE_STRIP, is_chat=True))
    assert (
        splice_chunks(
            joint, [ROLE_EVENT + build_event("Hel"), build_event("lo"), END_EVENT, DONE_EVENT]
        )
        == rest
    )
    assert not joint.has_mismatch
    joint = StreamSplicer(build_token(chat=False), LegPlan(BOTH_LEGS, MODE_STRIP))
    assert splice_chunks(
        joint, [build_event("Hel", chat=False), build_event("lo", chat=False), DONE_EVENT]
    ) == (build_event("lo", chat=False) + DONE_EVENT)


def test_compact_events_as_vllm_writes_them() -> None:
    """The role's event is dropped as it came; a text that reads like it is a text."""
    lookalike = '"delta":{"role":"assistant","content":""}'
    events = [ROLE_EVENT, build_event("Hel"), build_event(lookalike), END_EVENT]
    compact = [b"data: " + msgspec.json.encode(json.loads(event[6:])) + b"\n\n" for event in events]
    for first in (compact[:2], compact[1:2]):  # also of a decode instance that says no role
        texts, splicer = splice_stripped("Hel", [*first, *compact[2:], DONE_EVENT])
        assert texts == [lookalike, "", "[DONE]"] and not splicer.has_mismatch
    # Nothing was sent of the answer: the text is the first decode token, and not the prefill instance's.
    assert splice_stripped("Hel", compact[2:3])[1].has_mismatch


def test_usage_right_after_the_role_has_ps_id() -> None:
    """Of an answer without a text all events have one ID, too."""
    role = build_event("", role="assistant").replace(b"cmpl-1", b"cmpl-2")
    usage = b'data: {"id":"cmpl-2","created":100,"choices":[],"usage":{}}\n\n'
    for first in (role, b"data: " + msgspec.json.encode(json.loads(role[6:])) + b"\n\n"):
        splicer = StreamSplicer(build_token(), LegPlan(BOTH_LEGS, MODE_STRIP, is_chat=True))
        assert splice_chunks(splicer, [first, usage]) == usage.replace(b"cmpl-2", b"cmpl-1")


@pytest.mark.parametrize(
    ("chunks", "left"),
    [
        ([ROLE_EVENT, build_event("Hello, "), build_event("you"), END_EVENT], ["lo, ", "you", ""]),
        (
            [ROLE_EVENT, build_event(""), build_event("Hel"), build_event("lo"), END_EVENT],
            ["lo", ""],
        ),
        (
            [ROLE_EVENT, build_event("H"), build_event("el"), build_event("lo"), END_EVENT],
            ["lo", ""],
        ),
        ([ROLE_EVENT, build_event("H"), build_event("ello"), END_EVENT], ["lo", ""]),
        ([ROLE_EVENT, build_event("Hello", "stop")], ["lo"]),
        ([ROLE_EVENT, build_event("Hel", "stop")], [""]),
        ([build_event("Hello", role="assistant"), END_EVENT], ["lo", ""]),
    ],
)
def test_only_the_duplicates_text_goes(chunks: list[bytes], left: list[str]) -> None:
    """The first decode event may hold several tokens, a part of one, none, or the end of the answer."""
    found, joint = splice_stripped("Hel", chunks)
    assert found == left and not joint.has_mismatch


@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
def test_any_cut_of_the_bytes_gives_the_same(size: int) -> None:
    """Chunks need not be events: cut anywhere, the client gets the same events."""
    whole = (
        ROLE_EVENT
        + build_event("Hé")
        + build_event("llo 😀")
        + build_event("you")
        + END_EVENT
        + DONE_EVENT
    )
    found, _ = splice_stripped("Hé", [whole[at : at + size] for at in range(0, len(whole), size)])
    assert found == ["llo 😀", "you", "", "[DONE]"]


def test_after_the_seam_bytes_pass_as_they_are() -> None:
    """Once the duplicate is gone nothing is parsed or held back, not even half an event."""
    joint = StreamSplicer(build_token(), LegPlan(BOTH_LEGS, MODE_STRIP, is_chat=True))
    assert joint.splice_chunk(ROLE_EVENT + build_event("Hel") + b"data: {ha") == b"data: {ha"
    assert joint.splice_chunk(b"lf") == b"lf" and joint.passes_unchanged


@pytest.mark.parametrize(
    ("chunks", "left"),
    [
        ([ROLE_EVENT, build_event("Tra"), build_event("lala"), END_EVENT], ["lala", ""]),
        (
            [ROLE_EVENT, build_event("He"), build_event("y"), build_event("ho"), END_EVENT],
            ["ho", ""],
        ),
        ([ROLE_EVENT, build_event("", "stop")], [""]),
    ],
)
def test_another_first_token_is_noticed(chunks: list[bytes], left: list[str]) -> None:
    """The first decode token, where it is another one, is replaced by prefill's; the seam says so."""
    found, joint = splice_stripped("Hel", chunks)
    assert joint.has_mismatch and found == left


def test_a_token_that_d_takes_for_reasoning_is_a_mismatch() -> None:
    """Where the decode parser puts the token elsewhere, its event goes on as it is."""
    other = b'data: {"id": "cmpl-1", "created": 100, "choices": [{"delta": {"reasoning": "Hel"}}]}'
    joint = StreamSplicer(build_token(), LegPlan(BOTH_LEGS, MODE_STRIP, is_chat=True))
    out = splice_chunks(joint, [ROLE_EVENT, other + b"\n\n", END_EVENT])
    assert b'"reasoning"' in out and joint.has_mismatch


def test_one_id_and_one_time() -> None:
    """Decode's own id and time become those of the prefill events, in every event, never inside a text."""
    mine = {"id": "cmpl-9", "created": 105}
    quoted = '"created":105 and "id":"cmpl-9"'
    chunks = [
        build_event("Hel", **mine),
        build_event(quoted, **mine),
        build_event("", "length", **mine),
        DONE_EVENT,
    ]
    compact = [chunk.replace(b'": ', b'":') for chunk in chunks]
    joint = StreamSplicer(build_token(), LegPlan(BOTH_LEGS, MODE_STRIP, is_chat=True))
    events = [json.loads(each[6:]) for each in splice_chunks(joint, compact).split(b"\n\n")[:-2]]
    assert {(each["id"], each["created"]) for each in events} == {("cmpl-1", 100)}
    assert events[0]["choices"][0]["delta"]["content"] == quoted


def test_the_opening_is_a_servers_own() -> None:
    """Chat: preamble, then the token; completions: the token; nothing ends."""
    events = [
        json.loads(each[6:])
        for each in render_first_events(
            build_token(), LegPlan(BOTH_LEGS, MODE_STRIP, is_chat=True)
        ).split(b"\n\n")[:-1]
    ]
    assert [each["choices"][0]["delta"] for each in events] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
    ]
    assert {each["object"] for each in events} == {"chat.completion.chunk"}
    assert all(each["choices"][0]["finish_reason"] is None for each in events)
    (event,) = render_first_events(build_token(chat=False), LegPlan(BOTH_LEGS, MODE_STRIP)).split(
        b"\n\n"
    )[:-1]
    assert json.loads(event[6:])["choices"][0]["text"] == "Hel"


def test_an_answer_that_ends_on_p_is_whole() -> None:
    """The prefill instance's finish reason, usage if it was asked for, and [DONE]."""
    for usage in (False, True):
        plan = LegPlan(BOTH_LEGS, MODE_STRIP, is_chat=True, include_usage=usage)
        out = render_first_events(build_token("", "stop", system_fingerprint="f"), plan)
        *events, done, end = out.split(b"\n\n")
        assert (done, end) == (b"data: [DONE]", b"")
        found = [json.loads(each[6:]) for each in events]
        assert found[1]["choices"][0]["finish_reason"] == "stop"
        assert [each.get("usage") for each in found] == [None, None] + [USAGE] * usage
        assert [each.get("system_fingerprint") for each in found][-1] == "f"


@pytest.mark.parametrize(
    "strange",
    [
        b"{oops",
        b'{"choices": [{"index": 0}]}',
        b'{"choices": [{"index": 0, "delta": null}]}',
        b'{"choices": {"a": 1}}',
        b'{"choices": [{"index": 0, "delta": {"content": "\xff"}}]}',
        b'{"choices": [], "x": ' + b"[" * 20_000,
    ],
)
def test_an_event_of_another_shape_goes_on_as_it_came(strange: bytes) -> None:
    """What no vLLM writes is the client's to read, and does not cut its stream off."""
    joint = StreamSplicer(build_token(), LegPlan(BOTH_LEGS, MODE_STRIP, is_chat=True))
    sent = b"data: " + strange + b"\n\n" + DONE_EVENT
    assert joint.splice_chunk(sent) + joint.flush_rest() == sent


def test_a_stream_that_breaks_says_why() -> None:
    """The decode instance's own error, else ours, then [DONE]: as a server ends a stream that failed."""
    out = render_stream_error(b'{"error": {"message": "no", "code": 400}}', "x")
    assert out == b'data: {"error":{"message":"no","code":400}}\n\n' + DONE_EVENT
    for body in (b"<html>", b'{"error": "\xff"}', b'{"x": ' + b"[" * 20_000):
        assert b'"message":"gone"' in render_stream_error(body, "gone")


def test_the_token_in_the_clients_bytes() -> None:
    """A repeated prefill event is dropped unparsed, once, and only while nothing of it is missing."""
    plan = LegPlan(BOTH_LEGS, MODE_STRIP, is_chat=True)
    sent = render_first_events(build_token(), plan)
    role, token = (event + b"\n\n" for event in sent.split(b"\n\n")[:2])
    for first in ([role, token], [token], [role + token]):
        joint = StreamSplicer(build_token(), plan, sent)
        # The decode instance may say the same word again: that one is the answer's.
        assert splice_chunks(joint, [*first, token, DONE_EVENT]) == token + DONE_EVENT
        assert not joint.has_mismatch
    # After a part of the text these bytes are other words.
    parted = StreamSplicer(build_token(), plan, sent)
    assert list_texts(splice_chunks(parted, [build_event("H"), token, DONE_EVENT])) == ["[DONE]"]
    assert parted.has_mismatch
    # Another second: an event of the decode instance's own, whose time the client must not see.
    later = token.replace(b'"created":100', b'"created":101')
    joint = StreamSplicer(build_token(), plan, sent)
    assert splice_chunks(joint, [role, later, later]) == token
    # Settled by what came before: these bytes are the decode instance's, whatever they say.
    joint = StreamSplicer(build_token(), plan, sent)
    usage = b'data: {"id":"cmpl-2","created":100,"choices":[],"usage":{}}\n\n'
    assert splice_chunks(joint, [usage, token]) == usage.replace(b"cmpl-2", b"cmpl-1") + token
