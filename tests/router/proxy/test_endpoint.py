# SPDX-License-Identifier: Apache-2.0
"""What the data path does with requests and answers, who may use it, and the form of its refusals."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from router import fake_instances, raw_http
from router.fake_instances import (
    STREAM_EVENTS,
    TRACEPARENT,
    InstancePlan,
    run_routed_instances,
    wait_until,
)
from ttft_otel.model import timing
from ttft_otel.model.names import header_names, keys
from ttft_otel.router import types
from ttft_otel.router.control import app
from ttft_otel.router.limits import RouterLimits
from ttft_otel.router.routing.policies.policy_registry import RoundRobinPolicy
from ttft_otel.tracing import clock
from ttft_otel.tracing.settings import Settings


async def test_stream_is_not_buffered() -> None:
    """Each chunk reaches the client before the instance sends the next one."""
    permits, got = asyncio.Semaphore(0), []
    plan = InstancePlan(permits=permits)
    async with run_routed_instances([plan]) as (router, _):
        url = f"{router.url}/v1/chat/completions"
        async with router.client.post(url, json=fake_instances.build_chat()) as response:
            assert response.headers["Content-Type"] == "text/event-stream"
            async for chunk in response.content.iter_any():
                got.append(chunk)
                permits.release()
        assert tuple(got) == STREAM_EVENTS


async def test_bytes_pass_unmodified() -> None:
    """The request's odd spacing reaches the backend, and the answer's reaches the client."""
    async with run_routed_instances() as (router, one):
        body = b'{ "model":"tiny",\n "messages" : [], "n":1e0 }'
        status, headers, answer = await router.post_body("/v1/chat/completions?a=%2F", body)
        assert (status, answer) == (200, b'{"answer":  "42"}')
        assert one.received[0].body == body
        assert one.received[0].path == "/v1/chat/completions?a=%2F"
        assert headers["X-Own"] == "kept" and "X-Hop" not in headers


async def test_hop_by_hop_headers_stop_here() -> None:
    """Hop-by-hop headers, and those that Connection names, are not forwarded; all others are."""
    async with run_routed_instances() as (router, one):
        kept = {"Baggage": "a=1,b=%20", "Authorization": "Bearer x", "Accept-Encoding": "gzip"}
        stopped = {"Connection": "keep-alive, X-Mine", "X-Mine": "1", "TE": "trailers"}
        await router.post_chat(**kept, **stopped)
        seen = one.received[0].headers
        assert "X-Mine" not in seen and "TE" not in seen
        assert {name: seen[name] for name in kept} == kept


async def test_images_go_to_encoders_at_once() -> None:
    """Distinct images are encoded concurrently; the backend is called when all have answered."""
    plan = InstancePlan(stages_ms={"encoder.compute": 400})
    async with run_routed_instances(encoders=[plan, plan]) as (router, e1, e2, pd):
        images = ("http://x/a", "data:image/png;base64,AA", "c", "c")
        status, _, body = await router.post_chat(*images)
        assert (status, body) == (200, b"".join(STREAM_EVENTS))
        calls = e1.received + e2.received
        assert sorted(len(each.received) for each in (e1, e2)) == [1, 2]
        asked_us = [each.received_us for each in calls]
        assert max(asked_us) < min(asked_us) + 400_000, "all were asked before one had answered"
        assert pd.received[0].received_us >= max(asked_us) + 400_000
        urls = {each.json["messages"][0]["content"][0]["image_url"]["url"] for each in calls}
        assert urls == set(images)
        for body in (each.json for each in calls):
            assert (body["max_tokens"], body["stream"], body["model"]) == (1, False, "tiny")
            assert len(body["messages"][0]["content"]) == 1
        assert pd.received[0].json == fake_instances.build_chat(*images)


async def test_every_leg_has_its_own_parent() -> None:
    """Each leg's traceparent names the router's own client span for it, in the caller's trace."""
    async with run_routed_instances(encoders=[None]) as (router, e, pd):
        named = {"traceparent": TRACEPARENT, "tracestate": "v=1", "X_Request_Id": "mine"}
        await router.post_chat("a", "b", **named)
        server = (await router.wait_for_records(2))[-1]
        calls = {call.span_id: call for call in server.calls}
        assert len(calls) == 3 and server.parent_id == TRACEPARENT.split("-")[2]
        for each in (*e.received, *pd.received):
            version, trace, parent, flags = each.headers["traceparent"].split("-")
            assert (version, trace, flags) == ("00", TRACEPARENT.split("-")[1], "01")
            assert calls.pop(parent).leg == each.headers["x-ttft-leg"]
            assert each.headers["tracestate"] == "v=1"
            assert each.headers["x-ttft-timing"] == "1"
        ids = sorted(each.headers["X-Request-Id"] for each in (*e.received, *pd.received))
        assert ids == ["mine", "mine-encode-0", "mine-encode-1"]
        assert pd.received[0].headers["X-Request-Id"] == "mine"


