# SPDX-License-Identifier: Apache-2.0
"""A worker's Unix datagram socket: messages to the other workers, in batches; worker_link.py reads it.

The sockets lie in a folder that only this user can enter, so whoever sends is one of us.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from ttft_otel.router.workers.messages import Frame, Message, decode_frame, encode_frame

FLUSH_S: Final = 0.002  # seconds that a message waits for others: one system call for all of them
RETRY_S: Final = 0.005  # seconds until a datagram is tried again whose receiver's queue was full
# The kernel queues 10 datagrams per socket by default (net.unix.max_dgram_qlen): a worker that is busy
# for some milliseconds has more to come.
MAX_BACKLOG: Final = 256  # datagrams that wait for a worker; beyond it the oldest are lost
MAX_BATCH: Final = 128  # messages in one datagram
MAX_DATAGRAM_BYTES: Final = 1 << 20
MAX_READS: Final = 64  # datagrams read in one turn of the event loop

log: Final = logging.getLogger("ttft_otel")


class WorkerSocket:
    """One worker's end. seat, seat_count: its number and how many there are. lost: datagrams given up.

    receive: called with each frame of another worker.
    """

    def __init__(
        self, folder: Path, seat: int, seat_count: int, receive: Callable[[Frame], None]
    ) -> None:
        self.folder, self.seat, self.receive = folder, seat, receive
        self.others = tuple(number for number in range(seat_count) if number != seat)
        self.lost = 0
        self._waiting: list[Message] = []
        self._backlogs: dict[int, deque[bytes]] = {number: deque() for number in self.others}
        self._timer: asyncio.TimerHandle | None = None
        self._socket: socket.socket | None = None

    def open(self) -> None:
        """Bind the socket of this seat, in place of a predecessor's, and read it from now on."""
        path = build_path(self.folder, self.seat)
        # A predecessor that was killed has left its file, on which bind() would fail.
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        # Linux refuses a datagram that is larger than the sender's buffer.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_DATAGRAM_BYTES)
        self._socket.bind(str(path))
        asyncio.get_running_loop().add_reader(self._socket, self._read_datagrams)

    def close(self) -> None:
        """Send what waits, and nothing more."""
        if self._socket is None:
            return
        self.flush()
        if self._timer is not None:
            self._timer.cancel()
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._socket = None

    def send(self, message: Message) -> None:
        """Tell all others, within FLUSH_S."""
        self._waiting.append(message)
        if len(self._waiting) >= MAX_BATCH:
            self.flush()
        elif self._timer is None:
            self._schedule(FLUSH_S)

    def send_now(self, messages: Sequence[Message], seats: Sequence[int]) -> None:
        """Tell only those on `seats`, after all that was said before."""
        self.flush()
        if seats:
            self._post(encode_frame(Frame(self.seat, os.getpid(), list(messages))), seats)

    def flush(self) -> None:
        """Send everything that waits."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._post(encode_frame(Frame(self.seat, os.getpid(), waiting)), self.others)
        elif any(self._backlogs.values()):
            self._post(b"", self.others)

    def _schedule(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.flush()

    def _post(self, data: bytes, seats: Sequence[int]) -> None:
        """Queue `data` behind what waits for each of `seats`, and send as much as their queues take."""
        for seat in seats:
            backlog = self._backlogs[seat]
            if data:
                backlog.append(data)
            # In order: a first token must not overtake its request.
            while backlog and self._send_datagram(backlog[0], seat):
                backlog.popleft()
            while len(backlog) > MAX_BACKLOG:
                backlog.popleft()
                self.lost += 1
        if self._timer is None and any(self._backlogs.values()):
            self._schedule(RETRY_S)

    def _send_datagram(self, data: bytes, seat: int) -> bool:
        """Send it; returns False if it has to be tried again."""
        if self._socket is None:
            return True
        try:
            self._socket.sendto(data, str(build_path(self.folder, seat)))
        except BlockingIOError:
            return False
        except (ConnectionRefusedError, FileNotFoundError):
            pass  # it is being replaced, and its successor asks for all of it
        except OSError as error:
            self.lost += 1
            log.warning("ttft-otel: a message to worker %d was lost: %s", seat, error)
        return True

    def _read_datagrams(self) -> None:
        for _ in range(MAX_READS):
            try:
                data = self._socket.recv(MAX_DATAGRAM_BYTES) if self._socket else b""
            except BlockingIOError:
                return
            if not data:
                return
            try:
                frame = decode_frame(data)
            except msgspec.MsgspecError as error:
                log.warning("ttft-otel: a message of another worker is not readable: %s", error)
                continue
            self.receive(frame)


def build_path(folder: Path, seat: int) -> Path:
    """Where the worker on `seat` listens."""
    return folder / f"worker-{seat}.sock"
