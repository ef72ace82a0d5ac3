# SPDX-License-Identifier: Apache-2.0
"""LMCache's controller as its documentation describes it, answering well, late, wrongly and not at all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from router import fake_instances
from ttft_otel.router.routing import prefixes
from ttft_otel.router.routing.policies.block_keys import compute_block_keys
from ttft_otel.router.routing.prefixes import PrefixSource, lmcache_source
from ttft_otel.router.routing.prompts.prompt_reader import Prompt
from ttft_otel.router.types import parse_instance_url
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.router.upstream.query_client import QueryClient

A, B = "http://127.0.0.1:1", "http://127.0.0.2:2"
PROMPT_IDS = tuple(range(64))
PROMPT = Prompt(64, PROMPT_IDS, compute_block_keys(PROMPT_IDS, 16))


@pytest.fixture(autouse=True)
def extend_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the test of a late answer shall meet a time-out, however busy the machine."""
    monkeypatch.setattr(lmcache_source, "LOOKUP_TIMEOUT_S", 30.0)
    monkeypatch.setattr(lmcache_source, "FAILURE_PAUSE_S", 300.0)


@dataclass
class FakeController:
    """Says the same each time, after a while."""

    answer: Any = field(default_factory=dict)
    delay_s: float = 0.0
    status: int = 200
    lookups: list[Any] = field(default_factory=list)

    async def answer_lookup(self, request: web.Request) -> web.Response:
        """POST /lookup."""
        self.lookups.append(await request.json())
        await asyncio.sleep(self.delay_s)
        return web.json_response(self.answer, status=self.status)

    async def answer_query(self, request: web.Request) -> web.Response:
        """POST /query_instance."""
        question = await request.json()
        name = {"127.0.0.1": "a", "127.0.0.2": "b"}[question["ip"]]
        return web.json_response({"event_id": question["event_id"], "instance_id": name})


@asynccontextmanager
async def run_source(controller: FakeController, *names: str) -> AsyncIterator[PrefixSource]:
    """A source before this controller, for instances A and B."""
    app = web.Application()
    app.router.add_post("/lookup", controller.answer_lookup)
    app.router.add_post("/query_instance", controller.answer_query)
    async with fake_instances.run_web_app(app) as url, QueryClient() as queries:
        source = prefixes.build_source("lmcache", lmcache_url=f"{url}/", lmcache_instances=names)
        try:
            fleet = InstancePool({"mono": [parse_instance_url(each, "mono") for each in (A, B)]})
            await source.start(queries, fleet)
            yield source
        finally:
            await source.close()


def build_layout(**places: Any) -> dict[str, Any]:
    """An answer of /lookup."""
    return {"event_id": "e", "layout_info": places}


