# SPDX-License-Identifier: Apache-2.0
"""Reports the first tokens and the ends of exchanges, after what they report has left the router.

endpoint.py says what has happened; the exporter gets the records, /ttft_report the breakdowns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ttft_otel.model.breakdown import Breakdown
from ttft_otel.router.exchange import Exchange
from ttft_otel.router.recent_reports import RecentReports
from ttft_otel.router.records import encode_known_parts
from ttft_otel.router.stage_partition import partition_timeline
from ttft_otel.tracing import clock
from ttft_otel.tracing.guard import Guard


class ExchangeReporter:
    """Reports what happened in one turn of the event loop together, at its end.

    One after the other that costs half as much, as code and data of the last one are still in the
    processor's caches; and no first token of another request waits for it. send_record: takes a Record's
    bytes and never waits. counts_all: metrics count every request, sampled or not.
    """

    def __init__(
        self, send_record: Callable[[bytes], bool], reports: RecentReports, counts_all: bool
    ) -> None:
        self.send_record = send_record
        self.reports = reports
        self.counts_all = counts_all
        self._waiting: list[tuple[Exchange, int]] = []  # and when it ended, 0 for its first token

    def report_first_token(self, exchange: Exchange) -> None:
        """The first token of a stream is out: its TTFT is reported before a crash can lose it."""
        self._add(exchange, 0)

    def report_end(self, exchange: Exchange) -> None:
        """It is over, however it ended."""
        self._add(exchange, clock.now_us())

    def _add(self, exchange: Exchange, ended_us: int) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._report_waiting)
        self._waiting.append((exchange, ended_us))

    def _report_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for exchange, ended_us in waiting:
            with Guard("router.end" if ended_us else "router.first"):
                if ended_us:
                    exchange.record_ended(ended_us)
                breakdown = None
                if exchange.has_ttft and not exchange.has_reported_ttft:
                    breakdown = self._report_ttft(exchange)
                if breakdown is None and not ended_us:
                    continue
                data = encode_known_parts(exchange, breakdown, ended_us, self.counts_all)
                if data:
                    self.send_record(data)

    def _report_ttft(self, exchange: Exchange) -> Breakdown:
        breakdown = partition_timeline(exchange.timeline)
        # Whoever has no key must not push out the reports of those who have one.
        if exchange.owner is not None:
            self.reports.add_report(
                exchange.owner, exchange.request_id, exchange.timeline, breakdown
            )
        exchange.record_ttft_reported()
        return breakdown
