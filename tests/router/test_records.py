# SPDX-License-Identifier: Apache-2.0
"""What is told of a request: stages have the delays that were there, traces are those of golden/trees.json.

Traces are whole, per topology: all spans with all attributes, as the exporter makes them; lengths, ports and
ids apart.
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

from lab.delay_proxy import run_delay_proxy
from router import fake_instances, scripted_knowledge
from router.fake_instances import TRACEPARENT, InstancePlan, run_routed_instances, wait_until
from ttft_otel.exporter import span_batch
from ttft_otel.model.names import header_names, keys
from ttft_otel.model.record import (
    Handover,
    HandoverCall,
    Record,
    Ttft,
    decode_record,
    encode_record,
)
from ttft_otel.router.proxy.exchange_reporter import build_record
from ttft_otel.router.timeline import Attempt, Exchange, RequestTimeline
from ttft_otel.router.types import parse_instance_url
from ttft_otel.tracing import measurement
from ttft_otel.tracing.context import NO_CONTEXT
from ttft_otel.tracing.settings import Settings

MAX_ERROR_US = 15_000  # microseconds: everything is in one loop; and what the loop itself was late


def allow_us(delays: fake_instances.LoopDelays) -> int:
    """What a time may be too long by."""
    return MAX_ERROR_US + delays.total_us


def check_ttft(record: Record) -> Ttft:
    """The ttft half, after its sums are checked."""
    ttft = record.ttft
    assert ttft is not None and (record.role, record.service) == ("router", "ttft-otel-router")
    assert sum(ttft.stages.values()) + ttft.unattributed == ttft.end - ttft.start
    assert ttft.pieces[0].start == ttft.start and ttft.pieces[-1].end == ttft.end
    for one, two in zip(ttft.pieces, ttft.pieces[1:], strict=False):
        assert one.end == two.start
    return ttft


async def test_a_stream_tells_twice() -> None:
    """The ttft half goes out with the first token, the server half and the calls at the end."""
    delays = fake_instances.LoopDelays()
    async with fake_instances.run_routed_instances([InstancePlan(gap_s=0.2)]) as (router, one):
        url = f"{router.url}/v1/chat/completions"
        async with router.client.post(url, json=fake_instances.build_chat()) as response:
            await response.content.readany()
            (first,) = await router.wait_for_records(1)
            await response.read()
        last = (await router.wait_for_records(2))[1]
        assert first.server is None and last.ttft is None and last.server is not None
        assert first.calls == () and len(last.calls) == 1
        assert first.span_id == last.span_id and first.trace_id == last.trace_id
        assert 400_000 < last.server.end < 700_000 + delays.total_us and last.server.status == 200
        ttft = check_ttft(first)
        assert 20_000 <= ttft.end < 20_000 + 3 * allow_us(delays)
        assert ttft.attributes == {"ttft.streaming": True}
        assert first.attributes == {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.model": "tiny",
            "gen_ai.request.stream": True,
        }
        (call,) = last.calls
        assert (call.leg, call.status, call.name) == ("mono", 200, "POST /v1/chat/completions")
        assert call.end - call.start > 400_000


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("ttft;dur=0.100", "ttft;dur=0.100"),
        # As a header's bytes that are no text are read, which msgpack cannot encode.
        ("ttft;dur=0.100, x;desc=\udcff\xe9", "ttft;dur=0.100, x;desc=??"),
        ("ttft;dur=0.100, " * 1000, ""),
    ],
)
def test_any_timing_of_a_decode_instance_can_be_told(said: str, kept: str) -> None:
    """The record has the header's text, whatever its bytes are, and none that is too long to be read."""
    exchange = Exchange(NO_CONTEXT, "r", "/", "/", "http", "chat", True, RequestTimeline(1000))
    exchange.timeline.ended_us = 2000
    attempts = exchange.add_attempts(exchange.begin_handover())
    attempt = Attempt(
        "decode", "/", parse_instance_url("http://h:1", "decode"), "", 2100, first_byte_us=2900
    )
    attempt.record_server_timing(said)
    attempts.append(attempt)
    assert exchange.handover_timeline is not None
    exchange.handover_timeline.ended_us = 3000

    record = decode_record(encode_record(build_record(exchange, None, 4000)))

    assert record.handover == Handover(
        1000, 2000, False, (HandoverCall("decode", 1100, 1900, 0, server_timing=kept),)
    )


