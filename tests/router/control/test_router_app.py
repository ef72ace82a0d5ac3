# SPDX-License-Identifier: Apache-2.0
"""The control plane's endpoints, and the command that starts them."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from typing import Any

import pytest
from click.testing import CliRunner
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from router import fake_instances, raw_http
from router.fake_instances import run_routed_instances
from ttft_otel.commands.router import router_options
from ttft_otel.commands.router.command import EXAMPLES, command
from ttft_otel.model.names import env_names
from ttft_otel.router import types
from ttft_otel.router.control import app
from ttft_otel.router.proxy.admission import AdmissionGate
from ttft_otel.router.proxy.endpoint import ProxyEndpoint
from ttft_otel.router.routing.policies.block_index import SentHistory
from ttft_otel.router.routing.prefixes import PrefixSource
from ttft_otel.router.routing.routing_service import RoutingService
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.router.upstream.upstream_client import UpstreamClient
from ttft_otel.tracing.settings import Settings


async def test_health_follows_the_fleet() -> None:
    """/healthz succeeds at once, /readyz and /health when each leg has a healthy instance."""
    down = fake_instances.find_unused_url()
    async with fake_instances.run_instance() as one:
        for backends, ready in (([one.url], 200), ([one.url, down], 200), ([down], 503)):
            async with fake_instances.run_router(backends, [one.url]) as router:
                assert await get_status(router, "/healthz") == 200
                assert await get_status(router, "/readyz") == ready
                assert await get_status(router, "/health") == ready


async def test_models_are_merged() -> None:
    """/v1/models lists each model once, however many instances have it; 502 when none answers."""
    async with fake_instances.run_instance() as a, fake_instances.run_instance() as b:
        async with fake_instances.run_router(
            [a.url, b.url, fake_instances.find_unused_url()]
        ) as router:
            async with router.client.get(f"{router.url}/v1/models") as response:
                assert (await response.json())["data"] == [{"id": "tiny"}]
    async with contextlib.AsyncExitStack() as stack:
        gone = await stack.enter_async_context(fake_instances.run_instance())
        async with fake_instances.run_router([gone.url]) as router:
            assert await get_status(router, "/v1/models") == 200
            await stack.aclose()
            assert await get_status(router, "/v1/models") == 200  # what it said before
    async with fake_instances.run_router([fake_instances.find_unused_url()]) as router:
        assert await get_status(router, "/v1/models") == 502


async def test_what_answers_without_a_key() -> None:
    """Probes and metrics need no key; everything else does, and no page describes the API."""
    async with fake_instances.run_routed_instances(keys=["k"]) as (router, one):
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
    async with fake_instances.run_routed_instances() as (router, one):
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
    legs = UpstreamClient(fleet, routing)
    built = app.build_app(
        ProxyEndpoint(legs, routing, Settings(), None, admission=AdmissionGate(legs)), dict
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
        fake_instances.run_instance(fake_instances.InstancePlan({})) as collector,
        fake_instances.run_instance() as one,
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
