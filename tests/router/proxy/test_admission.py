# SPDX-License-Identifier: Apache-2.0
"""Who may use the router, what a caller may decide, and the form of the router's own refusals."""

from __future__ import annotations

import json

import pytest

from router import fake_instances, raw_http
from router.fake_instances import TRACEPARENT, InstancePlan, run_routed_instances
from ttft_otel.model.names import keys
from ttft_otel.tracing.settings import Settings


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
