# SPDX-License-Identifier: Apache-2.0
"""286 known requests of every kind in ClickHouse: contrib's exporter behind our collector, asked in SQL.

The engine is chDB behind its HTTP front (clickhouse_front.py), as no package has the server itself.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import pytest

from lab import free_ports
from lab.server_commands import HOST, ServerCommand
from lab.stack import program_pins, stack_parts
from lab.stack.stack_parts import StackAddresses
from tests.stack import known_requests, other_programs
from tests.stack.known_requests import KnownRequest, KnownTruth
from tests.stack.running_stack import StackPart, StackStarter, wait_until
from ttft_otel.model.names import keys
from ttft_otel.stack import stack_queries

pytestmark = pytest.mark.full

BUILT_TOOLS: Final = (program_pins.CLICKHOUSE_COLLECTOR_TOOL,)

CONFIG: Final = """
receivers: {{otlp: {{protocols: {{
  grpc: {{endpoint: "{host}:{grpc}", max_recv_msg_size_mib: 16}}, http: {{endpoint: "{host}:{http}"}}}}}}}}
exporters:
  clickhouse: {{endpoint: "http://{host}:{front}", database: ttft, compress: none, timeout: 60s}}
extensions: {{health_check: {{endpoint: "{host}:{health}"}}}}
service:
  extensions: [health_check]
  telemetry: {{metrics: {{level: none}}}}
  pipelines:
    traces: {{receivers: [otlp], exporters: [clickhouse]}}
    metrics: {{receivers: [otlp], exporters: [clickhouse]}}
"""
OUTERMOST: Final = f"SpanName = 'ttft' AND SpanAttributes['{keys.OUTERMOST}'] = 'true'"
# The newest of each series; cumulative, so it has counted everything.
NEWEST: Final = (
    "SELECT Attributes, argMax(Count, TimeUnix) AS counted, argMax(Sum, TimeUnix) AS summed"
    " FROM ttft.otel_metrics_exponential_histogram WHERE MetricName = '{name}'"
    " GROUP BY ResourceAttributes, Attributes"
)


@dataclass
class FilledClickHouse:
    """A ClickHouse with the rows' spans and metrics."""

    url: str
    rows: list[KnownRequest]

    def query_rows(self, query: str) -> list[dict[str, Any]]:
        """What a query selects."""
        body = stack_queries.send_body(
            f"{self.url}/?default_format=JSONEachRow", query.encode(), "text/plain"
        )
        return [json.loads(line) for line in body.splitlines()]

    def count_spans(self) -> int:
        """The number of spans that it has."""
        return int(self.query_rows("SELECT count() AS n FROM ttft.otel_traces")[0]["n"])

    def count_requests(self) -> int:
        """The number of requests that its TTFT histograms have counted."""
        (found,) = self.query_rows(
            f"SELECT sum(counted) AS n FROM ({NEWEST.format(name='ttft.duration')})"
        )
        return int(found["n"])


def equals(ask: Callable[[], int], expected: int) -> bool:
    """Whether an answer is the expected one."""
    return ask() == expected


@pytest.fixture(scope="module")
def clickhouse(bench: StackStarter) -> FilledClickHouse:
    """A ClickHouse that has got everything through both collectors."""
    if importlib.util.find_spec("chdb") is None:
        pytest.skip("no ClickHouse: install the package chdb-core (500 MB) beside the tests")
    binary = other_programs.find_tool(BUILT_TOOLS[0])
    names = ("grpc", "http", "front", "health")
    ports = {name: free_ports.find_free_port() for name in names}
    folder = bench.make_folder("clickhouse")
    words = (sys.executable, "-m", "tests.stack.clickhouse_front", str(ports["front"]), str(folder))
    (config := folder / "collector.yaml").write_text(CONFIG.format(host=HOST, **ports), "utf-8")
    at = StackAddresses.choose_free()
    for command in (
        ServerCommand("clickhouse", words, {}, ports["front"], "/"),
        ServerCommand(
            "clickhouse-collector", (str(binary), f"--config={config}"), {}, ports["health"], "/"
        ),
    ):
        bench.started.append(part := StackPart(command, at, folder))
        part.start()
    overlay = {
        "exporters": {"otlp_http/prometheus": {"endpoint": f"http://{HOST}:{ports['http']}"}}
    }
    env = {"TTFT_TEMPO_OTLP": f"{HOST}:{ports['grpc']}", "TTFT_METRICS_INTERVAL": "5s"}
    collector = bench.start_collector(
        stack_parts.COLLECTOR_CONFIG, f"yaml:{json.dumps(overlay)}", env=env
    )
    made = FilledClickHouse(
        stack_parts.format_loopback_url(ports["front"]), known_requests.build_known_requests()[::7]
    )
    spans = known_requests.build_known_spans(made.rows, time.time_ns())
    known_requests.export_spans(collector.http, spans, known_requests.SPANS_PER_BATCH)
    wait_until(partial(equals, made.count_spans, len(spans)), 90)
    wait_until(partial(equals, made.count_requests, len(made.rows)), 60)
    return made


def test_slow_requests(clickhouse: FilledClickHouse) -> None:
    """By what the collector derives: exactly the known ones, each with its TTFT in milliseconds."""
    found = clickhouse.query_rows(
        f"SELECT TraceId, toUInt32OrZero(SpanAttributes['ttft_ms']) AS ms FROM ttft.otel_traces"
        f" WHERE {OUTERMOST} AND ms >= 1000"
    )
    slow = KnownTruth(clickhouse.rows).list_slow_rows()
    assert {each["TraceId"]: each["ms"] for each in found} == {
        row.trace_id: row.ttft // 1000 for row in slow
    }


def test_stages_add_up(clickhouse: FilledClickHouse) -> None:
    """Mean stages from the spans, and from the exponential histograms, are the rows' own."""
    truth = KnownTruth(clickhouse.rows)
    key = f"Attributes['{keys.STAGE}']"
    found = clickhouse.query_rows(
        f"SELECT {key} AS stage, sum(summed) AS s FROM ({NEWEST.format(name='ttft.stage.duration')})"
        f" WHERE Attributes['{keys.ERROR_TYPE}'] = '' AND Attributes['{keys.ROLE}'] != 'encode'"
        " GROUP BY stage"
    )
    means = truth.compute_stage_means_s()
    assert {each["stage"] for each in found} == set(means)
    for each in found:
        assert each["s"] / len(truth.good) == pytest.approx(means[each["stage"]], rel=0.001)


def test_exemplars(clickhouse: FilledClickHouse) -> None:
    """Histograms bring ids of traces that are there."""
    (found,) = clickhouse.query_rows(
        "SELECT count() AS n, countIf(id IN (SELECT TraceId FROM ttft.otel_traces)) AS known FROM (SELECT"
        " DISTINCT arrayJoin(Exemplars.TraceId) AS id FROM ttft.otel_metrics_exponential_histogram)"
    )
    assert int(found["n"]) == int(found["known"]) >= 20
