# SPDX-License-Identifier: Apache-2.0
"""Routing policies before two real vLLM servers, in turn under the same load: TTFTs as JSON, table, pictures.

The servers run the laboratory's heavy text model, one processor core each, with KV events. Each policy has
a router of its own; all of them stay up over all rounds, each is loaded by `ttft-otel bench` in its turn.
All policies get the same prompts at the same times within a round. Before each run both servers forget
their cached prefixes (POST /reset_prefix_cache, which servers with VLLM_SERVER_DEV_MODE=1 have).
Ctrl-C ends it and keeps what was measured. Needs about 8 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from draw import apart, paged, picture, table
from loads import AT_ONCE, EXPERIMENTS, POLICIES, ROUTERS, SINGLE, WARM, Experiment, order
from stage import FIRST, Stage, staged
from weigh import capacity, figures

REST: Final = 7.0  # seconds that a run takes beside its load, until one was measured
EXAMPLES: Final = """\
examples:
  python benchmarks/routing/experiments.py multi-round shared-prefix multi-round-long \\
      --minutes 28 --json live.json
  python benchmarks/routing/experiments.py shared-prefix --rounds 5 --rate 2 --seconds 60 --json live.json
  python benchmarks/routing/experiments.py shared-prefix --rounds 1 --seconds 10 \\
      --servers http://127.0.0.1:8001 http://127.0.0.1:8002 --policies round_robin qps
  python benchmarks/routing/experiments.py --json live.json --pictures docs/img   (no run: redraws)
