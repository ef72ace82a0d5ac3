# SPDX-License-Identifier: Apache-2.0
"""The admin API and the metrics of routing: instances come and go while requests run, caches are counted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import click
import pytest

from router import fake_instances, scripted_knowledge
from router.fake_instances import STREAM_EVENTS, InstancePlan, run_routed_instances, wait_until
from router.scripted_knowledge import build_routing_factory
from ttft_otel.commands.router.command import build_router, command
from ttft_otel.commands.router.router_options import RouterOptions
from ttft_otel.model.names import metric_names
from ttft_otel.router.control import admin
from ttft_otel.tracing.settings import Settings


class AdminClient:
    """The admin port as an operator has it."""

    def __init__(self, client: aiohttp.ClientSession, url: str) -> None:
        self.client, self.url = client, url

    async def list_instances(self, **headers: str) -> tuple[int, Any]:
        """GET /instances."""
        async with self.client.get(self.url, headers=headers) as response:
            return response.status, await response.json()

    async def post_order(self, action: str, url: str, leg: str = "mono") -> tuple[int, Any]:
        """POST /instances."""
        order = {"action": action, "leg": leg, "url": url}
        async with self.client.post(self.url, json=order) as response:
            return response.status, await response.json()


@contextlib.asynccontextmanager
async def open_admin(
    router: fake_instances.RunningRouter, token: str = "", host: str = admin.DEFAULT_ADMIN_HOST
) -> AsyncIterator[AdminClient]:
    """The admin port of this router."""
    async with admin.serve_admin(router.app.endpoint.upstream, 0, token, host) as port:
        yield AdminClient(router.client, f"http://127.0.0.1:{port}/instances")


async def test_instances_come_and_go() -> None:
    """Added instances get requests; drained ones none until added again; removed ones are gone."""
    async with (
        fake_instances.run_instance(InstancePlan({})) as a,
        fake_instances.run_instance(InstancePlan({})) as b,
        fake_instances.run_router([a.url]) as router,
        open_admin(router) as here,
    ):
        await router.get_json("/readyz")
        status, said = await here.post_order("add", b.url + "/")
        assert (status, said["url"], said["state"]) == (200, b.url, "healthy")
        for _ in range(4):
            await router.post_chat()
        assert (len(a.received), len(b.received)) == (2, 2)
        assert (await here.post_order("drain", a.url))[1]["state"] == "draining"
        for _ in range(4):
            await router.post_chat()
        assert (len(a.received), len(b.received)) == (2, 6)
        assert (await here.post_order("add", a.url))[1]["state"] == "healthy"
        assert (await here.post_order("remove", b.url))[0] == 200
        await router.post_chat()
        assert (len(a.received), len(b.received)) == (3, 6)
        status, said = await here.list_instances()
        (only,) = said["instances"]
        assert (status, only["url"], only["results"]) == (200, a.url, {"2xx": 3})
        assert (only["in_flight"], only["breaker"], only["models"]) == (0, "closed", ["tiny"])


async def test_requests_under_way_end_where_they_are() -> None:
    """An open stream is completed, though its instance is drained and then removed."""
    plans = [InstancePlan(gap_s=0.1), InstancePlan({})]
    async with run_routed_instances(plans) as (router, a, b), open_admin(router) as here:
        await router.get_json("/readyz")
        task = asyncio.create_task(router.post_chat())
        await wait_until(lambda: a.received)
        said = (await here.post_order("drain", a.url))[1]
        assert (said["state"], said["in_flight"]) == ("draining", 1)
        assert (await here.post_order("remove", a.url))[0] == 200
        assert (await task)[2] == b"".join(STREAM_EVENTS)
        assert (await router.post_chat())[0] == 200 and len(b.received) == 1


async def test_wrong_orders_change_nothing() -> None:
    """Unknown legs, instances, actions and bodies are refused with the accepted values."""
    async with run_routed_instances() as (router, a), open_admin(router) as here:
        for action, url, leg, wanted, word in (
            ("add", a.url, "encode", 404, "mono"),
            ("drain", fake_instances.find_unused_url(), "mono", 404, "GET /instances"),
            ("remove", a.url, "mono", 409, "drain it"),
            ("explode", a.url, "mono", 400, "action"),
            ("add", "localhost", "mono", 400, "write it like"),
            ("add", "http://x:y", "mono", 400, "write it like"),
        ):
            status, said = await here.post_order(action, url, leg)
            assert status == said["error"]["code"] == wanted
            assert word in said["error"]["message"]
        for body, kind, wanted in (
            (b"{", "application/json", 400),
            (b"\xff", "application/json", 400),
            (b"action=drain", "application/x-www-form-urlencoded", 415),
        ):
            named = {"Content-Type": kind}
            async with router.client.post(here.url, data=body, headers=named) as response:
                assert response.status == wanted
        assert (await here.list_instances())[1]["instances"][0]["state"] == "healthy"


async def test_only_who_has_the_token_and_is_here() -> None:
    """Without the token 401; with a foreign Host header, as a web page would send it, 403."""
    async with fake_instances.run_routed_instances() as (router, a):
        async with open_admin(router, "secret") as here:
            for given in ({}, {"Authorization": "Bearer secre"}, {"Authorization": "secret"}):
                assert (await here.list_instances(**given))[0] == 401
            assert (await here.post_order("drain", a.url))[0] == 401
            right = {"Authorization": "Bearer secret"}
            assert (await here.list_instances(**right))[0] == 200
            for host in ("evil.example", "evil.example:80", "[", "127.0.0.1.evil.example"):
                assert (await here.list_instances(**right, Host=host))[0] == 403
            assert (await here.list_instances(**right, Host="localhost:1"))[0] == 200


async def test_other_machines_reach_it_where_it_is_told_so() -> None:
    """On another address than loopback any Host header is accepted, and every request needs a token."""
    flags = ["--backend", "http://a:1", "--admin-port", "0", "--admin-host", "0.0.0.0"]
    wanted = RouterOptions.from_flags(command.make_context("router", flags).params)
    with pytest.raises(click.UsageError, match="from other machines: it needs --admin-token"):
        build_router(wanted, Settings(), None)
    async with fake_instances.run_routed_instances() as (router, _):
        with pytest.raises(ValueError, match="needs a token"):
            async with open_admin(router, host="0.0.0.0"):
                pass
        async with open_admin(router, "boss", "0.0.0.0") as here:
            assert (await here.list_instances(Host="router:9001"))[0] == 401
            right = {"Host": "router:9001", "Authorization": "Bearer boss"}
            assert (await here.list_instances(**right))[0] == 200


async def test_what_the_policy_believes_is_seen() -> None:
    """GET /instances shows each instance's pending work, its learnt speed and how good predictions were."""
    plan, routing = InstancePlan({"prefill.compute": 1000}), build_routing_factory()
    async with (
        run_routed_instances([plan], [None], routing=routing) as (router, _, one),
        open_admin(router) as here,
    ):
        body = fake_instances.build_chat() | {"tokens": 800}
        task = asyncio.create_task(router.post_body("/v1/chat/completions", body))
        await wait_until(lambda: one.received)
        said = (await here.list_instances())[1]
        wanted = {"leg": "prefill_decode", "logic": "ttft", "encoders": "round_robin"}
        assert said["routing"] == wanted
        encoder, answering = said["instances"]
        assert answering["pending"] == {"requests": 1, "tokens": 800, "pairs": 320_400}
        assert (answering["fits"], answering["predictions"]) == ({}, None)
        assert "pending" not in encoder
        await task
        answering = (await here.list_instances())[1]["instances"][1]
        assert answering["pending"] == {"requests": 0, "tokens": 0, "pairs": 0}
        unknown = dict.fromkeys(("a", "b", "d", "e", "mape", "r2"))
        assert answering["fits"]["tiny"] == {"samples": 1, "outcomes": 0, **unknown}


