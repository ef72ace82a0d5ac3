# SPDX-License-Identifier: Apache-2.0
"""Registrations that instances and launchers send to /instances: tokens, refusals and their texts."""

from __future__ import annotations

import base64
import json

import click
import pytest
from yarl import URL

from router import fake_instances, registration_site
from router.registration_site import REGISTER_TOKEN
from ttft_otel.commands.router import router_options
from ttft_otel.commands.router.command import build_router, command
from ttft_otel.http import head_checks
from ttft_otel.router.control import admin
from ttft_otel.router.control.registrations import REGISTRABLE_ROLES
from ttft_otel.router.routing.routing_service import RoutingService
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.router.upstream.upstream_client import UpstreamClient
from ttft_otel.tracing import settings

VALID_ANNOUNCEMENT = {"role": "encode", "url": "http://10.0.0.7:8001"}


def build_basic_auth(text: str) -> dict[str, str]:
    """Basic authentication with this user and password."""
    return {"Authorization": f"Basic {base64.b64encode(text.encode()).decode()}"}


async def test_the_token_may_be_in_three_places() -> None:
    """The token is accepted in vLLM's header, as a bearer token, and as the URL's user information."""
    async with registration_site.run_registration_site() as site:
        for headers in (
            {"X-API-Key": REGISTER_TOKEN},
            {"Authorization": f"Bearer {REGISTER_TOKEN}"},
            build_basic_auth(f"whoever:{REGISTER_TOKEN}"),
        ):
            status, _ = await site.send_as_launcher("encode", VALID_ANNOUNCEMENT["url"], **headers)
            assert status == 200
            status, _ = await site.send_as_launcher(
                "", VALID_ANNOUNCEMENT["url"], "DELETE", **headers
            )
            assert status == 200
        assert (await site.send_as_instance("encode", VALID_ANNOUNCEMENT["url"]))[0] == 200
        for wrong in (
            {"X-API-Key": REGISTER_TOKEN[:-1]},
            {"X-API-Key": ""},
            {"X-API-Key": "\u00e9"},
            {"Authorization": REGISTER_TOKEN},
            {"Authorization": "Bearer"},
            {"Authorization": "Basic !!!"},
            {"Authorization": "Basic \u00e9"},
            build_basic_auth(REGISTER_TOKEN),
            build_basic_auth(f"{REGISTER_TOKEN}:"),
            {"X-Nothing": "1"},
        ):
            for method in ("POST", "DELETE"):
                status, said = await site.send_as_launcher(
                    "encode", VALID_ANNOUNCEMENT["url"], method, **wrong
                )
                assert status == said["error"]["code"] == 401
                assert "--register-token" in said["error"]["message"]
        assert [each.url for each in site.router.fleet] == [VALID_ANNOUNCEMENT["url"]]


async def test_two_tokens_for_two_doors() -> None:
    """The registration token may only register and list, the admin token may do everything."""
    async with registration_site.run_registration_site("--admin-token", "boss") as site:
        operator = {"Authorization": "Bearer boss"}
        assert (await site.send_as_launcher("encode", VALID_ANNOUNCEMENT["url"], **operator))[
            0
        ] == 200
        order = json.dumps({"action": "drain", "leg": "encode", "url": VALID_ANNOUNCEMENT["url"]})
        status, said = await site.post_body(order)
        assert status == 401 and "admin token" in said
        assert (await site.list_instances(**{"X-API-Key": REGISTER_TOKEN}))["encode"] == {
            "live": [VALID_ANNOUNCEMENT["url"]],
            "evicted": [],
        }
        assert "error" in await site.list_instances()
        status, said = await site.post_body(order, **{"X-API-Key": "", **operator})
        assert status == 200


async def test_a_page_in_a_browser_registers_nothing() -> None:
    """A request with a foreign Host header cannot register anything, whatever its token."""
    async with registration_site.run_registration_site() as site:
        status, said = await site.post_body(json.dumps(VALID_ANNOUNCEMENT), Host="evil.example")
        assert status == 403 and "loopback address" in said
        assert not list(site.router.fleet)


