# SPDX-License-Identifier: Apache-2.0
"""All metrics of TTFTs in one table: names, units, labels and buckets, whoever makes them.

exporter/request_metrics.py counts requests into these series; lab/collector_config.py writes the collector's
configuration, which makes the same ones of spans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ttft_otel.model.names import keys, metric_names

# Where a server runs, by its resource; on every metric, absent where its operator does not say it.
K8S_NAMESPACE: Final = "k8s.namespace.name"
K8S_POD: Final = "k8s.pod.name"
PLACE_LABELS: Final = ("service.namespace", K8S_NAMESPACE, K8S_POD)
# Of an exponential histogram: off by 4.4 % at most over a factor of 1,000.
MAX_HISTOGRAM_BUCKETS: Final = 160
MAX_SERIES: Final = 2000  # of each metric and process; beyond it all values go into one series
MAX_EXEMPLARS: Final = 10  # of a data point; they make every push larger
MAX_IDLE_S: Final = 3600  # without a value, then a series is forgotten
PUSH_INTERVAL_S: Final = 15
# What the collector tells of a span's status.
STATUS_LABEL: Final = "status.code"
STATUS_VALUES: Final = ("STATUS_CODE_UNSET", "STATUS_CODE_ERROR")
# Of the series that all beyond MAX_SERIES are merged into.
OVERFLOW_LABEL: Final = "otel.metric.overflow"


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftMetric:
    """One metric: a histogram of lengths of time, or a counter of items."""

    #: The name in OTLP; Prometheus replaces its dots and appends the unit.
    name: str
    #: What is measured, as a backend shows it.
    description: str
    #: Labels besides PLACE_LABELS; one without a value is left out.
    labels: tuple[str, ...]
    #: The unit by UCUM.
    unit: str = "s"
    #: Upper bounds of its buckets, in seconds; () for exponential buckets, and for a counter.
    bounds_s: tuple[float, ...] = ()
    #: Whether it is a counter, of which there are no buckets.
    is_sum: bool = False

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Its labels, and the status of the span where it has that one."""
        status = (STATUS_LABEL,) if self.name == metric_names.TTFT_DURATION else ()
        return (*self.labels, *status)


_CONVENTION_LABELS: Final = (keys.OPERATION, keys.PROVIDER, keys.MODEL)
_FIRST_BOUNDS_S: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1)

METRICS: Final = {
    metric.name: metric
    for metric in (
        TtftMetric(
            name=metric_names.TTFT_DURATION,
            description="Time to first token.",
            labels=(keys.ROLE, keys.MODEL, keys.ERROR_TYPE),
        ),
        TtftMetric(
            name=metric_names.STAGE_DURATION,
            description="Lengths of the stages of a TTFT.",
            labels=(keys.ROLE, keys.MODEL, keys.STAGE, keys.LEG, keys.INSTANCE, keys.ERROR_TYPE),
        ),
        TtftMetric(
            name=metric_names.QUEUE_REASON_DURATION,
            description="Time in queues, by the reason why a request waited.",
            labels=(keys.ROLE, keys.MODEL, keys.QUEUE_REASON, keys.ERROR_TYPE),
        ),
        TtftMetric(
            name=metric_names.QUEUE_HELD_DURATION,
            description="Time in queues, by the work that held the engine meanwhile.",
            labels=(keys.ROLE, keys.MODEL, keys.HELD_BY_KIND, keys.ERROR_TYPE),
        ),
        TtftMetric(
            name=metric_names.EC_RECOMPUTED,
            description="Media items encoded on an encoder-cache consumer although an encoder had"
            " encoded them.",
            labels=(keys.ROLE, keys.MODEL),
            unit="{item}",
            is_sum=True,
        ),
        # The semantic conventions' metrics, with the bounds that these recommend.
        TtftMetric(
            name=metric_names.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN,
            description="Time to generate first token.",
            labels=_CONVENTION_LABELS,
            bounds_s=(*_FIRST_BOUNDS_S, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
        ),
        TtftMetric(
            name=metric_names.GEN_AI_SERVER_REQUEST_DURATION,
            description="Duration of requests, to the last byte of the answer.",
            labels=(*_CONVENTION_LABELS, keys.ERROR_TYPE),
            bounds_s=tuple(round(0.01 * 2**power, 2) for power in range(14)),
        ),
        TtftMetric(
            name=metric_names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN,
            description="Time per output token after the first one.",
            labels=_CONVENTION_LABELS,
            bounds_s=(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
        ),
    )
}
# Of the spans of other products (report/foreign/products.py), by the collector alone. Apart from ours: of
# one request both may tell, and its spans do not say so.
FOREIGN_METRICS: Final = {
    metric.name: metric
    for metric in (
        TtftMetric(
            name=metric_names.FOREIGN_DURATION,
            description="Time to first token, as spans of other products tell it.",
            labels=(keys.FOREIGN, keys.ROLE),
        ),
        TtftMetric(
            name=metric_names.FOREIGN_STAGE_DURATION,
            description="Lengths of stages, as spans of other products tell them.",
            labels=(keys.FOREIGN, keys.STAGE),
        ),
    )
}
