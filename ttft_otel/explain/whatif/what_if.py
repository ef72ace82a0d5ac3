# SPDX-License-Identifier: Apache-2.0
"""Predict what a recorded window's TTFT would have been with other settings, and how far to trust that.

Input: a Recording of replay_facts.py and a PlannedChange. Output: a Prediction, and it as a table, as
sentences and as JSON for commands/answers.py.
First the window itself is predicted, with nothing changed: the error of that is part of every answer.
The time per output token, the price of many changes, is the mean of a request whose server measured it:
single tokens that came late are not told apart. Needs numpy.

For `whatif --autotune` the cheapest plan that holds targets is searched: it has the fewest instances, then
the fewest changed settings. One replay without noise tells which plans may do; the first of these that holds
in most replays with noise is the answer.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from statistics import NormalDist
from typing import Any, Final

import numpy
from rich.console import Console
from rich.table import Table

from ttft_otel.explain.whatif import window_check
from ttft_otel.explain.whatif.engine_model import (
    BLOCK_TOKENS,
    EngineLimits,
    FleetModel,
    PlannedEngines,
)
from ttft_otel.explain.whatif.replay_facts import Recording, ReplayRequest
from ttft_otel.explain.whatif.step_fit import StepSamples, fit_steps
from ttft_otel.explain.whatif.window_check import PlannedChange
from ttft_otel.explain.window.request_facts import CannotTellError
from ttft_otel.model import stages
from ttft_otel.model.names import keys
from ttft_otel.model.statistics import find_interval
from ttft_otel.report.show.terminal import format_short, print_sentence, remove_controls, round_ms

Array = numpy.ndarray[Any, numpy.dtype[numpy.float64]]

QUANTILES: Final = (0.5, 0.95, 0.99)
LEVEL: Final = 0.9  # of the intervals
TTFT: Final = "ttft"
TOKEN_TIME: Final = "time_per_output_token"
MIN_TIMED: Final = 30  # requests, below which nothing is said
MAX_TOKEN_ERROR: Final = 0.3  # of p50 and p99 of the window itself
PLAIN_EVERY: Final = 2  # so-manieth repetition also replays the unchanged window


Targets = Mapping[tuple[str, float], float]  # by figure and quantile, milliseconds
MAX_MORE: Final = 4  # instances
MAX_REPLAYS: Final = 60  # without noise
MAX_CHECKED: Final = 4  # plans that are replayed with noise
# Of max_num_seqs and max_num_batched_tokens, fewer changes first; what-if refuses what is further away.
FACTORS: Final = (
    *((1, 1), (2, 1), (0.5, 1), (4, 1), (1, 2), (1, 0.5), (1, 4)),
    *((2, 2), (2, 0.5), (0.5, 2), (0.5, 0.5)),
)
NAMES: Final = {TTFT: "ttft", TOKEN_TIME: "tpot"}

TARGET_PATTERN: Final = re.compile(r"(ttft|tpot)_p(50|95|99)=(\d+(?:\.\d+)?)")
QUANTILE_NAMES: Final = tuple(f"p{round(100 * share)}" for share in QUANTILES)
SHOWN_SHARE: Final = 0.005  # of the predicted p95 of the TTFT; smaller stages are only in the JSON


@dataclass(frozen=True, slots=True)
class PredictedFigure:
    """A quantile of the TTFT, a stage or TOKEN_TIME, microseconds: as recorded, replayed, and predicted."""

    recorded: float
    replayed: float
    predicted: float
    low: float  #: the interval of the prediction, widened by the error of the replay
    high: float

    @property
    def change(self) -> float:
        """By how much the change changes it, relative: in the model, whose own error is in both."""
        return self.predicted / self.replayed - 1 if self.replayed else 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a window would have been with other settings, and how far to trust that."""

    requests: int
    instances: int
    change: PlannedChange
    #: By stage (TTFT among them), one for each of QUANTILES.
    figures: Mapping[str, tuple[PredictedFigure, ...]]
    errors: tuple[float, ...]  #: relative, of the replay
    notes: tuple[str, ...]  #: what was assumed
    #: Where the prediction leaves what was recorded, or the record is not clear.
    warnings: tuple[str, ...]
    token_time: tuple[PredictedFigure, ...] = ()  #: one for each of QUANTILES, () where unknown
    token_errors: tuple[float, ...] = ()  #: relative, of the replay
    unexplained: float = 0.0  #: as in StepFit
    changed: Sequence[Mapping[str, Array]] = ()  #: of each replay with the change, lengths by stage
    #: Of a plan that was searched: what it holds, in how many of the replays, and of how many plans.
    targets: Targets = field(default_factory=dict)
    held: int = 0
    tried: int = 0


