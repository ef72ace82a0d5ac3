# SPDX-License-Identifier: Apache-2.0
"""collector/config.yaml on the real collector: what it derives, scrubs and counts, read where it sends it.

Last, metrics of exporter processes through it: the same series, and each request once.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import isclose, nan
from typing import Any
from unittest import mock

import msgspec
import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.sdk.resources import Resource

from lab.otlp_sinks import MetricSink, SpanSink, to_attributes
from tests.fake_tempo import FILES, GOLDEN
from tests.stack.known_requests import (
    KnownRequest,
    build_known_requests,
    build_known_spans,
    list_known_records,
)
from tests.stack.otlp_requests import (
    PUSH_S,
    CollectorFront,
    build_export_request,
    build_own_record,
    build_own_request,
    build_own_resource,
    build_raw_span,
    post_export,
    post_records,
)
from tests.stack.running_stack import StackStarter, wait_until
from ttft_otel.exporter.span_batch import build_spans
from ttft_otel.model import metric_table, stages
from ttft_otel.model.names import keys, metric_names, span_names
from ttft_otel.model.record import Record
from ttft_otel.report.receive import otlp_decoder
from ttft_otel.report.store.database_reader import build_stored_trace
from ttft_otel.tracing import handoff
from ttft_otel.tracing.measurement import encode_for_exporter
from ttft_otel.tracing.settings import Settings


@pytest.fixture(scope="module")
def some_rows() -> list[KnownRequest]:
    """An eighth of the known requests, of all roles, with slow and failed ones."""
    return [row for row in build_known_requests() if not row.number % 8 or row.error]


@pytest.fixture(scope="module")
def rows(front: CollectorFront, some_rows: list[KnownRequest]) -> list[KnownRequest]:
    """The same, sent and passed on."""
    records = list_known_records(some_rows)
    parts = [records[at : at + 100] for at in range(0, len(records), 100)]
    front.send_and_wait(*map(build_own_request, parts))
    for job, many in Counter(stages.SERVICE_NAMES[row.role] for row in some_rows).items():
        front.wait_until_counted(many, job=job)
    return some_rows


def test_known_requests(front: CollectorFront, rows: list[KnownRequest]) -> None:
    """Every ttft and encode span gets its TTFT in ms, rounded down, and the sum of its stages."""
    records = list_known_records(rows, 0)
    expected = {each.ttft.span_id: each.ttft for each in records if each.ttft}
    found = {
        span.span_id.hex(): to_attributes(span.attributes) for span in front.spans.list_spans()
    }

    assert len(expected) > len(rows)
    for span_id, ttft in expected.items():
        length = ttft.end - ttft.start
        derived = found.pop(span_id)
        assert derived[keys.DERIVED_MS] == length // 1000
        assert derived[keys.DERIVED_STAGE_SUM_US] == sum(ttft.stages.values())
        assert derived[keys.DERIVED_UNATTRIBUTED_US] == ttft.unattributed
    ours = [each for each in found.values() if keys.ROLE in each]
    assert ours and not any(keys.DERIVED_MS in each for each in ours if keys.STAGE in each)


CONVENTION_LABELS = {*("job", "instance", keys.OPERATION, keys.PROVIDER, keys.MODEL)}


def wait_for_stages(
    front: CollectorFront, job: str, model: str, seconds: float
) -> dict[str, float]:
    """Seconds of each stage once all have `seconds`: each metric is pushed by itself, this one late."""

    def sum_stages() -> Counter[str]:
        counted: Counter[str] = Counter()
        for labels, point in list_points(front, metric_names.STAGE_DURATION, job, model):
            counted[labels[keys.STAGE]] += point.sum
        return counted

    wait_until(lambda: sum_stages().total() >= seconds - 1e-6)
    return sum_stages()


def list_points(
    front: CollectorFront, metric: str, job: str, model: str
) -> list[tuple[dict[str, Any], Any]]:
    """Labels and newest points of a metric's series of one service and model."""
    found = front.metrics.get_series(metric, job=job)
    return [(labels, point) for labels, point in found if labels.get(keys.MODEL) == model]


