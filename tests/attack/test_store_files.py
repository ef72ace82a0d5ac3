# SPDX-License-Identifier: Apache-2.0
"""The database of `serve` while somebody removes, replaces or opens it; and what clients make it log."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from router import raw_http
from router.fake_instances import find_unused_url

from attack.test_export_elements import encode_export, encode_field, encode_span
from ttft_otel.report.receive import otlp_decoder
from ttft_otel.report.store import database_schema
from ttft_otel.report.store.database_reader import open_reader
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


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    """While it cannot be opened nothing is confirmed; then all is."""
    path = tmp_path / "folder" / "spans.db"
    store = SpanStore(path)
    try:
        store_span(store, 1)
        shutil.rmtree(path.parent)
        path.parent.write_text("no folder")
        until_s = time.monotonic() + 20
        while "choose another" not in store.last_error:
            assert time.monotonic() < until_s
            time.sleep(0.05)
        with pytest.raises(Exception, match="database|choose"):
            store_span(store, 2)
        path.parent.unlink()
        until_s = time.monotonic() + 20
        while store.last_error:
            assert time.monotonic() < until_s
            time.sleep(0.05)
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
    with pytest.raises(database_schema.StoreError, match="not yours"):
        SpanStore(path)


async def test_log_lines_are_bounded(tmp_path: Path) -> None:
    """Whatever is sent so many times costs no line of the log each."""
    port = find_unused_url().rpartition(":")[2]
    url = f"http://127.0.0.1:{port}"
    code = "from ttft_otel.commands.main import main; main()"
    words = ("serve", "--http-port", port, "--grpc-port", "-1", "--db", str(tmp_path / "spans.db"))
    good = (
        b"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-protobuf\r\n"
    )
    kinds = (
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET /trace/\xff%00%0a HTTP/1.1\r\nHost: localhost\r\n\r\n",
        good + b"Content-Length: 3\r\n\r\nxyz",
        good + b"Content-Length: 9\r\n\r\n",  # it leaves before the rest
        good + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nxyz",
        good + b"Transfer-Encoding: chunked\r\n\r\nZ\r\n",
        good + b"Content-Length: %d\r\n\r\n" % len(encode_export()) + encode_export(),
    )
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-c", code, *words], stderr=file, stdout=file)
    try:
        until_s = time.monotonic() + 60
        while True:
            try:
                await raw_http.send_bytes(url, kinds[1])
                break
            except OSError:
                assert time.monotonic() < until_s
                time.sleep(0.1)
        for kind in kinds:
            for _ in range(REQUESTS // len(kinds)):
                host, number = url.removeprefix("http://").split(":")
                reader, writer = await raw_http.asyncio.open_connection(host, int(number))
                writer.write(kind)
                if b"Length: 9" not in kind:
                    await raw_http.asyncio.wait_for(reader.read(200), 10)
                writer.close()
    finally:
        process.terminate()
        process.wait(30)
    assert log.stat().st_size < MAX_LOG_BYTES, log.read_text()