@dataclass(frozen=True)
class Fleet:
    """What a replay needs of a recorded fleet."""

    requests: Sequence[ReplayRequest]
    limits: dict[str, EngineLimits]  #: of each main engine
    encoder_names: tuple[str, ...]
    outputs: tuple[int, ...]  #: tokens of each answer, 0 where that is not known
    policy: str
    samples: StepSamples  #: of the main engines' steps
    encoder_samples: StepSamples | None

    @cached_property
    def plain(self) -> FleetModel:
        """The unchanged window, replayed without noise."""
        return replay(self, PlannedChange(), None, 0)

    @cached_property
    def timed(self) -> list[int]:
        """The numbers of the requests whose time per output token is known; none where they are too few."""
        timed = [number for number, each in enumerate(self.requests) if each.main.token_us]
        return timed if len(timed) >= MIN_TIMED else []


def _read_limits(settings: Mapping[str, int], given: PlannedChange) -> EngineLimits:
    """The limits of a recorded instance. given: settings that its user names, where spans lack them."""
    return EngineLimits(
        max_num_seqs=given.max_num_seqs or settings.get(keys.ENGINE_MAX_SEQS, 0),
        max_batched_tokens=given.max_batched_tokens or settings.get(keys.ENGINE_MAX_TOKENS, 0),
        chunked=bool(settings.get(keys.ENGINE_CHUNKED, 1)),
        async_scheduling=bool(settings.get(keys.ENGINE_ASYNC, 0)),
        kv_tokens=settings.get(keys.ENGINE_KV_TOKENS, 0),
        block_tokens=settings.get(keys.ENGINE_BLOCK_TOKENS, 0) or BLOCK_TOKENS,
    )


def learn_fleet(recording: Recording, given: PlannedChange) -> Fleet:
    """What is known of the recorded fleet. Raises CannotTellError.

    given: settings of the recorded servers, where their spans do not have them.
    """
    limits = {name: _read_limits(known, given) for name, known in recording.settings.items()}
    window_check.check_window(recording, limits)
    return _learn_answers(_build_fleet(recording, limits))


def replay_plainly(fleet: Fleet, change: PlannedChange) -> tuple[FleetModel, list[str]]:
    """A replay with `change` and no noise, and warnings. Raises CannotTellError.

    What is refused does not depend on chance.
    """
    window_check.check_change(fleet.requests, fleet.limits, fleet.samples, change)
    model = replay(fleet, change, None, 0)
    warnings = window_check.check_memory(fleet.plain, model)
    warnings += window_check.check_outcome(fleet.plain, model, fleet.samples.fit)
    return model, warnings


