# SPDX-License-Identifier: Apache-2.0
"""The middleware around a server of vLLM's shape: what the caller sees, what becomes of each request."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hooks.server import DECODE, EGRESS, FIRST, STAGES, Client, Plan, hanging

from ttft_otel import asgi, carrier, names, recorder, testing, timing
from ttft_otel.record import Record
from ttft_otel.settings import Settings

ASK = {"x_ttft_timing": "1"}
UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


def closed(record: Record) -> dict[str, int]:
    """The record's stages, which add up, on the span and in its pieces."""
    ttft = record.ttft
    assert ttft is not None
    assert sum(ttft.stages.values()) + ttft.unattributed == ttft.end - ttft.start
    pieces = [piece for piece in ttft.pieces if piece.kind == "stage"]
    assert sum(piece.end - piece.start for piece in pieces) == ttft.end - ttft.start
    assert ttft.clamped == 0
    return ttft.stages


def test_stream(client: Client, records: testing.Records) -> None:
    """A stream's ttft half goes with its first token, its server half with its end."""
    asyncio.run(client.call())
    first, last = records.kept

    assert closed(first) == {**STAGES, "egress": EGRESS}
    assert first.ttft is not None and first.ttft.unattributed == 0
    assert first.server is None and last.ttft is None
    assert last.server is not None
    assert (last.server.status, last.server.end) == (200, FIRST + EGRESS + DECODE)
    assert last.server.name == "POST /v1/chat/completions"
    assert (first.trace_id, first.span_id) == (last.trace_id, last.span_id)
    assert client.types() == ["start", "data: one", "data: two"]


def test_first_half_survives(client: Client, records: testing.Records) -> None:
    """A crash while decoding cannot lose the first token's half."""
    client.server.plan = Plan(fail="decode")
    with pytest.raises(RuntimeError, match="the host's own"):
        asyncio.run(client.call())
    first, last = records.kept

    assert closed(first)["prefill.compute"] == 500
    assert last.server is not None and last.server.error == ""


def test_stream_asked(client: Client, records: testing.Records) -> None:
    """For a caller that asks, the head waits for the first chunk and carries the stages."""
    asyncio.run(client.call(**ASK))
    told = timing.read(client.header())

    assert told is not None
    assert told.stages == closed(records.kept[0])
    assert (told.ttft, told.unattributed, told.rest) == (FIRST + EGRESS, 0, None)
    assert [when for when, _ in client.came][:2] == [FIRST + EGRESS] * 2
    assert client.types() == ["start", "data: one", "data: two"]


def test_stream_not_asked(client: Client) -> None:
    """Nobody else's head is held back or changed."""
    asyncio.run(client.call())

    assert client.came[0][0] == 210
    assert client.header() == ""


def test_plain(client: Client, records: testing.Records) -> None:
    """A plain answer's TTFT ends with its first token's output; what follows is the rest."""
    client.server.plan = Plan(stream=False)
    asyncio.run(client.call(**ASK))
    (record,) = records.kept
    told = timing.read(client.header())

    assert closed(record) == STAGES
    assert record.server is not None
    assert told is not None
    assert (told.ttft, told.rest) == (FIRST, EGRESS + DECODE)


@pytest.mark.parametrize("role", ["encode", "prefill"])
def test_plain_with_egress(client: Client, records: testing.Records, role: str) -> None:
    """An encoder's or a prefill server's whole answer is what its caller waits for."""
    recorder.identity.role = role
    client.server.plan = Plan(stream=False)
    asyncio.run(client.call(**ASK))
    told = timing.read(client.header())

    assert told is not None and told.stages["egress"] == EGRESS + DECODE
    assert records.kept[0].role == role
    assert told.rest == 0


@pytest.mark.parametrize("asked", [False, True])
def test_early_events(client: Client, asked: bool) -> None:
    """Comments and opening events before the first token do not count as it, and are not lost."""
    client.server.plan = Plan(early=(b": keep-alive\n\n", b"", b"event: created\n\n"))
    asyncio.run(client.call(**(ASK if asked else {})))
    came = client.types()

    assert came == ["start", ": keep-alive", "", "event: created", "data: one", "data: two"]
    assert client.came[1][0] == (FIRST + EGRESS if asked else 210)
    if asked:
        told = timing.read(client.header())
        assert told is not None and told.ttft == FIRST + EGRESS


