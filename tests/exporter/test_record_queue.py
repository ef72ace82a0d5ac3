# SPDX-License-Identifier: Apache-2.0
"""The bounded queue between the handoff socket and the exporter's worker."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ttft_otel.exporter import record_queue
from ttft_otel.exporter.exporter_counters import ExporterCounters
from ttft_otel.exporter.record_queue import MAX_RECORD_BYTES, READ_PAUSE_S, RecordQueue


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

    monkeypatch.setattr(record_queue, "time", SimpleNamespace(sleep=hold_reader))
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