async def test_request_id_is_kept_or_made() -> None:
    """A caller's id comes back; a malformed or missing one is replaced, never an error."""
    async with run_routed_instances() as (router, one):
        for given in ("ok-1", "", "two words", "x" * 300):
            _, headers, _ = await router.post_chat(X_Request_Id=given)
            kept = headers["X-Request-Id"]
            assert (kept == given) == (given == "ok-1")
            assert one.received[-1].headers["X-Request-Id"] == kept and len(kept) <= 256


async def post_over_http_10(router: fake_instances.RunningRouter) -> None:
    """Post a chat with HTTP/1.0 and read what comes; the connection ends with the task."""
    body = json.dumps(fake_instances.build_chat()).encode()
    data = raw_http.encode_request(body=body).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    await raw_http.send_bytes(router.url, data, timeout_s=90)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_client_leaving_stops_the_legs(version: str) -> None:
    """A client that goes away before or after the first token ends the leg within 100 ms."""
    delays = fake_instances.LoopDelays()
    for plan in (InstancePlan({"prefill.compute": 60_000}), InstancePlan(gap_s=60)):
        async with run_routed_instances([plan]) as (router, one):
            post = router.post_chat() if version == "1.1" else post_over_http_10(router)
            task = asyncio.create_task(post)
            await wait_until(lambda one=one: one.received)
            await router.wait_for_records(int(plan.gap_s > 0))
            left = clock.now_us()
            task.cancel()
            record = (await router.wait_for_records(1 if plan.gap_s == 0 else 2))[-1]
            await wait_until(lambda one=one: one.received[0].cancelled_us)
            assert one.received[0].cancelled_us - left < 100_000 + delays.total_us
            assert record.server is not None and record.server.error == "disconnected"
            assert record.calls[0].error == "cancelled"
            if record.ttft is not None:
                assert record.ttft.error == "disconnected"
                assert record.ttft.died == "router.hop.mono"


async def test_client_leaving_stops_the_encoders() -> None:
    """When the client disconnects, encoder calls in flight end and the backend is not called."""
    slow, delays = InstancePlan({"encoder.compute": 60_000}), fake_instances.LoopDelays()
    async with run_routed_instances(encoders=[slow]) as (router, e, pd):
        task = asyncio.create_task(router.post_chat("a", "b"))
        await wait_until(lambda: len(e.received) == 2)
        left = clock.now_us()
        task.cancel()
        await router.wait_for_records(1)
        await wait_until(lambda: all(each.cancelled_us for each in e.received))
        late_us = 100_000 + delays.total_us
        assert all(each.cancelled_us - left < late_us for each in e.received)
        assert len(e.received) == 2 and not pd.received


async def test_errors_keep_status_and_body() -> None:
    """A backend's error is the client's, for a stream too, and tried nowhere else; its spans say error."""
    for status in (400, 429, 500):
        async with run_routed_instances([InstancePlan(status=status), None]) as (r, _, other):
            got, _, body = await r.post_chat()
            assert (got, body) == (status, b'{"error": "no"}')
            (record,) = await r.wait_for_records(1)
            assert record.ttft is not None and record.ttft.error == str(status)
            assert record.server is not None
            assert record.server.error == ("500" if status == 500 else "")
            assert not other.received


