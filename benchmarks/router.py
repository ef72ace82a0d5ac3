# SPDX-License-Identifier: Apache-2.0
"""What a request costs the router: CPU time of its process, with tracing on and off, and of others.

Beside it, in the same rounds: `vllm-router` (Rust, from PyPI, in an environment of its own in the
user's cache) and a bare FastAPI proxy. 16 connections in a closed loop against an instance that
answers at once (wire.py): plain answers, streams of 16 events, streams of 200 tokens 5 ms apart.

    python benchmarks/router.py [--rounds 8] [--requests 4000] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import uvloop
import wire

from ttft_otel.lab.models import cache_root
from ttft_otel.lab.ports import free
from ttft_otel.lab.releases import uv

CONNECTIONS: Final = 16
HERE: Final = Path(__file__).parent
RUST: Final = "vllm-router==0.1.17"
ROUTER: Final = (
    sys.executable,
    "-c",
    "from ttft_otel.router.command import command; command()",
)
QUESTION: Final = [{"role": "user", "content": "How long until the first token?"}]
EVENTS: Final = {"plain": 0, "stream": wire.EVENTS - 1, "paced": wire.TOKENS - 1}  # with words
GOALS: Final = {"plain traced": 300.0, "stream traced": 350.0, "records dropped": 0.0}


@dataclass
class Subject:
    """A router under test: how it is started, where it listens, what each round of a case cost."""

    name: str
    command: Sequence[str]
    port: int
    env: Mapping[str, str] = field(default_factory=dict)
    only: tuple[str, ...] = tuple(EVENTS)
    pid: int = 0
    used: dict[str, list[float]] = field(default_factory=lambda: {case: [] for case in EVENTS})

    @property
    def url(self) -> str:
        """Where it is asked."""
        return f"http://127.0.0.1:{self.port}"


def subjects(backend: str) -> list[Subject]:
    """Everything that is measured; without vllm-router when it cannot be had."""
    found = []
    for name, on in (("traced", "1"), ("untraced", "0")):
        port = free()
        env = {"TTFT_OTEL": on, "OTEL_EXPORTER_OTLP_ENDPOINT": backend}
        command = (*ROUTER, "--backend", backend, "--port", str(port))
        found.append(Subject(name, command, port, env))
    port = free()
    pair = (*ROUTER, "--prefill", backend, "--decode", backend, "--port", str(port))
    env = {"TTFT_OTEL": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": backend}
    found.append(Subject("traced P/D", pair, port, env, ("stream", "paced")))
    if program := rust():
        port = free()
        address = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free()))
        quiet = ("--policy", "round_robin", "--log-level", "error")
        found.append(Subject("rust", (program, "--worker-urls", backend, *address, *quiet), port))
    port = free()
    bare = (sys.executable, str(HERE / "bare.py"), str(port), backend)
    found.append(Subject("fastapi", bare, port))
    return found


def rust() -> str:
    """vllm-router's program, installed at the first use; "" when it cannot be had, and says why."""
    folder = cache_root() / "peers" / RUST
    program = folder / "bin" / "vllm-router"
    if not program.exists():
        try:
            uv("venv", "--quiet", "--clear", "--python", "3.11", str(folder))
            uv("pip", "install", "--quiet", "--python", str(folder), RUST)
        except (OSError, subprocess.CalledProcessError) as error:
            say(f"Without {RUST}: it could not be installed into {folder} ({error}).\n")
            return ""
    return str(program)


