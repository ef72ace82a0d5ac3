# SPDX-License-Identifier: Apache-2.0
"""Instances that publish over real sockets: found, followed, lost, back again, forgotten."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import pytest
import zmq.asyncio
from aiohttp import web

from tests.router.engine import Engine
from tests.router.publisher import Publisher, published
from ttft_otel import names
from ttft_otel.router import prefixes
from ttft_otel.router.choose import instance
from ttft_otel.router.fleet import Fleet
from ttft_otel.router.gauges import caches
from ttft_otel.router.policies.blocks import numbers
from ttft_otel.router.prefixes import Source, subscription
from ttft_otel.router.prefixes.endpoints import Endpoint, given, reach, told
from ttft_otel.router.prefixes.reported import Reported
from ttft_otel.router.prefixes.slices import sliced

SIZE = 4
IDS = [*range(5 * SIZE)]
OTHER = [*range(100, 100 + 3 * SIZE)]


@asynccontextmanager
async def followed(fleet: Fleet, source: Source | None = None) -> AsyncIterator[Source]:
    """A source that follows this fleet."""
    source = source or prefixes.source("kv-events")
    async with aiohttp.ClientSession() as session:
        await source.start(session, fleet)
        try:
            yield source
        finally:
            await source.close()


def shown(source: Source, url: str, name: str, label: str) -> float | None:
    """A value on /metrics; `label`: its last one's."""
    for family in caches("mono", source):
        for sample in family.samples:
            if sample.name == name and tuple(sample.labels.values()) == ("mono", url, label):
                return sample.value
    return None


def fleet(*urls: str) -> Fleet:
    """Instances that do everything."""
    return Fleet({"mono": [instance(url, "mono") for url in urls]})


def found(source: Source, url: str, ids: list[int]) -> int:
    """Blocks of a prompt that the index finds."""
    return source.index.match(numbers(ids, SIZE), [url])[0]


async def until(true: Callable[[], bool]) -> None:
    """Wait, not for ever."""
    end = monotonic() + 60
    while not true():
        assert monotonic() < end
        await asyncio.sleep(0.01)


def run(test: Callable[[], Any]) -> None:
    """A test's coroutine, to its end."""
    asyncio.run(asyncio.wait_for(test(), 150))


@pytest.mark.parametrize("old", [False, True])
def test_follows(tmp_path: Path, old: bool) -> None:
    """What was stored before, while and after losing a message is known; a gone instance is forgotten."""

    async def test() -> None:
        publisher = Publisher(tmp_path, Engine(SIZE, arrays=old), old=old)
        async with published(publisher) as url:
            publisher.engine.serve(IDS)
            await publisher.say()
            here = fleet(url)
            async with followed(here) as source:
                await until(lambda: found(source, url, IDS) == 5)
                assert source.index.size == SIZE
                publisher.engine.evict(0)
                await publisher.say(lose=True)
                publisher.engine.serve(OTHER)
                await publisher.say()
                await until(lambda: found(source, url, OTHER) == 3)
                assert found(source, url, IDS) == publisher.engine.cached(IDS) < 5
                told = source.status()[url]
                assert told["connected"] and told["blocks"] == 7 and told["block_size"] == SIZE
                assert told["counts"]["gaps"] == 1 and told["last"] == {0: 2}
                assert shown(source, url, names.METRIC_CACHED_BLOCKS, "kv-events") == 7
                for event, number in (("gaps", 1), ("messages", 3), ("replays", 2)):
                    assert shown(source, url, f"{names.METRIC_KV_EVENTS}_total", event) == number
                here.remove(here.find("mono", url) or instance(url, "mono"))
                source.follow()
                assert found(source, url, OTHER) == 0
                await until(lambda: len(source.index) == 0)  # type: ignore[arg-type]
                assert source.status() == {}

    run(test)


def test_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that comes back has what it has since then, though its numbers went past the old ones."""
    monkeypatch.setattr(subscription, "SOON", 0.01)

    async def test() -> None:
        publisher = Publisher(tmp_path, Engine(SIZE))
        async with published(publisher) as url, followed(fleet(url)) as source:
            await until(lambda: bool(source.status()[url].get("connected")))
            publisher.engine.serve(IDS)
            await publisher.say()
            await until(lambda: found(source, url, IDS) == 5)
            await publisher.close()
            publisher.engine.restart()
            publisher.engine.serve(OTHER)
            await publisher.say(lose=True)
            await until(lambda: not source.status()[url]["connected"])
            context = zmq.asyncio.Context()
            publisher.open(context)
            await until(lambda: found(source, url, OTHER) == 3)
            assert found(source, url, IDS) == 0
            assert source.status()[url]["counts"]["restarts"] == 1
            await publisher.close()
            context.destroy(linger=0)

    run(test)


def test_hole(tmp_path: Path) -> None:
    """What an engine's socket dropped from a long answer is asked for once more."""

    async def test() -> None:
        publisher = Publisher(tmp_path, Engine(SIZE), hole=2)
        async with published(publisher) as url:
            for at in range(5):
                publisher.engine.serve(IDS[: (at + 1) * SIZE])
                await publisher.say()
            async with followed(fleet(url)) as source:
                await until(lambda: found(source, url, IDS) == 5)
        assert publisher.asked == [0, 2]

    run(test)


