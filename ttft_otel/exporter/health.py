# SPDX-License-Identifier: Apache-2.0
"""Counts what became of the records, in the page that handoff.py shares with its host.

inbox.py and ship.py count; the host reads the page for its metrics; losses are logged, rarely.
"""

from __future__ import annotations

import logging
import mmap
import time
from typing import Final

from ttft_otel.handoff import LAYOUT, SHARED

log = logging.getLogger("ttft_otel")
PAUSE: Final = 60.0  # seconds between two lines about losses

_PLACE: Final = {name: number for number, name in enumerate(SHARED)}
_LOSSES: Final = ("foreign", "overflowed", "failed")


class Health:
    """Counters of one exporter; they go on from where a predecessor of the same host stopped.

    One thread per name: the reader counts `received` and `overflowed`, the shipper the others.
    """

    def __init__(self, page: int = -1) -> None:
        self._page = mmap.mmap(page, mmap.PAGESIZE)
        self._cells = memoryview(self._page)[: LAYOUT.size].cast("Q")
        self._told = self._losses()
        self._next = 0.0

    def add(self, name: str, number: int = 1) -> None:
        """Count."""
        self._cells[_PLACE[name]] += number

    def counts(self) -> dict[str, int]:
        """All counters by name."""
        return dict(zip(SHARED, self._cells, strict=True))

    def tell(self, last: bool = False) -> None:
        """Log losses in one line, at most once per PAUSE; `last`: now."""
        losses = self._losses()
        moment = time.monotonic()
        if losses != self._told and (last or moment >= self._next):
            self._told, self._next = losses, moment + PAUSE
            counts = self.counts()
            log.warning(
                "ttft-otel exporter: %d spans exported, %d lost; of %d records %d found no room "
                "and %d were unreadable",
                *(
                    counts[name]
                    for name in ("exported", "failed", "received", "overflowed", "foreign")
                ),
            )

    def _losses(self) -> tuple[int, ...]:
        return tuple(self._cells[_PLACE[name]] for name in _LOSSES)
