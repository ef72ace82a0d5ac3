# SPDX-License-Identifier: Apache-2.0
"""The collector when others fail: Tempo or Prometheus away, a restart under load, garbage, a flood."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan

from tests.stack import send
from tests.stack.bench import Bench, Collector, Prometheus, Tempo, until
from tests.stack.sink import QUICK, Metrics, Spans
from ttft_otel import names
from ttft_otel.exporter.health import Health
from ttft_otel.exporter.ship import Ship
from ttft_otel.exporter.spans import build
from ttft_otel.lab.stack.parts import COLLECTOR_CONFIG, SAMPLING, Addresses
from ttft_otel.record import Record

LIMIT_MIB = 64  # GOMEMLIMIT below, the container a half above, as in docker-compose.yml
FLOOD = 1000  # requests of some 0.7 MiB in memory: ten times the limit
SPANS = 6  # of one of send's records
AWAY_S = 5.0  # several retries long; a minute with --full


@pytest.fixture
def sinks() -> Iterator[tuple[Spans, Metrics]]:
    """Fresh ones: these tests count."""
    spans, metrics = Spans(), Metrics()
    yield spans, metrics
    metrics.close()
    spans.stop()


def post(collector: Collector, records: Sequence[Record]) -> None:
    """All of them, taken."""
    for at in range(0, len(records), 50):
        assert send.post(collector.http, send.ours(records[at : at + 50])) == 200


def outage(bench: Bench, away: float) -> None:
    """Requests before, during and after an outage of Tempo and a crash of the collector: all arrive."""
    at = Addresses.free()
    tempo = bench.tempo(at)
    with bench.collector(COLLECTOR_CONFIG, QUICK, at=at) as collector:
        assert isinstance(tempo, Tempo) and isinstance(collector, Collector)
        batches = [[send.record(20) for _ in range(30)] for _ in range(4)]
        post(collector, batches[0])
        tempo.stop()
        post(collector, batches[1])
        time.sleep(away / 2)
        collector.kill()  # no goodbye: what it had taken must be on the disk
        collector.start()
        post(collector, batches[2])
        time.sleep(away / 2)
        tempo.start(wait=False)
        post(collector, batches[3])
        for records in batches:
            for each in records:
                until(lambda each=each: len(tempo.trace(each.trace_id)) == SPANS, 60)
    tempo.stop()


def test_tempo_away(bench: Bench) -> None:
    """Nothing is lost while Tempo is down, though the collector is killed meanwhile."""
    outage(bench, AWAY_S)


@pytest.mark.full
def test_tempo_away_for_a_minute(bench: Bench) -> None:
    """The same for as long as an operator needs."""
    outage(bench, 60.0)


def test_prometheus_away(bench: Bench, sinks: tuple[Spans, Metrics]) -> None:
    """Traces flow while Prometheus is down, and when it is back its counts are complete."""
    spans, _ = sinks
    at = Addresses.free()
    env = {**spans.env, "TTFT_METRICS_INTERVAL": "1s"}
    with bench.collector(COLLECTOR_CONFIG, QUICK, at=at, env=env) as collector:
        assert isinstance(collector, Collector)
        post(collector, [send.record(20) for _ in range(200)])
        until(lambda: len(spans.spans()) == 200 * SPANS)
        until(lambda: "otlp_http/prometheus" in collector.log)  # it has noticed
        with bench.prometheus(at) as prometheus:
            assert isinstance(prometheus, Prometheus)
            post(collector, [send.record(20) for _ in range(100)])
            until(lambda: len(spans.spans()) == 300 * SPANS)
            count = "sum(histogram_count(ttft_duration_seconds))"
            until(lambda: prometheus.number(count) == 300, 60)


def test_restart_under_load(bench: Bench, sinks: tuple[Spans, Metrics]) -> None:
    """The collector restarts while our exporter sends: what is missing is what the exporter counted."""
    spans, metrics = sinks
    env = {**spans.env, **metrics.env}
    with bench.collector(COLLECTOR_CONFIG, QUICK, env=env) as collector:
        assert isinstance(collector, Collector)
        health = Health()
        exporter = OTLPSpanExporter(f"{collector.http}/v1/traces", timeout=2)
        ship = Ship(exporter, health, collector.http, threading.Event())
        made: list[ReadableSpan] = []
        done = threading.Event()

        def load() -> None:
            while not done.is_set():
                batch = build(send.record(20), send.resource("loaded"))
                made.extend(batch)
                ship.send(batch)

        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(load)
            until(lambda: len(made) > 300)
            for end in (collector.stop, collector.kill):
                end()
                collector.start()
                so_far = len(made)
                until(lambda so_far=so_far: len(made) > so_far + 300)
            done.set()
            loading.result(30)
        counts = health.counts()
        arrived = {span.span_id for span in spans.spans()}
        until(lambda: len({span.span_id for span in spans.spans()}) >= counts["exported"])
    arrived = {span.span_id for span in spans.spans()}
    missing = [span for span in made if span.context.span_id.to_bytes(8, "big") not in arrived]

    assert counts["exported"] + counts["failed"] == len(made)
    assert len(missing) <= counts["failed"]


GARBAGE = {
    "noise": (os.urandom(4000), "application/x-protobuf"),
    "cut short": (send.ours([send.record(5)]).SerializeToString()[:-7], "application/x-protobuf"),
    "no JSON": (b"{", "application/json"),
    "other JSON": (b'{"resourceSpans": 7}', "application/json"),
    "another type": (b"x", "text/plain"),
}


def test_garbage(bench: Bench, sinks: tuple[Spans, Metrics]) -> None:
    """Bytes that are no spans are refused with a client's error; spans after them are taken."""
    spans, metrics = sinks
    with bench.collector(COLLECTOR_CONFIG, QUICK, env={**spans.env, **metrics.env}) as collector:
        assert isinstance(collector, Collector)
        for body, kind in GARBAGE.values():
            assert 400 <= send.post(collector.http, body, kind) < 500
        assert send.post(collector.http, b"") == 200  # an empty request is one
        odd = send.span("ttft", 1000, **{"ttft.role": "", "ttft.outermost": "yes"})
        odd.trace_id, odd.span_id = b"", b"\x01"
        assert send.post(collector.http, send.request([odd])) < 500
        post(collector, [send.record(20)])
        until(lambda: metrics.total(names.METRIC_TTFT) == 1)
        until(lambda: names.TTFT in {span.name for span in spans.spans()})


