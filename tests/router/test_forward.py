# SPDX-License-Identifier: Apache-2.0
"""The data path's promises to the client, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import aiohttp
import pytest

from router import fakes
from router.fakes import EVENTS, PARENT, Plan
from ttft_otel import clock, names, timing
from ttft_otel.router import app, choose


def test_stream_is_not_buffered() -> None:
    """Chunks that the backend sends 60 ms apart reach the client 60 ms apart, byte for byte."""

    async def scenario() -> None:
        async with fakes.instance(Plan(gap=0.06)) as one, fakes.router([one.url]) as router:
            times, got = [], []
            url = f"{router.url}/v1/chat/completions"
            async with router.client.post(url, json=fakes.chat()) as response:
                assert response.headers["Content-Type"] == "text/event-stream"
                async for chunk in response.content.iter_any():
                    times.append(clock.now())
                    got.append(chunk)
            assert tuple(got) == EVENTS
            assert all(40_000 < b - a < 120_000 for a, b in zip(times, times[1:], strict=False))

    fakes.run(scenario)


def test_bytes_pass_unmodified() -> None:
    """The request's odd spacing reaches the backend, and the answer's reaches the client."""

    async def scenario() -> None:
        async with fakes.instance() as one, fakes.router([one.url]) as router:
            body = b'{ "model":"tiny",\n "messages" : [], "n":1e0 }'
            status, headers, answer = await router.post("/v1/chat/completions?a=%2F", body)
            assert (status, answer) == (200, b'{"answer":  "42"}')
            assert one.seen[0].body == body
            assert one.seen[0].path == "/v1/chat/completions?a=%2F"
            assert headers["X-Own"] == "kept" and "X-Hop" not in headers

    fakes.run(scenario)


def test_hop_by_hop_headers_stop_here() -> None:
    """What belongs to one connection, or is named by Connection, is not forwarded; the rest is."""

    async def scenario() -> None:
        async with fakes.instance() as one, fakes.router([one.url]) as router:
            await router.chat(
                Connection="keep-alive, X-Mine",
                X_Mine="1",
                TE="trailers",
                Baggage="a=1,b=%20",
                Authorization="Bearer x",
                Accept_Encoding="gzip",
            )
            seen = one.seen[0].headers
            assert "X-Mine" not in seen and "TE" not in seen
            assert seen["Baggage"] == "a=1,b=%20" and seen["Authorization"] == "Bearer x"
            assert seen["Accept-Encoding"] == "gzip"

    fakes.run(scenario)


def test_images_go_to_encoders_at_once() -> None:
    """Three distinct images of four are encoded side by side; the backend starts when all are in."""

    async def scenario() -> None:
        plan = Plan(stages={"encoder.compute": 100})
        async with (
            fakes.instance(plan) as e1,
            fakes.instance(plan) as e2,
            fakes.instance() as pd,
            fakes.router([pd.url], [e1.url, e2.url]) as router,
        ):
            start = clock.now()
            status, _, body = await router.chat("http://x/a", "data:image/png;base64,AA", "c", "c")
            assert (status, body) == (200, b"".join(EVENTS))
            calls = e1.seen + e2.seen
            assert sorted(len(each.seen) for each in (e1, e2)) == [1, 2]
            assert 100_000 < pd.seen[0].at - start < 200_000
            urls = {each.json["messages"][0]["content"][0]["image_url"]["url"] for each in calls}
            assert urls == {"http://x/a", "data:image/png;base64,AA", "c"}
            for each in calls:
                body = each.json
                assert (body["max_tokens"], body["stream"], body["model"]) == (1, False, "tiny")
                assert len(body["messages"][0]["content"]) == 1
            assert pd.seen[0].json == fakes.chat("http://x/a", "data:image/png;base64,AA", "c", "c")

    fakes.run(scenario)


def test_text_skips_the_encoder() -> None:
    """A request without images, and any that is not chat, goes straight to the backend."""

    async def scenario() -> None:
        async with (
            fakes.instance() as e,
            fakes.instance() as pd,
            fakes.router([pd.url], [e.url]) as router,
        ):
            await router.chat()
            await router.post("/v1/completions", {"prompt": "x"})
            await router.post("/v1/embeddings", {"input": "x"})
            assert (len(e.seen), len(pd.seen)) == (0, 3)

    fakes.run(scenario)


def test_backends_take_turns() -> None:
    """Round robin: four requests over two backends are two each."""

    async def scenario() -> None:
        async with (
            fakes.instance() as a,
            fakes.instance() as b,
            fakes.router([a.url, b.url]) as router,
        ):
            for _ in range(4):
                await router.chat()
            assert (len(a.seen), len(b.seen)) == (2, 2)

    fakes.run(scenario)


def test_every_leg_has_its_own_parent() -> None:
    """Each leg's traceparent names the router's own client span for it, in the caller's trace."""

    async def scenario() -> None:
        async with (
            fakes.instance() as e,
            fakes.instance() as pd,
            fakes.router([pd.url], [e.url]) as router,
        ):
            await router.chat("a", "b", traceparent=PARENT, tracestate="v=1", X_Request_Id="mine")
            server = (await router.settled(2))[-1]
            calls = {call.span_id: call for call in server.calls}
            assert len(calls) == 3 and server.parent_id == PARENT.split("-")[2]
            for each in (*e.seen, *pd.seen):
                version, trace, parent, flags = each.headers["traceparent"].split("-")
                assert (version, trace, flags) == ("00", PARENT.split("-")[1], "01")
                assert calls.pop(parent).leg == each.headers["x-ttft-leg"]
                assert each.headers["tracestate"] == "v=1"
                assert each.headers["x-ttft-timing"] == "1"
            ids = sorted(each.headers["X-Request-Id"] for each in (*e.seen, *pd.seen))
            assert ids == ["mine", "mine-encode-0", "mine-encode-1"]
            assert pd.seen[0].headers["X-Request-Id"] == "mine"

    fakes.run(scenario)


