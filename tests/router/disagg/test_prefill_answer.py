# SPDX-License-Identifier: Apache-2.0
"""The prefill answer: its token, if it may go to the client, and where the KV blocks are."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.router.disagg.prefill_answers import BOTH_LEGS, build_prefill_answer, build_token
from ttft_otel.router.disagg.request_plan import LegPlan
from ttft_otel.router.disagg.stream_splice import (
    PrefillToken,
    parse_kv_params,
    parse_prefill_answer,
)
from ttft_otel.router.types import MODE_STRIP


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (build_token("ok"), ""),
        (build_token(""), "character"),
        (build_token("h\ufffd"), "character"),
        (build_token("", "stop"), ""),
        (build_token("x", "error"), "finish_reason"),
        (build_token("a\n"), "stop"),
        (build_token("aST"), "stop"),
        (build_token("STOPPED"), ""),
        (
            build_token("x", usage={"completion_tokens_details": {"reasoning_tokens": 0}}),
            "reasoning",
        ),
    ],
)
def test_some_tokens_are_not_handed_out(given: PrefillToken, reason: str) -> None:
    """Half a character, the possible start of a stop string, and what a parser may have split."""
    assert (
        given.explain_refusal(
            LegPlan(BOTH_LEGS, MODE_STRIP, is_chat=True, stop_strings=("\n\n", "STOP"))
        )
        == reason
    )


def test_a_long_stop_string_is_not_cut_into_pieces() -> None:
    """Only the ends of the prefill token are compared: a twentyfold length costs about as many times more."""

    def measure_s(length: int) -> float:
        plan = LegPlan(BOTH_LEGS, MODE_STRIP, is_chat=True, stop_strings=("x" * length,))
        token, seconds = build_token("Hel"), []
        for _ in range(5):
            began_s = time.perf_counter()
            assert token.explain_refusal(plan) == ""
            seconds.append(time.perf_counter() - began_s)
        return min(seconds)

    # a slice for each length would take four hundred times as long
    assert measure_s(200_000) < 100 * measure_s(10_000)
    plan = LegPlan(BOTH_LEGS, MODE_STRIP, is_chat=True, stop_strings=("lo" + "x" * 200_000,))
    assert build_token("Hello").explain_refusal(plan) == "stop"


def test_what_is_no_answer_of_one_token_is_none() -> None:
    """Another shape of answer is not guessed at."""
    for data in (b"", b"[]", b"{}", b'{"choices": [{}, {}]}', b'{"choices": [{"message": 3}]}'):
        assert (
            parse_prefill_answer(data, True) is None and parse_prefill_answer(data, False) is None
        )


def test_transfer_parameters_are_read() -> None:
    """Where chat and completions put them; none is None."""
    found = parse_prefill_answer(build_prefill_answer(kv_transfer_params={"a": 1}), True)
    assert found is not None and found.kv_params is not None
    assert bytes(found.kv_params) == b'{"a": 1}'
    assert build_token().kv_params is None


@pytest.mark.parametrize(
    ("data", "params"),
    [
        (
            b'{"id": 1, "kv_transfer_params": {"remote_host": "p"}, "choices": 5}',
            b'{"remote_host": "p"}',
        ),
        (b'{"kv_transfer_params": {}}', None),
        (b'{"kv_transfer_params": { } }', None),
        (b'{"kv_transfer_params": null}', None),
        (b'{"kv_transfer_params": [1]}', None),
        (b'{"choices": []}', None),
        (b"[]", None),
        (b"", None),
        (b'{"kv_transfer_params": {"a": "\xff"}}', None),
        (b'{"kv_transfer_params": ' + b"[" * 100_000, None),
    ],
)
def test_kv_params_of_any_answer(data: bytes, params: bytes | None) -> None:
    """Where the blocks are is taken from whatever has it, and nothing else fails the request."""
    found = parse_kv_params(data)
    assert (None if found is None else bytes(found)) == params


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        {"id": 7},
        {"created": "now"},
        {"choices": 5},
        {"usage": [1]},
        {"choices": [{"text": ["a"], "message": {"content": ["a"]}}]},
    ],
)
def test_another_type_is_no_answer(chat: bool, change: dict[str, Any]) -> None:
    """Decode then answers everything: nothing of prefill's is guessed, and no type fails the request."""
    given = json.loads(build_prefill_answer(chat=chat))
    assert parse_prefill_answer(json.dumps(given).encode(), chat) is not None
    assert parse_prefill_answer(json.dumps(given | change).encode(), chat) is None
