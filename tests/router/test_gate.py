# SPDX-License-Identifier: Apache-2.0
"""Who may come in, what a caller may decide, and what the router's own refusals look like."""

from __future__ import annotations

import asyncio
import json

import pytest

from router import fakes
from router.fakes import PARENT, Plan
from ttft_otel.settings import Settings


def refused(body: bytes, status: int, kind: str) -> str:
    """The message of an error in OpenAI's form."""
    (error,) = json.loads(body).values()
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["type"]) == (status, kind)
    return str(error["message"])


def test_api_key_opens_and_ends_here() -> None:
    """Only one of the keys opens; instances never see it, they get their own."""

    async def scenario() -> None:
        async with (
            fakes.instance(Plan({})) as e,
            fakes.instance(Plan({})) as pd,
            fakes.router([pd.url], [e.url], keys=["first", "zweit-ü"], key="own") as router,
        ):
            for given in ("", "Bearer ", "Bearer firs", "Bearer firstt", "Basic first", "first"):
                named = {"Authorization": given} if given else {}
                status, headers, body = await router.chat("a", **named)
                assert status == 401 and headers["WWW-Authenticate"] == "Bearer"
                refused(body, 401, "AuthenticationError")
            assert not e.seen and not pd.seen
            for given in ("Bearer first", "bearer first", "Bearer zweit-ü"):
                both = {"Authorization": given, "x-api-key": given.partition(" ")[2]}
                assert (await router.chat("a", **both))[0] == 200
            assert not any("x-api-key" in each.headers for each in e.seen + pd.seen)
            assert {each.headers["Authorization"] for each in e.seen + pd.seen} == {"Bearer own"}
            assert set(pd.asked) == {"Bearer own"}
            for path, guarded in (("/v1/models", 1), ("/ttft_report/x", 1), ("/healthz", 0)):
                assert ((await router.get(path))[0] == 401) == bool(guarded)
            assert (await router.get("/v1/models", Authorization="Bearer first"))[0] == 200

    fakes.run(scenario)


def test_without_keys_authorization_passes() -> None:
    """Instances that check keys themselves get the client's."""

    async def scenario() -> None:
        async with fakes.instance(Plan({})) as one, fakes.router([one.url]) as router:
            await router.chat(Authorization="Bearer theirs")
            await router.chat()
            assert one.seen[0].headers["Authorization"] == "Bearer theirs"
            assert "Authorization" not in one.seen[1].headers
            assert (await router.get("/v1/models", Authorization="Bearer theirs"))[0] == 200
            assert one.asked[-1] == "Bearer theirs"

    fakes.run(scenario)


def test_only_json_generates() -> None:
    """Another content type, or none, is a 415; parameters of the right one do not matter."""

    async def scenario() -> None:
        async with fakes.instance(Plan({})) as one, fakes.router([one.url]) as router:
            for kind in ("text/plain", "application/x-www-form-urlencoded", "", "application/jso"):
                status, _, body = await router.chat(Content_Type=kind)
                assert status == 415 and "application/json" in refused(body, 415, "BadRequestError")
            for kind in ("application/json; charset=utf-8", "Application/JSON"):
                assert (await router.chat(Content_Type=kind))[0] == 200
            path = "/v1/audio/transcriptions"
            assert (await router.post(path, b"--x", Content_Type="multipart/form-data"))[0] == 200
            assert len(one.seen) == 3

    fakes.run(scenario)


@pytest.mark.parametrize("trust", [True, False])
def test_callers_do_not_decide_what_is_sampled(trust: bool) -> None:
    """An untrusted caller keeps its trace id, not its flag; nor does it make us an inner router."""

    async def scenario() -> None:
        for sampler, flag in (("parentbased_always_off", "01"), ("parentbased_always_on", "00")):
            settings = Settings(sampler=sampler, trust=trust)
            async with (
                fakes.instance(Plan({})) as one,
                fakes.router([one.url], settings=settings) as router,
            ):
                named = {"traceparent": PARENT[:-2] + flag, "x_ttft_leg": "mono"}
                _, headers, _ = await router.chat(x_ttft_timing="1", **named)
                assert "Server-Timing" in headers
                _, trace, _, told = one.seen[0].headers["traceparent"].split("-")
                assert trace == PARENT.split("-")[1]
                sampled = (flag == "01") == trust
                assert told == f"0{int(sampled)}"
                records = await router.settled(2) if sampled else router.records
                assert [each.outermost for each in records] == [not trust] * 2 * sampled

    fakes.run(scenario)


