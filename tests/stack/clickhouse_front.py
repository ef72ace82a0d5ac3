# SPDX-License-Identifier: Apache-2.0
"""ClickHouse's HTTP interface before chDB, its engine as a Python package; test_other_backends.py starts it.

`python -m tests.stack.clickhouse_front PORT FOLDER`. It claims revision 0 of the protocol, so that
blocks in both directions are the engine's own format Native.
"""

from __future__ import annotations

import struct
import sys
import threading
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from lab.http_servers import HttpServerThread, SilentHandler

HELLO: Final = "SELECT displayName(), version(), revision(), timezone()"
BLOCK_INFO: Final = b"\x01\x00\x02\xff\xff\xff\xff\x00"


def encode_hello(version: str) -> bytes:
    """The answer to a client's first question, in the newest revision, which clients expect here."""

    def encode_text(text: str) -> bytes:
        """A short string as Native has it: its length, then its bytes."""
        return bytes([len(text)]) + text.encode()

    columns = (
        ("displayName()", "String", encode_text("chdb")),
        ("version()", "String", encode_text(version)),
        ("revision()", "UInt32", struct.pack("<I", 0)),
        ("timezone()", "String", encode_text("UTC")),
    )
    parts = [encode_text(name) + encode_text(kind) + b"\x00" + data for name, kind, data in columns]
    return BLOCK_INFO + bytes([len(columns), 1]) + b"".join(parts)


class ClickHouseFront(HttpServerThread):
    """One engine, one query at a time. folder: for its data."""

    def __init__(self, port: int, folder: Path) -> None:
        from chdb import session

        self.lock = threading.Lock()
        self.folder = folder
        self.engine: Any = session.Session(str(folder / "data"))
        super().__init__(FrontHandler, port=port)

    def run_query(self, query: str, body: bytes, shape: str) -> bytes:
        """The answer to a query; `body` is what an INSERT brings, in the format Native."""
        if query == HELLO:
            version = self.run_query("SELECT version()", b"", "TSV").decode().strip()
            return encode_hello(version)
        with self.lock:
            if body:
                (brought := self.folder / "brought.native").write_bytes(body)
                into = query.rpartition(" FORMAT ")[0]
                query = f"{into} SELECT * FROM file('{brought}', 'Native')"
            answer: bytes = self.engine.query(query, shape).bytes()
            return answer


class FrontHandler(SilentHandler):
    """Handles one connection."""

    server: ClickHouseFront

    def do_GET(self) -> None:
        """Answer that it is there."""
        self.send_answer(200, b"Ok.\n")

    def read_body(self) -> bytes:
        """The request's body; an INSERT comes in chunks."""
        if "content-length" in self.headers:
            return super().read_body()
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def do_POST(self) -> None:
        """A query in the body, or in the address with what it brings in the body."""
        body = self.read_body()
        asked = parse_qs(urlsplit(self.path).query)
        shape = asked.get("default_format", ["Native"])[0]
        try:
            if "query" in asked:
                answer = self.server.run_query(asked["query"][0], body, shape)
            else:
                answer = self.server.run_query(body.decode(), b"", shape)
        except RuntimeError as error:  # what the engine says is for the client
            self.send_answer(500, str(error).encode(), content_type="text/plain")
        else:
            self.send_answer(200, answer, content_type="application/octet-stream")


if __name__ == "__main__":
    front = ClickHouseFront(int(sys.argv[1]), Path(sys.argv[2]))
    threading.Event().wait()
