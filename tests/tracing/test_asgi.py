# SPDX-License-Identifier: Apache-2.0
"""The middleware around a server of vLLM's shape: what the caller sees, what becomes of each request."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from hooks.server import (
    DECODE_US,
    EGRESS_US,
    FIRST_TOKEN_US,
    STAGES_US,
    FakeClient,
    ServerPlan,
    hang_in_queue,
)

from ttft_otel.model import timing
from ttft_otel.model.names import header_names, keys, span_names
from ttft_otel.model.record import Piece, Record
from ttft_otel.tracing import asgi, carrier, meter, recorder
from ttft_otel.tracing.carrier import EngineDetails, EngineTimeline
from ttft_otel.tracing.request_trace import identity
from ttft_otel.tracing.settings import Settings

TIMING_HEADERS = {"x_ttft_timing": "1"}
UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


def get_closed_stages(record: Record) -> dict[str, int]:
    """The record's stages, which add up, on the span and in its pieces."""
    ttft = record.ttft
    assert ttft is not None
    assert sum(ttft.stages.values()) + ttft.unattributed == ttft.end - ttft.start
    pieces = [piece for piece in ttft.pieces if piece.kind == "stage"]
    assert sum(piece.end - piece.start for piece in pieces) == ttft.end - ttft.start
    assert ttft.clamped == 0
    return ttft.stages


def call_server(client: FakeClient, plan: ServerPlan, *args: Any, **headers: str) -> None:
    """One call of a server that answers by `plan`."""
    client.server.plan = plan
    asyncio.run(client.call_server(*args, **headers))


def read_timing(client: FakeClient) -> timing.ServerTiming:
    """What the answer's Server-Timing says."""
    told = timing.parse_server_timing(client.get_header())
    assert told is not None
    return told


def test_stream(client: FakeClient) -> None:
    """A stream's ttft half goes with its first token, its server half with its end."""
    asyncio.run(client.call_server())
    first, last = client.records.kept

    assert get_closed_stages(first) == {**STAGES_US, "egress": EGRESS_US}
    assert first.ttft is not None and first.ttft.unattributed == 0
    assert first.server is None and last.ttft is None
    assert last.server is not None
    assert (last.server.status, last.server.end) == (200, FIRST_TOKEN_US + EGRESS_US + DECODE_US)
    assert last.server.name == "POST /v1/chat/completions"
    assert (first.trace_id, first.span_id) == (last.trace_id, last.span_id)
    assert client.list_types() == ["start", "data: one", "data: two"]


def test_first_half_survives(client: FakeClient) -> None:
    """A crash while decoding cannot lose the first token's half; the request as a whole has failed."""
    client.server.plan = ServerPlan(fail="decode")
    with pytest.raises(RuntimeError, match="the host's own"):
        asyncio.run(client.call_server())
    first, last = client.records.kept

    assert get_closed_stages(first)["prefill.compute"] == 500
    assert first.ttft is not None and first.ttft.error == ""
    assert last.server is not None and last.server.error == keys.ERROR_ENGINE
    assert keys.OUTPUT_TOKENS not in last.server.attributes


def test_stream_asked(client: FakeClient) -> None:
    """For a caller that asks, the head waits for the first chunk and carries the stages."""
    asyncio.run(client.call_server(**TIMING_HEADERS))
    told = read_timing(client)

    assert told.stages == get_closed_stages(client.records.kept[0])
    assert (told.ttft, told.unattributed, told.rest) == (FIRST_TOKEN_US + EGRESS_US, 0, None)
    assert [when for when, _ in client.messages][:2] == [FIRST_TOKEN_US + EGRESS_US] * 2
    assert client.list_types() == ["start", "data: one", "data: two"]


def test_plain(client: FakeClient) -> None:
    """A plain answer's TTFT ends with its first token's output; what follows is the rest."""
    call_server(client, ServerPlan(stream=False), **TIMING_HEADERS)
    (record,) = client.records.kept
    told = read_timing(client)

    assert get_closed_stages(record) == STAGES_US
    assert record.server is not None
    assert (told.ttft, told.rest) == (FIRST_TOKEN_US, EGRESS_US + DECODE_US)


@pytest.mark.parametrize("role", ["encode", "prefill"])
def test_plain_with_egress(client: FakeClient, role: str) -> None:
    """An encoder's or a prefill server's whole answer is what its caller waits for."""
    identity.role = role
    call_server(client, ServerPlan(stream=False), **TIMING_HEADERS)
    told = read_timing(client)

    assert told.stages["egress"] == EGRESS_US + DECODE_US
    assert client.records.kept[0].role == role
    assert told.rest == 0


