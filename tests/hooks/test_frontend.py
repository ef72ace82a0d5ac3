# SPDX-License-Identifier: Apache-2.0
"""The API server's hooks: whose marks they are, whatever vLLM does around them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ttft_otel import names, recorder, testing
from ttft_otel.hooks import frontend
from ttft_otel.recorder import identity
from ttft_otel.settings import Settings

from .server import STAGES, Client, Plan


def test_parts(client: Client, records: testing.Records) -> None:
    """Tokenizer and processor are parts of preprocess; the way back has three parts of its own."""
    asyncio.run(client.call())
    ttft = records.kept[0].ttft
    assert ttft is not None
    parts = {piece.name: piece.end - piece.start for piece in ttft.pieces if piece.kind == "part"}

    assert parts == {
        "tokenize": 100,
        "multimodal": 50,
        "collect": 44,
        "transport": 46,
        "detokenize": 4,
    }


def test_text_has_no_multimodal(client: Client) -> None:
    """A prompt without images has no multimodal part."""
    assert frontend.processing(object(), {"prompt": "x"}) in (0, None)


def test_siblings(client: Client, records: testing.Records) -> None:
    """Of several engine requests the first output closes; the others are siblings, never summed."""
    client.server.plan = Plan(count=3)
    asyncio.run(client.call())
    ttft = records.kept[0].ttft
    assert ttft is not None
    kinds = [piece.kind for piece in ttft.pieces]

    assert kinds.count("sibling") == 2
    assert {piece.name for piece in ttft.pieces if piece.kind == "sibling"} == {names.SIBLING}
    assert {**ttft.stages} == {**STAGES, "egress": 5}


def test_trace_headers(client: Client) -> None:
    """What leaves for the engine carries the server span as parent, the caller's state, our key."""
    seen: list[Any] = []
    client.server.processors.requests = Keep(seen)
    trace = "0af7651916cd43dd8448eb211c80319c"
    asyncio.run(client.call(traceparent=f"00-{trace}-b7ad6b7169203331-01", tracestate="vendor=1"))
    (headers,) = seen

    assert headers[names.CARRIER] == "1"
    assert headers[names.TRACESTATE] == "vendor=1"
    version, trace_id, span_id, flags = headers[names.TRACEPARENT].split("-")
    assert (version, trace_id, flags) == ("00", trace, "01")
    assert span_id != "b7ad6b7169203331"


class Keep(dict[str, Any]):
    """Notes the trace headers of whatever is put in."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.seen = seen

    def __setitem__(self, key: str, value: Any) -> None:
        self.seen.append(value.trace_headers)
        super().__setitem__(key, value)


def test_pooling(client: Client) -> None:
    """An embedding request makes no first token and is left alone."""
    request = SimpleNamespace(request_id="p", trace_headers=None, pooling_params=object())
    frontend.registering(None, request)

    assert request.trace_headers is None
    assert not recorder.awaiting


def test_foreign_outputs(client: Client) -> None:
    """Outputs of requests that nobody traces pass by."""
    output = SimpleNamespace(request_id="other", trace_headers=None)
    frontend.received(None, None, None, [output])

    assert not recorder.awaiting


@pytest.mark.usefixtures("unknown")
@pytest.mark.parametrize(
    ("transfer", "cache", "role"),
    [
        (None, None, "mono"),
        ("ec_producer", None, "encode"),
        ("ec_consumer", None, "prefill_decode"),
        ("ec_consumer", "kv_producer", "prefill"),
        (None, "kv_producer", "prefill"),
        (None, "kv_consumer", "decode"),
        (None, "kv_both", ""),
    ],
)
def test_role(transfer: str | None, cache: str | None, role: str) -> None:
    """The role is read from vLLM's configuration, where that tells."""
    config = SimpleNamespace(
        ec_transfer_config=SimpleNamespace(ec_role=transfer) if transfer else None,
        kv_transfer_config=SimpleNamespace(kv_role=cache) if cache else None,
        model_config=SimpleNamespace(served_model_name=["served", "alias"]),
    )
    frontend.know(SimpleNamespace(state=SimpleNamespace(vllm_config=config)))

    assert identity.role == role
    assert identity.model == "served"


@pytest.mark.usefixtures("unknown")
def test_role_by_engine_client() -> None:
    """Where the app's state has no configuration, the engine client's is read."""
    config = SimpleNamespace(ec_transfer_config=SimpleNamespace(ec_role="ec_producer"))
    state = SimpleNamespace(engine_client=SimpleNamespace(vllm_config=config))
    frontend.know(SimpleNamespace(state=state))

    assert identity.role == "encode"


def test_build() -> None:
    """The middleware goes around whatever stack the app has built."""
    stack = object()

    assert frontend.build(stack).app is stack
    assert isinstance(frontend.build(stack).settings, Settings)