def is_sum_of(points: Iterable[Any], lengths_us: Sequence[int]) -> bool:
    """Whether these points together have counted exactly these lengths."""
    points = list(points)
    total = sum(point.sum for point in points)
    counted = sum(point.count for point in points)
    return counted == len(lengths_us) and isclose(total, sum(lengths_us) / 1e6)


def test_metrics_are_the_truth(front: CollectorFront, rows: list[KnownRequest]) -> None:
    """Counts and sums per role, model and stage are those of the outermost spans alone."""
    for role, model in {(row.role, row.model) for row in rows}:
        mine = [row for row in rows if (row.role, row.model) == (role, model)]
        job = stages.SERVICE_NAMES[role]
        whole = [point for _, point in list_points(front, metric_names.TTFT_DURATION, job, model)]
        assert is_sum_of(whole, [row.ttft for row in mine])

        lengths: Counter[str] = Counter()
        for row in mine:
            lengths.update({**row.stages, stages.UNATTRIBUTED: row.unattributed})
        counted = wait_for_stages(front, job, model, lengths.total() / 1e6)
        assert counted.keys() == {stage for stage, length in lengths.items() if length}
        assert all(isclose(counted[stage], lengths[stage] / 1e6) for stage in counted)
        assert isclose(sum(counted.values()), sum(point.sum for point in whole))


def test_ends(front: CollectorFront, rows: list[KnownRequest]) -> None:
    """Durations are of outermost requests, by their errors; times per token of all who decode."""
    records = list_known_records(rows, 0)
    durations: dict[str, list[int]] = {}
    token_times: dict[bool, list[int]] = {True: [], False: []}
    for record in records:
        if record.server is not None:
            if token_us := record.server.attributes.get(keys.TIME_PER_OUTPUT_TOKEN_US):
                token_times[record.outermost].append(int(str(token_us)))
            if record.outermost:
                durations.setdefault(record.server.error, []).append(record.server.end)
    # Else nothing would be shown: errors, and requests behind a router.
    assert len(durations) > 2 and all(token_times.values())

    per_token = metric_names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN
    whole = metric_names.GEN_AI_SERVER_REQUEST_DURATION
    all_times = sum(token_times.values(), [])
    front.wait_until_counted(len(all_times), per_token)
    front.wait_until_counted(sum(map(len, durations.values())), whole)
    points = [point for _, point in front.metrics.get_series(per_token)]
    assert is_sum_of(points, all_times)
    assert {tuple(point.explicit_bounds) for point in points} == {
        metric_table.METRICS[per_token].bounds_s
    }
    found: dict[str, list[Any]] = {}
    for labels, point in front.metrics.get_series(whole):
        assert labels.keys() - {keys.ERROR_TYPE} == CONVENTION_LABELS
        found.setdefault(str(labels.get(keys.ERROR_TYPE, "")), []).append(point)
    assert found.keys() == durations.keys()
    assert all(is_sum_of(found[error], lengths) for error, lengths in durations.items())


def test_convention(front: CollectorFront, rows: list[KnownRequest]) -> None:
    """The convention's histogram has its buckets and attributes, and counts answers that began."""
    bounds = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1]
    bounds += [0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0]

    answered = [row for row in rows if row.role != "encode" and not row.error]
    metric = metric_names.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN
    front.wait_until_counted(len(answered), metric)

    for model in {row.model for row in answered}:
        mine = [row.ttft / 1e6 for row in answered if row.model == model]
        buckets = [0] * (len(bounds) + 1)
        for labels, point in front.metrics.get_series(metric):
            if labels[keys.MODEL] == model:
                assert labels.keys() == CONVENTION_LABELS
                assert list(point.explicit_bounds) == bounds
                buckets = [a + b for a, b in zip(buckets, point.bucket_counts, strict=True)]
        expected = [0] * (len(bounds) + 1)
        for length in mine:
            expected[sum(length > bound for bound in bounds)] += 1
        assert buckets == expected