def resident(pid: int) -> float:
    """MiB of its own in memory, without the pages of its file."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]


def test_flood(bench: Bench, sinks: tuple[Spans, Metrics]) -> None:
    """Ten times what memory can hold: it stays below the limit, refusals are counted, then all is well."""
    spans, metrics = sinks
    env = {**spans.env, **metrics.env, "TTFT_COLLECTOR_MEMORY_MIB": f"{LIMIT_MIB}"}
    env |= {"TTFT_DECISION_WAIT": "3s", "TTFT_KEEP_PERCENT": "0"}
    env["GOMEMLIMIT"] = f"{LIMIT_MIB * 25 // 32}MiB"
    layers = (COLLECTOR_CONFIG, SAMPLING, QUICK)
    many = 100
    bodies = [
        send.ours([send.record(20) for _ in range(many)]).SerializeToString() for _ in range(12)
    ]
    with bench.collector(*layers, env=env) as collector:
        assert isinstance(collector, Collector)

        def flood(turn: int) -> tuple[int, float]:
            return send.post(collector.http, bodies[turn % 12]), resident(collector.pid)

        with ThreadPoolExecutor(6) as pool:
            told = list(pool.map(flood, range(FLOOD)))
        status = [each for each, _ in told]
        assert set(status) == {200, 503}
        assert max(size for _, size in told) < LIMIT_MIB * 1.5
        assert collector.alive
        refused = status.count(503) * many * SPANS

        def well() -> bool:
            nonlocal refused
            taken = send.post(collector.http, send.ours([send.record(20)])) == 200
            refused += 0 if taken else SPANS
            return taken

        until(well)
        name = "otelcol_processor_memory_limiter_refused_spans"
        until(lambda: metrics.total(name, "as_int") == refused, 30)
