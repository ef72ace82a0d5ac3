# SPDX-License-Identifier: Apache-2.0
"""PromQL over the pipeline's own counters: our processes' (names/), the collector's, Tempo's.

health_dashboard.py draws them, grafana/prometheus/alerts compares them with limits.
"""

from __future__ import annotations

from typing import Final

from grafana.build import ttft_queries
from ttft_otel.model.names import metric_names

# prometheus_client appends `_total` to the names of counters; gauges stay as they are.
RECORDS_TOTAL: Final = f"{metric_names.RECORDS}_total"
DROPPED_TOTAL: Final = f"{metric_names.DROPPED}_total"
LOST_TOTAL: Final = f"{metric_names.LOST}_total"
ERRORS_TOTAL: Final = f"{metric_names.HOOK_ERRORS}_total"
PENDING: Final = metric_names.PENDING

# Of routers. Prometheus calls the instance behind one `exported_instance`: `instance` is the router.
STATE: Final = metric_names.ROUTER_INSTANCE
BREAKER: Final = metric_names.ROUTER_BREAKER_OPEN
IN_FLIGHT: Final = metric_names.ROUTER_IN_FLIGHT
ATTEMPTS: Final = f"{metric_names.ROUTER_ATTEMPTS}_total"
RETRIES: Final = f"{metric_names.ROUTER_RETRIES}_total"
INSTANCE_LABELS: Final = "instance, leg, exported_instance"

# The collector's own metrics, under the names that Prometheus gives them (with `_total`).
ACCEPTED: Final = "otelcol_receiver_accepted_spans_total"
REFUSED: Final = "otelcol_receiver_refused_spans_total"
FAILED: Final = "otelcol_receiver_failed_spans_total"
# The label is type/name of the exporter, as in collector/config.yaml (otlp_grpc/tempo).
TO_TEMPO: Final = 'otelcol_exporter_sent_spans_total{exporter=~".*tempo.*"}'
SEND_FAILED: Final = "otelcol_exporter_send_failed_spans_total"
ENQUEUE_FAILED: Final = "otelcol_exporter_enqueue_failed_spans_total"
POINTS_SENT: Final = "otelcol_exporter_sent_metric_points_total"
POINTS_FAILED: Final = "otelcol_exporter_send_failed_metric_points_total"
QUEUED: Final = "otelcol_exporter_queue_size"
CAPACITY: Final = "otelcol_exporter_queue_capacity"
CPU: Final = "otelcol_process_cpu_seconds_total"
MEMORY: Final = "otelcol_process_memory_rss_bytes"
UPTIME: Final = "otelcol_process_uptime_seconds_total"
SAMPLED: Final = "otelcol_processor_tail_sampling_global_count_traces_sampled_total"
# One trace may fulfil several policies: their sum may be more than what is sampled.
POLICIES: Final = "otelcol_processor_tail_sampling_count_traces_sampled_total"
WAITING: Final = "otelcol_processor_tail_sampling_sampling_traces_on_memory"
EVICTED: Final = "otelcol_processor_tail_sampling_sampling_trace_dropped_too_early_total"
DISCARDED: Final = "tempo_discarded_spans_total"

# Recorded by grafana/prometheus/rules.
RATIO: Final = "ttft:unattributed:ratio5m"

# Every hop of a span: what is lost there, and a counter that is there when the hop is.
LOSSES_BY_HOP: Final[dict[str, tuple[str, str]]] = {
    "server, before its exporter": (DROPPED_TOTAL, RECORDS_TOTAL),
    "exporter of a server": (LOST_TOTAL, RECORDS_TOTAL),
    "collector refused": (REFUSED, ACCEPTED),
    "collector failed": (FAILED, ACCEPTED),
    "collector's queue full": (ENQUEUE_FAILED, ACCEPTED),
    "collector's export failed": (SEND_FAILED, ACCEPTED),
    "sampler evicted": (EVICTED, ACCEPTED),
    "Tempo discarded": (DISCARDED, "tempo_distributor_spans_received_total"),
}