def test_no_item_encoded_twice_counts_as_0(front: CollectorFront) -> None:
    """The counter is there before it counts; a malformed number of items makes none, and no item."""
    for number, service in ((0, "none-twice"), ("2", "a-text"), (-3, "below-0")):
        attributes = {keys.ROLE: "prefill_decode", keys.EC_RECOMPUTED_ITEMS: number}
        span = build_raw_span(span_names.TTFT, **attributes)
        front.send_and_wait(build_export_request([span], service=service))

    metric = metric_names.EC_RECOMPUTED
    wait_until(lambda: front.metrics.get_series(metric, job="below-0"))
    for job in ("none-twice", "below-0"):
        assert front.metrics.get_series(metric, job=job)
        assert front.metrics.sum_field(metric, "as_double", job=job) == 0
    assert not front.metrics.get_series(metric, job="a-text")


def test_queue_with_several_reasons(front: CollectorFront) -> None:
    """Its parts tell the reasons, its own span the work; sums on `ttft` spans and stalls are in neither."""
    held = {keys.name_held_attribute("decode"): 300, keys.name_held_attribute("own"): 700}
    inner = {keys.ROLE: "prefill", keys.OUTERMOST: False, keys.MODEL: "several"}
    in_queue = {keys.STAGE: "prefill.queue"} | held
    spans = [
        build_raw_span(span_names.TTFT, **inner, **held),
        build_raw_span("prefill.queue", us=1000, **inner, **in_queue),
        build_raw_span("lora", us=400, **inner, **{keys.QUEUE_REASON: "lora"}),
        build_raw_span("grammar", us=600, **inner, **{keys.QUEUE_REASON: "grammar"}),
        build_raw_span("prefill.stall", us=1000, **inner, **held, **{keys.STAGE: "prefill.stall"}),
    ]
    front.send_and_wait(build_export_request(spans, service="several"))

    for metric, label, sums in (
        (metric_names.QUEUE_REASON_DURATION, keys.QUEUE_REASON, {"lora": 4e-4, "grammar": 6e-4}),
        (metric_names.QUEUE_HELD_DURATION, keys.HELD_BY_KIND, {"decode": 3e-4, "own": 7e-4}),
    ):
        front.wait_until_counted(2, metric, job="several")
        reported = {
            labels[label]: point.sum
            for labels, point in front.metrics.get_series(metric, job="several")
        }
        assert reported == pytest.approx(sums)


def test_labels(front: CollectorFront, rows: list[KnownRequest]) -> None:
    """Labels are those listed, and no request or trace id is the value of one."""
    ids = {each for row in rows for each in (row.trace_id, row.request_id)}
    common = {"job", "instance", keys.ROLE, keys.MODEL, keys.ERROR_TYPE}
    for metric, own in (
        (metric_names.TTFT_DURATION, {"status.code"}),
        (metric_names.STAGE_DURATION, {keys.STAGE, keys.LEG, keys.INSTANCE}),
        (metric_names.QUEUE_REASON_DURATION, {keys.QUEUE_REASON}),
        (metric_names.QUEUE_HELD_DURATION, {keys.HELD_BY_KIND}),
    ):
        found = [each for each, _ in front.metrics.get_series(metric)]
        assert found
        assert {name for each in found for name in each} == common | own
        reported = {str(value) for each in found for value in each.values()}
        assert not reported & ids
    legs = {
        (labels.get(keys.LEG), labels.get(keys.INSTANCE))
        for labels, _ in front.metrics.get_series(
            metric_names.STAGE_DURATION, job="ttft-otel-router"
        )
    }
    assert ("encode", "10.0.0.11:8001") in legs and (None, None) in legs


def test_callers_cannot_multiply(front: CollectorFront) -> None:
    """A caller's tracestate that claims a sampling of 1 in 65 536 leaves the count at one."""
    front.send_and_wait(
        build_own_request([build_own_record(50, service="claims", state="ot=th:ffff")])
    )

    front.wait_until_counted(1, job="claims")
    assert front.count_ttfts(job="claims") == 1


