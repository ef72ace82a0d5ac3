# SPDX-License-Identifier: Apache-2.0
"""Instances that publish over real sockets: found, followed, lost, back again, forgotten."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq.asyncio
from aiohttp import web

from lab.fake_vllm.kv_publisher import FakePublisher, run_publisher
from lab.fake_vllm.prefix_cache import FakeEngine
from router.fake_instances import wait_until
from ttft_otel.model.names import metric_names
from ttft_otel.router.control.app import collect_cache_metrics
from ttft_otel.router.routing.policies.block_index import SentHistory, compute_block_keys
from ttft_otel.router.routing.prefixes import kv_events_source
from ttft_otel.router.routing.prefixes.kv_events import ReportedIndex
from ttft_otel.router.routing.prefixes.kv_events_source import (
    EventEndpoint,
    KvEventsSource,
    parse_announced,
    parse_configured,
    resolve_address,
)
from ttft_otel.router.routing.prefixes.prefix_source import MAX_HISTORY_BLOCKS, PrefixSource
from ttft_otel.router.types import parse_instance_url
from ttft_otel.router.upstream.connection_pool import QueryClient
from ttft_otel.router.upstream.instance_pool import InstancePool

BLOCK_TOKENS = 4
PROMPT_IDS = [*range(5 * BLOCK_TOKENS)]
OTHER_IDS = [*range(100, 100 + 3 * BLOCK_TOKENS)]


@asynccontextmanager
async def run_source(
    fleet: InstancePool, source: PrefixSource | None = None
) -> AsyncIterator[PrefixSource]:
    """A source that follows this fleet."""
    source = source or KvEventsSource()
    async with QueryClient() as queries:
        await source.start(queries, fleet)
        try:
            yield source
        finally:
            await source.close()


def get_metric(source: PrefixSource, url: str, name: str, label: str) -> float | None:
    """A value on /metrics; `label`: its last one's."""
    for family in collect_cache_metrics("mono", source):
        for sample in family.samples:
            if sample.name == name and tuple(sample.labels.values()) == ("mono", url, label):
                return sample.value
    return None


def build_fleet(*urls: str) -> InstancePool:
    """Instances that do everything."""
    return InstancePool({"mono": [parse_instance_url(url, "mono") for url in urls]})


def count_indexed_blocks(source: PrefixSource, url: str, ids: list[int]) -> int:
    """Blocks of a prompt that the index finds."""
    return source.index.match_blocks(compute_block_keys(ids, BLOCK_TOKENS), [url])[0]


@asynccontextmanager
async def run_followed_publisher(
    folder: Path,
) -> AsyncIterator[tuple[FakePublisher, str, PrefixSource]]:
    """An instance that has published the five blocks of PROMPT_IDS, and a source that knows them."""
    publisher = FakePublisher(folder, FakeEngine(BLOCK_TOKENS))
    async with run_publisher(publisher) as url, run_source(build_fleet(url)) as source:
        await publisher.wait_for_subscriber()
        await wait_until(lambda: bool(source.describe_instances()[url].get("connected")))
        publisher.engine.compute_prompt(PROMPT_IDS)
        await publisher.publish_events()
        await wait_until(lambda: count_indexed_blocks(source, url, PROMPT_IDS) == 5)
        yield publisher, url, source


