# SPDX-License-Identifier: Apache-2.0
"""A separate stack, filled through the collector with known_requests.py's requests; conftest.py starts one.

The rows go in five portions, each after the collector has pushed the one before: lines over time then
have several points. Series that appear with the first portion count from zero, because our Prometheus
stores a zero at their start time (created-timestamp-zero-ingestion): all rows are in the truth.

The first portion is one message, so that one push holds all of it. Of a series with few, close values
Prometheus 3.15 misplaces buckets by one (OTLP scale above 8, otlptranslator's convertBucketsLayout),
takes the next, coarser sample for a counter reset, and counts those few twice; with a wide first sample
it does not.

What else the dashboards show has data too: a real router, scraped, that meets failures and makes no
spans; a second collector, with sampling, which gets nothing that metrics count; and other products' golden
traces, once a portion.

Then every query of every panel, read from grafana/dashboards and asked as Grafana would ask it. Variables
take the values that a person who opens the dashboard has; tests give the time range and where Prometheus and
Tempo are, or a Grafana, which then asks them itself.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from opentelemetry.sdk.resources import Resource

from lab import local_deployment, ttft_client
from lab.http_servers import HttpServerThread, SilentHandler
from lab.local_servers import LocalServer
from lab.server_commands import HOST
from lab.stack import backend_queries, stack_parts
from lab.stack.stack_parts import DASHBOARDS
from tests.fake_tempo import FILES, GOLDEN
from tests.stack import otlp_requests
from tests.stack.known_requests import (
    SLO_MS,
    SPANS_PER_BATCH,
    KnownRequest,
    KnownTruth,
    build_known_records,
    export_spans,
    send_rows,
)
from tests.stack.running_stack import RunningStack, StackStarter, wait_until
from ttft_otel.exporter import span_batch
from ttft_otel.model.names import env_names
from ttft_otel.stack import stack_queries

SCRAPE_INTERVAL = "5s"  # of the collector's pushes; 15 s where people look
PORTIONS = 5
COUNT_QUERY = "sum(histogram_count(ttft_duration_seconds))"
SLOW_QUERY = f'{{ span:name = "ttft" && span.ttft_ms >= {SLO_MS} && span.ttft.outermost = true }}'
# The last to come: telemetry of the sampling collector, a scrape of the router, a rule over six hours.
LATE_QUERY = (
    'rate(otelcol_processor_tail_sampling_count_traces_sampled_total{sampled="true"}[1m])',
    'rate(ttft_otel_router_attempts_total{result="5xx"}[1m]) > 0',
    "ttft:over_slo:ratio6h / scalar(ttft:slo:budget) >= 0",
)


@dataclass(frozen=True)
class FilledStack:
    """The stack, the rows that were sent, and the Unix times between which they were sent."""

    stack: RunningStack
    rows: list[KnownRequest]
    start: float
    end: float

    @property
    def truth(self) -> KnownTruth:
        """The known figures of all rows."""
        return KnownTruth(self.rows)


@contextmanager
def filled_stack(bench: StackStarter, rows: list[KnownRequest]) -> Iterator[FilledStack]:
    """Start a stack and send all rows; returns when Prometheus and Tempo have all of them."""
    stack = bench.start_stack(env={"TTFT_METRICS_INTERVAL": SCRAPE_INTERVAL})
    with run_router_meanwhile(stack):
        start = time.time()
        send_sampled(bench, stack, rows[:SPANS_PER_BATCH])
        for portion in range(PORTIONS):
            sent = send_portion(stack.collector.http, rows, portion)
            for name in FILES:
                body = (GOLDEN / f"{name}.json").read_bytes()
                otlp_requests.post_export(stack.collector.http, body, "application/json")
            wait_until(lambda sent=sent: stack.prometheus.query_number(COUNT_QUERY) == sent, 60)
        slow = (stack.tempo.url, SLOW_QUERY, 200, start - 60, time.time())
        many = len(KnownTruth(rows).list_slow_rows())
        wait_until(lambda: len(stack_queries.search_traces(*slow)) == many, 60)
        for query in LATE_QUERY:
            wait_until(partial(stack.prometheus.query_vector, query), 90)
        # A line has a point every so often: one more, after all that.
        time.sleep(STEP_S)
        yield FilledStack(stack, rows, start, time.time())


def send_portion(url: str, rows: list[KnownRequest], portion: int) -> int:
    """Send one portion of the rows to a collector; how many rows that and those before it are."""
    chosen = [row for row in rows if row.portion == portion]
    send_rows(url, chosen, SPANS_PER_BATCH if portion else len(chosen) * 100)
    return sum(row.portion <= portion for row in rows)


def send_sampled(bench: StackStarter, stack: RunningStack, rows: list[KnownRequest]) -> None:
    """Send the server halves of rows through a collector that samples: it makes traces, and no metrics."""
    env = {**stack.tempo.env, **stack.prometheus.env}
    collector = bench.start_collector(
        stack_parts.COLLECTOR_CONFIG, stack_parts.SAMPLING_CONFIG, env=env
    )
    halves = [
        msgspec.structs.replace(record, ttft=None, trace_id=f"{row.number + 1:032x}")
        for row in rows
        for record, _ in build_known_records(row, time.time_ns())
    ]
    resource = Resource({"service.name": "sampled"})
    export_spans(
        collector.http,
        [span for half in halves for span in span_batch.build_spans(half, resource)],
        SPANS_PER_BATCH,
    )


class AnsweringInstance(SilentHandler):
    """An instance for the router: it is healthy, and answers every request with the same status."""

    status = 200

    def do_GET(self) -> None:
        """Answer that it is healthy."""
        self.send_answer(200, b"{}", content_type="application/json")

    def do_POST(self) -> None:
        """Answer with a complete response, or with the planned error."""
        self.read_body()
        body = b'{"choices": [{"text": "yes"}]}'
        self.send_answer(self.status, body, content_type="application/json")


class RefusingInstance(AnsweringInstance):
    """One that is full."""

    status = 503


@contextmanager
def run_router_meanwhile(stack: RunningStack) -> Iterator[None]:
    """Run a router in front of two instances, one of which refuses, and let the stack scrape its metrics.

    It gets a request per second: rates need values that grow between two scrapes.
    """
    instances = [HttpServerThread(each) for each in (AnsweringInstance, RefusingInstance)]
    env = {
        env_names.OTEL_TRACES_SAMPLER: "always_off",
        env_names.OTEL_EXPORTER_OTLP_ENDPOINT: stack.collector.http,
    }
    targets = stack.prometheus.folder / "data" / "config" / "own" / "router.yml"
    urls = [instance.url for instance in instances]
    command = local_deployment.build_router_command({"mono": urls}, env)
    over = threading.Event()

    def send_until_over() -> None:
        while not over.wait(1.0):
            ttft_client.send_timed_request(router.url, max_tokens=1)

    try:
        with LocalServer(command) as router, ThreadPoolExecutor(1) as pool:
            targets.write_text(f'- targets: ["{HOST}:{command.port}"]\n', "utf-8")
            sending = pool.submit(send_until_over)
            try:
                yield
            finally:
                over.set()
            sending.result()
    finally:
        for instance in instances:
            instance.close()


STEP_S: Final = 5  # between the points of a line
RATE_S: Final = 60  # four scrapes
_VARIABLE: Final = re.compile(
    r"\$(?:\{(?P<braced>\w+)(?::(?P<format>\w+))?\}|(?P<bare>[A-Za-z_]\w*))"
)


class CommittedDashboard(NamedTuple):
    """One committed dashboard: file, fixed address, what it says, and what its templating declares."""

    path: Path
    uid: str
    model: Mapping[str, Any]
    variables: list[Mapping[str, Any]]

    def list_panels(self) -> Iterator[Mapping[str, Any]]:
        """All panels, those of collapsed rows too; no rows."""
        for panel in self.model["panels"]:
            yield from panel.get("panels", ())
            if panel["type"] != "row":
                yield panel


class PanelQuery(NamedTuple):
    """One target of one panel.

    name: for a person. text: as it is written, variables and all, in PromQL if `prometheus`, else TraceQL.
    instant: asks for one point in time. limit: of the traces that are searched for.
    """

    dashboard: CommittedDashboard
    title: str
    ref: str
    name: str
    prometheus: bool
    text: str
    instant: bool
    limit: int


def list_dashboards() -> list[CommittedDashboard]:
    """All that are committed."""
    found = []
    for path in sorted(DASHBOARDS.glob("*.json")):
        model = json.loads(path.read_text("utf-8"))
        variables = model.get("templating", {}).get("list", [])
        found.append(CommittedDashboard(path, model["uid"], model, variables))
    return found


def list_queries() -> list[PanelQuery]:
    """All queries of all dashboards."""
    return [
        PanelQuery(
            board,
            panel["title"],
            target["refId"],
            f"{board.uid}/{panel['title']}/{target['refId']}",
            "expr" in target,
            target.get("expr", target.get("query", "")),
            bool(target.get("instant")) and not target.get("range"),
            int(target.get("limit") or 20),
        )
        for board in list_dashboards()
        for panel in board.list_panels()
        for target in panel.get("targets", ())
    ]


@dataclass(frozen=True, slots=True)
class PanelAsker:
    """Asks over [start, end] (Unix seconds); `chosen` overrides variables by name."""

    prometheus: str
    tempo: str
    start: float
    end: float
    chosen: Mapping[str, str] = field(default_factory=dict)

    def expand_variables(self, query: PanelQuery) -> str:
        """The query's text, every variable replaced."""
        span = round(self.end - self.start)
        built_in = {
            "__range": f"{span}s",
            "__interval": f"{STEP_S}s",
            "__rate_interval": f"{RATE_S}s",
        }
        opened = {}
        for each in query.dashboard.variables:
            value = each.get("current", {}).get("value", "")
            opened[str(each["name"])] = str(each["allValue"] if value == "$__all" else value)

        def replace_variable(found: re.Match[str]) -> str:
            name = found["braced"] or found["bare"]
            if name in self.chosen:
                value = self.chosen[name]
                if query.prometheus and not found["format"]:
                    # As Grafana puts a chosen value into PromQL: a regular expression inside a string.
                    value = re.sub(r"[\\^$*+?.()|{}\[\]]", r"\\\\\g<0>", value)
                return value
            assert name in opened or name in built_in, f"{query.name}: nobody declares ${name}"
            return {**built_in, **opened}[name]

        return _VARIABLE.sub(replace_variable, query.text)

    def run_query(self, query: PanelQuery) -> list[Any]:
        """Run it: Prometheus's series, Tempo's traces, or Tempo's series."""
        text = self.expand_variables(query)
        if query.prometheus:
            return self.query_prometheus(text, query.instant)
        if re.fullmatch("[0-9a-f]{32}", text):  # Grafana fetches what looks like an id
            return backend_queries.fetch_trace_spans(self.tempo, text)
        if re.search(r"\|\s*(rate|\w+_over_time|compare)\s*\(", text):  # gives series, not traces
            fields = {"q": text, "start": int(self.start), "end": int(self.end) + 1}
            found = stack_queries.fetch_json(
                f"{self.tempo}/api/metrics/query_range", step=f"{STEP_S}s", **fields
            )
            series: list[Any] = found.get("series") or []
            return series
        return stack_queries.search_traces(self.tempo, text, query.limit, self.start, self.end + 1)

    def query_prometheus(self, text: str, instant: bool = True) -> list[Any]:
        """Series of a PromQL query, at the end of the range or over it."""
        if instant:
            return backend_queries.query_instant(self.prometheus, text, self.end)
        fields = {"query": text, "start": self.start, "end": self.end, "step": STEP_S}
        found: list[Any] = stack_queries.fetch_json(
            f"{self.prometheus}/api/v1/query_range", **fields
        )["data"]["result"]
        return found

    def query_exemplars(self, text: str) -> list[Any]:
        """Exemplars of the series in a PromQL query."""
        return stack_queries.query_exemplars(self.prometheus, text, self.start, self.end)
