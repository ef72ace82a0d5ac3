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
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import msgspec
from opentelemetry.sdk.resources import Resource

from lab import local_deployment, ttft_client
from lab.http_servers import HttpServerThread, SilentHandler
from lab.local_servers import LocalServer
from lab.server_commands import HOST
from lab.stack import stack_parts
from tests.fake_tempo import FILES, GOLDEN
from tests.stack import otlp_requests, panel_queries
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
        time.sleep(panel_queries.STEP_S)
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


class HttpInstance(HttpServerThread):
    """An instance for the router: it is healthy, and answers every request with the same status."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(InstanceHandler)

    def handle_error(self, *_: object) -> None:
        """Ignore it: the router closes its idle connections when it ends."""


class InstanceHandler(SilentHandler):
    """Handles one connection to the instance."""

    server: HttpInstance

    def do_GET(self) -> None:
        """Answer that it is healthy."""
        self.send_answer(200, b"{}", content_type="application/json")

    def do_POST(self) -> None:
        """Answer with a complete response, or with the planned error."""
        self.read_body()
        answer = json.dumps({"choices": [{"text": "yes"}]}).encode()
        self.send_answer(self.server.status, answer, content_type="application/json")


@contextmanager
def send_requests_meanwhile(url: str) -> Iterator[None]:
    """Send a request per second while the block runs: rates need values that grow between two scrapes."""
    over = threading.Event()

    def send_until_over() -> None:
        while not over.wait(1.0):
            ttft_client.send_timed_request(url, max_tokens=1)

    thread = threading.Thread(target=send_until_over)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def run_router_meanwhile(stack: RunningStack) -> Iterator[None]:
    """Run a router in front of two instances, one of which refuses, and let the stack scrape its metrics."""
    instances = [HttpInstance(200), HttpInstance(503)]
    env = {
        env_names.OTEL_TRACES_SAMPLER: "always_off",
        env_names.OTEL_EXPORTER_OTLP_ENDPOINT: stack.collector.http,
    }
    targets = stack.prometheus.folder / "data" / "config" / "own" / "router.yml"
    try:
        command = local_deployment.build_router_command(
            {"mono": [instance.url for instance in instances]}, env
        )
        with LocalServer(command) as router:
            targets.write_text(f'- targets: ["{HOST}:{command.port}"]\n', "utf-8")
            with send_requests_meanwhile(router.url):
                yield
    finally:
        for instance in instances:
            instance.close()
