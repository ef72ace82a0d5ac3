# SPDX-License-Identifier: Apache-2.0
"""Datagrams between workers, over real sockets: in order, never waiting for who is gone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from router.fake_instances import wait_until
from ttft_otel.router.workers.messages import Answer, Message, Question, decode_frame
from ttft_otel.router.workers.worker_socket import WorkerSocket, build_path

Frame = tuple[int, list[Message]]  # the sender's slot, and what it says


@contextmanager
def make_sockets(
    folder: Path, count: int
) -> Iterator[tuple[list[WorkerSocket], list[list[Frame]]]]:
    """Sockets of so many workers, which are closed at the end, and what each has received."""
    received: list[list[Frame]] = [[] for _ in range(count)]

    def make_socket(slot: int) -> WorkerSocket:
        return WorkerSocket(folder, slot, count, lambda *frame: received[slot].append(frame))

    sockets = [make_socket(slot) for slot in range(count)]
    try:
        yield sockets, received
    finally:
        for each in sockets:
            each.close()


def list_messages(frames: list[Frame]) -> list[Message]:
    """The messages in several frames."""
    return [message for _, messages in frames for message in messages]


async def test_messages_arrive_in_order(tmp_path: Path) -> None:
    """Everybody else gets all of them."""
    with make_sockets(tmp_path, 3) as (sockets, received):
        for each in sockets:
            each.open()
        sent: list[Message] = [Answer(number) for number in range(200)]
        for message in sent:
            sockets[0].send([message], [1, 2])
        await wait_until(lambda: all(len(list_messages(each)) >= 200 for each in received[1:]))
        assert list_messages(received[1]) == list_messages(received[2]) == sent
        assert not received[0]


async def test_many_messages_are_several_datagrams(tmp_path: Path) -> None:
    """What is too long for the kernel's buffers arrives in parts, in order."""
    with make_sockets(tmp_path, 2) as (sockets, received):
        for each in sockets:
            each.open()
        sent: list[Message] = [Answer(number, b"x" * 30_000) for number in range(50)]
        sockets[0].send(sent, [1])
        await wait_until(lambda: len(list_messages(received[1])) >= 50)
        assert list_messages(received[1]) == sent and not sockets[0].lost


async def test_a_full_queue_is_tried_again(tmp_path: Path) -> None:
    """A worker that reads nothing for a while loses nothing, and then no more than the backlog is kept."""
    with make_sockets(tmp_path, 2) as (sockets, received):
        sockets[0].open()
        deaf = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        deaf.bind(str(build_path(tmp_path, 1)))
        sent: list[Message] = [Answer(number, b"x" * 20_000) for number in range(100)]
        for message in sent:
            sockets[0].send([message], [1])
        assert sockets[0].lost == 0
        deaf.setblocking(False)
        frames: list[Frame] = []
        while len(frames) < 100:
            try:
                frames.append(decode_frame(deaf.recv(1 << 20)))
            except BlockingIOError:
                await asyncio.sleep(0.01)
        assert list_messages(frames) == sent
        for message in sent * 4:
            sockets[0].send([message], [1])
        assert sockets[0].lost > 0
        deaf.close()


async def test_nobody_waits_for_a_worker_that_is_gone(tmp_path: Path) -> None:
    """Neither before it starts nor after it died; its successor takes its place."""
    with make_sockets(tmp_path, 2) as (sockets, received):
        sockets[0].open()
        sockets[0].send([Question(0, "load")], [1])
        sockets[1].open()
        sockets[1].close()  # leaves its path, as a killed process does
        sockets[0].send([Question(0, "load")], [1])
        sockets[1].open()
        sockets[0].send([Question(0, "load")], [1])
        await wait_until(lambda: received[1])
        assert len(received[1]) == 1
        assert not sockets[0].lost


async def test_rubbish_is_skipped(tmp_path: Path) -> None:
    """What is no frame is logged, and the next one read."""
    with make_sockets(tmp_path, 2) as (sockets, received):
        sockets[1].open()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            stranger.sendto(b"\xffrubbish", str(build_path(tmp_path, 1)))
        sockets[0].open()
        sockets[0].send([Question(0, "load")], [1])
        await wait_until(lambda: received[1])
