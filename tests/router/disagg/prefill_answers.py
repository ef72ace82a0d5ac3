# SPDX-License-Identifier: Apache-2.0
"""Answers of a prefill instance with one token, for tests of what the router makes of them."""

from __future__ import annotations

import json
from typing import Any

from ttft_otel.router.disagg.stream_splice import PrefillToken, parse_prefill_answer

BOTH_LEGS = ("prefill", "decode")
USAGE = {"prompt_tokens": 10, "total_tokens": 11, "completion_tokens": 1}


def build_prefill_answer(
    text: str = "Hel", finish: str = "length", chat: bool = True, **more: Any
) -> bytes:
    """The prefill instance's plain answer of one token."""
    own = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    choice = {"index": 0, **own, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    top = {"id": "cmpl-1", "created": 100, "model": "tiny", "choices": [choice], "usage": USAGE}
    return json.dumps({**top, **more}).encode()


def build_token(*args: Any, **more: Any) -> PrefillToken:
    """The prefill token."""
    prefill_token = parse_prefill_answer(
        build_prefill_answer(*args, **more), more.get("chat", True)
    )
    assert prefill_token is not None
    return prefill_token
