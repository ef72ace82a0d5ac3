# SPDX-License-Identifier: Apache-2.0
"""Searches for traces: how soon a new trace is found, and by which of the dashboard's filters."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource

from tests.stack import otlp_requests
from tests.stack.filled_stack import FilledStack
from tests.stack.panel_queries import PanelAsker
from tests.stack.running_stack import RunningStack, wait_until
from tests.stack.test_panels import get_query
from ttft_otel.exporter.spans.span_builder import build_spans
from ttft_otel.model import metric_table
from ttft_otel.model.names import keys
from ttft_otel.model.record import encode_record
from ttft_otel.stack import stack_queries
from ttft_otel.tracing.handoff import RecordSender
from ttft_otel.tracing.settings import Settings

FOUND_WITHIN_S: Final = 5.0
TTFT_MS: Final = 2000
INSTANCE: Final = "search:1"
# Namespace, pod and model of each request; "" is an attribute that it lacks.
REQUESTS: Final = {
    "in-prod": ("prod", "p-1", "a"),
    "in-dev": ("dev", "d-1", "a"),
    "nowhere": ("", "", "a"),
    "refused": ("prod", "p-2", ""),
}


@pytest.fixture(scope="module")
def stack(filled: FilledStack) -> RunningStack:
    """The stack of test_panels.py and test_browser.py, which come before: here its counts change."""
    return filled.stack


def test_found_within_seconds(stack: RunningStack) -> None:
    """From a request's end, through exporter process and collector, until TraceQL finds it: 5 s."""
    sender = RecordSender(Settings(on=True, endpoint=stack.collector.http))
    try:
        seconds = [measure_search(stack, sender) for _ in range(4)]
    finally:
        sender.close(10)

    # The first one starts the exporter process.
    assert statistics.median(seconds[1:]) <= FOUND_WITHIN_S, seconds


def measure_search(stack: RunningStack, sender: RecordSender) -> float:
    """Seconds until a search finds a request that has just ended."""
    record = otlp_requests.build_own_record(10.0, service="search-soon")
    ended = time.monotonic()
    assert sender.send(encode_record(record))
    query = f'{{ span.{keys.REQUEST_ID} = "{record.request_id}" }}'
    now = time.time()
    wait_until(
        lambda: stack_queries.search_traces(stack.tempo.url, query, 20, now - 60, now + 60),
        interval_s=0.1,
    )
    return time.monotonic() - ended


@pytest.fixture(scope="module")
def sent(stack: RunningStack) -> Iterator[dict[str, str]]:
    """Names of REQUESTS by the ids of their traces, which Tempo has."""
    traces = {}
    for name, (namespace, pod, model) in REQUESTS.items():
        record = otlp_requests.build_own_record(float(TTFT_MS), model=model)
        if not model:
            kept = {key: each for key, each in record.attributes.items() if key != keys.MODEL}
            record = msgspec.structs.replace(record, attributes=kept)
        place = {metric_table.K8S_NAMESPACE: namespace, metric_table.K8S_POD: pod}
        resource = otlp_requests.build_own_resource(INSTANCE).merge(
            Resource({key: each for key, each in place.items() if each})
        )
        body = encode_spans(build_spans(record, resource))
        assert otlp_requests.post_export(stack.collector.http, body) == 200
        traces[record.trace_id] = name
    wait_until(lambda: len(list_found(stack, traces)) == len(traces))
    yield traces


def build_asker(stack: RunningStack, **chosen: str) -> PanelAsker:
    """Asks for this module's requests; `chosen` filters them."""
    now = time.time()
    return PanelAsker(
        stack.prometheus.url, stack.tempo.url, now - 300, now + 60,
        {"instance": INSTANCE, "slo": "1000", **chosen},
    )  # fmt: skip


def list_found(stack: RunningStack, traces: dict[str, str], **chosen: str) -> set[str]:
    """Names of the requests in the table of slow ones."""
    rows = build_asker(stack, **chosen).run_query(get_query("Requests over the SLO"))
    return {traces[row["traceID"].zfill(32)] for row in rows}


def sum_stages(stack: RunningStack, **chosen: str) -> float:
    """Seconds of all stages in the panel of the slow requests' stages."""
    series: list[Any] = build_asker(stack, **chosen).run_query(
        get_query("Stages of the slow requests")
    )
    return sum(sample.get("value", 0.0) for each in series for sample in each["samples"])


FILTERS: Final[tuple[tuple[dict[str, str], set[str]], ...]] = (
    ({}, {"in-prod", "in-dev", "nowhere", "refused"}),
    ({"namespace": "prod"}, {"in-prod", "refused"}),
    ({"namespace": "prod|dev"}, {"in-prod", "in-dev", "refused"}),
    ({"namespace": "pro"}, set()),
    ({"pod": "p-1"}, {"in-prod"}),
    ({"model": "a"}, {"in-prod", "in-dev", "nowhere"}),
    ({"namespace": "prod", "model": "a"}, {"in-prod"}),
    ({"namespace": "dev", "pod": "p-1"}, set()),
)


def test_places_and_models(stack: RunningStack, sent: dict[str, str]) -> None:
    """A filter finds what has the chosen value; All finds also what lacks the attribute."""
    for chosen, expected in FILTERS:
        assert list_found(stack, sent, **chosen) == expected
        # Of equally long requests: as many times their length as there are of them.
        length = pytest.approx(len(expected) * TTFT_MS / 1000)
        wait_until(lambda chosen=chosen, length=length: sum_stages(stack, **chosen) == length, 40)
