# SPDX-License-Identifier: Apache-2.0
"""Export against a receiver that is there, away, silent, broken or back again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ttft_otel.exporter import batch_exporter as module
from ttft_otel.exporter.batch_exporter import BatchExporter, create_span_exporter
from ttft_otel.exporter.export_worker import export_records, run_worker
from ttft_otel.exporter.exporter_counters import ExporterCounters
from ttft_otel.exporter.record_queue import RecordQueue
from ttft_otel.exporter.spans.resource_cache import MAX_SERVICES, ResourceCache
from ttft_otel.exporter.spans.span_batch import MAX_BATCH_SPANS, BatchBuilder
from ttft_otel.model.names import env_names, keys
from ttft_otel.model.record import Record, encode_record
from ttft_otel.tracing.settings import read_settings

SPANS_PER_RECORD = 4  # of one sample
RecordMaker = Callable[..., Record]


@pytest.fixture
def record_queue() -> RecordQueue:
    """A RecordQueue with its own counters."""
    return RecordQueue(ExporterCounters())


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch, restored_loggers: None) -> None:
    """Short pauses and timeouts."""
    monkeypatch.setattr(module, "RETRY_PAUSES_S", (0.05, 0.05, 0.05))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")


def _fill_queue(inbox: RecordQueue, *records: Record) -> RecordQueue:
    for each in records:
        inbox.put(encode_record(each))
    inbox.mark_ended()
    return inbox


def _export(inbox: RecordQueue, exporter: SpanExporter, *records: Record) -> None:
    """Export `records`, and what is in the queue before them."""
    ship = BatchExporter(exporter, inbox.counters, "http://there", threading.Event())
    export_records(_fill_queue(inbox, *records), ship, BatchBuilder(ResourceCache(1)))


def _list_attributes(collector: Any) -> dict[str, object]:
    attributes = collector.received[0].resource.attributes
    return {each.key: each.value.string_value or each.value.int_value for each in attributes}


@pytest.fixture
def export_record(
    collector: Any,
    record_queue: RecordQueue,
    make_record: RecordMaker,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., None]:
    """Export one record to `collector` with these variables, as the exporter of the process `host`."""

    def export(variables: dict[str, str], host: int = 1) -> None:
        endpoint = {env_names.OTEL_EXPORTER_OTLP_ENDPOINT: collector.url}
        for name, value in (endpoint | variables).items():
            monkeypatch.setenv(name, value)
        run_worker(_fill_queue(record_queue, make_record()), host)

    return export


def test_resource(
    collector: Any, record_queue: RecordQueue, export_record: Callable[..., None]
) -> None:
    """Resource: record's service, host's pid, our distro; headers and compression by OTEL_*."""
    headers = {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20x"}
    export_record({**headers, "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=test"}, 4711)
    attributes = _list_attributes(collector)
    assert attributes["service.name"] == "vllm"
    assert attributes["process.pid"] == 4711
    assert str(attributes["service.instance.id"]).endswith(":4711")
    assert attributes["telemetry.distro.name"] == "ttft-otel"
    assert attributes["deployment.environment"] == "test"
    assert collector.headers[0]["authorization"] == "Bearer x"
    assert record_queue.counters.get_counts()["exported"] == SPANS_PER_RECORD


def test_detail_setting(
    collector: Any, record_queue: RecordQueue, export_record: Callable[..., None]
) -> None:
    """TTFT_OTEL_DETAIL says which spans are exported, and only these are counted."""
    export_record({env_names.TTFT_OTEL_DETAIL: "ttft"})
    assert len(collector.spans()) == 2 == record_queue.counters.get_counts()["exported"]


def test_engine_settings() -> None:
    """What the host tells of its scheduler is on every span's resource, as integers."""
    told = {keys.ENGINE_MAX_SEQS: 64, keys.ENGINE_ASYNC: 0}
    found = ResourceCache(1, engine_settings=told).get("vllm").attributes
    assert {name: found.get(name) for name in keys.ENGINE_SETTINGS if name in found} == told


def test_resources_are_bounded() -> None:
    """More service names than roles share one resource, whatever the records claim."""
    resources = ResourceCache(1)
    found = [resources.get(f"service-{number}") for number in range(100)]
    assert len({id(each) for each in found}) <= MAX_SERVICES + 1


def test_grpc(grpc_collector: Any, export_record: Callable[..., None]) -> None:
    """OTEL_EXPORTER_OTLP_PROTOCOL=grpc exports the same spans over gRPC."""
    protocol = {env_names.OTEL_EXPORTER_OTLP_PROTOCOL: "grpc"}
    export_record(protocol | {env_names.OTEL_EXPORTER_OTLP_ENDPOINT: grpc_collector.url})
    names = [span.name for span in grpc_collector.list_spans()]
    assert names[:2] == ["POST /v1/completions", "ttft"]


