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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sample_records import encode_records, fetch_any_status, fill_database, make_routed_records

from lab.free_ports import find_free_port

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
