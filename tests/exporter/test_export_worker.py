# SPDX-License-Identifier: Apache-2.0
"""From the socket through the queue to a receiver: there, away, silent, broken, of another protocol."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lab.otlp_sinks import SpanSink
from ttft_otel.exporter import export_worker, otlp_exporter
from ttft_otel.exporter import record_queue as queue_module
from ttft_otel.exporter.export_worker import (
    BatchExporter,
    create_span_exporter,
    export_records,
    run_worker,
)
from ttft_otel.exporter.record_queue import (
    MAX_RECORD_BYTES,
    READ_PAUSE_S,
    ExporterCounters,
    RecordQueue,
)
from ttft_otel.exporter.span_batch import BatchBuilder, ResourceCache
from ttft_otel.model.names import env_names
from ttft_otel.model.record import Record, encode_record
from ttft_otel.tracing.settings import read_settings


@pytest.fixture
def host_end() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of the handoff: the host's, which the test closes, and the exporter's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.mark.parametrize(("most", "most_bytes"), [(3, 1 << 20), (1 << 20, 3)])
def test_full(most: int, most_bytes: int) -> None:
    """The newest stay when there are too many, or too many bytes; the drops are counted."""
    inbox = RecordQueue(ExporterCounters(), most, most_bytes)
    for number in range(10):
        inbox.put(b"%d" % number)
    inbox.mark_ended()
    assert inbox.take_batch(100, 0) == [b"7", b"8", b"9"]
    assert inbox.counters.get_counts()["received"] == 10
    assert inbox.counters.get_counts()["overflowed"] == 7


def test_too_long(host_end: tuple[socket.socket, socket.socket]) -> None:
    """A record that is longer than any can be is counted, not cut into something else."""
    ours, theirs = host_end
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_RECORD_BYTES)
    try:
        ours.send(b"x" * (MAX_RECORD_BYTES + 1))
    except OSError:
        pytest.skip("this kernel grants no such message at all")
    ours.close()
    inbox = RecordQueue(ExporterCounters())
    inbox.read_socket(theirs)
    assert len(inbox) == 0
    assert inbox.counters.get_counts()["overflowed"] == 1


def test_gathers() -> None:
    """The worker is woken by the first record and by the last one of a full batch."""
    inbox = RecordQueue(ExporterCounters())
    taken: list[list[bytes]] = []
    worker = threading.Thread(target=lambda: taken.append(inbox.take_batch(3, 30)))
    worker.start()
    for _ in range(3):
        inbox.put(b"x")
    worker.join(10)
    assert taken == [[b"x"] * 3]


def read_waits(thread: threading.Thread) -> int:
    """How often this thread has given the processor up to wait, as the kernel counts it."""
    text = Path(f"/proc/self/task/{thread.native_id}/status").read_text("utf-8")
    return int(text.split("\nvoluntary_ctxt_switches:", 1)[1].split(None, 1)[0])


def test_records_that_come_one_by_one_wake_nobody(
    host_end: tuple[socket.socket, socket.socket],
) -> None:
    """While records come the reader looks now and then, and waits for none of them.

    All arrive in order, each whole, and the end of file ends the reading.
    """
    ours, theirs = host_end
    inbox = RecordQueue(ExporterCounters())
    reader = threading.Thread(target=inbox.read_socket, args=(theirs,))
    reader.start()
    sent = 300
    for number in range(sent):
        ours.send(b"%d" % number)
        time.sleep(READ_PAUSE_S / 10)
    waits = read_waits(reader)
    ours.close()
    reader.join(10)
    assert inbox.take_batch(sent + 1, 0) == [b"%d" % number for number in range(sent)]
    assert inbox.take_batch(1, 0) == []
    assert waits < sent / 2


@pytest.mark.parametrize(
    ("buffer_bytes", "records"),
    [(208 << 10, 150), (64 << 10, 50)],
    ids=["the default where a kernel grants its least", "the least setting"],
)
def test_burst_during_a_pause(
    monkeypatch: pytest.MonkeyPatch,
    host_end: tuple[socket.socket, socket.socket],
    buffer_bytes: int,
    records: int,
) -> None:
    """The socket keeps what comes while the reader does not look, 5000 records a second at least."""
    paused, go_on = threading.Event(), threading.Event()

    def hold_reader(seconds: float) -> None:
        assert records / seconds >= 5000
        paused.set()
        go_on.wait(10)

    monkeypatch.setattr(queue_module, "time", SimpleNamespace(sleep=hold_reader))
    ours, theirs = host_end
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    inbox = RecordQueue(ExporterCounters())
    reader = threading.Thread(target=inbox.read_socket, args=(theirs,))
    reader.start()
    record = b"x" * 1500  # one of a stream's two
    ours.send(record)
    assert paused.wait(10)
    for _ in range(records):
        ours.send(record, socket.MSG_DONTWAIT)
    go_on.set()
    ours.close()
    reader.join(10)
    assert inbox.take_batch(2 * records, 0) == [record] * (records + 1)


SPANS_PER_RECORD = 4  # of one sample
PATIENCE_S = 20.0  # of a probe on a busy machine; answers come in milliseconds
RecordMaker = Callable[..., Record]


@pytest.fixture
def record_queue() -> RecordQueue:
    """A RecordQueue with its own counters."""
    return RecordQueue(ExporterCounters())


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch, restored_loggers: None) -> None:
    """Short pauses and timeouts, but time for a probe's answers."""
    monkeypatch.setattr(export_worker, "RETRY_PAUSES_S", (0.05, 0.05, 0.05))
    monkeypatch.setattr(otlp_exporter, "PROBE_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")