async def test_failed_encoder_answers() -> None:
    """A failed encoder call gives the client its status and body; the backend is not asked."""
    async with run_routed_instances(encoders=[InstancePlan(status=422)]) as (router, e, pd):
        for images in (("a",), ("a", "b")):
            status, headers, body = await router.post_chat(*images)
            assert (status, body) == (422, b'{"error": "no"}')
            assert headers["X-Request-Id"]
        assert not pd.received
        record = (await router.wait_for_records(2))[0]
        assert record.ttft is not None and record.ttft.died == "router.hop.encode"


async def test_backend_down() -> None:
    """A refused connection is a 502 in OpenAI's form, and the record names the stage it died in."""
    async with fake_instances.run_router([fake_instances.find_unused_url()]) as router:
        status, _, body = await router.post_chat()
        assert status == 502 and json.loads(body)["error"]["code"] == 502
        (record,) = await router.wait_for_records(1)
        assert record.ttft is not None and record.server is not None
        assert record.ttft.died == "router.hop.mono"
        assert record.server.error == "502" and record.calls[0].error
    async with fake_instances.run_router([]) as router:
        assert (await router.post_chat())[0] == 503


async def test_malformed_json_is_refused_here() -> None:
    """What is no JSON object is a 400 in OpenAI's form; where other bodies are taken it goes on."""
    async with run_routed_instances([InstancePlan(status=400)], [None]) as (router, e, pd):
        for body in (b"{", b"", b"\xff\xfe", b"[1]", b"[" * 5000):
            status, _, said = await router.post_body("/v1/chat/completions", body)
            error = json.loads(said)["error"]
            assert status == error["code"] == 400 and "JSON" in error["message"]
            assert not pd.received
        for path, body, kind in (
            ("/v1/chat/completions", b'{"messages": 3}', "application/json"),
            ("/v1/audio/transcriptions", b"\xff", "multipart/form-data; boundary=x"),
            ("/v1/responses/r/cancel", b"", "application/json"),
        ):
            assert (await router.post_body(path, body, Content_Type=kind))[0] == 400
            assert pd.received.pop().body == body
        assert not e.received


async def test_a_response_in_the_background_has_no_ttft() -> None:
    """A queued background response has no TTFT; a refused one is recorded as failed."""
    async with run_routed_instances([InstancePlan({})]) as (router, one):
        body = {"model": "tiny", "input": "x", "background": True}
        _, headers, _ = await router.post_body("/v1/responses", body, x_ttft_timing="1")
        assert "Server-Timing" not in headers
        (record,) = await router.wait_for_records(1)
        assert record.ttft is None and record.server is not None and not record.server.error
        request_id = headers[header_names.REQUEST_ID]
        assert (await router.get_json(f"/ttft_report/{request_id}"))[0] == 404
        one.plan.status = 503
        await router.post_body("/v1/responses", body)
        record = (await router.wait_for_records(2))[-1]
        assert record.ttft is not None and record.ttft.error == "503"
        one.plan.status = 200
        await router.post_body("/v1/chat/completions", body)  # it has no background there
        record = (await router.wait_for_records(3))[-1]
        assert record.ttft is not None and not record.ttft.error


async def test_body_is_bounded() -> None:
    """Beyond the bound is 413, announced by Content-Length or found while reading."""
    limits = RouterLimits(max_body=1000)
    async with run_routed_instances(limits=limits) as (router, one):

        async def generate_chunks() -> object:
            for _ in range(20):
                yield b"x" * 100

        for data in (b"x" * 1001, generate_chunks()):
            named = {"Content-Type": "application/json"}
            url = f"{router.url}/v1/completions"
            async with router.client.post(url, data=data, headers=named) as response:
                assert response.status == 413
        assert not one.received


