# SPDX-License-Identifier: Apache-2.0
"""Which legs a request needs, what prefill and decode instances are asked, and one stream of both answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from ttft_otel.model.endpoints import CHAT_PATH, COMPLETIONS_PATH
from ttft_otel.router.disagg.request_plan import (
    DONE_EVENT,
    KEEP_BLOCKS_PARAMS,
    LegPlan,
    PrefillAnswer,
    StreamSplicer,
    parse_kv_params,
    parse_prefill_answer,
    plan_legs,
    render_first_events,
    render_stream_error,
    take_kv_params,
)
from ttft_otel.router.types import MODE_OFF, MODE_STRIP

BOTH_LEGS = ("prefill", "decode")
KV_PARAMS = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [[1, 2]]}
RAW_PARAMS = Raw(json.dumps(KV_PARAMS).encode())


def plan_chat(mode: str = MODE_STRIP, stream: bool = True, **fields: Any) -> LegPlan:
    """The plan of a chat request with these fields."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": stream}
    return plan_legs(CHAT_PATH, json.dumps(body | fields).encode(), stream, mode)


def plan_completion(mode: str = MODE_STRIP, **fields: Any) -> LegPlan:
    """The plan of a streamed completion with these fields."""
    body = {"model": "tiny", "prompt": "x", "stream": True}
    return plan_legs(COMPLETIONS_PATH, json.dumps(body | fields).encode(), True, mode)


BOTH_IN_STRIP = (BOTH_LEGS, MODE_STRIP, "")
PREFILL_ALONE = (("prefill",), MODE_OFF, "max_tokens")
TOOLS = [{"type": "function"}]
PLANS = [
    *((plan_chat, {"mode": mode}, (BOTH_LEGS, mode, "")) for mode in (MODE_OFF, MODE_STRIP)),
    *((plan_completion, {"mode": mode}, (BOTH_LEGS, mode, "")) for mode in (MODE_OFF, MODE_STRIP)),
    # A text, token ids, and a list of one of them are one prompt.
    *(
        (plan_completion, {"prompt": prompt}, BOTH_IN_STRIP)
        for prompt in ("x", ["x"], [1, 2], [[1, 2]], [7])
    ),
    # A field at its default does not cost the first token's way.
    (plan_chat, {"tools": []}, BOTH_IN_STRIP),
    (plan_chat, {"tool_choice": "none"}, BOTH_IN_STRIP),
    (plan_chat, {"logprobs": False}, BOTH_IN_STRIP),
    (plan_chat, {"n": 1}, BOTH_IN_STRIP),
    (plan_chat, {"echo": False}, BOTH_IN_STRIP),
    # One token needs no decode, whatever else is asked, and prefill keeps nothing.
    (plan_chat, {"max_tokens": 1}, PREFILL_ALONE),
    (plan_chat, {"max_completion_tokens": 1}, PREFILL_ALONE),
    (plan_chat, {"max_tokens": 50, "max_completion_tokens": 1}, PREFILL_ALONE),
    (plan_chat, {"max_tokens": 1, "tools": TOOLS, "logprobs": True}, PREFILL_ALONE),
    (plan_completion, {"max_tokens": 0, "echo": True}, PREFILL_ALONE),
    # What one sequence of KV blocks cannot serve, or a server must refuse, decode gets as it came.
    *(
        (plan_completion, fields, (("decode",), MODE_OFF, reason))
        for fields, reason in (
            ({"n": 2}, "n"),
            ({"best_of": 3}, "best_of"),
            ({"use_beam_search": True}, "use_beam_search"),
            ({"prompt_logprobs": 0}, "prompt_logprobs"),
            ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
            *(
                ({"prompt": prompt}, "prompt")
                for prompt in (["a", "b"], [[1, 2], [3]], None, [], [[]])
            ),
            ({"echo": True, "logprobs": 0}, "echo"),
            ({"max_tokens": -1}, "max_tokens"),
            ({"max_tokens": None}, "max_tokens"),
            ({"max_tokens": 4, "min_tokens": 5}, "max_tokens"),
            ({"max_tokens": "many"}, "body"),
            ({"seed": 1.5}, "body"),
        )
    ),
    # Where the prefill token is not all of the stream's first event, the decode answer is the answer.
    *(
        (plan_chat, fields, (BOTH_LEGS, MODE_OFF, reason))
        for fields, reason in (
            ({"stream": False}, "not streamed"),
            ({"logprobs": True}, "logprobs"),
            ({"tools": TOOLS}, "tools"),
            ({"tool_choice": "auto"}, "tool_choice"),
            ({"response_format": {"type": "text"}}, "response_format"),
            ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
            ({"echo": True}, "echo"),
            ({"return_token_ids": True}, "return_token_ids"),
            ({"stream_options": {"continuous_usage_stats": True}}, "stream_options"),
            ({"stream_options": "x"}, "stream_options"),
        )
    ),
]


