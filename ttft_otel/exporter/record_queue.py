# SPDX-License-Identifier: Apache-2.0
"""A bounded queue of records, filled from the socket and emptied by export_worker.py; its counters.

The counters are in the memory page that the exporter shares with its host, which reads it for its /metrics.
"""

from __future__ import annotations

import logging
import mmap
import socket
import threading
import time
from collections import deque
from typing import Final

from ttft_otel.tracing.handoff import SHARED_COUNTERS, SHARED_LAYOUT

log = logging.getLogger("ttft_otel")
# The line goes to the server's log, where an outage must not bury the server's own lines.
LOG_PAUSE_S: Final = 60.0  # seconds between two log lines about losses, at least

_CELL_INDEX: Final = {name: number for number, name in enumerate(SHARED_COUNTERS)}
# Not `merged`: there a label is lost, and no request.
_LOSS_NAMES: Final = ("foreign", "overflowed", "failed")


class ExporterCounters:
    """Counters of one exporter; they continue those of an earlier exporter of the same host.

    page: file descriptor of the shared page, -1 for private memory. Each name is written by one thread
    only, so that no lock is needed: `received` and `overflowed` by the reader, the others by the worker.
    """

    def __init__(self, page: int = -1) -> None:
        self._page = mmap.mmap(page, mmap.PAGESIZE)
        # 64-bit cells at fixed places: the host reads them without a lock or a message.
        self._cells = memoryview(self._page)[: SHARED_LAYOUT.size].cast("Q")
        # A restarted exporter finds its predecessor's losses in the page: those are old news.
        self._logged_losses = self._read_losses()
        self._next_log_at = 0.0

    def add(self, name: str, number: int = 1) -> None:
        """Add `number` to the counter `name`, one of SHARED_COUNTERS."""
        self._cells[_CELL_INDEX[name]] += number

    def get_counts(self) -> dict[str, int]:
        return dict(zip(SHARED_COUNTERS, self._cells, strict=True))

    def log_losses(self, final: bool = False) -> None:
        """Log new losses in one line, at most once per LOG_PAUSE_S; with `final` at once."""
        losses = self._read_losses()
        moment = time.monotonic()
        if losses != self._logged_losses and (final or moment >= self._next_log_at):
            self._logged_losses = losses
            self._next_log_at = moment + LOG_PAUSE_S
            counts = self.get_counts()
            log.warning(
                "ttft-otel exporter: %d spans exported, %d lost; of %d records %d were dropped from "
                "the full queue and %d could not be decoded",
                *(
                    counts[name]
                    for name in ("exported", "failed", "received", "overflowed", "foreign")
                ),
            )

    def _read_losses(self) -> tuple[int, ...]:
        return tuple(self._cells[_CELL_INDEX[name]] for name in _LOSS_NAMES)


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
