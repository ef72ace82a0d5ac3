# SPDX-License-Identifier: Apache-2.0
"""The control plane and the command."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from router import fakes
from ttft_otel import names
from ttft_otel.router import app, choose, config, prefixes
from ttft_otel.router.command import EXAMPLES, command
from ttft_otel.router.fleet import Fleet
from ttft_otel.router.forward import Forward
from ttft_otel.router.gate import Gate
from ttft_otel.router.legs import Legs
from ttft_otel.router.routing import Routing
from ttft_otel.settings import Settings


def test_health_follows_the_fleet() -> None:
    """Alive at once; ready when each leg has an instance that is."""

    async def scenario() -> None:
        down = fakes.unused()
        async with fakes.instance() as one:
            for backends, ready in (([one.url], 200), ([one.url, down], 200), ([down], 503)):
                async with fakes.router(backends, [one.url]) as router:
                    assert await status(router, "/healthz") == 200
                    assert await status(router, "/readyz") == ready
                    assert await status(router, "/health") == ready

    fakes.run(scenario)


def test_models_are_merged() -> None:
    """Each model once, however many backends have it; 502 when none answers."""

    async def scenario() -> None:
        async with fakes.instance() as a, fakes.instance() as b:
            async with fakes.router([a.url, b.url, fakes.unused()]) as router:
                async with router.client.get(f"{router.url}/v1/models") as response:
                    assert (await response.json())["data"] == [{"id": "tiny"}]
        async with contextlib.AsyncExitStack() as stack:
            gone = await stack.enter_async_context(fakes.instance())
            async with fakes.router([gone.url]) as router:
                assert await status(router, "/v1/models") == 200
                await stack.aclose()
                assert await status(router, "/v1/models") == 200  # what it said before
        async with fakes.router([fakes.unused()]) as router:
            assert await status(router, "/v1/models") == 502

    fakes.run(scenario)


def test_metrics_count_drops() -> None:
    """/metrics says how many records went out and how many were dropped."""

    async def scenario() -> None:
        async with fakes.instance() as one, fakes.router([one.url]) as router:
            await router.chat()
            async with router.client.get(f"{router.url}/metrics") as response:
                text = await response.text()
            assert "ttft_otel_records_total 2.0" in text
            assert 'ttft_otel_dropped_total{reason="handoff"} 3.0' in text

    fakes.run(scenario)


def test_bad_url_says_what_to_write() -> None:
    """A flag that is no server's URL is refused with an example."""
    with pytest.raises(ValueError, match="write it like http"):
        choose.instance("localhost:8000", "mono")
    answer = CliRunner().invoke(command, ["--backend", "ftp://x"])
    assert answer.exit_code == 2 and "write it like http" in answer.output


def test_help_has_examples() -> None:
    """--help shows how to start it, in commands that are right, and every flag's variable."""
    text = CliRunner().invoke(command, ["--help"]).output
    joined = " ".join(text.split())
    for option in command.params:
        assert f"TTFT_OTEL_ROUTER_{str(option.name).upper()}" in joined
    shown = EXAMPLES.replace("\\\n", " ").splitlines()
    examples = [shlex.split(line) for line in shown if line.startswith("  ttft-otel router --")]
    assert len(examples) == 5
    for _, name, *flags in examples:
        if "--config" not in flags:
            made = command.make_context(name, flags)
            assert config.Options(**made.params).legs()


