# SPDX-License-Identifier: Apache-2.0
"""The span store: repeated exports change nothing, size and age are limited, readers do not wait."""

from __future__ import annotations

import sqlite3
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import sample_records

from ttft_otel.report.store import database_schema, span_rows
from ttft_otel.report.store import span_store as module
from ttft_otel.report.store.database_reader import RequestFilter, open_reader
from ttft_otel.report.store.span_store import SpanStore, StoreUnavailableError


def test_count(tmp_path: Path) -> None:
    """No more than keep traces stay, the newest ones, with nothing of the others left behind."""
    store = SpanStore(tmp_path / "spans.db", max_traces=5)
    for number in range(12):
        sample_records.store_records(
            store, [sample_records.make_short_record(request_id=f"r{number}")]
        )
    store.close()
    with open_reader(store.path) as db:
        request_ids = [request.request_id for request in db.list_latest(RequestFilter())]
        sizes = db.count_rows()
    assert request_ids == ["r11", "r10", "r9", "r8", "r7"]
    assert sizes == {"traces": 5, "spans": 15, "requests": 5}
    assert store.counts["evicted_traces"] == 7


def test_age(tmp_path: Path) -> None:
    """What arrived too long ago goes with the next commit."""
    store = SpanStore(tmp_path / "spans.db", max_age_hours=0.5 / 3600)
    sample_records.store_records(store, [sample_records.make_short_record(request_id="old")])
    time.sleep(0.6)
    sample_records.store_records(store, [sample_records.make_short_record(request_id="new")])
    store.close()
    with open_reader(store.path) as db:
        assert [request.request_id for request in db.list_latest(RequestFilter())] == ["new"]


def test_size(tmp_path: Path) -> None:
    """At the file's limit the oldest traces make room; nothing new is refused."""
    limit = 1 << 20
    store = SpanStore(tmp_path / "spans.db", max_bytes=limit)
    for number in range(120):
        sample_records.store_records(store, sample_records.make_routed_records(f"r{number}"))
    store.close()
    with open_reader(store.path) as db:
        requests = db.list_latest(RequestFilter())
    assert requests[0].request_id == "r119"
    assert 0 < len(requests) < 120
    assert store.counts["evicted_traces"] == 120 - len(requests)
    assert store.path.stat().st_size <= limit