async def test_delays_show_in_their_stages() -> None:
    """80 ms in one stage of the backend, or of an encoder, is 80 ms there and nowhere else."""
    delays = fake_instances.LoopDelays()
    for leg, stage in (("prefill_decode", "prefill.queue"), ("encode", "preprocess")):
        encode = {"preprocess": 5, "encoder.compute": 5}
        backend = {"prefill.queue": 5, "prefill.compute": 5}
        (encode if leg == "encode" else backend)[stage] = 80
        async with fake_instances.run_routed_instances(
            [InstancePlan(backend)], [InstancePlan(encode)]
        ) as (router, e, pd):
            await router.post_chat("a")
            ttft = check_ttft((await router.wait_for_records(2))[0])
            assert 80_000 <= ttft.stages.pop(f"{leg}.{stage}") < 80_000 + allow_us(delays)
            assert all(length < 5_000 + allow_us(delays) for length in ttft.stages.values())
            assert ttft.unattributed < 2000 + delays.total_us


async def test_stages_name_their_server() -> None:
    """Stages of a leg, its hop among them, say which instance had it; the router's own do not."""
    async with fake_instances.run_routed_instances(encoders=[None]) as (router, e, pd):
        await router.post_chat("a")
        ttft = check_ttft((await router.wait_for_records(2))[0])
        legs = {"encode": e.url, "prefill_decode": pd.url}
        for piece in ttft.pieces:
            own = [
                url.removeprefix("http://")
                for leg, url in legs.items()
                if leg in piece.name.removeprefix("router.hop.").split(".")
            ]
            said = piece.attributes.get(keys.INSTANCE)
            assert ([] if said is None else [said]) == own, piece
        assert len({piece.attributes.get(keys.INSTANCE) for piece in ttft.pieces}) == 3


async def test_a_slow_wire_is_the_hop() -> None:
    """80 ms held back between router and instance is router.hop of that leg."""
    delays = fake_instances.LoopDelays()
    async with fake_instances.run_instance() as e, fake_instances.run_instance() as pd:
        with run_delay_proxy(pd.url, 0.08) as slow:
            async with fake_instances.run_router([slow.url], [e.url]) as router:
                await router.post_chat("a")
                ttft = check_ttft((await router.wait_for_records(2))[0])
                hop_us = ttft.stages["router.hop.prefill_decode"]
                assert 80_000 <= hop_us < 80_000 + allow_us(delays)
                assert ttft.stages["router.hop.encode"] < allow_us(delays)


async def test_slowest_encoder_counts_not_the_sum() -> None:
    """Two encoders of 30 and 90 ms cost 90 ms, and only the slow one's stages are in the sum."""
    delays = fake_instances.LoopDelays()
    async with fake_instances.run_routed_instances(
        encoders=[InstancePlan({"encoder.compute": 30}), InstancePlan({"encoder.compute": 90})]
    ) as (router, fast, slow, pd):
        await router.post_chat("a", "b")
        first, last = await router.wait_for_records(2)
        ttft = check_ttft(first)
        assert 90_000 <= ttft.stages["encode.encoder.compute"] < 90_000 + allow_us(delays)
        assert ttft.end < 90_000 + 20_000 + 3 * allow_us(delays) and len(last.calls) == 3


async def test_plain_answer_leaves_decode_out() -> None:
    """A plain answer's TTFT ends at the instance's first token; one record, not streaming."""
    delays = fake_instances.LoopDelays()
    async with run_routed_instances([InstancePlan(rest_ms=200)]) as (router, one):
        await router.post_chat(stream=False)
        (record,) = await router.wait_for_records(1)
        ttft = check_ttft(record)
        assert 20_000 <= ttft.end < 20_000 + 2 * allow_us(delays)
        assert "router.egress" not in ttft.stages
        assert ttft.attributes == {"ttft.streaming": False}
        assert record.server is not None and record.server.end > 200_000


