# SPDX-License-Identifier: Apache-2.0
"""The store: idempotent, bounded, readable while it is written."""

from __future__ import annotations

import sqlite3
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import trips

from ttft_otel.report import schema
from ttft_otel.report import store as module
from ttft_otel.report.query import Wanted, reader
from ttft_otel.report.store import Store, Unwritable


def test_twice(store: Store) -> None:
    """The same spans again change nothing and are counted as duplicates."""
    spans = trips.stored(trips.routed("r1"))
    for _ in range(3):
        assert store.add(spans).result(10) == 0
    assert store.counts["stored"] == len(spans)
    assert store.counts["duplicate"] == 2 * len(spans)
    with reader(store.path) as db:
        assert db.sizes() == {"traces": 1, "spans": len(spans), "requests": 1}


def test_any_order(store: Store) -> None:
    """Spans one by one, last first, assemble to the same request as all at once."""
    spans = trips.stored(trips.routed("r1", encoders=2))
    for span in reversed(spans):
        store.add([span]).result(10)
    store.close()
    with reader(store.path) as db:
        (request,) = db.latest(Wanted())
    assert [leg.role for leg in request.legs] == ["encode", "encode", "prefill_decode"]
    assert request.closed and not request.pending


def test_count(tmp_path: Path) -> None:
    """No more than keep traces stay, the newest ones, with nothing of the others left behind."""
    store = Store(tmp_path / "spans.db", keep=5)
    for number in range(12):
        store.add(trips.stored([trips.leg("mono", {"sample": 5}, request_id=f"r{number}")])).result(
            9
        )
    store.close()
    with reader(store.path) as db:
        kept = [request.request_id for request in db.latest(Wanted())]
        sizes = db.sizes()
    assert kept == ["r11", "r10", "r9", "r8", "r7"]
    assert sizes == {"traces": 5, "spans": 15, "requests": 5}
    assert store.counts["evicted_traces"] == 7


def test_age(tmp_path: Path) -> None:
    """What arrived too long ago goes with the next commit."""
    store = Store(tmp_path / "spans.db", hours=0.5 / 3600)
    store.add(trips.stored([trips.leg("mono", {"sample": 5}, request_id="old")])).result(9)
    time.sleep(0.6)
    store.add(trips.stored([trips.leg("mono", {"sample": 5}, request_id="new")])).result(9)
    store.close()
    with reader(store.path) as db:
        assert [request.request_id for request in db.latest(Wanted())] == ["new"]


def test_size(tmp_path: Path) -> None:
    """At the file's limit the oldest traces make room; nothing new is refused."""
    limit = 2 << 20
    store = Store(tmp_path / "spans.db", limit=limit)
    for number in range(120):
        store.add(trips.stored(trips.routed(f"r{number}"))).result(10)
    store.close()
    with reader(store.path) as db:
        found = db.latest(Wanted())
    assert found[0].request_id == "r119"
    assert 0 < len(found) < 120
    assert store.counts["evicted_traces"] == 120 - len(found)
    assert store.path.stat().st_size <= limit


