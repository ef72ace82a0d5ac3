# SPDX-License-Identifier: Apache-2.0
"""Find free TCP ports on the loopback, and accept connections in a thread, for the servers of tests."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable

# Below the kernel's range for ports of outgoing connections: a vLLM server binds its port half a
# minute after it was chosen, and no connection may take it in between.
MIN_PORT = 18000
MAX_PORT = 30000

# Of this process: a server that was given a port a moment ago has not bound it yet.
assigned_ports: set[int] = set()


def find_free_port() -> int:
    """A port that is free now and that this process has not returned before. Raises OSError."""
    # Random, not in order: parallel test processes would else try the same ports at once.
    chooser = random.SystemRandom()
    # 200 misses mean that the range is full, not bad luck.
    for _ in range(200):
        port = chooser.randrange(MIN_PORT, MAX_PORT)
        if port not in assigned_ports and is_port_free(port):
            assigned_ports.add(port)
            return port
    raise OSError(f"no free port found between {MIN_PORT} and {MAX_PORT}; stop other servers first")


def is_port_free(port: int) -> bool:
    """Whether `port` can be bound on the loopback now."""
    with socket.socket() as probe:
        try:
            # Without SO_REUSEADDR: a port in TIME_WAIT counts as
            # taken, which a server might refuse, too.
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def accept_connections(
    listener: socket.socket, serve_connection: Callable[[socket.socket], None]
) -> None:
    """Call `serve_connection` with each connection, one after another, until `listener` is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        # The listener was closed: the thread ends with it.
        except OSError:
            return
        serve_connection(connection)
