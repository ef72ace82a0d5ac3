# SPDX-License-Identifier: Apache-2.0
"""One worker: its server on the shared port, joined to the other workers; command.py runs it.

The load, reports, operators' orders and the instances of a successor go through messages.py, metrics through
memory that all share: who is scraped adds them up. The successor of a dead worker goes on from its counters.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import operator
import signal
import socket
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Final, TypeAlias

import msgspec
from prometheus_client.core import Metric

from ttft_otel.model.names import metric_names
from ttft_otel.router.control.admin import apply_order
from ttft_otel.router.control.app import RouterApp
from ttft_otel.router.control.uvicorn_server import DrainingServer, ServerPlan, run_router_server
from ttft_otel.router.discovery.discovery import end_tasks
from ttft_otel.router.errors import RequestRejected
from ttft_otel.router.proxy.exchange_reporter import DatedReport
from ttft_otel.router.time_limits import wait_at_most
from ttft_otel.router.types import parse_instance_url
from ttft_otel.router.workers import messages
from ttft_otel.router.workers.supervisor import SharedMemory, WorkerSlot, bind_shared_port
from ttft_otel.tracing import clock
from ttft_otel.tracing.guard import Guard
from ttft_otel.tracing.meter import build_counter, build_gauge

# Seconds between two comparisons of totals, and until metrics are written anew.
TOTALS_INTERVAL_S: Final = 1.0
ANSWER_TIMEOUT_S: Final = 1.0  # seconds for the others to answer a question
MAX_ORDERS: Final = 1024  # that a worker keeps for others that have missed some
# Gauges of which each worker has a part; of the others each has the whole, or its own opinion.
SUMMED_GAUGES: Final = {
    metric_names.ROUTER_REQUESTS_IN_FLIGHT,
    metric_names.ROUTER_IN_FLIGHT,
    metric_names.ROUTER_RETRY_BUDGET,
    metric_names.ROUTER_WORKERS,
}
# Counters of what happens to each of them at once: the largest is right, the sum is not.
COMMON_COUNTERS: Final = {metric_names.ROUTER_RELOADS, metric_names.ROUTER_KV_EVENTS}

# A worker's instances for a successor: leg, URL and whether it drains; and roles by URL of those that
# sources named.
InstanceSet: TypeAlias = tuple[list[tuple[str, str, bool]], dict[str, str]]
SampleKey: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]  # name, labels in order
# Name, help text and kind of a metric, and its samples.
Family: TypeAlias = tuple[str, str, str, list[tuple[SampleKey, float]]]

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(list[Family])

log: Final = logging.getLogger("ttft_otel")


class WorkerLink:
    """What one worker and the others know of one another.

    companion: what starts and ends with it, None without --shared-state.
    """

    def __init__(self, slot: WorkerSlot, app: RouterApp) -> None:
        self.companion: AbstractAsyncContextManager[None] | None = None
        self.slot = slot
        self._own = slot.shared.numbers[slot.number]
        self.app = app
        self.pool = app.endpoint.upstream.pool
        self.socket = messages.WorkerSocket(slot.sockets, slot.number, self.receive_messages)
        self.loads = messages.LoadLink(
            self.pool, app.endpoint.routing, self.socket.others, self.socket.send
        )
        self._inherited = read_counters(slot.shared, slot.number)
        # Not from 1: an answer to a predecessor may come late.
        self._numbers = itertools.count(clock.now_us())
        self._orders: deque[messages.Order] = deque(maxlen=MAX_ORDERS)  # that this worker has given
        # The latest order of each other worker up to which none is missing here. A successor gets what came
        # of earlier ones with the instances.
        self._orders_taken = {
            number: slot.shared.numbers[number].orders if slot.is_successor else 0
            for number in self.socket.others
        }
        self._missed_orders: set[int] = set()  # workers of which some were missing a moment ago
        self._answers: dict[int, asyncio.Queue[bytes]] = {}
        self._stack = AsyncExitStack()
        self._handlers: dict[type, Callable[[int, Any], None]] = {
            messages.Order: self._take_order,
            messages.Question: self._answer_question,
            messages.Answer: self._take_answer,
            **self.loads.handlers,
        }

    async def start(self) -> None:
        """Join the others; a successor takes over the instances that they have."""
        # First, so that what the others send from now on waits in it.
        self.socket.open()
        self.loads.start()
        self.pool.order_listeners.add(self._relay_order)
        self.app.endpoint.reports.ask_elsewhere = self._find_report
        self.app.metrics.merge_workers = self._merge_metrics
        if self.slot.is_successor:
            for data in await self._ask_others("instances", wanted=1):
                apply_instances(self.app, data)
        tasks: list[asyncio.Task[None]] = []
        # Pushed first, hence ended last: while the companion closes, the others still see this worker alive.
        self._stack.push_async_callback(end_tasks, tasks)
        if self.companion is not None:
            await self._stack.enter_async_context(self.companion)
        self._write_metrics(self.app.metrics.collect_own())
        # Last, as it is also the sign for the supervisor that this worker has started.
        self._own.heartbeat = clock.now_us()
        tasks.append(asyncio.create_task(self._compare_forever()))

    async def close(self) -> None:
        """Leave; the others forget what was under way here."""
        await self._stack.aclose()
        # For the sum of the others, and for a successor.
        self._write_metrics(self.app.metrics.collect_own())
        self.loads.close()
        self.socket.close()

    def receive_messages(self, sender: int, received: list[messages.Message]) -> None:
        # One message that cannot be handled must not end the reading.
        with Guard("router.workers"):
            for message in received:
                self._handlers[type(message)](sender, message)

    async def _compare_forever(self) -> None:
        while True:
            self._own.heartbeat = clock.now_us()
            await asyncio.sleep(TOTALS_INTERVAL_S)
            with Guard("router.workers"):
                self._ask_for_orders()
                self.loads.tell_totals()
                self._write_metrics(self.app.metrics.collect_own())
                for number in filter(self.slot.shared.is_silent, self.socket.others):
                    self.loads.forget_worker(number)

    def _relay_order(self, action: str, leg: str, url: str) -> None:
        self._own.orders += 1
        order = messages.Order(action, leg, url, self._own.orders)
        self._orders.append(order)
        # Before the operator has the answer: the next order may go to another worker.
        self.socket.send([order], self.socket.others)

    def _take_order(self, sender: int, order: messages.Order) -> None:
        taken = self._orders_taken[sender]
        # One that comes twice was asked for; one after a gap waits until what is missing was asked for.
        if order.number == taken + 1:
            self._orders_taken[sender] = order.number
            # Not by the handlers, whose listeners would send it to the others once more.
            try:
                instance = parse_instance_url(order.url, order.leg)
                apply_order(self.app.endpoint.upstream.pool, order.action, instance)
            # This worker may have other instances for a moment: one order must not end it.
            except (RequestRejected, ValueError) as error:
                log.warning(
                    "ttft-otel: %s of %s, which another worker did, failed here: %s",
                    order.action,
                    order.url,
                    error,
                )

    def _ask_for_orders(self) -> None:
        """Ask workers that have given orders which have not come here, though there was time for it."""
        missed = set()
        for number, taken in self._orders_taken.items():
            if self.slot.shared.numbers[number].orders == taken:
                continue
            missed.add(number)
            if number in self._missed_orders:
                self.socket.send([messages.Question(0, "orders", str(taken))], [number])
        self._missed_orders = missed

    def _repeat_orders(self, number: int, taken: int) -> None:
        """Give the worker on slot `number` the orders after the one that it has taken last."""
        orders = [each for each in self._orders if each.number > taken]
        if orders and orders[0].number == taken + 1:
            self.socket.send(orders, [number])
            return
        # They were a predecessor's, or too many: nobody has them any more but as their results.
        instances = messages.Answer(-self._own.orders, encode_instances(self.app))
        self.socket.send([instances], [number])

    def _answer_question(self, number: int, question: messages.Question) -> None:
        if question.topic == "load":
            self.loads.tell_all(number)
        elif question.topic == "orders":
            self._repeat_orders(number, int(question.subject))
        else:
            data = b""
            owner, _, request_id = question.subject.partition(" ")
            if question.topic == "instances":
                data = encode_instances(self.app)
            elif (report := self.app.endpoint.reports.get_report(owner, request_id)) is not None:
                data = msgspec.json.encode(report)
            self.socket.send([messages.Answer(question.number, data)], [number])

    def _take_answer(self, sender: int, answer: messages.Answer) -> None:
        if answer.number < 0:  # to _ask_for_orders()
            self._orders_taken[sender] = -answer.number
            apply_instances(self.app, answer.data)
        elif (waiting := self._answers.get(answer.number)) is not None:
            waiting.put_nowait(answer.data)

    async def _ask_others(self, topic: str, subject: str = "", wanted: int = 0) -> list[bytes]:
        """Answers that are not empty and come within ANSWER_TIMEOUT_S: so many, or all for 0."""
        question = messages.Question(next(self._numbers), topic, subject)
        answers = self._answers[question.number] = asyncio.Queue()
        self.socket.send([question], self.socket.others)
        found: list[bytes] = []

        async def take_answers() -> None:
            # Each answers once, some with nothing.
            for _ in self.socket.others:
                if data := await answers.get():
                    found.append(data)
                    if len(found) == wanted:
                        return

        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await wait_at_most(take_answers(), ANSWER_TIMEOUT_S)
        finally:
            del self._answers[question.number]
        return found

    async def _find_report(self, owner: str, request_id: str) -> list[DatedReport]:
        found = await self._ask_others("report", f"{owner} {request_id}")
        return [msgspec.json.decode(data, type=DatedReport) for data in found]

    def _merge_metrics(self, own: Iterator[Metric]) -> Iterator[Metric]:
        self._write_metrics(own)
        return collect_all(self.slot.shared, self.slot.number)

    def _write_metrics(self, own: Iterator[Metric]) -> None:
        metrics, urls = [*own, *self._collect_workers()], {each.url for each in self.pool}
        write_metrics(self.slot.shared, self.slot.number, metrics, self._inherited, urls)

    def _collect_workers(self) -> Iterator[Metric]:
        yield build_gauge(metric_names.ROUTER_WORKERS, "Workers that serve the port.", 1)
        help_text = "Workers that ended and were replaced."
        # 0 or 1 for each process: a successor inherits what was counted before it.
        restarts = int(self.slot.is_successor)
        yield build_counter(metric_names.ROUTER_WORKER_RESTARTS, help_text, restarts)
        help_text = "Messages between workers that were given up; totals are compared each second."
        yield build_counter(metric_names.ROUTER_WORKER_MESSAGES_LOST, help_text, self.socket.lost)


class WorkerServer(DrainingServer):
    """A draining server that is linked to the other workers while it serves.

    It drains too when its supervisor is gone: nobody would replace it, nor pass signals on.
    """

    def __init__(self, app: RouterApp, plan: ServerPlan, link: WorkerLink) -> None:
        super().__init__(app, plan)
        self.link = link

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Join the others, then listen on `sockets`: a successor first takes over their instances."""
        start_app = self.lifespan.startup

        async def start_and_join() -> None:
            await start_app()
            if not self.lifespan.should_exit:
                await self.link.start()

        # Between the application's start and the first connection uvicorn offers no other place.
        self.lifespan.startup = start_and_join
        await super().startup(sockets)
        # Nobody writes to it: it is readable when the supervisor is gone.
        asyncio.get_running_loop().add_reader(self.link.slot.lifeline_fd, self._leave_orphaned)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().remove_reader(self.link.slot.lifeline_fd)
        # Linked until the last request is over, whose end is reported to the others.
        await super().shutdown(sockets)
        await self.link.close()

    def _leave_orphaned(self) -> None:
        # An end of file stays readable: this would be called in every turn of the loop.
        asyncio.get_running_loop().remove_reader(self.link.slot.lifeline_fd)
        # If it drains already, a second signal would end it at once.
        if not self.stop_requested_s:
            log.error("ttft-otel: the supervisor of the workers is gone: this one drains and ends")
            signal.raise_signal(signal.SIGTERM)