def predict_fleet(
    fleet: Fleet,
    change: PlannedChange,
    repetitions: int = 20,
    track: Callable[[int], None] = lambda _: None,
) -> Prediction:
    """Predict `change`. Raises CannotTellError, which says why not.

    repetitions: replays, each with its own noise and its own draw of the requests from which the steps'
    times are learned. track: called with 1 after each replay.
    """
    other, warnings = replay_plainly(fleet, change)
    notes = window_check.list_notes(fleet.requests, fleet.samples, change, fleet.policy)
    notes += window_check.list_memory_notes(fleet.plain, other)
    replays, changed = [collect(fleet, fleet.plain)], [collect(fleet, other)]
    track(1)
    draws = random.Random(0)
    # Evenly over their distribution, so that few replays have no chance to be all on one side.
    levels = [NormalDist().inv_cdf(number / repetitions) for number in range(1, repetitions)]
    misfits = zip(levels, draws.sample(levels, len(levels)), strict=True)
    for number, misfit in enumerate(misfits, 1):
        chance = random.Random(draws.random())
        if number % PLAIN_EVERY == 0:
            replays.append(collect(fleet, replay(fleet, PlannedChange(), chance, number)))
        changed.append(collect(fleet, replay(fleet, change, chance, number, misfit)))
        track(1)
    token_us = [float(fleet.requests[each].main.token_us) for each in fleet.timed]
    recorded = collect_columns([each.stages for each in fleet.requests], token_us)
    figures = build_figures(recorded, replays, changed)
    tokens = figures.pop(TOKEN_TIME, ())
    errors, token_errors = (
        tuple(each.replayed / each.recorded - 1 for each in some)
        for some in (figures[TTFT], tokens)
    )
    window_check.check_errors(errors)
    if tokens and (miss := describe_miss(token_errors)):
        notes.append(miss)
        tokens = token_errors = ()
    return Prediction(
        requests=len(fleet.requests),
        instances=len(fleet.limits),
        change=change,
        figures=figures,
        errors=errors,
        notes=tuple(notes),
        warnings=tuple(warnings),
        token_time=tokens,
        token_errors=token_errors,
        unexplained=fleet.samples.fit.unexplained,
        changed=changed,
    )


def collect(fleet: Fleet, model: FleetModel) -> dict[str, Array]:
    """A replay's lengths by stage, and the times per output token of the requests that have these."""
    prompts = [model.prompts[each] for each in fleet.timed]
    token_us = [
        (each.last_token - each.first_token) / each.decode_steps
        for each in prompts
        if each.decode_steps > 0
    ]
    return collect_columns(model.stages, token_us)


def collect_columns(
    rows: Sequence[Mapping[str, int]], token_us: Sequence[float]
) -> dict[str, Array]:
    """Lengths by stage, one per request, their sums as that of TTFT, and times per output token.

    rows: stages of each request.
    """
    found = sorted({name for row in rows for name in row}, key=stages.rank_stage)
    columns = {name: numpy.array([row.get(name, 0) for row in rows], float) for name in found}
    if token_us:
        columns[TOKEN_TIME] = numpy.array(token_us, float)
    return {TTFT: numpy.array([sum(row.values()) for row in rows], float), **columns}


def build_figures(
    recorded: Mapping[str, Array],
    replays: Sequence[Mapping[str, Array]],
    changed: Sequence[Mapping[str, Array]],
) -> dict[str, tuple[PredictedFigure, ...]]:
    """Quantiles of all stages that were recorded or are predicted.

    Each has the spread of the replays with the change, and the error of those without it.
    """
    nothing = numpy.zeros(1)

    def build_figure(name: str, share: float) -> PredictedFigure:
        truth, *drawn = (
            float(numpy.quantile(each.get(name, nothing), share))
            for each in (recorded, *replays, *changed)
        )
        plain, other = drawn[: len(replays)], drawn[len(replays) :]
        replayed, predicted = float(numpy.median(plain)), float(numpy.median(other))
        low, high = find_interval(other, LEVEL)
        # What the model misses unchanged it misses changed in proportion: a part of the engine's stages.
        miss = abs(replayed - truth) * (predicted / replayed if replayed else 1.0)
        return PredictedFigure(
            truth, replayed, predicted, max(float(low) - miss, 0.0), float(high) + miss
        )

    names = dict.fromkeys([*recorded, *(name for each in changed for name in each)])
    return {name: tuple(build_figure(name, share) for share in QUANTILES) for name in names}


