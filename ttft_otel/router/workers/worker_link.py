# SPDX-License-Identifier: Apache-2.0
"""Joins one worker's router to the other workers: load, reports, metrics, operators' orders.

worker_server.py starts it on the event loop; everything it says or hears goes through worker_socket.py.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ttft_otel import clock, names
from ttft_otel.guard import Guard
from ttft_otel.router.control.app import RouterApp
from ttft_otel.router.time_limits import wait_at_most
from ttft_otel.router.workers import messages, roster
from ttft_otel.router.workers.metrics_files import MetricsFiles
from ttft_otel.router.workers.own_loads import OwnLoads
from ttft_otel.router.workers.sibling_loads import SiblingLoads
from ttft_otel.router.workers.supervisor import WorkerSeat
from ttft_otel.router.workers.worker_socket import MAX_BATCH, WorkerSocket

TOTALS_INTERVAL_S: Final = (
    1.0  # seconds between two comparisons of totals, and two files of metrics
)
SILENCE_S: Final = 5.0  # seconds after which what a silent worker had under way is forgotten
ANSWER_TIMEOUT_S: Final = 1.0  # seconds for the others to answer a question

log: Final = logging.getLogger("ttft_otel")


class WorkerLink:
    """What one worker and the others know of one another."""

    def __init__(self, seat: WorkerSeat, app: RouterApp) -> None:
        self.seat, self.app = seat, app
        upstream, routing = app.endpoint.upstream, app.endpoint.routing
        self.pool = upstream.pool
        self.socket = WorkerSocket(seat.folder, seat.number, seat.count, self.receive_frame)
        self.own = OwnLoads(self.pool, routing, self.socket.send)
        self.siblings = SiblingLoads(
            self.pool.find_instance, lambda leg: routing.get_leg_policy(leg).state
        )
        self.metrics_files = MetricsFiles(seat.folder, seat.number)
        self._processes: dict[int, int] = {}  # process by seat
        self._heard_s: dict[int, float] = {}
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Queue[bytes]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._handlers: dict[type, Callable[[int, Any], None]] = {
            messages.Sent: self.siblings.apply_sent,
            messages.FirstToken: self.siblings.apply_first_token,
            messages.Ended: self.siblings.apply_ended,
            messages.Totals: self._compare_totals,
            messages.Resync: self._send_all,
            messages.Reset: lambda number, _: self.siblings.drop_seat(number, clock.now_us()),
            messages.Order: lambda _, order: roster.follow_order(self.app, order),
            messages.Question: self._answer_question,
            messages.Answer: self._take_answer,
        }

    async def start(self) -> None:
        """Join the others; a successor takes over the instances that they have."""
        # First, so that what the others say from now on waits in it.
        self.socket.open()
        self.own.start()
        self.pool.order_listeners.add(self._relay_order)
        self.pool.change_listeners.add(self.siblings.sync_instances)
        self.app.endpoint.reports.ask_elsewhere = self._find_report
        self.app.metrics.merge_workers = self._merge_metrics
        # Who joins has missed all that is under way.
        self.socket.send_now([messages.Resync()], self.socket.others)
        if self.seat.is_successor:
            data = await self._ask_others("roster")
            if data:
                roster.apply_roster(self.app, data)
        # Last, as its file is also the sign for the supervisor that this worker has started.
        self._write_metrics(self.app.metrics.collect_own())
        self._tasks.append(asyncio.create_task(self._compare_forever()))

    async def close(self) -> None:
        """Leave; the others forget what was under way here once they hear nothing more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # For the sum of the others, and for a successor.
        self._write_metrics(self.app.metrics.collect_own())
        # Told, so that they do not count it until SILENCE_S is over.
        self.socket.send_now([messages.Reset()], self.socket.others)
        self.socket.close()

    def receive_frame(self, frame: messages.Frame) -> None:
        """Take in one datagram of another worker."""
        # One message that cannot be handled must not end the reading.
        with Guard("router.workers"):
            # Another process on that seat: what was under way there ended with the first one.
            if self._processes.get(frame.seat) != frame.process:
                self._processes[frame.seat] = frame.process
                self.siblings.drop_seat(frame.seat, clock.now_us())
            self._heard_s[frame.seat] = time.monotonic()
            for message in frame.messages:
                self._handlers[type(message)](frame.seat, message)

    async def _compare_forever(self) -> None:
        while True:
            await asyncio.sleep(TOTALS_INTERVAL_S)
            with Guard("router.workers"):
                # Sent behind what was said before, as totals are of this moment.
                self.socket.send(self.own.build_totals())
                self._write_metrics(self.app.metrics.collect_own())
                self._forget_silent()

    def _forget_silent(self) -> None:
        moment = time.monotonic()
        for number, heard_s in list(self._heard_s.items()):
            if moment - heard_s > SILENCE_S:
                # Should it be back, its totals will not agree, and it is asked for all.
                del self._heard_s[number]
                self.siblings.drop_seat(number, clock.now_us())

    def _compare_totals(self, number: int, totals: messages.Totals) -> None:
        if not self.siblings.agrees_with(number, totals):
            self.socket.send_now([messages.Resync()], [number])

    def _send_all(self, number: int, _: messages.Resync) -> None:
        # All anew, as there may be too much or too little.
        self.socket.send_now([messages.Reset()], [number])
        under_way = self.own.list_open()
        for start in range(0, len(under_way), MAX_BATCH):
            self.socket.send_now(under_way[start : start + MAX_BATCH], [number])

    def _relay_order(self, action: str, leg: str, url: str) -> None:
        # Before the operator has the answer: the next order may go to another worker.
        self.socket.send_now([messages.Order(action, leg, url)], self.socket.others)

    def _answer_question(self, number: int, question: messages.Question) -> None:
        data = b""
        if question.topic == "roster":
            data = roster.encode_roster(self.app)
        else:
            report = self.app.endpoint.reports.get_report(question.subject)
            data = b"" if report is None else msgspec.json.encode(report)
        self.socket.send_now([messages.Answer(question.number, data)], [number])

    def _take_answer(self, _: int, answer: messages.Answer) -> None:
        waiting = self._answers.get(answer.number)
        if waiting is not None:
            waiting.put_nowait(answer.data)

    async def _ask_others(self, topic: str, subject: str = "") -> bytes:
        """The first answer that is not empty; empty if there is none within ANSWER_TIMEOUT_S."""
        question = messages.Question(next(self._numbers), topic, subject)
        answers = self._answers[question.number] = asyncio.Queue()
        self.socket.send_now([question], self.socket.others)

        async def take_first() -> bytes:
            # Each answers once, and all but one with nothing.
            for _ in self.socket.others:
                if data := await answers.get():
                    return data
            return b""

        try:
            return await wait_at_most(take_first(), ANSWER_TIMEOUT_S)
        except asyncio.TimeoutError:
            return b""
        finally:
            del self._answers[question.number]

    async def _find_report(self, request_id: str) -> dict[str, Any] | None:
        data = await self._ask_others("report", request_id)
        return msgspec.json.decode(data, type=dict[str, Any]) if data else None

    def _merge_metrics(self, own: Iterator[Metric]) -> Iterator[Metric]:
        self._write_metrics(own)
        return self.metrics_files.collect_all()

    def _write_metrics(self, own: Iterator[Metric]) -> None:
        urls = {each.url for each in self.pool}
        self.metrics_files.write_own(itertools.chain(own, self._collect_workers()), urls)

    def _collect_workers(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(names.METRIC_WORKERS, "Workers that serve the port.", value=1)
        restarts_help = "Workers that ended and were replaced."
        # 0 or 1 for each process: a successor inherits what was counted before it.
        yield CounterMetricFamily(
            names.METRIC_WORKER_RESTARTS, restarts_help, value=int(self.seat.is_successor)
        )
        lost_help = (
            "Datagrams to another worker that were given up; totals are compared each second."
        )
        yield CounterMetricFamily(
            names.METRIC_WORKER_MESSAGES_LOST, lost_help, value=self.socket.lost
        )
