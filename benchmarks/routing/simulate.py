# SPDX-License-Identifier: Apache-2.0
"""The router's own policies in a discrete-event simulation on Mooncake's traces: cases.json in, JSON and a
table out.

    python benchmarks/routing/simulate.py --traces DIR [--seeds N ...] [--json FILE] [--table]

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
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oracle import Oracle
from peers import PEERS
from tables import goals, seeds, table
from traces import BLOCK, COST, Row, alone, faster, read

from ttft_otel.router import choose
from ttft_otel.router.policies.index import History, Holders, Recent
from ttft_otel.router.policies.pending import SECOND
from ttft_otel.router.policies.registry import POLICIES
from ttft_otel.router.policies.state import Options, State
from ttft_otel.router.policies.work import work

MODEL = "model"
SESSION = "x-session"
STABLE = 0.95
HERE = Path(__file__).parent


@dataclass(slots=True)
class Server:
    """One simulated instance; `speed` 1 is COST."""

    instance: choose.Instance
    speed: float
    cache: Recent
    waiting: deque[choose.Asked] = field(default_factory=deque)
    busy: float = 0.0
    free: bool = True
    running: choose.Asked | None = None
    ends: int = 0


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
        self.policy = Oracle(self) if policy == "oracle" else known[name](self.state)
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
        cached = self.cached(server, request, ())
        seconds = self.seconds(server, request, cached)
        seconds *= self.random.lognormvariate(0, self.noise)
        server.running, server.ends = request, now + round(seconds * SECOND)
        server.busy += seconds
        self.hit += cached
        self.at(server.ends, lambda then: self.done(server, request, then, seconds, cached))

    def cached(self, server: Server, request: choose.Asked, coming: Collection[int]) -> int:
        """Tokens that the instance need not compute, if it gets these blocks before."""
        depth, blocks = server.cache.match(request.blocks), request.blocks
        while depth < len(blocks) and blocks[depth] in coming:
            depth += 1
        return min(depth, (request.tokens - 1) // BLOCK) * BLOCK

    def seconds(self, server: Server, request: choose.Asked, cached: int) -> float:
        """What the prefill takes there, without noise."""
        return COST.seconds(work(request.tokens, cached)) / server.speed

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


def simulate(case: dict[str, Any], policy: str, rows: tuple[Row, ...], seed: int) -> dict[str, Any]:
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


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    traces = os.environ.get("TTFT_OTEL_TRACES")
    parser.add_argument("--traces", type=Path, default=Path(traces) if traces else None)
    parser.add_argument("--list", type=Path, default=HERE / "cases.json", help="the cases")
    parser.add_argument("--cases", nargs="*", help="only these; without a name none")
    parser.add_argument(
        "--policies", nargs="*", help="in seed 1 only these, and those of all seeds"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1], help="1: the traces as they are"
    )
    parser.add_argument("--jobs", type=int, default=1, help="cases at once")
    parser.add_argument("--json", type=Path, help="where to; what is in it already stays")
    parser.add_argument("--table", action="store_true", help="print Markdown tables")
    asked = parser.parse_args()
    if asked.traces is None:
        parser.error("name the folder of the traces: --traces DIR, or TTFT_OTEL_TRACES")
    return asked


def play(case: dict[str, Any], folder: Path, policies: list[str], seed: int) -> dict[str, Any]:
    """One case with one seed: figures of each policy, and the least mean that there could be."""
    rows = read(folder / f"{case['trace']}_trace.jsonl", seed)
    found: dict[str, Any] = {name: simulate(case, name, rows, seed) for name in policies}
    return {**found, "alone": {"mean": round(alone(rows), 5)}}


def merged(listed: dict[str, Any], kept: list[dict[str, Any]], new: dict[str, Any]) -> list[Any]:
    """The kept cases with what is new, in the order in which they are listed."""
    by_name = {each["name"]: each for each in kept}
    case = by_name.setdefault(new["name"], {**new["case"], "results": {}, "seeds": {}})
    if new["seed"] == 1:
        found = {**case["results"], **new["found"]}
        case["results"] = {name: found[name] for name in listed["policies"] if name in found}
        if "trapezoid" in found:
            case["stable"] = found["trapezoid"]["busy"] < STABLE
    means = {name: each["mean"] for name, each in new["found"].items()}
    seed = str(new["seed"])
    case["seeds"][seed] = {**case["seeds"].get(seed, {}), **means}
    return [by_name[each["name"]] for each in listed["cases"] if each["name"] in by_name]


def main() -> None:
    """Run the cases; what is done is written at once."""
    asked = options()
    listed = json.loads(asked.list.read_text("utf-8"))
    kept: list[dict[str, Any]] = []
    if asked.json and asked.json.exists():
        kept = json.loads(asked.json.read_text("utf-8"))["cases"]
    policies = asked.policies or [*listed["policies"], "oracle"]
    cases = [each for each in listed["cases"] if asked.cases is None or each["name"] in asked.cases]
    with ProcessPoolExecutor(asked.jobs) as pool:
        jobs = {
            pool.submit(play, case, asked.traces, policies, seed): (case, seed)
            for seed in asked.seeds
            for case in cases
        }
        for job in as_completed(jobs):
            case, seed = jobs[job]
            new = {"name": case["name"], "case": case, "seed": seed, "found": job.result()}
            kept = merged(listed, kept, new)
            means = {name: each["mean"] for name, each in new["found"].items()}
            sys.stderr.write(f"{case['name']} {seed} {means}\n")
            if asked.json:
                asked.json.write_text(json.dumps({"cases": kept}, indent=1) + "\n", "utf-8")
    if asked.table:
        sys.stdout.write("\n\n".join((table(kept), goals(kept), seeds(kept))) + "\n")


if __name__ == "__main__":
    main()