def start_export(
    inbox: RecordQueue,
    exporter: SpanExporter,
    endpoint: str = "http://there",
    stop_retrying: threading.Event | None = None,
) -> threading.Thread:
    """A thread that exports what comes into the queue, until its end."""
    ship = BatchExporter(exporter, inbox.counters, endpoint, stop_retrying or threading.Event())
    builder = BatchBuilder(ResourceCache(1))
    thread = threading.Thread(target=export_records, args=(inbox, ship, builder))
    thread.start()
    return thread


@pytest.fixture
def export_record(
    collector: Any,
    record_queue: RecordQueue,
    make_record: RecordMaker,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., None]:
    """Export one record to `collector` with these variables, as the exporter of the process `host`.

    The host is there until its first attempt has failed.
    """

    def export(host: int = 1, **variables: str) -> None:
        endpoint = {env_names.OTEL_EXPORTER_OTLP_ENDPOINT: collector.url}
        for name, value in (endpoint | variables).items():
            monkeypatch.setenv(name, value)
        record_queue.put(encode_record(make_record()))
        worker = threading.Thread(target=run_worker, args=(record_queue, host))
        worker.start()
        while not any(record_queue.counters.get_counts()[name] for name in ("failed", "exported")):
            worker.join(0.02)
        record_queue.mark_ended()
        worker.join(PATIENCE_S)

    return export


def test_resource(
    collector: Any, record_queue: RecordQueue, export_record: Callable[..., None]
) -> None:
    """Resource: record's service, host's pid, our distro; headers by OTEL_*."""
    export_record(
        4711,
        OTEL_EXPORTER_OTLP_HEADERS="authorization=Bearer%20x",
        OTEL_RESOURCE_ATTRIBUTES="deployment.environment=test",
    )
    attributes = collector.resource
    assert attributes["service.name"] == "vllm"
    assert attributes["process.pid"] == 4711
    assert str(attributes["service.instance.id"]).endswith(":4711")
    assert attributes["telemetry.distro.name"] == "ttft-otel"
    assert attributes["deployment.environment"] == "test"
    assert collector.headers["traces"][0]["authorization"] == "Bearer x"
    assert record_queue.counters.get_counts()["exported"] == SPANS_PER_RECORD


def test_detail_setting(
    collector: Any, record_queue: RecordQueue, export_record: Callable[..., None]
) -> None:
    """TTFT_OTEL_DETAIL says which spans are exported, and only these are counted."""
    export_record(TTFT_OTEL_DETAIL="ttft")
    assert len(collector.spans) == 2 == record_queue.counters.get_counts()["exported"]


def test_foreign(record_queue: RecordQueue, make_record: RecordMaker) -> None:
    """Bytes that are no record, another version and broken ids are counted; others pass."""
    broken = encode_record(make_record()).replace(b"%032x" % 1, b"z" * 32)
    other = bytes([0x9C, 0x7F]) + encode_record(make_record())[2:]
    record_queue.put(b"no record", broken, other, *map(encode_record, [make_record()] * 2))
    record_queue.mark_ended()
    memory = InMemorySpanExporter()
    start_export(record_queue, memory).join(PATIENCE_S)
    assert len(memory.get_finished_spans()) == 2 * SPANS_PER_RECORD
    assert record_queue.counters.get_counts()["foreign"] == 3


