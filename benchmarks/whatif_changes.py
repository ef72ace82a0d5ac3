# SPDX-License-Identifier: Apache-2.0
"""The changes that benchmarks/whatif.py predicts and then runs, in three parts of servers of their own.

Every part records its window, predicts from it, writes the predictions down, runs the changes, and then runs
the unchanged window once more: by how much the two differ is what the machine did meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

from benchmarks.whatif_servers import START_TIMEOUT_S, Bench, RecordedRun, raise_priority
from lab import session_processes
from lab.local_servers import LocalServer, run_servers
from ttft_otel.explain.whatif import what_if
from ttft_otel.explain.whatif.what_if import TTFT
from ttft_otel.explain.whatif.window_check import PlannedChange
from ttft_otel.model.statistics import compute_quantiles

BUSY_RATE: Final = 1.8  # times as many requests, for two instances
CACHED: Final = 0.4  # share of each prompt
MAX_DRIFT: Final = 0.1  # of p50 and p95 on average, between the unchanged window and its repetition
QUANTILES: Final = (0.5, 0.95)

Save = Callable[[Sequence["Outcome"]], None]


@dataclass(slots=True)
class Outcome:
    """p50 and p95 of the TTFT, milliseconds: as it was, as predicted, as it then was, unchanged once more.

    token_time: p50 and p99 of the time per output token, by `before`, `predicted` and `measured`.
    pressures: of these windows, as RecordedRun has it.
    """

    name: str
    before: list[float]
    predicted: list[float]
    interval: list[list[float]]
    replay_error: list[float]
    measured: list[float] = field(default_factory=list)
    measured_by_client: list[float] = field(default_factory=list)
    repeated: list[float] = field(default_factory=list)
    token_time: dict[str, list[float]] = field(default_factory=dict)
    pressures: list[float] = field(default_factory=list)

    def list_errors(self) -> list[float]:
        """Relative errors of the prediction."""
        return [abs(a / b - 1) for a, b in zip(self.predicted, self.measured, strict=True)]

    @property
    def drift(self) -> float:
        """By how much the unchanged window differs from its own repetition."""
        off = [abs(a / b - 1) for a, b in zip(self.repeated, self.before, strict=True)]
        return fmean(off)

    @property
    def is_judged(self) -> bool:
        """Whether the machine was the same before and after: else the run does not judge the prediction."""
        return self.drift <= MAX_DRIFT


def predict(name: str, window: RecordedRun, change: PlannedChange) -> Outcome:
    """The prediction of one change; the reason of a refusal ends the benchmark."""
    fleet = what_if.learn_fleet(window.recording, PlannedChange())
    answer = what_if.predict_fleet(fleet, change)
    figures, tokens = answer.figures[TTFT][:2], answer.token_time[::2]
    return Outcome(
        name,
        before=[each.recorded / 1000 for each in figures],
        predicted=[each.predicted / 1000 for each in figures],
        interval=[[each.low / 1000, each.high / 1000] for each in figures],
        replay_error=list(answer.errors[:2]),
        token_time={
            "before": [each.recorded / 1000 for each in tokens],
            "predicted": [each.predicted / 1000 for each in tokens],
        },
        pressures=[window.pressure],
    )


def find_quantiles(window: RecordedRun) -> list[float]:
    """p50 and p95 of the TTFT, milliseconds."""
    ttfts = [each.ttft_us / 1000 for each in window.recording.requests]
    return list(compute_quantiles(ttfts, QUANTILES))


def measure(outcome: Outcome, window: RecordedRun) -> None:
    """Add what then was."""
    outcome.measured = find_quantiles(window)
    outcome.measured_by_client = list(compute_quantiles(window.clients, QUANTILES))
    outcome.pressures.append(window.pressure)
    tokens = [each.main.token_us / 1000 for each in window.recording.requests if each.main.token_us]
    if tokens:
        outcome.token_time["measured"] = list(compute_quantiles(tokens, (0.5, 0.99)))


def repeat(outcomes: Sequence[Outcome], window: RecordedRun) -> None:
    """Add the unchanged window's repetition."""
    for each in outcomes:
        each.repeated = find_quantiles(window)
        each.pressures.append(window.pressure)
        sys.stderr.write(f"{each}, drift {each.drift:.1%}\n")


def raise_priorities(servers: Sequence[LocalServer]) -> None:
    """Of all processes of these servers."""
    for each in servers:
        raise_priority(session_processes.list_session_pids(each.pid))


