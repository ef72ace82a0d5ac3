# SPDX-License-Identifier: Apache-2.0
"""PromQL over the pipeline's own counters: our processes' (names.py), the collector's, Tempo's.

health.py draws them, grafana/prometheus/alerts compares them with limits.
"""

from __future__ import annotations

from typing import Final

from grafana.build import queries
from ttft_otel import names

RECORDS: Final = f"{names.METRIC_RECORDS}_total"
DROPPED: Final = f"{names.METRIC_DROPPED}_total"
LOST: Final = f"{names.METRIC_LOST}_total"
ERRORS: Final = f"{names.METRIC_ERRORS}_total"
PENDING: Final = names.METRIC_PENDING

# Of routers. Prometheus calls the instance behind one `exported_instance`: `instance` is the router.
STATE: Final = names.METRIC_INSTANCE
BREAKER: Final = names.METRIC_BREAKER
IN_FLIGHT: Final = names.METRIC_IN_FLIGHT
ATTEMPTS: Final = f"{names.METRIC_ATTEMPTS}_total"
RETRIES: Final = f"{names.METRIC_RETRIES}_total"
BEHIND: Final = "instance, leg, exported_instance"

ACCEPTED: Final = "otelcol_receiver_accepted_spans_total"
REFUSED: Final = "otelcol_receiver_refused_spans_total"
FAILED: Final = "otelcol_receiver_failed_spans_total"
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
POLICIES: Final = "otelcol_processor_tail_sampling_count_traces_sampled_total"
WAITING: Final = "otelcol_processor_tail_sampling_sampling_traces_on_memory"
EVICTED: Final = "otelcol_processor_tail_sampling_sampling_trace_dropped_too_early_total"
DISCARDED: Final = "tempo_discarded_spans_total"

# Recorded by grafana/prometheus/rules.
RATIO: Final = "ttft:unattributed:ratio5m"

# Every hop of a span: what is lost there, and a counter that is there when the hop is.
HOPS: Final[dict[str, tuple[str, str]]] = {
    "server, before its exporter": (DROPPED, RECORDS),
    "exporter of a server": (LOST, RECORDS),
    "collector refused": (REFUSED, ACCEPTED),
    "collector failed": (FAILED, ACCEPTED),
    "collector's queue full": (ENQUEUE_FAILED, ACCEPTED),
    "collector's export failed": (SEND_FAILED, ACCEPTED),
    "sampler evicted": (EVICTED, ACCEPTED),
    "Tempo discarded": (DISCARDED, "tempo_distributor_spans_received_total"),
}


def rate(metric: str, window: str, by: str = "") -> str:
    """Counted per second, over all instances or by a label."""
    over = f" by ({by})" if by else ""
    return f"sum{over} (rate({metric}[{window}]))"


def counted(counter: str, base: str, window: str, by: str = "") -> str:
    """Counted per second; 0 where nothing was counted yet, absent where `base` is, as its hop is."""
    return f"({rate(counter, window, by)} or 0 * {rate(base, window, by)})"


def all_lost(window: str) -> str:
    """What all hops lost in a window; hops that are not there add nothing."""
    parts = [f"sum (increase({counter}[{window}]))" for counter, _ in HOPS.values()]
    return f"sum ({' or '.join(_told_apart(parts))} or 0 * sum (increase({ACCEPTED}[{window}])))"


def _told_apart(parts: list[str]) -> list[str]:
    """With a label each: `or` drops series whose labels are alike."""
    return [
        f'label_replace({part}, "hop", "{number}", "", "")' for number, part in enumerate(parts)
    ]


def fill(by: str) -> str:
    """How full the fullest queue is, as a share."""
    return f"max by ({by}) ({QUEUED} / {CAPACITY})"


def kept(window: str) -> str:
    """The share of traces that sampling keeps; all of them without sampling."""
    yes = rate(f'{SAMPLED}{{sampled="true"}}', window)
    return f"({yes} / {rate(SAMPLED, window)} >= 0) or 1 + 0 * {rate(ACCEPTED, window)}"


def unattributed(window: str, by: str = "") -> str:
    """The share of time that no mark accounts for."""
    over = f" by ({by})" if by else ""
    found = f'{queries.OF_STAGE}=~"{queries.kind("")}"'
    part, whole = (
        f"sum{over} (histogram_sum(rate({queries.STAGE}{chosen}[{window}])))"
        for chosen in (f"{{{found}}}", "")
    )
    return queries.real(f"({part} or 0 * {whole}) / {whole}")


def failing(window: str, by: str) -> str:
    """The share of attempts at each instance behind routers that failed."""
    bad = f'{ATTEMPTS}{{result!~"[1234]xx"}}'
    return queries.real(f"{counted(bad, ATTEMPTS, window, by)} / {rate(ATTEMPTS, window, by)}")


def routed(window: str) -> str:
    """Requests per second that routers gave to each instance, by leg."""
    found = f'{queries.INSTANCE}!="",{queries.OF_STAGE}=~"{queries.legs(["receive"])}"'
    count = f"histogram_count(rate({queries.STAGE}{{{found}}}[{window}]))"
    return f"sum by ({queries.LEG}, {queries.INSTANCE}) ({count})"