@pytest.mark.parametrize("old", [False, True])
async def test_follows(tmp_path: Path, old: bool) -> None:
    """What was stored before, while and after losing a message is known; a gone instance is forgotten."""
    publisher = FakePublisher(tmp_path, FakeEngine(BLOCK_TOKENS, as_arrays=old), omits_topic=old)
    async with run_publisher(publisher) as url:
        publisher.engine.compute_prompt(PROMPT_IDS)
        await publisher.publish_events()
        here = build_fleet(url)
        async with run_source(here) as source:
            await wait_until(lambda: count_indexed_blocks(source, url, PROMPT_IDS) == 5)
            assert source.index.block_size == BLOCK_TOKENS
            await publisher.wait_for_subscriber()
            publisher.engine.evict_block(0)
            await publisher.publish_events(is_lost=True)
            publisher.engine.compute_prompt(OTHER_IDS)
            await publisher.publish_events()
            await wait_until(lambda: count_indexed_blocks(source, url, OTHER_IDS) == 3)
            assert (
                count_indexed_blocks(source, url, PROMPT_IDS)
                == publisher.engine.count_cached_blocks(PROMPT_IDS)
                < 5
            )
            told = source.describe_instances()[url]
            assert told["connected"] and told["blocks"] == 7 and told["block_size"] == BLOCK_TOKENS
            assert told["counts"]["gaps"] == 1 and told["last"] == {0: 2}
            assert get_metric(source, url, metric_names.ROUTER_CACHED_BLOCKS, "kv-events") == 7
            for event, number in (("gaps", 1), ("messages", 3), ("replays", 2)):
                assert (
                    get_metric(source, url, f"{metric_names.ROUTER_KV_EVENTS}_total", event)
                    == number
                )
            here.remove_instance(here.find_instance("mono", url) or parse_instance_url(url, "mono"))
            source.sync_instances()
            assert count_indexed_blocks(source, url, OTHER_IDS) == 0
            await wait_until(lambda: len(source.index) == 0)
            assert source.describe_instances() == {}


async def test_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that comes back has what it has since then, though its numbers went past the old ones."""
    monkeypatch.setattr(kv_events_source, "RECONNECT_DELAY_S", 0.01)

    async with run_followed_publisher(tmp_path) as (publisher, url, source):
        await publisher.close()
        publisher.engine.restart()
        publisher.engine.compute_prompt(OTHER_IDS)
        await publisher.publish_events(is_lost=True)
        await wait_until(lambda: not source.describe_instances()[url]["connected"])
        context = zmq.asyncio.Context()
        publisher.bind_sockets(context)
        await wait_until(lambda: count_indexed_blocks(source, url, OTHER_IDS) == 3)
        assert count_indexed_blocks(source, url, PROMPT_IDS) == 0
        assert source.describe_instances()[url]["counts"]["restarts"] == 1
        await publisher.close()
        context.destroy(linger=0)


async def test_hole(tmp_path: Path) -> None:
    """What an engine's socket dropped from a long answer is asked for once more."""
    publisher = FakePublisher(tmp_path, FakeEngine(BLOCK_TOKENS), skipped_number=2)
    async with run_publisher(publisher) as url:
        for at in range(5):
            publisher.engine.compute_prompt(PROMPT_IDS[: (at + 1) * BLOCK_TOKENS])
            await publisher.publish_events()
        async with run_source(build_fleet(url)) as source:
            await wait_until(lambda: count_indexed_blocks(source, url, PROMPT_IDS) == 5)
    assert publisher.replay_starts == [0, 2]


async def test_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An instance without an endpoint is known by what it was sent; the log says why."""
    caplog.set_level(logging.WARNING, "ttft_otel")

    publisher = FakePublisher(tmp_path, FakeEngine(BLOCK_TOKENS), status=404)
    async with run_publisher(publisher) as url, run_source(build_fleet(url)) as source:
        await wait_until(lambda: bool(caplog.records) and source.index.block_size == BLOCK_TOKENS)
        source.index.record_served(url, compute_block_keys(PROMPT_IDS, BLOCK_TOKENS))
        assert count_indexed_blocks(source, url, PROMPT_IDS) == 5
        assert source.describe_instances() == {url: {"source": "history", "blocks": 5}}
        publisher.status = 200
    assert "--kv-events-config" in caplog.text and "--kv-events-endpoint" in caplog.text


async def test_odd(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An unexpected answer to /kv_event_sources is logged with what to configure."""

    class RanklessPublisher(FakePublisher):
        async def answer_sources(self, _: web.Request) -> web.Response:
            """No map of ranks."""
            return web.json_response([])

    caplog.set_level(logging.WARNING, "ttft_otel")
    async with run_publisher(RanklessPublisher(tmp_path)) as url, run_source(build_fleet(url)):
        await wait_until(lambda: "did not return an object by rank" in caplog.text)
    assert "write --kv-events-endpoint INSTANCE_URL=ENDPOINT" in caplog.text