@pytest.mark.parametrize(("plan", "fields", "planned"), PLANS)
def test_legs(
    plan: Callable[..., LegPlan], fields: dict[str, Any], planned: tuple[tuple[str, ...], str, str]
) -> None:
    """Which legs, in which mode, and why not in the wanted one; a seed is drawn only for a token ahead."""
    made = plan(**fields)
    assert (made.legs, made.mode, made.reason) == planned
    assert made.seed is None or made.mode == MODE_STRIP


def test_other_paths_and_bodies_are_decodes() -> None:
    """The responses API, embeddings, and what is no JSON object go to the decode instance as they came."""
    for path in ("/v1/responses", "/v1/embeddings", "/v1/messages"):
        assert plan_legs(path, b'{"model": "tiny"}', True, MODE_STRIP).legs == ("decode",)
    huge = (b'{"prompt": "x", "seed": 1e999}', b'{"prompt": "x", "temperature": 1e999}')
    for data in (
        *huge,
        b"",
        b"{",
        b"[1]",
        b'{"prompt": NaN}',
        b"\xff",
        b'{"prompt":' + b"[" * 5000,
    ):
        made = plan_legs(COMPLETIONS_PATH, data, True, MODE_STRIP)
        assert (made.legs, made.reason) == (("decode",), "body")


def test_prefill_is_asked_for_one_token() -> None:
    """One token, no stream and nothing that belongs to one; the blocks are kept; the rest is the client's."""
    made = plan_chat(
        max_completion_tokens=9, min_tokens=3, stream_options={"include_usage": True}, top_p=0.5
    )
    body = json.loads(made.build_prefill_body())
    assert (body["max_tokens"], body["min_tokens"], body["stream"]) == (1, 1, False)
    assert body["kv_transfer_params"] == KEEP_BLOCKS_PARAMS and body["top_p"] == 0.5
    assert not {"max_completion_tokens", "stream_options"} & set(body)
    assert "return_token_ids" not in body and made.include_usage


def test_decode_gets_the_clients_request_and_prefills_parameters() -> None:
    """Nothing but the parameters is added, byte for byte; without parameters nothing at all."""
    made = plan_chat(MODE_OFF, temperature=0.70)
    body = json.loads(made.build_decode_body(RAW_PARAMS))
    assert body.pop("kv_transfer_params") == KV_PARAMS
    assert body == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "x"}],
        "stream": True,
        "temperature": 0.7,
    }
    assert b"kv_transfer_params" not in made.build_decode_body(None)


def test_seeds() -> None:
    """Strip: the client's seed on both, else one drawn for both; none where nothing is drawn."""
    given, drawn = plan_chat(seed=5), plan_chat()
    assert (
        json.loads(given.build_prefill_body())["seed"]
        == json.loads(given.build_decode_body(None))["seed"]
        == 5
    )
    seed = json.loads(drawn.build_prefill_body())["seed"]
    assert json.loads(drawn.build_decode_body(None))["seed"] == seed and 0 <= seed < 1 << 63
    assert plan_chat().seed != seed
    assert "seed" not in json.loads(plan_chat(temperature=0).build_prefill_body())
    assert "seed" not in json.loads(plan_chat(MODE_OFF).build_prefill_body())


USAGE = {"prompt_tokens": 10, "total_tokens": 11, "completion_tokens": 1}


def plan_strip(is_chat: bool = True, **more: Any) -> LegPlan:
    """A plan by which the prefill token leaves before the decode stream."""
    return LegPlan(("prefill", "decode"), MODE_STRIP, is_chat=is_chat, **more)