async def test_silent_and_partial_legs() -> None:
    """A leg without Server-Timing is unattributed; a leg's own unattributed joins the router's."""
    delays = fake_instances.LoopDelays()
    async with fake_instances.run_routed_instances(
        [InstancePlan(sends_timing=False), InstancePlan(unattributed_ms=40)]
    ) as (router, silent, partial):
        await router.post_chat()
        await router.post_chat()
        first, second = (check_ttft(each) for each in await router.wait_for_records(4) if each.ttft)
        assert first.unattributed >= 20_000
        assert not any(name.startswith(("mono.", "router.hop")) for name in first.stages)
        assert 40_000 <= second.unattributed < 40_000 + allow_us(delays)


ROLE_EVENT = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
ERROR_EVENT = b'data: {"error": {"message": "Internal server error", "code": 500}}\n\n'


@pytest.mark.parametrize(
    ("plan", "is_streaming"),
    [
        # vLLM's stream of a chat that fails before its first token: role, error, end.
        (InstancePlan(chunks=(ROLE_EVENT, ERROR_EVENT), reports_no_token=True, gap_s=0.02), True),
        (InstancePlan(reports_no_token=True), False),  # "abort", with status 200
        (InstancePlan(chunks=(ERROR_EVENT, b"data: [DONE]\n\n"), sends_timing=False), True),
        (InstancePlan(chunks=(ERROR_EVENT,), sends_timing=False), True),
    ],
)
async def test_an_answer_without_a_token_has_failed(plan: InstancePlan, is_streaming: bool) -> None:
    """An instance whose engine fails answers at once: that is no short TTFT, but none."""
    async with fake_instances.run_routed_instances([plan]) as (router, _):
        status, _, _ = await router.post_chat(stream=is_streaming)
        (record,) = await router.wait_for_records(1)
        ttft = check_ttft(record)
        assert status == 200 and record.server is not None
        assert (ttft.error, ttft.died) == ("no_token", "router.hop.mono")
        assert record.server.error == record.calls[0].error == "no_token"


async def test_unsampled_requests_are_measured_not_told() -> None:
    """Without the sampled flag no record leaves, legs get flag 00, and the report still knows it."""
    async with fake_instances.run_routed_instances() as (router, one):
        await router.post_chat(traceparent=TRACEPARENT[:-1] + "0", X_Request_Id="quiet")
        assert one.received[0].headers["traceparent"].endswith("-00")
        status, _, _ = await router.get_json("/ttft_report/quiet")
        assert status == 200 and not router.records
    async with run_routed_instances(settings=Settings(sampler="always_off")) as (router, one):
        await router.post_chat()
        assert not router.records


async def test_of_what_another_router_counts_nothing_is_sent() -> None:
    """An unsampled request behind a traced router has neither spans nor metrics here: no empty record."""
    settings = Settings(trust_sampled=True, metrics=True)
    async with fake_instances.run_routed_instances(settings=settings) as (router, one):
        for stream in (True, False):
            await router.post_chat(
                stream=stream, traceparent=TRACEPARENT[:-1] + "0", x_ttft_leg="mono"
            )
        await router.post_chat()
        assert [each.outermost for each in await router.wait_for_records(2)] == [True] * 2


async def test_off_it_is_a_plain_proxy() -> None:
    """With tracing off the caller's trace headers go on as they came, and so does Server-Timing."""
    async with fake_instances.run_routed_instances(traced=False) as (router, one):
        asked = {"traceparent": TRACEPARENT, "tracestate": "v=1", "x_ttft_timing": "1"}
        for stream in (True, False):
            _, headers, _ = await router.post_chat(stream=stream, X_Request_Id="off", **asked)
            assert headers["Server-Timing"].startswith("prefill.compute;dur=")
            seen = one.received[-1].headers
            assert (seen["traceparent"], seen["tracestate"]) == (TRACEPARENT, "v=1")
            assert seen["x-ttft-timing"] == "1" and "x-ttft-leg" not in seen
            assert seen["X-Request-Id"] == headers["X-Request-Id"] == "off"
        await router.post_chat()
        assert "traceparent" not in one.received[-1].headers
        assert "x-ttft-timing" not in one.received[-1].headers
        status, _, missing = await router.get_json("/ttft_report/off")
        assert status == 404 and "TTFT_OTEL=0" in missing["error"]["message"]
        assert not router.records


