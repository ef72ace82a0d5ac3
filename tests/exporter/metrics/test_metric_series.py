# SPDX-License-Identifier: Apache-2.0
"""Exponential buckets hold what the SDK's own aggregation holds of the same values."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation, View

from ttft_otel.exporter.metrics.metric_series import MAX_SCALE, US_PER_S, ExponentialSeries
from ttft_otel.model.metric_table import MAX_HISTOGRAM_BUCKETS

times_us = st.integers(0, 10**10) | st.sampled_from(
    [1, 15_625, 500_000, 10**6, 2 * 10**6, 64 * 10**6]
)


def build_reference(values_us: list[int]) -> Any:
    """The SDK's data point of the same values."""
    reader = InMemoryMetricReader()
    aggregation = ExponentialBucketHistogramAggregation(max_size=MAX_HISTOGRAM_BUCKETS)
    provider = MeterProvider(
        [reader], views=[View(instrument_name="*", aggregation=aggregation)], shutdown_on_exit=False
    )
    histogram = provider.get_meter("test").create_histogram("ttft.duration", "s")
    for value_us in values_us:
        histogram.record(value_us / US_PER_S)
    data = reader.get_metrics_data()
    assert data is not None
    point = data.resource_metrics[0].scope_metrics[0].metrics[0].data.data_points[0]
    provider.shutdown()
    return point


def merge_counts(offset: int, counts: Any, steps: int) -> Counter[int]:
    """Counts by bucket, at a scale lower by `steps`; empty buckets left out."""
    merged: Counter[int] = Counter()
    for place, number in enumerate(counts):
        if number:
            merged[(offset + place) >> steps] += number
    return merged


@given(st.lists(st.lists(times_us, min_size=1, max_size=40), min_size=1, max_size=4))
def test_same_as_sdk(batches: list[list[int]]) -> None:
    """Values added in batches fill the buckets that the SDK fills one by one."""
    ours = ExponentialSeries({}, 0)
    for batch in batches:
        ours.add_values(batch)
    reference = build_reference([value for batch in batches for value in batch])
    offset, counts = ours.list_counts()

    assert len(counts) <= MAX_HISTOGRAM_BUCKETS
    assert ours.zero_count == reference.zero_count
    assert sum(counts) + ours.zero_count == reference.count
    # The SDK begins finer than Prometheus takes, and both fall as far as their range asks for.
    scale = min(ours.scale, reference.scale)
    assert ours.scale == min(reference.scale, MAX_SCALE) or not counts
    assert merge_counts(offset, counts, ours.scale - scale) == merge_counts(
        reference.positive.offset, reference.positive.bucket_counts, reference.scale - scale
    )


def test_error_is_bounded() -> None:
    """Over a factor of 1000 a bucket is no wider than 4.4 %, as in the collector."""
    buckets = ExponentialSeries({}, 0)
    buckets.add_values([1000, 1_000_000])

    assert 2 ** (2**-buckets.scale) <= 1.0444
