# SPDX-License-Identifier: Apache-2.0
"""Metrics of what is known at a request's end: its duration, and its time per output token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from ttft_otel.exporter.exporter_counters import ExporterCounters
from ttft_otel.exporter.metrics.metric_series import SeriesRegistry
from ttft_otel.exporter.metrics.request_metrics import RequestMetrics
from ttft_otel.exporter.spans.resource_cache import ResourceCache
from ttft_otel.model.names import keys, metric_names
from ttft_otel.model.record import Record, Server
from ttft_otel.tracing import measurement

RecordMaker = Callable[..., Record]
IDENTITY = {keys.OPERATION: "chat", keys.MODEL: "m"}


def count(*records: Record) -> dict[tuple[str, str], list[Any]]:
    """Data points of the metrics that are known at the end, by metric and error."""
    metrics = RequestMetrics(SeriesRegistry(ResourceCache(4711, True), False), ExporterCounters())
    for record in records:
        if record.flags:
            metrics.add_record(record)
        else:
            metrics.add_measurements([measurement.encode_for_exporter(record)])
    data = metrics.take_data()
    found: dict[tuple[str, str], list[Any]] = {}
    for resource in data.resource_metrics if data else ():
        for metric in resource.scope_metrics[0].metrics:
            for point in metric.data.data_points:
                error = str(dict(point.attributes).get(keys.ERROR_TYPE, ""))
                if metric.name in (
                    metric_names.GEN_AI_SERVER_REQUEST_DURATION,
                    metric_names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN,
                ):
                    found.setdefault((metric.name, error), []).append(point)
    assert metrics.counters.get_counts()["foreign"] == 0
    return found


def end(record: Record, server: Server, **fields: Any) -> Record:
    """The half of `record` that is sent at the request's end."""
    return msgspec.structs.replace(record, ttft=None, server=server, attributes=IDENTITY, **fields)


@pytest.mark.parametrize("flags", [0, 1])
@pytest.mark.parametrize("halves", [False, True])
def test_each_request_once(make_record: RecordMaker, flags: int, halves: bool) -> None:
    """Sampled or not, in one record or in two: one duration, one time per token, in their buckets."""
    server = Server("POST", 700_000, 200, {keys.TIME_PER_OUTPUT_TOKEN_US: 20_000})
    first = msgspec.structs.replace(make_record(), flags=flags, attributes=IDENTITY, server=None)
    last = end(make_record(), server, flags=flags)
    whole = msgspec.structs.replace(first, server=server)
    found = count(*((first, last) if halves else (whole,)))

    (duration,) = found.pop((metric_names.GEN_AI_SERVER_REQUEST_DURATION, ""))
    (token_time,) = found.pop((metric_names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN, ""))
    assert not found
    assert (duration.count, duration.sum) == (1, 0.7)
    assert (token_time.count, token_time.sum) == (1, 0.02)
    # (0.64, 1.28], and (0.01, 0.025]
    assert duration.bucket_counts.index(1) == duration.explicit_bounds.index(0.64) + 1
    assert token_time.bucket_counts.index(1) == token_time.explicit_bounds.index(0.01) + 1
    assert dict(duration.attributes) == {
        keys.OPERATION: "chat",
        keys.PROVIDER: "vllm",
        keys.MODEL: "m",
    }


def test_errors_have_their_own_series(make_record: RecordMaker) -> None:
    """What failed is not counted among the answers, a refusal neither."""
    made = make_record()
    found = count(
        end(made, Server("POST", 10, 200)),
        end(made, Server("POST", 20, 404)),
        end(made, Server("POST", 30, 503, {}, "503")),
        end(made, Server("POST", 40, 200, {}, keys.ERROR_CANCELLED)),
    )

    assert {error: points[0].sum for (_, error), points in found.items()} == {
        "": 10e-6,
        "404": 20e-6,
        "503": 30e-6,
        keys.ERROR_CANCELLED: 40e-6,
    }


def test_behind_a_router(make_record: RecordMaker) -> None:
    """Durations are the client's, which the router tells; times per token come from who decodes."""
    server = Server("POST", 700, 200, {keys.TIME_PER_OUTPUT_TOKEN_US: 20})
    found = count(end(make_record(), server, outermost=False))

    assert set(found) == {(metric_names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN, "")}


def test_not_an_answer(make_record: RecordMaker) -> None:
    """Neither an answer that says "queued" nor a request that generates nothing has a duration here."""
    queued = end(make_record(), Server("POST", 700, 200, {keys.BACKGROUND: True}))
    other = msgspec.structs.replace(queued, server=Server("POST", 700, 200), attributes={})

    assert count(queued, other) == {}


def test_exemplar_of_an_end(make_record: RecordMaker) -> None:
    """A duration that is told apart leads to the request's own span, which ends with it."""
    made = make_record(7)
    (duration,) = count(end(made, Server("POST", 700, 200)))[
        metric_names.GEN_AI_SERVER_REQUEST_DURATION, ""
    ]

    (exemplar,) = duration.exemplars
    assert exemplar.span_id == int(made.span_id, 16)
