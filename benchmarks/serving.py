# SPDX-License-Identifier: Apache-2.0
"""Throughput and inter-token latency of real vLLM with ttft-otel off, on, and vLLM's own tracing on.

Three servers of the tiny text model, loaded in turn (off, on, own, off, on, own, ...); figures are
ratios to `off` of the same round, their median and spread. Needs about 12 GB of memory.

    python benchmarks/serving.py [--rounds 5] [--requests 240] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ttft_otel import names
from ttft_otel.lab import client, fleet, models, recipes
from ttft_otel.lab.client import Answer, Question
from ttft_otel.lab.servers import running

AT_ONCE = 12
TOKENS = 48


@dataclass(frozen=True, slots=True)
class Load:
    """One round on one server: requests per second, p99 and median inter-token latency in us."""

    throughput: float
    p99: float
    median: float


def load(url: str, requests: int) -> Load:
    """AT_ONCE clients in a closed loop, streamed answers of TOKENS tokens."""
    answers: list[Answer] = []
    left = iter(range(requests))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                number = next(left, None)
            if number is None:
                return
            question = Question(
                prompt=f"request {number}", max_tokens=TOKENS, extra={"ignore_eos": True}
            )
            answer = client.ask(url, question)
            with lock:
                answers.append(answer)

    began = time.monotonic()
    threads = [threading.Thread(target=work) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = time.monotonic() - began
    gaps = sorted(
        later.at_us - earlier.at_us
        for answer in answers
        for earlier, later in zip(answer.events[1:], answer.events[2:], strict=False)
    )
    if any(answer.status != 200 for answer in answers):
        raise SystemExit("a request failed; see the servers' logs")
    return Load(len(answers) / spent, gaps[int(len(gaps) * 0.99)], statistics.median(gaps))


def measure(rounds: int, requests: int) -> dict[str, list[Load]]:
    """All rounds on all three servers."""
    with tempfile.TemporaryDirectory(prefix="ttft-otel-") as scratch:
        sink = fleet.receiver(Path(scratch) / "spans.db")
        endpoint = f"http://{sink.host}:{sink.port}"
        base = recipes.Options(model=models.build(models.TEXT))
        own = ("--otlp-traces-endpoint", f"{endpoint}/v1/traces")
        env = {names.ENV_ON: "1", names.ENV_ENDPOINT: endpoint}
        protocol = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
        plans = {
            "off": base,
            "on": replace(base, env=env),
            "own": replace(base, extra=own, env=protocol),
        }
        commands = [sink, *(recipes.mono(options) for options in plans.values())]
        found: dict[str, list[Load]] = {name: [] for name in plans}
        with running(*commands, timeout=900, progress=say, logs=Path(scratch)) as servers:
            urls = dict(zip(plans, (server.url for server in servers[1:]), strict=True))
            for url in urls.values():
                load(url, AT_ONCE * 4)
            for number in range(rounds):
                for name, url in urls.items():
                    found[name].append(load(url, requests))
                    say(name, number + 1, f"{found[name][-1].throughput:.1f} requests/s")
        return found


def say(name: str, seconds: float, line: str) -> None:
    """Progress on stderr."""
    sys.stderr.write(f"\r{name} {seconds:.0f} {line[-80:]:80}")
    sys.stderr.flush()


def figures(found: dict[str, list[Load]]) -> dict[str, dict[str, Any]]:
    """Ratios to `off`, round by round: throughput should not fall, latency should not rise."""
    result: dict[str, dict[str, Any]] = {}
    for name in ("on", "own"):
        pairs = list(zip(found[name], found["off"], strict=True))
        for figure, ratios, goal in (
            ("throughput_ratio", [a.throughput / b.throughput for a, b in pairs], 0.98),
            ("itl_p99_ratio", [a.p99 / b.p99 for a, b in pairs], 1.05),
            ("itl_median_ratio", [a.median / b.median for a, b in pairs], 1.02),
        ):
            value = statistics.median(ratios)
            met = value >= goal if figure == "throughput_ratio" else value <= goal
            result[f"{name}_{figure}"] = {
                "value": round(value, 4),
                "spread": [round(min(ratios), 4), round(max(ratios), 4)],
                "goal": goal,
                "met": met,
            }
    return result


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=240, help="per server and round")
    parser.add_argument("--json", type=Path, help="write {figure: {value, goal, met}} there")
    wanted = parser.parse_args()
    found = figures(measure(wanted.rounds, wanted.requests))
    sys.stderr.write("\n")
    for name, figure in found.items():
        low, high = figure["spread"]
        sys.stdout.write(
            f"{name:24} {figure['value']:.3f} [{low:.3f}, {high:.3f}]  goal {figure['goal']}\n"
        )
    if wanted.json:
        wanted.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