def test_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An instance that tells no endpoint is known by what it was sent, and the operator hears why."""
    caplog.set_level(logging.WARNING, "ttft_otel")

    async def test() -> None:
        publisher = Publisher(tmp_path, Engine(SIZE), status=404)
        async with published(publisher) as url, followed(fleet(url)) as source:
            await until(lambda: bool(caplog.records) and source.index.size == SIZE)
            source.index.served(url, numbers(IDS, SIZE))
            assert found(source, url, IDS) == 5
            assert source.status() == {url: {"source": "history", "blocks": 5}}
            publisher.status = 200

    run(test)
    assert "--kv-events-config" in caplog.text and "--kv-events-endpoint" in caplog.text


def test_odd(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An instance that answers something else is told to the operator with what to write."""

    class Odd(Publisher):
        async def sources(self, _: web.Request) -> web.Response:
            """No map of ranks."""
            return web.json_response([])

    async def test() -> None:
        async with published(Odd(tmp_path)) as url, followed(fleet(url)):
            await until(lambda: "no map of ranks" in caplog.text)

    caplog.set_level(logging.WARNING, "ttft_otel")
    run(test)
    assert "write --kv-events-endpoint INSTANCE_URL=ENDPOINT" in caplog.text


def test_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the index cannot hold is counted for operators, and they are told what it means."""
    monkeypatch.setattr(subscription, "AGAIN", 0.05)
    caplog.set_level(logging.WARNING, "ttft_otel")

    async def test() -> None:
        publisher = Publisher(tmp_path, Engine(SIZE))
        publisher.engine.serve(IDS)
        source = prefixes.source("kv-events")
        assert isinstance(source.index, Reported)
        source.index.total = 3
        async with published(publisher) as url, followed(fleet(url), source):
            await publisher.say()
            await until(lambda: found(source, url, IDS) == 3)
            assert source.status()[url]["blocks"] == 3
            assert source.status()[url]["counts"]["dropped"] == 2
            assert shown(source, url, f"{names.METRIC_KV_EVENTS}_total", "dropped") == 2
            await until(lambda: "counts as not cached" in caplog.text)

    run(test)


def test_reports_instead(tmp_path: Path) -> None:
    """Once an instance reports, what it was sent counts no more."""

    async def test() -> None:
        publisher = Publisher(tmp_path, Engine(SIZE), status=404)
        async with published(publisher) as url:
            value = f"{url}={publisher.events},{publisher.replay}"
            source = prefixes.source("kv-events", kv_endpoints=[value], size=SIZE)
            source.index.served(url, numbers(OTHER, SIZE))
            publisher.engine.serve(IDS)
            await publisher.say()
            async with followed(fleet(url), source):
                await until(lambda: found(source, url, IDS) == 5)
                source.index.served(url, numbers(OTHER, SIZE))
                assert found(source, url, OTHER) == 0

    run(test)


def test_reports_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that comes back without events is known by what it is sent from then on."""
    monkeypatch.setattr(subscription, "AGAIN", 0.05)

    async def test() -> None:
        publisher = Publisher(tmp_path, Engine(SIZE))
        async with published(publisher) as url, followed(fleet(url)) as source:
            publisher.engine.serve(IDS)
            await until(lambda: bool(source.status()[url].get("connected")))
            await publisher.say()
            await until(lambda: found(source, url, IDS) == 5)
            publisher.status = 404
            await until(lambda: source.status()[url]["source"] == "history")
            assert found(source, url, IDS) == 0
            source.index.served(url, numbers(OTHER, SIZE))
            assert found(source, url, OTHER) == 3
            publisher.status = 200
            await until(lambda: found(source, url, IDS) == 5)
            assert found(source, url, OTHER) == 0

    run(test)


def test_unreachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher that stays away counts no more; when it is back, all that it has is known again."""
    monkeypatch.setattr(subscription, "AGAIN", 0.05)
    monkeypatch.setattr(subscription, "SOON", 0.05)
    monkeypatch.setattr(subscription, "SILENCE", 0.2)

    async def test() -> None:
        publisher = Publisher(tmp_path, Engine(SIZE))
        async with published(publisher) as url, followed(fleet(url)) as source:
            await until(lambda: bool(source.status()[url].get("connected")))
            publisher.engine.serve(IDS)
            await publisher.say()
            await until(lambda: found(source, url, IDS) == 5)
            await publisher.close()
            await until(lambda: source.status()[url]["source"] == "history")
            assert found(source, url, IDS) == 0
            await until(lambda: len(source.index) == 0)  # type: ignore[arg-type]
            source.index.served(url, numbers(OTHER, SIZE))
            assert found(source, url, OTHER) == 3
            context = zmq.asyncio.Context()
            publisher.open(context)
            await until(lambda: found(source, url, IDS) == 5)
            assert found(source, url, OTHER) == 0
            await publisher.close()
            context.destroy(linger=0)

    run(test)


def test_unknown_instance(caplog: pytest.LogCaptureFixture) -> None:
    """An endpoint of an instance that is not there is told to the operator."""

    async def test() -> None:
        source = prefixes.source("kv-events", kv_endpoints=["http://127.0.0.1:9=tcp://*:5557"])
        async with followed(fleet(), source):
            assert source.status() == {}

    run(test)
    assert "http://127.0.0.1:9, which prefills nothing here" in caplog.text


def test_slices() -> None:
    """Long work leaves the event loop to others again and again."""

    async def test() -> int:
        turns = 0

        def work() -> Any:
            for _ in range(50):
                end = monotonic() + 0.001
                while monotonic() < end:
                    pass
                yield

        task = asyncio.ensure_future(sliced(work()))
        while not task.done():
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert asyncio.run(test()) > 20


def test_given() -> None:
    """Endpoints are read by instance, in the order of ranks; wildcards are the instance's host."""
    one, two = "http://10.0.0.1:8000=tcp://*:5557,tcp://*:5558", "http://10.0.0.1:8000/=ipc:///a"

    assert given([one, two]) == {
        "http://10.0.0.1:8000": [
            Endpoint("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"),
            Endpoint("ipc:///a"),
        ]
    }


