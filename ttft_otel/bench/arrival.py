# SPDX-License-Identifier: Apache-2.0
"""TCP sockets that say when the kernel got what was read from them; wire.py has each piece's time of it.

An event loop with hundreds of streams reads a piece up to some milliseconds after it came. That is
this process's lag, no time of the server's.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic_ns, time_ns
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Buffer

STAMPS: Final = 35  # SO_TIMESTAMPNS of <asm-generic/socket.h>, which Python does not name
TIMESPEC: Final = struct.Struct("@ll")
SPACE: Final = socket.CMSG_SPACE(TIMESPEC.size)


class Stamped(socket.socket):
    """`came_ns` is when the last byte of the last read came (CLOCK_MONOTONIC), or the end behind it.

    Where the kernel does not tell, it is when the read was made; it is never later than that.
    """

    came_ns = 0

    def stamp(self) -> None:
        """Have the kernel note the times."""
        if sys.platform == "linux":
            self.setsockopt(socket.SOL_SOCKET, STAMPS, 1)

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """As ever, and take the time."""
        data, notes, _, _ = self.recvmsg(size, SPACE, flags)
        self.came_ns = came(notes)
        return data

    def recv_into(self, buffer: Buffer, size: int = 0, flags: int = 0, /) -> int:
        """As ever, and take the time; what TLS reads with."""
        room = memoryview(buffer)[: size or None]
        count, notes, _, _ = self.recvmsg_into([room], SPACE, flags)
        self.came_ns = came(notes)
        return count


@contextmanager
def noting() -> Iterator[None]:
    """Keep the kernel at it for as long as the block runs.

    It notes times while any socket wants them, and a while after the first one said so: without this,
    connections that come one after another would each miss the first pieces.
    """
    with Stamped() as sock:
        sock.stamp()
        yield


def came(notes: Iterable[tuple[int, int, bytes]]) -> int:
    """A read's time on CLOCK_MONOTONIC; the kernel's own is CLOCK_REALTIME."""
    wall = time_ns()
    now = monotonic_ns()
    for level, kind, data in notes:
        if level == socket.SOL_SOCKET and kind == STAMPS and len(data) == TIMESPEC.size:
            seconds, nanoseconds = map(int, TIMESPEC.unpack(data))
            return min(now, now - wall + seconds * 1_000_000_000 + nanoseconds)
    return now
