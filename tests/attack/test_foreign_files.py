# SPDX-License-Identifier: Apache-2.0
"""Links and files that another user lays into a folder like /tmp lead us nowhere; no datagram is taken."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attack.test_store_files import FILES, count_traces, store_span
from ttft_otel.commands.command_options import write_whole
from ttft_otel.report.store.database_schema import StoreError
from ttft_otel.report.store.span_store import SpanStore
from ttft_otel.router.workers import worker_socket
from ttft_otel.router.workers.messages import Ended, Reset, encode_frame

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


SEND = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as it:
    for data in sys.argv[3:]:
        it.sendto(bytes.fromhex(data), sys.argv[2])
"""


@needs_root
async def test_datagrams_of_somebody_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker hears its own user alone, and what it cannot read ends nothing."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    folder = worker_socket.make_private_folder()
    heard: list[Any] = []
    worker = worker_socket.WorkerSocket(folder, 0, 2, lambda *each: heard.append(each))
    worker.open()
    good = encode_frame(1, [Reset()])
    # No MessagePack; a text that is none; a field more, of a depth that no parser follows.
    ended = encode_frame(1, [Ended("abc", 5)])
    longer = ended.replace(b"\x93\xa1e", b"\x94\xa1e") + b"\x91" * 20_000
    bad = (b"\xc1", ended.replace(b"abc", b"\xff\xff\xff"), longer)
    words = [each.hex() for each in (*bad, good)]
    try:
        for user, number in ((NOBODY, 0), (os.getuid(), 1)):
            argv = (sys.executable, "-c", SEND, str(user), folder / "worker-0.sock", *words)
            done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True)
            assert ("PermissionError" in done.stderr) == (user == NOBODY), done.stderr
            await asyncio.sleep(0.2)
            assert heard == [(1, [Reset()])] * number
    finally:
        worker.close()
        shutil.rmtree(folder)
    assert caplog.text.count("is not readable") == len(bad) and "Traceback" not in caplog.text
