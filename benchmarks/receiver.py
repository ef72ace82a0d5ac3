# SPDX-License-Identifier: Apache-2.0
"""What `ttft-otel serve` costs while it receives: CPU per request and per span, paced and as fast as it
stores; over HTTP and gRPC.

Bodies are those of the exporter: 1 024 spans at most, a request's two halves often in different ones. Goals
are for ratios to protobuf alone, which parses and serializes the same bodies in the same rounds. The database
is at its limit, so that each new trace removes one; an answer other than success ends the benchmark.

Examples:
    python -m benchmarks.receiver python -m benchmarks.receiver --json receiver.json --rounds 5 python -m
    benchmarks.receiver --rate 500 --seconds 5
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from benchmarks.exporter import HOST, read_peak_memory_mb
from benchmarks.exporter_records import SPANS_PER_REQUEST, build_request_halves
from benchmarks.figures import (
    Figure,
    build_figure,
    build_figure_parser,
    divide_rounds,
    report_figures,
)
from benchmarks.process_cpu import read_process_cpu_s
from ttft_otel.exporter.export_worker import MAX_BATCH_RECORDS
from ttft_otel.exporter.span_batch import BatchBuilder, ResourceCache
from ttft_otel.model.record import Record

PROTOCOLS: Final = ("http", "grpc")
EXPORT_METHOD: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
KEPT_TRACES: Final = 500  # fewer than the warm-up sends
WARM_UP_REQUESTS: Final = 1000
# Between a request's first token and its end, so many others have theirs.
REQUESTS_UNDER_WAY: Final = 16
PARSINGS: Final = 5  # of each body for the reference: one takes a millisecond
# Far above what any machine needs.
MAX_WAIT_S: Final = 60.0
# Goal: times the CPU that protobuf takes for the same bodies. With a row for each span it was 70.
MAX_PROTOBUF_RATIO: Final = 30.0

SendBody = Callable[[bytes], None]


@dataclass(slots=True)
class ReceiverCosts:
    """Microseconds of CPU per request, one figure a round. idle_us_per_s: without any request, per second."""

    flood_us: list[float] = field(default_factory=list)
    paced_us: list[float] = field(default_factory=list)
    protobuf_us: list[float] = field(default_factory=list)
    idle_us_per_s: list[float] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)


def build_export_bodies(first: int, requests: int) -> list[bytes]:
    """The exporter's messages for requests from number `first` on, each with a trace of its own."""
    records: list[Record] = []
    waiting: list[Record] = []
    for number in range(first, first + requests):
        # An odd factor spreads the IDs: in a database's index neighbours would be cheaper.
        trace_id = f"{number * 0x9E3779B97F4A7C15 % (1 << 64):016x}{number:016x}"
        ttft, server = (
            msgspec.structs.replace(half, trace_id=trace_id)
            for half in build_request_halves(number)
        )
        records.append(ttft)
        waiting.append(server)
        if len(waiting) > REQUESTS_UNDER_WAY:
            records.append(waiting.pop(0))
    records += waiting
    builder = BatchBuilder(ResourceCache(os.getpid()))
    bodies: list[bytes] = []
    for start in range(0, len(records), MAX_BATCH_RECORDS):
        for record in records[start : start + MAX_BATCH_RECORDS]:
            builder.add_record(record)
        bodies += [batch.request.SerializeToString() for batch in builder.take_batches()]
    return bodies


@contextmanager
def run_receiver(database: Path) -> Iterator[tuple[int, int, int]]:
    """Run `ttft-otel serve`; its process ID, HTTP port and gRPC port."""
    words = ["serve", "--http-port", "0", "--grpc-port", "0", "--db", str(database)]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "ttft_otel.commands.main",
            *words,
            "--keep-requests",
            str(KEPT_TRACES),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        # Printed when both ports are bound; each address ends its line.
        ports = [int(process.stdout.readline().rsplit(":", 1)[1]) for _ in PROTOCOLS]
        yield process.pid, ports[0], ports[1]
    finally:
        process.terminate()
        process.communicate()


@contextmanager
def connect(protocol: str, http_port: int, grpc_port: int) -> Iterator[SendBody]:
    """A connection that is kept, as an exporter's; the function raises RuntimeError if it is no success."""
    if protocol == "grpc":
        with grpc.insecure_channel(f"{HOST}:{grpc_port}") as channel:
            call: Any = channel.unary_unary(EXPORT_METHOD)

            def send_message(body: bytes) -> None:
                # An empty answer: any other one is a partial success.
                if call(body, timeout=MAX_WAIT_S):
                    raise RuntimeError("spans were refused")

            yield send_message
        return
    connection = http.client.HTTPConnection(HOST, http_port, timeout=MAX_WAIT_S)

    def post_body(body: bytes) -> None:
        headers = {"content-type": "application/x-protobuf"}
        connection.request("POST", "/v1/traces", body, headers)
        answer = connection.getresponse()
        if (text := answer.read()) or answer.status != 200:
            raise RuntimeError(f"spans were refused: {answer.status} {text!r}")

    yield post_body
    connection.close()