def describe_miss(errors: Sequence[float]) -> str:
    """A sentence where the replay has the time per output token wrong, else "". errors: of p50, p95, p99."""
    worst = max(errors[0], errors[-1], key=abs)
    if abs(worst) <= MAX_TOKEN_ERROR:
        return ""
    return (
        f"The model misses the recorded time per output token by {worst:+.0%}: it is not predicted."
    )


def _learn_answers(fleet: Fleet) -> Fleet:
    """The fleet with the length of each answer. Raises CannotTellError.

    A length that spans do not tell follows from how long the answer ran. The KV cache is left out where
    requests share it.
    """
    learned = fleet
    if not all(fleet.outputs):
        steps = [each.decode_steps for each in fleet.plain.prompts]
        outputs = [count or step + 1 for count, step in zip(fleet.outputs, steps, strict=True)]
        learned = replace(fleet, outputs=tuple(outputs))
    if any(each.kv_tokens and not each.shares_blocks for each in fleet.limits.values()):
        if window_check.shares_blocks(fleet.requests, learned.plain):
            limits = {
                name: replace(each, shares_blocks=True) for name, each in fleet.limits.items()
            }
            return _learn_answers(replace(fleet, limits=limits))
    return learned


def _build_fleet(recording: Recording, limits: dict[str, EngineLimits]) -> Fleet:
    """The recorded fleet, of which answers' lengths are known as far as spans have them."""
    requests = recording.requests
    encodes = [visit for each in requests for visit in each.encodes]
    policies = [each.policy for each in requests if each.policy]
    budgets = {name: each.max_batched_tokens for name, each in limits.items()}
    is_async = any(each.async_scheduling for each in limits.values())
    return Fleet(
        requests=requests,
        limits=limits,
        encoder_names=tuple(sorted({each.instance for each in encodes})),
        outputs=tuple(each.main.output_tokens for each in requests),
        policy=max(set(policies), key=policies.count) if policies else "round_robin",
        samples=StepSamples([each.main for each in requests], is_async, budgets),
        encoder_samples=StepSamples(encodes, False, {}) if encodes else None,
    )


def replay(
    fleet: Fleet,
    change: PlannedChange,
    chance: random.Random | None,
    seed: int,
    misfit: tuple[float, float] = (0.0, 0.0),
) -> FleetModel:
    """One replay with `change`. chance: draws the samples to learn from, and noise; None for neither."""
    main = fit_steps(fleet.samples, chance, misfit)
    like = next(iter(fleet.limits.values()))
    added = {f"+{number}": like for number in range(1, change.instances + 1)}
    kept = list((fleet.limits | added).items())[: len(fleet.limits) + change.instances]
    engines = {
        name: (_change_limits(limits, change), main.build_times(name, chance, change.rate))
        for name, limits in kept
    }
    encoders: PlannedEngines = {}
    if fleet.encoder_samples is not None:
        encoders = _plan_encoders(fleet, fleet.encoder_samples, change, chance)
    is_moved = change.instances or change.policy
    return FleetModel(
        fleet.requests,
        engines,
        encoders,
        plan_cached(fleet.requests, change.cache_hit),
        fleet.outputs,
        policy=(change.policy or fleet.policy) if is_moved else "",
        encoder_policy="least_requests" if change.encoders else "",
        rate=change.rate,
        seed=seed,
    ).run()


def _plan_encoders(
    fleet: Fleet, samples: StepSamples, change: PlannedChange, chance: random.Random | None
) -> PlannedEngines:
    """Encoder engines: a step takes as many items as the window's largest one had, if any had to wait."""
    fit = fit_steps(samples, chance)
    is_full = any(each.reasons.get("encoder_budget") for each in samples.visits)
    limits = EngineLimits(1 << 20, 1 << 20, max_items=samples.seen_items if is_full else 0)
    added = [f"+{number}" for number in range(1, change.encoders + 1)]
    return {
        name: (limits, fit.build_times(name, chance, change.rate))
        for name in (*fleet.encoder_names, *added)
    }


