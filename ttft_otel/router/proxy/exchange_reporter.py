# SPDX-License-Identifier: Apache-2.0
"""Reports the first tokens and the ends of exchanges, after what they report has left the router.

endpoint.py says what has happened; the exporter gets the records, /ttft_report the breakdowns.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from operator import itemgetter
from typing import Any, Final, TypeAlias

from ttft_otel.model.breakdown import Breakdown
from ttft_otel.model.ttft_report import StageSums, build_ttft_report
from ttft_otel.router.exchange import Exchange
from ttft_otel.router.records import encode_known_parts
from ttft_otel.router.timeline import RequestTimeline, partition_timeline
from ttft_otel.tracing import clock
from ttft_otel.tracing.guard import Guard

MAX_REPORTS: Final = 10_000  # requests kept for /ttft_report, about 2 KB each

# When its request had its first token, in µs of CLOCK_MONOTONIC, and what /ttft_report shows.
DatedReport: TypeAlias = tuple[int, dict[str, Any]]
ReportFinder = Callable[[str, str], Awaitable[list[DatedReport]]]


class RecentReports:
    """Breakdowns of the latest `max_reports` requests, by request ID and owner.

    An owner is who has sent the request, as admission.py tells by its key: "" where keys are not checked.
    Of several requests with one ID it is the newest; without an owner the first one, as nobody can tell
    whether the others are the same caller's.
    """

    def __init__(self, max_reports: int = MAX_REPORTS) -> None:
        self.max_reports = max_reports
        self.ask_elsewhere: ReportFinder | None = None  # of other workers, with --workers
        self._reports: OrderedDict[tuple[str, str], tuple[int, dict[str, StageSums], StageSums]] = (
            OrderedDict()
        )

    def __len__(self) -> int:
        return len(self._reports)

    def add_report(
        self, owner: str, request_id: str, timeline: RequestTimeline, breakdown: Breakdown
    ) -> None:
        """Keep the breakdown of `request_id`: of each leg on the critical path, and of the whole."""
        key = owner, request_id
        if not owner and key in self._reports:
            return
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
        self._reports[key] = (breakdown.end, legs, totals)
        # An ID that is used again is the newest: assignment alone would leave it in its old place.
        self._reports.move_to_end(key)
        while len(self._reports) > self.max_reports:
            self._reports.popitem(last=False)

    def get_report(self, owner: str, request_id: str) -> DatedReport | None:
        """The owner's report of `request_id`; None if it is unknown or no longer kept."""
        kept = self._reports.get((owner, request_id))
        return None if kept is None else (kept[0], build_ttft_report(request_id, *kept[1:]))

    async def find_report(self, owner: str, request_id: str) -> dict[str, Any] | None:
        """The same without its time, of all workers of this router."""
        own = self.get_report(owner, request_id)
        found = [] if own is None else [own]
        if self.ask_elsewhere is not None:
            found += await self.ask_elsewhere(owner, request_id)
        choose = max if owner else min
        return choose(found, key=itemgetter(0))[1] if found else None


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
                    breakdown = partition_timeline(exchange.timeline)
                    # Whoever has no key must not push out the reports of those who have one.
                    if exchange.owner is not None:
                        self.reports.add_report(
                            exchange.owner, exchange.request_id, exchange.timeline, breakdown
                        )
                    exchange.record_ttft_reported()
                if breakdown is None and not ended_us:
                    continue
                data = encode_known_parts(exchange, breakdown, ended_us, self.counts_all)
                if data:
                    self.send_record(data)
