# SPDX-License-Identifier: Apache-2.0
"""Instances that register: their leg, how they leave, and how they stand beside configured ones."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from router import fake_instances, fake_pair, registration_site
from router.fake_instances import STREAM_EVENTS, InstancePlan, wait_until
from router.registration_site import PROBE_INTERVAL_S
from ttft_otel.model.names import metric_names
from ttft_otel.router.control import registrations


def list_log_lines(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    """The log's lines with this word."""
    return [each for each in caplog.messages if word in each]


async def test_an_encoder_and_a_backend_that_announce_themselves_serve_an_image() -> None:
    """Roles as vLLM infers them: what is no encoder and no KV producer registers as `decode`."""
    async with registration_site.run_registrants([InstancePlan({}), InstancePlan({})]) as (
        site,
        encoder,
        backend,
    ):
        assert (await site.send_as_instance("decode", backend.url))[0] == 200
        status, _, body = await site.router.post_chat("http://x/a")
        assert (status, body) == (200, b"".join(STREAM_EVENTS))
        assert (await site.send_as_instance("encode", encoder.url))[0] == 200
        status, _, body = await site.router.post_chat("http://x/a", "http://x/b")
        assert (status, body) == (200, b"".join(STREAM_EVENTS))
        assert (len(encoder.received), len(backend.received)) == (2, 2)
        assert {each.leg for each in site.router.fleet} == {"encode", "prefill_decode"}