def test_endless_trace(store: SpanStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace beyond its bound is refused span by span, counted, and told to the sender."""
    monkeypatch.setattr(span_rows, "MAX_TRACE_SPANS", 10)
    spans = sample_records.make_stored_spans(sample_records.make_routed_records("r1"))
    assert store.add(spans).result(10) == len(spans) - 10
    assert store.counts["refused"] == len(spans) - 10


def test_readers(store: SpanStore) -> None:
    """Two readers see whole commits while a writer writes, and never wait for it."""
    stop = threading.Event()
    wrong: list[str] = []

    def read() -> None:
        while not stop.is_set():
            with open_reader(store.path) as db:
                sizes = db.count_rows()
                if sizes["spans"] != per * sizes["traces"]:
                    wrong.append(str(sizes))

    batches = [
        sample_records.make_stored_spans(sample_records.make_routed_records(f"r{number}"))
        for number in range(40)
    ]
    per = len(batches[0])
    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for done in [store.add(batch) for batch in batches]:
        done.result(20)
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_overflow(store: SpanStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk is too slow a batch is refused at once instead of being queued without limit."""
    lock = sqlite3.connect(store.path, isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    span = sample_records.make_stored_spans([sample_records.make_short_record()])
    waiting = []
    with pytest.raises(StoreUnavailableError, match="wait"):
        waiting.extend(
            store.add(span)
            for _ in range(module.MAX_WAITING_BATCHES + 2 + module.MAX_TRANSACTION_SPANS)
        )
    lock.execute("ROLLBACK")
    lock.close()
    for done in waiting:
        done.exception(20)
    assert store.counts["busy"] == 1


def test_closed(store: SpanStore) -> None:
    """At the end what is queued is written; later batches are refused."""
    done = store.add(sample_records.make_stored_spans(sample_records.make_routed_records("r1")))
    store.close()
    store.close()
    assert done.result(0) == 0
    with pytest.raises(StoreUnavailableError):
        store.add([])


def test_schema(tmp_path: Path) -> None:
    """A file of another schema version, of no database, or none at all: each has its own remedy."""
    for version in (1, 99):
        other = tmp_path / f"{version}.db"
        with sqlite3.connect(other) as connection:
            connection.execute(f"PRAGMA user_version={version}")
        connection.close()
        refusal = f"schema {version}, .* delete the file {other}, or"
        with pytest.raises(database_schema.StoreError, match=refusal):
            SpanStore(other)
        with pytest.raises(database_schema.StoreError, match=refusal), open_reader(other):
            pass
    text = tmp_path / "text.db"
    text.write_text("no database " * 1000)
    with pytest.raises(database_schema.StoreError, match="--db"):
        SpanStore(text)
    with (
        pytest.raises(database_schema.StoreError, match="is it a ttft-otel database"),
        open_reader(text),
    ):
        pass
    with (
        pytest.raises(database_schema.StoreError, match="ttft-otel serve"),
        open_reader(tmp_path / "none.db"),
    ):
        pass


def test_private(store: SpanStore) -> None:
    """Nobody else may read the file, nor what SQLite keeps beside it."""
    sample_records.store_records(store, sample_records.make_routed_records("r1"))
    files = list(store.path.parent.glob("spans.db*"))
    assert len(files) == 3
    assert not [file for file in files if file.stat().st_mode & 0o077]


def test_default() -> None:
    """The default path follows XDG."""
    assert database_schema.get_default_path({"XDG_STATE_HOME": "/s"}) == Path(
        "/s/ttft-otel/spans.db"
    )
    assert database_schema.get_default_path({}).parts[-4:] == (
        ".local",
        "state",
        "ttft-otel",
        "spans.db",
    )


def test_filters(store: SpanStore) -> None:
    """Filters narrow by model, role, outcome and TTFT; the newest come first."""
    now = time.time_ns()
    records = [
        sample_records.make_leg_record(
            "mono", sample_records.DECODE_US, request_id="slow", model="a", start_ns=now
        ),
        sample_records.make_leg_record(
            "mono", {"sample": 900}, request_id="quick", model="b", start_ns=now + 1000
        ),
        sample_records.make_leg_record(
            *("mono", {"receive": 5}),
            request_id="dead",
            error="EngineDeadError",
            died="ipc",
            start_ns=now + 2000,
        ),
        *sample_records.make_routed_records("far", start_ns=now + 3000),
    ]
    sample_records.store_records(store, records)

    def ids(wanted: RequestFilter) -> list[str]:
        with open_reader(store.path) as db:
            return [request.request_id for request in db.list_latest(wanted)]

    assert ids(RequestFilter()) == ["far", "dead", "quick", "slow"]
    assert ids(RequestFilter(last=1)) == ["far"]
    assert ids(RequestFilter(model="a")) == ["slow"]
    assert ids(RequestFilter(role="encode")) == ["far"]
    assert (
        ids(RequestFilter(error="any")) == ids(RequestFilter(error="EngineDeadError")) == ["dead"]
    )
    assert ids(RequestFilter(error="none", min_us=50_000)) == ["far", "slow"]
    with open_reader(store.path) as db:
        assert db.list_models() == ["a", "b", "tiny-vl"]
        assert db.find_trace("0" * 32) is None


def test_names(store: SpanStore) -> None:
    """A request is found by its id, by its answer's id, and without an id by its trace."""
    named = sample_records.make_short_record(request_id="my_id")
    nameless = sample_records.make_short_record(request_id="")
    sample_records.store_records(store, [named, nameless])
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
    (server, trunk, *_) = sample_records.make_stored_spans([sample_records.make_short_record()])
    wild = replace(trunk, attributes={**trunk.attributes, "ttft.total_us": 1 << 62})
    store.add([server, wild]).result(10)
    request = sample_records.read_request(store.path)
    assert request.ttft_us == 0 and not request.closed
