# SPDX-License-Identifier: Apache-2.0
"""What the exporter process costs: CPU per request and per span, memory, start, spans a second of
a core; over HTTP and gRPC, with a receiver that only accepts.

Goals are for ratios to the SDK's tracer and BatchSpanProcessor (benchmarks/sdk_exporter.py), which make and
export the same spans in the same rounds. A request is a stream: two records, 15 spans. With metrics on,
one that is not sampled is only counted: its goal is beside a sampled one of the same process. No more is
under way than the exporter's queue holds; a lost span ends the benchmark.

    python -m benchmarks.exporter [--json FILE] [--requests N] [--rounds N]
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.exporter_records import SPANS_PER_REQUEST, encode_request, encode_unsampled_request
from benchmarks.figures import (
    Figure,
    build_figure,
    build_figure_parser,
    divide_rounds,
    report_figures,
)
from benchmarks.process_cpu import read_process_cpu_s
from lab import session_processes
from ttft_otel.exporter.request_metrics import MAX_PENDING_ROWS
from ttft_otel.model.names import env_names
from ttft_otel.tracing import handoff
from ttft_otel.tracing.settings import Settings

HOST: Final = "127.0.0.1"
PROTOCOLS: Final = {"http": "http/protobuf", "grpc": "grpc"}
# Sent and not yet exported; the exporter's queue holds 16 times as many.
MAX_RECORDS_UNDER_WAY: Final = 1024
# Until kept encodings are filled and connections are open.
WARM_UP_REQUESTS: Final = 200
# Far above what any machine needs: what is not out by then will not come.
MAX_WAIT_S: Final = 120.0
# Goals: ratios to the SDK.
MAX_CPU_RATIO: Final = 0.2
MAX_MEMORY_RATIO: Final = 1.3
MAX_START_RATIO: Final = 1.2
# Of a request that is only counted, to one that is counted and exported.
MAX_UNSAMPLED_RATIO: Final = 0.05
UNSAMPLED_REQUESTS: Final = 4 * MAX_PENDING_ROWS  # rows are counted so many at once


@dataclass(slots=True)
class ExporterCosts:
    """One program's figures, one a round. spans_per_core_s: spans a second that one core would export."""

    cpu_us: list[float] = field(default_factory=list)
    spans_per_core_s: list[float] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)
    start_cpu_ms: list[float] = field(default_factory=list)

    def add_round(self, pid: int, start_cpu_s: float, cpu_s: float, requests: int) -> None:
        """Add what the process `pid` has used in this round."""
        # CPU time, not the clock's: other processes of the machine do not enter.
        self.start_cpu_ms.append(start_cpu_s * 1e3)
        self.cpu_us.append(cpu_s / requests * 1e6)
        self.spans_per_core_s.append(requests * SPANS_PER_REQUEST / cpu_s)
        self.memory_mb.append(read_peak_memory_mb(pid))


def read_peak_memory_mb(pid: int) -> float:
    """The most memory that was ever resident, in MB."""
    # VmHWM is the peak of resident memory, in KiB in spite of its unit "kB".
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise OSError(f"process {pid} has no memory")


@dataclass(slots=True)
class CountingCosts:
    """The exporter's CPU per request with metrics on, sampled and not; one figure a round."""

    sampled_us: list[float] = field(default_factory=list)
    unsampled_us: list[float] = field(default_factory=list)


