# SPDX-License-Identifier: Apache-2.0
"""The metrics of 2 000 known requests in VictoriaMetrics, beside the same in Prometheus.

docs/guides/dashboards.md has the result as a row of its table.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import pytest

from lab.stack import program_pins, stack_parts
from lab.stack.stack_parts import StackAddresses
from tests.stack import known_requests, other_programs, panel_queries
from tests.stack.known_requests import KnownRequest, KnownTruth
from tests.stack.panel_queries import PanelAsker, PanelQuery
from tests.stack.running_stack import RunningPrometheus, StackStarter, wait_until
from ttft_otel.stack import stack_queries

pytestmark = pytest.mark.full

BUILT_TOOLS: Final = (program_pins.VICTORIAMETRICS_TOOL,)

# Functions that MetricsQL does not have, and quantiles of a histogram without bounds.
NATIVE_QUERY: Final = re.compile(
    r"histogram_(count|sum|fraction)\("
    r"|histogram_quantile\([\d.]+, sum(?: by \([^)]*\))? ?\(rate\(\w+(?<!_bucket)\{"
)
# Prometheus extends what it saw to its window's ends, VictoriaMetrics does not; the data begin inside it.
EXTENDED_PANELS: Final = {
    "Spans accepted", "Spans in and out", "Collector CPU", "Metric points", "TTFT distribution",
    "Media encoded twice",
}  # fmt: skip
VM_FLAGS: Final = (
    "-opentelemetry.usePrometheusNaming",
    "-search.latencyOffset=0s",
    "-search.disableCache",
)


@dataclass
class FilledVictoriaMetrics:
    """URLs of what got the same rows, and between which Unix times."""

    prometheus: RunningPrometheus
    written: str  # VictoriaMetrics, by Prometheus's remote write
    pushed: str  # VictoriaMetrics, by OTLP
    rows: list[KnownRequest]
    start: float
    end: float = 0.0


@pytest.fixture(scope="module")
def sent(bench: StackStarter, tmp_path_factory: pytest.TempPathFactory) -> FilledVictoriaMetrics:
    """All rows, in Prometheus and both of VictoriaMetrics."""
    binary = other_programs.find_tool(BUILT_TOOLS[0])
    written, pushed = (
        other_programs.start_victoria(bench, name, binary, *VM_FLAGS)
        for name in ("vm-written", "vm-pushed")
    )
    config = tmp_path_factory.mktemp("written") / "prometheus"
    shutil.copytree(stack_parts.PROMETHEUS_CONFIG.parent, config)
    with (config / "prometheus.yml").open("a") as file:
        file.write(
            f"\nremote_write: [{{url: '{written}/api/v1/write', send_native_histograms: true}}]\n"
        )
    at = StackAddresses.choose_free()
    prometheus = bench.start_prometheus(at, config / "prometheus.yml")
    both = {"exporters": ["otlp_http/prometheus", "otlp_http/pushed"]}
    overlay = {
        "exporters": {"otlp_http/pushed": {"endpoint": f"{pushed}/opentelemetry"}},
        "service": {"pipelines": {"metrics/prometheus": both}},
    }
    collector = bench.start_collector(
        stack_parts.COLLECTOR_CONFIG, f"yaml:{json.dumps(overlay)}", addresses=at,
        env={"TTFT_METRICS_INTERVAL": "5s"},
    )  # fmt: skip
    rows = known_requests.build_known_requests()
    made = FilledVictoriaMetrics(prometheus, written, pushed, rows, time.time())
    for portion in range(5):
        chosen = [row for row in rows if row.portion == portion]
        known_requests.send_rows(collector.http, chosen, 512 if portion else 100 * len(chosen))
        count = sum(row.portion <= portion for row in rows)
        wait_until(partial(is_counted, prometheus, count), 60)
    wait_until(lambda: sum_series(written, "ttft_duration_seconds_count") == len(rows), 60)
    # Some seconds without requests, so that rates are over at the window's end. Written late: what is newer
    # than the end comes after all that is older.
    made.end = time.time() + 15
    newest = "max(timestamp(otelcol_process_uptime_seconds_total))"
    wait_until(lambda: query_number(written, newest) > made.end, 60)
    return made


def is_counted(prometheus: RunningPrometheus, expected: int) -> bool:
    """Whether Prometheus has counted this number of requests."""
    return prometheus.query_number("sum(histogram_count(ttft_duration_seconds))") == expected


def query_number(url: str, query: str) -> float:
    """The only value of a query, now; 0 without one."""
    found = stack_queries.fetch_json(f"{url}/api/v1/query", query=query)["data"]["result"]
    return float(found[0]["value"][1]) if found else 0.0


def sum_series(url: str, name: str) -> float:
    """The sum of all series of a name, now."""
    return query_number(url, f"sum({name})")


def ask_panel(url: str, sent: FilledVictoriaMetrics, query: PanelQuery) -> dict[Any, float] | str:
    """Numbers by labels, over the whole time in which rows were sent; or why there are none."""
    window = {"__rate_interval": f"{round(sent.end - sent.start + 30)}s"}
    ask = PanelAsker(url, "", sent.start - 30, sent.end, window)
    try:
        series = ask.query_prometheus(ask.expand_variables(query))
    except stack_queries.BackendQueryError as error:
        return str(error)
    return {
        tuple(sorted(pair for pair in each["metric"].items() if pair[0] != "__name__")): float(
            each["value"][1]
        )
        for each in series
    }


def test_panels_in_victoriametrics(sent: FilledVictoriaMetrics) -> None:
    """Written by Prometheus: counters, the convention's histograms and rules give the same numbers.

    Panels on native histograms show nothing: MetricsQL lacks their functions.
    """
    for query in (query for query in panel_queries.list_queries() if query.prometheus):
        expected, found = (
            ask_panel(url, sent, query) for url in (sent.prometheus.url, sent.written)
        )
        assert isinstance(expected, Mapping)
        if NATIVE_QUERY.search(query.text):
            assert found == {} or "answered 4" in found, (query.name, found)
            continue
        assert isinstance(found, Mapping), (query.name, found)
        assert set(found) == set(expected), query.name
        near = 0.5 if query.title in EXTENDED_PANELS else 0.01
        for labels, value in expected.items():
            assert found[labels] == pytest.approx(value, rel=near, nan_ok=True), (
                query.name,
                labels,
            )


def test_histograms_in_victoriametrics(sent: FilledVictoriaMetrics) -> None:
    """Native histograms are kept as counts, sums and vmrange buckets, with every request in them."""
    truth = KnownTruth(sent.rows)
    assert sum_series(
        sent.written, 'ttft_duration_seconds_sum{ttft_role!="encode",error_type=""}'
    ) == pytest.approx(truth.compute_mean_s() * len(truth.good))
    in_buckets = sum_series(sent.written, "ttft_duration_seconds_bucket")
    assert in_buckets >= len(sent.rows)


def test_pushed_to_victoriametrics(sent: FilledVictoriaMetrics) -> None:
    """By OTLP: the same names and counts; where a series is from is not in the labels job and instance."""
    wait_until(lambda: sum_series(sent.pushed, "ttft_duration_seconds_count") == len(sent.rows), 60)
    by_instance = {
        row["metric"].get("service_instance_id")
        for row in stack_queries.fetch_json(
            f"{sent.pushed}/api/v1/query",
            query="sum by (service_instance_id) (ttft_duration_seconds_count)",
        )["data"]["result"]
    }
    assert by_instance == {row.instance for row in sent.rows}
    assert sum_series(sent.pushed, 'ttft_duration_seconds_count{instance!=""}') == 0


def test_no_exemplars_in_victoriametrics(sent: FilledVictoriaMetrics) -> None:
    """Prometheus has the traces' ids beside the percentiles, VictoriaMetrics has not."""
    query = "ttft_duration_seconds"
    found = [
        stack_queries.query_exemplars(url, query, sent.start, sent.end)
        for url in (sent.prometheus.url, sent.written)
    ]
    assert found[0] and not found[1]