@pytest.mark.parametrize("asked", [False, True])
def test_early_events(client: FakeClient, asked: bool) -> None:
    """Comments and opening events before the first token do not count as it, and are not lost."""
    call_server(
        client,
        ServerPlan(early=(b": keep-alive\n\n", b"", b"event: created\n\n")),
        **(TIMING_HEADERS if asked else {}),
    )
    came = client.list_types()

    assert came == ["start", ": keep-alive", "", "event: created", "data: one", "data: two"]
    assert client.messages[1][0] == (FIRST_TOKEN_US + EGRESS_US if asked else 210)
    if asked:
        told = read_timing(client)
        assert told.ttft == FIRST_TOKEN_US + EGRESS_US


def test_hold_limit(client: FakeClient) -> None:
    """A server that says much before its first token is not held back for ever; no header then."""
    chunk = b": " + b"x" * (asgi.MAX_HELD_BYTES // 2)
    call_server(client, ServerPlan(early=(chunk, chunk, chunk)), **TIMING_HEADERS)

    assert len(client.messages) == 6
    assert client.messages[2][0] == 210
    assert client.get_header() == ""


async def test_later_chunks_cost_no_call(client: FakeClient) -> None:
    """After the first chunk the application's `send` is the server's own: no frame of ours for each token."""
    frames: list[str] = []

    sent: list[str] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message["type"])

    async def app(_scope: Any, _receive: Any, forward: Any) -> None:
        assert forward is not send, "it is traced"
        await forward({"type": "http.response.start", "status": 200, "headers": []})
        await forward({"type": "http.response.body", "body": b"{", "more_body": True})
        sys.setprofile(lambda frame, event, _: frames.append(frame.f_code.co_filename))
        try:
            await forward({"type": "http.response.body", "body": b"}", "more_body": False})
        finally:
            sys.setprofile(None)

    middleware = asgi.TracingMiddleware(app, Settings(), print, print)  # type: ignore[arg-type]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    await middleware(scope, None, send)  # type: ignore[arg-type]
    assert sent == ["http.response.start", *["http.response.body"] * 2]
    assert frames and not [each for each in frames if each == asgi.__file__]


@pytest.mark.parametrize("status", [404, 503])
def test_refused(client: FakeClient, status: int) -> None:
    """A request that was refused has its server span, with its status, and a ttft that failed."""
    call_server(client, ServerPlan(status=status), **TIMING_HEADERS)
    (record,) = client.records.kept

    assert client.get_header() == ""
    assert record.server is not None and record.server.status == status
    assert record.server.error == (str(status) if status >= 500 else "") or status < 500
    assert record.ttft is not None and record.ttft.error == str(status)
    assert record.ttft.died == "receive"


@pytest.mark.parametrize(("where", "died"), [("body", "receive"), ("queue", None)])
def test_app_raises(client: FakeClient, where: str, died: str | None) -> None:
    """The app's exception passes through; its request is told as failed, where it was."""
    client.server.plan = ServerPlan(stream=False, fail=where)
    with pytest.raises(RuntimeError, match="the host's own"):
        asyncio.run(whole(client))
    (record,) = client.records.kept

    assert record.ttft is not None and record.ttft.error
    assert died is None or record.ttft.died == died


async def whole(client: FakeClient) -> None:
    """A call, and whatever it left to do in the background, even where it raised."""
    try:
        await client.call_server()
    finally:
        while client.app.ending.abort_tasks:
            await asyncio.gather(*client.app.ending.abort_tasks)


async def cancel_in_queue(client: FakeClient) -> None:
    """A caller waits 5000 us in the queue and gives up; returns when its record has been made."""
    async with hang_in_queue(client, client.call_server) as task:
        client.server.clock.tick(5000)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.gather(*client.app.ending.abort_tasks)


def test_disconnect(client: FakeClient) -> None:
    """A caller that gives up in the queue: the engine core is asked where the request was."""
    gone = EngineTimeline(added=1_000_230)
    client.server.aborted_answer = carrier.encode_timeline(gone)

    asyncio.run(cancel_in_queue(client))
    (record,) = client.records.kept
    ttft = record.ttft

    assert ttft is not None
    assert (ttft.error, ttft.died) == ("cancelled", "prefill.queue")
    assert get_closed_stages(record)["prefill.queue"] == 5210 - 230
    assert client.server.queried_ids == ["chat-1-1f"]


