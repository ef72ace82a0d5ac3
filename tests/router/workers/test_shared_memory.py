# SPDX-License-Identifier: Apache-2.0
"""Metrics of several workers in the memory that they share: they are one, and counters never fall."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ttft_otel.model.names import metric_names
from ttft_otel.router.workers import worker
from ttft_otel.router.workers.supervisor import SILENCE_US, SharedMemory
from ttft_otel.tracing import clock

URL = "http://127.0.0.1:1"


def build_metrics(
    requests: float, in_flight: float, breaker: float, reloads: float
) -> Iterator[Metric]:
    """What a worker has: a part of the requests, an opinion, and a reload like the others."""
    ended = CounterMetricFamily(metric_names.ROUTER_ATTEMPTS, "Ended.", labels=["instance"])
    ended.add_metric([URL], requests)
    yield ended
    yield GaugeMetricFamily(metric_names.ROUTER_REQUESTS_IN_FLIGHT, "Under way.", value=in_flight)
    yield GaugeMetricFamily(metric_names.ROUTER_BREAKER_OPEN, "Open.", value=breaker)
    yield CounterMetricFamily(metric_names.ROUTER_RELOADS, "Reloads.", value=reloads)


@pytest.fixture
def shared() -> SharedMemory:
    """That of two workers whose event loops run."""
    memory = SharedMemory(2)
    for slot in range(2):
        memory.numbers[slot].heartbeat = clock.now_us()
    return memory


def read_values(shared: SharedMemory, slot: int = 0) -> dict[str, float]:
    """All that the worker on a slot shows, without labels."""
    metrics = worker.collect_all(shared, slot)
    return {each.name: each.value for metric in metrics for each in metric.samples}


def write(shared: SharedMemory, slot: int, *values: float, inherited: Any = ()) -> None:
    """Write metrics of these values."""
    metrics = build_metrics(*values) if values else ()
    worker.write_metrics(shared, slot, metrics, inherited, {URL} if values else ())


def test_workers_are_one(shared: SharedMemory) -> None:
    """Parts are added up; of what all have seen the most counts."""
    write(shared, 0, 5, 1, 0.0, 2)
    write(shared, 1, 7, 2, 1.0, 2)

    assert read_values(shared, 0) == read_values(shared, 1)
    assert read_values(shared) == {
        f"{metric_names.ROUTER_ATTEMPTS}_total": 12,
        metric_names.ROUTER_REQUESTS_IN_FLIGHT: 3,
        metric_names.ROUTER_BREAKER_OPEN: 1,
        f"{metric_names.ROUTER_RELOADS}_total": 2,
    }


def test_a_successor_goes_on_counting(shared: SharedMemory) -> None:
    """Counters of a dead worker stay, also before its successor has written anything; gauges do not.

    Nor does what was counted of an instance that is gone: these would fill /metrics for ever.
    """
    write(shared, 0, 5, 3, 1.0, 0)
    inherited = worker.read_counters(shared, 0)
    assert read_values(shared)[f"{metric_names.ROUTER_ATTEMPTS}_total"] == 5

    for requests in (0, 1, 2):
        write(shared, 0, requests, 0, 0.0, 0, inherited=inherited)

        values = read_values(shared)
        assert values[f"{metric_names.ROUTER_ATTEMPTS}_total"] == 5 + requests
        assert values[metric_names.ROUTER_REQUESTS_IN_FLIGHT] == 0
    write(shared, 0, inherited=inherited)
    assert read_values(shared) == {f"{metric_names.ROUTER_RELOADS}_total": 0}


def test_gauges_of_a_silent_worker_are_left_out(shared: SharedMemory) -> None:
    """Nothing is under way at a worker that has been dead for long; what it counted stays."""
    write(shared, 0, 5, 1, 0.0, 0)
    write(shared, 1, 7, 2, 1.0, 0)
    shared.numbers[1].heartbeat = clock.now_us() - SILENCE_US - 1

    values = read_values(shared)

    assert values[f"{metric_names.ROUTER_ATTEMPTS}_total"] == 12
    assert values[metric_names.ROUTER_REQUESTS_IN_FLIGHT] == 1
    assert values[metric_names.ROUTER_BREAKER_OPEN] == 0


def test_nothing_is_read_in_halves() -> None:
    """Whoever reads while a worker writes gets one of the two, whole."""
    shared = SharedMemory(1)
    is_over = threading.Event()

    def write_forever() -> None:
        while not is_over.is_set():
            for letter, length in ((b"a", 3_000_000), (b"b", 1_000)):
                shared.write_metrics(0, letter * length)

    writer = threading.Thread(target=write_forever)
    writer.start()
    try:
        found = {shared.read_metrics(0) for _ in range(300)}
    finally:
        is_over.set()
        writer.join()
    assert found <= {b"", b"a" * 3_000_000, b"b" * 1_000}


def test_a_forked_process_writes_and_is_gone() -> None:
    """What it has written stays; that it died while it wrote the next is not seen."""
    shared = SharedMemory(1)
    child = os.fork()
    if not child:
        shared.write_metrics(0, b"whole")
        shared.write_metrics(0, b"newer")
        os.pwrite(shared._pages[0][1], b"half", 0)
        os._exit(0)
    os.waitpid(child, 0)

    assert shared.read_metrics(0) == b"newer"
