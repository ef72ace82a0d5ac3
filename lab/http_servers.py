# SPDX-License-Identifier: Apache-2.0
"""HTTP servers in threads of this process, on the loopback: what tests and sinks put in others' place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from lab.server_commands import HOST


class SilentHandler(BaseHTTPRequestHandler):
    """Handles one connection, which stays open; logs nothing."""

    protocol_version = "HTTP/1.1"

    def read_body(self) -> bytes:
        """The request's body."""
        return self.rfile.read(int(self.headers["content-length"]))

    def list_headers(self) -> dict[str, str]:
        """The request's headers by their names in lower case."""
        return {name.lower(): value for name, value in self.headers.items()}

    def send_answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        """Send a whole response; - in names of headers is written _."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class HttpServerThread(ThreadingHTTPServer):
    """Serves in a thread of its own, from now on until it is closed."""

    daemon_threads = True

    def __init__(
        self, handler: Callable[..., BaseHTTPRequestHandler], host: str = HOST, port: int = 0
    ) -> None:
        super().__init__((host, port), handler)
        self.url = f"http://{HOST}:{self.server_port}"
        self.thread = threading.Thread(target=self.serve_forever, args=(0.02,))
        self.thread.start()

    def close(self) -> None:
        """Stop listening."""
        self.shutdown()
        self.server_close()
        self.thread.join()

    def __exit__(self, *_: object) -> None:
        self.close()
