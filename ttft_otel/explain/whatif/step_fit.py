# SPDX-License-Identifier: Apache-2.0
"""Learn from a recorded window how long an engine's steps take. Pure; needs numpy.

Input: EngineVisits, and their steps' work, of replay_facts.py. Output: StepTimes, by which engine_model.py
runs its steps.

A forward pass takes what the columns of WORK cost, and more for tokens beyond a knee: up to it, reading the
weights decides. Least squares with non-negative coefficients, relative errors, and Huber's weights: a step
that something else has delayed must not bend the line. Each instance has a speed, which is no part of the
line. What these leave over is drawn from samples of the same part of the window: what slows a machine down
lasts for a while. Times in which an engine's process did not run at all are kept as such.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median_low
from typing import Final

import numpy

from ttft_otel.explain.whatif.engine_model import Step, StepLength
from ttft_otel.explain.whatif.replay_facts import Array, EngineVisit, WorkSamples, collect_work

# Tokens of a step; the one with which the line fits best. 0: a straight line.
KNEES: Final = (0, 64, 128, 256, 512)
MIN_GAIN: Final = 0.98  # of the straight line's error; a knee that gains less is none
MIN_OWN: Final = 50  # samples of one instance, to tell others' speed by its line
ERROR_FLOOR_US: Final = 500.0  # below it, relative errors of short steps would count for nothing
# In standard deviations: 95 % as good as least squares where errors are normal.
HUBER: Final = 1.345
ROUNDS: Final = 8  # of reweighting; the weights have settled by then
MAX_RATIO: Final = 3.0  # of a measured step to the line; what is beyond it counts as this
MIN_PAUSE_US: Final = 100_000  # beyond MAX_RATIO times a step's length
# Of `dispatch` and `sample`: MAX_RATIO times that is the most that counts.
USUAL_SHARE: Final = 0.95
NEAR_SAMPLES: Final = 8  # of the same part of the window, from which a step's noise is drawn
# Prompts with several chunks that are needed to know the gap between two steps.
MIN_CHUNKED: Final = 5
MAX_WAKE_US: Final = 2000  # of an engine that is idle; a longer wait has another cause
WAKE_SHARE: Final = 0.05  # the shortest waits are those of prompts that found an idle engine
# Under async scheduling most of `dispatch` is the rest of another step.
ASYNC_LEAD_SHARE: Final = 0.1
# What the line may be wrong by, as standard deviations over replays: all steps by a common factor, or by what
# their work does not explain, if that is more; those beyond what was seen by a power of how far beyond.
COMMON_ERROR: Final = 0.03
STRETCH: Final = 0.15

Pauses = Sequence[tuple[int, int]]


@dataclass(slots=True)
class StepTimes:
    """How long the steps of one engine take."""

    #: Microseconds for each column of WORK, and for hypot(tokens, knee).
    forward: Sequence[float]
    knee: int
    seen: tuple[float, float]  #: most tokens of a step, and most that its decodes have read
    encoder: tuple[float, float]  #: per run, and media item
    moments: Sequence[int]  #: when the samples were taken, in order
    ratios: Sequence[float]  #: their passes, relative to the line
    leads: Sequence[float]  #: their `dispatch`
    samplings: Sequence[float]  #: their `sample`
    gap_us: int  #: from the sampled token to the next schedule()
    wake_us: int  #: from an arrival at an idle engine to its first schedule()
    speed: float = 1.0  #: how much slower than the line this instance is
    pace: float = 1.0  #: times as fast as the recorded window the simulation's clock runs
    pauses: Pauses = ()  #: begin and end of each, by the simulation's clock
    stretch: float = 0.0  #: of this replay, see STRETCH
    chance: random.Random | None = None  #: None for steps of mean length, without noise

    def measure_step(self, step: Step) -> StepLength:
        prompt, decode, per_token, per_pair, per_context, rounded = self.forward
        us = prompt if step.parts else decode
        us += per_token * step.tokens + per_pair * step.pairs + per_context * step.contexts
        us += rounded * math.hypot(step.tokens, self.knee)
        if self.stretch:
            us *= max(step.tokens / self.seen[0], step.contexts / self.seen[1], 1.0) ** self.stretch
        at = self._find_sample(round(step.scheduled * self.pace))
        lead, forward = round(self.leads[at]), round(us * self.speed * self.ratios[at])
        encoder = self.encoder[0] + self.encoder[1] * step.items if step.items else 0.0
        for begin, end in self.pauses:
            if begin < step.scheduled + lead + forward and step.scheduled < end:
                forward += end - max(begin, step.scheduled)
        return StepLength(lead, round(encoder), forward, round(self.samplings[at]), self.gap_us)

    def _find_sample(self, moment: int) -> int:
        """The position of one of the samples that were taken nearest to `moment`."""
        count = len(self.moments)
        middle = bisect_left(self.moments, moment)
        first = max(min(middle - NEAR_SAMPLES // 2, count - NEAR_SAMPLES), 0)
        if self.chance is None:
            return first
        return first + int(self.chance.random() * min(NEAR_SAMPLES, count))

    def take_means(self) -> StepTimes:
        """The same steps without noise: for each sample the mean of those from which one would be drawn.

        The mean, because queues grow with it; a median would leave out what sometimes takes long.
        """
        ratios, leads, samplings = (
            [
                sum(some[at : at + NEAR_SAMPLES]) / len(some[at : at + NEAR_SAMPLES])
                for at in range(len(some))
            ]
            for some in (self.ratios, self.leads, self.samplings)
        )
        return replace(self, ratios=ratios, leads=leads, samplings=samplings, chance=None)


@dataclass(frozen=True, slots=True)
class StepFit:
    """What was learned of the engines of one role."""

    times: StepTimes
    instances: Sequence[str]  #: of each sample in `times`
    speeds: Mapping[str, float]  #: by instance
    pauses: Mapping[str, Pauses]  #: by instance
    expected: Array  #: microseconds of each sample's passes
    #: By how much steps differ from what their work takes, on average, relative.
    unexplained: float = 0.0
    common: float = 1.0  #: times as long as the line says all steps of this replay are
    stretch: float = 0.0  #: see STRETCH

    def build_times(
        self, instance: str, chance: random.Random | None, pace: float = 1.0
    ) -> StepTimes:
        """The step times of one instance; one that was not recorded is as fast as most others."""
        own = [at for at, each in enumerate(self.instances) if each == instance]
        own = own if len(own) >= NEAR_SAMPLES else list(range(len(self.instances)))
        times = replace(
            self.times,
            moments=[self.times.moments[at] for at in own],
            ratios=[self.times.ratios[at] for at in own],
            leads=[self.times.leads[at] for at in own],
            samplings=[self.times.samplings[at] for at in own],
            speed=self.speeds.get(instance, 1.0) * self.common,
            pace=pace,
            pauses=[
                (round(begin / pace), round(begin / pace) + end - begin)
                for begin, end in self.pauses.get(instance, ())
            ],
            stretch=self.stretch,
            chance=chance,
        )
        return times if chance is not None else times.take_means()


class StepSamples:
    """What a window's visits at engines of one role tell of their steps, for fit_steps().

    budgets: tokens that a step takes, by instance. knows_gap: prompts of several chunks show the time between
    two steps. seen_tokens: fewest and most of a step.
    """

    def __init__(
        self, visits: Sequence[EngineVisit], is_async: bool, budgets: Mapping[str, int]
    ) -> None:
        visits = sorted(visits, key=lambda each: each.arrived)
        prefills = [each for each in visits if each.stages.get("prefill.compute")]
        self.visits = prefills or visits
        self.samplings = _clip_rare([each.stages.get("sample", 0) for each in self.visits])
        gap, self.knows_gap = _find_gap(visits, self.samplings)
        between = float(numpy.median(self.samplings))
        leads = _clip_rare([_find_lead(each, gap + round(between)) for each in self.visits])
        if is_async:
            # The host works while another step runs.
            lowest = sorted(leads)[: max(1, round(len(leads) * ASYNC_LEAD_SHARE))]
            leads = [round(sum(lowest) / len(lowest))] * len(leads)
            gap, self.knows_gap = 0, True
        else:
            between += gap + float(numpy.median(leads))
        self.leads, self.gap_us, self.wake_us = leads, gap, _find_wake(visits)
        self.encoder = _fit_encoder(visits)
        self.seen_items = max((each.step_items for each in visits), default=0)
        sizes = [each.step_tokens // each.chunks for each in prefills] or [0]
        self.seen_tokens = min(sizes), max(sizes)
        self.tokens_vary = max(sizes) > 1.5 * max(min(sizes), 1)
        self.work = collect_work(prefills, budgets, between)
        self.pauses: dict[str, list[tuple[int, int]]] = {}
        self.is_paused = numpy.zeros(len(prefills), bool)
        self.fit = _fit_samples(self, KNEES)
        if prefills:
            self.pauses, self.is_paused = _find_pauses(prefills, self.fit.expected, between)
            self.fit = _fit_samples(self, KNEES)


def fit_steps(
    samples: StepSamples,
    chance: random.Random | None = None,
    misfit: tuple[float, float] = (0.0, 0.0),
) -> StepFit:
    """Learn from all samples, or from a bootstrap draw of them.

    misfit: what the line is taken to be wrong by, in units of COMMON_ERROR and STRETCH.
    """
    if chance is None:
        return samples.fit
    fit = _fit_samples(samples, (samples.fit.times.knee,), chance)
    error = max(COMMON_ERROR, samples.fit.unexplained)
    return replace(fit, common=math.exp(error * misfit[0]), stretch=STRETCH * misfit[1])


def _fit_samples(
    samples: StepSamples, knees: Sequence[int], chance: random.Random | None = None
) -> StepFit:
    work, count = samples.work, len(samples.visits)
    drawn = _draw(range(count), chance)
    names = [samples.visits[at].instance for at in drawn]
    if not len(work.lengths):
        times = _build_times(samples, drawn, [0.0] * 6, 0, numpy.ones(len(drawn)))
        return StepFit(times, names, {}, {}, work.lengths)
    chosen = numpy.array([*drawn, *_draw(range(count, len(work.lengths)), chance)], int)
    owners, lengths = numpy.array(work.instances)[chosen], work.lengths[chosen]
    speeds = numpy.ones(len(chosen))
    by_instance = dict.fromkeys(work.instances, 1.0)
    if len(by_instance) > 1:
        # By the line of one of them alone: others' slowness, which comes with more work, must not bend it.
        own = owners == max(by_instance, key=lambda each: int((owners == each).sum()))
        own |= own.sum() < MIN_OWN
        knee, costs = _fit_passes(work, chosen[own], lengths[own], knees)
        ratios = lengths / numpy.maximum(work.list_rows(knee)[chosen] @ costs, 1.0)
        by_instance = _find_speeds(by_instance, owners, ratios)
        speeds = numpy.array([by_instance[each] for each in owners])
    knee, costs = _fit_passes(work, chosen, lengths / speeds, knees)
    expected = numpy.maximum(work.list_rows(knee)[chosen] @ costs * speeds, 1.0)[: len(drawn)]
    # One number by itself says nothing of single chunks, so those of several count with their mean.
    ratios = numpy.clip(lengths[: len(drawn)] / expected, 1 / MAX_RATIO, MAX_RATIO)
    is_paused = samples.is_paused[drawn]
    ratios[is_paused] = 1.0
    times = _build_times(samples, drawn, costs.tolist(), knee, ratios)
    others = numpy.array(times.leads) + numpy.array(times.samplings)
    whole = (lengths[: len(drawn)] + others) / (expected + numpy.median(others))
    whole = numpy.clip(whole[~is_paused], 1 / MAX_RATIO, MAX_RATIO)
    unexplained = numpy.mean(numpy.abs(whole / numpy.median(whole) - 1)) if len(whole) else 0.0
    return StepFit(times, names, by_instance, samples.pauses, expected, float(unexplained))


def _draw(some: range, chance: random.Random | None) -> list[int]:
    """A bootstrap draw in order; all of them without `chance`."""
    return sorted(chance.choices(some, k=len(some))) if chance is not None and some else list(some)


def _build_times(
    samples: StepSamples, drawn: Sequence[int], forward: list[float], knee: int, ratios: Array
) -> StepTimes:
    work = samples.work.work[: len(samples.visits)]
    seen = float((work[:, 4] / work[:, 0]).max()) if len(work) else 0.0
    usual = float(numpy.median(samples.leads))
    is_paused = [*samples.is_paused, *[False] * (len(samples.visits) - len(samples.is_paused))]
    return StepTimes(
        forward=forward,
        knee=knee,
        seen=(max(samples.seen_tokens[1], 1), max(seen, 1.0)),
        encoder=samples.encoder,
        moments=[samples.visits[at].arrived for at in drawn],
        ratios=ratios.tolist(),
        leads=[usual if is_paused[at] else samples.leads[at] for at in drawn],
        samplings=[samples.samplings[at] for at in drawn],
        gap_us=samples.gap_us,
        wake_us=samples.wake_us,
    )


def _fit_passes(
    work: WorkSamples, chosen: Array, lengths: Array, knees: Sequence[int]
) -> tuple[int, Array]:
    """The line of the chosen samples: that of `knees` with which it fits best, and the costs."""
    fits: list[tuple[float, int, Array]] = []
    is_prompt = chosen < len(work.spans)
    for knee in knees:
        rows = work.list_rows(knee)[chosen]
        costs = _fit_line(rows, lengths)
        if is_prompt.all():
            costs[1] = costs[0]  # no answer tells of passes without a prompt
        off = numpy.minimum(numpy.abs(lengths / numpy.maximum(rows @ costs, 1.0) - 1), 1.0)
        groups = (off[is_prompt], off[~is_prompt])
        error = math.prod(float(each.mean()) for each in groups if len(each))
        fits.append((error, knee, costs))
    best = min(fits, key=lambda each: each[0])
    return (best if best[0] < MIN_GAIN * fits[0][0] else fits[0])[1:]


def _find_speeds(names: Iterable[str], owners: Array, ratios: Array) -> dict[str, float]:
    """How much slower than the line each instance is, of its samples' `ratios`; most are as fast as that."""
    found = {
        name: float(numpy.median(ratios[owners == name])) if (owners == name).any() else 1.0
        for name in names
    }
    usual = median_low(found.values())
    return {name: speed / usual for name, speed in found.items()}


