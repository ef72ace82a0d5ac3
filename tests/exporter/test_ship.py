# SPDX-License-Identifier: Apache-2.0
"""Export against a receiver that is there, away, silent, broken or back again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ttft_otel import names
from ttft_otel.exporter import ship as module
from ttft_otel.exporter.flow import pump, work
from ttft_otel.exporter.health import Health
from ttft_otel.exporter.identity import MOST, Resources
from ttft_otel.exporter.inbox import Inbox
from ttft_otel.exporter.ship import Ship, exporter
from ttft_otel.record import Record, encode
from ttft_otel.settings import Settings, read

SPANS = 4  # of one sample
Sample = Callable[..., Record]


@pytest.fixture
def inbox() -> Inbox:
    """An inbox with counters of its own."""
    return Inbox(Health())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short pauses and timeouts; loggers as they were, afterwards."""
    monkeypatch.setattr(module, "PAUSES", (0.05, 0.05, 0.05))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    loggers = [logging.getLogger(name) for name in ("opentelemetry", "urllib3", "requests", "grpc")]
    yield
    for logger in loggers:
        logger.handlers.clear()
        logger.propagate = True


def _ended(inbox: Inbox, *records: Record) -> Inbox:
    for each in records:
        inbox.put(encode(each))
    inbox.end()
    return inbox


def _attributes(collector: Any) -> dict[str, object]:
    found = collector.received[0].resource.attributes
    return {each.key: each.value.string_value or each.value.int_value for each in found}


