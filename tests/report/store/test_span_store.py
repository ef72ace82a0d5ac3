# SPDX-License-Identifier: Apache-2.0
"""The span store: repeated exports change nothing, its file is bounded, readers do not wait.

Bounds are of what a sender can make it hold: bytes for each byte received, traces, age. A full disk loses
nothing that was confirmed.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from sample_records import (
    encode_records,
    fetch_any_status,
    fill_database,
    make_routed_records,
    make_short_record,
    make_spans,
    make_stored_spans,
    read_request,
    store_records,
)

from lab.free_ports import find_free_port
from ttft_otel.model.names import keys, span_names
from ttft_otel.report.receive import otlp_decoder
from ttft_otel.report.report_types import StoredSpan
from ttft_otel.report.store import database_schema, span_store
from ttft_otel.report.store.database_reader import RequestFilter, open_reader
from ttft_otel.report.store.span_store import SpanStore, StoreUnavailableError


def test_endless_trace(store: SpanStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace beyond its bound is refused span by span, counted, and told to the sender."""
    monkeypatch.setattr(span_store, "MAX_TRACE_SPANS", 10)
    spans = make_stored_spans(make_routed_records("r1"))
    assert store.add(spans).result(10) == len(spans) - 10
    assert store.counts["refused"] == len(spans) - 10


def test_readers(store: SpanStore) -> None:
    """Two readers see whole commits while a writer writes, and never wait for it."""
    batches = [make_stored_spans(make_routed_records(f"r{number}")) for number in range(40)]
    stop = threading.Event()

    def read() -> list[dict[str, int]]:
        sizes = []
        while not stop.is_set():
            with open_reader(store.path) as db:
                sizes.append(db.count_rows())
        return sizes

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        try:
            for done in [store.add(batch) for batch in batches]:
                done.result(20)
        finally:
            stop.set()
    sizes = [each for reader in readers for each in reader.result()]
    assert sizes and all(each["spans"] == len(batches[0]) * each["traces"] for each in sizes)