async def test_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks beyond the index's limit are counted, and logged with their meaning."""
    monkeypatch.setattr(kv_events_source, "REFRESH_INTERVAL_S", 0.05)
    caplog.set_level(logging.WARNING, "ttft_otel")

    publisher = FakePublisher(tmp_path, FakeEngine(BLOCK_TOKENS))
    publisher.engine.compute_prompt(PROMPT_IDS)
    source = KvEventsSource()
    assert isinstance(source.index, ReportedIndex)
    source.index.max_reported = 6  # half of it for one instance
    async with run_publisher(publisher) as url, run_source(build_fleet(url), source):
        await publisher.publish_events()
        await wait_until(lambda: count_indexed_blocks(source, url, PROMPT_IDS) == 3)
        assert source.describe_instances()[url]["blocks"] == 3
        assert source.describe_instances()[url]["counts"]["dropped"] == 2
        assert get_metric(source, url, f"{metric_names.ROUTER_KV_EVENTS}_total", "dropped") == 2
        await wait_until(lambda: "counts as not cached" in caplog.text)


async def test_reports_instead(tmp_path: Path) -> None:
    """Once an instance reports, what it was sent counts no more."""
    publisher = FakePublisher(tmp_path, FakeEngine(BLOCK_TOKENS), status=404)
    async with run_publisher(publisher) as url:
        value = f"{url}={publisher.events_endpoint},{publisher.replay_endpoint}"
        source = KvEventsSource([value])
        source.index.block_size = BLOCK_TOKENS
        source.index.record_served(url, compute_block_keys(OTHER_IDS, BLOCK_TOKENS))
        publisher.engine.compute_prompt(PROMPT_IDS)
        await publisher.publish_events()
        async with run_source(build_fleet(url), source):
            await wait_until(lambda: count_indexed_blocks(source, url, PROMPT_IDS) == 5)
            source.index.record_served(url, compute_block_keys(OTHER_IDS, BLOCK_TOKENS))
            assert count_indexed_blocks(source, url, OTHER_IDS) == 0


@pytest.mark.parametrize("is_away", [False, True])
async def test_reports_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_away: bool
) -> None:
    """An engine without events, or whose publisher is away, is known by what it is sent from then on.

    When it publishes again, all that it has is known again.
    """
    monkeypatch.setattr(kv_events_source, "REFRESH_INTERVAL_S", 0.05)
    monkeypatch.setattr(kv_events_source, "RECONNECT_DELAY_S", 0.05)
    monkeypatch.setattr(kv_events_source, "MAX_SILENCE_S", 0.2)

    async with run_followed_publisher(tmp_path) as (publisher, url, source):
        if is_away:
            await publisher.close()
        else:
            publisher.status = 404
        await wait_until(lambda: source.describe_instances()[url]["source"] == "history")
        assert count_indexed_blocks(source, url, PROMPT_IDS) == 0
        await wait_until(lambda: len(source.index) == 0)
        source.index.record_served(url, compute_block_keys(OTHER_IDS, BLOCK_TOKENS))
        assert count_indexed_blocks(source, url, OTHER_IDS) == 3
        publisher.status = 200
        context = zmq.asyncio.Context()
        if is_away:
            publisher.bind_sockets(context)
        await wait_until(lambda: count_indexed_blocks(source, url, PROMPT_IDS) == 5)
        assert count_indexed_blocks(source, url, OTHER_IDS) == 0
        await publisher.close()
        context.destroy(linger=0)


async def test_unknown_instance(caplog: pytest.LogCaptureFixture) -> None:
    """An endpoint of an instance that is not there is told to the operator."""
    source = KvEventsSource(["http://127.0.0.1:9=tcp://*:5557"])
    async with run_source(build_fleet(), source):
        assert source.describe_instances() == {}
    assert "http://127.0.0.1:9, which is no instance that prefills" in caplog.text