class _ScriptedExporter(SpanExporter):
    """A span exporter that fails a given number of times, then succeeds."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def export(self, spans: Any) -> SpanExportResult:
        self.failures -= 1
        return SpanExportResult.FAILURE if self.failures >= 0 else SpanExportResult.SUCCESS


@pytest.mark.parametrize(("failures", "lost"), [(3, 0), (4, SPANS_PER_RECORD)])
def test_retry(
    failures: int,
    lost: int,
    record_queue: RecordQueue,
    make_record: RecordMaker,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A batch is tried four times before it is lost, and one line says each outage and its end."""
    record_queue.put(encode_record(make_record()))
    worker = start_export(record_queue, _ScriptedExporter(failures))
    while record_queue.counters.get_counts()["finished"] == 0:
        worker.join(0.02)
    record_queue.put(encode_record(make_record()))
    record_queue.mark_ended()
    worker.join(PATIENCE_S)
    counts = record_queue.counters.get_counts()
    assert (counts["failed"], counts["exported"]) == (lost, 2 * SPANS_PER_RECORD - lost)
    down, up = (line for line in caplog.messages if "http://there" in line)
    assert "failed" in down and f"again after 0 s; {lost} spans were lost" in up
    record_queue.counters.log_losses(final=True)
    assert ("4 lost" in caplog.messages[-1]) is bool(lost)


@pytest.mark.parametrize("status", [400, 503])
def test_collector_refuses(
    status: int,
    collector: Any,
    record_queue: RecordQueue,
    export_record: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever error a collector answers: one warning, no traceback, the loss counted, no wrong protocol."""
    collector.status = status
    export_record()
    assert record_queue.counters.get_counts()["failed"] == SPANS_PER_RECORD
    (line,) = [
        each for each in caplog.records if each.name != "ttft_otel" or collector.url in each.message
    ]
    assert "does not speak" not in line.message
    assert not any(entry.exc_info for entry in caplog.records)


def test_collector_comes_back(
    unused_port: int,
    make_collector: Any,
    record_queue: RecordQueue,
    make_record: RecordMaker,
    caplog: pytest.LogCaptureFixture,
    eventually: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A collector that starts later gets what was kept meanwhile, without a restart."""
    url = f"http://127.0.0.1:{unused_port}"
    monkeypatch.setenv(env_names.OTEL_EXPORTER_OTLP_ENDPOINT, url)
    exporter = create_span_exporter(read_settings())
    worker = start_export(record_queue, exporter, url, record_queue.ended)
    record_queue.put(encode_record(make_record()))
    eventually(lambda: caplog.messages)
    record_queue.put(encode_record(make_record()))
    collector = make_collector(unused_port)
    eventually(lambda: collector.spans, 20)
    record_queue.put(encode_record(make_record()))
    record_queue.mark_ended()
    worker.join(PATIENCE_S)
    counts = record_queue.counters.get_counts()
    assert counts["exported"] == len(collector.spans)
    assert counts["exported"] + counts["failed"] == 3 * SPANS_PER_RECORD
    assert "again" in caplog.text


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_other_protocol(
    protocol: str,
    collector: Any,
    grpc_collector: SpanSink,
    export_record: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A wrong protocol is named from the first failed export on: what is spoken there, and what to set."""
    urls = {"grpc": f"http://127.0.0.1:{grpc_collector.port}", "http/protobuf": collector.url}
    (other,) = {*urls} - {protocol}
    export_record(OTEL_EXPORTER_OTLP_ENDPOINT=urls[other], OTEL_EXPORTER_OTLP_PROTOCOL=protocol)

    (line,) = [line for line in caplog.messages if "failed:" in line]
    assert f"{urls[other]} does not speak {protocol} but {other}" in line
    assert f"set {env_names.OTEL_EXPORTER_OTLP_PROTOCOL}={other}" in line


def test_spoken_protocol(collector: Any, grpc_collector: SpanSink, unused_port: int) -> None:
    """What an endpoint speaks, also by an address without a scheme; "" where nobody knows."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = [
            otlp_exporter.find_spoken_protocol(endpoint, timeout)
            for endpoint, timeout in (
                (f"http://127.0.0.1:{grpc_collector.port}", PATIENCE_S),
                (f"127.0.0.1:{grpc_collector.port}", PATIENCE_S),
                (f"{collector.url}/v1/traces", PATIENCE_S),
                (f"http://127.0.0.1:{silent.getsockname()[1]}", 0.1),
                (f"http://127.0.0.1:{unused_port}", 0.1),
                (f"https://127.0.0.1:{grpc_collector.port}", PATIENCE_S),
                ("http://[broken", PATIENCE_S),
            )
        ]

    assert found == ["grpc", "grpc", "http/protobuf", "", "", "", ""]
