# SPDX-License-Identifier: Apache-2.0
"""Metrics of all workers as one: each writes its own to shared memory, and who is scraped adds them up.

They are written as a whole before they are shown, so that no total ever falls, and a counter that falls is a
restart to Prometheus. The successor of a dead worker goes on from its counters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Final

import msgspec
from prometheus_client.core import Metric

from ttft_otel.model.names import metric_names
from ttft_otel.router.workers.supervisor import SharedMemory

# Gauges of which each worker has a part; of the others each has the whole, or its own opinion.
SUMMED_GAUGES: Final = {
    metric_names.ROUTER_REQUESTS_IN_FLIGHT,
    metric_names.ROUTER_IN_FLIGHT,
    metric_names.ROUTER_RETRY_BUDGET,
    metric_names.ROUTER_WORKERS,
}
# Counters of what happens to each of them at once: the largest is right, the sum is not.
COMMON_COUNTERS: Final = {metric_names.ROUTER_RELOADS, metric_names.ROUTER_KV_EVENTS}
INSTANCE_LABEL: Final = "instance"

SampleKey = tuple[str, tuple[tuple[str, str], ...]]  # name, labels


class Family(msgspec.Struct, array_like=True):
    """One metric: its samples by name and labels."""

    name: str
    help_text: str
    kind: str
    samples: list[tuple[SampleKey, float]]


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(list[Family])


class MergedMetrics:
    """The metrics of all workers; `slot` is this worker's, which goes on from its predecessor's counters."""

    def __init__(self, shared: SharedMemory, slot: int, slot_count: int) -> None:
        self._shared, self._slot, self._slot_count = shared, slot, slot_count
        # The predecessor's gauges ended with it; what it counted belongs to the router.
        self._inherited = [each for each in self._read(slot) if each.kind == "counter"]

    def write_own(self, metrics: Iterable[Metric], urls: Collection[str]) -> None:
        """Write this worker's `metrics` together with what it inherited.

        urls: of the instances that there are: those of others would stay for ever.
        """
        inherited = [
            Family(
                each.name,
                each.help_text,
                each.kind,
                [sample for sample in each.samples if _is_of_any(sample[0], urls)],
            )
            for each in self._inherited
        ]
        own = merge_families((inherited, [_read_metric(each) for each in metrics]), False)
        self._shared.write_metrics(self._slot, _ENCODER.encode(own))

    def collect_all(self) -> Iterator[Metric]:
        parts = []
        for slot in range(self._slot_count):
            families = self._read(slot)
            # Counters stay also of a worker that hangs, or the sum would fall.
            if slot != self._slot and self._shared.is_silent(slot):
                families = [each for each in families if each.kind == "counter"]
            parts.append(families)
        for family in merge_families(parts, True):
            metric = Metric(family.name, family.help_text, family.kind)
            for (name, labels), value in family.samples:
                metric.add_sample(name, dict(labels), value)
            yield metric

    def _read(self, slot: int) -> list[Family]:
        data = self._shared.read_metrics(slot)
        return _DECODER.decode(data) if data else []


def merge_families(parts: Iterable[list[Family]], are_workers: bool) -> list[Family]:
    """Merge metrics of the same name, sample by sample.

    are_workers: the parts are of several workers; otherwise of one and its predecessors.
    """
    merged: dict[str, tuple[Family, dict[SampleKey, float]]] = {}
    for families in parts:
        for family in families:
            _, values = merged.setdefault(family.name, (family, {}))
            # What one process counted, its predecessor had not.
            is_summed = is_sum(family) if are_workers else True
            for key, value in family.samples:
                before = values.get(key)
                if before is None:
                    values[key] = value
                else:
                    values[key] = before + value if is_summed else max(before, value)
    return [
        Family(family.name, family.help_text, family.kind, list(values.items()))
        for family, values in merged.values()
    ]


def is_sum(family: Family) -> bool:
    """Whether the workers' values of a metric are parts of one."""
    if family.kind == "gauge":
        return family.name in SUMMED_GAUGES
    return family.name not in COMMON_COUNTERS


def _read_metric(metric: Metric) -> Family:
    samples = [
        # Sorted, or one sample could have two keys.
        ((each.name, tuple(sorted(each.labels.items()))), float(each.value))
        for each in metric.samples
    ]
    return Family(metric.name, metric.documentation, metric.type, samples)


def _is_of_any(key: SampleKey, urls: Collection[str]) -> bool:
    """Whether a sample is of no instance, or of one of those."""
    url = dict(key[1]).get(INSTANCE_LABEL)
    return url is None or url in urls
