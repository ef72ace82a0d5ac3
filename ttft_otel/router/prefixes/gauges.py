# SPDX-License-Identifier: Apache-2.0
"""What is known of instances' caches and how it came, read off the source's status; metrics.py shows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ttft_otel import names
from ttft_otel.router.prefixes.source import Source

WHO: Final = ("leg", "instance")
EVENTS: Final = "kv-events"


def caches(leg: str, source: Source) -> Iterator[Metric]:
    """Of the leg that prefills, what GET /instances says of each instance's index."""
    known, said = "Blocks that it is known to have cached.", "What became of its KV events."
    blocks = GaugeMetricFamily(names.METRIC_CACHED_BLOCKS, known, labels=[*WHO, "source"])
    events = CounterMetricFamily(names.METRIC_KV_EVENTS, said, labels=[*WHO, "event"])
    for url, told in sorted(source.status().items()):
        blocks.add_metric([leg, url, told["source"]], told["blocks"])
        if told["source"] == EVENTS:  # an LMCache controller's answers are no instance's own
            for event, number in told["counts"].items():
                events.add_metric([leg, url, event], number)
    yield from (blocks, events)