@contextlib.contextmanager
def running(command: Sequence[str], url: str, env: Mapping[str, str]) -> Iterator[int]:
    """A process that is terminated in the end; its pid, once its /health answers."""
    process = subprocess.Popen(command, env={**os.environ, **env}, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while not answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{' '.join(command)} did not start ({process.poll()})")
            time.sleep(0.1)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def answers(url: str) -> bool:
    """Whether a GET is answered with 200."""
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def cpu(pid: int) -> float:
    """Seconds of CPU that a process has used, to the nanosecond; /proc's stat counts 10 ms."""
    return time.clock_gettime((~pid << 3) | 2)  # what clock_getcpuclockid(3) makes of a pid


def measure(rounds: int, requests: int, asked: Sequence[Subject]) -> None:
    """Every case with every subject, round by round: the machine's mood hits all alike."""
    for number in range(rounds + 1):  # the first one warms up
        for case, events in EVENTS.items():
            count = CONNECTIONS if case == "paced" else requests // rounds
            for each in asked:
                if case not in each.only:
                    continue
                say(f"\rround {number}/{rounds}: {case} {each.name}{' ' * 20}")
                before = cpu(each.pid)
                uvloop.run(wire.load(each.url, body(case), events, count, CONNECTIONS))
                if number:
                    each.used[case].append((cpu(each.pid) - before) / count * 1e6)
    say("\r" + " " * 60 + "\r")


def body(case: str) -> bytes:
    """The request of a case, compact: the Rust router writes it so whatever it got."""
    asked = {"model": "tiny", "messages": QUESTION, "stream": case != "plain", "user": case}
    return json.dumps(asked, separators=(",", ":")).encode()


def dropped(url: str) -> float:
    """The records that the router dropped, by its own count; waits until the last one is out."""
    time.sleep(1)
    with urllib.request.urlopen(f"{url}/metrics") as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("ttft_otel_dropped"))


def figures(asked: Sequence[Subject], lost: float) -> dict[str, dict[str, Any]]:
    """Medians and ranges in microseconds; per token where it is paced."""
    found: dict[str, dict[str, Any]] = {}
    by_name = {each.name: each for each in asked}
    for each in asked:
        for case, rounds in each.used.items():
            if rounds:
                per = wire.TOKENS if case == "paced" else 1
                name = f"{case} {each.name}" + (", per token" if per > 1 else "")
                found[name] = figure([one / per for one in rounds], GOALS.get(name))
    if "rust" in by_name:
        found["stream untraced"]["goal"] = goal = found["stream rust"]["value"]
        found["stream untraced"]["met"] = found["stream untraced"]["value"] <= goal
    pairs = zip(by_name["traced"].used["stream"], by_name["untraced"].used["stream"], strict=True)
    found["stream, tracing adds"] = figure([on - off for on, off in pairs], None)
    pairs = zip(by_name["traced"].used["plain"], by_name["untraced"].used["plain"], strict=True)
    found["plain, tracing adds"] = figure([on - off for on, off in pairs], None)
    found["records dropped"] = figure([lost], GOALS["records dropped"])
    return found


def figure(values: Sequence[float], goal: float | None) -> dict[str, Any]:
    """One line of the result; without a goal it is there to compare with."""
    value = statistics.median(values)
    return {
        "value": round(value, 1),
        "spread": [round(min(values), 1), round(max(values), 1)],
        "goal": goal,
        "met": goal is None or value <= goal,
    }


def say(text: str) -> None:
    """Progress on stderr."""
    sys.stderr.write(text)
    sys.stderr.flush()


def main() -> int:
    """Measure, print, write; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write {figure: {value, goal, met}} there")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--requests", type=int, default=4000, help="per router and case")
    wanted = parser.parse_args()
    port = free()
    backend = f"http://127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        instance = (sys.executable, str(HERE / "wire.py"), str(port))
        stack.enter_context(running(instance, backend, {}))
        asked = subjects(backend)
        for each in asked:
            each.pid = stack.enter_context(running(each.command, each.url, each.env))
        measure(wanted.rounds, wanted.requests, asked)
        found = figures(asked, dropped(asked[0].url))
    for name, one in found.items():
        low, high = one["spread"]
        goal = (
            "" if one["goal"] is None else f"  goal {one['goal']}{'' if one['met'] else ' MISSED'}"
        )
        sys.stdout.write(f"{name:28} {one['value']:8.1f} [{low:.1f}, {high:.1f}]{goal}\n")
    if wanted.json:
        wanted.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if all(one["met"] for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
