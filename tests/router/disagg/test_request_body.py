# SPDX-License-Identifier: Apache-2.0
"""Parsing a client's body costs memory in proportion to its bytes, whatever JSON it holds."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from ttft_otel.model.endpoints import CHAT_PATH
from ttft_otel.router.disagg import request_body, request_plan
from ttft_otel.router.types import MODE_STRIP

MANY_LISTS = b"[" + b",".join([b"[]"] * 300_000) + b"]"  # 0.9 MB, and as objects 20 times as much


def measure_peak_bytes(data: bytes) -> tuple[request_body.RequestBody, int]:
    """What is read of `data`, and the memory that reading it took."""
    tracemalloc.start()
    try:
        return request_body.parse_body(data, CHAT_PATH), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "member",
    [
        b'"kv_transfer_params": %b',
        b'"ec_transfer_params": null, "vllm_xargs": %b',
        b'"vllm_xargs": {"mine": %b, "kv_transfer_params": 1}',
        b'"model": %b',
        b'"stream": %b',
        b'"other": %b, "kv_transfer_params": 1',
    ],
)
def test_values_stay_raw(member: bytes) -> None:
    """No objects are built of a value, also when transfer parameters are removed."""
    data = b'{"model": "tiny", ' + member % MANY_LISTS + b"}"

    parsed, peak_bytes = measure_peak_bytes(data)

    assert not parsed.problem and peak_bytes < 4 * len(data)
    assert b"_transfer_params" not in parsed.data and json.loads(parsed.data)["model"]


def test_json_that_only_python_reads_is_bounded() -> None:
    """NaN is accepted in a small body; a large one is refused before it is built."""
    parsed, peak_bytes = measure_peak_bytes(b'{"top_p": NaN, "a": ' + MANY_LISTS + b"}")
    assert "NaN" in parsed.problem and peak_bytes < 2 * len(MANY_LISTS)

    small, _ = measure_peak_bytes(b'{"model": "tiny", "top_p": NaN, "kv_transfer_params": {}}')
    assert (small.problem, small.model, small.data) == ("", "tiny", b'{"model":"tiny","top_p":NaN}')


@pytest.mark.parametrize("name", ["tools", "response_format", "stop", "prompt", "logit_bias"])
def test_legs_are_planned_on_raw_values(name: str) -> None:
    """No objects are built to see whether a field is set."""
    fields = {b"prompt": b'"x"', name.encode(): MANY_LISTS}
    data = b'{"model": "tiny", ' + b", ".join(b'"%b": %b' % each for each in fields.items()) + b"}"
    tracemalloc.start()
    try:
        plan = request_plan.plan_legs("/v1/completions", data, True, MODE_STRIP)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert plan.legs and peak_bytes < 4 * len(data)


def test_encoder_requests_share_their_fields() -> None:
    """What all items' requests carry is encoded once, and each request is JSON with its own item."""
    items = [
        {"type": "image_url", "image_url": {"url": f"http://127.0.0.1/{number}"}}
        for number in range(3)
    ]
    template = "x" * 10_000
    body = {
        "model": "tiny",
        "chat_template": template,
        "messages": [{"role": "user", "content": items}],
    }
    parsed = request_body.parse_body(json.dumps(body).encode(), CHAT_PATH)

    before, after = request_body.build_encoder_frame(parsed)

    for item, wanted in zip(parsed.media_items, items, strict=True):
        assert json.loads(before + item + after) == {
            "model": "tiny",
            "chat_template": template,
            "messages": [{"role": "user", "content": [wanted]}],
            "max_tokens": 1,
            "stream": False,
        }


@pytest.mark.parametrize(
    "body",
    [
        b'{"kv_transfer_params":{"do_\x88":true},"model":"m"}',
        b'{"model":"\x88","kv_transfer_params":{},"model":"m"}',
        b'{"vllm_xargs":{"ec_transfer_params":"\x88"},"model":"m"}',
    ],
)
def test_leaving_something_out_mends_no_body(body: bytes) -> None:
    """What vLLM refuses, because it is not UTF-8, is not made valid by leaving its bad part out."""
    parsed = request_body.parse_body(body)
    assert parsed.problem and parsed.data == body
