# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of parts compare like with like, and stop where something is lost or refused."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from benchmarks import exporter, receiver, sdk_exporter, sending
from benchmarks.exporter_records import SPANS_PER_REQUEST, build_request_spans
from benchmarks.process_cpu import read_process_cpu_s
from benchmarks.serving import move_to_cores
from lab.session_processes import find_exporters
from ttft_otel.report.receive import otlp_decoder
from ttft_otel.tracing import handoff
from ttft_otel.tracing.handoff import RecordSender
from ttft_otel.tracing.settings import Settings


def _describe_span(span: ReadableSpan, names_by_id: Mapping[int, str]) -> tuple[object, ...]:
    parent = names_by_id.get(span.parent.span_id) if span.parent else None
    times = (span.start_time, span.end_time)
    return span.name, parent, span.kind, times, span.status.status_code, dict(span.attributes or {})


def _describe_spans(spans: list[ReadableSpan]) -> list[tuple[object, ...]]:
    names_by_id = {span.context.span_id: span.name for span in spans}
    return [_describe_span(span, names_by_id) for span in spans]


def test_reference_makes_same_spans() -> None:
    """The SDK's tracer makes the spans that the exporter makes: names, parents, kinds, times, attributes."""
    templates = build_request_spans(1)
    memory = InMemorySpanExporter()
    provider = sdk_exporter.build_provider(memory)
    sdk_exporter.make_spans(provider.get_tracer("test"), templates)
    provider.shutdown()
    made = _describe_spans(list(memory.get_finished_spans()))
    assert len(made) == SPANS_PER_REQUEST
    assert made == _describe_spans(templates)


def test_cpu_of_other_process() -> None:
    """The CPU clock that is read by process ID is the one that the kernel accounts."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    measured = read_process_cpu_s(os.getpid())
    after = resource.getrusage(resource.RUSAGE_SELF)
    # Accounted in ticks of up to 10 ms, where the clock counts nanoseconds.
    assert before.ru_utime + before.ru_stime - 0.02 <= measured
    assert measured <= after.ru_utime + after.ru_stime + 0.02


@pytest.mark.parametrize("counter", ["dropped", "overflowed", "failed", "foreign"])
def test_loss_ends_measurement(counter: str) -> None:
    """A lost record or span is no cheaper span: the benchmark stops."""

    class LosingSender:
        def get_counts(self) -> dict[str, Any]:
            counts = dict.fromkeys((*handoff.SHARED_COUNTERS, "dropped"), 0)
            return counts | {counter: 1}

    with pytest.raises(RuntimeError, match="lost"):
        exporter.wait_until_exported(LosingSender(), 1)  # type: ignore[arg-type]


def test_bodies() -> None:
    """All spans of each request are there once, and some requests' halves are in different bodies."""
    exports = [
        otlp_decoder.decode_export(body).spans for body in receiver.build_export_bodies(1, 200)
    ]
    sizes = Counter(span.trace_id for spans in exports for span in spans)
    assert len(sizes) == 200 and set(sizes.values()) == {SPANS_PER_REQUEST}
    places = [{span.trace_id for span in spans} for spans in exports]
    assert places[0] & places[1]


@pytest.mark.parametrize("protocol", ["http", pytest.param("grpc", marks=pytest.mark.full)])
def test_whole_round(tmp_path: Path, protocol: str) -> None:
    """A round with a real receiver gives all figures; a body that it refuses ends the benchmark."""
    costs = receiver.ReceiverCosts()
    with (
        receiver.run_receiver(tmp_path / "spans.db") as (pid, http_port, grpc_port),
        receiver.connect(protocol, http_port, grpc_port) as send,
    ):
        assert receiver.measure_round(pid, send, 1, 50.0, 0.4, costs) == 41
        figures = receiver.build_receiver_figures(protocol, costs)
        assert all(figure["value"] >= 0 for figure in figures.values())
        assert figures[f"{protocol}_flood_request_us"]["value"] > 0
        with pytest.raises(Exception, match=r"refused|INVALID_ARGUMENT"):
            send(b"no protobuf")


def wait_for_exporter(sender: RecordSender) -> int:
    """The exporter's process, once the short-lived one that forks it has ended."""
    found: list[int] = []
    for _ in range(1000):
        sender.send(b"x")
        found = find_exporters([os.getpid()])
        with contextlib.suppress(OSError):  # it ended meanwhile
            if len(found) == 1 and read_parent(found[0]) != os.getpid():
                return found[0]
        time.sleep(0.02)
    raise AssertionError(f"no exporter, or more than one: {found}")


def read_parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_exporter_is_moved() -> None:
    """The exporter of this process is found, no other process is, and all of its threads are moved."""
    before = os.sched_getaffinity(0)
    sender = RecordSender(Settings(on=True))
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        exporter = wait_for_exporter(sender)
        assert find_exporters([other.pid]) == []
        move_to_cores([exporter], {max(before)})
        threads = [int(task.name) for task in Path(f"/proc/{exporter}/task").iterdir()]
        assert {frozenset(os.sched_getaffinity(thread)) for thread in threads} == {
            frozenset({max(before)})
        }
        assert os.sched_getaffinity(0) == os.sched_getaffinity(other.pid) == before
    finally:
        sender.close()
        other.communicate(b"\n")


def burn_cpu(seconds: float) -> None:
    """Compute for so much CPU time."""
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


def test_times() -> None:
    """Waiting is wall time alone, computing both; the pauses between records are neither."""
    waiting, computing = sending.PacedTimes(), sending.PacedTimes()
    waiting.add_round([b""] * 3, lambda _: time.sleep(0.003), 0.006)
    computing.add_round([b""] * 3, lambda _: burn_cpu(0.003), 0.006)
    assert waiting.wall_us[0] >= 3000 > waiting.cpu_us[0]
    assert computing.wall_us[0] >= computing.cpu_us[0] >= 3000 > computing.cpu_us[0] / 2