def test_server_and_date_are_the_instances_own_and_once() -> None:
    """An answer has one Server and one Date at most, those of the instance that made it."""

    async def scenario() -> None:
        async with fakes.instance(Plan({})) as one, fakes.router([one.url]) as router:
            for stream in (True, False):
                _, headers, _ = await router.chat(stream=stream)
                assert len(headers.getall("Date")) == len(headers.getall("Server")) == 1
                assert "aiohttp" in headers["Server"]
            _, headers, _ = await router.chat(Content_Type="no")
            assert len(headers.getall("Server", [])) <= 1

    fakes.run(scenario)


def test_an_answer_cut_short_is_cut_for_the_client() -> None:
    """A plain answer that ends before its Content-Length does so for the client too."""

    async def scenario() -> None:
        async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 201 Odd\r\nContent-Length: 10\r\nX-Own: kept\r\n\r\nhalf")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(half, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with fakes.router([url]) as router:
            with pytest.raises(Exception, match="payload"):
                await router.chat(stream=False)
            async with router.client.post(
                f"{router.url}/v1/chat/completions", json=fakes.chat()
            ) as response:
                assert (response.status, response.headers["X-Own"]) == (201, "kept")
                assert await response.content.read(4) == b"half"
            found = [each.server for each in await router.settled(2) if each.server]
            assert found[0].error == "ClientPayloadError"
        server.close()

    fakes.run(scenario)


def test_nonsense_is_never_an_error_of_ours() -> None:
    """Odd methods, paths, queries and headers are answered below 500."""

    async def scenario() -> None:
        async with fakes.instance(Plan({})) as one, fakes.router([one.url]) as router:
            await router.get("/readyz")
            for path in ("/v1/", "/v1//x", "/v1/%00", "/v1/a%2f..%2fb?x=%ff&=", "/v1/é", "/v2/x"):
                for body in (b"", b"\x00", b"null", b'"x"', b'{"model": 3, "messages": {}}'):
                    assert (await router.post(path, body))[0] < 500
            for method in ("PUT", "PATCH", "OPTIONS", "HEAD", "GET", "BREW"):
                url = f"{router.url}/v1/chat/completions"
                async with router.client.request(method, url) as response:
                    assert response.status in (400, 404, 405)
            odd = {"x_request_id": "é" * 9, "traceparent": "00-" + "f" * 300, "cookie": "a=\t;;"}
            assert (await router.chat(**odd))[0] == 200

    fakes.run(scenario)


def test_half_a_surrogate_pair_is_no_model() -> None:
    """JSON lets it through, UTF-8 does not: it is answered, traced and counted like any other name."""

    async def scenario() -> None:
        async with fakes.instance() as one, fakes.router([one.url]) as router:
            await router.get("/v1/models")
            for body in (b'{"model": "\\ud800"}', b'{"model": "\\ud800", "top_p": NaN}'):
                status, _, data = await router.post("/v1/chat/completions", body)
                assert status == 404 and "does not exist" in refused(data, 404, "NotFoundError")
            assert len(await router.settled(2)) == 2 and not one.seen

    fakes.run(scenario)


def test_models_are_told_and_learnt_for_the_clients_key() -> None:
    """Another key gets the instances' 401, not what they told before; a new model is found with it."""

    async def scenario() -> None:
        async with fakes.instance(Plan({}, key="theirs")) as one, fakes.router([one.url]) as router:
            right = {"Authorization": "Bearer theirs"}
            assert (await router.get("/v1/models", **right))[0] == 200
            for given in ({}, {"Authorization": "Bearer other"}):
                async with router.client.get(f"{router.url}/v1/models", headers=given) as response:
                    assert response.status == 401
                    refused(await response.read(), 401, "AuthenticationError")
            one.plan.models = ("tiny", "adapter")
            body = {"model": "adapter", "messages": []}
            assert (await router.post("/v1/chat/completions", body, **right))[0] == 200

    fakes.run(scenario)


def test_a_path_that_is_nowhere_is_refused_in_the_same_form() -> None:
    """Another path, and another method on one of ours."""

    async def scenario() -> None:
        async with fakes.instance(Plan({})) as one, fakes.router([one.url]) as router:
            for path in ("/v1/nothing", "/v1/chat/completions", "/"):
                async with router.client.get(f"{router.url}{path}") as response:
                    refused(await response.read(), 404, "NotFoundError")
            status, headers, body = await router.post("/healthz", {})
            assert (status, headers["Allow"]) == (405, "GET")
            refused(body, 405, "BadRequestError")
            assert not one.seen

    fakes.run(scenario)
