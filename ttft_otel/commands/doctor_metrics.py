# SPDX-License-Identifier: Apache-2.0
"""Who counts the requests for metrics, by the settings of this environment, for doctor.py to print."""

from __future__ import annotations

import os

from ttft_otel.model.names import env_names
from ttft_otel.tracing.settings import Settings

COUNT_REMEDY = f"set {env_names.TTFT_OTEL_METRICS}=1, and the exporter process counts all of them"


def describe_metrics(chosen: Settings) -> tuple[bool, str, str]:
    """Whether metrics count every request, a sentence that says who makes them, and what to do if not."""
    if chosen.metrics:
        where = os.environ.get(env_names.OTEL_EXPORTER_OTLP_METRICS_ENDPOINT) or chosen.endpoint
        return (
            True,
            f"{env_names.TTFT_OTEL_METRICS} is on: the exporter process counts every request and sends "
            f"{chosen.temporality} metrics to {where}; the collector makes none of its spans",
            "",
        )
    # endswith(): also parentbased_, whose root requests are all sampled.
    if chosen.sampler.endswith("always_on"):
        return True, "the collector makes them of the spans, of which all are sent", ""
    sampled = f"sampler {chosen.sampler}"
    if chosen.sampler.endswith("traceidratio"):
        sampled += f", ratio {chosen.ratio:g}"
    # A note, not a failure: shares and quantiles may be right, counts are not.
    return False, f"the collector makes them of sampled requests alone ({sampled})", COUNT_REMEDY
