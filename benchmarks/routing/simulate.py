# SPDX-License-Identifier: Apache-2.0
"""The router's own policies in a discrete-event simulation on Mooncake's traces: cases.json in, JSON and a
table out.

    python benchmarks/routing/simulate.py --traces DIR [--cases NAME ...] [--json FILE] [--table]

DIR (or TTFT_OTEL_TRACES) has conversation_trace.jsonl and synthetic_trace.jsonl. Real: the policies, what
they know and how they learn it, the arrivals and shared prefixes of the traces. Simulated: the instances.
Each takes one prefill after the other, first come first served, for 5 ms + 40 us per token + 1.3 ns per
pair (about an 8B model on an H100), times noise, and keeps the latest blocks. Requests have no decode: an
instance is one of a leg that only prefills.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers import PEERS

from ttft_otel.router import choose
from ttft_otel.router.policies.index import History, Holders, Recent
from ttft_otel.router.policies.model import Line
from ttft_otel.router.policies.pending import SECOND
from ttft_otel.router.policies.registry import POLICIES
from ttft_otel.router.policies.state import Options, State
from ttft_otel.router.policies.work import work

BLOCK = 512
COST = Line(0.005, 40e-6, 1.3e-9)
MODEL = "model"
SESSION = "x-session"
STABLE = 0.95
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace; `at` in seconds."""

    at: float
    tokens: int
    blocks: tuple[int, ...]
    session: str


@dataclass(slots=True)
class Server:
    """One simulated instance; `speed` 1 is COST."""

    instance: choose.Instance
    speed: float
    cache: Recent
    waiting: deque[choose.Asked] = field(default_factory=deque)
    busy: float = 0.0
    free: bool = True