def test_request_id_is_kept_or_made() -> None:
    """A caller's id comes back; a malformed or missing one is replaced, never an error."""

    async def scenario() -> None:
        async with fakes.instance() as one, fakes.router([one.url]) as router:
            for given in ("ok-1", "", "two words", "x" * 300):
                _, headers, _ = await router.chat(X_Request_Id=given)
                kept = headers["X-Request-Id"]
                assert (kept == given) == (given == "ok-1")
                assert one.seen[-1].headers["X-Request-Id"] == kept and len(kept) <= 256

    fakes.run(scenario)


def test_malformed_context_breaks_nothing() -> None:
    """Nonsense in traceparent, tracestate and baggage starts a new trace and is served."""

    async def scenario() -> None:
        async with fakes.instance() as one, fakes.router([one.url]) as router:
            bad = {"traceparent": "00-zz-1", "tracestate": "x" * 900, "baggage": "é;;=,"}
            status, _, _ = await router.chat(**bad)
            assert status == 200
            assert one.seen[0].headers["traceparent"].startswith("00-")
            assert (await router.settled(2))[0].parent_id == ""

    fakes.run(scenario)


def test_client_leaving_stops_the_legs() -> None:
    """A client that goes away before or after the first token ends the leg within 100 ms."""

    async def scenario() -> None:
        for plan, wait in ((Plan({"prefill.compute": 5000}), 0.2), (Plan(gap=5), 0.2)):
            async with fakes.instance(plan) as one, fakes.router([one.url]) as router:
                task = asyncio.create_task(router.chat())
                await asyncio.sleep(wait)
                left = clock.now()
                task.cancel()
                record = (await router.settled(1 if plan.gap == 0 else 2))[-1]
                await asyncio.sleep(0.05)
                assert 0 < one.seen[0].cancelled - left < 100_000
                assert record.server is not None and record.server.error == "disconnected"
                assert record.calls[0].error == "cancelled"
                if record.ttft is not None:
                    assert record.ttft.error == "disconnected"
                    assert record.ttft.died == "router.hop.mono"

    fakes.run(scenario)