def build_answer_bytes(
    text: str = "Hel", finish: str = "length", chat: bool = True, **more: Any
) -> bytes:
    """The prefill instance's plain answer of one token."""
    own = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    choice = {"index": 0, **own, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    top = {"id": "cmpl-1", "created": 100, "model": "tiny", "choices": [choice], "usage": USAGE}
    return json.dumps({**top, **more}).encode()


def build_answer(*args: Any, chat: bool = True, **more: Any) -> PrefillAnswer:
    """The same, parsed."""
    answer = parse_prefill_answer(build_answer_bytes(*args, chat=chat, **more), chat)
    assert answer is not None
    return answer


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (build_answer("ok"), ""),
        (build_answer(""), "character"),
        (build_answer("h\ufffd"), "character"),
        (build_answer("", "stop"), ""),
        (build_answer("x", "error"), "finish_reason"),
        (build_answer("a\n"), "stop"),
        (build_answer("aST"), "stop"),
        (build_answer("STOPPED"), ""),
        (build_answer(usage={"completion_tokens_details": {"reasoning_tokens": 0}}), "reasoning"),
    ],
)
def test_some_tokens_are_not_handed_out(given: PrefillAnswer, reason: str) -> None:
    """Half a character, the possible start of a stop string, and what a parser may have split."""
    assert given.explain_refusal(plan_strip(stop_strings=("\n\n", "STOP"))) == reason


def test_a_long_stop_string_is_not_cut_into_pieces() -> None:
    """Only the ends of the prefill token are compared: a twentyfold length costs about as many times more."""

    def measure_s(length: int) -> float:
        plan = plan_strip(stop_strings=("x" * length,))
        answer, seconds = build_answer(), []
        for _ in range(5):
            began_s = time.perf_counter()
            assert answer.explain_refusal(plan) == ""
            seconds.append(time.perf_counter() - began_s)
        return min(seconds)

    # a slice for each length would take four hundred times as long
    assert measure_s(200_000) < 100 * measure_s(10_000)
    plan = plan_strip(stop_strings=("lo" + "x" * 200_000,))
    assert build_answer("Hello").explain_refusal(plan) == "stop"


@pytest.mark.parametrize("chat", [True, False])
def test_what_is_no_answer_of_one_token_is_none(chat: bool) -> None:
    """Decode then answers everything: nothing of prefill's is guessed, and no type fails the request."""
    given = json.loads(build_answer_bytes(chat=chat))
    changes = (
        {"id": 7},
        {"created": "now"},
        {"choices": 5},
        {"choices": [{}, {}]},
        {"usage": [1]},
        {"choices": [{"text": ["a"], "message": {"content": ["a"]}}]},
        {"choices": [{"message": 3}]},
        {"choices": [{}]},
    )
    for change in changes:
        assert parse_prefill_answer(json.dumps(given | change).encode(), chat) is None, change
    for data in (b"", b"[]", b"{}"):
        assert parse_prefill_answer(data, chat) is None


@pytest.mark.parametrize(
    ("data", "params"),
    [
        (build_answer_bytes(kv_transfer_params={"a": 1}), b'{"a": 1}'),
        (b'{"kv_transfer_params": {"remote_host": "p"}, "choices": 5}', b'{"remote_host": "p"}'),
        (b'{"kv_transfer_params": { } }', None),
        (b'{"kv_transfer_params": null}', None),
        (b'{"kv_transfer_params": [1]}', None),
        (b'{"choices": []}', None),
        (b"[]", None),
        (b'{"kv_transfer_params": {"a": "\xff"}}', None),
        (b'{"kv_transfer_params": ' + b"[" * 100_000, None),
    ],
)
def test_kv_params_of_any_answer(data: bytes, params: bytes | None) -> None:
    """Where the blocks are is taken from whatever has it, and nothing else fails the request."""
    found = parse_kv_params(data)
    assert (None if found is None else bytes(found)) == params
    if (answer := parse_prefill_answer(data, True)) is not None:
        assert take_kv_params(answer) == found and take_kv_params(answer) is None


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


def parse_events(data: bytes) -> list[Any]:
    """The JSON of each event, without [DONE]."""
    return [json.loads(each[6:]) for each in data.split(b"\n\n") if each[6:7] == b"{"]


def begin_splice(text: str = "Hel", chat: bool = True, sent_events: bytes = b"") -> StreamSplicer:
    """A splicer of a client that has this text."""
    return StreamSplicer(build_answer(text, chat=chat), plan_strip(chat), sent_events)


def splice_chunks(splicer: StreamSplicer, chunks: Iterable[bytes]) -> bytes:
    """All that the client gets of the decode chunks."""
    return b"".join([splicer.splice_chunk(chunk) for chunk in chunks]) + splicer.flush_rest()


def splice_texts(text: str, chunks: Sequence[bytes]) -> tuple[list[str], bool]:
    """The texts that are left of a chat's decode stream after this one, and whether it began otherwise."""
    splicer = begin_splice(text)
    events = parse_events(splice_chunks(splicer, chunks))
    return [each["choices"][0]["delta"]["content"] for each in events], splicer.has_mismatch