def test_kept(client: FakeClient) -> None:
    """Blocks and encodings that an answered request leaves for other instances: spans that follow its record.

    The instance is asked for each, and tells each as it knows it.
    """
    both = carrier.KEPT_BLOCKS_BIT | carrier.KEPT_ITEMS_BIT
    client.server.plan = ServerPlan(stream=False, kept=both)
    client.server.blocks_answer = carrier.encode_answer(
        carrier.KeptBlocks(1_000_900, 1_009_900, 12, 2, True)
    )
    client.server.items_answer = carrier.encode_answer(
        carrier.KeptItems(1_000_900, 1_009_900, 2, 8192, 1_001_000, "evicted")
    )
    asyncio.run(client.call_server(traceparent=UNSAMPLED[:-1] + "1"))
    first, *others = client.records.kept

    assert first.server is not None and not first.late and len(others) == 2
    for record in others:
        assert record.server is None and record.ttft is None
        assert (first.trace_id, first.span_id) == (record.trace_id, record.span_id)
    found = {piece.name: piece for record in others for piece in record.late}
    assert {(piece.start, piece.end) for piece in found.values()} == {(900, 9_900)}
    blocks = found[span_names.KV_KEPT].attributes
    assert (blocks[keys.KV_BLOCKS], blocks[keys.ERROR_TYPE]) == (2, "expired")
    assert found[span_names.EC_KEPT].attributes == {
        keys.EC_ITEMS: 2,
        keys.EC_BYTES: 8192,
        keys.EC_READY_US: 100,
        keys.ERROR_TYPE: "evicted",
    }
    assert client.records.build_spans()[-1].parent is not None


@pytest.mark.parametrize("pending", [2, 9])
def test_encoder_run(client: FakeClient, monkeypatch: pytest.MonkeyPatch, pending: int) -> None:
    """An encoder that ran on after the answer: asked again until it has ended, but not for ever."""
    monkeypatch.setattr(asgi, "PENDING_PAUSES_S", (0.0,) * 4)
    dropped: list[str] = []
    monkeypatch.setattr(meter, "count_dropped", dropped.append)
    client.server.plan = ServerPlan(stream=False, kept=carrier.ENCODER_RUN_BIT)
    client.server.encoder_answers = [carrier.PENDING_ANSWER] * pending
    client.server.encoder_answers.append(
        carrier.encode_answer(carrier.EncoderRun(1_000_500, 1_004_500))
    )
    asyncio.run(client.call_server())
    pieces = [piece for record in client.records.kept for piece in record.late]

    assert len(client.server.queried_ids) == min(pending, 4) + 1
    if pending <= 4:
        assert pieces == [Piece("late", span_names.ENCODER_RUN, 500, 4_500)] and not dropped
    else:
        assert not pieces and dropped == ["kept"]


