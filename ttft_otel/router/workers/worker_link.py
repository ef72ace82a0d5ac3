# SPDX-License-Identifier: Apache-2.0
"""Joins one worker's router to the other workers: load, reports, metrics, operators' orders.

worker_server.py starts it on the event loop. load_link.py has the load; everything else that is said or
heard goes through worker_socket.py.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ttft_otel.model.names import metric_names
from ttft_otel.router.control.app import RouterApp
from ttft_otel.router.control.routing_metrics import build_counter
from ttft_otel.router.routing.prefixes.shared_index_source import SharedIndexSource
from ttft_otel.router.time_limits import wait_at_most
from ttft_otel.router.workers import messages, roster
from ttft_otel.router.workers.index_keeper import build_keeper_path
from ttft_otel.router.workers.load_link import LoadLink
from ttft_otel.router.workers.metrics_files import MetricsFiles
from ttft_otel.router.workers.supervisor import WorkerSeat
from ttft_otel.router.workers.worker_socket import WorkerSocket
from ttft_otel.tracing.guard import Guard

TOTALS_INTERVAL_S: Final = (
    1.0  # seconds between two comparisons of totals, and two files of metrics
)
ANSWER_TIMEOUT_S: Final = 1.0  # seconds for the others to answer a question

log: Final = logging.getLogger("ttft_otel")


class Companion(Protocol):
    """What a worker has besides the others: shared_state/store_link.py."""

    async def start(self) -> None:
        """The worker has joined the others."""
        ...

    async def close(self) -> None:
        """It leaves them."""
        ...


class WorkerLink:
    """What one worker and the others know of one another; `companion` starts and ends with it."""

    def __init__(self, seat: WorkerSeat, app: RouterApp) -> None:
        self.companion: Companion | None = None
        self.seat, self.app = seat, app
        self.pool = app.endpoint.upstream.pool
        source = app.endpoint.routing.prefix_source
        self.kept_source = source if isinstance(source, SharedIndexSource) else None
        self.socket = WorkerSocket(seat.folder, seat.number, seat.count, self.receive_frame)
        self.loads = LoadLink(seat, self.pool, app.endpoint.routing, self._ask_resync)
        self.metrics_files = MetricsFiles(seat.folder, seat.number)
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Queue[bytes]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._handlers: dict[type, Callable[[int, Any], None]] = {
            messages.Resync: lambda number, _: self.loads.tell_all_anew(number),
            messages.Order: lambda _, order: roster.follow_order(self.app, order),
            messages.Question: self._answer_question,
            messages.Answer: self._take_answer,
        }

    async def start(self) -> None:
        """Join the others; a successor takes over the instances that they have."""
        # First, so that what the others say from now on waits in it.
        self.socket.open()
        self.loads.start()
        self.pool.order_listeners.add(self._relay_order)
        self.app.endpoint.reports.ask_elsewhere = self._find_report
        self.app.metrics.merge_workers = self._merge_metrics
        if self.seat.is_successor:
            data = await self._ask_others("roster")
            if data:
                roster.apply_roster(self.app, data)
        if self.kept_source is not None:
            self.kept_source.join_owner(build_keeper_path(self.seat.folder))
        if self.companion is not None:
            await self.companion.start()
        # Last, as its file is also the sign for the supervisor that this worker has started.
        self._write_metrics(self.app.metrics.collect_own())
        self._tasks.append(asyncio.create_task(self._compare_forever()))

    async def close(self) -> None:
        """Leave; the others forget what was under way here."""
        if self.companion is not None:
            await self.companion.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # For the sum of the others, and for a successor.
        self._write_metrics(self.app.metrics.collect_own())
        self.loads.close()
        self.socket.close()

    def receive_frame(self, frame: messages.Frame) -> None:
        """Take in one datagram of another worker."""
        # One message that cannot be handled must not end the reading.
        with Guard("router.workers"):
            for message in frame.messages:
                self._handlers[type(message)](frame.seat, message)

    async def _compare_forever(self) -> None:
        while True:
            await asyncio.sleep(TOTALS_INTERVAL_S)
            with Guard("router.workers"):
                self.loads.tell_totals()
                self._write_metrics(self.app.metrics.collect_own())
                self.loads.forget_silent()

    def _ask_resync(self, number: int) -> None:
        self.socket.send([messages.Resync()], [number])

    def _relay_order(self, action: str, leg: str, url: str) -> None:
        # Before the operator has the answer: the next order may go to another worker.
        self.socket.send([messages.Order(action, leg, url)], self.socket.others)

    def _answer_question(self, number: int, question: messages.Question) -> None:
        data = b""
        if question.topic == "roster":
            data = roster.encode_roster(self.app)
        else:
            report = self.app.endpoint.reports.get_report(question.subject)
            data = b"" if report is None else msgspec.json.encode(report)
        self.socket.send([messages.Answer(question.number, data)], [number])

    def _take_answer(self, _: int, answer: messages.Answer) -> None:
        waiting = self._answers.get(answer.number)
        if waiting is not None:
            waiting.put_nowait(answer.data)

    async def _ask_others(self, topic: str, subject: str = "") -> bytes:
        """The first answer that is not empty; empty if there is none within ANSWER_TIMEOUT_S."""
        question = messages.Question(next(self._numbers), topic, subject)
        answers = self._answers[question.number] = asyncio.Queue()
        self.socket.send([question], self.socket.others)

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
        yield GaugeMetricFamily(
            metric_names.ROUTER_WORKERS, "Workers that serve the port.", value=1
        )
        restarts_help = "Workers that ended and were replaced."
        # 0 or 1 for each process: a successor inherits what was counted before it.
        yield CounterMetricFamily(
            metric_names.ROUTER_WORKER_RESTARTS, restarts_help, value=int(self.seat.is_successor)
        )
        lost_help = "Messages between workers that were given up; totals are compared each second."
        yield CounterMetricFamily(
            metric_names.ROUTER_WORKER_MESSAGES_LOST,
            lost_help,
            value=self.socket.lost + self.loads.lost,
        )
        if self.kept_source is not None and self.kept_source.channel is not None:
            lookups_help = (
                "Prompts that were looked up in the index of KV events, by what came of it."
            )
            yield build_counter(
                metric_names.ROUTER_INDEX_LOOKUPS,
                lookups_help,
                "result",
                self.kept_source.channel.counts,
            )