def run_worker_server(
    slot: WorkerSlot,
    build_companion: Callable[[WorkerLink], AbstractAsyncContextManager[None] | None],
    app: RouterApp,
    plan: ServerPlan,
) -> None:
    link = WorkerLink(slot, app)
    link.companion = build_companion(link)
    build_server = functools.partial(WorkerServer, link=link)
    run_router_server(app, plan, build_server, bind_shared_port(plan.host, plan.port))


def encode_instances(app: RouterApp) -> bytes:
    roles = {} if app.discovery is None else app.discovery.map_roles()
    members = [
        (each.leg, each.url, each.state == "draining") for each in app.endpoint.upstream.pool
    ]
    return msgspec.msgpack.encode((members, roles))


def apply_instances(app: RouterApp, data: bytes) -> None:
    """Have the instances of another worker: operators' orders are in no configuration."""
    members, roles = msgspec.msgpack.decode(data, type=InstanceSet)
    pool = app.endpoint.upstream.pool
    # Those of sources first: these go when no source names them any more.
    if app.discovery is not None:
        for url, role in roles.items():
            with contextlib.suppress(ValueError):  # it does not fit beside this worker's own
                app.discovery.add_instance(role, url)
    for leg, url, is_draining in members:
        instance = pool.find_instance(leg, url)
        # Of no source: an operator added it.
        if instance is None:
            instance = parse_instance_url(url, leg)
            pool.add_instance(instance)
        if is_draining:
            pool.set_draining(instance, True)
    # What goes comes last, so that no leg is empty in between.
    staying = {(leg, url) for leg, url, _ in members}
    for instance in list(pool):
        if (instance.leg, instance.url) not in staying:
            pool.remove_instance(instance)


