# SPDX-License-Identifier: Apache-2.0
"""Keeps breakdowns of the latest requests; exchange_reporter.py adds them, GET /ttft_report reads them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final

from ttft_otel.model.breakdown import Breakdown
from ttft_otel.model.ttft_report import StageSums, build_ttft_report
from ttft_otel.router.timeline import RequestTimeline

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