def _change_limits(limits: EngineLimits, change: PlannedChange) -> EngineLimits:
    return replace(
        limits,
        max_num_seqs=change.max_num_seqs or limits.max_num_seqs,
        max_batched_tokens=change.max_batched_tokens or limits.max_batched_tokens,
        kv_tokens=round(change.kv_cache * limits.kv_tokens),
    )


def plan_cached(requests: Sequence[ReplayRequest], more: float) -> list[int]:
    """Cached tokens of each request, with `more` of all prompt tokens cached in addition.

    Each prompt's uncached part changes by the same factor; the last token is always computed.
    """
    computed = sum(each.main.computed for each in requests)
    total = computed + sum(each.main.cached for each in requests)
    share = min(max(more * total / computed, -1.0), 1.0)
    planned = []
    for each in requests:
        tokens = each.main.computed + each.main.cached
        moved = share * (each.main.computed if share > 0 else each.main.cached)
        planned.append(min(max(round(each.main.cached + moved), 0), tokens - 1))
    return planned


def parse_targets(text: str) -> Targets:
    """`ttft_p99=500,tpot_p99=50`. Raises ValueError with a sentence."""
    found = [TARGET_PATTERN.fullmatch(each.strip()) for each in text.split(",")]
    names = {short: name for name, short in NAMES.items()}
    targets = {
        (names[each[1]], int(each[2]) / 100): float(each[3]) for each in found if each is not None
    }
    if None in found or not all(targets.values()):
        raise ValueError(f"{text!r} is not a target: write ttft_p99=500,tpot_p99=50 (milliseconds)")
    return targets


def describe_targets(targets: Targets) -> str:
    """`ttft_p99 <= 500 ms`, and so on."""
    return ", ".join(
        f"{NAMES[name]}_p{100 * share:g} <= {limit:g} ms"
        for (name, share), limit in targets.items()
    )


def _list_plans(fleet: Fleet, base: PlannedChange, count: int) -> Iterator[PlannedChange]:
    """The plans with so many instances, the cheapest first."""
    limits = next(iter(fleet.limits.values()))
    for places, tokens in FACTORS:
        yield replace(
            base,
            instances=count - len(fleet.limits),
            max_num_seqs=round(places * limits.max_num_seqs) if places != 1 else 0,
            max_batched_tokens=round(tokens * limits.max_batched_tokens) if tokens != 1 else 0,
        )


def _measure(targets: Targets, columns: Mapping[str, Array]) -> float:
    """The largest figure as a multiple of its target: up to 1 they are held."""
    return max(
        float(numpy.quantile(columns[name], share)) / (1000 * limit)
        for (name, share), limit in targets.items()
    )


def count_replays(repetitions: int) -> int:
    """The most that search_plan() makes."""
    return MAX_REPLAYS + MAX_CHECKED * repetitions


def search_plan(
    fleet: Fleet,
    targets: Targets,
    base: PlannedChange,
    repetitions: int,
    track: Callable[[int], None] = lambda _: None,
) -> Prediction:
    """The cheapest plan. Raises CannotTellError where none holds the targets.

    base: what changes in any case, such as the rate. track: called with 1 after each replay, at most
    count_replays() times.
    """
    if any(name == TOKEN_TIME for name, _ in targets) and not fleet.timed:
        raise CannotTellError("the spans do not tell the time per output token")
    excesses: dict[PlannedChange, float] = {}  # without noise; each plan is replayed once

    def list_holding(count: int) -> Iterator[PlannedChange]:
        """The plans with so many instances that may hold the targets, the cheapest first."""
        for change in _list_plans(fleet, base, count):
            if change not in excesses and len(excesses) < MAX_REPLAYS:
                track(1)
                try:
                    model, _ = replay_plainly(fleet, change)
                    excesses[change] = _measure(targets, collect(fleet, model))
                except CannotTellError:
                    excesses[change] = float("inf")
            if excesses.get(change, 2.0) <= 1:
                yield change

    recorded = len(fleet.limits)
    counts = range(1, recorded + MAX_MORE + 1)
    # More instances are never worse: the first that may do is found by halving.
    first = bisect_left(counts, True, key=lambda count: any(list_holding(count)))
    holding = (change for count in counts[first:] for change in list_holding(count))
    for change in islice(holding, MAX_CHECKED):
        answer = predict_fleet(fleet, change, repetitions, track=track)
        held = sum(_measure(targets, each) <= 1 for each in answer.changed)
        if held >= LEVEL * len(answer.changed):
            return replace(answer, targets=targets, held=held, tried=len(excesses))
    nearest = min(excesses, key=lambda each: excesses[each])
    raise CannotTellError(
        f"none of {len(excesses)} plans with up to {counts[-1]} instances holds "
        f"{describe_targets(targets)} in {LEVEL:.0%} of its replays; the nearest is "
        f"{describe_plan(nearest, recorded)}, at {excesses[nearest]:.0%} of the target"
    )


