# SPDX-License-Identifier: Apache-2.0
"""Known requests in other backends than the stack's: VictoriaMetrics, ClickHouse, Jaeger 2, VictoriaTraces.

docs/guides/dashboards.md has the results as rows of its table. ClickHouse's engine is chDB behind its HTTP
front (clickhouse_front.py), as no package has the server itself; contrib's exporter brings our telemetry.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan
from tracing_fakes import FULL_RECORD, change_full_record

from lab import free_ports
from lab.server_commands import HOST, ServerCommand
from lab.stack import backend_queries, binaries, program_pins, stack_parts
from lab.stack.go_builds import GoMissingError
from lab.stack.program_pins import GoTool
from lab.stack.stack_parts import COLLECTOR_CONFIG, StackAddresses
from tests.stack import filled_stack, known_requests
from tests.stack.filled_stack import COUNT_QUERY, PORTIONS, PanelAsker, PanelQuery, send_portion
from tests.stack.known_requests import KnownRequest, KnownTruth
from tests.stack.running_stack import (
    RunningCollector,
    RunningPrometheus,
    StackPart,
    StackStarter,
    obtain_tool,
    wait_until,
)
from ttft_otel.exporter import span_batch
from ttft_otel.model.names import keys
from ttft_otel.stack import stack_queries

pytestmark = pytest.mark.full

BUILT_TOOLS: Final = (
    program_pins.VICTORIAMETRICS_TOOL,
    program_pins.CLICKHOUSE_COLLECTOR_TOOL,
    program_pins.JAEGER_TOOL,
)
SOME: Final = 7  # each seventh request is of every kind, too: 286


def find_tool(tool: GoTool) -> Path:
    """The program of a tool, for a test; skips without Go."""
    try:
        return obtain_tool(tool)
    except GoMissingError as error:
        (program,) = tool.programs
        pytest.skip(f"{error}, or name a {program.name} in {program.variable}")


def start_program(
    bench: StackStarter, name: str, binary: Path, port: int, *flags: str, health: str = "/health"
) -> str:
    """Start a program that listens on a port as its flags say; its URL."""
    command = ServerCommand(name, (str(binary), *flags), {}, port, health)
    bench.started.append(part := StackPart(command, StackAddresses(), bench.make_folder(name)))
    part.start()
    return stack_parts.format_loopback_url(port)


def start_victoria(bench: StackStarter, name: str, binary: Path, *flags: str) -> str:
    """Start a VictoriaMetrics or VictoriaTraces with data of its own; its URL."""
    port, data = free_ports.find_free_port(), bench.make_folder(f"{name}-data")
    words = (f"-httpListenAddr={HOST}:{port}", f"-storageDataPath={data}", *flags)
    return start_program(bench, name, binary, port, *words)


def start_collector_with(
    bench: StackStarter, overlay: dict[str, Any], **more: Any
) -> RunningCollector:
    """A collector with the shipped configuration and this below it."""
    return bench.start_collector(COLLECTOR_CONFIG, f"yaml:{json.dumps(overlay)}", **more)


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
    start: float = field(default_factory=time.time)
    end: float = 0.0


@pytest.fixture(scope="module")
def sent(bench: StackStarter, tmp_path_factory: pytest.TempPathFactory) -> FilledVictoriaMetrics:
    """All rows, in Prometheus and both of VictoriaMetrics."""
    binary = find_tool(program_pins.VICTORIAMETRICS_TOOL)
    written, pushed = (
        start_victoria(bench, name, binary, *VM_FLAGS) for name in ("vm-written", "vm-pushed")
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
    env = {"TTFT_METRICS_INTERVAL": "5s"}
    collector = start_collector_with(bench, overlay, addresses=at, env=env)
    made = FilledVictoriaMetrics(prometheus, written, pushed, known_requests.build_known_requests())
    for portion in range(PORTIONS):
        count = send_portion(collector.http, made.rows, portion)
        wait_until(lambda count=count: prometheus.query_number(COUNT_QUERY) == count, 60)
    wait_until(lambda: sum_series(written, "ttft_duration_seconds_count") == len(made.rows), 60)
    # Some seconds without requests, so that rates are over at the window's end. Written late: what is newer
    # than the end comes after all that is older.
    made.end = time.time() + 15
    newest = "max(timestamp(otelcol_process_uptime_seconds_total))"
    wait_until(lambda: sum_series(written, newest) > made.end, 60)
    return made


def sum_series(url: str, query: str) -> float:
    """The sum of all series of a query, now; 0 without any."""
    return backend_queries.sum_instant_query(url, query) or 0


def ask_panel(url: str, sent: FilledVictoriaMetrics, query: PanelQuery) -> dict[Any, float] | str:
    """Numbers by labels, over the whole time in which rows were sent; or why there are none."""
    window = {"__rate_interval": f"{round(sent.end - sent.start + 30)}s"}
    ask = PanelAsker(url, "", sent.start - 30, sent.end, window)
    try:
        series = ask.query_prometheus(ask.expand_variables(query))
    except stack_queries.BackendQueryError as error:
        return str(error)
    found = {}
    for each in series:
        labels = [pair for pair in each["metric"].items() if pair[0] != "__name__"]
        found[tuple(sorted(labels))] = float(each["value"][1])
    return found


def test_panels_in_victoriametrics(sent: FilledVictoriaMetrics) -> None:
    """Written by Prometheus: counters, the convention's histograms and rules give the same numbers.

    Panels on native histograms show nothing: MetricsQL lacks their functions.
    """
    for query in (query for query in filled_stack.list_queries() if query.prometheus):
        expected, found = (
            ask_panel(url, sent, query) for url in (sent.prometheus.url, sent.written)
        )
        assert isinstance(expected, Mapping)
        if NATIVE_QUERY.search(query.text):
            assert found == {} or "answered 4" in found, (query.name, found)
            continue
        assert isinstance(found, Mapping), (query.name, found)
        near = 0.5 if query.title in EXTENDED_PANELS else 0.01
        assert found == pytest.approx(expected, rel=near, nan_ok=True), query.name


def test_histograms_in_victoriametrics(sent: FilledVictoriaMetrics) -> None:
    """Native histograms are kept as counts, sums and vmrange buckets, with every request in them."""
    truth = KnownTruth(sent.rows)
    answered = 'ttft_duration_seconds_sum{ttft_role!="encode",error_type=""}'
    whole_s = truth.compute_mean_s() * len(truth.good)
    assert sum_series(sent.written, answered) == pytest.approx(whole_s)
    assert sum_series(sent.written, "ttft_duration_seconds_bucket") >= len(sent.rows)


def test_pushed_to_victoriametrics(sent: FilledVictoriaMetrics) -> None:
    """By OTLP: the same names and counts; where a series is from is not in the labels job and instance."""
    wait_until(lambda: sum_series(sent.pushed, "ttft_duration_seconds_count") == len(sent.rows), 60)
    by_instance = stack_queries.fetch_json(
        f"{sent.pushed}/api/v1/query",
        query="sum by (service_instance_id) (ttft_duration_seconds_count)",
    )["data"]["result"]
    assert {each["metric"].get("service_instance_id") for each in by_instance} == {
        row.instance for row in sent.rows
    }
    assert sum_series(sent.pushed, 'ttft_duration_seconds_count{instance!=""}') == 0


def test_no_exemplars_in_victoriametrics(sent: FilledVictoriaMetrics) -> None:
    """Prometheus has the traces' ids beside the percentiles, VictoriaMetrics has not."""
    query = "ttft_duration_seconds"
    found = [
        stack_queries.query_exemplars(url, query, sent.start, sent.end)
        for url in (sent.prometheus.url, sent.written)
    ]
    assert found[0] and not found[1]