def read(path: Path) -> list[Row]:
    """A trace. Its sessions: the second block, the first is the same for nearly all."""
    rows = []
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        ids = row["hash_ids"]
        full = tuple(ids[: row["input_length"] // BLOCK])
        rows.append(Row(row["timestamp"] / 1e3, row["input_length"], full, str(ids[:2][-1])))
    return rows


def faster(rows: list[Row], load: float, capacity: float) -> float:
    """By how much to speed a trace up for this load."""
    span = rows[-1].at - rows[0].at
    return load * capacity * span / sum(COST.seconds(work(row.tokens, 0)) for row in rows)


class World:
    """One case with one policy."""

    def __init__(self, case: dict[str, Any], policy: str, seed: int) -> None:
        size, slow = case["instances"], round(case["instances"] * case["slow"])
        self.lag, self.noise = round(case["lag"] * SECOND), case["noise"]
        self.random = random.Random(f"noise {seed}")
        self.servers = [
            Server(
                choose.instance(f"http://127.0.0.1:{9000 + n}", "prefill"),
                0.5 if n < slow else 1.0,
                Recent(case["cache"]),
            )
            for n in range(size)
        ]
        self.by_url = {each.instance.url: each for each in self.servers}
        index = Holders(BLOCK) if case["index"] == "events" else History(BLOCK, case["cache"])
        self.index = index
        score = "trapezoid" if policy == "trapezoid" else "calibrated"
        options = Options(session=SESSION, score=score)
        self.state = State(index, options, random=random.Random(f"ties {seed}"))
        known: dict[str, Callable[[State], choose.Policy]] = {**POLICIES, **PEERS}
        name = "ttft" if policy in ("trapezoid", "calibrated") else policy
        self.policy = known[name](self.state)
        self.events: list[tuple[int, int, Callable[[int], None]]] = []
        self.order = itertools.count()
        self.sent: dict[str, int] = {}
        self.waits: list[float] = []
        self.hit = 0

    def at(self, when: int, do: Callable[[int], None]) -> None:
        """Do it then."""
        heapq.heappush(self.events, (when, next(self.order), do))

    def run(self, rows: Iterable[Row], speed: float) -> None:
        """From the first arrival to the last first token; arrivals are only looked at when due."""
        for number, row in enumerate(rows):
            when = round(row.at / speed * SECOND)
            while self.events and self.events[0][0] <= when:
                self._next()
            self.arrive(number, row, when)
        while self.events:
            self._next()

    def _next(self) -> None:
        when, _, do = heapq.heappop(self.events)
        do(when)

    def arrive(self, number: int, row: Row, now: int) -> None:
        """The router chooses and sends."""
        request = choose.Asked(
            "prefill",
            "/v1/completions",
            MODEL,
            str(number),
            {SESSION: row.session},
            b"",
            tokens=row.tokens,
            blocks=row.blocks,
        )
        choice = self.policy.choose(request, [each.instance for each in self.servers], now, False)
        self.state.sent(request, choice, now)
        self.sent[request.request_id] = now
        choice.instance.in_flight += 1
        server = self.by_url[choice.instance.url]
        server.waiting.append(request)
        if server.free:
            self.start(server, now)

    def start(self, server: Server, now: int) -> None:
        """The instance takes the next one."""
        server.free = not server.waiting
        if server.free:
            return
        request = server.waiting.popleft()
        most = (request.tokens - 1) // BLOCK
        cached = min(server.cache.match(request.blocks), most) * BLOCK
        seconds = COST.seconds(work(request.tokens, cached)) / server.speed
        seconds *= self.random.lognormvariate(0, self.noise)
        server.busy += seconds
        self.hit += cached
        self.at(
            now + round(seconds * SECOND),
            lambda then: self.done(server, request, then, seconds, cached),
        )

    def done(
        self, server: Server, request: choose.Asked, now: int, seconds: float, cached: int
    ) -> None:
        """The first token; the cache changes now, and the router hears of it later."""
        new, gone = server.cache.use(request.blocks)
        url = server.instance.url
        if isinstance(self.index, Holders) and not isinstance(self.index, History):
            self.at(now + self.lag, lambda _: self.report(url, new, gone))
        self.state.first(request, now, seconds, cached)
        server.instance.in_flight -= 1
        self.waits.append((now - self.sent.pop(request.request_id)) / SECOND)
        self.start(server, now)

    def report(self, url: str, new: list[int], gone: list[int]) -> None:
        """What KV events say."""
        self.index.add(url, new)
        self.index.remove(url, gone)


def simulate(case: dict[str, Any], policy: str, rows: list[Row], seed: int) -> dict[str, Any]:
    """One case with one policy, in numbers; seconds."""
    world = World(case, policy, seed)
    capacity = sum(each.speed for each in world.servers)
    speed = faster(rows, case["load"], capacity)
    began = time.process_time()
    world.run(rows, speed)
    cpu = time.process_time() - began
    assert len(world.waits) == len(rows) and not len(world.state.pending)
    cuts = statistics.quantiles(world.waits, n=100)
    span = (rows[-1].at - rows[0].at) / speed
    found = {
        "mean": statistics.fmean(world.waits),
        "p50": cuts[49],
        "p90": cuts[89],
        "p99": cuts[98],
        "hit": world.hit / sum(row.tokens for row in rows),
        "busy": sum(each.busy for each in world.servers) / len(world.servers) / span,
        "cpu": cpu,
    }
    if policy == "calibrated":
        fits = [fit for (_, url), fit in world.state.models.fits().items() if url]
        found["prefill_mape"] = mean(fit.quality.mape for fit in fits)
        found["prefill_r2"] = mean(fit.quality.r2 for fit in fits)
        found["ttft_mape"] = mean(each.mape for each in world.state.outcomes.values())
        found["ttft_r2"] = mean(each.r2 for each in world.state.outcomes.values())
    return {name: round(value, 5) for name, value in found.items()}


def mean(values: Iterable[float | None]) -> float:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else 0.0


def short(seconds: float) -> str:
    """Three digits or a little more."""
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.0f}"


def table(results: dict[str, Any]) -> str:
    """Mean TTFT of every case and policy in seconds, and what calibrated gains on trapezoid."""
    policies = list(dict.fromkeys(p for case in results["cases"] for p in case["results"]))
    lines = [
        "| case | stable | " + " | ".join(policies) + " | calibrated to trapezoid |",
        "|" + "---|" * (len(policies) + 3),
    ]
    for case in results["cases"]:
        of = {name: found["mean"] for name, found in case["results"].items()}
        least = min(of.values())
        cells = [
            f"**{short(of[name])}**" if of[name] == least else short(of[name]) for name in policies
        ]
        gain = f"{of['calibrated'] / of['trapezoid'] - 1:+.0%}"
        stable = "yes" if case["stable"] else "no"
        lines.append(f"| {case['name']} | {stable} | {' | '.join(cells)} | {gain} |")
    return "\n".join(lines)


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    traces = os.environ.get("TTFT_OTEL_TRACES")
    parser.add_argument("--traces", type=Path, default=Path(traces) if traces else None)
    parser.add_argument("--list", type=Path, default=HERE / "cases.json", help="the cases")
    parser.add_argument("--cases", nargs="*", help="only these; without a name none")
    parser.add_argument("--policies", nargs="*", help="only these, trapezoid and calibrated too")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where to; cases already in it stay")
    parser.add_argument("--table", action="store_true", help="print a Markdown table")
    asked = parser.parse_args()
    if asked.traces is None:
        parser.error("name the folder of the traces: --traces DIR, or TTFT_OTEL_TRACES")
    return asked


def main() -> None:
    """Run the cases one by one; what is done is written at once."""
    asked = options()
    listed = json.loads(asked.list.read_text("utf-8"))
    results: dict[str, Any] = {"seed": asked.seed, "cases": []}
    if asked.json and asked.json.exists():
        results = json.loads(asked.json.read_text("utf-8"))
    policies = asked.policies or listed["policies"]
    policies = list(dict.fromkeys([*policies, "trapezoid", "calibrated"]))
    for case in listed["cases"]:
        if asked.cases is not None and case["name"] not in asked.cases:
            continue
        rows = read(asked.traces / f"{case['trace']}_trace.jsonl")
        found = {name: simulate(case, name, rows, asked.seed) for name in policies}
        stable = found["trapezoid"]["busy"] < STABLE
        others = [each for each in results["cases"] if each["name"] != case["name"]]
        results["cases"] = [*others, {**case, "stable": stable, "results": found}]
        means = {name: each["mean"] for name, each in found.items()}
        sys.stderr.write(f"{case['name']} {means}\n")
        if asked.json:
            asked.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    if asked.table:
        sys.stdout.write(table(results) + "\n")


if __name__ == "__main__":
    main()