async def test_tells() -> None:
    """Tokens by instance; an instance of which nothing is told has what it was sent."""
    controller = FakeController(build_layout(a=["LocalCPUBackend", 48], nobody=["x", 64]))

    async with run_source(controller, "a,b") as source:
        source.index.record_served(B, PROMPT.block_keys[:1])
        assert await source.look_up("m", PROMPT, [A, B]) == {A: 48, B: 16}
        source.index.record_served(A, PROMPT.block_keys)
        assert await source.look_up("m", PROMPT, [A, B]) == {A: 64, B: 16}
        told = source.describe_instances()
        assert {url: told[url]["instance_id"] for url in told} == {A: "a", B: "b"}
        assert told[A]["counts"] == {"answered": 2, "unknown_instance": 2}
    assert controller.lookups == [{"tokens": list(PROMPT_IDS)}] * 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"delay_s": 5.0},
        {"status": 500},
        {"answer": [1]},
        {"answer": {"layout_info": None}},
        {"answer": build_layout(a=["x", "many"])},
        {"answer": build_layout(a={"x": 1, "y": 2})},
        {"answer": build_layout(a=5)},
    ],
)
async def test_fails(
    wrong: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a good answer the index decides, and the next requests do not wait for the controller."""
    if "delay_s" in wrong:
        monkeypatch.setattr(lmcache_source, "LOOKUP_TIMEOUT_S", 0.2)
    caplog.set_level(logging.WARNING, "ttft_otel")
    controller = FakeController(**wrong)

    async with run_source(controller, "a", "b") as source:
        assert await source.look_up("m", PROMPT, [A, B]) is None
        assert await source.look_up("m", PROMPT, [A, B]) is None
        assert source.describe_instances()[A]["counts"] == {"failed": 1, "skipped": 1}
    assert len(controller.lookups) <= 1
    assert "does not answer /lookup" in caplog.text


def test_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than so many questions are under way; who comes then does without."""
    monkeypatch.setattr(lmcache_source, "MAX_CONCURRENT_LOOKUPS", 3)
    controller = FakeController(build_layout(), delay_s=1.0)

    async def run_scenario() -> list[Any]:
        async with run_source(controller, "a", "b") as source:
            return await asyncio.gather(*(source.look_up("m", PROMPT, [A, B]) for _ in range(10)))

    answers = asyncio.run(run_scenario())
    assert len(controller.lookups) == 3
    assert answers.count(None) == 7


def test_addresses() -> None:
    """Without names the controller is asked who is at each instance's address."""
    controller = FakeController(build_layout(b=["x", 32]))

    async def run_scenario() -> None:
        async with run_source(controller) as source:
            while source.describe_instances()[B]["instance_id"] is None:
                await asyncio.sleep(0.01)
            assert await source.look_up("m", PROMPT, [A, B]) == {A: 0, B: 32}

    asyncio.run(asyncio.wait_for(run_scenario(), 60))


def test_address_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An instance that was added at another one's address is told to the operator, once."""
    caplog.set_level(logging.WARNING, "ttft_otel")
    monkeypatch.setattr(lmcache_source, "LOCATE_INTERVAL_S", 0.01)

    async def run_scenario() -> None:
        async with run_source(FakeController()) as source:
            assert isinstance(source, lmcache_source.LMCacheSource) and source._pool is not None
            source._pool.add_instance(parse_instance_url("http://127.0.0.1:3", "mono"))
            while source.counts["unlocated"] < 3:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run_scenario(), 60))
    told = [each.getMessage() for each in caplog.records if "share an address" in each.getMessage()]
    assert len(told) == 1 and "--lmcache-instances" in told[0]


async def test_added(caplog: pytest.LogCaptureFixture) -> None:
    """An instance that came later and has no name is told to the operator, once; one that has is known."""
    caplog.set_level(logging.WARNING, "ttft_otel")
    known, new = "http://127.0.0.1:3", "http://127.0.0.1:4"

    async with run_source(FakeController(), f"a={A}", f"b={B}", f"c={known}") as source:
        assert isinstance(source, lmcache_source.LMCacheSource) and source._pool is not None
        for url in (known, new):
            source._pool.add_instance(parse_instance_url(url, "mono"))
            source.sync_instances()
        source.sync_instances()
        assert source.describe_instances()[known]["instance_id"] == "c"
        assert source.describe_instances()[new]["instance_id"] is None
    (told,) = (each.getMessage() for each in caplog.records)
    assert f"{new} is not among --lmcache-instances" in told
    assert "as ID=URL" in told and "restart" in told


def test_names() -> None:
    """Names stand in the order of the instances, or with their URLs; anything else gets the remedy."""
    assert lmcache_source.map_instance_ids(["a", "b"], [A, B]) == {"a": A, "b": B}
    assert lmcache_source.map_instance_ids([f"b={B}/", f"a={A}"], [A, B]) == {"a": A, "b": B}
    for wrong in (["a"], ["a", "b", "c"], ["a", "a"], [f"a={A}", "b"], [f"a={A}", f"b={A}"]):
        with pytest.raises(ValueError, match="in the order of the instances or as ID=URL"):
            lmcache_source.map_instance_ids(wrong, [A, B])
    for url in ("", "127.0.0.1:9000", "tcp://a:1"):
        with pytest.raises(ValueError, match="--lmcache-controller-url like"):
            prefixes.build_source("lmcache", lmcache_url=url)


async def test_same_address() -> None:
    """Two instances at one address cannot be told apart without names."""
    source = prefixes.build_source("lmcache", lmcache_url="http://127.0.0.1:9")
    fleet = InstancePool(
        {"mono": [parse_instance_url(f"http://127.0.0.1:{at}", "mono") for at in (1, 2)]}
    )
    async with QueryClient() as queries:
        try:
            with pytest.raises(ValueError, match="share an address.*--lmcache-instances"):
                await source.start(queries, fleet)
        finally:
            await source.close()