def test_endless_trace(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace beyond its bound is refused span by span, counted, and told to the sender."""
    monkeypatch.setattr(module, "MOST", 10)
    spans = trips.stored(trips.routed("r1"))
    assert store.add(spans).result(10) == len(spans) - 10
    assert store.counts["refused"] == len(spans) - 10


def test_readers(store: Store) -> None:
    """Two readers see whole commits while a writer writes, and never wait for it."""
    stop = threading.Event()
    wrong: list[str] = []

    def read() -> None:
        while not stop.is_set():
            with reader(store.path) as db:
                sizes = db.sizes()
                if sizes["spans"] != per * sizes["traces"]:
                    wrong.append(str(sizes))

    batches = [trips.stored(trips.routed(f"r{number}")) for number in range(40)]
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


def test_overflow(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk is too slow a batch is refused at once, never kept without a bound."""
    lock = sqlite3.connect(store.path, isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    span = trips.stored([trips.leg("mono", {"sample": 5})])
    waiting = []
    with pytest.raises(Unwritable, match="wait"):
        waiting.extend(store.add(span) for _ in range(module.WAITING + 2 + module.TOGETHER))
    lock.execute("ROLLBACK")
    lock.close()
    for done in waiting:
        done.exception(20)
    assert store.counts["busy"] == 1


def test_closed(store: Store) -> None:
    """What waits is written at the end; what comes later is refused."""
    done = store.add(trips.stored(trips.routed("r1")))
    store.close()
    store.close()
    assert done.result(0) == 0
    with pytest.raises(Unwritable):
        store.add([])


def test_schema(tmp_path: Path) -> None:
    """A file of another version, no database, or no file at all: each with its remedy."""
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as connection:
        connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(schema.Trouble, match="schema 99"):
        Store(other)
    with pytest.raises(schema.Trouble, match="schema 99"), reader(other):
        pass
    text = tmp_path / "text.db"
    text.write_text("no database " * 1000)
    with pytest.raises(schema.Trouble, match="--db"):
        Store(text)
    with pytest.raises(schema.Trouble, match="is it a ttft-otel database"), reader(text):
        pass
    with pytest.raises(schema.Trouble, match="ttft-otel serve"), reader(tmp_path / "none.db"):
        pass


def test_private(store: Store) -> None:
    """Nobody else may read the file, nor what SQLite keeps beside it."""
    store.add(trips.stored(trips.routed("r1"))).result(10)
    files = list(store.path.parent.glob("spans.db*"))
    assert len(files) == 3
    assert not [file for file in files if file.stat().st_mode & 0o077]


def test_default() -> None:
    """The default path follows XDG."""
    assert schema.default({"XDG_STATE_HOME": "/s"}) == Path("/s/ttft-otel/spans.db")
    assert schema.default({}).parts[-4:] == (".local", "state", "ttft-otel", "spans.db")


def test_filters(store: Store) -> None:
    """Filters narrow by model, role, outcome and TTFT; the newest come first."""
    now = time.time_ns()
    records = [
        trips.leg("mono", trips.DECODE, request_id="slow", model="a", start_ns=now),
        trips.leg("mono", {"sample": 900}, request_id="quick", model="b", start_ns=now + 1000),
        trips.leg(
            *("mono", {"receive": 5}),
            request_id="dead",
            error="EngineDeadError",
            died="ipc",
            start_ns=now + 2000,
        ),
        *trips.routed("far", start_ns=now + 3000),
    ]
    store.add(trips.stored(records)).result(10)

    def ids(wanted: Wanted) -> list[str]:
        with reader(store.path) as db:
            return [request.request_id for request in db.latest(wanted)]

    assert ids(Wanted()) == ["far", "dead", "quick", "slow"]
    assert ids(Wanted(last=1)) == ["far"]
    assert ids(Wanted(model="a")) == ["slow"]
    assert ids(Wanted(role="encode")) == ["far"]
    assert ids(Wanted(error="any")) == ids(Wanted(error="EngineDeadError")) == ["dead"]
    assert ids(Wanted(error="none", min_us=50_000)) == ["far", "slow"]
    with reader(store.path) as db:
        assert db.models() == ["a", "b", "tiny-vl"]
        assert db.trace("0" * 32) is None


def test_names(store: Store) -> None:
    """A request is found by its id, by its answer's id, and without an id by its trace."""
    named = trips.leg("mono", {"sample": 5}, request_id="my_id")
    nameless = trips.leg("mono", {"sample": 5}, request_id="")
    store.add(trips.stored([named, nameless])).result(10)
    store.close()
    with reader(store.path) as db:
        for name in ("my_id", "chatcmpl-my_id", "cmpl-my_id"):
            found = db.request(name)
            assert found is not None and found.trace_id == named.trace_id
        found = db.request(nameless.trace_id.upper())
        assert found is not None and found.request_id == nameless.trace_id
        for name in ("", "my%", "chatcmpl-"):
            assert db.request(name) is None


def test_duplicate_trunk_numbers(store: Store) -> None:
    """Numbers that no duration can have do not reach the database."""
    (server, trunk, *_) = trips.stored([trips.leg("mono", {"sample": 5})])
    wild = replace(trunk, attributes={**trunk.attributes, "ttft.total_us": 1 << 62})
    store.add([server, wild]).result(10)
    with reader(store.path) as db:
        (request,) = db.latest(Wanted())
    assert request.ttft_us == 0 and not request.closed
