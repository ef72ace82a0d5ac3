# SPDX-License-Identifier: Apache-2.0
"""The control plane's endpoints, the command that starts them, and what its process keeps and ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from click.testing import CliRunner
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from router import fake_instances, raw_http
from router.fake_instances import InstancePlan, run_instance, run_routed_instances, run_router
from ttft_otel.commands.router import router_options
from ttft_otel.commands.router.command import EXAMPLES, command
from ttft_otel.model.names import env_names
from ttft_otel.router import types
from ttft_otel.router.control import app
from ttft_otel.router.control.uvicorn_server import build_uvicorn_config
from ttft_otel.router.proxy.admission import AdmissionGate
from ttft_otel.router.proxy.endpoint import ProxyEndpoint
from ttft_otel.router.routing.policies.block_index import SentHistory
from ttft_otel.router.routing.prefixes.prefix_source import PrefixSource
from ttft_otel.router.routing.routing_service import RoutingService
from ttft_otel.router.routing.upstream_client import UpstreamClient
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.tracing.settings import Settings


async def test_health_follows_the_fleet() -> None:
    """/healthz succeeds at once, /readyz and /health when each leg has a healthy instance."""
    down = fake_instances.find_unused_url()
    async with run_instance() as one:
        for backends, ready in (([one.url], 200), ([one.url, down], 200), ([down], 503)):
            async with run_router(backends, [one.url]) as router:
                assert await get_status(router, "/healthz") == 200
                assert await get_status(router, "/readyz") == ready
                assert await get_status(router, "/health") == ready


async def test_models_are_merged() -> None:
    """/v1/models lists each model once, however many instances have it; 502 when none answers."""
    unused_url = fake_instances.find_unused_url()
    async with contextlib.AsyncExitStack() as stack:
        a, b = [await stack.enter_async_context(run_instance()) for _ in range(2)]
        async with run_router([a.url, b.url, unused_url]) as router:
            for _ in range(2):
                models = (await router.get_json("/v1/models"))[2]
                assert models["data"] == [{"id": "tiny"}]
                await stack.aclose()  # what they said before
    async with run_router([unused_url]) as router:
        assert await get_status(router, "/v1/models") == 502


async def test_what_answers_without_a_key() -> None:
    """Probes and metrics need no key; everything else does, and no page describes the API."""
    async with run_routed_instances(keys=["k"]) as (router, one):
        for path, status in {
            **dict.fromkeys(("/healthz", "/health", "/readyz", "/metrics"), 200),
            **dict.fromkeys(("/v1/models", "/ttft_report/x"), 401),
            **dict.fromkeys(("/docs", "/redoc", "/openapi.json"), 404),
        }.items():
            assert await get_status(router, path) == status, path


async def test_web_pages_of_an_origin() -> None:
    """With --cors-origin a preflight and an answer are marked for its pages, and no others."""

    def allow_origin(router_app: app.RouterApp) -> None:
        router_app.cors_origins = ("https://chat.example",)

    async with run_routed_instances(keys=["k"], prepare=allow_origin) as (router, one):
        url = f"{router.url}/v1/chat/completions"
        asked = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        for origin in ("https://chat.example", "https://other.example"):
            wanted = origin if "chat" in origin else None
            given = {"Origin": origin, **asked}
            async with router.client.options(url, headers=given) as response:
                assert (response.status == 200) == (wanted is not None)
                assert response.headers.get("Access-Control-Allow-Origin") == wanted
            key = {"Origin": origin, "Authorization": "Bearer k"}
            status, headers, _ = await router.post_chat(**key)
            assert status == (403 if wanted is None else 200)
            assert headers.get("Access-Control-Allow-Origin") == wanted


async def test_metrics_count_drops() -> None:
    """/metrics says how many records went out and how many were dropped."""
    async with run_routed_instances() as (router, one):
        await router.post_chat()
        async with router.client.get(f"{router.url}/metrics") as response:
            text = await response.text()
        assert "ttft_otel_records_total 2.0" in text
        assert 'ttft_otel_dropped_total{reason="handoff"} 3.0' in text


def test_help_has_examples() -> None:
    """--help has example commands that parse, and names every flag's environment variable."""
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
            assert router_options.RouterOptions.from_flags(made.params).build_instances()