async def test_wrong_announcements_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Each malformed one is refused with its remedy, changes no instance, and cannot forge a log line."""
    roles = ", ".join(REGISTRABLE_ROLES)
    url = "write it like http://10.0.0.7:8001"
    wrong = (
        (b"{", "Input data was truncated"),
        (b"\xff", "malformed"),
        (b"[" * 60_000, ""),
        (b"[]", ""),
        (json.dumps({"url": VALID_ANNOUNCEMENT["url"]}), "`action`"),
        (json.dumps({"role": "encode"}), "`url`"),
        (json.dumps(VALID_ANNOUNCEMENT | {"role": 1}), "role"),
        (json.dumps(VALID_ANNOUNCEMENT | {"role": "embed"}), f"it is one of {roles}"),
        (json.dumps(VALID_ANNOUNCEMENT | {"role": "x" * 10_000}), f"it is one of {roles}"),
        (json.dumps(VALID_ANNOUNCEMENT | {"ec_zmq_addrs": "tcp://x"}), "ec_zmq_addrs"),
        *(
            (json.dumps(VALID_ANNOUNCEMENT | {"url": each}), url)
            for each in (
                "10.0.0.7:8001",
                "http://10.0.0.7",
                "http://:8001",
                "http://10.0.0.7:0",
                "http://10.0.0.7:99999",
                "http://10.0.0.7:x",
                "http://u:p@10.0.0.7:8001",
                "http://:p@10.0.0.7:8001",
                "http://10.0.0.7:8001?a=b",
                "http://10.0.0.7:8001/#a",
                "ftp://10.0.0.7:8001",
                "file:///etc/passwd",
                "http://[::1:8001",
                "http://10.0.0.7:8001/\nttft-otel: forged",
                "http://10.0.0.7:8001/\u00e9",
                "http://10.0.0.7:8001/" + "a" * 2048,
                "",
            )
        ),
    )

    async with registration_site.run_registration_site() as site:
        for body, words in wrong:
            status, said = await site.post_body(body)
            assert status == 400, body[:80]
            assert words in said
        status, _ = await site.post_body(b" " * 70_000)
        assert status == 413
        status, _ = await site.post_body(b"role=encode", **{"Content-Type": "text/plain"})
        assert status == 415
        for query in ("", "?url="):
            to = URL(f"{site.admin_url}/instances{query}", encoded=True)
            async with site.router.client.delete(
                to, headers={"X-API-Key": REGISTER_TOKEN}, data=b"{}"
            ) as response:
                assert response.status == 400
                assert "DELETE /instances?url=URL" in await response.text()
        assert not list(site.router.fleet)
        assert "\n" not in "".join(caplog.messages)


async def test_what_it_cannot_use_it_says(caplog: pytest.LogCaptureFixture) -> None:
    """Addresses for pushed encodings are not forwarded to encoders; the log says so once."""
    async with registration_site.run_registration_site() as site:
        record = VALID_ANNOUNCEMENT | {
            "role": "decode",
            "ec_zmq_addrs": ["tcp://10.0.0.7:19019"],
        }
        for _ in range(2):
            assert (await site.post_body(json.dumps(record)))[0] == 200
        assert sum("ec_zmq_addrs" in each for each in caplog.messages) == 1


async def test_the_instances_are_those_of_the_proxy() -> None:
    """GET has URLs by vLLM's role names, as vLLM's EPD proxy has, and our own description beside it."""
    async with registration_site.run_registration_site() as site:
        urls = fake_instances.find_unused_urls(2)
        await site.send_as_instance("encode", urls[0])
        await site.send_as_instance("decode", urls[1])
        said = await site.list_instances()
        found = {role: sum(said[role].values(), []) for role in REGISTRABLE_ROLES}
        assert found == {
            "encode": [urls[0]],
            "prefill": [],
            "decode": [urls[1]],
            "prefill_decode": [],
        }
        assert [each["leg"] for each in said["instances"]] == ["prefill_decode", "encode"]


async def test_without_register_nobody_registers() -> None:
    """Without --register the admin API has no DELETE, and refuses registrations."""
    async with fake_instances.run_routed_instances() as (router, a):
        async with admin.serve_admin(
            router.app.endpoint.upstream, router.app.endpoint.routing, 0
        ) as port:
            to = f"http://127.0.0.1:{port}/instances"
            async with router.client.delete(f"{to}?url={a.url}") as response:
                assert response.status == 405 and "--register" in await response.text()
            async with router.client.post(to, json=VALID_ANNOUNCEMENT) as response:
                assert response.status == 400
            async with router.client.get(to) as response:
                said = await response.json()
                assert set(said) == {"routing", "instances"}
                assert "registered" not in said["instances"][0]
        assert [each.url for each in router.fleet] == [a.url]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--register"], "--register needs --admin-port PORT"),
        (["--register", "--admin-port", "0"], "--register-token TOKEN"),
        (["--register", "--register-token", "x"], "--register needs --admin-port PORT"),
        (["--backend", "http://a:1", "--register-token", "x"], "--register-token needs --register"),
        (
            ["--backend", "http://a:1", "--admin-port", "0", "--admin-host", "0.0.0.0"],
            "--admin-host 0.0.0.0 can be reached from other machines: it needs --admin-token",
        ),
    ],
)
def test_no_door_is_left_open(flags: list[str], words: str) -> None:
    """--register needs an admin port and a token; an address that others reach needs the admin token."""
    wanted = router_options.RouterOptions.from_flags(command.make_context("router", flags).params)
    with pytest.raises(click.UsageError, match=words):
        build_router(wanted, settings.Settings(), None)


def test_tokens_are_visible() -> None:
    """Tokens with characters that no header can carry are refused at the start."""
    for token in ("a b", "\u00e9", "a\n"):
        with pytest.raises(click.BadParameter, match="visible ASCII"):
            command.make_context("router", ["--register-token", token])


async def test_other_machines_reach_it_where_it_is_told_so() -> None:
    """With --admin-host any Host header is accepted, and every request needs a token."""
    for host, own in (("::1", True), ("127.0.0.2", True), ("localhost", True), ("router", False)):
        assert head_checks.is_loopback(host) is own
    with pytest.raises(ValueError, match="needs a token"):
        routing = RoutingService(InstancePool({}))
        admin.AdminApi(UpstreamClient(routing.pool, routing), routing, is_loopback_only=False)

    flags = ("--admin-host", "0.0.0.0", "--admin-token", "boss")
    async with registration_site.run_registration_site(*flags) as site:
        assert "error" in await site.list_instances(Host="router:9001")
        assert "error" not in await site.list_instances(
            Host="router:9001", Authorization="Bearer boss"
        )
        assert (await site.send_as_instance("encode", VALID_ANNOUNCEMENT["url"]))[0] == 200
