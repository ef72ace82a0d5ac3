# SPDX-License-Identifier: Apache-2.0
"""A worker's Unix datagram socket: its orders, questions and answers to other workers; worker.py reads it.

What is reported of each request goes through the rings of shared_memory.py.

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

from ttft_otel.router.workers.messages import Message, decode_frame, encode_frame

RETRY_S: Final = 0.005  # seconds until a datagram is tried again whose receiver's queue was full
# The kernel queues 10 datagrams per socket by default (net.unix.max_dgram_qlen): a worker that is busy
# for some milliseconds has more to come.
MAX_BACKLOG: Final = 256  # datagrams that wait for a worker; beyond it the oldest are lost
MAX_DATAGRAM_BYTES: Final = 1 << 20
MAX_READS: Final = 64  # datagrams read in one turn of the event loop

log: Final = logging.getLogger("ttft_otel")


class WorkerSocket:
    """One worker's end.

    Args:
        folder: Where the sockets of all workers are.
        slot: This worker's number.
        slot_count: How many workers there are.
        receive: Called with the slot and the messages of each datagram of another worker.
    """

    def __init__(
        self,
        folder: Path,
        slot: int,
        slot_count: int,
        receive: Callable[[int, list[Message]], None],
    ) -> None:
        self.folder = folder
        self.slot = slot
        self.receive = receive
        self.others = tuple(number for number in range(slot_count) if number != slot)
        self.lost = 0  # datagrams that were given up
        # By slot: orders, which a flood of questions must not push out, and everything else.
        self._backlogs: dict[int, tuple[deque[bytes], deque[bytes]]] = {
            number: (deque(), deque()) for number in self.others
        }
        self._timer: asyncio.TimerHandle | None = None
        self._socket: socket.socket | None = None

    def open(self) -> None:
        """Bind the socket of this slot, in place of a predecessor's, and read it from now on."""
        path = build_path(self.folder, self.slot)
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

    def send(
        self, messages: Sequence[Message], slots: Sequence[int], are_orders: bool = False
    ) -> None:
        """Send to those on `slots`, in one datagram each; orders go before what waits."""
        if not slots:
            return
        data = encode_frame(self.slot, messages)
        for slot in slots:
            orders, others = self._backlogs[slot]
            (orders if are_orders else others).append(data)
        self._send_waiting()

    def _send_waiting(self) -> None:
        """Send as much of what waits as the receivers' queues take."""
        for slot, backlogs in self._backlogs.items():
            for backlog in backlogs:
                # In order: the answer to a question must not overtake an order before it.
                while backlog and self._send_datagram(backlog[0], slot):
                    backlog.popleft()
                while len(backlog) > MAX_BACKLOG:
                    backlog.popleft()
                    self.lost += 1
        if self._timer is None and any(map(any, self._backlogs.values())):
            self._timer = asyncio.get_running_loop().call_later(RETRY_S, self._try_again)

    def _try_again(self) -> None:
        self._timer = None
        self._send_waiting()

    def _send_datagram(self, data: bytes, slot: int) -> bool:
        """Send it; returns False if it has to be tried again."""
        if self._socket is None:
            return True
        try:
            self._socket.sendto(data, str(build_path(self.folder, slot)))
        except BlockingIOError:
            return False
        except (ConnectionRefusedError, FileNotFoundError):
            pass  # it is being replaced, and its successor asks for all of it
        except OSError as error:
            self.lost += 1
            log.warning("ttft-otel: a message to worker %d was lost: %s", slot, error)
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
                sender, messages = decode_frame(data)
            except msgspec.MsgspecError as error:
                log.warning("ttft-otel: a message of another worker is not readable: %s", error)
                continue
            self.receive(sender, messages)


def build_path(folder: Path, slot: int) -> Path:
    """Where the worker on `slot` listens."""
    return folder / f"worker-{slot}.sock"