def test_control_plane_is_traced_the_data_path_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an endpoint configured a GET makes one span, without send and receive; a POST none."""

    async def scenario() -> None:
        async with fakes.instance() as collector, fakes.instance() as one:
            monkeypatch.setenv(names.ENV_ENDPOINT, collector.url)
            ends = []

            def prepare(built: app.App) -> None:
                ends.append(app.instrument(built, "http/protobuf"))

            async with fakes.router([one.url], prepare=prepare) as router:
                await router.chat()
                await status(router, "/v1/models")
                await status(router, "/healthz")
                await asyncio.to_thread(ends[0])
            sent = ExportTraceServiceRequest.FromString(collector.seen[0].body)
            spans = [s for r in sent.resource_spans for c in r.scope_spans for s in c.spans]
            assert [span.name for span in spans] == ["GET /v1/models"]

    fakes.run(scenario)


def test_what_cannot_start_says_why_and_leaves_nothing() -> None:
    """A source that does not fit the instances is one line with the remedy, and everything is closed."""

    async def scenario() -> None:
        urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
        fleet = Fleet({"mono": [choose.instance(url, "mono") for url in urls]})
        source = prefixes.source("lmcache", lmcache_url="http://127.0.0.1:9")
        legs = Legs(fleet, Routing(fleet, source=source))
        built = app.build(Forward(legs, Settings(), None, gate=Gate(legs)), dict)
        said: list[Any] = []
        before = asyncio.all_tasks()

        async def receive() -> Any:
            return {"type": "lifespan.startup"}

        async def send(message: Any) -> None:
            said.append(message)

        with pytest.raises(ValueError, match="share an address"):
            await built({"type": "lifespan", "state": {}}, receive, send)
        assert said[0]["type"] == "lifespan.startup.failed" and len(said) == 1
        assert "--lmcache-instances" in said[0]["message"] and "\n" not in said[0]["message"]
        with pytest.raises(RuntimeError):
            assert legs.session
        assert asyncio.all_tasks() == before

    fakes.run(scenario)


@pytest.mark.parametrize(("trust", "seen"), [(False, 0), (True, 1)])
def test_an_untrusted_caller_has_no_trace_of_the_control_plane(
    monkeypatch: pytest.MonkeyPatch, trust: bool, seen: int
) -> None:
    """A GET's traceparent decides on sampling only where callers are trusted, as on the data path."""

    async def scenario() -> None:
        async with fakes.instance() as collector, fakes.instance() as one:
            monkeypatch.setenv(names.ENV_ENDPOINT, collector.url)
            ends = []

            def prepare(built: app.App) -> None:
                ends.append(app.instrument(built, "http/protobuf"))

            read = Settings(sampler="parentbased_always_off", trust=trust)
            async with fakes.router([one.url], settings=read, prepare=prepare) as router:
                await router.get("/v1/models", traceparent=fakes.PARENT)
                await asyncio.to_thread(ends[0])
            assert len(collector.seen) == seen

    fakes.run(scenario)


def test_without_endpoint_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No endpoint, no provider: the application stays as it was built."""
    monkeypatch.delenv(names.ENV_ENDPOINT, raising=False)
    monkeypatch.delenv(names.ENV_TRACES_ENDPOINT, raising=False)

    async def scenario() -> None:
        async with fakes.router([fakes.unused()]) as router:
            app.instrument(router.app, "http/protobuf")()
            assert not getattr(router.app.control, "_is_instrumented_by_opentelemetry", False)

    fakes.run(scenario)


def test_the_real_command_drains_when_stopped() -> None:
    """Told to stop at once after a request, it exits with 0 and its spans still arrive by OTLP."""

    async def scenario() -> None:
        async with fakes.instance(fakes.Plan({})) as collector, fakes.instance() as one:
            port = fakes.unused().rpartition(":")[2]
            env = {**os.environ, names.ENV_ENDPOINT: collector.url}
            code = "from ttft_otel.router.command import command; command()"
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, "--backend", one.url, "--port", port, env=env
            )
            async with aiohttp.ClientSession() as client:
                router = fakes.Router(client, f"http://127.0.0.1:{port}", [])
                await up(router)
                assert (await router.chat())[0] == 200
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
            found: set[str] = set()
            while not {"ttft", "mono.prefill.compute"} <= found:
                await asyncio.sleep(0.1)
                for seen in collector.seen:
                    sent = ExportTraceServiceRequest.FromString(seen.body)
                    scopes = [scope for each in sent.resource_spans for scope in each.scope_spans]
                    found |= {span.name for scope in scopes for span in scope.spans}

    fakes.run(scenario, 120)


async def up(router: fakes.Router) -> None:
    """Wait until the router answers."""
    while True:
        try:
            await status(router, "/healthz")
        except aiohttp.ClientError:
            await asyncio.sleep(0.1)
        else:
            return


async def status(router: fakes.Router, path: str) -> int:
    """The status of a GET."""
    async with router.client.get(f"{router.url}{path}") as response:
        return response.status
