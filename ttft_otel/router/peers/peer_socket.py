# SPDX-License-Identifier: Apache-2.0
"""A UDP socket between replicas of the router; peer_link.py says and judges what goes through it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from typing import Final

MAX_READS: Final = 64  # datagrams read in one turn of the event loop
READ_BYTES: Final = 2048  # more than a frame: a longer datagram is cut, and its hash is wrong
BUFFER_BYTES: Final = 1 << 20  # for a second of statements of all others


class PeerSocket:
    """One process's socket at `host`; port 0: it only sends. unsent: datagrams that the system refused."""

    def __init__(self, host: str, port: int, receive: Callable[[bytes], None]) -> None:
        self.host, self.port, self.receive = host, port, receive
        self.unsent = 0
        self._socket: socket.socket | None = None

    def open(self) -> None:
        """Bind, and read from now on. Raises OSError."""
        found = socket.getaddrinfo(
            self.host or None, self.port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        self._socket = socket.socket(family, kind, protocol)
        self._socket.setblocking(False)
        # The kernel takes less than this where net.core.rmem_max says so.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self._socket.bind(address)
        if self.port:
            asyncio.get_running_loop().add_reader(self._socket, self._read_datagrams)

    def close(self) -> None:
        """Stop reading."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    def send(self, data: bytes, addresses: Iterable[tuple[str, int]]) -> None:
        """Send to each of `addresses`; what the system does not take at once is lost."""
        if self._socket is None:
            return
        for address in addresses:
            try:
                self._socket.sendto(data, address)
            except OSError:
                self.unsent += 1

    def _read_datagrams(self) -> None:
        for _ in range(MAX_READS):
            if self._socket is None:
                return
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                continue  # an ICMP error of a replica that is gone
            self.receive(data)
