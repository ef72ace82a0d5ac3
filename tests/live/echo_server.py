# SPDX-License-Identifier: Apache-2.0
"""A server that answers each request at once and notes how long that took.

Live tests call it between two requests to the router. What the client measures above the noted time is
the client's own: its socket, and the time that both processes wait for a core.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from typing import Final

from lab import ttft_client
from lab.free_ports import accept_connections

ECHO_RESPONSE: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\ndata: {}\n\n"
)


class EchoServer:
    """Serves one connection at a time on the loopback.

    busy_ms: duration of the last answer from the request's first byte on, in milliseconds.
    """

    def __init__(self) -> None:
        self.busy_ms = 0.0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        serving = (self._server, self._serve_connection)
        self._thread = threading.Thread(target=accept_connections, args=serving, daemon=True)

    def __enter__(self) -> EchoServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)  # close alone does not end accept
        self._server.close()
        self._thread.join()

    def _serve_connection(self, peer: socket.socket) -> None:
        with peer:
            self._answer_request(peer)

    def _answer_request(self, peer: socket.socket) -> None:
        text = peer.recv(65536)
        began_ns = time.monotonic_ns()
        head, _, body = text.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        missing = int(length[1]) - len(body) if length else 0
        while missing > 0:
            missing -= len(peer.recv(65536))
        self.busy_ms = (time.monotonic_ns() - began_ns) / 1e6
        peer.sendall(ECHO_RESPONSE)


def measure_clock(echo: EchoServer) -> float:
    """Client's TTFT minus the time that the server noted, in milliseconds."""
    answer = ttft_client.send_timed_request(echo.url, words=2500, max_tokens=1)
    assert answer.client_ttft_us is not None
    return answer.client_ttft_us / 1000 - echo.busy_ms