async def test_who_decodes_waits_for_prefill_instances_once_there_are_some(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A `decode` instance serves whole requests until prefill instances register, then only after them."""
    model = fake_pair.PairModel()
    async with (
        fake_pair.run_server(model, False) as p,
        fake_pair.run_server(model, True) as d,
        registration_site.run_registration_site("--first-token", "off") as site,
    ):
        assert await site.send_as_launcher("decode", d.url) == (
            200,
            {"registered": True, "role": "decode", "url": d.url},
        )
        both = fake_pair.PairFleet(model, p, d, site.router)
        assert (await both.send_request()).texts == list(fake_pair.ANSWER_TOKENS)
        assert (await site.list_instances())["routing"]["leg"] == "prefill_decode"
        await site.send_as_launcher("prefill", p.url)
        assert list_log_lines(caplog, "is a decode instance now")
        assert (await both.send_request()).texts == list(fake_pair.ANSWER_TOKENS)
        assert (len(p.received), len(d.received)) == (1, 2)
        assert (await site.list_instances())["routing"]["leg"] == "prefill"
        assert sorted(each.leg for each in site.router.fleet) == ["decode", "prefill"]
        await site.send_as_launcher("prefill", p.url, "DELETE")
        answer = await both.send_request()
        assert answer.status == 503
        message = json.loads(answer.body)["error"]["message"]
        assert message == "There is no prefill instance."
        status, _, said = await site.router.get_json("/readyz")
        assert (status, said["reason"]) == (503, "no instance registered yet for prefill")
        # with the last of the two gone, who registers decides anew
        await site.send_as_launcher("decode", d.url, "DELETE")
        await site.send_as_launcher("prefill_decode", d.url)
        assert (await both.send_request()).texts == list(fake_pair.ANSWER_TOKENS)


async def test_a_router_without_instances_says_what_it_waits_for() -> None:
    """Not ready, and requests are refused naming the missing leg, until the first instance registers."""
    async with registration_site.run_registrants([InstancePlan({})]) as (site, one):
        status, _, said = await site.router.get_json("/readyz")
        assert (status, said) == (
            503,
            {
                "status": "not ready",
                "legs": {},
                "reason": "no instance registered yet for prefill_decode",
            },
        )
        status, headers, body = await site.router.post_chat()
        assert (status, headers["Retry-After"]) == (503, "1")
        assert b"There is no prefill_decode instance." in body
        assert (await site.router.get_json("/v1/models"))[0] == 502
        await site.send_as_launcher("prefill_decode", one.url)
        status, _, said = await site.router.get_json("/readyz")
        assert (status, said["status"], "reason" in said) == (200, "ready", False)
        assert (await site.router.post_chat())[0] == 200
        assert (await site.router.get_json("/v1/models"))[2]["data"] == [{"id": "tiny"}]


async def test_a_prefill_instance_alone_is_not_enough() -> None:
    """With prefill instances only, the router is not ready: nothing could decode."""
    async with registration_site.run_registrants([InstancePlan({})]) as (site, p):
        await site.send_as_launcher("prefill", p.url)
        status, _, said = await site.router.get_json("/readyz")
        assert (status, said["reason"]) == (503, "no instance registered yet for decode")
        assert (await site.router.post_chat())[0] == 503


async def test_who_deregisters_ends_what_it_has(caplog: pytest.LogCaptureFixture) -> None:
    """After deregistration open streams are completed, new requests go elsewhere, one log line says so."""
    async with registration_site.run_registrants([InstancePlan(gap_s=0.5), InstancePlan({})]) as (
        site,
        a,
        b,
    ):
        await site.send_as_instance("decode", a.url)
        stream = asyncio.create_task(site.router.post_chat())
        await wait_until(lambda: bool(a.received))
        await site.send_as_instance("decode", b.url)
        status, said = await site.send_as_instance("decode", a.url, "delete")
        assert (status, said["found"], said["unregistered"]) == (200, True, a.url)
        assert (await site.map_states())[f"prefill_decode {a.url}"] == "draining"
        (line,) = list_log_lines(caplog, "deregistered")
        assert f"prefill_decode instance {a.url}" in line and "the 1 in flight may finish" in line
        for _ in range(3):
            await site.router.post_chat()
        assert (len(a.received), len(b.received)) == (1, 3)
        assert (await stream)[2] == b"".join(STREAM_EVENTS)
        site.registrations.sweep_once()
        assert await site.map_states() == {f"prefill_decode {b.url}": "healthy"}
        assert (await site.send_as_instance("decode", a.url, "delete"))[1]["found"] is False


@pytest.mark.parametrize("adds", ["instance", "operator"])
async def test_who_is_added_again_while_it_drains_stays(adds: str) -> None:
    """An instance that registers again, or is added by an operator, while it drains is kept."""
    async with registration_site.run_registrants([InstancePlan(gap_s=0.3)]) as (site, a):
        await site.send_as_launcher("prefill_decode", a.url)
        stream = asyncio.create_task(site.router.post_chat())
        await wait_until(lambda: bool(a.received))
        await site.send_as_launcher("", a.url, "DELETE")
        if adds == "instance":
            await site.send_as_instance("decode", a.url)
            assert await site.map_states() == {f"prefill_decode {a.url}": "healthy"}
        else:
            order = json.dumps({"action": "add", "leg": "prefill_decode", "url": a.url})
            assert (await site.post_body(order))[0] == 200
        await stream
        site.registrations.sweep_once()
        assert await site.map_states() == {f"prefill_decode {a.url}": "healthy"}


async def test_announcements_are_repeated(caplog: pytest.LogCaptureFixture) -> None:
    """Repeated registrations add no second instance or log line, and undo no operator's order."""
    async with registration_site.run_registrants([InstancePlan({})]) as (site, a):
        assert (await site.send_as_instance("decode", a.url))[1]["registered"] is True
        order = json.dumps({"action": "drain", "leg": "prefill_decode", "url": a.url})
        assert (await site.post_body(order))[0] == 200
        for _ in range(3):
            assert (await site.send_as_instance("decode", a.url + "/"))[1]["registered"] is False
        assert await site.map_states() == {f"prefill_decode {a.url}": "draining"}
        assert len(list_log_lines(caplog, "registered")) == 1
        async with site.router.client.get(f"{site.router.url}/metrics") as response:
            text = await response.text()
        for result, times in (("registered", 1), ("renewed", 3), ("forgotten", 0)):
            metric = metric_names.ROUTER_REGISTRATIONS
            assert f'{metric}_total{{result="{result}"}} {times}.0' in text


async def test_who_stays_unreachable_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    """An unreachable instance is removed after --register-ttl, and is back when it registers again."""
    async with registration_site.run_registrants(
        [InstancePlan({}), InstancePlan({})], "--register-ttl", "0.4"
    ) as (site, a, b):
        await site.send_as_launcher("prefill_decode", a.url)
        await site.send_as_launcher("prefill_decode", b.url)
        a.plan.health_status = 500
        key = f"prefill_decode {a.url}"
        await wait_until(lambda: len(site.router.fleet) == 2)
        while (await site.map_states())[key] != "failed":
            await asyncio.sleep(PROBE_INTERVAL_S)
        assert (await site.list_instances())["prefill_decode"] == {
            "live": [b.url],
            "evicted": [a.url],
        }
        await wait_until(lambda: len(site.router.fleet) == 1)
        (line,) = list_log_lines(caplog, "forgot")
        assert key.replace(" ", " instance ") in line and "removed until it registers again" in line
        assert (await site.list_instances())["prefill_decode"] == {
            "live": [b.url],
            "evicted": [],
        }
        a.plan.health_status = 200
        assert (await site.send_as_launcher("prefill_decode", a.url))[1]["registered"] is True
        assert (await site.map_states())[key] == "healthy"


async def test_with_a_ttl_of_zero_nobody_is_forgotten() -> None:
    """--register-ttl 0, as vLLM's --evicted-ttl 0, never removes an instance."""
    gone = fake_instances.find_unused_url()
    async with registration_site.run_registration_site("--register-ttl", "0") as site:
        await site.send_as_launcher("prefill_decode", gone)
        while (await site.map_states())[f"prefill_decode {gone}"] != "failed":
            await asyncio.sleep(PROBE_INTERVAL_S)
        for _ in range(3):
            site.registrations.sweep_once()
        assert (await site.list_instances())["prefill_decode"]["evicted"] == [gone]


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A router's configuration file, empty at first."""
    (file := tmp_path / "router.yaml").touch()
    return file


async def test_configuration_and_registration_stand_side_by_side(
    config_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A URL both configured and registered is one instance; SIGHUP removes no registered one."""
    a, b, c = fake_instances.find_unused_urls(3)

    config_file.write_text(f"backend: [{a}]\n")
    async with registration_site.run_registration_site("--config", str(config_file)) as site:

        def list_urls() -> list[str]:
            return [each.url for each in site.router.fleet.get("prefill_decode")]

        for url in (a, b):
            assert (await site.send_as_instance("decode", url))[1]["registered"] is True
        assert list_urls() == [a, b]
        said = (await site.list_instances())["instances"]
        assert [each["registered"] for each in said] == [True, True]
        one = site.router.fleet.find_instance("prefill_decode", b)
        config_file.write_text(f"backend: [{c}]\n")
        site.reload()
        assert list_urls() == [c, a, b]
        assert site.router.fleet.find_instance("prefill_decode", b) is one
        said = (await site.list_instances())["instances"]
        assert [each["registered"] for each in said] == [False, True, True]
        await site.send_as_instance("decode", a, "delete")
        config_file.write_text(f"backend: [{c}, {b}]\n")
        site.reload()
        assert list_urls() == [c, b]
        # who is configured stays, and gets nothing until it says that it is back
        await site.send_as_instance("decode", b, "delete")
        assert list_log_lines(caplog, "drained until it registers again")
        assert (await site.map_states())[f"prefill_decode {b}"] == "draining"
        site.registrations.sweep_once()
        await site.send_as_instance("decode", b)
        assert list_urls() == [c, b]
        assert (await site.map_states())[f"prefill_decode {b}"] != "draining"


async def test_a_configuration_that_does_not_fit_who_registered_changes_nothing(
    config_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file with separate prefill and decode is refused while combined instances are registered."""
    a, p, d = fake_instances.find_unused_urls(3)

    config_file.write_text("retries: 1\n")
    async with registration_site.run_registration_site("--config", str(config_file)) as site:
        await site.send_as_launcher("prefill_decode", a)
        config_file.write_text(f"prefill: [{p}]\ndecode: [{d}]\n")
        site.reload()
        (line,) = list_log_lines(caplog, "configuration reload failed")
        assert (
            "registered instances have the roles prefill_decode" in line
            and "deregister them" in line
        )
        assert [each.url for each in site.router.fleet] == [a]
        await site.send_as_launcher("", a, "DELETE")
        await site.send_as_instance("decode", a)
        site.reload()
        assert [each.url for each in site.router.fleet] == [p, d, a]
        assert [each.leg for each in site.router.fleet] == ["prefill", "decode", "decode"]
        config_file.write_text(f"backend: [{p}]\n")
        site.reload()
        assert len(list_log_lines(caplog, "configuration reload failed")) == 2


async def test_roles_that_cannot_be_mixed() -> None:
    """Combined instances beside separate prefill and decode are refused: 409 names what is there."""
    async with registration_site.run_registration_site() as site:
        one, two, three = fake_instances.find_unused_urls(3)
        await site.send_as_launcher("prefill_decode", one)
        for role in ("prefill", "decode"):
            status, said = await site.send_as_launcher(role, two)
            assert status == said["error"]["code"] == 409
            assert "has prefill_decode instances" in said["error"]["message"]
        await site.send_as_launcher("", one, "DELETE")
        await site.send_as_launcher("prefill", two)
        status, said = await site.send_as_launcher("prefill_decode", three)
        assert status == 409 and "prefill and decode instances" in said["error"]["message"]
        assert (await site.send_as_launcher("encode", three))[0] == 200
    async with registration_site.run_registration_site("--backend", one) as site:
        status, said = await site.send_as_launcher("prefill", two)
        assert status == 409 and "has prefill_decode instances" in said["error"]["message"]
        assert (await site.send_as_launcher("decode", two))[0] == 200
        assert {each.leg for each in site.router.fleet} == {"prefill_decode"}
    async with registration_site.run_registration_site("--prefill", one, "--decode", two) as site:
        assert (await site.send_as_launcher("prefill_decode", three))[0] == 409
        assert (await site.send_as_launcher("decode", three))[0] == 200
        assert [each.url for each in site.router.fleet.get("decode")] == [two, three]


async def test_an_instance_has_one_role() -> None:
    """An instance that registers with another role moves to that role's leg."""
    async with registration_site.run_registrants([InstancePlan({})]) as (site, a):
        await site.send_as_instance("decode", a.url)
        assert (await site.send_as_instance("encode", a.url))[0] == 200
        assert await site.map_states() == {f"encode {a.url}": "healthy"}
        assert (await site.send_as_instance("prefill", a.url))[0] == 200
        assert await site.map_states() == {f"prefill {a.url}": "healthy"}


async def test_there_is_a_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """One instance more than the limit gets 429; registered ones may still repeat theirs."""
    monkeypatch.setattr(registrations, "MAX_REGISTERED_INSTANCES", 2)

    async with registration_site.run_registration_site() as site:
        one, two, three = fake_instances.find_unused_urls(3)
        for url in (one, two, two):
            assert (await site.send_as_launcher("encode", url))[0] == 200
        status, said = await site.send_as_launcher("encode", three)
        assert status == said["error"]["code"] == 429
        assert "2 instances are registered" in said["error"]["message"]
        await site.send_as_launcher("", one, "DELETE")
        assert (await site.send_as_launcher("encode", three))[0] == 200


async def test_a_failed_instance_that_announces_itself_is_asked_at_once() -> None:
    """A failed instance that registers again is probed at once, not at the next interval."""
    async with registration_site.run_registrants([InstancePlan({})], "--health-interval", "60") as (
        site,
        a,
    ):
        a.plan.health_status = 503
        await site.send_as_instance("decode", a.url)
        (one,) = site.router.fleet
        await wait_until(lambda: one.state == "failed")
        a.plan.health_status = 200
        await site.send_as_instance("decode", a.url)
        await wait_until(lambda: one.state == "healthy")
        assert one.attempt_results == {}


async def test_policies_follow_the_legs() -> None:
    """The chosen policy applies to the leg that prefills, also when that leg changes."""
    flags = ("--routing-logic", "ttft", "--encoder-routing-logic", "ttft")
    async with registration_site.run_registrants([InstancePlan({})], *flags) as (site, e):
        d, p = fake_instances.find_unused_url(), fake_instances.find_unused_url()
        routing = site.router.app.endpoint.routing
        chosen = routing.prefill_policy
        for role, url in (("decode", d), ("encode", e.url), ("prefill", p)):
            await site.send_as_launcher(role, url)
        said = await site.list_instances()
        assert said["routing"] == {"leg": "prefill", "logic": "ttft", "encoders": "ttft"}
        assert routing.prefill_policy is chosen and routing.get_leg_policy("decode") is not chosen
        with_books = [each["leg"] for each in said["instances"] if "pending" in each]
        assert sorted(with_books) == ["encode", "prefill"]
