# SPDX-License-Identifier: Apache-2.0
"""The exporter's counters, in the memory page that it shares with its host.

record_queue.py and batch_exporter.py count; the host reads the page for its /metrics.
"""

from __future__ import annotations

import logging
import mmap
import time
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
