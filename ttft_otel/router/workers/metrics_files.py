# SPDX-License-Identifier: Apache-2.0
"""Metrics of all workers as one: each writes a file, and who is scraped adds them up.

A file is replaced as a whole before what is in it is shown, so that no total ever falls, and a counter that
falls is a restart to Prometheus. The successor of a dead worker goes on from its counters.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec
from prometheus_client.core import Metric

from ttft_otel.model.names import metric_names

# Seconds after which the gauges of a worker that writes nothing are left out.
MAX_GAUGE_AGE_S: Final = 10.0
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

log: Final = logging.getLogger("ttft_otel")

SampleKey = tuple[str, tuple[tuple[str, str], ...]]  # name, labels


class Family(msgspec.Struct, array_like=True):
    """One metric: its samples by name and labels."""

    name: str
    help_text: str
    kind: str
    samples: list[tuple[SampleKey, float]]


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(list[Family])


class MetricsFiles:
    """The files of all workers in `folder`; `slot` is this worker's, which goes on from its predecessor's."""

    def __init__(self, folder: Path, slot: int) -> None:
        self.folder, self._own_path = folder, folder / f"worker-{slot}.metrics"
        inherited = self._read_file(self._own_path)
        # Its gauges ended with it; what it counted belongs to the router.
        self._inherited = [each for each in inherited if each.kind == "counter"]
        self._own: list[Family] = []
        self._is_writable = True

    def write_own(self, metrics: Iterable[Metric], urls: Collection[str]) -> None:
        """Write this worker's `metrics` together with what it inherited, if the folder has room.

        urls: of the instances that there are: those of others would stay for ever. Raises OSError where
        there is no file yet: it shows that the worker has started.
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
        self._own = merge_families((inherited, [_read_metric(each) for each in metrics]), False)
        fresh_path = self._own_path.with_suffix(".fresh")
        try:
            fresh_path.write_bytes(_ENCODER.encode(self._own))
            # rename() is atomic: who reads sees the old file or the new one.
            fresh_path.replace(self._own_path)
        except OSError as error:
            if not self._own_path.exists():
                raise
            if self._is_writable:
                text = (
                    "ttft-otel: metrics of this worker stay as they are until %s can be written: %s"
                )
                log.warning(text, self.folder, error)
            self._is_writable = False
        else:
            self._is_writable = True

    def collect_all(self) -> Iterator[Metric]:
        """The metrics of all workers."""
        # The wall clock, since files have its times.
        now_s = time.time()
        parts = []
        for path in sorted(self.folder.glob("worker-*.metrics")):
            # Counters stay also of a worker that hangs, or the sum would fall.
            is_old = now_s - path.stat().st_mtime > MAX_GAUGE_AGE_S
            families = self._read_file(path)
            gauges = self._own if path == self._own_path else [] if is_old else families
            # Also a worker's own counters are those of its file, which others show.
            parts.append([each for each in families if each.kind == "counter"])
            parts[-1] += [each for each in gauges if each.kind != "counter"]
        for family in merge_families(parts, True):
            metric = Metric(family.name, family.help_text, family.kind)
            for (name, labels), value in family.samples:
                metric.add_sample(name, dict(labels), value)
            yield metric

    def _read_file(self, path: Path) -> list[Family]:
        try:
            return _DECODER.decode(path.read_bytes())
        # No predecessor, or one of a release that wrote another form.
        except (FileNotFoundError, msgspec.MsgspecError):
            return []


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
