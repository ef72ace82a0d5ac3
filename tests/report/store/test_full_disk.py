# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel serve` on a full disk: exports get 503, confirmed spans stay, and it recovers."""

from __future__ import annotations

import contextlib
import json
import resource
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sample_records

from lab.free_ports import find_free_port
from ttft_otel.report.store.span_store import SpanStore

ROOM_BYTES = 64 << 10  # left on the disk
MAX_BATCHES = 400
START_S = 60
WRITER_S = 30  # for the writer to notice, while it has nothing to do


class DiskServer:
    """The command in a process of its own, whose files may not grow beyond a size."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, database: Path) -> None:
        self.process, self.database = process, database
        self.url = f"http://127.0.0.1:{port}"

    def fill_disk(self) -> None:
        """Let no file of it grow by more than ROOM_BYTES: a write beyond fails as on a full disk."""
        sizes = [each.stat().st_size for each in self.database.parent.iterdir()]
        self._limit_files(max(sizes) + ROOM_BYTES)

    def free_disk(self) -> None:
        """Let its files grow again."""
        self._limit_files(resource.RLIM_INFINITY)

    def _limit_files(self, max_bytes: int) -> None:
        _, hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (max_bytes, hard))

    def fetch(self, path: str, data: bytes | None = None) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of an answer."""
        headers = {"Content-Type": "application/x-protobuf"} if data else {}
        return sample_records.fetch_any_status(
            urllib.request.Request(f"{self.url}{path}", data, headers)
        )

    def read_health(self) -> tuple[int, Any]:
        """What /healthz says."""
        status, _, body = self.fetch("/healthz")
        return status, json.loads(body)


@contextlib.contextmanager
def run_disk_server(folder: Path) -> Iterator[DiskServer]:
    """Run `ttft-otel serve` with its database in `folder`; at the end it must stop by itself."""
    port = find_free_port()
    database = folder / "spans.db"
    words = ["serve", "--http-port", str(port), "--grpc-port", "-1", "--db", str(database)]
    process = subprocess.Popen(
        [sys.executable, "-c", "from ttft_otel.commands.main import main; main()", *words],
        stdout=subprocess.DEVNULL,
    )
    try:
        server, end_s = DiskServer(process, port, database), time.monotonic() + START_S
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError):
                server.fetch("/healthz")
                break
            time.sleep(0.1)
        yield server
        process.terminate()
        assert process.wait(60) in (0, -15)
    finally:
        process.kill()
        process.wait()


def make_batch(number: int) -> bytes:
    """An export of about 40 KB on disk, other requests in each."""
    records = [
        each
        for position in range(10)
        for each in sample_records.make_routed_records(f"r{number}-{position}")
    ]
    return sample_records.encode_records(records)


@pytest.mark.full
@pytest.mark.slow
def test_a_full_disk(tmp_path: Path) -> None:
    """While the disk is full exports get 503 and /healthz says so; confirmed spans stay; then it recovers."""
    with run_disk_server(tmp_path) as server:
        assert server.fetch("/v1/traces", make_batch(0))[0] == 200
        server.fill_disk()
        confirmed, refused = 1, b""
        for number in range(1, MAX_BATCHES):
            refused = make_batch(number)
            status, headers, _ = server.fetch("/v1/traces", refused)
            if status != 200:
                break
            confirmed += 1
        assert (status, headers["retry-after"]) == (503, "2")

        status, health = server.read_health()
        assert (status, health["status"]) == (503, "trouble")
        assert health["trouble"] and health["store"]["failed_batches"] >= 1
        stored = health["stored"]["requests"]
        assert stored == 10 * confirmed
        assert server.fetch("/api/requests")[0] == 200  # what is stored can be read
        assert server.fetch("/v1/traces", refused)[0] == 503  # it is alive, and still full

        server.free_disk()
        assert server.fetch("/v1/traces", refused)[0] == 200
        end_s = time.monotonic() + WRITER_S
        while server.read_health()[0] != 200 and time.monotonic() < end_s:
            time.sleep(0.1)
        status, health = server.read_health()
        assert (status, health["trouble"]) == (200, None)
        assert health["stored"]["requests"] == stored + 10

    with sqlite3.connect(server.database) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    database.close()


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
def test_answers_on_a_full_disk(store: SpanStore, tmp_path: Path) -> None:
    """What cannot be written whole is told, and a file of before is still there, and nothing else."""
    records = [
        each
        for number in range(20)
        for each in sample_records.make_routed_records(f"r{number}", trace_id=f"{number + 1:032x}")
    ]
    sample_records.store_records(store, records)
    store.close()
    folder = tmp_path / "out"
    folder.mkdir()
    drawn = folder / "trace.json"
    words = ("--db", str(store.path), "--perfetto", str(drawn))
    assert run_limited(1 << 20, *words)[0] == 0
    before = drawn.read_bytes()
    assert len(before) > 100_000
    # SQLite's shared memory has 32 KiB.
    status, reported = run_limited(len(before) // 2, *words)
    assert status == 1 and "cannot write" in reported and "Traceback" not in reported
    assert drawn.read_bytes() == before and [*folder.iterdir()] == [drawn]
    with Path("/dev/full").open("w") as full:
        for form in ((), ("--json",), ("--last", "1")):
            status, reported = run_limited(1 << 20, "--db", str(store.path), *form, stdout=full)
            assert status != 0 and "the output is not complete" in reported, reported