"""


@dataclass(slots=True)
class Clock:
    """How much time is left, and how long a run of an experiment takes beside its load."""

    end: float
    rest: dict[str, float] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def room(self, experiment: Experiment, runs: int) -> bool:
        """Whether so many runs of it still fit."""
        return runs * (experiment.seconds + self.rest.get(experiment.name, REST)) <= self.left

    def took(self, experiment: Experiment, seconds: float) -> None:
        """A run did."""
        rest = seconds - experiment.seconds
        self.rest[experiment.name] = max(self.rest.get(experiment.name, 0.0), rest)

    def say(self, text: str) -> None:
        """A line of progress."""
        left = max(0, int(self.left))
        sys.stderr.write(f"\r[{left // 60:2}:{left % 60:02} left] {text}\n")
        sys.stderr.flush()


def measure(stage: Stage, asked: argparse.Namespace, clock: Clock, found: dict[str, Any]) -> None:
    """Warm up, then round after round of all experiments, while time is left; fills `found`."""
    found["resets"] = stage.forget()
    if not found["resets"]:
        clock.say("servers cannot forget their caches: each run has prompts and times of its own")
    found["apart"] = _apart(stage, asked.seed)
    clock.say(
        "a prefill takes {alone:.2f} s, {together:.2f} s with both at work".format(**found["apart"])
    )
    experiments = [_paced(stage, each, asked.seed, clock) for each in asked.experiments]
    found["loads"] = {each.name: each.load(0) for each in experiments}
    for place, (policy, router) in enumerate(stage.routers.items()):
        seed = asked.seed if found["resets"] else asked.seed + place
        document = _bench(router.url, [*WARM, "--seed", str(seed)])
        found["warm"][policy] = stage.learnt(policy)
        clock.say(f"warm-up {policy}: {_told(_run(document))}")
        stage.forget()
    for number in range(asked.rounds):
        for experiment in experiments:
            if clock.room(experiment, len(asked.policies)):
                _round(stage, asked, clock, found, experiment, number)
            else:
                clock.say(f"{experiment.name} round {number + 1}: no time left for all policies")


def _apart(stage: Stage, seed: int) -> dict[str, float]:
    """Seconds of the same prefills on one server alone, and on both at once: less than two cores show."""
    flags = [*SINGLE, "--seed", str(seed)]
    alone = _run(_bench(stage.backends[0], flags))["requests"]
    stage.forget()
    with ThreadPoolExecutor() as pool:
        both = list(pool.map(lambda url: _run(_bench(url, flags))["requests"], stage.backends))
    stage.forget()
    runs = {"alone": alone, "together": [row for rows in both for row in rows]}
    return {
        name: round(statistics.fmean(row[1] for row in rows) / 1e3, 3)
        for name, rows in runs.items()
    }


def _paced(stage: Stage, experiment: Experiment, seed: int, clock: Clock) -> Experiment:
    """With a rate: its own, or its share of what the servers can do."""
    if experiment.rate:
        return experiment
    run = _run(_bench(next(iter(stage.routers.values())).url, experiment.full(seed)))
    most = capacity(run["requests"], AT_ONCE)
    stage.forget()
    clock.say(f"{experiment.name}: {most:.2f} requests/s are all that both servers can do")
    return replace(experiment, rate=round(most * experiment.share, 2))


def _round(
    stage: Stage,
    asked: argparse.Namespace,
    clock: Clock,
    found: dict[str, Any],
    experiment: Experiment,
    number: int,
) -> None:
    """All policies in turn."""
    for place, policy in enumerate(order(tuple(asked.policies), number)):
        began = time.monotonic()
        stage.forget()
        seed = asked.seed + 1000 * (number + 1)
        seed += 0 if found["resets"] else place + 1
        before = stage.busy()
        run = _run(_bench(stage.routers[policy].url, experiment.load(seed)))
        run["cpu_s"] = [round(b - a, 2) for a, b in zip(before, stage.busy(), strict=True)]
        run["learnt"] = stage.learnt(policy) if policy == "calibrated" else None
        where = {"experiment": experiment.name, "policy": policy, "round": number + 1}
        found["runs"].append({**where, "place": place + 1, "seed": seed, **run})
        _keep(asked.json, found)
        clock.took(experiment, time.monotonic() - began)
        clock.say(f"{experiment.name} round {number + 1} {policy}: {_told(run)}")


def _bench(url: str, flags: Sequence[str]) -> Any:
    """One run of `ttft-otel bench`, as its JSON."""
    with tempfile.TemporaryDirectory(prefix="ttft-otel-") as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "ttft_otel.cli", "bench", "--url", url, *flags]
        done = subprocess.run(
            [*FIRST, *command, "--output", str(out)], capture_output=True, text=True, check=False
        )
        if done.returncode == 130:
            raise KeyboardInterrupt
        if not out.exists():
            raise SystemExit(f"bench ended with {done.returncode}: {done.stderr[-2000:]}")
        return json.loads(out.read_text("utf-8"))


def _run(document: Any) -> dict[str, Any]:
    """What is kept of one run."""
    run = document["targets"][0]["runs"][0]
    keys = ("sent_ms", "ttft_ms", "input_tokens", "cached_tokens", "latency_ms")
    kept = ("valid", "seconds", "lag_ms", "held", "failures", "unfinished")
    rows = [[each[key] or 0 for key in keys] for each in run["requests"]]
    return {key: run[key] for key in kept} | {"requests": rows}


def _told(run: dict[str, Any]) -> str:
    rows = run["requests"]
    if not rows:
        return f"no request succeeded: {run['failures']}"
    ttfts = sorted(row[1] for row in rows)
    cached = sum(row[3] for row in rows) / max(1, sum(row[2] for row in rows))
    return (
        f"{len(rows)} requests in {run['seconds']:.0f} s, TTFT mean {sum(ttfts) / len(ttfts):.0f} ms, "
        f"max {ttfts[-1]:.0f} ms, {cached:.0%} cached, own lag p99 {run['lag_ms']['send_p99']:.1f} ms, "
        f"failures {run['failures'] or 'none'}"
    )


def _keep(path: Path | None, found: dict[str, Any]) -> None:
    """Write it all, one run a line."""
    if path is None:
        return
    runs = ",\n".join(json.dumps(run, separators=(",", ":")) for run in found["runs"])
    rest = json.dumps({key: value for key, value in found.items() if key != "runs"}, indent=1)
    path.write_text(f'{rest[:-2]},\n "runs": [\n{runs}\n]\n}}\n', encoding="utf-8")


def _starting(name: str, seconds: float, line: str) -> None:
    sys.stderr.write(f"\r{name} {seconds:3.0f} s {line[-80:]:80}")
    sys.stderr.flush()


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="EXPERIMENT", help=" or ".join(EXPERIMENTS))
    parser.add_argument("--policies", nargs="+", choices=ROUTERS, default=list(POLICIES))
    parser.add_argument("--rounds", type=int, default=3, help="at most (default: 3)")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="for everything; begins no round later"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        nargs="+",
        help="of load in a run: one for all, or one for each experiment",
    )
    parser.add_argument(
        "--rate", type=float, nargs="+", help="requests per second: one for all, or one for each"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--servers", nargs=2, default=(), metavar="URL", help="two that run already"
    )
    parser.add_argument(
        "--router",
        action="append",
        default=[],
        metavar="FLAG",
        help="for all routers: --router=--flag",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="figures and all runs")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="draw into it")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="put the tables between its marks"
    )
    asked = parser.parse_args()
    if unknown := set(asked.names) - set(EXPERIMENTS):
        parser.error(
            f"no experiment {', '.join(sorted(unknown))}; there are {', '.join(EXPERIMENTS)}"
        )
    if not asked.names and not (asked.json and asked.json.exists()):
        parser.error("name an experiment, or with --json FILE results that are there")
    asked.experiments = [
        replace(
            EXPERIMENTS[name],
            rate=_nth(asked.rate, place) or EXPERIMENTS[name].rate,
            seconds=_nth(asked.seconds, place) or EXPERIMENTS[name].seconds,
        )
        for place, name in enumerate(asked.names)
    ]
    return asked


def _nth(values: Sequence[float] | None, place: int) -> float | None:
    """One for each, or the only one for all."""
    return values[min(place, len(values) - 1)] if values else None


def perform(asked: argparse.Namespace) -> dict[str, Any]:
    """Start, measure, stop; what there is when it ends early."""
    clock = Clock(time.monotonic() + 60 * asked.minutes)
    flags = {each: [*ROUTERS[each], *asked.router] for each in asked.policies}
    found: dict[str, Any] = {
        "figures": {},
        "machine": {"processors": os.cpu_count(), "machine": platform.machine()},
        "policies": flags,
        "warm": {},
        "runs": [],
    }
    with tempfile.TemporaryDirectory(prefix="ttft-otel-") as scratch:
        try:
            with staged(asked.servers, flags, Path(scratch), _starting) as stage:
                sys.stderr.write("\n")
                measure(stage, asked, clock, found)
        except KeyboardInterrupt:
            clock.say("interrupted: what was measured is kept")
    return found


def main() -> None:
    """Measure or read, then print, write, draw."""
    asked = options()
    found = perform(asked) if asked.names else json.loads(asked.json.read_text("utf-8"))
    found["figures"] = {}  # at the end only: the draws take seconds
    for name in EXPERIMENTS:
        found["figures"] |= figures(found, name)
    _keep(asked.json, found)
    pages = {"apart": apart(found)} | {name: table(found, name) for name in EXPERIMENTS}
    for name, shown in pages.items():
        if not shown:
            continue
        sys.stdout.write(f"{name}\n\n{shown}\n")
        if asked.pictures and name in EXPERIMENTS:
            (asked.pictures / f"routing-{name}.svg").write_text(picture(found, name), "utf-8")
        if asked.page:
            text = asked.page.read_text("utf-8")
            asked.page.write_text(paged(text, name, shown), encoding="utf-8")


if __name__ == "__main__":
    main()
