# SPDX-License-Identifier: Apache-2.0
"""What handing a record to the exporter process takes of the thread that serves requests.

Records of streams, two of each, are sent at a pace, as a server's come, to a real exporter process, whose
receiver only accepts. Beside it, in the same rounds and at the same pace: a span of the OpenTelemetry SDK
(the goal refers to its CPU time), and the same records sent to a process that waits for each of them.
Code that runs at a pace is not in the caches: all of it takes longer than in hooks.py. Wall time has what
the thread waited for the processor, too: put other load on the machine to see it. With pauses of more than
20 ms the exporter waits for each record, too, and every one wakes it.

    python -m benchmarks.sending [--json FILE] [--records N] [--rounds N] [--pause-ms 25]
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from opentelemetry.trace import SpanKind, Tracer

from benchmarks.exporter import HOST, WARM_UP_REQUESTS, run_module, send_requests
from benchmarks.exporter_records import encode_request
from benchmarks.figures import (
    Figure,
    build_figure,
    build_figure_parser,
    divide_rounds,
    report_figures,
)
from benchmarks.hooks import SERVER_SPAN_ATTRIBUTES, SERVER_SPAN_NAME, create_tracer
from ttft_otel.tracing import handoff
from ttft_otel.tracing.settings import Settings

RECORD_PAUSE_S: Final = 0.006  # 80 streams a second
MAX_SENDING_RATIO: Final = 0.25  # to a span of the SDK
WAITING_READER_BYTES: Final = 1 << 16

Action = Callable[[bytes], object]  # what is timed, with a record


@dataclass(slots=True)
class PacedTimes:
    """Mean times of a record in us, one a round: CPU time of the thread, and wall time."""

    cpu_us: list[float] = field(default_factory=list)
    wall_us: list[float] = field(default_factory=list)

    def add_round(self, records: list[bytes], action: Action, pause_s: float) -> None:
        """Run `action` for each record, after a pause before each."""
        wall_ns = cpu_ns = 0
        for data in records:
            time.sleep(pause_s)
            wall_ns -= time.perf_counter_ns()
            cpu_ns -= time.thread_time_ns()
            action(data)
            cpu_ns += time.thread_time_ns()
            wall_ns += time.perf_counter_ns()
        self.cpu_us.append(cpu_ns / len(records) / 1e3)
        self.wall_us.append(wall_ns / len(records) / 1e3)


@contextmanager
def run_waiting_reader() -> Iterator[Action]:
    """A process that waits for each record; gives what sends to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        ours.close()
        while theirs.recv(WAITING_READER_BYTES):
            pass
        os._exit(0)
    theirs.close()

    try:
        yield lambda data: ours.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    finally:
        ours.close()
        os.waitpid(pid, 0)


def make_sdk_span(tracer: Tracer) -> None:
    """A server span of the SDK, which its processor discards."""
    with tracer.start_as_current_span(
        SERVER_SPAN_NAME, kind=SpanKind.SERVER, attributes=SERVER_SPAN_ATTRIBUTES
    ) as span:
        span.set_attribute("http.response.status_code", 200)


def measure_sending(
    number: int, rounds: int, pause_s: float = RECORD_PAUSE_S
) -> dict[str, PacedTimes]:
    """All rounds of all actions, by name, each with `number` records and pauses between them."""
    requests = [encode_request(place + 1) for place in range(max(number, WARM_UP_REQUESTS))]
    records = [data for request in requests for data in request][:number]
    tracer = create_tracer()
    with run_module("benchmarks.otlp_sink", "http") as sink, run_waiting_reader() as send_awaited:
        assert sink.stdout
        endpoint = f"http://{HOST}:{int(sink.stdout.readline())}"
        sender = handoff.RecordSender(Settings(endpoint=endpoint))
        actions: dict[str, Action] = {
            "sending": sender.send,
            "awaited": send_awaited,
            "sdk_span": lambda _: make_sdk_span(tracer),
        }
        times = {name: PacedTimes() for name in actions}
        try:
            send_requests(sender, requests[:WARM_UP_REQUESTS], 0)
            for _ in range(rounds):
                for name, action in actions.items():
                    times[name].add_round(records, action, pause_s)
            if sender.get_counts()["dropped"]:
                raise RuntimeError(f"records were dropped: {sender.get_counts()}")
        finally:
            sender.close()
    return times


def compute_sending_figures(times: dict[str, PacedTimes]) -> dict[str, Figure]:
    """Ratios of a record, and beside them what was measured."""
    cpu_us = {name: each.cpu_us for name, each in times.items()}
    figures = {
        "sending_per_sdk_span": build_figure(
            divide_rounds(cpu_us["sending"], cpu_us["sdk_span"]), MAX_SENDING_RATIO
        ),
        "sending_to_awaited": build_figure(divide_rounds(cpu_us["sending"], cpu_us["awaited"])),
    }
    for name, each in times.items():
        figures[f"{name}_cpu_us"] = build_figure(each.cpu_us, digits=1)
        figures[f"{name}_wall_us"] = build_figure(each.wall_us, digits=1)
    return figures


def main() -> int:
    """Measure, print, and write the file that was asked for; 1 when a goal is missed."""
    parser = build_figure_parser(__doc__)
    parser.add_argument("--records", type=int, default=300, help="of each round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pause-ms", type=float, default=1e3 * RECORD_PAUSE_S, help="between two")
    options = parser.parse_args()
    times = measure_sending(options.records, options.rounds, options.pause_ms / 1e3)
    return report_figures(compute_sending_figures(times), options.json)


if __name__ == "__main__":
    sys.exit(main())