def test_hold_limit(client: Client) -> None:
    """A server that says much before its first token is not held back for ever; no header then."""
    chunk = b": " + b"x" * (asgi.HOLD_LIMIT // 2)
    client.server.plan = Plan(early=(chunk, chunk, chunk))
    asyncio.run(client.call(**ASK))

    assert len(client.came) == 6
    assert client.came[2][0] == 210
    assert client.header() == ""


@pytest.mark.parametrize("status", [400, 404, 500, 503])
def test_refused(client: Client, records: testing.Records, status: int) -> None:
    """A request that was refused has its server span, with its status, and a ttft that failed."""
    client.server.plan = Plan(status=status)
    asyncio.run(client.call(**ASK))
    (record,) = records.kept

    assert client.header() == ""
    assert record.server is not None and record.server.status == status
    assert record.server.error == (str(status) if status >= 500 else "") or status < 500
    assert record.ttft is not None and record.ttft.error == str(status)
    assert record.ttft.died == "receive"


@pytest.mark.parametrize(("where", "died"), [("body", "receive"), ("queue", None)])
def test_app_raises(client: Client, records: testing.Records, where: str, died: str | None) -> None:
    """The app's exception passes through; its request is told as failed, where it was."""
    client.server.plan = Plan(stream=False, fail=where)
    with pytest.raises(RuntimeError, match="the host's own"):
        asyncio.run(whole(client))
    (record,) = records.kept

    assert record.ttft is not None and record.ttft.error
    assert died is None or record.ttft.died == died


async def whole(client: Client) -> None:
    """A call, and whatever it left to do in the background, even where it raised."""
    try:
        await client.call()
    finally:
        while client.app.late:
            await asyncio.gather(*client.app.late)


def test_disconnect(client: Client, records: testing.Records) -> None:
    """A caller that gives up in the queue: the engine core is asked where the request was."""
    gone = carrier.Journey(added=1_000_230)
    client.server.died = carrier.fold(gone)

    async def run() -> None:
        async with hanging(client, client.call) as task:
            client.server.clock.tick(5000)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.gather(*client.app.late)

    asyncio.run(run())
    (record,) = records.kept
    ttft = record.ttft

    assert ttft is not None
    assert (ttft.error, ttft.died) == ("cancelled", "prefill.queue")
    assert closed(record)["prefill.queue"] == 5210 - 230
    assert client.server.asked == ["chat-1-1f"]


def test_disconnect_unknown(client: Client, records: testing.Records) -> None:
    """An engine core that knows nothing leaves the time unattributed, not invented."""

    async def run() -> None:
        async with hanging(client, client.call) as task:
            client.server.clock.tick(5000)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.gather(*client.app.late)

    asyncio.run(run())
    ttft = records.kept[0].ttft

    assert ttft is not None
    assert ttft.unattributed == 5000


def test_kept_blocks(client: Client, records: testing.Records) -> None:
    """Blocks that an answered request leaves for another instance: a span that follows the record."""
    client.server.plan = Plan(stream=False, kept=True)
    client.server.sent = carrier.Kept(1_000_900, 1_009_900, 12, 2, True).fold()
    asyncio.run(client.call(traceparent=UNSAMPLED[:-1] + "1"))
    first, last = records.kept

    assert first.server is not None and not first.late
    assert last.server is None and last.ttft is None
    (piece,) = last.late
    assert (piece.name, piece.start, piece.end) == (names.KEPT, 900, 9_900)
    assert piece.attributes[names.KV_BLOCKS] == 2
    assert piece.attributes[names.ERROR_TYPE] == "expired"
    assert (first.trace_id, first.span_id) == (last.trace_id, last.span_id)
    assert records.spans()[-1].parent is not None


def test_kept_blocks_of_nobody(client: Client, records: testing.Records) -> None:
    """An engine core that cannot tell leaves no span; where nothing is exported it is not asked."""
    client.server.plan = Plan(stream=False, kept=True)
    asyncio.run(client.call())
    assert len(records.kept) == 1 and len(client.server.asked) == 1

    asyncio.run(client.call(traceparent=UNSAMPLED, **ASK))
    assert len(client.server.asked) == 1


def test_marks_lost(client: Client, records: testing.Records) -> None:
    """Without the engine's marks the engine's time is unattributed; the sum still closes."""
    client.server.plan = Plan(marks=False)
    asyncio.run(client.call())
    stages = closed(records.kept[0])

    assert set(stages) == {"receive", "preprocess", "egress"}
    assert records.kept[0].ttft is not None
    assert records.kept[0].ttft.unattributed == FIRST - 210


def test_not_sampled(client: Client, records: testing.Records) -> None:
    """Neither sampled nor asked for: the app gets the server's own `send`, nothing is kept."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((send, recorder.current.get()))

    client.app.app = app
    asyncio.run(client.call(traceparent=UNSAMPLED))

    assert seen == [(client.send, None)]
    assert not records.kept


def test_asked_not_sampled(client: Client, records: testing.Records) -> None:
    """Asked for, but not sampled: the caller has its answer, the exporter nothing."""
    asyncio.run(client.call(traceparent=UNSAMPLED, **ASK))

    assert timing.read(client.header()) is not None
    assert not records.kept


def test_context_is_cleared(client: Client) -> None:
    """A pipelined request that is not traced does not mark the request before it."""

    async def both() -> None:
        await client.call()
        await client.call(traceparent=UNSAMPLED)
        assert recorder.current.get() is None

    asyncio.run(both())


def test_other_paths(client: Client, records: testing.Records) -> None:
    """A POST that never reaches the engine and is no generating endpoint leaves nothing."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["route"] = SimpleNamespace(path="/tokenize")

    client.app.app = app
    asyncio.run(client.call("/tokenize"))

    assert not records.kept


@pytest.mark.parametrize("scope", [{"type": "websocket"}, {"type": "http", "method": "GET"}])
def test_other_scopes(client: Client, scope: dict[str, Any]) -> None:
    """What is no POST passes untouched."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(send)

    client.app.app = app
    asyncio.run(client.app(scope, client.receive, client.send))

    assert seen == [client.send]


def test_lifespan(client: Client) -> None:
    """At its start the server learns its role."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        return None

    client.app.app = app
    asyncio.run(client.app({"type": "lifespan", "app": client.server}, client.receive, client.send))

    assert recorder.identity.role == "mono"


def test_broken_begin(client: Client, records: testing.Records, keep: None) -> None:
    """When our part fails the request is served, untraced."""

    async def run() -> None:
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions"}
        await client.app(scope, client.receive, client.send)

    asyncio.run(run())

    assert client.types() == ["start", "data: one", "data: two"]
    assert not records.kept


def test_router_leg(client: Client, records: testing.Records) -> None:
    """A router's header gives the role where the configuration cannot; the span is not outermost."""
    asyncio.run(client.call(x_ttft_leg="decode", x_request_id="r-7"))
    first = records.kept[0]

    assert (first.role, first.outermost, first.request_id) == ("decode", False, "r-7")
    assert first.service == "vllm-decode"


def test_full_queue(client: Client, records: testing.Records) -> None:
    """An exporter that takes nothing costs the record, not the request."""
    records.full = True
    asyncio.run(client.call())

    assert client.types() == ["start", "data: one", "data: two"]
    assert records.dropped == 2


def test_spans(client: Client, records: testing.Records) -> None:
    """The whole trace of one stream, as a picture."""
    asyncio.run(client.call())
    by_id = {span.context.span_id: span for span in records.spans()}

    picture = sorted(
        (by_id[span.parent.span_id].name if span.parent else "", span.name)
        for span in by_id.values()
    )
    assert picture == sorted(
        [
            ("", "POST /v1/chat/completions"),
            ("POST /v1/chat/completions", names.TTFT),
            *((names.TTFT, stage) for stage in (*STAGES, "egress")),
            *(("preprocess", part) for part in ("tokenize", "multimodal")),
            *(("output", part) for part in ("collect", "transport", "detokenize")),
        ]
    )


def test_concurrent(client: Client, records: testing.Records) -> None:
    """Requests at the same time, of one connection or many, keep their marks apart."""

    async def many() -> None:
        await asyncio.gather(*(client.call(x_request_id=f"r{number}") for number in range(20)))

    asyncio.run(many())

    assert {record.request_id for record in records.kept} == {f"r{n}" for n in range(20)}
    assert all(closed(record) for record in records.kept if record.ttft)


@pytest.mark.parametrize(
    ("sampler", "parent", "kept"),
    [
        ("always_on", UNSAMPLED, True),
        ("always_off", "", False),
        ("parentbased_always_off", "", False),
        ("parentbased_always_off", UNSAMPLED[:-1] + "1", True),
    ],
)
def test_sampler(
    client: Client, records: testing.Records, sampler: str, parent: str, kept: bool
) -> None:
    """The operator's sampler decides who is measured."""
    client.app.settings = Settings(on=True, sampler=sampler)
    asyncio.run(client.call(traceparent=parent))

    assert bool(records.kept) is kept
