# SPDX-License-Identifier: Apache-2.0
"""Memory that all workers share: numbers, and each one's metrics, which who is scraped adds up.

supervisor.py makes it before it forks. Metrics are written as a whole before they are shown, so that no total
ever falls, and a counter that falls is a restart to Prometheus. The successor of a dead worker goes on from
its counters.
"""

from __future__ import annotations

import mmap
import operator
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final, TypeAlias

import msgspec
from prometheus_client.core import Metric

from ttft_otel.model.names import metric_names
from ttft_otel.tracing import clock

SILENCE_US: Final = 5_000_000  # microseconds after which nothing counts as under way at a worker
# Gauges of which each worker has a part; of the others each has the whole, or its own opinion.
SUMMED_GAUGES: Final = {
    metric_names.ROUTER_REQUESTS_IN_FLIGHT,
    metric_names.ROUTER_IN_FLIGHT,
    metric_names.ROUTER_RETRY_BUDGET,
    metric_names.ROUTER_WORKERS,
}
# Counters of what happens to each of them at once: the largest is right, the sum is not.
COMMON_COUNTERS: Final = {metric_names.ROUTER_RELOADS, metric_names.ROUTER_KV_EVENTS}

SampleKey: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]  # name, labels in order
# Name, help text and kind of a metric, and its samples.
Family: TypeAlias = tuple[str, str, str, list[tuple[SampleKey, float]]]

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(list[Family])


class SharedMemory:
    """What each worker shows the others, in memory that forked processes share: numbers and its metrics.

    Nothing is locked: each slot has one writer, no number is seen in halves, and metrics are written where
    nobody reads.
    """

    # Of each slot: heartbeat, orders, version of its metrics, and the bytes of those on either page.
    _HEARTBEAT, _ORDERS, _VERSION, _LENGTHS = 0, 1, 2, 3
    _LINE_WORDS: Final = 8  # a cache line for each worker, so that writers do not slow one another

    def __init__(self, slots: int) -> None:
        self.slots = range(slots)
        self._words = memoryview(mmap.mmap(-1, slots * self._LINE_WORDS * 8)).cast("q")
        # Files without a name, in memory: two for each slot, written in turn.
        self._pages = [[os.memfd_create("ttft-otel-metrics") for _ in range(2)] for _ in self.slots]

    def write_metrics(self, slot: int, data: bytes) -> None:
        """Replace a slot's metrics, which outlive its worker. Raises OSError if there is no memory."""
        line = slot * self._LINE_WORDS
        version = self._words[line + self._VERSION] + 1
        os.pwrite(self._pages[slot][version % 2], data, 0)
        self._words[line + self._LENGTHS + version % 2] = len(data)
        self._words[line + self._VERSION] = version

    def read_metrics(self, slot: int) -> bytes:
        """What a slot's worker, or a predecessor, has written last; empty before that."""
        line = slot * self._LINE_WORDS
        while True:
            version = self._words[line + self._VERSION]
            length = self._words[line + self._LENGTHS + version % 2]
            data = os.pread(self._pages[slot][version % 2], length, 0)
            # Else this page may be the one that is being written by now.
            if version == self._words[line + self._VERSION]:
                return data

    def get_heartbeat(self, slot: int) -> int:
        """What the worker has last given to record_heartbeat(); 0 before it serves."""
        return self._words[slot * self._LINE_WORDS + self._HEARTBEAT]

    def record_heartbeat(self, slot: int, now_us: int) -> None:
        """The event loop runs at `now_us`; 0: a worker starts that does not serve yet."""
        self._words[slot * self._LINE_WORDS + self._HEARTBEAT] = now_us

    def is_silent(self, slot: int) -> bool:
        """Whether the worker's event loop has not run for SILENCE_US, or it does not serve yet."""
        return clock.now_us() - self.get_heartbeat(slot) > SILENCE_US

    def count_orders(self, slot: int) -> int:
        """Orders that the worker and its predecessors have given to the others."""
        return self._words[slot * self._LINE_WORDS + self._ORDERS]

    def add_order(self, slot: int) -> int:
        """The worker gives an order: its number."""
        self._words[slot * self._LINE_WORDS + self._ORDERS] += 1
        return self.count_orders(slot)


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
    for each in shared.slots:
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