def describe_plan(change: PlannedChange, recorded: int) -> str:
    """`3 instances with --max-num-seqs 64`. recorded: instances of the window."""
    count, flags = recorded + change.instances, " ".join(list_flags(change))
    return f"{count} instance{'s' * (count > 1)}" + (f" with {flags}" if flags else "")


def list_flags(change: PlannedChange) -> list[str]:
    """The flags of `vllm serve`."""
    return [
        f"{flag} {value}"
        for flag, value in (
            ("--max-num-seqs", change.max_num_seqs),
            ("--max-num-batched-tokens", change.max_batched_tokens),
        )
        if value
    ]


def describe_answer(answer: Prediction) -> dict[str, Any]:
    """The JSON of an answer; times in milliseconds. `autotune` is there where a plan was searched."""
    described: dict[str, Any] = {
        "answered": True,
        "requests": answer.requests,
        "instances": answer.instances,
        "change": describe_change(answer.change),
        "level": LEVEL,
        "replay_error": _describe_errors(answer.errors),
        "ttft": describe_figures(answer.figures[TTFT]),
        "time_per_output_token": {
            "replay_error": _describe_errors(answer.token_errors),
            **describe_figures(answer.token_time),
        }
        if answer.token_time
        else None,
        "unexplained": round(answer.unexplained, 4),
        "stages": [
            {"name": name, **describe_figures(figures)}
            for name, figures in answer.figures.items()
            if name != TTFT
        ],
        "notes": list(answer.notes),
        "warnings": list(answer.warnings),
    }
    if answer.targets:
        described["autotune"] = {
            "targets": describe_targets(answer.targets),
            "instances": answer.instances + answer.change.instances,
            "flags": list_flags(answer.change),
            "held": answer.held,
            "replays": len(answer.changed),
            "tried": answer.tried,
        }
    return described


def _describe_errors(errors: tuple[float, ...]) -> dict[str, float]:
    return {name: round(error, 4) for name, error in zip(QUANTILE_NAMES, errors, strict=True)}


def describe_figures(figures: tuple[PredictedFigure, ...]) -> dict[str, dict[str, float]]:
    return {
        name: {f"{kind}_ms": round_ms(us) for kind, us in asdict(figure).items()}
        for name, figure in zip(QUANTILE_NAMES, figures, strict=True)
    }


NO_CHANGE: Final = PlannedChange()
# By field of PlannedChange: its name in the JSON, which is that of the option, and in words.
CHANGES: Final = {
    "instances": ("instances", "{:+} instances"),
    "encoders": ("encoders", "+{} encoders"),
    "max_num_seqs": ("max_num_seqs", "max-num-seqs {}"),
    "max_batched_tokens": ("max_num_batched_tokens", "max-num-batched-tokens {}"),
    "policy": ("routing_logic", "routing by {}"),
    "rate": ("rate", "{:g} times the rate"),
    "kv_cache": ("kv_cache", "{:g} times the KV cache"),
    "cache_hit": ("cache_hit", "{:+.0%} of prompt tokens cached"),
}


