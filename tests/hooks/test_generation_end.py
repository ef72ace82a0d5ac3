# SPDX-License-Identifier: Apache-2.0
"""What is known at a request's end: tokens, finish reasons, time per token; right, or not there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import tracing_fakes

from hooks.server import DECODE_US, EGRESS_US, FakeClient, ServerPlan
from ttft_otel.hooks import vllm_fields
from ttft_otel.model.names import keys
from ttft_otel.tracing import clock, recorder
from ttft_otel.tracing.roles import identity

END_NAMES = {keys.OUTPUT_TOKENS, keys.FINISH_REASONS, keys.TIME_PER_OUTPUT_TOKEN_US}


def read_end(records: tracing_fakes.MemorySender) -> dict[str, Any]:
    """The server span's attributes of what was generated; they are on no other span."""
    *_, last = records.kept
    assert last.server is not None
    for record in records.kept:
        assert record.ttft is None or not END_NAMES & set(record.ttft.attributes)
    return {key: value for key, value in last.server.attributes.items() if key in END_NAMES}


@pytest.mark.parametrize(("stream", "finish_reason"), [(True, "stop"), (False, "repetition")])
def test_end(client: FakeClient, stream: bool, finish_reason: str) -> None:
    """vLLM's own words and numbers; the time after the first token is shared by the tokens after it."""
    client.server.plan = ServerPlan(stream=stream, tokens=5, finish_reason=finish_reason)
    asyncio.run(client.call_server())

    # From the first token, processed EGRESS_US before its chunk, to the last one.
    assert read_end(client.records) == {
        keys.OUTPUT_TOKENS: 5,
        keys.FINISH_REASONS: (finish_reason,),
        keys.TIME_PER_OUTPUT_TOKEN_US: round((EGRESS_US + DECODE_US) / 4),
    }


@pytest.mark.parametrize(
    ("plan", "tokens", "reasons"),
    [
        pytest.param(ServerPlan(tokens=1, finish_reason="length"), 1, ("length",), id="one token"),
        # Tokens add up, each generation has its reason, and no time per token is one's own.
        pytest.param(ServerPlan(count=3, tokens=4), 12, ("stop",) * 3, id="several generations"),
        # A list that is cut would not be one reason for each generation.
        pytest.param(ServerPlan(count=65, tokens=4), 260, None, id="more generations than fit"),
        # The convention has times per token of successful answers only.
        pytest.param(ServerPlan(tokens=3, finish_reason="error"), 3, ("error",), id="engine fails"),
        pytest.param(ServerPlan(status=404), None, None, id="refused"),
    ],
)
def test_no_time_per_token(
    client: FakeClient, plan: ServerPlan, tokens: int | None, reasons: tuple[str, ...] | None
) -> None:
    """What is known is told; a time per token only where one request had steps after its first token."""
    client.server.plan = plan
    asyncio.run(client.call_server())

    told = {keys.OUTPUT_TOKENS: tokens, keys.FINISH_REASONS: reasons}
    assert read_end(client.records) == {key: value for key, value in told.items() if value}


async def test_all_tokens_in_one_step(client: FakeClient) -> None:
    """With speculative decoding all tokens may come at once: no step after the first has a length."""
    trace: Any = None

    original = recorder.record_end

    def record_end(engine_id: str, reason: str, tokens: int) -> None:
        nonlocal trace
        trace = recorder.current_trace.get()
        original(engine_id, reason, tokens)
        engine = trace.engine_requests[engine_id]
        engine.ended = engine.output - 1  # inside process_outputs(), which stamps `output` after it

    recorder.record_end = record_end
    try:
        await client.call_server()
    finally:
        recorder.record_end = original

    assert read_end(client.records) == {keys.OUTPUT_TOKENS: 5, keys.FINISH_REASONS: ("stop",)}


def test_beam_search(client: FakeClient) -> None:
    """The steps of a beam search are not what the client gets."""
    client.server.plan = ServerPlan(count=2, external_id="cmpl-1-9af3-beam-0")
    asyncio.run(client.call_server())

    assert read_end(client.records) == {}
    assert not any(map(vllm_fields.is_beam, (None, object())))


@pytest.mark.parametrize("role", ["encode", "prefill"])
def test_intermediate(client: FakeClient, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder generates nothing; a prefill instance's token is the first, with none after it."""
    monkeypatch.setattr(identity, "role", role)
    asyncio.run(client.call_server())

    found = read_end(client.records)
    assert keys.TIME_PER_OUTPUT_TOKEN_US not in found
    assert (keys.OUTPUT_TOKENS in found) is (role == "prefill")


def test_stream_that_ends_too_soon(client: FakeClient) -> None:
    """Starlette ends a stream whose client has left like a complete one; vLLM has told no end."""
    client.server.plan = ServerPlan(is_left=True)
    asyncio.run(client.call_server())

    first, last = client.records.kept
    assert first.ttft is not None and first.ttft.error == ""
    assert last.server is not None and last.server.error == keys.ERROR_INCOMPLETE
    assert read_end(client.records) == {}


def test_ends_that_nobody_sees(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the hook nothing is known of ends, and no stream counts as one that broke off."""
    monkeypatch.setattr(identity, "can_see_ends", lambda: False)
    client.server.plan = ServerPlan(is_left=True)
    asyncio.run(client.call_server())

    *_, last = client.records.kept
    assert last.server is not None and last.server.error == ""


def test_nothing_is_asked_while_decoding(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between first and last token no hook reads a clock or touches a trace, however many steps there are."""
    readings = 0
    read = clock.now_us

    def count_readings() -> int:
        nonlocal readings
        readings += 1
        return read()

    processors = client.server.processors
    decode = client.server._decode

    def decode_in_steps(sent: dict[str, int]) -> None:
        nonlocal readings
        # A context of its own: the clock is a fake already, which ends after this test's fixtures.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clock, "now_us", count_readings)
            for _ in range(1000):
                processors.process_outputs([])
            assert readings == 0
            decode(sent)
            assert readings == 1  # one generation, one end

    monkeypatch.setattr(client.server, "_decode", decode_in_steps)
    asyncio.run(client.call_server())

    assert read_end(client.records)[keys.OUTPUT_TOKENS] == 5


def test_nothing_is_left(client: FakeClient) -> None:
    """However a request ends, nothing of it stays; beyond the bound only its end is not told."""
    client.server.plan = ServerPlan(dies=True)
    asyncio.run(client.call_server())
    assert not recorder.unended_requests

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "MAX_UNENDED_REQUESTS", 0)
        client.server.plan = ServerPlan()
        asyncio.run(client.call_server())
    assert read_end(client.records) == {}
    first, last = client.records.kept[-2:]
    assert first.ttft is not None and last.server is not None and last.server.error == ""