def test_the_duplicate_goes_the_rest_stays() -> None:
    """One token per event: preamble and duplicate are dropped, everything else is as it came."""
    rest = [build_event("lo"), END_EVENT, DONE_EVENT]
    splicer = begin_splice()
    chunks = [ROLE_EVENT + build_event("Hel"), *rest]
    assert splice_chunks(splicer, chunks) == b"".join(rest) and not splicer.has_mismatch
    hel, lo = (build_event(text, chat=False) for text in ("Hel", "lo"))
    assert splice_chunks(begin_splice(chat=False), [hel, lo, DONE_EVENT]) == lo + DONE_EVENT


def make_compact(event: bytes) -> bytes:
    """The event without spaces, as vLLM writes it."""
    return b"data: " + msgspec.json.encode(json.loads(event[6:])) + b"\n\n"


def test_compact_events_as_vllm_writes_them() -> None:
    """The role's event is dropped as it came; a text that reads like it is a text."""
    lookalike = '"delta":{"role":"assistant","content":""}'
    events = [ROLE_EVENT, build_event("Hel"), build_event(lookalike), END_EVENT]
    compact = [make_compact(event) for event in events]
    for first in (compact[:2], compact[1:2]):  # also of a decode instance that says no role
        assert splice_texts("Hel", [*first, *compact[2:]]) == ([lookalike, ""], False)
    # Nothing was sent of the answer: the text is the first decode token, and not the prefill instance's.
    assert splice_texts("Hel", compact[2:3])[1]


USAGE_EVENT = b'data: {"id":"cmpl-2","created":100,"choices":[],"usage":{}}\n\n'


def test_usage_right_after_the_role_has_ps_id() -> None:
    """Of an answer without a text all events have one ID, too."""
    role = ROLE_EVENT.replace(b"cmpl-1", b"cmpl-2")
    for first in (role, make_compact(role)):
        found = splice_chunks(begin_splice(), [first, USAGE_EVENT])
        assert found == USAGE_EVENT.replace(b"cmpl-2", b"cmpl-1")


@pytest.mark.parametrize(
    ("chunks", "left", "is_mismatch"),
    [
        # The first decode event may hold several tokens, a part of one, none, or another one than prefill's.
        *(
            ([ROLE_EVENT, *map(build_event, texts), END_EVENT], [*left, ""], is_mismatch)
            for texts, left, is_mismatch in (
                (["Hello, ", "you"], ["lo, ", "you"], False),
                (["", "Hel", "lo"], ["lo"], False),
                (["H", "el", "lo"], ["lo"], False),
                (["H", "ello"], ["lo"], False),
                (["Tra", "lala"], ["lala"], True),
                (["He", "y", "ho"], ["ho"], True),
            )
        ),
        # It may have the end of the answer, or the role, besides the text.
        ([ROLE_EVENT, build_event("Hello", "stop")], ["lo"], False),
        ([ROLE_EVENT, build_event("Hel", "stop")], [""], False),
        ([ROLE_EVENT, build_event("", "stop")], [""], True),
        ([build_event("Hello", role="assistant"), END_EVENT], ["lo", ""], False),
    ],
)
def test_only_the_first_tokens_text_goes(
    chunks: list[bytes], left: list[str], is_mismatch: bool
) -> None:
    """However the bytes are cut: chunks need not be events."""
    whole = b"".join(chunks)
    for size in (1, 7, 50, 10_000):
        cut = [whole[at : at + size] for at in range(0, len(whole), size)]
        assert splice_texts("Hel", cut) == (left, is_mismatch)


@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
def test_any_cut_of_the_bytes_gives_the_same(size: int) -> None:
    """Chunks need not be events: cut anywhere, the client gets the same events."""
    texts = b"".join(build_event(text) for text in ("Hé", "llo 😀", "you"))
    whole = ROLE_EVENT + texts + END_EVENT + DONE_EVENT
    chunks = [whole[at : at + size] for at in range(0, len(whole), size)]
    assert splice_texts("Hé", chunks) == (["llo 😀", "you", ""], False)


def test_after_the_seam_bytes_pass_as_they_are() -> None:
    """Once the duplicate is gone nothing is parsed or held back, not even half an event."""
    splicer = begin_splice()
    assert splicer.splice_chunk(ROLE_EVENT + build_event("Hel") + b"data: {ha") == b"data: {ha"
    assert splicer.splice_chunk(b"lf") == b"lf" and splicer.passes_unchanged


