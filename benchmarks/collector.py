# SPDX-License-Identifier: Apache-2.0
"""CPU time per span in the collector with collector/config.yaml, with and without sampling.yaml,
compared with a pipeline that only forwards spans (same receiver, limiter, queue, exporter). One core; a
second collector takes the place of Tempo and Prometheus and discards what it gets. Goals are for
ratios to the forwarding pipeline, in the same run.

    python -m benchmarks.collector [--json FILE] [--spans N]
"""

from __future__ import annotations

import http.client
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from benchmarks.figures import Figure, build_figure, build_figure_parser, report_figures
from benchmarks.otlp_bodies import OtlpBody, build_otlp_bodies
from benchmarks.process_cpu import read_process_cpu_s
from lab import free_ports
from lab.local_servers import LocalServer as Process
from lab.server_commands import HOST, ServerCommand
from lab.stack import binaries, stack_parts

# Enough for Go's heap to reach its size, and for every series of the metrics to exist.
WARMUP_SPANS: Final = 40_000  # spans before the clock starts
ROUNDS: Final = 3
# Scrubbing, sums and metrics together may cost as much again as forwarding alone.
MAX_TIMES_PASSING_ON: Final = 2.0
# It listens where Tempo and Prometheus would, under the path of Prometheus' OTLP receiver.
SINK_CONFIG: Final = """yaml:
receivers:
  otlp:
    protocols:
      grpc: {endpoint: "%(grpc)s"}
      http: {endpoint: "%(http)s", metrics_url_path: /api/v1/otlp/v1/metrics}
exporters: {nop: {}}
extensions: {health_check: {endpoint: "%(health)s"}}
service:
  extensions: [health_check]
  telemetry: {metrics: {level: none}, logs: {level: error}}
  pipelines: {traces: {receivers: [otlp], exporters: [nop]}, metrics: {receivers: [otlp], exporters: [nop]}}
"""
# Merged over config.yaml. A pipeline must have a receiver: the one that nothing shall reach gets
# one on a port of its own.
PASSTHROUGH_CONFIG: Final = """yaml:
service:
  pipelines:
    traces/in: {processors: [memory_limiter], exporters: [forward/traces]}
    traces/outermost: {receivers: [otlp/none]}
receivers: {otlp/none: {protocols: {grpc: {endpoint: "127.0.0.1:0"}}}}
"""


def post_spans(port: int, requests: list[OtlpBody], spans: int, turn: int) -> int:
    """Send exports until so many spans are sent; returns the number that was accepted."""
    connection = http.client.HTTPConnection(HOST, port, timeout=30)
    taken = 0
    while taken < spans:
        body = requests[turn % len(requests)]
        # New traces: a sampler decides once per trace, and would have nothing left to do.
        body.renew_trace_ids(turn)
        connection.request(
            "POST", "/v1/traces", body.data, {"content-type": "application/x-protobuf"}
        )
        answer = connection.getresponse()
        answer.read()
        if answer.status == 200:
            taken += body.spans
        else:
            # A refusal of the memory limiter: wait, as an exporter would, then send the next one.
            time.sleep(0.02)
        turn += 1
    connection.close()
    return taken


def measure_cpu_per_span(
    command: ServerCommand, requests: list[OtlpBody], spans: int, port: int, log: Path
) -> list[float]:
    """CPU microseconds per span of one configuration, one figure a round."""
    server = Process(command, log).start()
    try:
        server.wait_until_ready(30)
        os.sched_setaffinity(server.pid, {min(os.sched_getaffinity(0))})
        post_spans(port, requests, WARMUP_SPANS, 0)
        cpu_us_per_span = []
        for number in range(1, ROUNDS + 1):
            before = read_process_cpu_s(server.pid)
            # Far apart, so that no round meets the trace ids of an earlier one.
            taken = post_spans(port, requests, spans, number * 1_000_000)
            # Queues flush after a second (collector/config.yaml): their work belongs to this round.
            time.sleep(1.5)  # what is still in its queues
            cpu_us_per_span.append((read_process_cpu_s(server.pid) - before) / taken * 1e6)
        return cpu_us_per_span
    finally:
        server.stop()


def measure_configurations(spans: int) -> dict[str, Figure]:
    """Measure all configurations one after another."""
    requests = build_otlp_bodies()
    # Built from the pins if it is missing, which takes minutes the first time.
    binary = binaries.obtain_program("collector", lambda line: None)
    addresses = stack_parts.StackAddresses.choose_free()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        endpoints = {
            "grpc": f"{HOST}:{addresses.tempo_otlp}",
            "http": f"{HOST}:{addresses.prometheus}",
            "health": f"{HOST}:{(health := free_ports.find_free_port())}",
        }
        sink = ServerCommand(
            "sink", (str(binary), f"--config={SINK_CONFIG % endpoints}"), {}, health, "/"
        )
        collector_env = {
            "GOMAXPROCS": "1",
            "GOGC": "200",
            "GOMEMLIMIT": "400MiB",
        }  # as docker-compose.yml
        # The first is the reference of the others.
        plans: dict[str, tuple[Path | str, ...]] = {
            "passed on": (stack_parts.COLLECTOR_CONFIG, PASSTHROUGH_CONFIG),
            "config.yaml": (stack_parts.COLLECTOR_CONFIG,),
            "with sampling.yaml": (stack_parts.COLLECTOR_CONFIG, stack_parts.SAMPLING_CONFIG),
        }
        cpu_by_configuration: dict[str, float] = {}
        with Process(sink, folder / "sink.log"):
            for name, configs in plans.items():
                command = stack_parts.build_collector_command(
                    binary, addresses, folder / name, configs, collector_env
                )
                rounds = measure_cpu_per_span(
                    command, requests, spans, addresses.collector_http, folder / f"{name}.log"
                )
                # What others did to this machine meanwhile is not its cost.
                cpu_by_configuration[name] = min(rounds)
    return judge_collector_figures(cpu_by_configuration)


def judge_collector_figures(cpu_by_configuration: dict[str, float]) -> dict[str, Figure]:
    """Ratios to the first configuration, with their goal; then microseconds and spans a second."""
    reference, *others = cpu_by_configuration
    # A machine's speed cancels in a ratio; microseconds have no goal.
    figures = {
        f"{name}, times passing on": build_figure(
            [cpu_by_configuration[name] / cpu_by_configuration[reference]], MAX_TIMES_PASSING_ON
        )
        for name in others
    }
    for name, us in cpu_by_configuration.items():
        figures[f"{name}, us of CPU per span"] = build_figure([us])
        figures[f"{name}, spans/s a core"] = build_figure([1e6 / us], digits=0)
    return figures


def main() -> int:
    """Measure, print, write; 1 when a goal is missed."""
    parser = build_figure_parser(__doc__)
    parser.add_argument("--spans", type=int, default=300_000, help="of each round")
    options = parser.parse_args()
    return report_figures(measure_configurations(options.spans), options.json)


if __name__ == "__main__":
    sys.exit(main())