def test_client_leaving_stops_the_encoders() -> None:
    """Encoder calls in flight end too, and the backend is never called."""

    async def scenario() -> None:
        slow = Plan({"encoder.compute": 5000})
        async with (
            fakes.instance(slow) as e,
            fakes.instance() as pd,
            fakes.router([pd.url], [e.url]) as router,
        ):
            task = asyncio.create_task(router.chat("a", "b"))
            await asyncio.sleep(0.2)
            left = clock.now()
            task.cancel()
            await router.settled(1)
            await asyncio.sleep(0.05)
            assert all(0 < each.cancelled - left < 100_000 for each in e.seen)
            assert len(e.seen) == 2 and not pd.seen

    fakes.run(scenario)


def test_errors_keep_status_and_body() -> None:
    """A backend's error is the client's, for a stream too; its spans say error."""

    async def scenario() -> None:
        for status in (400, 429, 500):
            async with fakes.instance(Plan(status=status)) as one, fakes.router([one.url]) as r:
                got, _, body = await r.chat()
                assert (got, body) == (status, b'{"error": "no"}')
                (record,) = await r.settled(1)
                assert record.ttft is not None and record.ttft.error == str(status)
                assert record.server is not None
                assert record.server.error == ("500" if status == 500 else "")

    fakes.run(scenario)


def test_failed_encoder_answers() -> None:
    """A failed encoder call gives the client its status and body; the backend is not asked."""

    async def scenario() -> None:
        async with (
            fakes.instance(Plan(status=422)) as e,
            fakes.instance() as pd,
            fakes.router([pd.url], [e.url]) as router,
        ):
            for images in (("a",), ("a", "b")):
                status, headers, body = await router.chat(*images)
                assert (status, body) == (422, b'{"error": "no"}')
                assert headers["X-Request-Id"]
            assert not pd.seen
            record = (await router.settled(2))[0]
            assert record.ttft is not None and record.ttft.died == "router.hop.encode"

    fakes.run(scenario)


def test_backend_down() -> None:
    """Nobody listening is a 502 in OpenAI's form, and the record says where it died."""

    async def scenario() -> None:
        async with fakes.router([fakes.unused()]) as router:
            status, _, body = await router.chat()
            assert status == 502 and json.loads(body)["error"]["code"] == 502
            (record,) = await router.settled(1)
            assert record.ttft is not None and record.server is not None
            assert record.ttft.died == "router.hop.mono"
            assert record.server.error == "502" and record.calls[0].error
        async with fakes.router([]) as router:
            assert (await router.chat())[0] == 503

    fakes.run(scenario)


def test_refused_connection_tries_another() -> None:
    """A backend that goes down costs one request a retry, the lost time is router.retry."""

    async def scenario() -> None:
        async with fakes.instance() as one, contextlib.AsyncExitStack() as stack:
            two = await stack.enter_async_context(fakes.instance())
            async with fakes.router([two.url, one.url]) as router:
                await router.app.forward.legs.health.ready()
                await stack.aclose()
                assert [(await router.chat())[0] for _ in range(4)] == [200] * 4
                records = [each for each in await router.settled(8) if each.calls]
                assert [len(each.calls) for each in records] == [2, 1, 1, 1]
                lost, other = records[0].calls
                assert (lost.error, lost.status, other.status) == ("ClientConnectorError", 0, 200)
                assert other.attributes[names.ATTEMPT] == 2
                firsts = [each.ttft for each in router.records if each.ttft]
                (told,) = [each for each in firsts if "router.retry" in each.stages]
                # until the other attempt begins, the pause before it included
                pieces = {piece.name: piece for piece in told.pieces}
                assert pieces["router.retry"].start <= lost.start + 1000
                assert pieces["router.retry"].end > lost.end

    fakes.run(scenario)


def test_broken_stream_is_broken_for_the_client() -> None:
    """A backend that dies mid-stream leaves the client with a cut stream, not a complete one."""

    async def scenario() -> None:
        plan = Plan(breaks=True, gap=0.05)
        async with fakes.instance(plan) as one, fakes.router([one.url]) as router:
            try:
                await router.chat()
            except aiohttp.ClientPayloadError:
                pass
            else:
                raise AssertionError("the stream looked complete")
            first, last = await router.settled(2)
            assert first.ttft is not None and first.ttft.error == ""
            assert last.server is not None and last.server.error == "ClientPayloadError"

    fakes.run(scenario)


