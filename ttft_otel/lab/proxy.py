# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy that can delay what a client sends: the ground truth of `router.hop` in live tests."""

from __future__ import annotations

import socket
import threading
import time
from urllib.parse import urlsplit


class Proxy:
    """Listens on the loopback and passes bytes on; `delay` seconds before each burst to the server.

    A burst is what comes after the server has answered: one request, however many packets it takes.
    """

    def __init__(self, url: str) -> None:
        """Start listening in front of `url`."""
        parts = urlsplit(url)
        self.target = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.delay = 0.0
        self.server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop listening; connections end with their clients."""
        self.server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.server.accept()
            except OSError:
                return
            upstream = socket.create_connection(self.target)
            for end in (client, upstream):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            fresh = threading.Event()
            fresh.set()
            threading.Thread(
                target=self._pump, args=(client, upstream, fresh, True), daemon=True
            ).start()
            threading.Thread(
                target=self._pump, args=(upstream, client, fresh, False), daemon=True
            ).start()

    def _pump(
        self, source: socket.socket, sink: socket.socket, fresh: threading.Event, asks: bool
    ) -> None:
        try:
            while data := source.recv(65536):
                if asks and fresh.is_set():
                    fresh.clear()
                    time.sleep(self.delay)
                elif not asks:
                    fresh.set()
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for end in (source, sink):
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    end.close()
