# SPDX-License-Identifier: Apache-2.0
"""A worker's Unix datagram socket: what it tells and asks the other workers; worker.py reads it.

The sockets lie in a folder that only this user can enter, so whoever sends is one of us.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import socket
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ttft_otel.router.types import JSON_ERRORS
from ttft_otel.router.workers.messages import Message, decode_frame, encode_frame

MAX_FOLDER_CHARS: Final = 80  # a Unix socket's path has at most 107
FOLDER_PREFIX: Final = "ttft-otel-router-"
# A file that is locked for as long as a process of its router runs.
LOCK_NAME: Final = "running"


def make_private_folder() -> Path:
    """A new folder that only this user can enter; those of routers that were killed are removed."""
    runtime_folder = os.environ.get("XDG_RUNTIME_DIR", "")
    is_usable = os.access(runtime_folder, os.W_OK) and len(runtime_folder) <= MAX_FOLDER_CHARS - 24
    parent = runtime_folder if runtime_folder and is_usable else None
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent))  # mode 0700
    if len(str(folder)) > MAX_FOLDER_CHARS:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir="/tmp"))
    _lock_folder(folder)
    sweep_folders(folder.parent)
    return folder


def _lock_folder(folder: Path) -> None:
    unlocked = folder / f"{LOCK_NAME}.new"
    # Never closed: forked workers have the same lock, and the kernel lets go of it with the last of them.
    descriptor = os.open(unlocked, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    # A file system without locks: its folder is left if all are killed at once.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Its name appears once it is locked, so that nobody finds it in between.
        unlocked.rename(folder / LOCK_NAME)


def sweep_folders(parent: Path) -> None:
    """Remove folders below `parent` whose lock nobody holds, of this user."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):
            # Of another user, or a link that another user has put there.
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(folder / LOCK_NAME, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def leave_folder(folder: Path, number: int) -> None:
    """Remove what is worker `number`'s, and the folder if it was the last: no supervisor does it."""
    for path in folder.glob(f"worker-{number}.*"):
        path.unlink(missing_ok=True)
    if not any(folder.glob("worker-*")):
        shutil.rmtree(folder, ignore_errors=True)


RETRY_S: Final = 0.005  # seconds until a datagram is tried again whose receiver's queue was full
# The kernel queues 10 datagrams per socket by default (net.unix.max_dgram_qlen): a worker that is busy
# for some milliseconds has more to come.
MAX_BACKLOG: Final = 256  # datagrams that wait for a worker; beyond it the oldest are lost
MAX_DATAGRAM_BYTES: Final = 1 << 20
# Messages that are longer together are sent in several datagrams: the kernel's buffers may be small.
MAX_JOINED_BYTES: Final = 1 << 16
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
        self._addresses = {number: str(build_path(folder, number)) for number in self.others}
        self.lost = 0  # datagrams that were given up
        # By slot: orders, which a flood of questions must not push out, and everything else.
        self._backlogs: dict[int, tuple[deque[bytes], deque[bytes]]] = {
            number: (deque(), deque()) for number in self.others
        }
        self._timer: asyncio.TimerHandle | None = None
        self._socket: socket.socket | None = None
        self._buffer = memoryview(bytearray(MAX_DATAGRAM_BYTES))

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
        """Send to those on `slots`, in one datagram each if they fit; orders go before what waits."""
        if not slots:
            return
        data = encode_frame(self.slot, messages)
        if len(data) > MAX_JOINED_BYTES and len(messages) > 1:
            half = len(messages) // 2
            self.send(messages[:half], slots, are_orders)
            self.send(messages[half:], slots, are_orders)
            return
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
            self._socket.sendto(data, self._addresses[slot])
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
                length = self._socket.recv_into(self._buffer) if self._socket else 0
            except BlockingIOError:
                return
            if not length:
                return
            try:
                sender, messages = decode_frame(self._buffer[:length])
            except JSON_ERRORS as error:
                log.warning("ttft-otel: a message of another worker is not readable: %s", error)
                continue
            self.receive(sender, messages)


def build_path(folder: Path, slot: int) -> Path:
    """Where the worker on `slot` listens."""
    return folder / f"worker-{slot}.sock"