def test_overflow(store: SpanStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk is too slow a batch is refused at once instead of being queued without limit."""
    lock = sqlite3.connect(store.path, isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    span = make_stored_spans([make_short_record()])
    waiting = []
    with pytest.raises(StoreUnavailableError, match="wait"):
        waiting.extend(
            store.add(span)
            for _ in range(span_store.MAX_WAITING_BATCHES + 2 + span_store.MAX_TRANSACTION_SPANS)
        )
    lock.execute("ROLLBACK")
    lock.close()
    for done in waiting:
        done.exception(20)
    assert store.counts["busy"] == 1


def test_closed(store: SpanStore) -> None:
    """At the end what is queued is written; later batches are refused."""
    done = store.add(make_stored_spans(make_routed_records("r1")))
    store.close()
    store.close()
    assert done.result(0) == 0
    with pytest.raises(StoreUnavailableError):
        store.add([])


def test_schema(tmp_path: Path) -> None:
    """A file of another schema version, of no database, or none at all: each has its own remedy."""
    StoreError = database_schema.StoreError
    for version in (1, 99):
        other = tmp_path / f"{version}.db"
        with closing(sqlite3.connect(other)) as connection:
            connection.execute(f"PRAGMA user_version={version}")
        refusal = f"schema {version}, .* delete the file {other}, or"
        with pytest.raises(StoreError, match=refusal):
            SpanStore(other)
        with pytest.raises(StoreError, match=refusal), open_reader(other):
            pass
    text = tmp_path / "text.db"
    text.write_text("no database " * 1000)
    with pytest.raises(StoreError, match="--db"):
        SpanStore(text)
    with pytest.raises(StoreError, match="is it a ttft-otel database"), open_reader(text):
        pass
    with pytest.raises(StoreError, match="ttft-otel serve"), open_reader(tmp_path / "none.db"):
        pass


def test_private(store: SpanStore) -> None:
    """Nobody else may read the file, nor what SQLite keeps beside it."""
    store_records(store, make_routed_records("r1"))
    files = list(store.path.parent.glob("spans.db*"))
    assert len(files) == 3
    assert not [file for file in files if file.stat().st_mode & 0o077]


@pytest.mark.parametrize(("state", "folder"), [("/s", "/s"), ("", "~/.local/state")])
def test_default(state: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default path follows XDG."""
    monkeypatch.setenv("XDG_STATE_HOME", state)
    path = Path(folder).expanduser() / "ttft-otel/spans.db"
    assert database_schema.get_default_path() == path


def test_names(store: SpanStore) -> None:
    """A request is found by its id, by its answer's id, and without an id by its trace."""
    named = make_short_record(request_id="my_id")
    nameless = make_short_record(request_id="")
    store_records(store, [named, nameless])
    store.close()
    with open_reader(store.path) as db:
        for name in ("my_id", "chatcmpl-my_id", "cmpl-my_id"):
            found = db.find_request(name)
            assert found is not None and found.trace_id == named.trace_id
        found = db.find_request(nameless.trace_id.upper())
        assert found is not None and found.request_id == nameless.trace_id
        for name in ("", "my%", "chatcmpl-"):
            assert db.find_request(name) is None


def test_duplicate_trunk_numbers(store: SpanStore) -> None:
    """Numbers that no duration can have do not reach the database."""
    (server, trunk, *_) = make_stored_spans([make_short_record()])
    wild = replace(trunk, attributes={**trunk.attributes, "ttft.total_us": 1 << 62})
    store.add([server, wild]).result(10)
    request = read_request(store.path)
    assert request.ttft_us == 0 and not request.closed


def build_foreign_export(values: int) -> ExportTraceServiceRequest:
    """Spans of somebody else, with links, events and values of all kinds; `values` attributes each."""
    message = ExportTraceServiceRequest()
    group = message.resource_spans.add()
    pair = group.resource.attributes.add()
    pair.key, pair.value.string_value = "service.name", "other"
    for number in range(1, 4):
        span = group.scope_spans.add().spans.add()
        span.trace_id, span.span_id = b"t" * 16, bytes([number]) * 8
        # All zeros are no parent that is missing: some senders write them.
        span.parent_span_id = (b"", bytes(8), b"\x01" * 8)[number - 1]
        span.start_time_unix_nano, span.end_time_unix_nano = number, number - 1
        span.kind, span.status.code, span.status.message = 5, 2, "no"
        span.events.add().name = "event"
        span.links.add().trace_id = b"l" * 16
        for place in range(values):
            add_value(span, place)
    return message


def add_value(span: Span, place: int) -> None:
    value = span.attributes.add(key=f"key{place}").value
    match place % 6:
        case 0:
            value.string_value = "text" * 10
        case 1:
            value.int_value = -place
        case 2:
            value.double_value = float("nan")
        case 3:
            value.bool_value = True
        case 4:
            value.array_value.values.add().string_value = "\x01"
        case 5:
            value.bytes_value = b"bytes"


def check_stored(path: Path, data: bytes) -> list[StoredSpan]:
    """The spans of an export; the database gives the same ones."""
    expected = sorted(otlp_decoder.decode_export(data).spans, key=lambda span: span.span_id)
    with open_reader(path) as db:
        trace = db.find_trace(expected[0].trace_id)
    assert trace and sorted(trace.spans, key=lambda span: span.span_id) == expected
    return expected


@pytest.mark.parametrize("values", [0, 12, 300], ids=["bare", "usual", "too many"])
def test_foreign_spans(store: SpanStore, values: int) -> None:
    """Spans of others read alike, small ones that are kept as they came and large ones that are cut."""
    data = build_foreign_export(values).SerializeToString()
    assert (len(data) > 3 * otlp_decoder.MAX_RAW_BYTES) is (values == 300)
    chunks = otlp_decoder.chunk_export(data).chunks
    # What nothing shows is not kept either.
    content = b"".join(chunk.content for chunk in chunks)
    assert b"event" not in content and b"l" * 16 not in content
    store.add_chunks(chunks).result(10)
    assert {span.dropped for span in check_stored(store.path, data)} == {max(0, values - 256)}


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_own_spans(tmp_path: Path, size: int) -> None:
    """A request through router and servers reads alike, in however many exports and order its spans come."""
    made = make_spans(make_routed_records("r1", encoders=2))
    store = SpanStore(tmp_path / "spans.db")
    for start in reversed(range(0, len(made), size)):
        data = encode_spans(made[start : start + size]).SerializeToString()
        for _ in range(2):  # the second time as after a lost answer
            store.add_chunks(otlp_decoder.chunk_export(data).chunks).result(10)
    store.close()
    assert store.counts["stored"] == store.counts["duplicate"] == len(made)
    check_stored(store.path, encode_spans(made).SerializeToString())
    request = read_request(store.path)
    assert [leg.role for leg in request.legs] == ["encode", "encode", "prefill_decode"]
    assert request.closed and not request.pending
    with open_reader(store.path) as db:
        assert db.count_rows() == {"traces": 1, "spans": len(made), "requests": 1}


def test_partly_known(store: SpanStore) -> None:
    """Of an export with new and known spans, and one that is in it twice, each is stored once."""
    message = encode_spans(make_spans([make_short_record()]))
    spans = message.resource_spans[0].scope_spans[0].spans
    data = message.SerializeToString()
    first = ExportTraceServiceRequest.FromString(data)
    del first.resource_spans[0].scope_spans[0].spans[1:]
    spans.append(spans[1])
    for export in (first, message):
        chunks = otlp_decoder.chunk_export(export.SerializeToString()).chunks
        assert store.add_chunks(chunks).result(10) == 0
    assert store.counts == {"stored": 3, "duplicate": 2, "evicted_traces": 0}
    check_stored(store.path, data)
    read_request(store.path)


MAX_GROWTH = 5  # bytes of the file for each byte received
EXPORTS = 4
SPANS = 2000
FIXED_BYTES = 128 << 10  # of an empty database, and of pages that are not full yet


def make_id(number: int, size: int) -> bytes:
    """An ID that does not follow its predecessor in an index."""
    return (number * 0x9E3779B97F4A7C15 % (1 << 8 * size) or 1).to_bytes(size, "big")


# Attributes for which a table by its primary key alone takes two pages each.
PAGE_BREAKERS = {"is_one_trace": True, "k": "v" * 1000}


TTFT = {"scope": span_names.SCOPE, "name": span_names.TTFT, keys.TOTAL_US: 1}


def make_export(
    start: int = 0,
    count: int = SPANS,
    is_one_trace: bool = False,
    resource: dict[str, Any] | None = None,
    scope: str = "",
    name: str = "",
    **attributes: Any,
) -> bytes:
    """The smallest spans from number `start` on, each a trace of its own or all in one.

    scope: with {} in it each span has its own.
    """
    message = ExportTraceServiceRequest()
    group = message.resource_spans.add()
    set_values(group.resource.attributes, resource or {}, start)
    for number in range(start, start + count):
        if number == start or "{}" in scope:
            spans = group.scope_spans.add()
            spans.scope.name = scope.format(number)
        trace = start if is_one_trace else number
        span = spans.spans.add(
            trace_id=make_id(trace + 1, 16), span_id=make_id(number + 1, 8), name=name
        )
        set_values(span.attributes, attributes, number)
    return message.SerializeToString()


def set_values(pairs: Any, values: dict[str, Any], number: int) -> None:
    """Attributes; in a text {} becomes the number of the span."""
    for key, value in values.items():
        place = pairs.add(key=key).value
        if isinstance(value, int):
            place.int_value = value
        elif isinstance(value, list):
            place.array_value.values.add().string_value = value[0]
        else:
            place.string_value = value.format(number)


HOSTILE: dict[str, dict[str, Any]] = {
    "the largest share of what is not in the span": {},
    "one large resource and scope name": {
        "is_one_trace": True,
        "resource": {f"text{number}": "r" * 4096 for number in range(12)},
        "scope": "s" * 4096,
    },
    "many scopes of one span": {
        "is_one_trace": True,
        "resource": {"service.name": "r" * 4096},
        "scope": "scope {}",
    },
    "the shortest requests": TTFT,
    "request IDs just too long for a page of an index": {
        **TTFT,
        keys.REQUEST_ID: "{:08}" + "i" * 1000,
    },
    "page breakers": PAGE_BREAKERS,
    "texts that JSON would store six times as long": {
        "is_one_trace": True,
        "plain": "\x01" * 400,
        "list": ["\x01" * 400],
    },
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_growth(tmp_path: Path, kind: str) -> None:
    """The file grows by no more than five bytes for each byte received, whatever the spans look like."""
    store = SpanStore(tmp_path / "spans.db", max_traces=1_000_000)
    received = 0
    for export in range(EXPORTS):
        data = make_export(export * SPANS, **HOSTILE[kind])
        received += len(data)
        store.add_chunks(otlp_decoder.chunk_export(data).chunks).result(60)
    store.close()
    assert store.counts["stored"] == EXPORTS * SPANS
    stored = store.path.stat().st_size
    assert stored <= MAX_GROWTH * received + FIXED_BYTES, f"{stored / received:.1f} times"


def test_shared_rows_end(tmp_path: Path) -> None:
    """A resource is stored once, and goes with the last of its spans."""
    store = SpanStore(tmp_path / "spans.db", max_traces=3)
    for number in range(6):
        record = make_short_record(request_id=f"r{number}")
        store_records(store, [record])
    deadline = time.monotonic() + 20
    with closing(sqlite3.connect(store.path)) as db:

        def count(table: str) -> int:
            return int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])

        while count("chunks") > 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (count("chunks"), count("shared")) == (3, 2)  # a resource and a scope
        assert db.execute("SELECT sum(chunks) FROM shared").fetchone()[0] == 6
    store.close()


