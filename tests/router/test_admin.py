# SPDX-License-Identifier: Apache-2.0
"""The admin port: instances are added, drained and removed while requests run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from router import fakes, known
from router.fakes import EVENTS, Plan
from ttft_otel.router import admin


class Door:
    """The admin port as an operator has it."""

    def __init__(self, client: aiohttp.ClientSession, url: str) -> None:
        self.client, self.url = client, url

    async def see(self, **headers: str) -> tuple[int, Any]:
        """GET /instances."""
        async with self.client.get(self.url, headers=headers) as response:
            return response.status, await response.json()

    async def do(self, action: str, url: str, leg: str = "mono") -> tuple[int, Any]:
        """POST /instances."""
        order = {"action": action, "leg": leg, "url": url}
        async with self.client.post(self.url, json=order) as response:
            return response.status, await response.json()


@contextlib.asynccontextmanager
async def door(router: fakes.Router, token: str = "") -> AsyncIterator[Door]:
    """The admin port of this router."""
    async with admin.serve(router.app.forward.legs, 0, token) as port:
        yield Door(router.client, f"http://127.0.0.1:{port}/instances")


def test_instances_come_and_go() -> None:
    """What is added gets requests; what is drained gets none, until it is added again; removed: gone."""

    async def scenario() -> None:
        async with (
            fakes.instance(Plan({})) as a,
            fakes.instance(Plan({})) as b,
            fakes.router([a.url]) as router,
            door(router) as here,
        ):
            await router.get("/readyz")
            status, said = await here.do("add", b.url + "/")
            assert (status, said["url"], said["state"]) == (200, b.url, "healthy")
            for _ in range(4):
                await router.chat()
            assert (len(a.seen), len(b.seen)) == (2, 2)
            assert (await here.do("drain", a.url))[1]["state"] == "draining"
            for _ in range(4):
                await router.chat()
            assert (len(a.seen), len(b.seen)) == (2, 6)
            assert (await here.do("add", a.url))[1]["state"] == "healthy"
            assert (await here.do("remove", b.url))[0] == 200
            await router.chat()
            assert (len(a.seen), len(b.seen)) == (3, 6)
            status, said = await here.see()
            (only,) = said["instances"]
            assert (status, only["url"], only["results"]) == (200, a.url, {"2xx": 3})
            assert (only["in_flight"], only["breaker"], only["models"]) == (0, "closed", ["tiny"])

    fakes.run(scenario)


def test_requests_under_way_end_where_they_are() -> None:
    """A stream whose instance is drained, then removed, comes to its end."""

    async def scenario() -> None:
        async with (
            fakes.instance(Plan(gap=0.1)) as a,
            fakes.instance(Plan({})) as b,
            fakes.router([a.url, b.url]) as router,
            door(router) as here,
        ):
            await router.get("/readyz")
            task = asyncio.create_task(router.chat())
            while not a.seen:
                await asyncio.sleep(0.01)
            said = (await here.do("drain", a.url))[1]
            assert (said["state"], said["in_flight"]) == ("draining", 1)
            assert (await here.do("remove", a.url))[0] == 200
            assert (await task)[2] == b"".join(EVENTS)
            assert (await router.chat())[0] == 200 and len(b.seen) == 1

    fakes.run(scenario)


def test_wrong_orders_change_nothing() -> None:
    """Unknown legs, instances, actions and bodies are refused with what would be right."""

    async def scenario() -> None:
        async with (
            fakes.instance(Plan({})) as a,
            fakes.router([a.url]) as router,
            door(router) as here,
        ):
            for action, url, leg, wanted, word in (
                ("add", a.url, "encode", 404, "mono"),
                ("drain", fakes.unused(), "mono", 404, "GET /instances"),
                ("remove", a.url, "mono", 409, "drain it"),
                ("explode", a.url, "mono", 400, "action"),
                ("add", "localhost", "mono", 400, "write it like"),
                ("add", "http://x:y", "mono", 400, "write it like"),
            ):
                status, said = await here.do(action, url, leg)
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
            assert (await here.see())[1]["instances"][0]["state"] == "healthy"

    fakes.run(scenario)


def test_only_who_has_the_token_and_is_here() -> None:
    """Without the token 401; a foreign Host, as a page in a browser would send it, 403."""

    async def scenario() -> None:
        async with fakes.instance() as a, fakes.router([a.url]) as router:
            async with door(router, "secret") as here:
                for given in ({}, {"Authorization": "Bearer secre"}, {"Authorization": "secret"}):
                    assert (await here.see(**given))[0] == 401
                assert (await here.do("drain", a.url))[0] == 401
                right = {"Authorization": "Bearer secret"}
                assert (await here.see(**right))[0] == 200
                for host in ("evil.example", "evil.example:80", "[", "127.0.0.1.evil.example"):
                    assert (await here.see(**right, Host=host))[0] == 403
                assert (await here.see(**right, Host="localhost:1"))[0] == 200

    fakes.run(scenario)


def test_what_the_policy_believes_is_seen() -> None:
    """Each instance tells what it has to do, what was learnt of it, and how good predictions were."""

    async def scenario() -> None:
        plan = Plan({"prefill.compute": 1000})
        async with (
            fakes.instance(plan) as one,
            fakes.instance() as e,
            fakes.router([one.url], [e.url], routing=known.routing()) as router,
            door(router) as here,
        ):
            body = fakes.chat() | {"tokens": 800}
            task = asyncio.create_task(router.post("/v1/chat/completions", body))
            await known.until(lambda: len(one.seen) == 1)
            said = (await here.see())[1]
            assert said["routing"] == {
                "leg": "prefill_decode",
                "logic": "ttft",
                "encoders": "round_robin",
            }
            encoder, answering = said["instances"]
            assert answering["pending"] == {"requests": 1, "tokens": 800, "pairs": 320_400}
            assert (answering["fits"], answering["predictions"]) == ({}, None)
            assert "pending" not in encoder
            await task
            answering = (await here.see())[1]["instances"][1]
            assert answering["pending"] == {"requests": 0, "tokens": 0, "pairs": 0}
            fit = answering["fits"]["tiny"]
            assert fit == {
                "samples": 1,
                "outcomes": 0,
                **dict.fromkeys(("a", "b", "d", "mape", "r2")),
            }

    fakes.run(scenario)
