# SPDX-License-Identifier: Apache-2.0
"""An OTLP receiver that accepts everything and decodes nothing, as a process; for benchmarks/exporter.py.

    python -m benchmarks.otlp_sink http|grpc

It prints its port when it listens, and ends when its standard input does.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

HOST: Final = "127.0.0.1"
EXPORT_METHODS: Final = tuple(
    f"/opentelemetry.proto.collector.{signal}.v1.{service}Service/Export"
    for signal, service in (("trace", "Trace"), ("metrics", "Metrics"))
)


class AcceptingHandler(BaseHTTPRequestHandler):
    """Answers each POST with 200 and an empty body, over connections that stay open."""

    # HTTP/1.0, the default, would open a connection for each export.
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        """Read the body and accept it."""
        # The whole body, else what is left of it would be read as the next request.
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def start_http_sink() -> int:
    """Serve OTLP over HTTP in a thread; its port."""
    server = ThreadingHTTPServer((HOST, 0), AcceptingHandler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_port


def start_grpc_sink() -> int:
    """Serve OTLP over gRPC in threads; its port."""
    # Only here: the HTTP sink starts faster without it.
    import grpc

    class AcceptAll(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, call: Any) -> Any:
            if call.method not in EXPORT_METHODS:
                return None
            # Bytes in, bytes out: parsing would compete with the exporter for the machine's two cores.
            return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")

    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((AcceptAll(),))
    port = int(server.add_insecure_port(f"{HOST}:0"))
    server.start()
    _kept_servers.append(server)
    return port


_kept_servers: list[Any] = []  # a gRPC server that is freed stops

if __name__ == "__main__":
    sys.stdout.write(f"{start_grpc_sink() if sys.argv[1] == 'grpc' else start_http_sink()}\n")
    sys.stdout.flush()
    sys.stdin.read()
