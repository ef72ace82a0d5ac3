# SPDX-License-Identifier: Apache-2.0
"""What each engine core says of the requests in its queue, asked only while somebody looks.

asgi.py asks before vLLM shows /metrics, hooks/api_server.py for WAITING_PATH; meter.py shows the counts. An
engine core that hangs does not answer: its last word stays, with its age.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeAlias

from ttft_otel.model.stages import HOLDING_KIND_NAMES, WAIT_REASON_NAMES
from ttft_otel.tracing import carrier, clock
from ttft_otel.tracing.guard import Guard

EngineCall: TypeAlias = Callable[[], Awaitable[str]]

TRACE_ID_PLACE: Final = slice(3, 35)  # in a traceparent
# An engine core answers between two steps; a later answer is kept, too.
ANSWER_TIMEOUT_S: Final = 0.25
PAUSE_US: Final = 500_000  # between two questions, however often /metrics is read


class EngineQueues:
    """The latest report of each engine core, by its number."""

    def __init__(self) -> None:
        self.reports: dict[int, tuple[int, carrier.QueueReport]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._asked_us = 0

    async def ask(self, calls: Sequence[EngineCall]) -> None:
        """Ask all engine cores but those that have not answered yet; wait for at most ANSWER_TIMEOUT_S.

        Within PAUSE_US of the last question nobody is asked: the reports, with their ages, stay.
        """
        if (now := clock.now_us()) - self._asked_us >= PAUSE_US:
            self._asked_us = now
            for number, call in enumerate(calls):
                if number not in self._tasks:
                    self._tasks[number] = asyncio.ensure_future(self._ask_one(number, call))
        if self._tasks:
            await asyncio.wait([*self._tasks.values()], timeout=ANSWER_TIMEOUT_S)

    async def _ask_one(self, number: int, call: EngineCall) -> None:
        # A call that fails stays in _tasks: vLLM logs each call of a method that it does not have.
        with Guard("engine queues"):
            report = carrier.decode_answer(carrier.QueueReport, await call())
            if report is not None:
                self.reports[number] = (clock.now_us(), report)
            del self._tasks[number]

    def read(self, since: int) -> tuple[dict[str, int], float] | None:
        """How many requests wait for which reason, and the age of that in seconds; None: nobody was asked.

        since: when the oldest pending request came; what was said before is not about it.
        """
        if not self._tasks and not self.reports:
            return None
        found = dict.fromkeys(WAIT_REASON_NAMES, 0)
        oldest = now = clock.now_us()
        for number in {*self._tasks, *self.reports}:
            at, report = self.reports.get(number, (0, None))
            oldest = min(oldest, max(at, since))
            if report is not None and at >= since:
                for code, count in report.reasons.items():
                    found[WAIT_REASON_NAMES[code]] += count
        return found, (now - oldest) / 1e6

    def describe(self) -> list[dict[str, Any]]:
        """The reports as JSON objects, with the holders of the request that waits longest in each queue."""
        now = clock.now_us()
        return [
            {
                "age_s": (now - at) / 1e6,
                "waiting": {WAIT_REASON_NAMES[code]: n for code, n in report.reasons.items()},
                "holders": [
                    {
                        "request_id": request_id,
                        "trace_id": parent[TRACE_ID_PLACE],
                        "kind": HOLDING_KIND_NAMES[kind],
                        "held_s": us / 1e6,
                        "tokens": tokens,
                    }
                    for us, tokens, kind, request_id, parent in report.holders
                ],
            }
            for _, (at, report) in sorted(self.reports.items())
        ]


latest: Final = EngineQueues()
