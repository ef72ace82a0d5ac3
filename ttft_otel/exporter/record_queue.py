# SPDX-License-Identifier: Apache-2.0
"""A bounded queue of records: filled from the socket until its end, emptied by export_worker.py."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from typing import Final

from ttft_otel.exporter.exporter_counters import ExporterCounters

MAX_RECORD_BYTES: Final = 1 << 20  # of one record; a large one has 100 pieces and 15 kB
MAX_QUEUED_RECORDS: Final = 16384  # kept during an outage of the collector
MAX_QUEUED_BYTES: Final = 32 << 20  # of all queued records
MAX_READ_RECORDS: Final = 64  # read before they are put into the queue together
READ_PAUSE_S: Final = 0.01  # between two looks while records come, which the socket keeps


class RecordQueue:
    """A bounded queue of undecoded records, whose memory is known exactly.

    ended: set when no more records will come.
    """

    def __init__(
        self,
        counters: ExporterCounters,
        max_records: int = MAX_QUEUED_RECORDS,
        max_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        self.counters = counters
        self.max_records = max_records
        self.max_bytes = max_bytes
        self.ended = threading.Event()
        self._bytes = self._wanted_records = 0
        self._queue: deque[bytes] = deque()
        # The lock alone is entered for each record: a Condition's own methods take three times as long.
        self._lock = threading.Lock()
        self._change = threading.Condition(self._lock)

    def read_socket(self, source: socket.socket) -> None:
        """Read records from `source` until its end of file: all processes that could send are gone.

        A record that finds a waiting reader costs its sender, a thread that serves requests, a wake-up of
        this process: several times the sending itself. So it waits only after a pause without a record.
        """
        buffer = bytearray(MAX_RECORD_BYTES)
        view = memoryview(buffer)
        # MSG_TRUNC: returns the record's true length, even if the buffer is too short for it.
        flags = socket.MSG_TRUNC
        found: list[bytes] = []  # since the last pause, and not yet in the queue
        while True:
            try:
                length = source.recv_into(buffer, 0, flags)
            except BlockingIOError:
                if found:
                    self.put(*found)
                    found.clear()
                    time.sleep(READ_PAUSE_S)
                else:
                    flags = socket.MSG_TRUNC
                continue
            except OSError:
                break
            if not length:
                break
            flags = socket.MSG_TRUNC | socket.MSG_DONTWAIT
            if length > MAX_RECORD_BYTES:
                self.counters.add("received")
                self.counters.add("overflowed")
                continue
            found.append(bytes(view[:length]))
            if len(found) == MAX_READ_RECORDS:
                self.put(*found)
                found.clear()
        self.put(*found)
        self.mark_ended()

    def mark_ended(self) -> None:
        """Mark the end of the stream; queued records can still be taken."""
        self.ended.set()
        with self._change:
            self._change.notify_all()

    def put(self, *records: bytes) -> None:
        """Append `records`; if the queue is full, drop the oldest ones.

        After an outage the newest records are the more useful ones.
        """
        self.counters.add("received", len(records))
        with self._lock:
            before = len(self._queue)
            self._queue.extend(records)
            self._bytes += sum(map(len, records))
            while len(self._queue) > self.max_records or self._bytes > self.max_bytes:
                self._bytes -= len(self._queue.popleft())
                self.counters.add("overflowed")
            # Wake the worker for the first record and for a full batch only: a wake-up costs more
            # than appending a record.
            if not before or before < self._wanted_records <= len(self._queue):
                self._change.notify()

    def take_batch(self, max_records: int, wait_s: float) -> list[bytes]:
        """Wait for a record, then up to `wait_s` seconds for `max_records` of them; [] at the end."""
        with self._change:
            self._wanted_records = max_records
            self._change.wait_for(lambda: self._queue or self.ended.is_set())
            self._change.wait_for(
                lambda: len(self._queue) >= max_records or self.ended.is_set(), wait_s
            )
            count = min(max_records, len(self._queue))
            taken = [self._queue.popleft() for _ in range(count)]
            self._bytes -= sum(map(len, taken))
        return taken

    def __len__(self) -> int:
        return len(self._queue)