def test_number_holds_always(tmp_path: Path) -> None:
    """No reader ever sees more than the traces to keep, though one export brings many times as many."""
    store = SpanStore(tmp_path / "spans.db", max_traces=100)
    spans = otlp_decoder.decode_export(make_export(count=3 * SPANS)).spans
    assert len(spans) > span_store.MAX_TRANSACTION_SPANS
    stop, sizes = threading.Event(), list[int]()

    def watch() -> None:
        while not stop.is_set():
            with open_reader(store.path) as db:
                sizes.append(db.count_rows()["traces"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert store.add(spans).result(60) == 0
    stop.set()
    watcher.join()
    store.close()
    with open_reader(store.path) as db:
        assert db.count_rows() == {"traces": 100, "spans": 100, "requests": 0}
        assert db.find_trace(make_id(len(spans), 16).hex()), "the newest are left"
    assert max(sizes) <= 100
    assert store.counts["evicted_traces"] == len(spans) - 100


def test_age_holds_while_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too old goes although nothing else arrives, and its pages go back to the file system."""
    monkeypatch.setattr(span_store, "RETENTION_INTERVAL_S", 0.05)
    monkeypatch.setattr(database_schema, "MAX_PURGED_SPANS", 500)
    store = SpanStore(tmp_path / "spans.db", max_age_hours=1.5 / 3600)
    store.add_chunks(otlp_decoder.chunk_export(make_export(**PAGE_BREAKERS)).chunks).result(60)
    deadline = time.monotonic() + 30
    left = pages = SPANS
    with closing(sqlite3.connect(store.path)) as db:
        while (left or pages >= 50) and time.monotonic() < deadline:
            time.sleep(0.05)
            left = db.execute("SELECT count(*) FROM chunks").fetchone()[0]
            pages = db.execute("PRAGMA page_count").fetchone()[0]
    assert not left and pages < 50
    with open_reader(store.path) as reader:
        assert reader.count_rows() == {"traces": 0, "spans": 0, "requests": 0}
    assert store.counts["evicted_traces"] == 1 and store.last_error == ""
    store.close()


def test_lower_limit(tmp_path: Path) -> None:
    """A start with a lower limit of bytes removes the oldest traces, and the file never grows beyond it."""
    path, count = tmp_path / "spans.db", EXPORTS * SPANS
    chunks = otlp_decoder.chunk_export(make_export(count=count)).chunks

    def write(store: SpanStore) -> int:
        for start in range(0, count, 50):
            store.add_chunks(chunks[start : start + 50]).result(60)
        store.close()
        return path.stat().st_size

    limit = write(SpanStore(path)) // 2
    store = SpanStore(path, max_bytes=limit)
    assert path.stat().st_size <= limit
    removed = store.counts["evicted_traces"]
    assert 0 < removed < count
    with open_reader(path) as db:
        assert db.count_rows()["traces"] == count - removed
        # The newest are left.
        assert [bool(db.find_trace(make_id(each, 16).hex())) for each in (1, count)] == [0, 1]
    assert write(store) <= limit
    assert store.counts["evicted_traces"] > removed


def test_pages_freed(tmp_path: Path) -> None:
    """One call gives back as many pages as it may, and the last one all that are left."""
    path = tmp_path / "spans.db"
    connection, _ = database_schema.open_for_writing(path, 1 << 30)
    with closing(connection):
        connection.execute("CREATE TABLE filler (content BLOB)")
        connection.executemany("INSERT INTO filler VALUES (?)", [(bytes(4000),)] * 900)
        connection.execute("DROP TABLE filler")
        free = []
        while database_schema.shrink_file(connection):
            free.append(connection.execute("PRAGMA freelist_count").fetchone()[0])
    assert len(free) == 2 and free[0] >= 900 - database_schema.MAX_FREED_PAGES - 1 and free[1] == 0


def test_many_requests_in_a_trace(store: SpanStore) -> None:
    """A trace of thousands of requests takes no longer to assemble than its bound, and stays readable."""
    data = make_export(is_one_trace=True, **TTFT)
    store.add_chunks(otlp_decoder.chunk_export(data).chunks).result(60)
    with open_reader(store.path) as db:
        assert len(db.list_latest(RequestFilter(last=2000))) <= 1000
        trace = db.find_trace(make_id(1, 16).hex())
    assert trace is not None and len(trace.spans) == SPANS


ROOM_BYTES = 64 << 10  # left on the disk
MAX_BATCHES = 400
START_S = 60
WRITER_S = 30  # for the writer to notice, while it has nothing to do


def wait_until(check: Callable[[], bool], seconds: float) -> None:
    """Ask again and again; a server that does not listen yet is no answer."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError):
            if check():
                return
        time.sleep(0.1)


@contextlib.contextmanager
def run_server(database: Path) -> Iterator[tuple[int, str]]:
    """Run `ttft-otel serve` with this database: its process and URL; at the end it must stop by itself."""
    port = find_free_port()
    words = ["serve", "--http-port", str(port), "--grpc-port", "-1", "--db", str(database)]
    process = subprocess.Popen(
        [sys.executable, "-m", "ttft_otel.commands.main", *words], stdout=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: fetch_any_status(f"{url}/healthz")[0] == 200, START_S)
        yield process.pid, url
        process.terminate()
        assert process.wait(60) in (0, -15)
    finally:
        process.kill()
        process.wait()


def limit_files(pid: int, max_bytes: int) -> None:
    """Let no file of a process become longer: a write beyond fails as on a full disk."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (max_bytes, hard))


def make_batch(number: int) -> bytes:
    """An export of about 40 KB on disk, other requests in each."""
    return encode_records(
        [each for place in range(10) for each in make_routed_records(f"r{number}-{place}")]
    )


@pytest.mark.full
@pytest.mark.slow
def test_a_full_disk(tmp_path: Path) -> None:
    """While the disk is full exports get 503 and /healthz says so; confirmed spans stay; then it recovers."""
    path = tmp_path / "spans.db"
    with run_server(path) as (pid, url):

        def send(data: bytes) -> tuple[int, str]:
            kind = {"Content-Type": "application/x-protobuf"}
            request = urllib.request.Request(f"{url}/v1/traces", data, kind)
            status, headers, _ = fetch_any_status(request)
            return status, headers.get("retry-after", "")

        def read_health() -> tuple[int, Any]:
            status, _, body = fetch_any_status(f"{url}/healthz")
            return status, json.loads(body)

        assert send(make_batch(0))[0] == 200
        limit_files(pid, max(each.stat().st_size for each in tmp_path.iterdir()) + ROOM_BYTES)
        confirmed, refused = 1, b""
        for number in range(1, MAX_BATCHES):
            refused = make_batch(number)
            answer = send(refused)
            if answer[0] != 200:
                break
            confirmed += 1
        assert answer == (503, "2")

        status, health = read_health()
        assert (status, health["status"]) == (503, "trouble")
        assert health["trouble"] and health["store"]["failed_batches"] >= 1
        stored = health["stored"]["requests"]
        assert stored == 10 * confirmed
        assert fetch_any_status(f"{url}/api/requests")[0] == 200  # what is stored can be read
        assert send(refused)[0] == 503  # it is alive, and still full

        limit_files(pid, resource.RLIM_INFINITY)
        assert send(refused)[0] == 200
        wait_until(lambda: read_health()[0] == 200, WRITER_S)
        status, health = read_health()
        assert (status, health["trouble"]) == (200, None)
        assert health["stored"]["requests"] == stored + 10

    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def run_limited(max_bytes: int, *words: str, stdout: Any = subprocess.PIPE) -> tuple[int, str]:
    """Exit status and stderr of `ttft-otel report` whose files may not be longer than `max_bytes`."""
    limit = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({max_bytes}, {max_bytes}))"
    code = f"import resource; {limit}; from ttft_otel.commands.main import main; main()"
    done = subprocess.run(
        (sys.executable, "-c", code, "report", *words),
        stdout=stdout, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.full
@pytest.mark.slow
def test_answers_on_a_full_disk(tmp_path: Path) -> None:
    """What cannot be written whole is told, and a file of before is still there, and nothing else."""
    path = fill_database(
        tmp_path / "spans.db",
        *(each for number in range(20) for each in make_routed_records(f"r{number}")),
    )
    folder = tmp_path / "out"
    folder.mkdir()
    drawn = folder / "trace.json"
    words = ("--db", str(path), "--perfetto", str(drawn))
    assert run_limited(1 << 20, *words)[0] == 0
    before = drawn.read_bytes()
    assert len(before) > 100_000
    # SQLite's shared memory has 32 KiB.
    status, reported = run_limited(len(before) // 2, *words)
    assert status == 1 and "cannot write" in reported and "Traceback" not in reported
    assert drawn.read_bytes() == before and [*folder.iterdir()] == [drawn]
    with Path("/dev/full").open("w") as full:
        for form in ((), ("--json",), ("--last", "1")):
            status, reported = run_limited(1 << 20, "--db", str(path), *form, stdout=full)
            assert status != 0 and "the output is not complete" in reported, reported