# Of a `ttft` span beside 300 us of its queue -> the sum of its stages.
ODD_STAGES = (
    ({"ttft.receive_us": "800"}, 300),
    ({"ttft.receive_us": 800.0}, 300),
    ({"ttft.receive_us": True}, 300),
    ({}, 300),
    ({"ttft.receive_us": -5}, 295),
    ({"ttft.no.stage_us": 8, "ttft.total_us": "x", "ttft_ms": "9", "ttft_stage_sum_us": 1.5}, 300),
)


def test_malformed_stages(front: CollectorFront) -> None:
    """A stage that is no integer is left out of the sum, and shows as unattributed; the rest holds."""
    stage = {"ttft.prefill.queue_us": 300, "ttft.role": "mono"}
    spans = [build_raw_span("ttft", 1_999, **stage, **change) for change, _ in ODD_STAGES]
    backwards = build_raw_span("ttft", -5_000)
    front.send_and_wait(build_export_request([*spans, backwards]))
    for span, (change, total) in zip(spans, ODD_STAGES, strict=True):
        found = to_attributes(front.spans.get_span(span.span_id).attributes)
        assert found[keys.DERIVED_MS] == 1, change
        assert found[keys.DERIVED_STAGE_SUM_US] == total, change
        assert found[keys.DERIVED_UNATTRIBUTED_US] == 1_999 - total, change
    # A span that ends before it starts gets no TTFT, and is passed on.
    assert not to_attributes(front.spans.get_span(backwards.span_id).attributes)


OTHERS = {
    "vllm": ({"gen_ai.latency.time_to_first_token": 0.29}, (), 290),
    "convention": ({"gen_ai.response.time_to_first_chunk": 1.0009999}, (), 1001),
    "just below": ({"gen_ai.response.time_to_first_chunk": 0.9999}, (), 999),
    "older": ({"gen_ai.response.time_to_first_token": 2}, (), 2000),
    "zero": ({"gen_ai.latency.time_to_first_token": 0.0}, (), 0),
    "event": ({}, (("first_token", 12_999, {}),), 12),
    "openinference": ({}, (("First Token Stream Event", 7_000, {}),), 7),
    "chunks": ({}, (("gen_ai.content.chunk", 3_500, {}), ("gen_ai.content.chunk", 9_000, {})), 3),
    "attribute first": (
        {"gen_ai.latency.time_to_first_token": 0.5}, (("first_token", 1_000, {}),),
        500,
    ),
    "its own": ({"ttft_ms": 77}, (), 77),
    "its own, a double": ({"ttft_ms": 77.5}, (), 77),
    "its own, text": ({"ttft_ms": "77.9"}, (), 77),
    "its own, a word": ({"ttft_ms": "7h"}, (), None),
    "text": ({"gen_ai.latency.time_to_first_token": "0.5"}, (), None),
    "negative": ({"gen_ai.latency.time_to_first_token": -1.0}, (), None),
    "no number": ({"gen_ai.latency.time_to_first_token": nan}, (), None),
    "endless": ({"gen_ai.latency.time_to_first_token": float("inf")}, (), None),
    "before the start": ({}, (("first_token", -9_000, {}),), None),
    "another event": ({}, (("exception", 5_000, {}),), None),
    "nothing": ({}, (), None),
}  # fmt: skip


def test_others(front: CollectorFront) -> None:
    """Spans of vLLM itself, SGLang and OpenInference get ttft_ms from what they have, or nothing."""
    spans = {
        case: build_raw_span("llm_request", 20_000, events, **given)
        for case, (given, events, _) in OTHERS.items()
    }
    front.send_and_wait(build_export_request(spans.values(), "vllm.llm_engine"))
    found = {
        case: to_attributes(front.spans.get_span(span.span_id).attributes).get(keys.DERIVED_MS)
        for case, span in spans.items()
    }
    assert found == {case: ms for case, (_, _, ms) in OTHERS.items()}
    assert not front.metrics.get_series(metric_names.TTFT_DURATION, job="vllm", ttft_role=None)


