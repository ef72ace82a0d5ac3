# SPDX-License-Identifier: Apache-2.0
"""LMCache's controller as its documentation describes it, answering well, late, wrongly and not at all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ttft_otel.router import prefixes
from ttft_otel.router.choose import instance
from ttft_otel.router.fleet import Fleet
from ttft_otel.router.policies.blocks import numbers
from ttft_otel.router.prefixes import Source, lmcache
from ttft_otel.router.prompts.prompt import Prompt

A, B = "http://127.0.0.1:1", "http://127.0.0.2:2"
IDS = tuple(range(64))
PROMPT = Prompt(64, IDS, numbers(IDS, 16))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the test of a late answer shall meet a time-out, however busy the machine."""
    monkeypatch.setattr(lmcache, "WAIT", 30.0)
    monkeypatch.setattr(lmcache, "PAUSE", 300.0)


@dataclass
class Controller:
    """Says the same each time, after a while."""

    answer: Any = field(default_factory=dict)
    late: float = 0.0
    status: int = 200
    asked: list[Any] = field(default_factory=list)

    async def lookup(self, request: web.Request) -> web.Response:
        """POST /lookup."""
        self.asked.append(await request.json())
        await asyncio.sleep(self.late)
        return web.json_response(self.answer, status=self.status)

    async def query(self, request: web.Request) -> web.Response:
        """POST /query_instance."""
        question = await request.json()
        name = {"127.0.0.1": "a", "127.0.0.2": "b"}[question["ip"]]
        return web.json_response({"event_id": question["event_id"], "instance_id": name})


@asynccontextmanager
async def asking(controller: Controller, *names: str) -> AsyncIterator[Source]:
    """A source before this controller, for instances A and B."""
    app = web.Application()
    app.router.add_post("/lookup", controller.lookup)
    app.router.add_post("/query_instance", controller.query)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    source = prefixes.source("lmcache", lmcache_url=url, lmcache_instances=names)
    async with aiohttp.ClientSession() as session:
        try:
            fleet = Fleet({"mono": [instance(each, "mono") for each in (A, B)]})
            await source.start(session, fleet)
            yield source
        finally:
            await source.close()
            await runner.cleanup()


def layout(**places: Any) -> dict[str, Any]:
    """An answer of /lookup."""
    return {"event_id": "e", "layout_info": places}