def test_foreign(record_queue: RecordQueue, make_record: RecordMaker) -> None:
    """Bytes that are no record, another version and broken ids are counted; others pass."""
    broken = encode_record(make_record()).replace(b"%032x" % 1, b"z" * 32)
    other = bytes([0x9C, 0x7F]) + encode_record(make_record())[2:]
    for data in (b"no record", broken, other, encode_record(make_record())):
        record_queue.put(data)
    memory = InMemorySpanExporter()
    _export(record_queue, memory)
    assert len(memory.get_finished_spans()) == SPANS_PER_RECORD
    assert record_queue.counters.get_counts()["foreign"] == 3


class _ScriptedExporter(SpanExporter):
    """A span exporter that fails a given number of times, then succeeds."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def export(self, spans: Any) -> SpanExportResult:
        self.failures -= 1
        return SpanExportResult.FAILURE if self.failures >= 0 else SpanExportResult.SUCCESS


def test_batches(record_queue: RecordQueue, make_record: RecordMaker) -> None:
    """A burst goes out in batches of bounded size, all of it."""
    sizes = []

    class Sizes(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            sizes.append(len(spans))
            return SpanExportResult.SUCCESS

    _export(record_queue, Sizes(), *map(make_record, range(1000)))
    assert sum(sizes) == 1000 * SPANS_PER_RECORD
    assert max(sizes) <= MAX_BATCH_SPANS


def test_retry(
    record_queue: RecordQueue, make_record: RecordMaker, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch is tried four times before it is lost, and one line says each outage and its end."""
    ship = BatchExporter(
        _ScriptedExporter(3), record_queue.counters, "http://there", threading.Event()
    )
    made = BatchBuilder(ResourceCache(1))
    record_queue.put(encode_record(make_record()))
    record_queue.put(encode_record(make_record()))
    worker = threading.Thread(target=export_records, args=(record_queue, ship, made))
    worker.start()
    time.sleep(0.1)
    record_queue.mark_ended()
    worker.join(10)
    assert record_queue.counters.get_counts()["exported"] == 2 * SPANS_PER_RECORD
    assert [entry.levelname for entry in caplog.records] == ["WARNING", "WARNING"]
    assert "http://there" in caplog.messages[0]
    assert "again" in caplog.messages[1] and "0 spans were lost" in caplog.messages[1]


def test_given_up(
    record_queue: RecordQueue, make_record: RecordMaker, caplog: pytest.LogCaptureFixture
) -> None:
    """Batches that fail for good are counted in spans, and the last log line tells the number."""
    _export(record_queue, _ScriptedExporter(1000), make_record())
    assert record_queue.counters.get_counts()["failed"] == SPANS_PER_RECORD
    assert sum("http://there" in line for line in caplog.messages) == 1
    record_queue.counters.log_losses(final=True)
    assert "4 lost" in caplog.messages[-1]


@pytest.mark.parametrize("status", [400, 503])
def test_collector_refuses(
    status: int,
    collector: Any,
    record_queue: RecordQueue,
    export_record: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever error a collector answers: one warning, no traceback, the loss counted."""
    collector.status = status
    export_record({})
    assert record_queue.counters.get_counts()["failed"] == SPANS_PER_RECORD
    lines = [
        each for each in caplog.records if each.name != "ttft_otel" or collector.url in each.message
    ]
    assert len(lines) == 1
    assert not any(entry.exc_info for entry in caplog.records)


def test_collector_comes_back(
    unused_port: int,
    make_collector: Any,
    record_queue: RecordQueue,
    make_record: RecordMaker,
    caplog: pytest.LogCaptureFixture,
    eventually: Any,
) -> None:
    """A collector that starts later gets what was kept meanwhile, without a restart."""
    settings = read_settings(
        {env_names.OTEL_EXPORTER_OTLP_ENDPOINT: f"http://127.0.0.1:{unused_port}"}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(env_names.OTEL_EXPORTER_OTLP_ENDPOINT, settings.endpoint)
        ship = BatchExporter(
            create_span_exporter(settings),
            record_queue.counters,
            settings.endpoint,
            record_queue.ended,
        )
    worker = threading.Thread(
        target=export_records, args=(record_queue, ship, BatchBuilder(ResourceCache(1)))
    )
    worker.start()
    record_queue.put(encode_record(make_record()))
    eventually(lambda: caplog.messages)
    record_queue.put(encode_record(make_record()))
    collector = make_collector(unused_port)
    eventually(lambda: collector.spans(), 20)
    record_queue.put(encode_record(make_record()))
    record_queue.mark_ended()
    worker.join(10)
    counts = record_queue.counters.get_counts()
    assert counts["exported"] == len(collector.spans())
    assert counts["exported"] + counts["failed"] == 3 * SPANS_PER_RECORD
    assert "again" in caplog.text