def rate_of_counter(metric: str, window: str, by: str = "") -> str:
    """Rate per second of a counter, over all instances or by a label."""
    over = f" by ({by})" if by else ""
    # rate() before sum(): a restart of one instance would look like a fall of the sum.
    return f"sum{over} (rate({metric}[{window}]))"


def rate_or_zero(counter: str, base: str, window: str, by: str = "") -> str:
    """Counted per second; 0 where nothing was counted yet, absent where `base` is, as its hop is."""
    return f"({rate_of_counter(counter, window, by)} or 0 * {rate_of_counter(base, window, by)})"


def sum_all_losses(window: str) -> str:
    """Losses of all hops in a window; absent hops count as 0."""
    # The last term makes the panel read 0, not "–", wherever a collector runs.
    parts = [f"sum (increase({counter}[{window}]))" for counter, _ in LOSSES_BY_HOP.values()]
    return f"sum ({' or '.join(_add_distinct_labels(parts))} or 0 * sum (increase({ACCEPTED}[{window}])))"


def _add_distinct_labels(parts: list[str]) -> list[str]:
    """Add a distinct label to each query: PromQL's `or` drops series with equal labels."""
    return [
        f'label_replace({part}, "hop", "{number}", "", "")' for number, part in enumerate(parts)
    ]


def share_of_queue_used(by: str) -> str:
    """How full the fullest queue is, as a share."""
    return f"max by ({by}) ({QUEUED} / {CAPACITY})"


def share_of_traces_kept(window: str) -> str:
    """The share of traces that sampling keeps; all of them without sampling."""
    # `>= 0` drops the NaN of a sampler without traces, so that the other branch is used.
    yes = rate_of_counter(f'{SAMPLED}{{sampled="true"}}', window)
    return f"({yes} / {rate_of_counter(SAMPLED, window)} >= 0) or 1 + 0 * {rate_of_counter(ACCEPTED, window)}"


def share_unattributed(window: str, by: str = "") -> str:
    """The share of TTFT that is unattributed."""
    over = f" by ({by})" if by else ""
    # With all prefixes: unattributed time of a leg counts as well as the outermost server's.
    rate_by_stage = f'{ttft_queries.STAGE_LABEL}=~"{ttft_queries.match_stage_kind("")}"'
    # histogram_sum, because shares are of time, not of requests.
    part, whole = (
        f"sum{over} (histogram_sum(rate({ttft_queries.STAGE_METRIC}{chosen}[{window}])))"
        for chosen in (f"{{{rate_by_stage}}}", "")
    )
    return ttft_queries.drop_nan(f"({part} or 0 * {whole}) / {whole}")


def share_of_failed_attempts(window: str, by: str) -> str:
    """The share of attempts at each instance behind routers that failed."""
    # Other results are 5xx and names of errors; a 4xx is the
    # client's doing, and no instance failed.
    bad = f'{ATTEMPTS}{{result!~"[1234]xx"}}'
    return ttft_queries.drop_nan(
        f"{rate_or_zero(bad, ATTEMPTS, window, by)} / {rate_of_counter(ATTEMPTS, window, by)}"
    )


def rate_of_routed_requests(window: str) -> str:
    """Requests per second that routers gave to each instance, by leg."""
    # A server has one `receive` span for each request, so their count is that of requests.
    stages = ttft_queries.match_legs(["receive"])
    found = f'{ttft_queries.INSTANCE_LABEL}!="",{ttft_queries.STAGE_LABEL}=~"{stages}"'
    count = f"histogram_count(rate({ttft_queries.STAGE_METRIC}{{{found}}}[{window}]))"
    return f"sum by ({ttft_queries.LEG_LABEL}, {ttft_queries.INSTANCE_LABEL}) ({count})"
