# SPDX-License-Identifier: Apache-2.0
"""Read records' bytes from the handoff socket until its end and keep them, bounded, for flow.py."""

from __future__ import annotations

import socket
import threading
from collections import deque
from typing import Final

from ttft_otel.exporter.health import Health

LONGEST: Final = 1 << 20  # bytes of one record; a big one has 100 pieces and 15 kB
MOST: Final = 16384  # records kept while the collector is away
MOST_BYTES: Final = 32 << 20


class Inbox:
    """A bounded queue of records as they came, undecoded: their memory is known exactly."""

    def __init__(self, health: Health, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self.health = health
        self.most = most
        self.most_bytes = most_bytes
        self.ended = threading.Event()
        self._bytes = self._wanted = 0
        self._queue: deque[bytes] = deque()
        self._change = threading.Condition()

    def read(self, source: socket.socket) -> None:
        """Read until end of file; returns when every host that could send is gone."""
        buffer = bytearray(LONGEST)
        view = memoryview(buffer)
        while True:
            try:
                # MSG_TRUNC: the record's true length, even where the buffer is too short for it.
                length = source.recv_into(buffer, 0, socket.MSG_TRUNC)
            except OSError:
                break
            if not length:
                break
            if length > LONGEST:
                self.health.add("received")
                self.health.add("overflowed")
            else:
                self.put(bytes(view[:length]))
        self.end()

    def end(self) -> None:
        """Nothing more will come; what is there can still be taken."""
        self.ended.set()
        with self._change:
            self._change.notify_all()

    def put(self, data: bytes) -> None:
        """Keep one record; the oldest make room for it: new ones tell more after an outage."""
        self.health.add("received")
        with self._change:
            self._queue.append(data)
            self._bytes += len(data)
            while len(self._queue) > self.most or self._bytes > self.most_bytes:
                self._bytes -= len(self._queue.popleft())
                self.health.add("overflowed")
            # Not for each record: a wake-up costs more than a put.
            if len(self._queue) in (1, self._wanted):
                self._change.notify()

    def take(self, most: int, wait: float) -> list[bytes]:
        """Sleep until there is a record, gather up to `most` for `wait` seconds; [] at the end."""
        with self._change:
            self._wanted = most
            self._change.wait_for(lambda: self._queue or self.ended.is_set())
            self._change.wait_for(lambda: len(self._queue) >= most or self.ended.is_set(), wait)
            count = min(most, len(self._queue))
            taken = [self._queue.popleft() for _ in range(count)]
            self._bytes -= sum(map(len, taken))
        return taken

    def __len__(self) -> int:
        return len(self._queue)
