# SPDX-License-Identifier: Apache-2.0
"""The database of `serve` while somebody removes, replaces or lays it, or sets the clock; its log."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from router import fake_instances, raw_http
from router.fake_instances import InstancePlan

from attack.test_senders import encode_export, encode_field, encode_span, run_serve
from ttft_otel.commands.command_options import write_whole
from ttft_otel.report.receive import otlp_decoder
from ttft_otel.report.store.database_reader import open_reader
from ttft_otel.report.store.database_schema import StoreError
from ttft_otel.report.store.span_store import SpanStore

FILES = ("spans.db", "spans.db-wal", "spans.db-shm")
MAX_LOG_BYTES = 4000
REQUESTS = 300


def build_export(number: int) -> bytes:
    """One span of a trace of its own."""
    span = encode_span(b"", number).replace(b"\1" * 16, number.to_bytes(16, "big"))
    return encode_field(1, encode_field(2, encode_field(2, span)))


def store_span(store: SpanStore, number: int) -> None:
    """Store that span; returns when it is on disk."""
    store.add_chunks(otlp_decoder.chunk_export(build_export(number)).chunks).result(20)


def count_traces(path: Path) -> int:
    """As a reader sees them now."""
    with open_reader(path) as db:
        return db.count_rows()["traces"]


def remove(path: Path) -> None:
    """As an operator does who wants to begin anew."""
    path.unlink()


def remove_all(path: Path) -> None:
    """With what SQLite has beside it."""
    for name in FILES:
        (path.parent / name).unlink(missing_ok=True)


def replace(path: Path) -> None:
    """As from a backup."""
    copy = path.with_suffix(".new")
    shutil.copy(path, copy)
    copy.rename(path)


@pytest.mark.parametrize("change", [remove, remove_all, replace])
def test_a_file_that_is_gone(
    change: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is confirmed from then on is in the file that is there, and it is said once."""
    path = tmp_path / "spans.db"
    store = SpanStore(path)
    try:
        store_span(store, 1)
        change(path)
        for number in (2, 3):
            store_span(store, number)
        assert count_traces(path) in (2, 3)
        assert not store.last_error
    finally:
        store.close()
    assert caplog.text.count("was removed or replaced") == 1


def wait_for(is_so: Callable[[], bool]) -> None:
    """Wait until it is."""
    until_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    """While it cannot be opened nothing is confirmed; then all is."""
    path = tmp_path / "folder" / "spans.db"
    store = SpanStore(path)
    try:
        store_span(store, 1)
        shutil.rmtree(path.parent)
        path.parent.write_text("no folder")
        wait_for(lambda: "choose another" in store.last_error)
        with pytest.raises(Exception, match="database|choose"):
            store_span(store, 2)
        path.parent.unlink()
        wait_for(lambda: not store.last_error)
        store_span(store, 3)
        assert count_traces(path) == 1
    finally:
        store.close()


