# SPDX-License-Identifier: Apache-2.0
"""The bounded queue between the handoff socket and the exporter's worker."""

from __future__ import annotations

import socket
import threading

import pytest

from ttft_otel.exporter.health import Health
from ttft_otel.exporter.inbox import LONGEST, Inbox


def test_reads_to_the_end() -> None:
    """Records come in order, each whole, and the end of file ends the reading."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    inbox = Inbox(Health())
    for number in range(10):
        ours.send(b"%d" % number * 100)
    ours.close()
    inbox.read(theirs)
    theirs.close()
    assert inbox.take(100, 0) == [b"%d" % number * 100 for number in range(10)]
    assert inbox.take(100, 0) == []


@pytest.mark.parametrize(("most", "most_bytes"), [(3, 1 << 20), (1 << 20, 3)])
def test_full(most: int, most_bytes: int) -> None:
    """The newest stay when there are too many, or too many bytes; the drops are counted."""
    inbox = Inbox(Health(), most, most_bytes)
    for number in range(10):
        inbox.put(b"%d" % number)
    inbox.end()
    assert inbox.take(100, 0) == [b"7", b"8", b"9"]
    assert inbox.health.counts()["received"] == 10
    assert inbox.health.counts()["overflowed"] == 7


def test_too_long() -> None:
    """A record that is longer than any can be is counted, not cut into something else."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * LONGEST)
    try:
        ours.send(b"x" * (LONGEST + 1))
    except OSError:
        pytest.skip("this kernel grants no such message at all")
    finally:
        ours.close()
    inbox = Inbox(Health())
    inbox.read(theirs)
    theirs.close()
    assert len(inbox) == 0
    assert inbox.health.counts()["overflowed"] == 1


def test_gathers() -> None:
    """The worker is woken by the first record and by the last one of a full batch."""
    inbox = Inbox(Health())
    taken: list[list[bytes]] = []
    worker = threading.Thread(target=lambda: taken.append(inbox.take(3, 30)))
    worker.start()
    for _ in range(3):
        inbox.put(b"x")
    worker.join(10)
    assert taken == [[b"x"] * 3]
