# SPDX-License-Identifier: Apache-2.0
"""Accept TCP connections in a thread, for the small servers of tests: proxy, echo, scripted server."""

from __future__ import annotations

import socket
from collections.abc import Callable


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