def test_files_that_all_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are closed to others, as new ones are; what is another user's is refused."""
    path = tmp_path / "spans.db"
    for name in FILES:
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o666)
    store = SpanStore(path)
    store_span(store, 1)
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) & 0o007 for name in FILES}
    store.close()
    assert modes == {0}
    path.chmod(0o666)

    def refuse(*_: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(os, "chmod", refuse)
    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(StoreError, match="not yours"):
        SpanStore(path)


async def test_log_lines_are_bounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever is sent so many times costs no line of the log each."""
    good = (
        b"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-protobuf\r\n"
    )
    unfinished = good + b"Content-Length: 9\r\n\r\n"  # its sender leaves before the rest
    kinds = (
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET /trace/\xff%00%0a HTTP/1.1\r\nHost: localhost\r\n\r\n",
        good + b"Content-Length: 3\r\n\r\nxyz",
        unfinished,
        good + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nxyz",
        good + b"Transfer-Encoding: chunked\r\n\r\nZ\r\n",
        good + b"Content-Length: %d\r\n\r\n" % len(encode_export()) + encode_export(),
    )
    with run_serve(tmp_path) as server:
        url = f"http://127.0.0.1:{server.http_port}"
        for kind in kinds * (REQUESTS // len(kinds)):
            await raw_http.send_bytes(url, kind, 0 if kind is unfinished else None)
    captured = capfd.readouterr()
    logged = caplog.text + captured.out + captured.err
    assert len(logged) < MAX_LOG_BYTES, logged


NOBODY = 65534
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root, to make another user's files"
)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder as /tmp is."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@needs_root
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("is_link", [True, False])
def test_a_database_of_somebody_else(
    name: str, is_link: bool, shared: Path, tmp_path: Path
) -> None:
    """`serve` writes neither through another user's link nor into another user's file, and says so."""
    target, laid = tmp_path / "precious", shared / name
    target.write_bytes(b"precious")
    laid.symlink_to(target) if is_link else laid.touch(0o666)
    os.chown(laid, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(StoreError, match="is another user's; choose another with --db"):
        SpanStore(shared / "spans.db")
    assert target.read_bytes() == b"precious"
    assert not any((shared / each).exists() for each in FILES if each != name)


def test_a_link_of_our_own(shared: Path, tmp_path: Path) -> None:
    """The control: an operator's own link leads to where it should."""
    path = shared / "spans.db"
    path.symlink_to(tmp_path / "elsewhere.db")
    store = SpanStore(path)
    store_span(store, 1)
    store.close()
    assert count_traces(tmp_path / "elsewhere.db") == 1


def test_a_report_goes_through_no_link(shared: Path, tmp_path: Path) -> None:
    """--json FILE is written beside it first, under a name that somebody may have guessed."""
    target, wanted = tmp_path / "precious", shared / "report.json"
    target.write_text("precious")
    (shared / "report.json.part").symlink_to(target)
    write_whole(wanted, "{}")
    assert (target.read_text(), wanted.read_text()) == ("precious", "{}")
    assert not wanted.is_symlink()


YEARS_NS = 10 * 365 * 86_400 * 10**9
CLOCK_LOOKS = 20


def set_clock(monkeypatch: pytest.MonkeyPatch, shift_ns: int) -> None:
    """From now on the wall clock is so much ahead."""
    true_ns, true_s = time.clock_gettime_ns, time.clock_gettime
    monkeypatch.setattr(time, "time_ns", lambda: true_ns(time.CLOCK_REALTIME) + shift_ns)
    monkeypatch.setattr(time, "time", lambda: true_s(time.CLOCK_REALTIME) + shift_ns / 1e9)


def test_what_is_stored_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards and back: traces are as old as they are."""
    path = tmp_path / "spans.db"
    store = SpanStore(path)
    try:
        for number, shift_ns in enumerate((0, YEARS_NS, -YEARS_NS, 0), 1):
            set_clock(monkeypatch, shift_ns)
            store_span(store, number)
            assert not store._remove_old()
            assert count_traces(path) == number
    finally:
        store.close()


async def test_lengths_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that jumps at each look: every TTFT adds up, and is as long as it was."""
    looks = itertools.count()
    true_ns = time.clock_gettime_ns
    async with fake_instances.run_routed_instances([InstancePlan(gap_s=0.01)]) as (router, _):
        with monkeypatch.context() as patched:
            patched.setattr(
                time,
                "time_ns",
                lambda: true_ns(time.CLOCK_REALTIME) + (next(looks) % 3 - 1) * YEARS_NS,
            )
            for _ in range(CLOCK_LOOKS):
                began_ns = time.monotonic_ns()
                assert (await router.post_chat())[0] == 200
                took_us = (time.monotonic_ns() - began_ns) // 1000
        records = [
            each.ttft for each in await router.wait_for_records(2 * CLOCK_LOOKS) if each.ttft
        ]
    assert next(looks) > CLOCK_LOOKS and len(records) == CLOCK_LOOKS
    for ttft in records:
        assert 0 < ttft.end - ttft.start < 10**7
        assert sum(ttft.stages.values()) + ttft.unattributed == ttft.end - ttft.start
    assert records[-1].end <= took_us