async def test_client_may_ask_for_the_breakdown() -> None:
    """With x-ttft-timing the answer has the router's Server-Timing, which closes; without, none."""
    async with run_routed_instances(
        [InstancePlan(rest_ms=50)], [InstancePlan({"encoder.compute": 30})]
    ) as (router, e, pd):
        for stream in (True, False):
            began_ns = time.monotonic_ns()
            _, headers, _ = await router.post_chat("a", stream=stream, x_ttft_timing="1")
            total_us = (time.monotonic_ns() - began_ns) // 1000
            said = timing.parse_server_timing(headers["Server-Timing"])
            assert said is not None and said.stages["encode.encoder.compute"] >= 30_000
            assert (said.rest is None) == stream
            if said.rest is not None:
                assert 50_000 <= said.rest <= total_us - said.ttft
            _, headers, _ = await router.post_chat("a", stream=stream)
            assert "Server-Timing" not in headers


async def test_a_fault_of_the_routers_own_is_told_as_one(capfd: pytest.CaptureFixture[str]) -> None:
    """An exception in the router is a 500 in OpenAI's form, error.type on the span, a log traceback."""

    class FailingPolicy(RoundRobinPolicy):
        def choose_instance(self, *_: Any) -> types.Decision:
            raise LookupError("not the client's business")

    def install_failing_policy(built: app.RouterApp) -> None:
        routing = built.endpoint.routing
        routing._policies["mono"] = FailingPolicy(routing.prefill_policy.state)

    async with run_routed_instances(prepare=install_failing_policy) as (router, one):
        status, _, body = await router.post_chat()
        assert status == 500 and json.loads(body)["error"]["code"] == 500
        assert b"business" not in body
        (record,) = await router.wait_for_records(1)
        assert record.server is not None and record.server.error == "LookupError"
        assert router.app.endpoint.response_counts == {"5xx": 1}
    assert "not the client's business" in capfd.readouterr().err


def parse_refusal(body: bytes, status: int, kind: str) -> str:
    """The message of an error in OpenAI's form."""
    (error,) = json.loads(body).values()
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["type"]) == (status, kind)
    return str(error["message"])


async def test_api_key_opens_and_ends_here() -> None:
    """Only a configured key is accepted; instances get the upstream key, never the client's."""
    async with run_routed_instances(
        [InstancePlan({})], [InstancePlan({})], keys=["first", "zweit-ü"], key="own"
    ) as (router, e, pd):
        for given in ("", "Bearer ", "Bearer firs", "Bearer firstt", "Basic first", "first"):
            named = {"Authorization": given} if given else {}
            status, headers, body = await router.post_chat("a", **named)
            assert status == 401 and headers["WWW-Authenticate"] == "Bearer"
            parse_refusal(body, 401, "AuthenticationError")
        assert not e.received and not pd.received
        for given in ("Bearer first", "bearer first", "Bearer zweit-ü"):
            both = {"Authorization": given, "x-api-key": given.partition(" ")[2]}
            assert (await router.post_chat("a", **both))[0] == 200
        sent = [each.headers for each in e.received + pd.received]
        assert not any("x-api-key" in headers for headers in sent)
        assert {headers["Authorization"] for headers in sent} == {"Bearer own"}
        assert set(pd.models_authorizations) == {"Bearer own"}
        assert (await router.get_json("/v1/models", Authorization="Bearer first"))[0] == 200


async def test_without_keys_authorization_passes() -> None:
    """Without keys the client's Authorization header is passed on to instances."""
    async with run_routed_instances([InstancePlan({})]) as (router, one):
        await router.post_chat(Authorization="Bearer theirs")
        await router.post_chat()
        assert one.received[0].headers["Authorization"] == "Bearer theirs"
        assert "Authorization" not in one.received[1].headers
        assert (await router.get_json("/v1/models", Authorization="Bearer theirs"))[0] == 200
        assert one.models_authorizations[-1] == "Bearer theirs"