def test_tells() -> None:
    """Tokens by instance; an instance of which nothing is told has what it was sent."""
    controller = Controller(layout(a=["LocalCPUBackend", 48], nobody=["x", 64]))

    async def test() -> None:
        async with asking(controller, "a,b") as source:
            source.index.served(B, PROMPT.blocks[:1])
            assert await source.lookup("m", PROMPT, [A, B]) == {A: 48, B: 16}
            source.index.served(A, PROMPT.blocks)
            assert await source.lookup("m", PROMPT, [A, B]) == {A: 64, B: 16}
            told = source.status()
            assert {url: told[url]["instance_id"] for url in told} == {A: "a", B: "b"}
            assert told[A]["counts"] == {"answered": 2, "unknown_instance": 2}

    asyncio.run(test())
    assert controller.asked == [{"tokens": list(IDS)}] * 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"late": 5.0},
        {"status": 500},
        {"answer": [1]},
        {"answer": {"layout_info": None}},
        {"answer": layout(a=["x", "many"])},
        {"answer": layout(a={"x": 1, "y": 2})},
        {"answer": layout(a=5)},
    ],
)
def test_fails(
    wrong: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a good answer the index decides, and the next requests do not wait for the controller."""
    if "late" in wrong:
        monkeypatch.setattr(lmcache, "WAIT", 0.2)
    caplog.set_level(logging.WARNING, "ttft_otel")
    controller = Controller(**wrong)

    async def test() -> None:
        async with asking(controller, "a", "b") as source:
            assert await source.lookup("m", PROMPT, [A, B]) is None
            assert await source.lookup("m", PROMPT, [A, B]) is None
            assert source.status()[A]["counts"] == {"failed": 1, "skipped": 1}

    asyncio.run(test())
    assert len(controller.asked) <= 1
    assert "does not answer /lookup" in caplog.text


def test_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than so many questions are under way; who comes then does without."""
    monkeypatch.setattr(lmcache, "AT_ONCE", 3)
    controller = Controller(layout(), late=1.0)

    async def test() -> list[Any]:
        async with asking(controller, "a", "b") as source:
            return await asyncio.gather(*(source.lookup("m", PROMPT, [A, B]) for _ in range(10)))

    answers = asyncio.run(test())
    assert len(controller.asked) == 3
    assert answers.count(None) == 7


def test_addresses() -> None:
    """Without names the controller is asked who is at each instance's address."""
    controller = Controller(layout(b=["x", 32]))

    async def test() -> None:
        async with asking(controller) as source:
            while source.status()[B]["instance_id"] is None:
                await asyncio.sleep(0.01)
            assert await source.lookup("m", PROMPT, [A, B]) == {A: 0, B: 32}

    asyncio.run(asyncio.wait_for(test(), 60))


def test_address_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An instance that was added at another one's address is told to the operator, once."""
    caplog.set_level(logging.WARNING, "ttft_otel")
    monkeypatch.setattr(lmcache, "AGAIN", 0.01)

    async def test() -> None:
        async with asking(Controller()) as source:
            assert isinstance(source, lmcache.LMCache) and source._fleet is not None
            source._fleet.add(instance("http://127.0.0.1:3", "mono"))
            while source.counts["unlocated"] < 3:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(test(), 60))
    told = [each.getMessage() for each in caplog.records if "share an address" in each.getMessage()]
    assert len(told) == 1 and "--lmcache-instances" in told[0]


def test_added(caplog: pytest.LogCaptureFixture) -> None:
    """An instance that came later and has no name is told to the operator, once; one that has is known."""
    caplog.set_level(logging.WARNING, "ttft_otel")
    known, new = "http://127.0.0.1:3", "http://127.0.0.1:4"

    async def test() -> None:
        async with asking(Controller(), f"a={A}", f"b={B}", f"c={known}") as source:
            assert isinstance(source, lmcache.LMCache) and source._fleet is not None
            for url in (known, new):
                source._fleet.add(instance(url, "mono"))
                source.follow()
            source.follow()
            assert source.status()[known]["instance_id"] == "c"
            assert source.status()[new]["instance_id"] is None

    asyncio.run(test())
    (told,) = (each.getMessage() for each in caplog.records)
    assert f"{new} is not among --lmcache-instances" in told
    assert "as ID=URL" in told and "restart" in told


def test_names() -> None:
    """Names stand in the order of the instances, or with their URLs; anything else gets the remedy."""
    assert lmcache.named(["a", "b"], [A, B]) == {"a": A, "b": B}
    assert lmcache.named([f"b={B}/", f"a={A}"], [A, B]) == {"a": A, "b": B}
    for wrong in (["a"], ["a", "b", "c"], ["a", "a"], [f"a={A}", "b"], [f"a={A}", f"b={A}"]):
        with pytest.raises(ValueError, match="in the order of the instances or as ID=URL"):
            lmcache.named(wrong, [A, B])
    for url in ("", "127.0.0.1:9000", "tcp://a:1"):
        with pytest.raises(ValueError, match="--lmcache-controller-url like"):
            prefixes.source("lmcache", lmcache_url=url)


def test_same_address() -> None:
    """Two instances at one address cannot be told apart without names."""

    async def test() -> None:
        source = prefixes.source("lmcache", lmcache_url="http://127.0.0.1:9")
        fleet = Fleet({"mono": [instance(f"http://127.0.0.1:{at}", "mono") for at in (1, 2)]})
        async with aiohttp.ClientSession() as session:
            try:
                with pytest.raises(ValueError, match="share an address.*--lmcache-instances"):
                    await source.start(session, fleet)
            finally:
                await source.close()

    asyncio.run(test())