def run_load(bench: Bench, save: Save) -> list[Outcome]:
    """Instances, rate, cached tokens, a policy: two servers, of which one is recorded, or both."""
    with ExitStack() as stack:
        first, second = bench.build_server(0), bench.build_server(1)
        servers = stack.enter_context(
            run_servers(first, second, timeout=START_TIMEOUT_S, logs=bench.folder)
        )
        raise_priorities(servers)
        one, two = [servers[0].url], [each.url for each in servers]
        with bench.route(one, "round_robin") as url:
            base = bench.run_window(url, 1.0, seed=1)
            more = predict("instances 1 -> 2", base, PlannedChange(instances=1))
            faster = predict("rate x1.5", base, PlannedChange(rate=1.5))
            cached = predict(f"cache hit +{CACHED:.0%}", base, PlannedChange(cache_hit=CACHED))
            save([more, faster, cached])
            measure(faster, bench.run_window(url, 1.5, seed=2))
            measure(cached, bench.run_window(url, 1.0, seed=3, cached=CACHED))
        with bench.route(two, "round_robin") as url:
            measure(more, bench.run_window(url, 1.0, seed=4))
            busy = bench.run_window(url, BUSY_RATE, seed=5)
        policy = predict("round robin -> ttft", busy, PlannedChange(policy="ttft"))
        save([more, faster, cached, policy])
        with bench.route(two, "ttft") as url:
            measure(policy, bench.run_window(url, BUSY_RATE, seed=6))
        with bench.route(two, "round_robin") as url:
            repeat([policy], bench.run_window(url, BUSY_RATE, seed=7))
        with bench.route(one, "round_robin") as url:
            repeat([more, faster, cached], bench.run_window(url, 1.0, seed=8))
    return [more, faster, cached, policy]


def run_limits(bench: Bench, save: Save) -> list[Outcome]:
    """Two limits of the scheduler, each changed at a server of its own beside the recorded one."""
    seqs_name, tokens_name = "max-num-seqs 4 -> 16", "max-num-batched-tokens 512 -> 2048"
    changes = (
        (seqs_name, {"max_num_seqs": 16}, PlannedChange(max_num_seqs=16)),
        (tokens_name, {"max_num_batched_tokens": 2048}, PlannedChange(max_batched_tokens=2048)),
    )
    with run_servers(bench.build_server(0), timeout=START_TIMEOUT_S, logs=bench.folder) as servers:
        raise_priorities(servers)
        with bench.route([servers[0].url], "round_robin") as url:
            base = bench.run_window(url, 1.0, seed=11)
            outcomes = [predict(name, base, change) for name, _, change in changes]
            save(outcomes)
            for number, (_, limits, _) in enumerate(changes):
                with run_servers(
                    bench.build_server(1, **limits), timeout=START_TIMEOUT_S, logs=bench.folder
                ) as changed:
                    raise_priorities(changed)
                    with bench.route([changed[0].url], "round_robin") as other:
                        window = bench.run_window(other, 1.0, seed=12 + number)
                    measure(outcomes[number], window)
            repeat(outcomes, bench.run_window(url, 1.0, seed=14))
    return outcomes


def run_encoders(bench: Bench, save: Save) -> list[Outcome]:
    """A second encoder instance in front of one that prefills and decodes; every request has an image."""
    commands = bench.build_encoders()
    with run_servers(*commands, timeout=START_TIMEOUT_S, logs=bench.folder) as servers:
        raise_priorities(servers)
        encoders = [each.url for each in servers if each.name.startswith("e-")]
        rest = {"prefill_decode": [servers[-1].url]}
        with bench.route({"encode": encoders[:1], **rest}, "round_robin") as url:
            base = bench.run_window(url, 1.0, seed=21)
            more = predict("encoders 1 -> 2", base, PlannedChange(encoders=1))
            save([more])
        with bench.route({"encode": encoders, **rest}, "round_robin") as url:
            measure(more, bench.run_window(url, 1.0, seed=22))
        with bench.route({"encode": encoders[:1], **rest}, "round_robin") as url:
            repeat([more], bench.run_window(url, 1.0, seed=23))
    return [more]


PARTS: Final[Mapping[str, Callable[[Bench, Save], list[Outcome]]]] = {
    "load": run_load,
    "limits": run_limits,
    "encoders": run_encoders,
}
