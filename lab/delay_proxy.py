# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy that can delay requests: the ground truth for `router.hop` in live tests."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from lab.free_ports import accept_connections


@dataclass
class ProxiedExchange:
    """A request's first bytes, when they came, and when the answer's first did; CLOCK_MONOTONIC, ns."""

    data: bytes
    began_ns: int
    answered_ns: int = 0


class DelayProxy:
    """Forwards TCP connections from the loopback, with a delay of `delay_s` seconds per request.

    A request begins with the first bytes after the server has answered the one before.
    slept_ms: how long the last delay really lasted. exchanges: all, as they began.
    """

    def __init__(self, url: str) -> None:
        """Start listening in front of `url`."""
        parts = urlsplit(url)
        self.target = (parts.hostname or "127.0.0.1", parts.port or 80)
        # Plain attributes: tests change them while connections are open, from the next request on.
        self.delay_s = self.slept_ms = 0.0
        self.exchanges: list[ProxiedExchange] = []
        # Port 0: the kernel chooses a free one, which nobody can take in between.
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        accepting = (self.listener, self._start_serving)
        threading.Thread(target=accept_connections, args=accepting, daemon=True).start()

    def close(self) -> None:
        """Stop listening; connections end with their clients."""
        self.listener.close()

    def _start_serving(self, client: socket.socket) -> None:
        threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(self.target) as upstream:
            # With Nagle's algorithm a second small write waits for an acknowledgement, up to 40 ms.
            for end in (client, upstream):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            own: list[ProxiedExchange] = []  # of this connection
            back = threading.Thread(
                target=self._relay_bytes, args=(upstream, client, own, False), daemon=True
            )
            back.start()
            self._relay_bytes(client, upstream, own, True)
            back.join()

    def _relay_bytes(
        self,
        source: socket.socket,
        sink: socket.socket,
        own: list[ProxiedExchange],
        is_request: bool,
    ) -> None:
        try:
            while data := source.recv(65536):
                is_open = bool(own) and not own[-1].answered_ns
                # Only a request's first bytes wait: a body in several pieces is one request.
                if is_request and not is_open:
                    began_ns = time.monotonic_ns()
                    own.append(ProxiedExchange(data, began_ns))
                    self.exchanges.append(own[-1])
                    # What was really slept is noted: a busy machine
                    # sleeps longer than it is asked to.
                    time.sleep(self.delay_s)
                    self.slept_ms = (time.monotonic_ns() - began_ns) / 1e6
                elif not is_request and is_open:
                    own[-1].answered_ns = time.monotonic_ns()
                sink.sendall(data)
        except OSError:
            pass
        finally:
            # Both directions end together, so that a client that hangs up is seen by the server at once.
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def run_delay_proxy(url: str, delay_s: float) -> Iterator[DelayProxy]:
    """A proxy in front of `url` that delays each request by `delay_s` seconds."""
    proxy = DelayProxy(url)
    proxy.delay_s = delay_s
    try:
        yield proxy
    finally:
        proxy.close()