async def test_what_cannot_start_says_why_and_leaves_nothing() -> None:
    """A prefix source that cannot start ends the start with one line; nothing stays open."""

    class UnreadySource(PrefixSource):
        async def start(self, *_: Any) -> None:
            raise ValueError("no memory for an index: use --prefix-index history")

    fleet = InstancePool({"mono": [types.parse_instance_url("http://127.0.0.1:1", "mono")]})
    routing = RoutingService(fleet, prefix_source=UnreadySource(SentHistory(16, 100)))
    legs = UpstreamClient(routing)
    built = app.build_app(
        ProxyEndpoint(legs, Settings(), None, admission=AdmissionGate(legs)), dict
    )
    said: list[Any] = []
    before = asyncio.all_tasks()

    async def receive_message() -> Any:
        return {"type": "lifespan.startup"}

    async def send_message(message: Any) -> None:
        said.append(message)

    with pytest.raises(ValueError, match="no memory"):
        await built({"type": "lifespan", "state": {}}, receive_message, send_message)
    assert said[0]["type"] == "lifespan.startup.failed" and len(said) == 1
    assert "--prefix-index history" in said[0]["message"] and "\n" not in said[0]["message"]
    assert legs.queries._pool._connector.closed and legs._connections._connector.closed
    assert asyncio.all_tasks() == before


@pytest.mark.full
async def test_the_real_command_drains_when_stopped() -> None:
    """Told to stop at once after a request, it exits with 0 and its spans still arrive by OTLP."""
    async with (
        run_instance(InstancePlan({})) as collector,
        run_instance() as one,
    ):
        traced = {"TTFT_OTEL": "1", env_names.OTEL_EXPORTER_OTLP_ENDPOINT: collector.url}
        async with raw_http.run_router_process("--backend", one.url, **traced) as router:
            answer = await raw_http.send_bytes(router.url, raw_http.encode_request())
            assert raw_http.parse_status(answer) == 200
        found: set[str] = set()
        while not {"ttft", "mono.prefill.compute"} <= found:
            await asyncio.sleep(0.1)
            found |= {name for each in collector.received for name in list_span_names(each.body)}


def list_span_names(body: bytes) -> list[str]:
    """The names of the spans of an export."""
    sent = ExportTraceServiceRequest.FromString(body)
    scopes = [scope for each in sent.resource_spans for scope in each.scope_spans]
    return [span.name for scope in scopes for span in scope.spans]


async def get_status(router: fake_instances.RunningRouter, path: str) -> int:
    """The status of a GET."""
    async with router.client.get(f"{router.url}{path}") as response:
        return response.status


READYZ = b"GET /readyz HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.mark.full
async def test_file_limit_is_raised() -> None:
    """The soft limit of file descriptors is raised to the hard one at the start."""
    async with (
        raw_http.run_instance() as one,
        raw_http.run_router_process("--backend", one.url, max_files=(96, 2048)) as router,
    ):
        text = Path(f"/proc/{router.pid}/limits").read_text()
        assert re.findall(r"Max open files +(\d+) +(\d+)", text) == [("2048", "2048")]


