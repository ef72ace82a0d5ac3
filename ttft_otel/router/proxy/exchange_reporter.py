# SPDX-License-Identifier: Apache-2.0
"""Reports the first tokens and the ends of exchanges, after what they report has left the router.

endpoint.py says what has happened; the exporter gets the records, /ttft_report the breakdowns.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final

from ttft_otel.model.breakdown import Breakdown
from ttft_otel.model.ttft_report import StageSums, build_ttft_report
from ttft_otel.router.exchange import Exchange
from ttft_otel.router.records import encode_known_parts
from ttft_otel.router.timeline import RequestTimeline, partition_timeline
from ttft_otel.tracing import clock
from ttft_otel.tracing.guard import Guard

MAX_REPORTS: Final = 10_000  # requests kept for /ttft_report, about 2 KB each

ReportFinder = Callable[[str, str], Awaitable[dict[str, Any] | None]]


class RecentReports:
    """Breakdowns of the latest `max_reports` requests, by request ID and owner.

    An owner is who has sent the request, as admission.py tells by its key: "" where keys are not checked.
    """

    def __init__(self, max_reports: int = MAX_REPORTS) -> None:
        self.max_reports = max_reports
        self.ask_elsewhere: ReportFinder | None = None  # of other workers, with --workers
        self._reports: OrderedDict[tuple[str, str], tuple[dict[str, StageSums], StageSums]] = (
            OrderedDict()
        )

    def __len__(self) -> int:
        return len(self._reports)

    def add_report(
        self, owner: str, request_id: str, timeline: RequestTimeline, breakdown: Breakdown
    ) -> None:
        """Keep the breakdown of `request_id`: of each leg on the critical path, and of the whole."""
        legs: dict[str, StageSums] = {}
        for attempt in (chain[-1] for chain in timeline.critical_path if chain):
            if (server_timing := attempt.read_server_timing()) is not None:
                legs[attempt.leg] = StageSums(
                    stages=server_timing.stages,
                    unattributed=server_timing.unattributed,
                    ttft=server_timing.ttft,
                )
        totals = StageSums(
            stages=breakdown.stages,
            unattributed=breakdown.unattributed,
            ttft=breakdown.end - breakdown.start,
        )
        key = owner, request_id
        self._reports[key] = (legs, totals)
        # An ID that is used again is the newest: assignment alone would leave it in its old place.
        self._reports.move_to_end(key)
        while len(self._reports) > self.max_reports:
            self._reports.popitem(last=False)

    def get_report(self, owner: str, request_id: str) -> dict[str, Any] | None:
        """The owner's /ttft_report of `request_id`; None if it is unknown or no longer kept."""
        report = self._reports.get((owner, request_id))
        return None if report is None else build_ttft_report(request_id, *report)

    async def find_report(self, owner: str, request_id: str) -> dict[str, Any] | None:
        """The same, of whichever worker of this router has it."""
        report = self.get_report(owner, request_id)
        if report is None and self.ask_elsewhere is not None:
            return await self.ask_elsewhere(owner, request_id)
        return report


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
