# SPDX-License-Identifier: Apache-2.0
"""The router's whole trace of one request, per topology, against tests/golden/trees.json.

All spans with all attributes, as the exporter makes them; lengths, ports and ids apart. To accept a
change: PYTHONPATH=tests python -c "from router import test_trees; test_trees.accept()".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from router import fakes, known, pd
from router.fakes import PARENT, Plan
from ttft_otel import names
from ttft_otel.exporter import spans

GOLDEN = Path(__file__).parents[1] / "golden" / "trees.json"
ID = "golden"
E = Plan({"encoder.compute": 12}, says={"receive": 1000, "encoder.compute": 9000})
PD = Plan({"prefill.compute": 12}, says={"prefill.queue": 1000, "prefill.compute": 9000})
Deployed = AsyncIterator[tuple[fakes.Router, Sequence[fakes.Instance]]]


@contextlib.asynccontextmanager
async def mono() -> Deployed:
    """One plain server."""
    async with fakes.instance(PD) as one, fakes.router([one.url]) as router:
        yield router, [one]


@contextlib.asynccontextmanager
async def retried() -> Deployed:
    """Two plain servers, of which the first one cannot."""
    async with fakes.instance(Plan(status=503)) as a, fakes.instance(PD) as b:
        async with fakes.router([a.url, b.url]) as router:
            yield router, [a, b]


@contextlib.asynccontextmanager
async def routed() -> Deployed:
    """Two plain servers, of which one has a part of the prompt."""
    async with fakes.instance(PD) as a, fakes.instance(PD) as b:
        source = known.Source(tells={b.url: 320})
        routing = known.routing("ttft", None, source, score="trapezoid")
        async with fakes.router([a.url, b.url], routing=routing) as router:
            yield router, [a, b]


@contextlib.asynccontextmanager
async def failed() -> Deployed:
    """A plain server that cuts the connection."""
    plan = Plan({"prefill.compute": 150}, drops=1)
    async with fakes.instance(plan) as one, fakes.router([one.url]) as router:
        yield router, [one]


@contextlib.asynccontextmanager
async def epd() -> Deployed:
    """An encoder, and one server for the rest."""
    async with fakes.instance(E) as e, fakes.instance(PD) as one:
        async with fakes.router([one.url], [e.url]) as router:
            yield router, [e, one]


def apart(mode: str, encoder: bool) -> Callable[[], contextlib.AbstractAsyncContextManager[Any]]:
    """Prefill and decode apart, behind an encoder or not."""

    @contextlib.asynccontextmanager
    async def deployed() -> Deployed:
        model = pd.Model()
        async with (
            pd.server(model, False) as prefill,
            pd.server(model, True) as decode,
            fakes.instance(E) as e,
            fakes.router(
                [],
                [e.url] if encoder else [],
                prefills=[prefill.url],
                decodes=[decode.url],
                first_token=mode,
            ) as router,
        ):
            yield router, [e, prefill, decode]

    return deployed


TOPOLOGIES = {
    "mono": mono,
    "retried": retried,
    "routed": routed,
    "failed": failed,
    "epd": epd,
    **{f"pd {mode}": apart(mode, False) for mode in ("off", "strip", "continue")},
    **{f"epd3 {mode}": apart(mode, True) for mode in ("off", "strip", "continue")},
}


async def tree(topology: str) -> Any:
    """The trace of one streamed request with an image, as nested dictionaries."""
    async with TOPOLOGIES[topology]() as (router, instances):
        await router.get("/v1/models")
        for each in router.fleet:
            while each.models is None:
                await asyncio.sleep(0.01)
        images = ["a"] if topology.startswith("epd") else []
        body = fakes.chat(*images) | {"max_tokens": 4, "tokens": 800}
        named = {"X_Request_Id": ID, "traceparent": PARENT}
        await router.post("/v1/chat/completions", body, **named)
        records = await router.settled(1 if topology == "failed" else 2)
        made = [span for each in records for span in spans.build(each, Resource({}))]
        served = {
            seen.headers["traceparent"].split("-")[2]: [seen.headers[names.LEG_HEADER], seen.path]
            for instance in instances
            for seen in instance.seen
        }
        return nested(made, int(PARENT.split("-")[2], 16), served)


def nested(made: list[ReadableSpan], parent: int, served: dict[str, list[str]]) -> list[Any]:
    """The spans below a parent, in the order in which they began."""
    below = [each for each in made if each.parent is not None and each.parent.span_id == parent]
    found = []
    for each in sorted(below, key=lambda span: (span.start_time or 0, span.end_time or 0)):
        assert each.context is not None
        node: dict[str, Any] = {"name": each.name, "kind": each.kind.name}
        if not each.status.is_ok and each.status.status_code.name == "ERROR":
            node["status"] = "ERROR"
        node["attributes"] = {
            key: plain(key, value) for key, value in sorted((each.attributes or {}).items())
        }
        if f"{each.context.span_id:016x}" in served:
            node["served"] = served[f"{each.context.span_id:016x}"]
        if children := nested(made, each.context.span_id, served):
            node["children"] = children
        found.append(node)
    return found


def plain(key: str, value: Any) -> Any:
    """An attribute without what differs from run to run: lengths and ports."""
    if key.endswith("_us") or key == names.FIRST_CHUNK:
        return "length"
    if key == names.SERVER_PORT:
        return "port"
    if key == names.ROUTE_INSTANCES:
        return [each.rpartition(":")[0] + ":port" for each in value]
    if isinstance(value, tuple):
        return list(value)
    return value.rpartition(":")[0] + ":port" if key == names.INSTANCE else value


def run(topology: str) -> Any:
    """The tree, in a loop of its own."""
    found: list[Any] = []

    async def scenario() -> None:
        found.extend(await tree(topology))

    fakes.run(scenario)
    return found


def accept() -> None:
    """Write what is into the golden file."""
    made = {topology: run(topology) for topology in TOPOLOGIES}
    GOLDEN.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_tree(topology: str) -> None:
    """Every span, its place, its attributes, and who served each call, are the golden file's."""
    assert run(topology) == json.loads(GOLDEN.read_text())[topology]


def test_golden_is_whole() -> None:
    """The golden file has these topologies, and no other."""
    assert set(json.loads(GOLDEN.read_text())) == set(TOPOLOGIES)


def test_attempts_are_spans() -> None:
    """A retry has both attempts in its tree; what failed has its error, and the stage it died in."""
    golden = json.loads(GOLDEN.read_text())
    (server,) = golden["retried"]
    calls = [each for each in server["children"] if each["kind"] == "CLIENT"]
    assert [each["attributes"].get(names.ERROR_TYPE) for each in calls] == ["503", None]
    assert [each["attributes"].get(names.ATTEMPT) for each in calls] == [None, 2]
    (server,) = golden["failed"]
    told = {each["name"]: each for each in server["children"]}
    assert told[names.TTFT]["attributes"][names.DIED_IN] == "router.hop.mono"
    assert len(server["children"]) == 2