def test_kept_too_many(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound, and where nobody knows, a kept span is dropped and counted."""
    dropped: list[str] = []
    monkeypatch.setattr(meter, "count_dropped", dropped.append)
    call_server(client, ServerPlan(stream=False, kept=carrier.KEPT_ITEMS_BIT))
    assert dropped == ["kept"] and client.server.queried_ids
    monkeypatch.setattr(asgi, "MAX_KEPT_SPAN_TASKS", 0)
    asyncio.run(client.call_server())

    assert dropped == ["kept", "kept"]
    assert len(client.server.queried_ids) == 1 and len(client.records.kept) == 2


def test_kept_by_no_encoder(client: FakeClient) -> None:
    """What a leg announces that a router calls no encoder is fetched by nobody: it is not asked for."""
    client.server.plan = ServerPlan(stream=False, kept=carrier.KEPT_ITEMS_BIT)
    for leg in ("prefill_decode", "encode"):
        asyncio.run(client.call_server(**{header_names.LEG: leg}))

    assert len(client.server.queried_ids) == 1


NO_TOKEN = header_names.TIMING_NO_TOKEN


@pytest.mark.parametrize(
    ("plan", "error", "died", "header"),
    [
        (ServerPlan(ends="error"), "error", "ec.transfer", NO_TOKEN),
        (ServerPlan(ends="error", stream=False, refused=500), "500", "ec.transfer", ""),
        # A pause or sleep mode aborts what runs; the server answers 200, without a token.
        (ServerPlan(ends="abort"), "error", "ec.transfer", NO_TOKEN),
        (ServerPlan(ends="abort", stream=False), "error", "ec.transfer", NO_TOKEN),
        # The engine died, and the application told so in its stream: the client has not left.
        (ServerPlan(early=(b'data: {"error": {}}\n\n',), dies=True), "error", "", NO_TOKEN),
        # /abort_requests ends it at the API server alone; "null" is for a client that left.
        (ServerPlan(stream=False, dies=True, body=b"{}"), "error", "", NO_TOKEN),
        (ServerPlan(stream=False, dies=True, body=b"null"), "cancelled", "", ""),
        # A first token that an error response withholds is none: nobody has seen it.
        (ServerPlan(stream=False, count=2, refused=500), "500", "output", ""),
    ],
)
def test_no_first_token(
    client: FakeClient, plan: ServerPlan, error: str, died: str, header: str
) -> None:
    """A request that its engine ends without a token has no first token: it died where it was.

    Who asked for the breakdown is told so, because a router cannot tell it from a first token.
    """
    call_server(client, plan, **TIMING_HEADERS)
    ttft = client.get_ttft()

    assert (ttft.error, ttft.died) == (error, died)
    assert sum(ttft.stages.values()) + ttft.unattributed == ttft.end
    if died == "ec.transfer":
        assert ttft.unattributed == 0 and ttft.stages["prefill.queue"] == 30
    assert client.get_header() == header
    assert timing.reports_no_token(client.get_header()) == bool(header)


@pytest.mark.parametrize(
    "plan",
    [
        ServerPlan(ends="error", marks=False, stream=False, refused=500),
        ServerPlan(ends="error", marks=False),
    ],
)
def test_ended_before_it_was_scheduled(client: FakeClient, plan: ServerPlan) -> None:
    """A KV load that fails, or a pause: the output brings no marks, and the engine core is asked."""
    client.server.plan = plan
    moving = EngineTimeline(added=1_000_230, details=EngineDetails(moving=1_000_250))
    client.server.aborted_answer = carrier.encode_timeline(moving)
    asyncio.run(client.call_server())
    ttft = client.get_ttft()

    assert client.server.queried_ids == ["chat-1-1f"]
    assert ttft.error in ("error", "500")
    assert (ttft.died, ttft.stages["prefill.queue"], ttft.unattributed) == ("kv.transfer", 20, 0)


@pytest.mark.usefixtures("no_state_left")
def test_a_background_response_that_is_answered_first(client: FakeClient) -> None:
    """It goes on in a task with the context of its HTTP request, which must not bring the trace back."""
    call_server(client, ServerPlan(stream=False, answers_first=True), "/v1/responses")
    (record,) = client.records.kept

    assert record.ttft is None
    assert record.server is not None and record.server.error == ""


def test_an_encoder_stops_without_a_token(client: FakeClient) -> None:
    """An encoder-only instance samples nothing: its output without a token is its whole result."""
    call_server(
        client,
        ServerPlan(stream=False, ends="stop"),
        **{header_names.LEG: "encode", **TIMING_HEADERS},
    )
    ttft = client.get_ttft()

    assert (ttft.error, ttft.died, ttft.unattributed) == ("", "", 0)
    assert read_timing(client)


@pytest.mark.parametrize("headers", [{}, TIMING_HEADERS])
def test_background(client: FakeClient, headers: dict[str, str]) -> None:
    """A response that is only queued has no TTFT, and did not fail."""
    call_server(client, ServerPlan(stream=False, background=True), "/v1/responses", **headers)

    (record,) = client.records.kept
    assert record.ttft is None and record.server is not None
    assert (record.server.status, record.server.error) == (200, "")
    assert not client.server.queried_ids and not client.get_header()


def test_not_sampled(client: FakeClient) -> None:
    """Neither sampled nor asked for: the app gets the server's own `send`, nothing is kept."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((send, recorder.current_trace.get()))

    client.app.app = app
    asyncio.run(client.call_server(traceparent=UNSAMPLED))

    assert seen == [(client.send, None)]
    assert not client.records.kept


def test_asked_not_sampled(client: FakeClient) -> None:
    """Asked for, but not sampled: the caller has its answer, the exporter nothing, and no more is asked."""
    call_server(
        client,
        ServerPlan(stream=False, kept=carrier.KEPT_BLOCKS_BIT),
        traceparent=UNSAMPLED,
        **TIMING_HEADERS,
    )

    assert read_timing(client)
    assert not client.records.kept and not client.server.queried_ids


def test_broken_begin(client: FakeClient, guard_keeps: None) -> None:
    """When our part fails the request is served, untraced."""

    async def run() -> None:
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions"}
        await client.app(scope, client.receive, client.send)

    asyncio.run(run())

    assert client.list_types() == ["start", "data: one", "data: two"]
    assert not client.records.kept


async def test_concurrent(client: FakeClient) -> None:
    """Requests at the same time, of one connection or many, keep their marks apart."""
    await asyncio.gather(*(client.call_server(x_request_id=f"r{number}") for number in range(20)))

    assert {record.request_id for record in client.records.kept} == {f"r{n}" for n in range(20)}
    assert all(get_closed_stages(record) for record in client.records.kept if record.ttft)


async def test_context_is_cleared(client: FakeClient) -> None:
    """A pipelined request that is not traced does not mark the request before it."""
    await client.call_server()
    await client.call_server(traceparent=UNSAMPLED)
    assert recorder.current_trace.get() is None