def _clip_rare(values: Sequence[int]) -> list[float]:
    """The values; what is far above nearly all of them counts as less.

    A machine that stops for once delays one of a thousand steps, and one of a hundred requests: drawn for
    every so-manieth step, it would count ten times.
    """
    clipped: list[float] = numpy.minimum(
        values, MAX_RATIO * numpy.quantile(values, USUAL_SHARE)
    ).tolist()
    return clipped


def _find_pauses(
    visits: Sequence[EngineVisit], expected: Array, between_us: float
) -> tuple[dict[str, list[tuple[int, int]]], Array]:
    """When an engine's process did not run, by instance, and which visits' own steps were longer by that.

    Told by steps that took far longer than their work, and by requests that waited so long for a step's end.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    is_paused = numpy.zeros(len(visits), bool)
    chunks = numpy.array([each.chunks for each in visits])
    usual = expected + between_us * chunks
    longest = MAX_RATIO * float((usual / chunks).max()) + MIN_PAUSE_US
    for at, each in enumerate(visits):
        spent = sum(each.stages.get(name, 0) for name in ("dispatch", "prefill.compute", "sample"))
        waited = each.reasons.get("in_step", 0)
        if spent > MAX_RATIO * usual[at] + MIN_PAUSE_US:
            is_paused[at] = True
            found.setdefault(each.instance, []).append(
                (each.sampled - round(spent - usual[at]), each.sampled)
            )
        elif waited > longest:
            found.setdefault(each.instance, []).append((each.arrived, each.arrived + waited))
    for name, pauses in found.items():
        ends = sorted(each.sampled for each in visits if each.instance == name)
        # While other prompts are completed the process runs, whatever held this one up.
        merged: list[tuple[int, int]] = []
        for begin, end in sorted(pauses):
            if merged and begin <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], end)
            else:
                merged.append((begin, end))
        found[name] = [
            (begin, end)
            for begin, end in merged
            if bisect_left(ends, end - (end - begin) // 10)
            == bisect_left(ends, begin + (end - begin) // 10)
        ]
    return found, is_paused


def _fit_line(rows: Array, lengths: Array) -> Array:
    """Non-negative coefficients of the columns of `rows`."""
    weights = 1 / (lengths + ERROR_FLOOR_US)
    found = numpy.zeros(rows.shape[1])
    for _ in range(ROUNDS):
        found = _solve_positive(rows * weights[:, None], lengths * weights)
        # Weighted by the expected length: by the measured one, short ones would count more by chance.
        expected = rows @ found + ERROR_FLOOR_US
        off = numpy.abs(lengths - rows @ found) / expected
        spread = max(float(numpy.median(off)) * 1.4826, 1e-4)
        weights = numpy.sqrt(numpy.minimum(1.0, HUBER * spread / numpy.maximum(off, 1e-9)))
        weights = weights / expected
    return found


def _solve_positive(rows: Array, values: Array) -> Array:
    """Least squares without negative coefficients: the best of the subsets of columns that have none."""
    sizes = numpy.sqrt((rows**2).sum(axis=0))
    used = numpy.flatnonzero(sizes > 0)
    scaled = rows[:, used] / sizes[used]
    # A little more than the products themselves: two columns may be the same.
    products = scaled.T @ scaled + 1e-9 * numpy.eye(len(used))
    wanted = scaled.T @ values
    best, highest = numpy.zeros(rows.shape[1]), 0.0
    for size in range(1, len(used) + 1):
        for some in map(list, combinations(range(len(used)), size)):
            part = numpy.linalg.solve(products[numpy.ix_(some, some)], wanted[some])
            gain = float(part @ wanted[some])  # by which it lowers the squared error
            if gain > highest * (1 + 1e-9) and (part >= 0).all():
                best, highest = numpy.zeros(rows.shape[1]), gain
                best[used[some]] = part / sizes[used[some]]
    return best


def _fit_encoder(visits: Sequence[EngineVisit]) -> tuple[float, float]:
    """Microseconds of an encoder's run, and of each item in it."""
    encoded = [each for each in visits if each.step_items and each.stages.get("encoder.compute")]
    if not encoded:
        return (0.0, 0.0)
    rows = numpy.array([[1, each.step_items] for each in encoded], dtype=numpy.float64)
    lengths = numpy.array([each.stages["encoder.compute"] for each in encoded], numpy.float64)
    run, item = _fit_line(rows, lengths).tolist()
    return run, item


