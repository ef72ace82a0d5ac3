# SPDX-License-Identifier: Apache-2.0
"""A worker's Unix datagram socket: what it tells or asks single other workers; worker_link.py reads it.

What everybody is told of each request goes through load_rings.py.

The sockets lie in a folder that only this user can enter, so whoever sends is one of us.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from ttft_otel.router.workers.messages import Frame, Message, decode_frame, encode_frame

RETRY_S: Final = 0.005  # seconds until a datagram is tried again whose receiver's queue was full
# The kernel queues 10 datagrams per socket by default (net.unix.max_dgram_qlen): a worker that is busy
# for some milliseconds has more to come.
MAX_BACKLOG: Final = 256  # datagrams that wait for a worker; beyond it the oldest are lost
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
        self._send_waiting()
        if self._timer is not None:
            self._timer.cancel()
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._socket = None

    def send(self, messages: Sequence[Message], seats: Sequence[int]) -> None:
        """Tell those on `seats`, in one datagram each."""
        if not seats:
            return
        data = encode_frame(Frame(self.seat, list(messages)))
        for seat in seats:
            self._backlogs[seat].append(data)
        self._send_waiting()

    def _send_waiting(self) -> None:
        """Send as much of what waits as the receivers' queues take."""
        for seat, backlog in self._backlogs.items():
            # In order: the answer to a question must not overtake an order before it.
            while backlog and self._send_datagram(backlog[0], seat):
                backlog.popleft()
            while len(backlog) > MAX_BACKLOG:
                backlog.popleft()
                self.lost += 1
        if self._timer is None and any(self._backlogs.values()):
            self._timer = asyncio.get_running_loop().call_later(RETRY_S, self._try_again)

    def _try_again(self) -> None:
        self._timer = None
        self._send_waiting()

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