CLICKHOUSE_CONFIG: Final = """
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

    def query_count(self, query: str) -> int:
        """The only number that a query selects, as n."""
        (found,) = self.query_rows(query)
        return int(found["n"])


@pytest.fixture(scope="module")
def clickhouse(bench: StackStarter) -> FilledClickHouse:
    """A ClickHouse that has got everything through both collectors."""
    if importlib.util.find_spec("chdb") is None:
        pytest.skip("no ClickHouse: install the package chdb-core (500 MB) beside the tests")
    binary = find_tool(program_pins.CLICKHOUSE_COLLECTOR_TOOL)
    names = ("grpc", "http", "front", "health")
    ports = {name: free_ports.find_free_port() for name in names}
    folder = bench.make_folder("clickhouse-config")
    (config := folder / "collector.yaml").write_text(
        CLICKHOUSE_CONFIG.format(host=HOST, **ports), "utf-8"
    )
    words = ("-m", "tests.stack.clickhouse_front", str(ports["front"]), str(folder))
    python = Path(sys.executable)
    url = start_program(bench, "clickhouse", python, ports["front"], *words, health="/")
    flag = f"--config={config}"
    start_program(bench, "clickhouse-collector", binary, ports["health"], flag, health="/")
    metrics = {"endpoint": f"http://{HOST}:{ports['http']}"}
    env = {"TTFT_TEMPO_OTLP": f"{HOST}:{ports['grpc']}", "TTFT_METRICS_INTERVAL": "5s"}
    overlay = {"exporters": {"otlp_http/prometheus": metrics}}
    collector = start_collector_with(bench, overlay, env=env)
    made = FilledClickHouse(url, known_requests.build_known_requests()[::SOME])
    spans = known_requests.build_known_spans(made.rows, time.time_ns())
    known_requests.export_spans(collector.http, spans)
    traces = "SELECT count() AS n FROM ttft.otel_traces"
    wait_until(lambda: made.query_count(traces) == len(spans), 90)
    counts = f"SELECT sum(counted) AS n FROM ({NEWEST.format(name='ttft.duration')})"
    wait_until(lambda: made.query_count(counts) == len(made.rows), 60)
    return made


def test_slow_requests_in_clickhouse(clickhouse: FilledClickHouse) -> None:
    """By what the collector derives: exactly the known ones, each with its TTFT in milliseconds."""
    found = clickhouse.query_rows(
        f"SELECT TraceId, toUInt32OrZero(SpanAttributes['ttft_ms']) AS ms FROM ttft.otel_traces"
        f" WHERE {OUTERMOST} AND ms >= 1000"
    )
    slow = KnownTruth(clickhouse.rows).list_slow_rows()
    assert {each["TraceId"]: each["ms"] for each in found} == {
        row.trace_id: row.ttft // 1000 for row in slow
    }


def test_stages_add_up_in_clickhouse(clickhouse: FilledClickHouse) -> None:
    """Mean stages from the spans, and from the exponential histograms, are the rows' own."""
    truth = KnownTruth(clickhouse.rows)
    key = f"Attributes['{keys.STAGE}']"
    found = clickhouse.query_rows(
        f"SELECT {key} AS stage, sum(summed) AS s FROM ({NEWEST.format(name='ttft.stage.duration')})"
        f" WHERE Attributes['{keys.ERROR_TYPE}'] = '' AND Attributes['{keys.ROLE}'] != 'encode'"
        " GROUP BY stage"
    )
    means = {each["stage"]: each["s"] / len(truth.good) for each in found}
    assert means == pytest.approx(truth.compute_stage_means_s(), rel=0.001)