@contextmanager
def run_module(module: str, *words: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """Run a module of this package that ends with its standard input."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *words],
        env=os.environ | env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        # Closes its standard input, which ends it, and reads what it still writes, so that it cannot block.
        process.communicate()


def find_exporter(host: int) -> int:
    """Process ID of the exporter that `host` has started."""
    found = session_processes.find_exporters([host])
    if len(found) != 1:  # the one that forks it ends before a span is exported
        raise ProcessLookupError(f"not one exporter runs: {found}")
    return found[0]


def wait_until_exported(
    sender: handoff.RecordSender, number: int, counter: str = "exported"
) -> None:
    """Wait until so many spans are exported, or requests `counted`.

    Raises RuntimeError for one that is lost, or does not come.
    """
    until = time.monotonic() + MAX_WAIT_S
    while (counts := sender.get_counts())[counter] < number:
        losses = counts["dropped"] + counts["overflowed"] + counts["failed"] + counts["foreign"]
        if losses or time.monotonic() > until:
            raise RuntimeError(f"spans were lost, or are late: {counts}")
        # Sleeping, not spinning: on two cores a spinning sender would slow the exporter down.
        time.sleep(0.002)


def send_requests(sender: handoff.RecordSender, requests: list[list[bytes]], before: int) -> int:
    """Send requests as fast as they are exported; the number of spans exported since the start."""
    for number, records in enumerate(requests):
        # Two records a request: not more than the limit are on their way at any time.
        if number * 2 >= MAX_RECORDS_UNDER_WAY:
            done = number - MAX_RECORDS_UNDER_WAY // 2
            wait_until_exported(sender, before + done * SPANS_PER_REQUEST)
        for data in records:
            sender.send(data)
    spans = before + len(requests) * SPANS_PER_REQUEST
    wait_until_exported(sender, spans)
    return spans


def measure_ours(
    protocol: str, endpoint: str, requests: list[list[bytes]], costs: ExporterCosts
) -> None:
    """One round of the exporter process."""
    sender = handoff.RecordSender(Settings(endpoint=endpoint, protocol=protocol))
    try:
        # The first record starts the process; its CPU time so far is what a start costs.
        spans = send_requests(sender, requests[:1], 0)
        pid = find_exporter(os.getpid())
        start_cpu_s = read_process_cpu_s(pid)
        spans = send_requests(sender, requests[:WARM_UP_REQUESTS], spans)
        before_s = read_process_cpu_s(pid)
        send_requests(sender, requests, spans)
        costs.add_round(pid, start_cpu_s, read_process_cpu_s(pid) - before_s, len(requests))
    finally:
        sender.close(MAX_WAIT_S)


def measure_counting(
    protocol: str, endpoint: str, requests: list[list[bytes]], costs: CountingCosts
) -> None:
    """One round of the exporter process that counts all requests, and exports the sampled ones."""
    unsampled = [encode_unsampled_request(number + 1) for number in range(len(requests))]
    sender = handoff.RecordSender(Settings(endpoint=endpoint, protocol=protocol, metrics=True))
    try:
        spans = send_requests(sender, requests[:WARM_UP_REQUESTS], 0)
        pid = find_exporter(os.getpid())
        before_s = read_process_cpu_s(pid)
        send_requests(sender, requests, spans)
        costs.sampled_us.append((read_process_cpu_s(pid) - before_s) / len(requests) * 1e6)
        counted = send_measurements(sender, unsampled, WARM_UP_REQUESTS)
        before_s = read_process_cpu_s(pid)
        counted = send_measurements(sender, unsampled, UNSAMPLED_REQUESTS) - counted
        costs.unsampled_us.append((read_process_cpu_s(pid) - before_s) / counted * 1e6)
    finally:
        sender.close(MAX_WAIT_S)


def send_measurements(sender: handoff.RecordSender, unsampled: list[bytes], number: int) -> int:
    """Send `number` unsampled requests as fast as they are counted; how many have been since the start."""
    before = sender.get_counts()["counted"]
    for place in range(number):
        if place % MAX_RECORDS_UNDER_WAY == 0:
            wait_until_exported(sender, before + place, "counted")
        sender.send(unsampled[place % len(unsampled)])
    wait_until_exported(sender, before + number, "counted")
    return before + number


def measure_sdk(protocol: str, endpoint: str, requests: int, costs: ExporterCosts) -> None:
    """One round of the SDK's tracer, processor and exporter."""
    env = {
        env_names.OTEL_EXPORTER_OTLP_ENDPOINT: endpoint,
        env_names.OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: protocol,
    }
    with run_module("benchmarks.sdk_exporter", **env) as process:
        start_cpu_s = run_sdk_command(process, "start")
        before_s = run_sdk_command(process, f"requests {WARM_UP_REQUESTS}")
        cpu_s = run_sdk_command(process, f"requests {requests}") - before_s
        costs.add_round(process.pid, start_cpu_s, cpu_s, requests)


def run_sdk_command(process: subprocess.Popen[str], command: str) -> float:
    """Let the reference export something; its CPU seconds so far."""
    assert process.stdin and process.stdout
    process.stdin.write(f"{command}\n")
    process.stdin.flush()
    # The answer comes when all of it is exported: CPU time is read after that.
    process.stdout.readline()
    return read_process_cpu_s(process.pid)


def build_protocol_figures(name: str, ours: ExporterCosts, sdk: ExporterCosts) -> dict[str, Figure]:
    """Ratios with their goals, and beside them what was measured."""
    goals = {
        "cpu_us": MAX_CPU_RATIO,
        "memory_mb": MAX_MEMORY_RATIO,
        "start_cpu_ms": MAX_START_RATIO,
    }
    figures = {
        f"{name}_{key}_per_sdk": build_figure(
            divide_rounds(getattr(ours, key), getattr(sdk, key)), goal, digits=3
        )
        for key, goal in goals.items()
    }
    for owner, costs in (("", ours), ("_sdk", sdk)):
        per_span = [value / SPANS_PER_REQUEST for value in costs.cpu_us]
        figures |= {
            f"{name}{owner}_request_us": build_figure(costs.cpu_us, digits=1),
            f"{name}{owner}_span_us": build_figure(per_span, digits=1),
            f"{name}{owner}_spans_per_core_s": build_figure(costs.spans_per_core_s, digits=0),
            f"{name}{owner}_memory_mb": build_figure(costs.memory_mb, digits=1),
            f"{name}{owner}_start_cpu_ms": build_figure(costs.start_cpu_ms, digits=0),
        }
    return figures


def build_counting_figures(name: str, costs: CountingCosts) -> dict[str, Figure]:
    """The ratio with its goal, and beside it what was measured."""
    ratios = divide_rounds(costs.unsampled_us, costs.sampled_us)
    return {
        f"{name}_unsampled_per_sampled": build_figure(ratios, MAX_UNSAMPLED_RATIO, digits=4),
        f"{name}_counted_request_us": build_figure(costs.sampled_us, digits=1),
        f"{name}_unsampled_request_us": build_figure(costs.unsampled_us, digits=2),
    }


def measure_exporter_figures(requests: int, rounds: int) -> dict[str, Figure]:
    """All figures of both protocols."""
    encoded = [encode_request(number + 1) for number in range(requests)]
    figures: dict[str, Figure] = {}
    for name, protocol in PROTOCOLS.items():
        ours, sdk, counting = ExporterCosts(), ExporterCosts(), CountingCosts()
        with run_module("benchmarks.otlp_sink", name) as sink:
            assert sink.stdout
            endpoint = f"http://{HOST}:{int(sink.stdout.readline())}"
            for _ in range(rounds):
                measure_ours(protocol, endpoint, encoded, ours)
                measure_sdk(protocol, endpoint, requests, sdk)
                measure_counting(protocol, endpoint, encoded, counting)
        figures |= build_protocol_figures(name, ours, sdk) | build_counting_figures(name, counting)
    return figures


def main() -> int:
    """Measure, print, and write the file that was asked for; 1 when a goal is missed."""
    parser = build_figure_parser(__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="of each round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    return report_figures(measure_exporter_figures(options.requests, options.rounds), options.json)


if __name__ == "__main__":
    sys.exit(main())
