# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics on vLLM's existing /metrics: records, losses, failed hooks, pending requests.

recorder.py counts drops here; the router builds its metrics as this does. Uses the prometheus_client of the
host process and its default registry. What each engine core says of the requests in its queue is asked only
while somebody looks: asgi.py asks before vLLM shows /metrics, hooks/api_server.py for WAITING_PATH. An engine
core that hangs does not answer: its last word stays, with its age.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from prometheus_client import REGISTRY, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ttft_otel.model.names import metric_names
from ttft_otel.model.stages import HOLDING_KIND_NAMES, WAIT_REASON_NAMES
from ttft_otel.tracing import carrier, clock, guard

if TYPE_CHECKING:
    from ttft_otel.tracing.request_trace import RequestTrace

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
        with guard.Guard("engine queues"):
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

AwaitingTraces: TypeAlias = "Mapping[str, RequestTrace]"
CountsReader: TypeAlias = Callable[[], Mapping[str, int]]
# One, or by the value of a label, or by the values of several.
Values: TypeAlias = float | Mapping[Any, float]

# Keys of handoff.get_counts() that are losses: in records, `failed` in spans, `merged` in labels of values.
LOSS_REASONS: Final = ("lost", "overflowed", "foreign", "failed", "merged")
RECORDS_HELP: Final = "Records handed to the exporter."
PENDING_HELP: Final = "Traced engine requests without a first token yet."
OLDEST_HELP: Final = "Age of the oldest of these requests, 0 without any."
WAITING_HELP: Final = "Of them in the engine cores' queues, by the reason."
AGE_HELP: Final = "Age of these numbers: it grows while an engine core does not answer."
ERRORS_HELP: Final = "Errors of the tracing itself, caught."
LOST_HELP: Final = "Telemetry lost on its way out."
# Set where several API servers share one /metrics (--api-server-count), or by a chart.
ENV_SHARED_METRICS: Final = "PROMETHEUS_MULTIPROC_DIR"
SENT_RECORDS: Final = "sent"  # key of handoff.get_counts()
PUBLISH_PAUSE_S: Final = 1.0  # seconds between two writes of what is not counted when it happens
_collectors: Final[list[Collector]] = []
_publishers: Final[list[SharedPublisher]] = []


@functools.lru_cache(maxsize=1)
def _get_dropped_counter() -> Counter:
    # Made at the first use: importing this module registers nothing with Prometheus.
    return Counter(metric_names.DROPPED, "Records or requests that tracing lost.", ["reason"])


def count_dropped(reason: str) -> None:
    """Count one lost record (or lost state of a request).

    reason: a metric label, hence one of a fixed set of words.
    """
    _get_dropped_counter().labels(reason).inc()


class _LiveCollector(Collector):
    """Gauges and counters that are computed at each scrape, so that requests pay nothing for them."""

    def __init__(self, awaiting: AwaitingTraces, counts: CountsReader) -> None:
        self.awaiting = awaiting
        self.counts = counts

    def collect(self) -> Iterator[Metric]:
        """Requests without a first token, errors of our hooks by place, records sent and lost."""
        counts = self.counts()
        yield build_counter(metric_names.RECORDS, RECORDS_HELP, counts.get(SENT_RECORDS, 0))
        yield build_gauge(metric_names.PENDING, PENDING_HELP, len(self.awaiting))
        oldest = compute_oldest_age(self.awaiting)
        yield build_gauge(metric_names.OLDEST_PENDING, OLDEST_HELP, oldest)
        waiting = read_waiting(self.awaiting)
        if waiting is not None:
            yield build_gauge(metric_names.WAITING, WAITING_HELP, waiting[0], "reason")
            yield build_gauge(metric_names.WAITING_AGE, AGE_HELP, waiting[1])
        yield build_counter(metric_names.HOOK_ERRORS, ERRORS_HELP, guard.error_counts, "place")
        losses = {reason: counts.get(reason, 0) for reason in LOSS_REASONS}
        yield build_counter(metric_names.LOST, LOST_HELP, losses, "reason")


def compute_oldest_age(awaiting: AwaitingTraces) -> float:
    """Seconds for which the first of `awaiting` has waited; 0 where there is none."""
    oldest = _find_oldest(awaiting)
    return (clock.now_us() - oldest.arrive) / 1_000_000 if oldest else 0.0


def _find_oldest(awaiting: AwaitingTraces) -> RequestTrace | None:
    return next(iter(list(awaiting.values())), None)  # a copy: others change it meanwhile


