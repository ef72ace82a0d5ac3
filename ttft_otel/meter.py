# SPDX-License-Identifier: Apache-2.0
"""Counts of ours on the host's existing /metrics: records sent and dropped, hooks that failed.

recorder.py and the router count here; prometheus_client is the host's own, in its default registry.
"""

from __future__ import annotations

import functools

from prometheus_client import Counter

from ttft_otel import names


@functools.lru_cache(maxsize=1)
def _records() -> Counter:
    return Counter(names.METRIC_RECORDS, "Records handed to the exporter.")


@functools.lru_cache(maxsize=1)
def _dropped() -> Counter:
    return Counter(names.METRIC_DROPPED, "Records or requests that tracing lost.", ["reason"])


def sent() -> None:
    """One record was handed off."""
    _records().inc()


def dropped(reason: str) -> None:
    """One record (or one request's state) was lost; `reason` is one of a few words."""
    _dropped().labels(reason).inc()
