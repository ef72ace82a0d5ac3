# SPDX-License-Identifier: Apache-2.0
"""Whether `ttft-otel whatif` is right where the truth is known: a model serves all again, with the change.

    python -m benchmarks.whatif_known [--seed N] [--only NAME] [--repetitions N] [--json FILE]

The model of vLLM is that of benchmarks/answers, which shares no code with the package: its device's time
is no line in tokens, decodes read contexts, processes stop, instances differ. tests/explain asserts
some of it against vLLM's own Scheduler; benchmarks/whatif.py asks real servers.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy

from benchmarks.answers.known_engine import EngineSettings, Job, KnownEngine
from benchmarks.figures import Figure, build_figure, build_figure_parser, report_figures
from ttft_otel.explain.whatif import what_if
from ttft_otel.explain.whatif.replay_facts import EngineVisit, Recording, ReplayRequest
from ttft_otel.explain.whatif.what_if import QUANTILES, TTFT, describe_change
from ttft_otel.explain.whatif.window_check import PlannedChange
from ttft_otel.explain.window.request_facts import CannotTellError
from ttft_otel.model.names import keys

BEFORE_US: Final = 1500  # from the client to the engine
AFTER_US: Final = 400  # back
FOREVER: Final = 1 << 60
MAX_P95_ERROR: Final = 0.07  # the median over all answers
MIN_INSIDE: Final = 0.9  # of the true p50, p95 and p99 in their 90 % intervals
MAX_TOKEN_ERROR: Final = 0.15  # the largest of the three, the median over all answers
MAX_SILENT: Final = 0.3  # of an error that no warning stands beside
PLAIN: Final = EngineSettings()
FEW_BLOCKS: Final = replace(PLAIN, kv_tokens=5500)
SLOW: Final = replace(PLAIN, slow=((0, FOREVER, 2.5),))
STOPS: Final = tuple((begin * 10**6, begin * 10**6 + 1_500_000) for begin in (15, 60, 90))


@dataclass(frozen=True)
class ChangedWindow:
    """Requests that come by chance, the engines that take turns, and changes to predict."""

    engines: tuple[EngineSettings, ...]
    rate: float  #: requests in a second
    changes: tuple[PlannedChange, ...]
    median: float = 400  #: tokens of a prompt, log-normal
    sigma: float = 0.7
    longest: int = 8000
    answer: float = 120  #: tokens, exponential
    count: int = 700


FASTER: Final = PlannedChange(rate=1.5)
MORE: Final = PlannedChange(instances=1)
WINDOWS: Final = {
    "usual": ChangedWindow((PLAIN,), 6.0, (PlannedChange(), FASTER, MORE)),
    "settings": ChangedWindow(
        (PLAIN,),
        6.0,
        (
            PlannedChange(max_batched_tokens=512),
            PlannedChange(max_num_seqs=16),
            PlannedChange(cache_hit=0.2),
        ),
    ),
    "few_places": ChangedWindow(
        (replace(PLAIN, max_num_seqs=8),), 4.0, (PlannedChange(max_num_seqs=32), MORE)
    ),
    "small_budget": ChangedWindow(
        (replace(PLAIN, max_num_batched_tokens=512),),
        5.5,
        (PlannedChange(max_batched_tokens=2048), PlannedChange(max_batched_tokens=1024)),
        median=700,
    ),
    "slow_instance": ChangedWindow((PLAIN, PLAIN, SLOW), 12.0, (PlannedChange(), FASTER, MORE)),
    "long_contexts": ChangedWindow(
        (PLAIN,),
        0.7,
        (FASTER, MORE, PlannedChange(max_num_seqs=8)),
        *(7000, 0.4, 30_000, 500, 400),
    ),
    "few_blocks": ChangedWindow(
        (FEW_BLOCKS,), 4.0, (MORE, PlannedChange(kv_cache=2.0)), median=500, longest=4000
    ),
    "heavy_tail": ChangedWindow((PLAIN,), 3.2, (FASTER, MORE), *(150, 1.6, 30_000)),
    "overload": ChangedWindow((PLAIN,), 16.0, (MORE, PlannedChange(instances=2)), median=600),
    "stops": ChangedWindow(
        (replace(PLAIN, stops=STOPS),),
        6.0,
        (PlannedChange(rate=1.3), PlannedChange(max_batched_tokens=1024)),
    ),
}


class StepwiseEngine(KnownEngine):
    """An engine whose steps are all its own: a host's part that several share is another truth."""

    def _count_like_steps(self, room: int) -> int:
        return 1