def test_a_token_that_d_takes_for_reasoning_is_a_mismatch() -> None:
    """Where the decode parser puts the token elsewhere, its event goes on as it is."""
    other = b'data: {"id": "cmpl-1", "created": 100, "choices": [{"delta": {"reasoning": "Hel"}}]}'
    splicer = begin_splice()
    out = splice_chunks(splicer, [ROLE_EVENT, other + b"\n\n", END_EVENT])
    assert b'"reasoning"' in out and splicer.has_mismatch


def test_one_id_and_one_time() -> None:
    """Decode's own id and time become those of the prefill events, in every event, never inside a text."""
    mine = {"id": "cmpl-9", "created": 105}
    quoted = '"created":105 and "id":"cmpl-9"'
    events = [build_event(*each, **mine) for each in (("Hel",), (quoted,), ("", "length"))]
    compact = [event.replace(b'": ', b'":') for event in events]
    found = parse_events(splice_chunks(begin_splice(), [*compact, DONE_EVENT]))
    assert {(each["id"], each["created"]) for each in found} == {("cmpl-1", 100)}
    assert found[0]["choices"][0]["delta"]["content"] == quoted


def test_the_opening_is_a_servers_own() -> None:
    """Chat: preamble, then the token; completions: the token; nothing ends."""
    events = parse_events(render_first_events(build_answer(), plan_strip()))
    assert [each["choices"][0]["delta"] for each in events] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
    ]
    assert {each["object"] for each in events} == {"chat.completion.chunk"}
    assert all(each["choices"][0]["finish_reason"] is None for each in events)
    (event,) = parse_events(render_first_events(build_answer(chat=False), plan_strip(False)))
    assert event["choices"][0]["text"] == "Hel"


@pytest.mark.parametrize("usage", [False, True])
def test_an_answer_that_ends_on_p_is_whole(usage: bool) -> None:
    """The prefill instance's finish reason, usage if it was asked for, and [DONE]."""
    answer = build_answer("", "stop", system_fingerprint="f")
    out = render_first_events(answer, plan_strip(include_usage=usage))
    found = parse_events(out)
    assert out.endswith(b"}\n\n" + DONE_EVENT)
    assert found[1]["choices"][0]["finish_reason"] == "stop"
    assert [each.get("usage") for each in found] == [None, None] + [USAGE] * usage
    assert found[-1]["system_fingerprint"] == "f"


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
    sent = b"data: " + strange + b"\n\n" + DONE_EVENT
    assert splice_chunks(begin_splice(), [sent]) == sent


def test_a_stream_that_breaks_says_why() -> None:
    """The decode instance's own error, else ours, then [DONE]: as a server ends a stream that failed."""
    out = render_stream_error(b'{"error": {"message": "no", "code": 400}}', "x")
    assert out == b'data: {"error":{"message":"no","code":400}}\n\n' + DONE_EVENT
    for body in (b"<html>", b'{"error": "\xff"}', b'{"x": ' + b"[" * 20_000):
        assert b'"message":"gone"' in render_stream_error(body, "gone")


def test_the_token_in_the_clients_bytes() -> None:
    """A repeated prefill event is dropped unparsed, once, and only while nothing of it is missing."""
    sent = render_first_events(build_answer(), plan_strip())
    role, token = (event + b"\n\n" for event in sent.split(b"\n\n")[:2])
    for first in ([role, token], [token], [role + token]):
        splicer = begin_splice(sent_events=sent)
        # The decode instance may say the same word again: that one is the answer's.
        assert splice_chunks(splicer, [*first, token, DONE_EVENT]) == token + DONE_EVENT
        assert not splicer.has_mismatch
    # After a part of the text these bytes are other words.
    parted = begin_splice(sent_events=sent)
    assert splice_chunks(parted, [build_event("H"), token, DONE_EVENT]) == DONE_EVENT
    assert parted.has_mismatch
    # Another second: an event of the decode instance's own, whose time the client must not see.
    later = token.replace(b'"created":100', b'"created":101')
    assert splice_chunks(begin_splice(sent_events=sent), [role, later, later]) == token
    # Settled by what came before: these bytes are the decode instance's, whatever they say.
    found = splice_chunks(begin_splice(sent_events=sent), [USAGE_EVENT, token])
    assert found == USAGE_EVENT.replace(b"cmpl-2", b"cmpl-1") + token
