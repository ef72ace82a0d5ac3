# SPDX-License-Identifier: Apache-2.0
"""PromQL of metrics that every server tells, also those behind a router; stage_panels.py draws them.

`$instance` and `$role` choose outermost servers, hence these are filtered by model alone; those of other
products' spans, which tell no model, by nothing.
"""

from __future__ import annotations

from typing import Final

from grafana.build.ttft_queries import (
    MODEL_LABEL,
    ROLE_LABEL,
    STAGE_LABEL,
    bounded_quantile,
    drop_nan,
    format_label,
    histogram_rate,
)
from ttft_otel.model import stages
from ttft_otel.model.names import keys, metric_names

REASON_METRIC: Final = f"{format_label(metric_names.QUEUE_REASON_DURATION)}_seconds"
HELD_METRIC: Final = f"{format_label(metric_names.QUEUE_HELD_DURATION)}_seconds"
RECOMPUTED_METRIC: Final = f"{format_label(metric_names.EC_RECOMPUTED)}_total"
TOKEN_TIME_METRIC: Final = (
    f"{format_label(metric_names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN)}_seconds_bucket"
)
FOREIGN_METRIC: Final = f"{format_label(metric_names.FOREIGN_DURATION)}_seconds"
FOREIGN_STAGE_METRIC: Final = f"{format_label(metric_names.FOREIGN_STAGE_DURATION)}_seconds"
FOREIGN_LABEL: Final = format_label(keys.FOREIGN)
REASON_LABEL: Final = format_label(keys.QUEUE_REASON)
HELD_LABEL: Final = format_label(keys.HELD_BY_KIND)
MODEL_SELECTOR: Final = f'{MODEL_LABEL}=~"$model"'


def waiting_requests(window: str) -> str:
    """How many requests wait for each reason, on average: their waiting time per time."""
    return _count_waiting(REASON_METRIC, REASON_LABEL, window)


def held_requests(window: str) -> str:
    """How many requests wait behind each kind of work, on average; as many as wait for all reasons."""
    return _count_waiting(HELD_METRIC, HELD_LABEL, window)


def _count_waiting(metric: str, label: str, window: str) -> str:
    return f"sum by ({label}) (histogram_sum({histogram_rate(metric, MODEL_SELECTOR, window)}))"


def recomputed_items(window: str) -> str:
    """Media items that each encoder-cache consumer encoded again."""
    increase = f"increase({RECOMPUTED_METRIC}{{{MODEL_SELECTOR}}}[{window}])"
    return f"sum by ({ROLE_LABEL}, instance) ({increase})"


def token_time_quantile(part: float, window: str) -> str:
    """A quantile of the times per output token, interpolated between the convention's bounds."""
    return bounded_quantile(part, TOKEN_TIME_METRIC, MODEL_SELECTOR, window)


def foreign_quantile(part: float, window: str) -> str:
    """A quantile of the TTFTs that each other product's spans tell."""
    rate = histogram_rate(FOREIGN_METRIC, "", window)
    return drop_nan(f"histogram_quantile({part}, sum by ({FOREIGN_LABEL}, {ROLE_LABEL}) ({rate}))")


def foreign_stage_mean(window: str) -> str:
    """Mean time of each stage that a product tells, and of what it does not: they add up to its mean TTFT."""
    rate = histogram_rate(FOREIGN_METRIC, "", window)
    told = f"histogram_sum({histogram_rate(FOREIGN_STAGE_METRIC, '', window)})"
    total = f"sum by ({FOREIGN_LABEL}) (histogram_sum({rate}))"
    rest = f"{total} - (sum by ({FOREIGN_LABEL}) ({told}) or 0 * {total})"
    rest = f'label_replace({rest}, "{STAGE_LABEL}", "{stages.UNATTRIBUTED}", "", "")'
    count = f"sum by ({FOREIGN_LABEL}) (histogram_count({rate})) > 0"
    parts = f"sum by ({FOREIGN_LABEL}, {STAGE_LABEL}) ({told}) or {rest}"
    return f"({parts}) / on ({FOREIGN_LABEL}) group_left () ({count})"
