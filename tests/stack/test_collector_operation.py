# SPDX-License-Identifier: Apache-2.0
"""How a collector is run: tail sampling by TTFT and two tiers, TLS and tokens for other hosts, backends that
are away, restarts under load, and more input than memory holds.
"""

from __future__ import annotations

import random
import re
import ssl
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import isclose, sqrt
from pathlib import Path

import httpx
import msgspec
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
    OTLPSpanExporter as GrpcExporter,
)
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from lab.certificates import make_certificate
from lab.otlp_sinks import QUICK_FLUSH_CONFIG, MetricSink, SpanSink
from lab.stack.stack_parts import COLLECTOR_CONFIG, SAMPLING_CONFIG, StackAddresses
from tests.stack import known_requests
from tests.stack.otlp_requests import (
    build_own_record,
    build_own_request,
    build_own_resource,
    post_export,
    post_records,
)
from tests.stack.running_stack import RunningCollector, StackStarter, wait_until
from ttft_otel.exporter.export_worker import BatchExporter
from ttft_otel.exporter.record_queue import ExporterCounters
from ttft_otel.exporter.span_batch import build_spans
from ttft_otel.model.names import metric_names
from ttft_otel.model.record import Record

SCALE_OUT = COLLECTOR_CONFIG.parent / "scale-out"
SAMPLED = (COLLECTOR_CONFIG, SAMPLING_CONFIG)
SHORT_S, LONG_S = 2.0, 60.0  # for a reason to keep a trace
KEEP = 0.1


def build_environment(spans: SpanSink, metrics: MetricSink, wait: float = LONG_S) -> dict[str, str]:
    """Where to send to, and how long to wait."""
    return {**spans.env, **metrics.env, "TTFT_DECISION_WAIT": f"{wait:.0f}s"}