def test_resource(
    collector: Any, inbox: Inbox, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resource: record's service, host's pid, our distro; headers and compression by OTEL_*."""
    monkeypatch.setenv(names.ENV_ENDPOINT, collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    work(_ended(inbox, sample()), 4711)
    found = _attributes(collector)
    assert found["service.name"] == "vllm"
    assert found["process.pid"] == 4711
    assert str(found["service.instance.id"]).endswith(":4711")
    assert found["telemetry.distro.name"] == "ttft-otel"
    assert found["deployment.environment"] == "test"
    assert collector.headers[0]["authorization"] == "Bearer x"
    assert inbox.health.counts()["exported"] == SPANS


@pytest.mark.parametrize(
    ("name", "value"),
    [(names.ENV_SERVICE, "mine"), ("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine")],
)
def test_operator_names_service(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service name that the operator gave wins over the record's."""
    monkeypatch.setenv(name, value)
    assert Resources(1).get("vllm").attributes["service.name"] == "mine"


def test_resources_are_bounded() -> None:
    """More service names than roles share one resource, whatever the records claim."""
    resources = Resources(1)
    found = [resources.get(f"service-{number}") for number in range(100)]
    assert len({id(each) for each in found}) <= MOST + 1


def test_grpc(inbox: Inbox, sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_EXPORTER_OTLP_PROTOCOL=grpc exports the same spans over gRPC."""
    got: list[trace_service_pb2.ExportTraceServiceRequest] = []

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            got.append(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv(names.ENV_PROTOCOL, "grpc")
    monkeypatch.setenv(names.ENV_ENDPOINT, f"http://127.0.0.1:{port}")
    work(_ended(inbox, sample()), 1)
    server.stop(None).wait()
    spans = [
        span for each in got for scope in each.resource_spans[0].scope_spans for span in scope.spans
    ]
    assert [span.name for span in spans][:2] == ["POST /v1/completions", "ttft"]


def test_foreign(inbox: Inbox, sample: Sample) -> None:
    """Bytes that are no record, another version and broken ids are counted; others pass."""
    broken = encode(sample()).replace(b"%032x" % 1, b"z" * 32)
    other = bytes([0x9C, 0x7F]) + encode(sample())[2:]
    for data in (b"no record", broken, other, encode(sample())):
        inbox.put(data)
    memory = InMemorySpanExporter()
    pump(_ended(inbox), Ship(memory, inbox.health, "", inbox.ended), Resources(1))
    assert len(memory.get_finished_spans()) == SPANS
    assert inbox.health.counts()["foreign"] == 3


class _Answers(SpanExporter):
    """Fails as often as told, then succeeds."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def export(self, spans: Any) -> SpanExportResult:
        self.failures -= 1
        return SpanExportResult.FAILURE if self.failures >= 0 else SpanExportResult.SUCCESS


def test_batches(inbox: Inbox, sample: Sample) -> None:
    """A burst goes out in batches of bounded size, all of it."""
    sizes = []

    class Sizes(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            sizes.append(len(spans))
            return SpanExportResult.SUCCESS

    records = [sample(number) for number in range(1000)]
    pump(_ended(inbox, *records), Ship(Sizes(), inbox.health, "", inbox.ended), Resources(1))
    assert sum(sizes) == 1000 * SPANS
    assert max(sizes) <= module.BATCH


def test_retry(inbox: Inbox, sample: Sample, caplog: pytest.LogCaptureFixture) -> None:
    """A batch is tried four times before it is lost, and one line says each outage and its end."""
    ship = Ship(_Answers(3), inbox.health, "http://there", threading.Event())
    made = Resources(1)
    inbox.put(encode(sample()))
    inbox.put(encode(sample()))
    worker = threading.Thread(target=pump, args=(inbox, ship, made))
    worker.start()
    time.sleep(0.1)
    inbox.end()
    worker.join(10)
    assert inbox.health.counts()["exported"] == 2 * SPANS
    assert [entry.levelname for entry in caplog.records] == ["WARNING", "WARNING"]
    assert "http://there" in caplog.messages[0]
    assert "again" in caplog.messages[1] and "0 were lost" in caplog.messages[1]


def test_given_up(inbox: Inbox, sample: Sample, caplog: pytest.LogCaptureFixture) -> None:
    """What fails for good is counted, in spans, and the line at the end says it."""
    pump(
        _ended(inbox, sample()),
        Ship(_Answers(1000), inbox.health, "http://there", threading.Event()),
        Resources(1),
    )
    assert inbox.health.counts()["failed"] == SPANS
    assert sum("http://there" in line for line in caplog.messages) == 1
    inbox.health.tell(last=True)
    assert "4 lost" in caplog.messages[-1]


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
def test_collector_refuses(
    status: int,
    collector: Any,
    inbox: Inbox,
    sample: Sample,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever error a collector answers: one warning, no traceback, the loss counted."""
    collector.status = status
    monkeypatch.setenv(names.ENV_ENDPOINT, collector.url)
    work(_ended(inbox, sample()), 1)
    assert inbox.health.counts()["failed"] == SPANS
    warnings = [
        entry
        for entry in caplog.records
        if entry.name != "ttft_otel" or collector.url in entry.message
    ]
    assert len(warnings) == 1
    assert not any(entry.exc_info for entry in caplog.records)


def test_collector_comes_back(
    unused: int,
    make_collector: Any,
    inbox: Inbox,
    sample: Sample,
    caplog: pytest.LogCaptureFixture,
    eventually: Any,
) -> None:
    """A collector that starts later gets what was kept meanwhile, without a restart."""
    settings = read({names.ENV_ENDPOINT: f"http://127.0.0.1:{unused}"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(names.ENV_ENDPOINT, settings.endpoint)
        ship = Ship(exporter(settings), inbox.health, settings.endpoint, inbox.ended)
    worker = threading.Thread(target=pump, args=(inbox, ship, Resources(1)))
    worker.start()
    inbox.put(encode(sample()))
    eventually(lambda: caplog.messages)
    inbox.put(encode(sample()))
    collector = make_collector(unused)
    eventually(lambda: collector.spans(), 20)
    inbox.put(encode(sample()))
    inbox.end()
    worker.join(10)
    counts = inbox.health.counts()
    assert counts["exported"] == len(collector.spans())
    assert counts["exported"] + counts["failed"] == 3 * SPANS
    assert "again" in caplog.text


def test_default_endpoint() -> None:
    """Without any variable it is http/protobuf to port 4318 of this host."""
    assert Settings().endpoint == "http://127.0.0.1:4318"