def test_given() -> None:
    """Endpoints are read by instance, in the order of ranks; wildcards are the instance's host."""
    one, two = "http://10.0.0.1:8000=tcp://*:5557,tcp://*:5558", "http://10.0.0.1:8000/=ipc:///a"

    assert parse_configured([one, two]) == {
        "http://10.0.0.1:8000": [
            EventEndpoint("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"),
            EventEndpoint("ipc:///a"),
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
        parse_configured([value])


def test_told() -> None:
    """vLLM's own answer is read by rank; publishers of another kind and answers that are none are not."""
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557"}
    answer = {"0": config, "1": {**config, "replay_endpoint": None, "topic": "kv"}}

    assert parse_announced(answer, "http://[::1]:8000") == {
        0: EventEndpoint("tcp://[::1]:5557"),
        1: EventEndpoint("tcp://[::1]:5557", "", "kv"),
    }
    assert parse_announced({"0": {"publisher": "null"}}, "http://a:1") == {}
    for wrong in ([], {"0": []}, {"a": config}, {"0": {**config, "endpoint": None}}):
        with pytest.raises(ValueError):
            parse_announced(wrong, "http://a:1")
    assert resolve_address("tcp://0.0.0.0:1", "b") == "tcp://b:1"


def test_without_zmq(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pyzmq is missing the operator hears how to get it."""
    monkeypatch.delitem(
        sys.modules, "ttft_otel.router.routing.prefixes.kv_events_source", raising=False
    )
    monkeypatch.setitem(sys.modules, "zmq.asyncio", None)

    with pytest.raises(ImportError, match="pip install"):
        importlib.import_module("ttft_otel.router.routing.prefixes.kv_events_source")


async def test_many_instances() -> None:
    """The more instances, the less of each one's history is kept."""
    urls = [f"http://127.0.0.1:{port}" for port in range(1, 101)]
    source = PrefixSource(SentHistory(BLOCK_TOKENS, MAX_HISTORY_BLOCKS))
    async with run_source(build_fleet(*urls), source):
        for number in range(20):
            source.index.record_served(urls[0], range(number * 1000, number * 1000 + 1000))
        assert source.describe_instances()[urls[0]]["blocks"] == 10_000


@asynccontextmanager
async def run_history_source() -> AsyncIterator[tuple[InstancePool, PrefixSource]]:
    """Two instances, and the source that knows what the router has sent them."""
    here = build_fleet("http://127.0.0.1:1", "http://127.0.0.1:2")
    history = PrefixSource(SentHistory(BLOCK_TOKENS, MAX_HISTORY_BLOCKS))
    async with run_source(here, history) as source:
        yield here, source


@pytest.mark.parametrize("draining", [False, True])
async def test_history_of_a_process(draining: bool) -> None:
    """What an instance was sent before it failed does not count: it may be a new process."""
    async with run_history_source() as (here, source):
        one, two = here
        for each in here:
            source.index.record_served(each.url, compute_block_keys(PROMPT_IDS, BLOCK_TOKENS))
            here.mark_healthy(each)
        here.set_draining(one, draining)
        here.mark_failed(one, "its process ended")
        here.mark_healthy(one)
        here.set_draining(one, False)
        assert count_indexed_blocks(source, one.url, PROMPT_IDS) == 0
        assert count_indexed_blocks(source, two.url, PROMPT_IDS) == 5
        source.index.record_served(one.url, compute_block_keys(OTHER_IDS, BLOCK_TOKENS))
        here.mark_healthy(one)
        assert count_indexed_blocks(source, one.url, OTHER_IDS) == 3


async def test_gone() -> None:
    """A request in flight at an instance that was removed adds nothing to the index."""
    async with run_history_source() as (here, source):
        gone, stays = here
        here.remove_instance(gone)
        source.sync_instances()
        for each in (gone, stays):
            source.index.record_served(each.url, compute_block_keys(PROMPT_IDS, BLOCK_TOKENS))
        assert count_indexed_blocks(source, gone.url, PROMPT_IDS) == 0
        assert count_indexed_blocks(source, stays.url, PROMPT_IDS) == 5