@pytest.mark.parametrize(
    "value",
    ["", "tcp://a:1", "http://a:1", "http://a:1=", "http://a:1=a:1", "http://a:1=tcp://a"]
    + ["a:1=tcp://a:1", "http://a:1=tcp://a:99999", "http://a:1=ipc://", "http://a:1=tcp://a:1,b"],
)
def test_given_wrongly(value: str) -> None:
    """What is no endpoint is refused with the way to write one."""
    with pytest.raises(ValueError, match="INSTANCE_URL=ENDPOINT"):
        given([value])


def test_told() -> None:
    """vLLM's own answer is read by rank; publishers of another kind and answers that are none are not."""
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557"}
    answer = {"0": config, "1": {**config, "replay_endpoint": None, "topic": "kv"}}

    assert told(answer, "http://[::1]:8000") == {
        0: Endpoint("tcp://[::1]:5557"),
        1: Endpoint("tcp://[::1]:5557", "", "kv"),
    }
    assert told({"0": {"publisher": "null"}}, "http://a:1") == {}
    for wrong in ([], {"0": []}, {"a": config}, {"0": {**config, "endpoint": None}}):
        with pytest.raises(ValueError):
            told(wrong, "http://a:1")
    assert reach("tcp://0.0.0.0:1", "b") == "tcp://b:1"


def test_needs() -> None:
    """Flags of one source with another one are refused."""
    with pytest.raises(ValueError, match="--prefix-index kv-events"):
        prefixes.source("history", kv_endpoints=["http://a:1=tcp://*:5557"])
    with pytest.raises(ValueError, match="--prefix-index lmcache"):
        prefixes.source("kv-events", lmcache_url="http://a:1")


def test_without_zmq(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pyzmq is missing the operator hears how to get it."""
    monkeypatch.delitem(sys.modules, "ttft_otel.router.prefixes.kvevents", raising=False)
    monkeypatch.setitem(sys.modules, "zmq.asyncio", None)

    with pytest.raises(ValueError, match="pip install"):
        prefixes.source("kv-events")


def test_many_instances() -> None:
    """The more instances, the less of each one's history is kept."""

    async def test() -> int:
        urls = [f"http://127.0.0.1:{port}" for port in range(1, 101)]
        source = prefixes.source("history", size=SIZE)
        async with followed(fleet(*urls), source):
            for number in range(20):
                source.index.served(urls[0], range(number * 1000, number * 1000 + 1000))
            told: dict[str, int] = source.status()[urls[0]]
            return told["blocks"]

    assert asyncio.run(test()) == 10_000


@pytest.mark.parametrize("draining", [False, True])
def test_history_of_a_process(draining: bool) -> None:
    """What an instance was sent before it failed counts no more: who is back may be another process."""

    async def test() -> None:
        here = fleet("http://127.0.0.1:1", "http://127.0.0.1:2")
        async with followed(here, prefixes.source("history", size=SIZE)) as source:
            one, two = here
            for each in here:
                source.index.served(each.url, numbers(IDS, SIZE))
                here.heal(each)
            here.drain(one, draining)
            here.fail(one, "its process ended")
            here.heal(one)
            here.drain(one, False)
            assert found(source, one.url, IDS) == 0
            assert found(source, two.url, IDS) == 5
            source.index.served(one.url, numbers(OTHER, SIZE))
            here.heal(one)
            assert found(source, one.url, OTHER) == 3

    run(test)


def test_gone() -> None:
    """A request that was still under way at an instance that is gone brings nothing of it back."""

    async def test() -> None:
        here = fleet("http://127.0.0.1:1", "http://127.0.0.1:2")
        async with followed(here, prefixes.source("history", size=SIZE)) as source:
            gone, stays = here
            here.remove(gone)
            source.follow()
            for each in (gone, stays):
                source.index.served(each.url, numbers(IDS, SIZE))
            assert found(source, gone.url, IDS) == 0
            assert found(source, stays.url, IDS) == 5

    run(test)