def send_paced(send: SendBody, bodies: Sequence[bytes], seconds: float) -> None:
    """Send bodies one after another, evenly over `seconds`."""
    started = time.monotonic()
    for number, body in enumerate(bodies):
        time.sleep(max(0.0, started + number * seconds / len(bodies) - time.monotonic()))
        send(body)
    time.sleep(max(0.0, started + seconds - time.monotonic()))


def measure_protobuf_us(bodies: Sequence[bytes], requests: int) -> float:
    """CPU per request of parsing and serializing the bodies, in this process."""
    before_s = time.process_time()
    for _ in range(PARSINGS):
        for body in bodies:
            ExportTraceServiceRequest.FromString(body).SerializeToString()
    return (time.process_time() - before_s) / PARSINGS / requests * 1e6


def measure_round(
    pid: int, send: SendBody, first: int, rate: float, seconds: float, costs: ReceiverCosts
) -> int:
    """One round: flood, pause, paced; the number of the next request."""
    requests = max(1, round(rate * seconds))
    flood = build_export_bodies(first, requests)
    paced = build_export_bodies(first + requests, requests)
    before_s = read_process_cpu_s(pid)
    for body in flood:
        send(body)
    costs.flood_us.append((read_process_cpu_s(pid) - before_s) / requests * 1e6)
    costs.protobuf_us.append(measure_protobuf_us(flood, requests))
    time.sleep(1.0)  # what is left to remove after the flood is not the pause's cost
    before_s = read_process_cpu_s(pid)
    time.sleep(2.0)
    costs.idle_us_per_s.append((read_process_cpu_s(pid) - before_s) / 2.0 * 1e6)
    before_s = read_process_cpu_s(pid)
    send_paced(send, paced, seconds)
    costs.paced_us.append((read_process_cpu_s(pid) - before_s) / requests * 1e6)
    costs.memory_mb.append(read_peak_memory_mb(pid))
    return first + 2 * requests


def measure_protocol(protocol: str, rate: float, seconds: float, rounds: int) -> ReceiverCosts:
    """All rounds of one protocol, with a receiver and a database of their own."""
    costs = ReceiverCosts()
    with (
        tempfile.TemporaryDirectory() as folder,
        run_receiver(Path(folder) / "spans.db") as (pid, http_port, grpc_port),
        connect(protocol, http_port, grpc_port) as send,
    ):
        for body in build_export_bodies(1, WARM_UP_REQUESTS):
            send(body)
        first = 1 + WARM_UP_REQUESTS
        for _ in range(rounds):
            first = measure_round(pid, send, first, rate, seconds, costs)
    return costs


def build_receiver_figures(name: str, costs: ReceiverCosts) -> dict[str, Figure]:
    """Ratios with their goal, and beside them what was measured."""
    figures: dict[str, Figure] = {}
    for load, values in (("flood", costs.flood_us), ("paced", costs.paced_us)):
        ratios = divide_rounds(values, costs.protobuf_us)
        per_span = [value / SPANS_PER_REQUEST for value in values]
        figures |= {
            f"{name}_{load}_per_protobuf": build_figure(ratios, MAX_PROTOBUF_RATIO),
            f"{name}_{load}_request_us": build_figure(values, digits=1),
            f"{name}_{load}_span_us": build_figure(per_span),
        }
    return figures | {
        f"{name}_protobuf_request_us": build_figure(costs.protobuf_us, digits=1),
        f"{name}_idle_us_per_s": build_figure(costs.idle_us_per_s, digits=0),
        f"{name}_memory_mb": build_figure(costs.memory_mb, digits=1),
    }


def main() -> int:
    """Measure, print, and write the file that was asked for; 1 when a goal is missed."""
    parser = build_figure_parser(__doc__)
    parser.add_argument("--rate", type=float, default=70.0, help="requests a second when paced")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each paced round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    figures: dict[str, Figure] = {}
    for protocol in PROTOCOLS:
        costs = measure_protocol(protocol, options.rate, options.seconds, options.rounds)
        figures |= build_receiver_figures(protocol, costs)
    return report_figures(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