async def test_other_posts_have_no_ttft() -> None:
    """Embeddings and the like are forwarded and traced, without a TTFT they do not have."""
    async with fake_instances.run_routed_instances() as (router, one):
        assert (await router.post_body("/v1/embeddings", {"model": "m"}))[0] == 200
        (record,) = await router.wait_for_records(1)
        assert record.ttft is None and record.server is not None
        assert record.server.name == "POST /v1/{path:path}"


async def test_report() -> None:
    """/ttft_report gives each role and the whole; the unknown is a 404 that says so."""
    async with fake_instances.run_routed_instances(
        encoders=[InstancePlan({"encoder.compute": 30})]
    ) as (router, e, pd):
        await router.post_chat("a", X_Request_Id="r-1")
        status, _, report = await router.get_json("/ttft_report/r-1")
        assert status == 200 and report["request_id"] == "r-1"
        assert report["by_role"]["encode"]["enc_compute_time_ms"] >= 30
        assert report["by_role"]["prefill_decode"]["prefill_compute_time_ms"] >= 20
        whole = report["combined"]
        total = sum(whole["stages"].values()) + whole["unattributed_ms"]
        assert abs(total - whole["ttft_ms"]) < 1e-6 and whole["ttft_ms"] > 50
        status, _, missing = await router.get_json("/ttft_report/other")
        assert status == 404 and "other" in missing["error"]["message"]


async def test_reports_are_bounded() -> None:
    """Beyond the bound the oldest report goes."""
    reports = fake_instances.RecentReports(3)
    async with fake_instances.run_routed_instances(reports=reports) as (router, one):
        for number in range(5):
            await router.post_chat(X_Request_Id=f"r{number}")
        kept = [number for number in range(5) if reports.get_report("", f"r{number}") is not None]
        assert kept == [2, 3, 4] and len(reports) == 3


async def test_an_unsampled_request_is_counted_once() -> None:
    """With metrics on a stream that is not sampled leaves measurements of its TTFT and of its end."""
    counting = Settings(sampler="always_off", metrics=True)
    async with fake_instances.run_routed_instances(settings=counting) as (router, one):
        url = f"{router.url}/v1/chat/completions"
        async with router.client.post(url, json=fake_instances.build_chat()) as response:
            await response.read()
        data, end = await router.wait_for_encoded(2)
        found = measurement.decode_measurement(data)
        head = measurement.decode_head(bytes(found.head))
        assert (head.role, head.model, head.error) == ("router", "tiny", "")
        assert sum(found.times_us[1:]) == found.times_us[0] > 20_000
        instances = dict(head.stages)
        assert instances["router.receive"] == ""
        assert instances["router.hop.mono"] == one.url.removeprefix("http://")
        measured_end = measurement.decode_measurement(end)
        end_head = measurement.decode_head(bytes(measured_end.head))
        assert (end_head.has_ttft, end_head.end_error, end_head.stages) == (False, "", ())
        # Only the instance that decodes knows the tokens.
        assert not end_head.has_token_time
        (length_us,) = measured_end.times_us
        assert length_us >= found.times_us[0]


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
    return fake_instances.run_disaggregated(fake_instances.PairModel(), *encoder, first_token=mode)


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
        made = [span for each in records for span in span_batch.build_spans(each, Resource({}))]
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
    """Accept a change of any tree: `PYTHONPATH=tests python -c "from router import test_records as them;
    them.write_golden()"`.
    """
    made = {topology: asyncio.run(build_tree(topology)) for topology in TOPOLOGIES}
    GOLDEN.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_tree(topology: str) -> None:
    """Every span, its place, its attributes, and who served each call, are the golden file's."""
    assert await build_tree(topology) == json.loads(GOLDEN.read_text())[topology]


def test_golden_is_whole() -> None:
    """The golden file has these topologies, and no other."""
    assert set(json.loads(GOLDEN.read_text())) == set(TOPOLOGIES)