class ReportingSource(scripted_knowledge.ScriptedSource):
    """One instance that publishes events, one that was sent something."""

    def describe_instances(self) -> dict[str, Any]:
        """As the real ones say it."""
        counts = {"gaps": 2, "replays": 3, "clears": 1}
        return {
            "http://a": {"source": "kv-events", "blocks": 7, "counts": counts},
            "http://b": {"source": "history", "blocks": 5},
        }


async def test_each_instances_cache_is_on_metrics() -> None:
    """Blocks by instance and source; of instances with KV events also gaps, replays and clears."""
    async with fake_instances.run_routed_instances(
        routing=scripted_knowledge.build_routing_factory(source=ReportingSource())
    ) as (router, one):
        lines = router.app.metrics.render_text().decode().splitlines()
        blocks, events = (
            metric_names.ROUTER_CACHED_BLOCKS,
            f"{metric_names.ROUTER_KV_EVENTS}_total",
        )
        assert [line for line in lines if line.startswith((blocks, events))] == [
            f'{blocks}{{instance="http://a",leg="mono",source="kv-events"}} 7.0',
            f'{blocks}{{instance="http://b",leg="mono",source="history"}} 5.0',
            f'{events}{{event="gaps",instance="http://a",leg="mono"}} 2.0',
            f'{events}{{event="replays",instance="http://a",leg="mono"}} 3.0',
            f'{events}{{event="clears",instance="http://a",leg="mono"}} 1.0',
        ]


async def test_without_prompts_and_encoders_nothing_is_known() -> None:
    """A policy that reads no prompts has no cache metrics; nothing is encoded twice without encoders."""
    async with fake_instances.run_routed_instances() as (router, one):
        text = router.app.metrics.render_text().decode()
        assert metric_names.ROUTER_INSTANCE in text
        assert metric_names.ROUTER_CACHED_BLOCKS not in text
        assert f"{metric_names.ROUTER_RECOMPUTED_ITEMS}_total{{" not in text
