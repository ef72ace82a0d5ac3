# SPDX-License-Identifier: Apache-2.0
"""Labels and buckets of the metrics of TTFTs, whoever makes them: the exporter process or the collector.

exporter/metrics/request_metrics.py and lab/collector_config.py read them, so that both make the same series.
"""

from __future__ import annotations

from typing import Final

from ttft_otel.model.names import keys, metric_names

# Where a server runs, by its resource; on every metric, absent where its operator does not say it.
K8S_NAMESPACE: Final = "k8s.namespace.name"
K8S_POD: Final = "k8s.pod.name"
PLACE_LABELS: Final = ("service.namespace", K8S_NAMESPACE, K8S_POD)
METRIC_LABELS: Final = {
    metric_names.TTFT_DURATION: (keys.ROLE, keys.MODEL, keys.ERROR_TYPE),
    metric_names.STAGE_DURATION: (
        *(keys.ROLE, keys.MODEL, keys.STAGE, keys.LEG, keys.INSTANCE),
        keys.ERROR_TYPE,
    ),
    metric_names.QUEUE_REASON_DURATION: (keys.ROLE, keys.MODEL, keys.QUEUE_REASON, keys.ERROR_TYPE),
    metric_names.QUEUE_HELD_DURATION: (keys.ROLE, keys.MODEL, keys.HELD_BY_KIND, keys.ERROR_TYPE),
    metric_names.EC_RECOMPUTED: (keys.ROLE, keys.MODEL),
    metric_names.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN: (keys.OPERATION, keys.PROVIDER, keys.MODEL),
    metric_names.GEN_AI_SERVER_REQUEST_DURATION: (
        keys.OPERATION,
        keys.PROVIDER,
        keys.MODEL,
        keys.ERROR_TYPE,
    ),
    metric_names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN: (keys.OPERATION, keys.PROVIDER, keys.MODEL),
}
# Bucket bounds of the semantic conventions' histograms, in seconds.
BUCKET_BOUNDS_S: Final = {
    metric_names.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN: (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
        *(1.0, 2.5, 5.0, 7.5, 10.0),
    ),
    metric_names.GEN_AI_SERVER_REQUEST_DURATION: (
        *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28),
        *(2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    ),
    metric_names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN: (
        *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
        *(1.0, 2.5),
    ),
}
MAX_HISTOGRAM_BUCKETS: Final = (
    160  # of an exponential histogram: off by 4.4 % at most over a factor of 1,000
)
# Of span_metrics: whether the span is an error. On ttft.duration alone.
STATUS_LABEL: Final = "status.code"
STATUS_VALUES: Final = ("STATUS_CODE_UNSET", "STATUS_CODE_ERROR")
OVERFLOW_LABEL: Final = (
    "otel.metric.overflow"  # of the series that all beyond a limit are merged into
)