async def test_only_json_generates() -> None:
    """Another content type, or none, is a 415; parameters of the right one do not matter."""
    async with run_routed_instances([InstancePlan({})]) as (router, one):
        for kind in ("text/plain", "application/x-www-form-urlencoded", "", "application/jso"):
            status, _, body = await router.post_chat(Content_Type=kind)
            assert status == 415
            assert "application/json" in parse_refusal(body, 415, "BadRequestError")
        for kind in ("application/json; charset=utf-8", "Application/JSON"):
            assert (await router.post_chat(Content_Type=kind))[0] == 200
        path = "/v1/audio/transcriptions"
        assert (await router.post_body(path, b"--x", Content_Type="multipart/form-data"))[0] == 200
        assert len(one.received) == 3


@pytest.mark.parametrize("trust", [True, False])
async def test_callers_do_not_decide_what_is_sampled(trust: bool) -> None:
    """An untrusted caller's trace ID is kept, its sampled flag is not; it cannot claim to be a router."""
    for sampler, flag in (("parentbased_always_off", "01"), ("parentbased_always_on", "00")):
        settings = Settings(sampler=sampler, trust_sampled=trust)
        async with run_routed_instances([InstancePlan({})], settings=settings) as (router, one):
            named = {"traceparent": TRACEPARENT[:-2] + flag, "x_ttft_leg": "mono"}
            _, headers, _ = await router.post_chat(x_ttft_timing="1", **named)
            assert "Server-Timing" in headers
            _, trace, _, told = one.received[0].headers["traceparent"].split("-")
            assert trace == TRACEPARENT.split("-")[1]
            sampled = (flag == "01") == trust
            assert told == f"0{int(sampled)}"
            records = await router.wait_for_records(2) if sampled else router.records
            assert [each.outermost for each in records] == [not trust] * 2 * sampled


async def test_server_and_date_are_the_instances_own_and_once() -> None:
    """An answer has one Server and one Date at most, those of the instance that made it."""
    async with run_routed_instances([InstancePlan({})]) as (router, one):
        for stream in (True, False):
            _, headers, _ = await router.post_chat(stream=stream)
            assert len(headers.getall("Date")) == len(headers.getall("Server")) == 1
            assert "aiohttp" in headers["Server"]
        _, headers, _ = await router.post_chat(Content_Type="no")
        assert len(headers.getall("Server", [])) <= 1


async def test_half_a_surrogate_pair_is_no_model() -> None:
    """A name with half a surrogate pair, valid JSON but not UTF-8, is an unknown model like any other."""
    async with run_routed_instances() as (router, one):
        await router.get_json("/v1/models")
        for body in (b'{"model": "\\ud800"}', b'{"model": "\\ud800", "top_p": NaN}'):
            status, _, data = await router.post_body("/v1/chat/completions", body)
            assert status == 404 and "does not exist" in parse_refusal(data, 404, "NotFoundError")
        assert len(await router.wait_for_records(2)) == 2 and not one.received


async def test_models_are_told_and_learnt_for_the_clients_key() -> None:
    """A wrong key gets the instances' 401, not cached models; with the right one a new model is found."""
    async with run_routed_instances([InstancePlan({}, models_key="theirs")]) as (router, one):
        right = {"Authorization": "Bearer theirs"}
        assert (await router.get_json("/v1/models", **right))[0] == 200
        for given in ({}, {"Authorization": "Bearer other"}):
            async with router.client.get(f"{router.url}/v1/models", headers=given) as response:
                assert response.status == 401
                parse_refusal(await response.read(), 401, "AuthenticationError")
        one.plan.models = ("tiny", "adapter")
        body = {"model": "adapter", "messages": []}
        assert (await router.post_body("/v1/chat/completions", body, **right))[0] == 200


ESCAPES = (
    "/v1/../metrics",
    "/v1/./chat/completions",
    "/v1/chat/..",
    "/v1/%2e%2e/sleep",
    "/v1/.%2E/sleep",
    "/v1/..%2fsleep",
    "/v1/chat%2Fcompletions",
    "/v1/a\\..\\..\\sleep",
    "/v1/a%5c..%5csleep",
    "/v1/a%00",
    "/v1/a%0d%0a",
    "http://other/v1/../sleep",
)


