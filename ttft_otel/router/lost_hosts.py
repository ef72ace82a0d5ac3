# SPDX-License-Identifier: Apache-2.0
"""Let the kernel end connections to hosts that are gone without a word: TCP keepalive (RFC 1122 4.2.3.6).

upstream/connection_pool.py and control/client_connection.py call it for each new connection. What answers
is the other host's kernel, so that a process may be busy for any time.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Final

# Options of a TCP connection by their name in `socket`; Linux has all of them. A minute in both cases.
TCP_OPTIONS: Final = {
    "TCP_KEEPIDLE": 30,  # seconds without a packet until the first probe
    "TCP_KEEPINTVL": 10,  # seconds until the next one
    "TCP_KEEPCNT": 3,  # probes without an answer that end the connection
    # Milliseconds for which what was sent stays unacknowledged; no probe is sent then.
    "TCP_USER_TIMEOUT": 60_000,
}


def end_with_host(connection: socket.socket) -> None:
    """End the TCP `connection` when the other host is silent, or takes nothing that is sent, for a minute."""
    _set_option(connection, socket.SOL_SOCKET, "SO_KEEPALIVE", 1)
    for name, value in TCP_OPTIONS.items():
        _set_option(connection, socket.IPPROTO_TCP, name, value)


def _set_option(connection: socket.socket, level: int, name: str, value: int) -> None:
    # A system that lacks one or refuses it has times of its own; a request is not refused for that.
    if (option := getattr(socket, name, None)) is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(level, option, value)