@dataclass
class Judged:
    """One answer; empty where it was refused."""

    name: str
    refusal: str = ""
    errors: list[float] = field(default_factory=list)  #: of the p50, p95 and p99 of the TTFT
    token_errors: list[float] = field(default_factory=list)  #: of the time per output token
    inside: list[bool] = field(default_factory=list)
    warnings: int = 0


def draw_jobs(window: ChangedWindow, seed: int) -> list[Job]:
    """The requests of a window, by the order of their arrival."""
    chance, at, jobs = numpy.random.default_rng(seed), 0.0, []
    for name in range(window.count):
        at += chance.exponential(1 / window.rate)
        tokens = min(window.median * chance.lognormal(0, window.sigma) + 8, window.longest)
        answer = int(chance.exponential(window.answer)) + 2
        jobs.append(Job(int(at * 1e6) + BEFORE_US, int(tokens), answer=answer, name=name))
    return jobs


def serve(jobs: Sequence[Job], engines: Sequence[EngineSettings], seed: int) -> list[Job]:
    """What becomes of the requests, which take turns."""
    served = copy.deepcopy(list(jobs))
    for number, settings in enumerate(engines):
        chance = numpy.random.default_rng([seed, number])
        StepwiseEngine(settings, chance).serve(served[number :: len(engines)])
    return served


def serve_changed(
    jobs: Sequence[Job], engines: Sequence[EngineSettings], change: PlannedChange, seed: int
) -> list[Job]:
    """What becomes of them with the change."""
    changed = [
        replace(
            each,
            max_num_seqs=change.max_num_seqs or each.max_num_seqs,
            max_num_batched_tokens=change.max_batched_tokens or each.max_num_batched_tokens,
            kv_tokens=round(each.kv_tokens * change.kv_cache),
            stops=tuple(
                (round(begin / change.rate), round(begin / change.rate) + end - begin)
                for begin, end in each.stops
            ),
        )
        for each in engines
    ]
    changed += [replace(changed[0], stops=(), slow=())] * change.instances
    moved = copy.deepcopy(list(jobs))
    for job in moved:
        job.at = round((job.at - BEFORE_US) / change.rate) + BEFORE_US
        job.cached = min(round(job.tokens * change.cache_hit), job.tokens - 1)
    return serve(moved, changed, seed)


def record(served: Sequence[Job], engines: Sequence[EngineSettings]) -> Recording:
    """The window as traces would tell it."""
    requests = []
    for number, job in enumerate(served):
        stages = {
            "prefill.queue": job.taken - job.at,
            "prefill.compute": job.compute,
            "prefill.stall": job.stall,
            "dispatch": job.dispatch,
            "sample": job.sample,
        }
        # A preempted prompt's chunks are computed again.
        stages["prefill.stall"] += job.first - job.at - sum(stages.values())
        visit = EngineVisit(
            instance=f"chat-{number % len(engines)}",
            role="mono",
            arrived=job.at,
            computed=max(job.tokens - job.cached, 1),
            cached=job.cached,
            stages=stages,
            chunks=max(job.chunks, 1),
            own_tokens=job.own_tokens,
            step_tokens=job.step_tokens,
            output_tokens=job.answer,
            token_us=round(measure_token_time(job)),
            answer_us=job.ended - job.first,
            after_us=AFTER_US,
            preemptions=job.preemptions,
            reasons={name: us for name, us in job.reasons.items() if us},
        )
        whole = {"preprocess": BEFORE_US, **stages, "output": AFTER_US}
        requests.append(ReplayRequest(f"r{number}", job.at - BEFORE_US, visit, whole))
    settings = {
        f"chat-{number}": {
            keys.ENGINE_MAX_SEQS: each.max_num_seqs,
            keys.ENGINE_MAX_TOKENS: each.max_num_batched_tokens,
            keys.ENGINE_KV_TOKENS: each.kv_tokens,
            keys.ENGINE_ASYNC: 0,
        }
        for number, each in enumerate(engines)
    }
    return Recording(tuple(requests), settings, roles=frozenset({"mono"}))