@pytest.mark.full
async def test_clients_leave_descriptors_for_instances() -> None:
    """With 96 descriptors and as many clients the instance stays healthy, and is reached."""
    async with (
        raw_http.run_instance() as one,
        raw_http.run_router_process("--backend", one.url, max_files=(96, 96)) as router,
        contextlib.AsyncExitStack() as clients,
    ):
        host, port = router.url.removeprefix("http://").split(":")
        writers = []
        for _ in range(96):
            reader, writer = await asyncio.open_connection(host, int(port))
            clients.callback(writer.close)
            writers.append((reader, writer))
            await asyncio.sleep(0.002)
        answered = 0
        for reader, writer in writers[:16]:
            writer.write(raw_http.encode_request())
            answered += raw_http.parse_status(await reader.readuntil(b"\r\n\r\n")) == 200
        assert answered == 16
        assert raw_http.parse_status(await writers[16][0].read()) == 503
        for _, writer in writers:
            writer.close()
        await asyncio.sleep(0.1)
        assert raw_http.parse_status(await raw_http.send_bytes(router.url, READYZ)) == 200
        assert await router.read_metric("ttft_otel_router_retries_total") == []
        assert sum(await router.read_metric("ttft_otel_router_refusals_total")) == 80


@pytest.mark.parametrize(
    "plan",
    [InstancePlan({"prefill.compute": 60_000}), InstancePlan(gap_s=60)],
    ids=["before the first token", "in the stream"],
)
async def test_a_stop_is_not_the_clients_doing(plan: InstancePlan) -> None:
    """A request that uvicorn cancels because the router stops is `stopped`, not a client that left."""
    async with (
        run_instance(plan) as one,
        run_router([one.url]) as router,
    ):
        config = build_uvicorn_config(router.app)
        config.lifespan = "off"  # the app is served, and was started, by `router`
        server, sock = uvicorn.Server(config), fake_instances.open_listening_socket()
        serving = asyncio.create_task(server.serve([sock]))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        body = b'{"model": "tiny", "stream": true}'
        client = asyncio.create_task(
            raw_http.send_bytes(url, raw_http.encode_request(body=body), timeout_s=30)
        )
        await fake_instances.wait_until(lambda: one.received)
        record_count = 1
        if plan.gap_s:  # the first token's record, then that of the end
            await router.wait_for_records(1)
            record_count = 2
        server.should_exit = True
        await asyncio.gather(serving, client)
        record = (await router.wait_for_records(record_count))[-1]
        assert record.server is not None
        assert record.server.error == "stopped"


async def ask_plainly(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes
) -> str:
    """Send a request on a connection; gives the response's head in lower case, after its body has come."""
    writer.write(raw_http.encode_request(body=body))
    told = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    if "content-length: " in told:
        await reader.readexactly(int(told.partition("content-length: ")[2].split()[0]))
    return told


@pytest.mark.full
async def test_kept_connections_are_told_to_leave() -> None:
    """While it drains, a response ends its connection; idle ones are closed before requests are refused."""
    plain, stream = b'{"model": "tiny"}', b'{"model": "tiny", "stream": true}'
    permits = asyncio.Semaphore(0)
    async with (
        run_instance(InstancePlan(permits=permits)) as one,
        raw_http.run_router_process("--backend", one.url, "--drain-delay", "3") as router,
    ):
        address = router.url.removeprefix("http://").split(":")
        used, idle, streaming = [await asyncio.open_connection(*address) for _ in range(3)]
        for connection in (used, idle):
            assert "connection: close" not in await ask_plainly(*connection, plain)
        held = asyncio.create_task(ask_plainly(*streaming, stream))
        await fake_instances.wait_until(lambda: len(one.received) == 3)
        os.kill(router.pid, signal.SIGTERM)
        head = ""
        while "connection: close" not in head:
            # Until the signal has arrived there, connections are kept.
            head = await ask_plainly(*used, plain)
            assert head.startswith("http/1.1 200")
        assert await used[0].read() == await idle[0].read() == b""
        # The stream is still under way: it is not the end of the process that closed them.
        for _ in range(100):
            permits.release()
        assert (await held).startswith("http/1.1 200")
        assert (await streaming[0].read()).endswith(b"0\r\n\r\n")
        for _, writer in (used, idle, streaming):
            writer.close()
            await writer.wait_closed()