def read_counters(shared: SharedMemory, slot: int) -> list[Family]:
    """What was counted on a slot. Gauges ended with their worker; what it counted belongs to the router."""
    return [each for each in _read_families(shared, slot) if each[2] == "counter"]


def write_metrics(
    shared: SharedMemory,
    slot: int,
    metrics: Iterable[Metric],
    inherited: Iterable[Family],
    urls: Collection[str],
) -> None:
    """Write a worker's `metrics` together with the counters that it `inherited`.

    urls: of the instances that there are: inherited samples of others would stay for ever.
    """
    present = {None, *urls}
    kept = [
        (*family[:3], [each for each in family[3] if dict(each[0][1]).get("instance") in present])
        for family in inherited
    ]
    own = [
        (
            each.name,
            each.documentation,
            each.type,
            # Sorted, or one sample could have two keys.
            [((it.name, tuple(sorted(it.labels.items()))), float(it.value)) for it in each.samples],
        )
        for each in metrics
    ]
    # What one process counted, its predecessor had not.
    merged = _merge_families([*kept, *own], is_sum=lambda _: True)
    shared.write_metrics(slot, _ENCODER.encode(merged))


def collect_all(shared: SharedMemory, slot: int) -> Iterator[Metric]:
    """The metrics of all workers as one, for the worker on `slot`."""
    families: list[Family] = []
    for each in range(len(shared.numbers)):
        # Counters stay also of a worker that hangs, or the sum would fall.
        is_gone = each != slot and shared.is_silent(each)
        families += read_counters(shared, each) if is_gone else _read_families(shared, each)
    for name, help_text, kind, samples in _merge_families(families, _is_sum):
        metric = Metric(name, help_text, kind)
        for (sample_name, labels), value in samples:
            metric.add_sample(sample_name, dict(labels), value)
        yield metric


def _read_families(shared: SharedMemory, slot: int) -> list[Family]:
    data = shared.read_metrics(slot)
    return _DECODER.decode(data) if data else []


def _is_sum(family: Family) -> bool:
    """Whether the workers' values of a metric are parts of one."""
    name, _, kind, _ = family
    return name in SUMMED_GAUGES if kind == "gauge" else name not in COMMON_COUNTERS


def _merge_families(families: Iterable[Family], is_sum: Callable[[Family], bool]) -> list[Family]:
    """Merge metrics of the same name, sample by sample: their sum, or the largest."""
    merged: dict[str, tuple[Family, dict[SampleKey, float]]] = {}
    for family in families:
        _, values = merged.setdefault(family[0], (family, {}))
        join = operator.add if is_sum(family) else max
        for key, value in family[3]:
            values[key] = join(values[key], value) if key in values else value
    return [(*family[:3], list(values.items())) for family, values in merged.values()]
