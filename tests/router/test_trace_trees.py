# SPDX-License-Identifier: Apache-2.0
"""The router's whole trace of one request, per topology, against tests/golden/trees.json.

All spans with all attributes, as the exporter makes them; lengths, ports and ids apart. To accept a
change: PYTHONPATH=tests python -c "from router import test_trace_trees; test_trace_trees.write_golden()".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from router import fake_instances, fake_pair, scripted_knowledge
from router.fake_instances import TRACEPARENT, InstancePlan, run_routed_instances, wait_until
from ttft_otel.exporter.spans import span_builder
from ttft_otel.model.names import header_names, keys

GOLDEN = Path(__file__).parents[1] / "golden" / "trees.json"
REQUEST_ID = "golden"
ENCODER_PLAN = InstancePlan(
    {"encoder.compute": 12}, reported_us={"receive": 1000, "encoder.compute": 9000}
)
BACKEND_PLAN = InstancePlan(
    {"prefill.compute": 12}, reported_us={"prefill.queue": 1000, "prefill.compute": 9000}
)


@contextlib.asynccontextmanager
async def deploy_routed() -> AsyncIterator[tuple[Any, ...]]:
    """Two plain servers, of which one has a part of the prompt."""
    cached_by_url: dict[str, int] = {}
    source = scripted_knowledge.ScriptedSource(cached_by_url)
    routing = scripted_knowledge.build_routing_factory("ttft", None, source, ttft_model="trapezoid")
    async with run_routed_instances([BACKEND_PLAN] * 2, routing=routing) as (router, a, b):
        cached_by_url[b.url] = 320
        yield router, a, b


def deploy_failing() -> Any:
    """A plain server that cuts the connection."""
    return run_routed_instances([InstancePlan({"prefill.compute": 150}, dropped_requests=1)])


def deploy_disaggregated(mode: str, *encoder: InstancePlan) -> Any:
    """Prefill and decode apart, behind an encoder or not."""
    return fake_pair.run_disaggregated(fake_pair.PairModel(), *encoder, first_token=mode)


MODES = ("off", "strip")
TOPOLOGIES = {
    "mono": partial(run_routed_instances, [BACKEND_PLAN]),
    "retried": partial(run_routed_instances, [InstancePlan(status=503), BACKEND_PLAN]),
    "routed": deploy_routed,
    "failed": deploy_failing,
    "epd": partial(run_routed_instances, [BACKEND_PLAN], [ENCODER_PLAN]),
    **{f"pd {mode}": partial(deploy_disaggregated, mode) for mode in MODES},
    **{f"epd3 {mode}": partial(deploy_disaggregated, mode, ENCODER_PLAN) for mode in MODES},
}


async def build_tree(topology: str) -> Any:
    """The trace of one streamed request with an image, as nested dictionaries."""
    async with TOPOLOGIES[topology]() as (router, *instances):
        await router.get_json("/v1/models")
        await wait_until(lambda: all(each.models is not None for each in router.fleet))
        images = ["a"] if topology.startswith("epd") else []
        body = fake_instances.build_chat(*images) | {"max_tokens": 4, "tokens": 800}
        named = {"X_Request_Id": REQUEST_ID, "traceparent": TRACEPARENT}
        await router.post_body("/v1/chat/completions", body, **named)
        records = await router.wait_for_records(1 if topology == "failed" else 2)
        made = [span for each in records for span in span_builder.build_spans(each, Resource({}))]
        served = {
            seen.headers["traceparent"].split("-")[2]: [seen.headers[header_names.LEG], seen.path]
            for instance in instances
            for seen in instance.received
        }
        return nest_spans(made, int(TRACEPARENT.split("-")[2], 16), served)


def nest_spans(made: list[ReadableSpan], parent: int, served: dict[str, list[str]]) -> list[Any]:
    """The spans below a parent, in the order in which they began."""
    below = [each for each in made if each.parent is not None and each.parent.span_id == parent]
    found = []
    for each in sorted(below, key=lambda span: (span.start_time or 0, span.end_time or 0)):
        assert each.context is not None
        node: dict[str, Any] = {"name": each.name, "kind": each.kind.name}
        if not each.status.is_ok and each.status.status_code.name == "ERROR":
            node["status"] = "ERROR"
        node["attributes"] = {
            key: normalize_attribute(key, value)
            for key, value in sorted((each.attributes or {}).items())
        }
        if f"{each.context.span_id:016x}" in served:
            node["served"] = served[f"{each.context.span_id:016x}"]
        if children := nest_spans(made, each.context.span_id, served):
            node["children"] = children
        found.append(node)
    return found


def normalize_attribute(key: str, value: Any) -> Any:
    """An attribute without what differs from run to run: lengths and ports."""
    if key.endswith("_us") or key == keys.TIME_TO_FIRST_CHUNK:
        return "length"
    if key == keys.SERVER_PORT:
        return "port"
    if key == keys.ROUTE_INSTANCES:
        return [each.rpartition(":")[0] + ":port" for each in value]
    if isinstance(value, tuple):
        return list(value)
    return value.rpartition(":")[0] + ":port" if key == keys.INSTANCE else value


def write_golden() -> None:
    """Write what is into the golden file."""
    made = {topology: asyncio.run(build_tree(topology)) for topology in TOPOLOGIES}
    GOLDEN.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_tree(topology: str) -> None:
    """Every span, its place, its attributes, and who served each call, are the golden file's."""
    assert await build_tree(topology) == json.loads(GOLDEN.read_text())[topology]


def test_golden_is_whole() -> None:
    """The golden file has these topologies, and no other."""
    assert set(json.loads(GOLDEN.read_text())) == set(TOPOLOGIES)
