# SPDX-License-Identifier: Apache-2.0
"""A server that streams words as vLLM does, of the standard library alone, for scripts/kube --stand-in.

SIGTERM: it takes no more connections, and ends when the streams that it has begun have ended.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PORT = 8000
TOKEN_S = 0.005  # between two tokens


class StreamHandler(BaseHTTPRequestHandler):
    """Answers GET with a model list and POST with a stream of `max_tokens` words."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Health and models."""
        body = json.dumps({"object": "list", "data": [{"id": "tiny", "object": "model"}]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        """A stream, in chunks, with its end."""
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for _ in range(int(asked.get("max_tokens", 8))):
            chunk = {
                "object": "chat.completion.chunk",
                "model": "tiny",
                "choices": [{"index": 0, "delta": {"content": "fox "}}],
            }
            self.send_event(json.dumps(chunk))
            time.sleep(TOKEN_S)
        self.send_event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def send_event(self, text: str) -> None:
        """One event in one chunk."""
        data = f"data: {text}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


class StreamServer(ThreadingHTTPServer):
    """Waits for its streams when it is closed."""

    daemon_threads = False
    request_queue_size = 128


def main() -> None:
    """Serve until SIGTERM."""
    server = StreamServer(("0.0.0.0", PORT), StreamHandler)

    def stop(*_: object) -> None:
        threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, stop)
    server.serve_forever(poll_interval=0.1)
    server.server_close()


if __name__ == "__main__":
    main()
