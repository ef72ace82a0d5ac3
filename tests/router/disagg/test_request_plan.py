# SPDX-License-Identifier: Apache-2.0
"""Which legs a request needs and what prefill and decode instances are asked, field by field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import Raw

from ttft_otel.model.endpoints import CHAT_PATH, COMPLETIONS_PATH
from ttft_otel.router.disagg.request_plan import KEEP_BLOCKS_PARAMS, LegPlan, plan_legs
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


def test_streams_go_through_both_legs_in_the_mode_asked_for() -> None:
    """Chat and completions: prefill, then decode, with the prefill token in the router's mode."""
    for mode in (MODE_OFF, MODE_STRIP):
        for made in (plan_chat(mode), plan_completion(mode)):
            assert (made.legs, made.mode, made.reason) == (BOTH_LEGS, mode, "")


def test_one_prompt_in_any_form() -> None:
    """A text, token ids, and a list of one of them are one prompt."""
    for prompt in ("x", ["x"], [1, 2], [[1, 2]], [7]):
        assert plan_completion(MODE_STRIP, prompt=prompt).legs == BOTH_LEGS


def test_one_token_needs_no_decode() -> None:
    """max_tokens 1 or 0 is answered by prefill alone, whatever else is asked, and prefill keeps nothing."""
    for made in (
        plan_chat(max_tokens=1),
        plan_chat(max_completion_tokens=1),
        plan_chat(max_tokens=50, max_completion_tokens=1),
        plan_chat(max_tokens=1, tools=[{"type": "function"}], logprobs=True),
        plan_completion(max_tokens=0, echo=True),
    ):
        assert (made.legs, made.mode, made.reason) == (("prefill",), MODE_OFF, "max_tokens")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n": 2}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1, 2], [3]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"echo": True, "logprobs": 0}, "echo"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "max_tokens"),
        ({"max_tokens": "many"}, "body"),
        ({"seed": 1.5}, "body"),
    ],
)
def test_decode_alone(fields: dict[str, Any], reason: str) -> None:
    """What one sequence of KV blocks cannot serve, or a server must refuse, decode gets as it came."""
    made = plan_completion(**fields)
    assert (made.legs, made.mode, made.reason) == (("decode",), MODE_OFF, reason)


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


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"stream": False}, "not streamed"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"response_format": {"type": "text"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"echo": True}, "echo"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"stream_options": "x"}, "stream_options"),
    ],
)
def test_tokens_that_cannot_be_handed_out(fields: dict[str, Any], reason: str) -> None:
    """Where the prefill token is not all of the stream's first event, the decode answer is the answer."""
    made = plan_chat(MODE_STRIP, **fields)
    assert (made.legs, made.mode, made.reason) == (BOTH_LEGS, MODE_OFF, reason)
    assert made.seed is None


@pytest.mark.parametrize(
    "fields",
    [{"tools": []}, {"tool_choice": "none"}, {"logprobs": False}, {"n": 1}, {"echo": False}],
)
def test_fields_that_ask_for_nothing_change_nothing(fields: dict[str, Any]) -> None:
    """A field at its default does not cost the first token's way."""
    assert plan_chat(MODE_STRIP, **fields).mode == MODE_STRIP


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
