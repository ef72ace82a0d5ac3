# SPDX-License-Identifier: Apache-2.0
"""Files of metrics: several workers look like one router, whose counters never fall."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ttft_otel.model.names import metric_names
from ttft_otel.router.workers.metrics_files import MAX_GAUGE_AGE_S, MetricsFiles

URL = "http://127.0.0.1:1"


def build_metrics(requests: int, in_flight: int, breaker: float, reloads: int) -> Iterator[Metric]:
    """What a worker has: a part of the requests, an opinion, and a reload like the others."""
    ended = CounterMetricFamily(metric_names.ROUTER_ATTEMPTS, "Ended.", labels=["instance"])
    ended.add_metric([URL], requests)
    yield ended
    yield GaugeMetricFamily(metric_names.ROUTER_REQUESTS_IN_FLIGHT, "Under way.", value=in_flight)
    yield GaugeMetricFamily(metric_names.ROUTER_BREAKER_OPEN, "Open.", value=breaker)
    yield CounterMetricFamily(metric_names.ROUTER_RELOADS, "Reloads.", value=reloads)


def read_values(files: MetricsFiles) -> dict[str, float]:
    """All that is shown, without labels."""
    return {each.name: each.value for metric in files.collect_all() for each in metric.samples}


def test_workers_are_one(tmp_path: Path) -> None:
    """Parts are added up; of what all have seen the most counts."""
    one, other = MetricsFiles(tmp_path, 0), MetricsFiles(tmp_path, 1)
    one.write_own(build_metrics(5, 1, 0.0, 2), {URL})
    other.write_own(build_metrics(7, 2, 1.0, 2), {URL})

    assert read_values(one) == read_values(other)
    assert read_values(one) == {
        f"{metric_names.ROUTER_ATTEMPTS}_total": 12,
        metric_names.ROUTER_REQUESTS_IN_FLIGHT: 3,
        metric_names.ROUTER_BREAKER_OPEN: 1,
        f"{metric_names.ROUTER_RELOADS}_total": 2,
    }


def test_a_successor_goes_on_counting(tmp_path: Path) -> None:
    """Counters of a dead worker stay, also before its successor has written anything; gauges do not."""
    MetricsFiles(tmp_path, 0).write_own(build_metrics(5, 3, 1.0, 0), {URL})
    successor = MetricsFiles(tmp_path, 0)
    assert read_values(successor)[f"{metric_names.ROUTER_ATTEMPTS}_total"] == 5

    for requests in (0, 1, 2):
        successor.write_own(build_metrics(requests, 0, 0.0, 0), {URL})

        values = read_values(successor)
        assert values[f"{metric_names.ROUTER_ATTEMPTS}_total"] == 5 + requests
        assert values[metric_names.ROUTER_REQUESTS_IN_FLIGHT] == 0


def test_gauges_of_a_silent_worker_are_left_out(tmp_path: Path) -> None:
    """Nothing is under way at a worker that has been dead for long; what it counted stays."""
    one, other = MetricsFiles(tmp_path, 0), MetricsFiles(tmp_path, 1)
    one.write_own(build_metrics(5, 1, 0.0, 0), {URL})
    other.write_own(build_metrics(7, 2, 1.0, 0), {URL})
    path = tmp_path / "worker-1.metrics"
    long_ago_s = path.stat().st_mtime - MAX_GAUGE_AGE_S - 1
    os.utime(path, (long_ago_s, long_ago_s))

    values = read_values(one)

    assert values[f"{metric_names.ROUTER_ATTEMPTS}_total"] == 12
    assert (
        values[metric_names.ROUTER_REQUESTS_IN_FLIGHT],
        values[metric_names.ROUTER_BREAKER_OPEN],
    ) == (1, 0)


def test_series_of_removed_instances_are_not_inherited(tmp_path: Path) -> None:
    """Else instances that come and go would fill /metrics for ever."""
    MetricsFiles(tmp_path, 0).write_own(build_metrics(5, 0, 0.0, 0), {URL})

    successor = MetricsFiles(tmp_path, 0)
    successor.write_own(iter(()), {"http://127.0.0.1:2"})

    assert f"{metric_names.ROUTER_ATTEMPTS}_total" not in read_values(successor)


def test_a_broken_file_is_nothing(tmp_path: Path) -> None:
    """Whatever lies there, /metrics answers."""
    (tmp_path / "worker-1.metrics").write_bytes(b"\xff")
    one = MetricsFiles(tmp_path, 0)
    one.write_own(build_metrics(5, 1, 0.0, 0), {URL})

    assert read_values(one)[metric_names.ROUTER_REQUESTS_IN_FLIGHT] == 1