def build_made_up() -> bytes:
    """Requests of TensorRT-LLM: one that tells two stages, one whose stages are more than its TTFT."""
    total, queue = "gen_ai.latency.time_to_first_token", "gen_ai.latency.time_in_queue"
    odd = {keys.STAGE: "egress", keys.TOTAL_US: 7, keys.name_stage_attribute("egress"): 5}
    moved = {"gen_ai.latency.kv_cache_transfer_time": 0.03}
    told = ({total: 0.2, queue: 0.05} | moved | odd, {total: 0.1, queue: 0.2}, {queue: 0.4}, odd)
    spans = [build_raw_span("anything", 300_000, **each) for each in told]
    return build_export_request(spans, "trt.llm", "told-made-up").SerializeToString()


@pytest.mark.parametrize("name", [*FILES, "made-up"])
def test_foreign(front: CollectorFront, name: str) -> None:
    """What is counted of other products is what the report says of each of their instances' requests."""
    is_json, job = name != "made-up", f"told-{name}"
    body = build_made_up()
    if is_json:  # of a service of its own
        named = f'{{"stringValue":"{name}"}}'
        body = (
            (GOLDEN / f"{name}.json")
            .read_bytes()
            .replace(named.encode(), named.replace(name, job).encode())
        )
    spans = otlp_decoder.decode_export(body, as_json=is_json).spans
    found = [
        build_stored_trace(name, [each for each in spans if each.trace_id == name])
        for name in {span.trace_id for span in spans}
    ]
    legs = [leg for trace in found for request in trace.requests for leg in request.legs]
    kind = "application/json" if is_json else "application/x-protobuf"
    assert legs and post_export(front.collector.http, body, kind) == 200

    wholes, parts = metric_names.FOREIGN_DURATION, metric_names.FOREIGN_STAGE_DURATION
    front.wait_until_counted(len(legs), wholes, job=job)
    counted = {
        (labels[keys.FOREIGN], labels[keys.ROLE]): (point.count, point.sum)
        for labels, point in front.metrics.get_series(wholes, job=job)
    }
    # ttft_ms is whole milliseconds in this collector.
    told = [(leg, leg.ttft_us // 1000 * 1000 if name == "dynamo" else leg.ttft_us) for leg in legs]
    for (product, role), (count, seconds) in counted.items():
        mine = [us for leg, us in told if (leg.foreign, leg.role) == (product, role)]
        # Half a microsecond is rounded up here, and to even there.
        assert count == len(mine)
        assert seconds == pytest.approx(sum(mine) / 1e6, abs=count * 1e-6)
    assert sum(count for count, _ in counted.values()) == len(legs)
    expected: dict[str, float] = {}
    for leg in legs:
        for stage, us in leg.stages.items():
            # Of a decode instance `decode_waiting`, for which a span's request would have to be known.
            if (leg.role, stage) != ("decode", "prefill.queue"):
                expected[stage] = expected.get(stage, 0) + us / 1e6
    front.wait_until_counted(sum(expected.values()) - 1e-4, parts, "sum", job=job)
    sums = {
        labels[keys.STAGE]: point.sum for labels, point in front.metrics.get_series(parts, job=job)
    }
    assert sums == pytest.approx(expected, abs=1e-5)
    assert not front.metrics.get_series(metric_names.TTFT_DURATION, job=job)
    assert not front.metrics.get_series(metric_names.STAGE_DURATION, job=job)


SECRET = "the secret of the day"
SECRETS = (
    "gen_ai.prompt", "gen_ai.prompt.0.content", "gen_ai.completion", "gen_ai.input.messages",
    "gen_ai.output.messages", "gen_ai.system_instructions", "gen_ai.tool.call.arguments",
    "llm.prompts.0.content", "llm.input_messages.0.message.content", "input.value",
    "output.value", "traceloop.entity.input", "langfuse.observation.output", "prompt",
    "ai.prompt.messages", "ai.response.text", "llm.prompt_template.variables", "completion",
    "http.request.header.authorization", "Authorization", "x-api-key", "OPENAI_API_KEY",
    "http.request.header.cookie", "db.password", "client_secret", "access_token",
    "http.response.body", "url.query", "aws.credentials",
)  # fmt: skip
HARMLESS = {
    "gen_ai.usage.prompt_tokens": 12,
    "gen_ai.usage.completion_tokens": 3,
    "llm.token_count.prompt": 12,
    "gen_ai.request.max_tokens": 100,
    "gen_ai.request.model": "tiny",
    "gen_ai.request.id": "cmpl-1",
    "http.route": "/v1/completions",
    "net.peer.ip": "10.0.0.1",
}


def test_scrub_others(front: CollectorFront) -> None:
    """Prompts, completions and credentials leave spans, events and resources of others; counts stay."""
    said = dict.fromkeys(SECRETS, SECRET)
    events = [
        ("gen_ai.content.prompt", 1, {"gen_ai.prompt": SECRET, "content": SECRET, "index": 3})
    ]
    span = build_raw_span("scrubbed", 10, events, **said, **HARMLESS, note="x" * 2000)
    resource = {"process.command_args": SECRET, "x-api-key": SECRET, "host.name": "here"}
    front.send_and_wait(build_export_request([span], "other", **resource))

    found = next(each for each in front.spans.list_spans() if each.name == "scrubbed")
    left = to_attributes(found.attributes)
    assert {name: left.get(name) for name in HARMLESS} == HARMLESS
    assert left.keys() == {*HARMLESS, "note"} and len(left["note"]) == 512
    assert to_attributes(found.events[0].attributes) == {"index": 3}
    where = [to_attributes(each.resource.attributes) for each in front.spans.list_resources()]
    assert [each for each in where if each.get("host.name") == "here"] == [
        {"service.name": "vllm", "host.name": "here"}
    ]
    assert SECRET.encode() not in b"".join(front.spans.taken)


def test_scrub_ours(front: CollectorFront) -> None:
    """Our own spans keep the keys of names/keys.py and lose any other, whatever a mistake put there."""
    # None that `rows` has sent.
    row = next(
        row
        for row in build_known_requests()
        if row.kind == "epd" and row.spare and row.number % 8 and not row.error
    )
    sent = build_known_spans([row], time.time_ns())
    front.send_and_wait(encode_spans(sent))
    kept = {span.span_id: to_attributes(span.attributes) for span in front.spans.list_spans()}
    for each in sent:
        assert each.context
        assert set(each.attributes or ()) <= set(kept[each.context.span_id.to_bytes(8, "big")])
    span = build_raw_span(
        "receive", 10, **{"ttft.stage": "receive", "prompt": SECRET, "anything": 1}
    )
    front.send_and_wait(build_export_request([span]))
    left = front.spans.get_span(span.span_id)
    assert to_attributes(left.attributes) == {"ttft.stage": "receive"}


GARBAGE = (
    (os.urandom(4000), "application/x-protobuf"),
    (b"{", "application/json"),
    (b'{"resourceSpans": 7}', "application/json"),
    (b"x", "text/plain"),
)


def test_garbage(front: CollectorFront) -> None:
    """Bytes that are not spans are refused with a client error, and later spans are accepted."""
    whole = build_own_request([build_own_record(5, service="later")])
    cut = (whole.SerializeToString()[:-7], "application/x-protobuf")
    for body, kind in (*GARBAGE, cut):
        assert 400 <= post_export(front.collector.http, body, kind) < 500
    assert post_export(front.collector.http, b"") == 200  # an empty request is one
    odd = build_raw_span("ttft", 1000, **{"ttft.role": "", "ttft.outermost": "yes"})
    odd.trace_id, odd.span_id = b"", b"\x01"
    odd_request = build_export_request([odd])
    assert post_export(front.collector.http, odd_request) < 500
    front.send_and_wait(whole)
    front.wait_until_counted(1, job="later")


def test_own_numbers(front: CollectorFront) -> None:
    """The collector pushes what it took, sent and holds to Prometheus, under its own name."""
    taken = "otelcol_receiver_accepted_spans"
    wait_until(lambda: front.metrics.get_series(taken, job="ttft-collector"), 25)

    for name in ("exporter_sent_spans", "exporter_queue_size", "process_memory_rss"):
        assert front.metrics.get_series(f"otelcol_{name}", job="ttft-collector")


def test_cardinality(bench: StackStarter, sinks: tuple[SpanSink, MetricSink]) -> None:
    """Past the limit new series fall into one, marked as overflow, and nothing is left uncounted."""
    spans, metrics = sinks
    env = {**spans.env, **metrics.env, "TTFT_SERIES_LIMIT": "20"}
    with bench.start_collector(env=env) as collector:
        records = [build_own_record(10, model=f"model-{turn}") for turn in range(300)]
        post_records(collector.http, records, portion=300)
        for metric, each in ((metric_names.TTFT_DURATION, 1), (metric_names.STAGE_DURATION, 2)):
            # Each has its own export.
            wait_until(lambda metric=metric, each=each: metrics.sum_field(metric) >= 300 * each)
            series = metrics.get_series(metric)
            over = [point for labels, point in series if labels.get("otel.metric.overflow")]
            assert len(series) == 21 and len(over) == 1
            assert sum(point.count for _, point in series) == 300 * each


# Last in this file: its labels are not those of the requests that the tests above count.
def test_places_are_labels(front: CollectorFront) -> None:
    """Where a server runs, as its operator's resource says it, is on every metric of its spans."""
    place = {name: f"the-{number}" for number, name in enumerate(metric_table.PLACE_LABELS)}
    record = build_own_record(500.0, model="placed")
    resource = build_own_resource("placed").merge(Resource(place))
    front.send_and_wait(encode_spans(build_spans(record, resource)))
    for metric in (
        metric_names.TTFT_DURATION,
        metric_names.STAGE_DURATION,
        metric_names.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN,
    ):
        wait_until(lambda metric=metric: front.metrics.get_series(metric, instance="placed"))
        for labels, _ in front.metrics.get_series(metric, instance="placed"):
            assert {name: labels.get(name) for name in place} == place


METRICS = (
    metric_names.TTFT_DURATION,
    metric_names.STAGE_DURATION,
    metric_names.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN,
    metric_names.GEN_AI_SERVER_REQUEST_DURATION,
    metric_names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN,
    metric_names.QUEUE_REASON_DURATION,
    metric_names.QUEUE_HELD_DURATION,
)
OWN_LABELS = ("instance", "collector.instance.id")
SeriesSums = dict[tuple[str, frozenset[tuple[str, Any]]], tuple[int, float]]


def sum_series(front: CollectorFront) -> SeriesSums:
    """Count and sum of every series of a histogram, whatever process it is from."""
    sums: SeriesSums = {}
    for metric in METRICS:
        for labels, point in front.metrics.get_series(metric):
            kept = frozenset(item for item in labels.items() if item[0] not in OWN_LABELS)
            count, total = sums.get((metric, kept), (0, 0.0))
            sums[metric, kept] = (count + point.count, total + point.sum)
    return sums


def send_counted(
    front: CollectorFront, records: list[Record], temporality: str = "cumulative"
) -> None:
    """Send through a real exporter process that counts, and wait until it has drained."""
    url = front.collector.http
    settings = Settings(on=True, endpoint=url, metrics=True, temporality=temporality)
    # Of each process its own: cumulative series of one instance would replace each other.
    own = {"OTEL_RESOURCE_ATTRIBUTES": f"service.instance.id=sent-{time.time_ns()}"}
    with mock.patch.dict(os.environ, own):
        sender = handoff.RecordSender(settings)
        try:
            handed = [data for record in records if (data := encode_for_exporter(record))]
            assert all(map(sender.send, handed))
            # While the host lives, there is no limit of time.
            wait_until(lambda: sender.get_counts()["finished"] == len(handed), 60)
        finally:
            sender.close(60)


def collect_new(front: CollectorFront, send: Callable[[], None], many: int) -> SeriesSums:
    """What `send` adds, three pushes after so many TTFTs were in it: a second count would show."""
    before, counted = sum_series(front), front.count_ttfts()
    send()
    wait_until(lambda: front.count_ttfts() >= counted + many)
    time.sleep(3 * PUSH_S)
    found = {}
    for key, (count, total) in sum_series(front).items():
        old_count, old_total = before.get(key, (0, 0.0))
        if count > old_count:
            found[key] = (count - old_count, total - old_total)
    return found


@pytest.fixture(scope="module")
def records(some_rows: list[KnownRequest]) -> list[Record]:
    """Theirs."""
    return list_known_records(some_rows)


def count_outermost(records: list[Record]) -> int:
    """Requests that metrics count."""
    return sum(record.outermost and record.ttft is not None for record in records)


def test_same_series_as_derived(front: CollectorFront, records: list[Record]) -> None:
    """The process's own metrics are those that the collector makes of the same spans; none counts twice."""
    many, url = count_outermost(records), front.collector.http
    derived = collect_new(front, partial(post_records, url, records), many)
    assert {metric for metric, _ in derived} == set(METRICS)
    for temporality in ("cumulative", "delta"):
        spans = len(front.spans.list_spans())
        found = collect_new(front, partial(send_counted, front, records, temporality), many)

        assert len(front.spans.list_spans()) > spans
        assert found.keys() == derived.keys()
        for key, (count, total) in derived.items():
            assert found[key] == (count, pytest.approx(total, abs=1e-5)), (key, temporality)


def test_exact_when_few_are_sampled(front: CollectorFront, records: list[Record]) -> None:
    """With one request of ten sampled all are counted, and a tenth of the traces comes out."""
    names = sorted({record.trace_id for record in records})
    traces = {each: f"{number + (7 << 64):032x}" for number, each in enumerate(names)}
    sampled = set([*traces.values()][::10])
    renamed = [msgspec.structs.replace(each, trace_id=traces[each.trace_id]) for each in records]
    mixed = [msgspec.structs.replace(each, flags=int(each.trace_id in sampled)) for each in renamed]
    many, before = count_outermost(records), front.count_ttfts()
    collect_new(front, partial(send_counted, front, mixed), many)

    assert front.count_ttfts() == before + many
    ours = set(traces.values())
    assert set(front.spans.group_by_trace()) & ours == sampled
    exemplars = {each.trace_id.hex() for each in front.metrics.list_exemplars()} & ours
    assert exemplars and exemplars <= sampled


# Last in this file: what calls itself TTFT here is no histogram.
def test_foreign_metrics_stay_out(front: CollectorFront, records: list[Record]) -> None:
    """The collector passes on our metrics under our labels, and nothing else that calls itself one."""
    body = ExportMetricsServiceRequest()
    scope = body.resource_metrics.add().scope_metrics.add()
    scope.scope.name = span_names.SCOPE
    for name in ("someones.metric", metric_names.TTFT_DURATION):
        point = scope.metrics.add(name=name).sum.data_points.add(as_int=1)
        point.attributes.add(key="user.id").value.string_value = "secret"
        scope.metrics[-1].sum.aggregation_temporality = 2
    posted = post_export(front.collector.http, body, path="/v1/metrics")
    assert posted == 200
    before = front.count_ttfts()
    send_counted(front, records[:10])
    wait_until(lambda: front.count_ttfts() > before)
    time.sleep(3 * PUSH_S)  # some pushes, in which the foreign ones would be

    assert "someones.metric" not in {name for name, _ in front.metrics.points}
    assert not any("user.id" in dict(labels) for _, labels in front.metrics.points)