def _find_gap(visits: Sequence[EngineVisit], samplings: Sequence[float]) -> tuple[int, bool]:
    """Microseconds from a sampled token to the next schedule(), and whether the window shows them.

    Between two chunks of a prompt that no step left out lie the sampling of the first, the gap, and the
    second one's lead: `dispatch` has all of them, and the first chunk's lead.
    """
    chunked = [each for each in visits if each.chunks > 1 and not each.preemptions]
    alone = [each for each in chunked if not each.stages.get("prefill.stall", 0)]
    leads = [each.stages.get("dispatch", 0) for each in visits if each.chunks == 1]
    if len(alone) < MIN_CHUNKED:
        return 0, False
    if len(leads) < MIN_CHUNKED:
        return 0, True  # the gap and the lead are one: no prompt has the lead alone
    lead = float(numpy.median(leads))
    turns = [(each.stages.get("dispatch", 0) - lead) / (each.chunks - 1) for each in alone]
    inside = lead + float(numpy.median(samplings))
    return max(0, round(float(numpy.median(turns)) - inside)), True


def _find_lead(visit: EngineVisit, turn: int) -> int:
    """From schedule() to the beginning of a step's work, the mean of the visit's steps, microseconds.

    turn: from the end of a chunk's forward to the next schedule(), which `dispatch` has, too, where no step
    left the request out.
    """
    whole = visit.stages.get("dispatch", 0)
    if visit.chunks < 2:
        return whole
    return max(0, round((whole - (visit.chunks - 1) * turn) / visit.chunks))


def _find_wake(visits: Sequence[EngineVisit]) -> int:
    """Microseconds from an arrival at an idle engine until schedule() has returned."""
    waits = sorted(
        each.stages.get("prefill.queue", 0) + each.stages.get("encoder.queue", 0) for each in visits
    )
    return min(waits[int(len(waits) * WAKE_SHARE)], MAX_WAKE_US)