def measure_token_time(job: Job) -> float:
    """Microseconds between two tokens of an answer."""
    return (job.ended - job.first) / (job.answer - 1)


def judge_window(name: str, window: ChangedWindow, seed: int, repetitions: int) -> list[Judged]:
    """Predict each of the window's changes, and compare."""
    jobs = draw_jobs(window, seed)
    recording = record(serve(jobs, window.engines, seed), window.engines)
    found = []
    for change in window.changes:
        told = " ".join(f"{key} {value:g}" for key, value in describe_change(change).items())
        judged = Judged(f"{name}, {told or 'unchanged'}")
        found.append(judged)
        try:
            fleet = what_if.learn_fleet(recording, PlannedChange())
            answer = what_if.predict_fleet(fleet, change, repetitions)
        except CannotTellError as error:
            judged.refusal = str(error)
            continue
        truth = serve_changed(jobs, window.engines, change, seed + 1000)
        lengths = [each.first - each.at + BEFORE_US + AFTER_US for each in truth]
        ttfts = numpy.quantile(lengths, QUANTILES)
        times = numpy.quantile([measure_token_time(each) for each in truth], QUANTILES)
        figures = answer.figures[TTFT]
        judged.errors = [a.predicted / b - 1 for a, b in zip(figures, ttfts, strict=True)]
        judged.inside = [a.low <= b <= a.high for a, b in zip(figures, ttfts, strict=True)]
        if answer.token_time:
            judged.token_errors = [
                a.predicted / b - 1 for a, b in zip(answer.token_time, times, strict=True)
            ]
        judged.warnings = len(answer.warnings)
    return found


def build_figures(judged: Sequence[Judged]) -> dict[str, Figure]:
    """The errors of all answers against their goals, and each beside them."""
    told = [each for each in judged if each.errors]
    silent = [
        each.name for each in told if max(map(abs, each.errors)) > MAX_SILENT and not each.warnings
    ]
    figures = {
        "answers": build_figure([len(told)]),
        "refusals": build_figure([len(judged) - len(told)]),
        "p95_error": build_figure(
            [float(numpy.median([abs(each.errors[1]) for each in told]))], MAX_P95_ERROR, digits=3
        ),
        "inside": build_figure(
            [float(numpy.mean([each.inside for each in told]))], MIN_INSIDE, at_least=True, digits=3
        ),
        "silent_misses": build_figure([len(silent)], 0),
        "token_time_error": build_figure(
            [
                float(
                    numpy.median(
                        [max(map(abs, each.token_errors)) for each in told if each.token_errors]
                    )
                )
            ],
            MAX_TOKEN_ERROR,
            digits=3,
        ),
    }
    for each in told:
        for share, error in zip(("p50", "p95", "p99"), each.errors, strict=True):
            figures[f"{each.name} {share}"] = build_figure([error], digits=3)
    return figures


def main() -> int:
    """Measure, print, write; 1 when a goal is missed."""
    parser = build_figure_parser(__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="windows whose name has this")
    parser.add_argument("--repetitions", type=int, default=20)
    arguments = parser.parse_args()
    judged: list[Judged] = []
    for name, window in WINDOWS.items():
        if arguments.only in name:
            judged += judge_window(name, window, arguments.seed, arguments.repetitions)
            sys.stderr.write(f"{name}: {judged[-len(window.changes) :]}\n")
    return report_figures(build_figures(judged), arguments.json)


if __name__ == "__main__":
    sys.exit(main())