def split_records(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """What is sent at the first token, and what when the stream ends."""
    replace = msgspec.structs.replace
    return (
        [replace(each, server=None, calls=()) for each in records],
        [replace(each, ttft=None) for each in records],
    )


def list_span_ids(records: Sequence[Record]) -> dict[str, set[bytes]]:
    """Ids of all spans but pieces (their ids are made anew), by trace."""
    found: dict[str, set[bytes]] = {}
    for each in records:
        mine = found.setdefault(each.trace_id, set())
        mine |= {bytes.fromhex(call.span_id) for call in each.calls}
        mine |= {bytes.fromhex(each.span_id)} if each.server else set()
        mine |= {bytes.fromhex(each.ttft.span_id)} if each.ttft else set()
    return found


def list_kept_ids(spans: SpanSink) -> dict[str, set[bytes]]:
    """Ids of the spans that came out, by trace."""
    return {
        trace: {span.span_id for span in found} for trace, found in spans.group_by_trace().items()
    }


def wait_until_settled(spans: SpanSink) -> None:
    """Wait until nothing more comes out."""
    last = -1

    def is_quiet() -> bool:
        nonlocal last
        before, last = last, len(spans.list_spans())
        return before == last

    wait_until(is_quiet, 30, interval_s=1)


def must_be_kept(row: known_requests.KnownRequest) -> bool:
    """Whether sampling has to keep the trace: slow, failed, or with a failed attempt."""
    return bool(row.error or "router.retry" in row.own or row.ttft >= known_requests.SLO_MS * 1000)


def check_kept_traces(
    rows: Sequence[known_requests.KnownRequest],
    records: Sequence[Record],
    found: dict[str, set[bytes]],
) -> None:
    """Check that all slow and failed traces are kept whole, and of the others the ratio, within 3 sigma."""
    wanted = list_span_ids(records)
    chosen = {row.trace_id for row in rows if must_be_kept(row)}
    rest = [row.trace_id for row in rows if row.trace_id not in chosen]
    lucky = [trace for trace in rest if trace in found]

    assert len(chosen) >= known_requests.SLOW_ROWS + known_requests.FAILED_ROWS
    assert chosen <= found.keys()
    for trace in found:
        assert wanted[trace] <= found[trace]
    spread = sqrt(KEEP * (1 - KEEP) * len(rest))
    assert abs(len(lucky) - KEEP * len(rest)) <= 3 * spread


def check_counts(rows: Sequence[known_requests.KnownRequest], metrics: MetricSink) -> None:
    """Metrics are those of all requests, kept or not."""
    wait_until(lambda: metrics.sum_field(metric_names.TTFT_DURATION) >= len(rows))
    whole = sum(row.ttft for row in rows) / 1e6

    assert metrics.sum_field(metric_names.TTFT_DURATION) == len(rows)
    assert isclose(metrics.sum_field(metric_names.TTFT_DURATION, "sum"), whole)
    wait_until(lambda: isclose(metrics.sum_field(metric_names.STAGE_DURATION, "sum"), whole))


@pytest.mark.full
def test_ratio(bench: StackStarter, sinks: tuple[SpanSink, MetricSink]) -> None:
    """Of 2 000 requests whose halves come apart all slow and failed are kept, and a tenth of the rest."""
    spans, metrics = sinks
    rows = known_requests.build_known_requests()
    records = known_requests.list_known_records(rows)
    env = build_environment(*sinks)
    with bench.start_collector(*SAMPLED, QUICK_FLUSH_CONFIG, env=env) as collector:
        for half in split_records(records):
            post_records(collector.http, half)
        wait_until_settled(spans)
        check_kept_traces(rows, records, list_kept_ids(spans))
        check_counts(rows, metrics)
        traces = list_kept_ids(spans)
        exemplars = metrics.list_exemplars()
        linked = [each for each in exemplars if any(each.trace_id)]
        assert len(linked) > 20
        assert all(each.span_id in traces[each.trace_id.hex()] for each in linked)
        assert not [each for each in exemplars if not any(each.trace_id)]


def test_late(bench: StackStarter, sinks: tuple[SpanSink, MetricSink]) -> None:
    """Spans that arrive after the decision follow it; slow and failed traces are kept even then."""
    spans, _ = sinks
    draw = random.Random(3)
    slow = [build_own_record(2_000) for _ in range(5)]
    fast = [build_own_record(20, trace_id=f"{draw.getrandbits(128):032x}") for _ in range(200)]
    broken = [build_own_record(30) for _ in range(5)]  # fails in mid-stream
    early = [build_own_record(5, role="encode", outermost=False) for _ in range(5)]
    whole = [  # the router's own, of a request whose encoder was done long before
        msgspec.structs.replace(build_own_record(9_000, role="router"), trace_id=each.trace_id)
        for each in early
    ]
    first, last = split_records([*slow, *fast, *broken])
    for place, each in enumerate(last[-5:], len(last) - 5):
        assert each.server
        server = msgspec.structs.replace(each.server, error="disconnected")
        last[place] = msgspec.structs.replace(each, server=server)
    env = build_environment(*sinks, SHORT_S)
    with bench.start_collector(*SAMPLED, QUICK_FLUSH_CONFIG, env=env) as collector:
        post_records(collector.http, [*first, *early])
        wait_until_settled(spans)
        before = list_kept_ids(spans)
        assert {each.trace_id for each in slow} <= before.keys()
        time.sleep(2 * SHORT_S)
        post_records(collector.http, [*last, *whole])
        wait_until_settled(spans)
    found = list_kept_ids(spans)

    for half in (*first[:5], *last[:5], *whole, *last[-5:]):
        assert list_span_ids([half])[half.trace_id] <= found[half.trace_id]
    lucky = {each.trace_id for each in fast} & found.keys()
    assert 0 < len(lucky) < 60
    assert lucky <= before.keys()  # late spans change no decision about fast ones
    for half in (*first[5:205], *last[5:205]):
        if half.trace_id in lucky:
            assert list_span_ids([half])[half.trace_id] <= found[half.trace_id]


@pytest.mark.full
def test_two_tiers(bench: StackStarter, sinks: tuple[SpanSink, MetricSink]) -> None:
    """Behind a first tier each of two collectors gets whole traces, and counts are right."""
    one, metrics = sinks
    two = SpanSink()
    rows = [
        row
        for row in known_requests.build_known_requests()
        if row.number % 3 == 0 or must_be_kept(row)
    ]
    records = known_requests.list_known_records(rows)
    layers = (*SAMPLED, SCALE_OUT / "tier2.yaml", QUICK_FLUSH_CONFIG)
    with (
        bench.start_collector(*layers, env=build_environment(one, metrics)) as left,
        bench.start_collector(*layers, env=build_environment(two, metrics)) as right,
    ):
        env = {**metrics.env, "TTFT_TIER2": f"[{left.grpc}, {right.grpc}]"}
        with bench.start_collector(SCALE_OUT / "tier1.yaml", env=env) as front:
            for half in split_records(records):
                post_records(front.http, half)
            check_counts(rows, metrics)
            wait_until_settled(one)
            wait_until_settled(two)
    halves_of = [list_kept_ids(one), list_kept_ids(two)]
    two.stop()

    assert all(len(each) > 40 for each in halves_of)
    assert not halves_of[0].keys() & halves_of[1].keys()
    check_kept_traces(rows, records, halves_of[0] | halves_of[1])
    owners = {
        labels["collector.instance.id"]
        for labels, _ in metrics.get_series(metric_names.TTFT_DURATION)
    }
    assert len(owners) == 2


TOKEN = "a-token-for-tests"
SECURE = COLLECTOR_CONFIG.with_name("secure.yaml")
SECURED = (
    pytest.param((COLLECTOR_CONFIG, SECURE), id="one-tier"),
    pytest.param(
        (SCALE_OUT / "tier1.yaml", SECURE, SCALE_OUT / "tier1-secure.yaml"),
        id="first-tier",
        marks=pytest.mark.full,
    ),
)


@dataclass(frozen=True)
class SecuredCollector:
    """A collector behind TLS, and the certificate that its clients need."""

    collector: RunningCollector
    certificate: Path

    @property
    def https(self) -> str:
        """Where traces go."""
        return self.collector.http.replace("http://", "https://") + "/v1/traces"


@pytest.fixture(scope="module", params=SECURED)
def guarded(
    bench: StackStarter, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> SecuredCollector:
    """A collector of one tier, or a first of two, with secure.yaml and a certificate of its own."""
    folder = tmp_path_factory.mktemp("secrets")
    certificate, key = make_certificate(folder)
    token = folder / "token"
    token.write_text(TOKEN + "\n", "utf-8")
    env = {"TTFT_OTLP_CERT": certificate, "TTFT_OTLP_KEY": key, "TTFT_OTLP_TOKEN": token}
    collector = bench.start_collector(
        *request.param, env={name: str(path) for name, path in env.items()}
    )
    return SecuredCollector(collector, certificate)


def post_empty_export(guarded: SecuredCollector, authorization: str | None) -> int:
    """The status that an empty export over TLS gets."""
    headers = {"content-type": "application/x-protobuf"}
    if authorization:
        headers["authorization"] = authorization
    context = ssl.create_default_context(cafile=str(guarded.certificate))
    return httpx.post(guarded.https, headers=headers, verify=context).status_code


def test_exporters(guarded: SecuredCollector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans arrive with the exporters' own settings: endpoint, certificate, token as a header."""
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # requests lets them win over a session's
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(guarded.certificate))
    headers = {"authorization": f"Bearer {TOKEN}"}
    rows = known_requests.build_known_requests()[:2]
    spans = known_requests.build_known_spans(rows, 1_700_000_000_000_000_000)
    for exporter in (
        OTLPSpanExporter(endpoint=guarded.https, headers=headers),
        GrpcExporter(endpoint=f"https://{guarded.collector.grpc}", headers=headers, timeout=10),
    ):
        assert exporter.export(spans) is SpanExportResult.SUCCESS
        exporter.shutdown()


def test_strangers(guarded: SecuredCollector) -> None:
    """Without the token, or with another token or scheme, exports are refused; so is all without TLS."""
    assert post_empty_export(guarded, f"Bearer {TOKEN}") == 200
    for authorization in (None, "Bearer wrong", TOKEN):
        assert post_empty_export(guarded, authorization) == 401
    assert httpx.post(guarded.https.replace("https://", "http://")).status_code == 400


LIMIT_MIB = 64  # GOMEMLIMIT below, the container a half above, as in docker-compose.yml
# Requests of some 0.7 MiB in memory: a tenth of them fills it.
FLOOD = 1000
# For so long the collector keeps what it was sent. With 3 s a busy machine, which sends fewer than thirty
# requests a second, did not fill it.
FLOOD_DECISION_WAIT_S = 12
SPANS = 4  # of one of send's records


@pytest.mark.full
def test_tempo_away(bench: StackStarter) -> None:
    """While Tempo is down, for a minute, nothing is lost, even if the collector is killed meanwhile."""
    at = StackAddresses.choose_free()
    tempo = bench.start_tempo(at)
    with bench.start_collector(COLLECTOR_CONFIG, QUICK_FLUSH_CONFIG, addresses=at) as collector:
        batches = [[build_own_record(20) for _ in range(30)] for _ in range(4)]
        post_records(collector.http, batches[0])
        tempo.stop()
        post_records(collector.http, batches[1])
        time.sleep(30)
        collector.kill()  # no goodbye: what it had taken must be on the disk
        collector.start()
        post_records(collector.http, batches[2])
        time.sleep(30)
        tempo.start(wait=False)
        post_records(collector.http, batches[3])
        for each in (record for records in batches for record in records):
            # Once it took more than a minute, beside other tests.
            wait_until(lambda each=each: len(tempo.fetch_trace(each.trace_id)) == SPANS, 120)
    tempo.stop()


def test_prometheus_away(bench: StackStarter, sinks: tuple[SpanSink, MetricSink]) -> None:
    """While Prometheus is down traces arrive; when it is back its counts are complete."""
    spans, _ = sinks
    at = StackAddresses.choose_free()
    env = {**spans.env, "TTFT_METRICS_INTERVAL": "1s"}
    with bench.start_collector(
        COLLECTOR_CONFIG, QUICK_FLUSH_CONFIG, addresses=at, env=env
    ) as collector:
        post_records(collector.http, [build_own_record(20) for _ in range(200)])
        wait_until(lambda: len(spans.list_spans()) == 200 * SPANS)
        wait_until(lambda: "otlp_http/prometheus" in collector.log)  # it has noticed
        with bench.start_prometheus(at) as prometheus:
            post_records(collector.http, [build_own_record(20) for _ in range(100)])
            wait_until(lambda: len(spans.list_spans()) == 300 * SPANS)
            count = "sum(histogram_count(ttft_duration_seconds))"
            wait_until(lambda: prometheus.query_number(count) == 300, 60)


@pytest.mark.full
def test_restart_under_load(bench: StackStarter, sinks: tuple[SpanSink, MetricSink]) -> None:
    """When the collector restarts under load, exactly the spans our exporter counted as lost are missing."""
    spans, metrics = sinks
    env = {**spans.env, **metrics.env}
    with bench.start_collector(COLLECTOR_CONFIG, QUICK_FLUSH_CONFIG, env=env) as collector:
        health = ExporterCounters()
        exporter = OTLPSpanExporter(f"{collector.http}/v1/traces", timeout=2)
        ship = BatchExporter(exporter, health, collector.http, threading.Event())
        made: list[ReadableSpan] = []
        done = threading.Event()

        def load() -> None:
            while not done.is_set():
                batch = build_spans(build_own_record(20), build_own_resource("loaded"))
                made.extend(batch)
                ship.export_batch(batch)

        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(load)
            wait_until(lambda: len(made) > 300)
            for end in (collector.stop, collector.kill):
                end()
                collector.start()
                so_far = len(made)
                wait_until(lambda so_far=so_far: len(made) > so_far + 300)
            done.set()
            loading.result(30)
        counts = health.get_counts()
        arrived = {span.span_id for span in spans.list_spans()}
        wait_until(lambda: len({span.span_id for span in spans.list_spans()}) >= counts["exported"])
    arrived = {span.span_id for span in spans.list_spans()}
    missing = [span for span in made if span.context.span_id.to_bytes(8, "big") not in arrived]

    assert counts["exported"] + counts["failed"] == len(made)
    assert len(missing) <= counts["failed"]


@pytest.mark.full
def test_flood(bench: StackStarter, sinks: tuple[SpanSink, MetricSink]) -> None:
    """With ten times what memory holds the collector stays below its limit, counts refusals, and recovers."""
    spans, metrics = sinks
    env = {**spans.env, **metrics.env, "TTFT_COLLECTOR_MEMORY_MIB": f"{LIMIT_MIB}"}
    env |= {"TTFT_DECISION_WAIT": f"{FLOOD_DECISION_WAIT_S}s", "TTFT_KEEP_PERCENT": "0"}
    env["GOMEMLIMIT"] = f"{LIMIT_MIB * 25 // 32}MiB"
    layers = (COLLECTOR_CONFIG, SAMPLING_CONFIG, QUICK_FLUSH_CONFIG)
    many = 150
    bodies = [
        build_own_request([build_own_record(20) for _ in range(many)]).SerializeToString()
        for _ in range(12)
    ]
    with bench.start_collector(*layers, env=env) as collector:

        def flood(turn: int) -> tuple[int, float]:
            code = post_export(collector.http, bodies[turn % 12])
            status = Path(f"/proc/{collector.pid}/status").read_text()
            # In MiB, without pages of its executable.
            return code, int(re.search(r"RssAnon:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]

        with ThreadPoolExecutor(6) as pool:
            reported = list(pool.map(flood, range(FLOOD)))
        status = [each for each, _ in reported]
        assert set(status) == {200, 503}
        # Where Go's collector of garbage has to wait for a core, up to 1.51 times were seen; without
        # GOMEMLIMIT it is four times the limit.
        assert max(size for _, size in reported) < LIMIT_MIB * 2
        assert collector.is_alive
        refused = status.count(503) * many * SPANS

        def well() -> bool:
            nonlocal refused
            taken = (
                post_export(
                    collector.http,
                    build_own_request([build_own_record(20)]),
                )
                == 200
            )
            refused += 0 if taken else SPANS
            return taken

        wait_until(well, 5 * FLOOD_DECISION_WAIT_S)
        name = "otelcol_processor_memory_limiter_refused_spans"
        wait_until(lambda: metrics.sum_field(name, "as_int") == refused, 30)