def test_malformed_json_is_refused_here() -> None:
    """What is no JSON object is a 400 in OpenAI's form; where other bodies are taken it goes on."""

    async def scenario() -> None:
        async with fakes.instance(Plan(status=400)) as pd, fakes.instance() as e:
            async with fakes.router([pd.url], [e.url]) as router:
                for body in (b"{", b"", b"\xff\xfe", b"[1]", b"[" * 5000):
                    status, _, said = await router.post("/v1/chat/completions", body)
                    error = json.loads(said)["error"]
                    assert status == error["code"] == 400 and "JSON" in error["message"]
                    assert not pd.seen
                for path, body in (
                    ("/v1/chat/completions", b'{"messages": 3}'),
                    ("/v1/audio/transcriptions", b"\xff"),
                ):
                    assert (await router.post(path, body))[0] == 400
                    assert pd.seen.pop().body == body
                assert not e.seen

    fakes.run(scenario)


def test_transfer_parameters_of_clients_are_removed() -> None:
    """A client's own kv_transfer_params, which can kill an instance, never reach one."""

    async def scenario() -> None:
        async with fakes.instance() as one, fakes.router([one.url]) as router:
            for body in (
                b'{"model": "tiny", "kv_transfer_params": {"a": 1}, "ec_transfer_params": null}',
                b'{"model": "tiny", "kv_transfer\\u005fparams": {"a": NaN}}',
                b'{"model": "tiny", "kv_transfer_params": 1e999}',
            ):
                await router.post("/v1/completions", body)
                assert one.seen[-1].json == {"model": "tiny"}

    fakes.run(scenario)


def test_body_is_bounded() -> None:
    """Beyond the bound is 413, announced by Content-Length or found while reading."""

    async def scenario() -> None:
        async with fakes.instance() as one, fakes.router([one.url], largest=1000) as router:
            assert (await router.post("/v1/completions", b"x" * 1001))[0] == 413

            async def chunks() -> object:
                for _ in range(20):
                    yield b"x" * 100

            url = f"{router.url}/v1/completions"
            named = {"Content-Type": "application/json"}
            async with router.client.post(url, data=chunks(), headers=named) as response:
                assert response.status == 413
            assert not one.seen

    fakes.run(scenario)


def test_client_may_ask_for_the_breakdown() -> None:
    """With x-ttft-timing the answer has the router's Server-Timing, which closes; without, none."""

    async def scenario() -> None:
        async with (
            fakes.instance(Plan({"encoder.compute": 30})) as e,
            fakes.instance(Plan(rest=50)) as pd,
            fakes.router([pd.url], [e.url]) as router,
        ):
            for stream in (True, False):
                _, headers, _ = await router.chat("a", stream=stream, x_ttft_timing="1")
                said = timing.read(headers["Server-Timing"])
                assert said is not None and said.stages["encode.encoder.compute"] >= 30_000
                assert (said.rest is None) == stream
                if said.rest is not None:
                    assert 50_000 <= said.rest < 70_000
                _, headers, _ = await router.chat("a", stream=stream)
                assert "Server-Timing" not in headers

    fakes.run(scenario)


def test_a_fault_of_the_routers_own_is_told_as_one(capfd: pytest.CaptureFixture[str]) -> None:
    """The client gets an error in OpenAI's form, the span its type; the log has the traceback."""

    class Broken(choose.Policy):
        def choose(self, *_: Any) -> choose.Choice:
            raise LookupError("not the client's business")

    def broken(built: app.App) -> None:
        built.forward.legs.routing.desk.policy = Broken()

    async def scenario() -> None:
        async with fakes.instance() as one, fakes.router([one.url], prepare=broken) as router:
            status, _, body = await router.chat()
            assert status == 500 and json.loads(body)["error"]["code"] == 500
            assert b"business" not in body
            (record,) = await router.settled(1)
            assert record.server is not None and record.server.error == "LookupError"
            assert router.app.forward.answered == {"5xx": 1}

    fakes.run(scenario)
    assert "not the client's business" in capfd.readouterr().err
