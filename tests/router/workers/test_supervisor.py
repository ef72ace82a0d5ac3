# SPDX-License-Identifier: Apache-2.0
"""Workers of one router: their supervisor, and the datagrams between them, over real sockets."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from router.fake_instances import wait_until
from ttft_otel.router.workers import supervisor
from ttft_otel.router.workers.messages import (
    Answer,
    Ended,
    Message,
    Question,
    WorkerSocket,
    decode_frame,
    encode_frame,
    make_socket_pairs,
)

FAILING_START = """
import sys
from ttft_otel.router.workers.supervisor import WorkerSupervisor
sys.exit(WorkerSupervisor(2, lambda slot: sys.exit(3), 1.0, lambda: None).run())
"""

# Workers whose heart beats; the first one of slot 0 stops after a moment.
HUNG_WORKER = """
import os, signal, sys, time
from ttft_otel.router.workers import supervisor
supervisor.CHECK_INTERVAL_S, supervisor.MAX_SILENT_CHECKS = 0.2, 3
def work(slot):
    for beat in range(1, 1000):
        slot.shared.numbers[slot.number].heartbeat = beat
        if slot.number == 0 and beat == 20:
            if slot.is_successor:
                os.kill(os.getppid(), signal.SIGTERM)
            else:
                os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.02)
sys.exit(supervisor.WorkerSupervisor(2, work, 1.0, lambda: None).run())
"""


def test_pauses() -> None:
    """None after a steady life; else doubled, up to a limit."""
    pauses = [0.0]
    for _ in range(8):
        pauses.append(supervisor.choose_pause_s(pauses[-1], 1.0))

    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert supervisor.choose_pause_s(30.0, supervisor.STEADY_S) == 0.0


def test_a_port_is_reserved() -> None:
    """Any free one for 0; workers may share it; whoever listens there already is noticed."""
    port, reserved = supervisor.reserve_port("127.0.0.1", 0)
    workers = [*supervisor.bind_shared_port("127.0.0.1", port)]
    workers[0].listen()

    with pytest.raises(OSError):
        supervisor.reserve_port("127.0.0.1", port)

    with socket.create_connection(("127.0.0.1", port)):
        pass
    for each in (*reserved, *workers):
        each.close()


def test_a_worker_that_cannot_start() -> None:
    """The router ends with its exit code: what is wrong will be wrong again."""
    ended = subprocess.run(
        [sys.executable, "-c", FAILING_START], capture_output=True, text=True, check=False
    )

    assert ended.returncode == 3
    assert "could not start" in ended.stderr


def test_a_worker_that_hangs() -> None:
    """It is killed and replaced, and no other one is."""
    ended = subprocess.run(
        [sys.executable, "-c", HUNG_WORKER], capture_output=True, text=True, check=False, timeout=60
    )

    assert "worker 0 (process" in ended.stderr and "hangs, its event loop" in ended.stderr
    assert ended.stderr.count("it is killed") == 1, ended.stderr
    assert "was ended by SIGKILL" in ended.stderr


Frame = tuple[int, list[Message]]  # the sender's slot, and what it says


@contextmanager
def make_sockets(count: int) -> Iterator[tuple[list[WorkerSocket], list[list[Frame]]]]:
    """Sockets of so many workers, which are closed at the end, and what each has received."""
    pairs = make_socket_pairs(count)
    received: list[list[Frame]] = [[] for _ in range(count)]

    def make_socket(slot: int) -> WorkerSocket:
        return WorkerSocket(pairs, slot, lambda *frame: received[slot].append(frame))

    sockets = [make_socket(slot) for slot in range(count)]
    try:
        yield sockets, received
    finally:
        for each in sockets:
            each.close()
        for pair in pairs:
            for end in pair:
                end.close()


def list_messages(frames: list[Frame]) -> list[Message]:
    """The messages in several frames."""
    return [message for _, messages in frames for message in messages]


async def test_messages_arrive_in_order() -> None:
    """Everybody else gets all of them."""
    with make_sockets(3) as (sockets, received):
        for each in sockets:
            each.open()
        sent: list[Message] = [Answer(number) for number in range(200)]
        for message in sent:
            sockets[0].send([message], [1, 2])
        await wait_until(lambda: all(len(list_messages(each)) >= 200 for each in received[1:]))
        assert list_messages(received[1]) == list_messages(received[2]) == sent
        assert not received[0]


async def test_many_messages_are_several_datagrams() -> None:
    """What is too long for the kernel's buffers arrives in parts, in order."""
    with make_sockets(2) as (sockets, received):
        for each in sockets:
            each.open()
        sent: list[Message] = [Answer(number, b"x" * 30_000) for number in range(50)]
        sockets[0].send(sent, [1])
        await wait_until(lambda: len(list_messages(received[1])) >= 50)
        assert list_messages(received[1]) == sent and not sockets[0].lost


async def test_a_full_queue_is_tried_again() -> None:
    """A worker that reads nothing for a while loses nothing, and then no more than the backlog is kept."""
    with make_sockets(2) as (sockets, _):
        sockets[0].open()
        inbox = sockets[0]._pairs[1].inbox
        sent: list[Message] = [Answer(number, b"x" * 20_000) for number in range(100)]
        for message in sent:
            sockets[0].send([message], [1])
        assert sockets[0].lost == 0
        frames: list[Frame] = []
        while len(frames) < 100:
            try:
                frames.append(decode_frame(inbox.recv(1 << 20)))
            except BlockingIOError:
                await asyncio.sleep(0.01)
        assert list_messages(frames) == sent
        for message in sent * 4:
            sockets[0].send([message], [1])
        assert sockets[0].lost > 0


async def test_a_successor_hears_nothing_of_before() -> None:
    """What its predecessor did not read is not for it: it asks for everything anew."""
    with make_sockets(2) as (sockets, received):
        sockets[0].open()
        sockets[0].send([Question(0, "load")], [1])
        sockets[1].open()
        sockets[0].send([Question(1, "load")], [1])
        await wait_until(lambda: received[1])
        assert list_messages(received[1]) == [Question(1, "load")]
        assert not sockets[0].lost


async def test_rubbish_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be read is logged, and what comes next is heard."""
    ended = encode_frame(1, [Ended("abc", 5)])
    # No MessagePack; a text that is none; a field more, of a depth that no parser follows.
    longer = ended.replace(b"\x93\xa1e", b"\x94\xa1e") + b"\x91" * 20_000
    bad = (b"\xc1", ended.replace(b"abc", b"\xff\xff\xff"), longer)
    with make_sockets(2) as (sockets, received):
        for each in sockets:
            each.open()
        for data in bad:
            sockets[0]._pairs[1].outbox.send(data)
        sockets[0].send([Question(0, "load")], [1])
        await wait_until(lambda: received[1])
    assert caplog.text.count("is not readable") == len(bad) and "Traceback" not in caplog.text