def read_waiting(awaiting: AwaitingTraces) -> tuple[Mapping[str, int], float] | None:
    """How many wait by reason, and the age of these numbers in seconds; None where that is not known."""
    oldest = _find_oldest(awaiting)
    if oldest is None:
        return dict.fromkeys(WAIT_REASON_NAMES, 0), 0.0
    return latest.read(oldest.arrive)


def build_counter(name: str, help_text: str, values: Values, *labels: str) -> Metric:
    """A counter with its value, or with `labels` its values by what these are."""
    return _add_values(CounterMetricFamily(name, help_text, labels=labels), values)


def build_gauge(name: str, help_text: str, values: Values, *labels: str) -> Metric:
    """A gauge, likewise."""
    return _add_values(GaugeMetricFamily(name, help_text, labels=labels), values)


def _add_values(family: CounterMetricFamily | GaugeMetricFamily, values: Values) -> Metric:
    samples = values if isinstance(values, Mapping) else {(): values}
    # A copy: others may count something new while the scrape iterates.
    for label_values, number in list(samples.items()):
        family.add_metric([label_values] if isinstance(label_values, str) else label_values, number)
    return family


class SharedPublisher:
    """The same metrics in prometheus_client's multiprocess mode, which adds up files of all processes.

    Collectors are not asked there, so values are written again and again, by publish_counts().
    """

    def __init__(self, awaiting: AwaitingTraces, counts: CountsReader) -> None:
        self.awaiting = awaiting
        self.counts = counts
        # "live": without the processes that have been marked as dead.
        self._pending = Gauge(metric_names.PENDING, PENDING_HELP, multiprocess_mode="livesum")
        self._oldest = Gauge(metric_names.OLDEST_PENDING, OLDEST_HELP, multiprocess_mode="livemax")
        # Engine cores are all processes': the last one that was asked to show the page has asked them.
        self._waiting = Gauge(
            metric_names.WAITING, WAITING_HELP, ["reason"], multiprocess_mode="livemostrecent"
        )
        self._age = Gauge(metric_names.WAITING_AGE, AGE_HELP, multiprocess_mode="livemostrecent")
        self._errors = Counter(metric_names.HOOK_ERRORS, ERRORS_HELP, ["place"])
        self._lost = Counter(metric_names.LOST, LOST_HELP, ["reason"])
        self._records = Counter(metric_names.RECORDS, RECORDS_HELP)
        self._published: dict[Counter, int] = {}

    def publish(self) -> None:
        """Write the values of this moment; about 10 us."""
        self._pending.set(len(self.awaiting))
        self._oldest.set(compute_oldest_age(self.awaiting))
        for place, number in list(guard.error_counts.items()):
            self._raise_counter(self._errors.labels(place), number)
        counts = self.counts()
        self._raise_counter(self._records, counts.get(SENT_RECORDS, 0))
        for reason in LOSS_REASONS:
            self._raise_counter(self._lost.labels(reason), counts.get(reason, 0))

    def publish_waiting(self) -> None:
        """Write what the engine cores have just been asked."""
        waiting = latest.read(0)
        if waiting is not None:
            for reason, number in waiting[0].items():
                self._waiting.labels(reason).set(number)
            self._age.set(waiting[1])

    def _raise_counter(self, counter: Counter, number: int) -> None:
        # By the difference: a counter of a file cannot be set. max(): a new sender counts from 0.
        counter.inc(max(0, number - self._published.get(counter, 0)))
        self._published[counter] = number


def register_collector(awaiting: AwaitingTraces, counts: CountsReader) -> None:
    """Register the metrics that are not counted when something happens. Idempotent.

    awaiting: the pending requests, the oldest first.
    counts: gives the exporter's counts, see handoff.get_counts().
    """
    if _collectors or _publishers:
        return
    if os.environ.get(ENV_SHARED_METRICS) is not None:  # as vLLM decides it
        _publishers.append(SharedPublisher(awaiting, counts))
    else:
        _collectors.append(_LiveCollector(awaiting, counts))
        REGISTRY.register(_collectors[0])


def publish_counts() -> bool:
    """Write the shared metrics, if there are any; whether to do it again in PUBLISH_PAUSE_S."""
    for publisher in _publishers:
        publisher.publish()
    return bool(_publishers)


async def ask_engines(awaiting: AwaitingTraces, calls: Sequence[EngineCall]) -> None:
    """Before /metrics is shown: ask the engine cores what waits, if anything does.

    Where processes share one page, others' requests may wait: there they are always asked.
    """
    if awaiting or _publishers:
        await latest.ask(calls)
    for publisher in _publishers:
        publisher.publish_waiting()