async def test_paths_that_mean_another_one() -> None:
    """Paths that an instance could resolve to one outside /v1 are refused and not forwarded."""
    async with run_routed_instances([InstancePlan({})]) as (router, one):
        for path in ESCAPES:
            data = raw_http.encode_request(path=path)
            response = await raw_http.send_bytes(router.url, data)
            assert raw_http.parse_status(response) == 400, path
            parse_refusal(response.partition(b"\r\n\r\n")[2], 400, "BadRequestError")
        for allowed in ("/v1/a..b/.c", "/v1/a%20b", "/v1/caf%C3%A9", "/v1/%63hat/completions"):
            data = raw_http.encode_request(path=allowed)
            assert raw_http.parse_status(await raw_http.send_bytes(router.url, data)) == 200
        assert len(one.received) == 4
        assert router.app.admission.refusal_counts == {"path": len(ESCAPES)}


async def test_a_name_that_no_instance_lists_is_no_label() -> None:
    """Unknown model names and paths of a client appear neither in span names nor in metric labels."""
    async with run_routed_instances([InstancePlan({})]) as (router, one):
        await fake_instances.wait_until(
            lambda: not any(each.models is None for each in router.fleet)
        )
        for path, model, status in (
            ("/v1/chat/completions", "made-up", 404),
            ("/v1/chat/completions", "tiny", 200),
            ("/v1/made-up/path", "tiny", 200),
        ):
            assert (await router.post_body(path, {"model": model}))[0] == status
        refused, served, odd = await router.wait_for_records(3)
        assert keys.MODEL not in refused.attributes
        assert served.attributes[keys.MODEL] == odd.attributes[keys.MODEL] == "tiny"
        assert [call.name for call in served.calls] == ["POST /v1/chat/completions"]
        assert [call.name for call in odd.calls] == ["POST /v1/{path:path}"]
        one.plan.status = 404
        assert (await router.post_body("/v1/embeddings", {"model": "made-up"}))[0] == 404
        assert keys.MODEL not in (await router.wait_for_records(4))[-1].attributes


async def test_refusals_are_counted() -> None:
    """Each refusal is counted by its reason, those of the proxy and those of the other endpoints."""
    async with run_routed_instances(keys=["k"]) as (router, one):
        key = {"Authorization": "Bearer k"}
        chat = "/v1/chat/completions"
        assert (await router.post_body(chat, b"{}"))[0] == 401
        assert (await router.post_body(chat, b"{}", **key, Content_Type="text/plain"))[0] == 415
        assert (await router.post_body(chat, b"[", **key))[0] == 400
        assert (await router.post_body(chat, {"model": "no"}, **key))[0] == 404
        status, _, told = await router.get_json("/nowhere")
        assert (status, told["error"]["type"]) == (404, "NotFoundError")
        assert (await router.get_json("/v1/models"))[0] == 401
        status, headers, body = await router.post_body("/metrics", b"")
        assert (status, headers["Allow"]) == (405, "GET")
        parse_refusal(body, 405, "BadRequestError")
        counts = {"key": 2, "media_type": 1, "json": 1, "model": 1, "not_found": 1, "method": 1}
        assert router.app.admission.refusal_counts == counts


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions/batch"])
@pytest.mark.parametrize("kind", ["application/json", "application/vnd.x+json; charset=utf-8"])
async def test_json_that_cannot_be_read_is_refused_on_every_path(path: str, kind: str) -> None:
    """JSON nested too deeply to parse is refused: transfer parameters could hide in it."""
    deep = b'{"kv_transfer_params": {"a": 1}, "deep": ' + b"[" * 3000 + b"]" * 3000 + b"}"
    async with run_routed_instances() as (router, one):
        _, _, body = await router.post_body(path, deep, Content_Type=kind)
        parse_refusal(body, 400, "BadRequestError")
        assert not one.received
