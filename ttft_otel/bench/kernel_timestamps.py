# SPDX-License-Identifier: Apache-2.0
"""TCP sockets with kernel receive timestamps, for the arrival times of a response's pieces.

An event loop with hundreds of streams reads a piece up to some milliseconds after its arrival, which
would be counted as the server's time.
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

SO_TIMESTAMPNS: Final = 35  # of <asm-generic/socket.h>; Python's socket module lacks it
# Native sizes: the kernel writes its own struct timespec, two longs.
TIMESPEC: Final = struct.Struct("@ll")
ANCILLARY_BYTES: Final = socket.CMSG_SPACE(TIMESPEC.size)


class TimestampedSocket(socket.socket):
    """A socket that notes when the data of its last read arrived.

    last_byte_ns: arrival of the last byte, or of the end of the stream after it; CLOCK_MONOTONIC.
    Without a kernel timestamp it is the time of the read; it is never later than that.
    """

    last_byte_ns = 0

    def enable_timestamps(self) -> None:
        """Turn the kernel's receive timestamps on (Linux only)."""
        if sys.platform == "linux":
            self.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """As socket.recv(), and note the arrival time."""
        # asyncio's selector loop reads plain sockets with recv(), so overriding that is enough.
        data, ancillary_data, _, _ = self.recvmsg(size, ANCILLARY_BYTES, flags)
        self.last_byte_ns = read_arrival_ns(ancillary_data)
        return data

    def recv_into(self, buffer: Buffer, size: int = 0, flags: int = 0, /) -> int:
        """As socket.recv_into(), and note the arrival time; TLS reads with this one."""
        # 0 means the whole buffer, as in socket.recv_into().
        room = memoryview(buffer)[: size or None]
        count, ancillary_data, _, _ = self.recvmsg_into([room], ANCILLARY_BYTES, flags)
        self.last_byte_ns = read_arrival_ns(ancillary_data)
        return count


@contextmanager
def keep_timestamps_enabled() -> Iterator[None]:
    """Keep the kernel's receive timestamps active while the block runs.

    The kernel takes timestamps only while some socket asks for them, and begins some time after the
    first one does: without this, each of a series of connections would miss its first pieces.
    """
    with TimestampedSocket() as sock:
        # Not connected and never read: asking is enough to keep the kernel stamping.
        sock.enable_timestamps()
        yield


def read_arrival_ns(ancillary_data: Iterable[tuple[int, int, bytes]]) -> int:
    """Arrival time on CLOCK_MONOTONIC, converted from the kernel's timestamp in CLOCK_REALTIME.

    ancillary_data: of recvmsg(); without a timestamp in it the time is now.
    """
    # Both clocks right beside each other, since their difference converts the stamp.
    wall_ns = time_ns()
    now_ns = monotonic_ns()
    for level, kind, data in ancillary_data:
        if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS and len(data) == TIMESPEC.size:
            seconds, nanoseconds = map(int, TIMESPEC.unpack(data))
            # A step of the wall clock in between may put the stamp into
            # the future: never later than the read.
            return min(now_ns, now_ns - wall_ns + seconds * 1_000_000_000 + nanoseconds)
    return now_ns