def test_exemplars_in_clickhouse(clickhouse: FilledClickHouse) -> None:
    """Histograms bring ids of traces that are there."""
    (found,) = clickhouse.query_rows(
        "SELECT count() AS n, countIf(id IN (SELECT TraceId FROM ttft.otel_traces)) AS known FROM (SELECT"
        " DISTINCT arrayJoin(Exemplars.TraceId) AS id FROM ttft.otel_metrics_exponential_histogram)"
    )
    assert int(found["n"]) == int(found["known"]) >= 20


HOLDER: Final = "a" * 32  # the trace of the request that held up FULL_RECORD's


@dataclass
class FilledTraces:
    """The URL of Jaeger's API, with the rows since a Unix time, and spans of a request that was held up."""

    api: str
    rows: list[KnownRequest]
    start: float
    linked: Sequence[ReadableSpan] = ()

    def search_traces(self, tags: Mapping[str, str], **more: object) -> set[str]:
        """Ids of traces that have a span with these attributes, in any service."""
        more["start"], more["end"] = round((self.start - 300) * 1e6), round(time.time() * 1e6)
        return {
            trace["traceID"].zfill(32)
            for service in stack_queries.fetch_json(f"{self.api}/api/services")["data"] or ()
            for trace in stack_queries.fetch_json(
                f"{self.api}/api/traces", service=service, tags=json.dumps(tags), limit=200, **more
            )["data"]
        }

    def has_spans(self, trace_id: str, names: Counter[str]) -> bool:
        """Whether a trace has spans of exactly these names."""
        try:
            found = stack_queries.fetch_json(f"{self.api}/api/traces/{trace_id}")["data"]
        except stack_queries.BackendQueryError:  # Jaeger's word for none
            return False
        return names == Counter(span["operationName"] for trace in found for span in trace["spans"])