def _list_changes(change: PlannedChange) -> Iterator[tuple[str, str, Any]]:
    """What is not its default: both names, and the value."""
    for name, words in CHANGES.items():
        value = getattr(change, name)
        if value != getattr(NO_CHANGE, name):
            yield *words, value


def describe_change(change: PlannedChange) -> dict[str, Any]:
    """What was changed, by the names of the options; nothing where nothing was."""
    return {name: value for name, _, value in _list_changes(change)}


def name_found(found: Prediction) -> str:
    """A plan that was searched in words, and how sure it is."""
    plan = describe_plan(found.change, found.instances)
    return (
        f"The cheapest of {found.tried} plans that holds {describe_targets(found.targets)}: {plan}. "
        f"It does in {found.held} of {len(found.changed)} replays."
    )


def _list_figures(figures: tuple[PredictedFigure, ...]) -> list[str]:
    """Each of QUANTILES in words, with its interval."""
    return [
        f"{name} {format_short(figure.recorded)} → {format_short(figure.predicted)} "
        f"({format_short(figure.low)} to {format_short(figure.high)})"
        for name, figure in zip(QUANTILE_NAMES, figures, strict=True)
    ]


def _list_errors(errors: tuple[float, ...]) -> list[str]:
    """By how much the replay has each of QUANTILES wrong."""
    return [f"{name} {error:+.1%}" for name, error in zip(QUANTILE_NAMES, errors, strict=True)]


def print_answer(answer: Prediction, console: Console) -> None:
    """Print the TTFT, every stage that matters, the error of the replay, and what is assumed."""
    changes = ", ".join(words.format(value) for _, words, value in _list_changes(answer.change))
    whole = ", ".join(_list_figures(answer.figures[TTFT]))
    print_sentence(console, f"{changes or 'nothing changed'}: TTFT {whole}", style="bold")
    errors = ", ".join(_list_errors(answer.errors))
    print_sentence(
        console, f"The same model on the {answer.requests} recorded requests, unchanged: {errors}"
    )
    if answer.token_time:
        print_sentence(console, _describe_token_time(answer))
    console.print(build_table(answer))
    for warning in answer.warnings:
        print_sentence(console, remove_controls(warning), "! ", "yellow")
    for note in answer.notes:
        print_sentence(console, remove_controls(note), "• ", "dim")


def _describe_token_time(answer: Prediction) -> str:
    """The time per output token in words, which is the price of what shortens the TTFT; without p95."""
    p50, _, p99 = (
        f"{words}, {figure.change:+.0%}"
        for words, figure in zip(_list_figures(answer.token_time), answer.token_time, strict=True)
    )
    error_p50, _, error_p99 = _list_errors(answer.token_errors)
    return f"Time per output token: {p50}; {p99}; unchanged, the model is off by {error_p50}, {error_p99}."


def build_table(answer: Prediction) -> Table:
    """Stages with their recorded and predicted quantiles."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("ms, now→then", no_wrap=True)
    for name in (*QUANTILE_NAMES, f"p95, {LEVEL:.0%}"):
        table.add_column(name, justify="right", no_wrap=True)
    least = SHOWN_SHARE * answer.figures[TTFT][1].predicted
    for name, figures in answer.figures.items():
        if max(max(each.recorded, each.predicted) for each in figures) < least:
            continue
        cells = [
            f"{_round_figure(each.recorded)}→{_round_figure(each.predicted)}" for each in figures
        ]
        middle = figures[1]
        table.add_row(
            # Names come from stored spans, which anybody may have sent.
            remove_controls(name),
            *cells,
            f"{_round_figure(middle.low)}…{_round_figure(middle.high)}",
            style="bold" if name == TTFT else "",
        )
    return table


def _round_figure(us: float) -> str:
    """Milliseconds with three digits, or all of a whole number: four pairs of them fit beside a stage."""
    ms = us / 1000
    return f"{ms:.{0 if ms >= 100 else 1 if ms >= 10 else 2}f}"
