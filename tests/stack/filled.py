# SPDX-License-Identifier: Apache-2.0
"""A stack of its own with known.py's requests in it, sent through the collector; conftest.py makes one.

The rows go in five portions, each after the collector has pushed the one before: lines over time then
have several points. Series that appear with the first portion count from zero, because our Prometheus
stores a zero at their start time (created-timestamp-zero-ingestion): all rows are in the truth.

The first portion is one message, so that one push holds all of it. Of a series with few, close values
Prometheus 3.15 misplaces buckets by one (OTLP scale above 8, otlptranslator's convertBucketsLayout),
takes the next, coarser sample for a counter reset, and counts those few twice; with a wide first sample
it does not.

What else the dashboards show has data too: a real router, scraped, that meets failures and makes no
spans; and a second collector, with sampling, which gets nothing that metrics count.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
from opentelemetry.sdk.resources import Resource

from tests.stack import panels
from tests.stack.bench import Bench, Stack, until
from tests.stack.known import BATCH, SLO_MS, Known, Truth, export, send, tell
from ttft_otel import names
from ttft_otel.exporter import spans
from ttft_otel.lab import client, fleet
from ttft_otel.lab.recipes import HOST
from ttft_otel.lab.servers import Server
from ttft_otel.lab.stack import ask, parts

INTERVAL = "5s"  # of the collector's pushes; 15 s where people look
PORTIONS = 5
COUNT = "sum(histogram_count(ttft_duration_seconds))"
SLOW = f'{{ span:name = "ttft" && span.ttft_ms >= {SLO_MS} && span.ttft.outermost = true }}'
# The last to come: telemetry of the sampling collector, a scrape of the router, a rule over six hours.
LATE = (
    'rate(otelcol_processor_tail_sampling_count_traces_sampled_total{sampled="true"}[1m])',
    'rate(ttft_otel_router_attempts_total{result="5xx"}[1m]) > 0',
    "ttft:over_slo:ratio6h / scalar(ttft:slo:budget) >= 0",
)


@dataclass(frozen=True)
class Filled:
    """The stack, what was sent, and when (Unix seconds)."""

    stack: Stack
    rows: list[Known]
    start: float
    end: float

    @property
    def truth(self) -> Truth:
        """Of all rows."""
        return Truth(self.rows)


@contextmanager
def filled_stack(bench: Bench, rows: list[Known]) -> Iterator[Filled]:
    """Start a stack, send everything; it is there once Prometheus and Tempo know all of it."""
    stack = bench.stack(env={"TTFT_METRICS_INTERVAL": INTERVAL})
    with beside(stack):
        start, sent = time.time(), 0
        sampled(bench, stack, rows[:BATCH])
        for portion in range(PORTIONS):
            chosen = [row for row in rows if row.portion == portion]
            send(stack.collector.http, chosen, BATCH if portion else len(chosen) * 100)
            sent += len(chosen)
            until(partial(counted, stack, sent), 60)
        end = time.time()
        slow = Truth(rows).slow()
        until(lambda: len(ask.search(stack.tempo.url, SLOW, 200, start - 60, end)) == len(slow), 60)
        for query in LATE:
            until(partial(stack.prometheus.query, query), 90)
        time.sleep(panels.STEP_S)  # a line has a point every so often: one more, after all that
        yield Filled(stack, rows, start, time.time())


def counted(stack: Stack, many: int) -> bool:
    """Whether Prometheus knows of so many requests."""
    return stack.prometheus.number(COUNT) == many


def sampled(bench: Bench, stack: Stack, rows: list[Known]) -> None:
    """Server halves of rows through a collector that samples: traces, and nothing that metrics count."""
    env = {**stack.tempo.env, **stack.prometheus.env}
    collector = bench.collector(parts.COLLECTOR_CONFIG, parts.SAMPLING, env=env)
    halves = [
        msgspec.structs.replace(told.record, ttft=None, trace_id=f"{row.number + 1:032x}")
        for row in rows
        for told in tell(row, time.time_ns())
    ]
    resource = Resource({"service.name": "sampled"})
    export(collector.http, [span for half in halves for span in spans.build(half, resource)], BATCH)


class Instance(ThreadingHTTPServer):
    """An instance behind the router: healthy, and answers every request, or refuses each."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__((HOST, 0), Plain)
        self.thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        self.thread.start()

    @property
    def url(self) -> str:
        """For the router."""
        return f"http://{HOST}:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        """The router drops its idle connections when it ends."""

    def close(self) -> None:
        """Stop listening."""
        self.shutdown()
        self.server_close()
        self.thread.join()


class Plain(BaseHTTPRequestHandler):
    """One connection of it."""

    protocol_version = "HTTP/1.1"
    server: Instance

    def do_GET(self) -> None:
        """Healthy."""
        self.answer(200, b"{}")

    def do_POST(self) -> None:
        """A whole answer."""
        self.rfile.read(int(self.headers["content-length"]))
        self.answer(self.server.status, json.dumps({"choices": [{"text": "yes"}]}).encode())

    def answer(self, status: int, body: bytes) -> None:
        """JSON."""
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@contextmanager
def asking(url: str) -> Iterator[None]:
    """A request a second: rates need something that grows from scrape to scrape."""
    over = threading.Event()

    def ask_on() -> None:
        while not over.wait(1.0):
            client.ask(url, max_tokens=1)

    thread = threading.Thread(target=ask_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def beside(stack: Stack) -> Iterator[None]:
    """A router before two instances, one of which refuses: attempts and retries, scraped by the stack."""
    instances = [Instance(200), Instance(503)]
    env = {names.ENV_SAMPLER: "always_off", names.ENV_ENDPOINT: stack.collector.http}
    targets = stack.prometheus.folder / "data" / "config" / "own" / "router.yml"
    try:
        command = fleet.router({"mono": [instance.url for instance in instances]}, env)
        with Server(command) as router:
            targets.write_text(f'- targets: ["{HOST}:{command.port}"]\n', "utf-8")
            with asking(router.url):
                yield
    finally:
        for instance in instances:
            instance.close()