def start_jaeger(bench: StackStarter) -> tuple[str, str]:
    """A Jaeger with its traces in memory; the URLs of its OTLP receiver's path, and of its API."""
    binary = find_tool(program_pins.JAEGER_TOOL)
    otlp, query, grpc = (free_ports.find_free_port() for _ in range(3))
    traces = {"receivers": ["otlp"], "exporters": ["jaeger_storage_exporter"]}
    config = {
        "service": {
            "extensions": ["jaeger_storage", "jaeger_query"],
            "pipelines": {"traces": traces},
            "telemetry": {"metrics": {"level": "none"}},
        },
        "extensions": {
            "jaeger_storage": {"backends": {"kept": {"memory": {"max_traces": 10_000}}}},
            "jaeger_query": {
                "storage": {"traces": "kept"},
                "http": {"endpoint": f"{HOST}:{query}"},
                "grpc": {"endpoint": f"{HOST}:{grpc}"},
            },
        },
        "receivers": {"otlp": {"protocols": {"http": {"endpoint": f"{HOST}:{otlp}"}}}},
        "exporters": {"jaeger_storage_exporter": {"trace_storage": "kept"}},
    }
    words = ("--config", f"yaml:{json.dumps(config)}")
    url = start_program(bench, "jaeger", binary, query, *words, health="/api/services")
    return f"{stack_parts.format_loopback_url(otlp)}/v1/traces", url


def start_victoriatraces(bench: StackStarter) -> tuple[str, str]:
    """A VictoriaTraces, named or on PATH; the same URLs."""
    program = program_pins.VICTORIATRACES
    if not (found := binaries.find_named_program(program) or shutil.which(program.name)):
        pytest.skip(
            "no VictoriaTraces: its releases have a program for Linux; put it on PATH, "
            f"or name it in {program.variable}"
        )
    url = start_victoria(bench, program.name, Path(found))
    return f"{url}/insert/opentelemetry/v1/traces", f"{url}/select/jaeger"


@pytest.fixture(scope="module", params=[start_jaeger, start_victoriatraces])
def traces(request: pytest.FixtureRequest, bench: StackStarter) -> FilledTraces:
    """One of them, with all rows' spans: one exporter more in the collector."""
    endpoint, api = request.param(bench)
    overlay = {
        "exporters": {"otlp_http/other": {"traces_endpoint": endpoint}},
        "service": {"pipelines": {"traces/tempo": {"exporters": ["otlp_http/other"]}}},
    }
    collector = start_collector_with(bench, overlay)
    made = FilledTraces(api, known_requests.build_known_requests()[::SOME], time.time())
    known_requests.send_rows(collector.http, made.rows)
    record = change_full_record(start_ns=time.time_ns())
    made.linked = span_batch.build_spans(record, Resource({SERVICE_NAME: "linked"}))
    known_requests.export_spans(collector.http, made.linked)
    return made


def test_traces_are_whole(traces: FilledTraces) -> None:
    """Every span of a request that several servers had is in one trace, under its name."""
    rows = [row for row in traces.rows if row.routed][:20]
    expected: dict[str, Counter[str]] = {}
    for span in known_requests.build_known_spans(rows, time.time_ns()):
        assert span.context
        expected.setdefault(f"{span.context.trace_id:032x}", Counter())[span.name] += 1
    for trace_id, names in expected.items():
        wait_until(partial(traces.has_spans, trace_id, names))
    assert min(sum(names.values()) for names in expected.values()) > 30


def test_links(traces: FilledTraces) -> None:
    """A queue's span names the request that held it up, beside its parent, and no other span does."""
    trace_id = FULL_RECORD.trace_id
    names = Counter(span.name for span in traces.linked)
    wait_until(partial(traces.has_spans, trace_id, names))
    (trace,) = stack_queries.fetch_json(f"{traces.api}/api/traces/{trace_id}")["data"]
    linked = [
        (span["operationName"], reference["traceID"])
        for span in trace["spans"]
        for reference in span["references"]
        if reference["traceID"] != trace_id
    ]
    assert linked == [("prefill.queue", HOLDER)]


def test_traces_are_found(traces: FilledTraces) -> None:
    """By the request's id; the slow ones by name and duration; and by what the collector derives."""
    truth, outermost = KnownTruth(traces.rows), {keys.OUTERMOST: "true"}
    for row in truth.all[:5]:
        wait_until(partial(traces.search_traces, {keys.REQUEST_ID: row.request_id}), interval_s=1.0)
        assert traces.search_traces({keys.REQUEST_ID: row.request_id}) == {row.trace_id}
    slow = {row.trace_id for row in truth.list_slow_rows()}
    assert slow
    assert traces.search_traces(outermost, operation="ttft", minDuration="1000ms") == slow
    slowest = truth.list_slow_rows()[0]
    derived = {**outermost, "ttft_ms": str(slowest.ttft // 1000)}
    assert slowest.trace_id in traces.search_traces(derived, operation="ttft")
