# SPDX-License-Identifier: Apache-2.0
"""Learn from a recorded window how long an engine's steps take. Pure; needs numpy.

Input: EngineVisits of replay_facts.py. Output: StepTimes, by which engine_model.py runs its steps.

A forward pass takes a + b * tokens of the step + d * attention pairs of its prompts. What `prefill.compute`
measures is the whole step's, and `ttft.prefill.step_tokens` has all of its tokens, so that each traced
prompt is a sample. Least squares with non-negative coefficients, relative errors, and Huber's weights: a
step that something else has delayed must not bend the line. What the line leaves over is drawn from samples
of the same part of the window: what slows a machine down lasts for a while.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Final

import numpy

from ttft_otel.explain.whatif.engine_model import Step, StepLength
from ttft_otel.explain.whatif.replay_facts import EngineVisit

Array = numpy.ndarray[Any, numpy.dtype[numpy.float64]]

ERROR_FLOOR_US: Final = 500.0  # below it, relative errors of short steps would count for nothing
# In standard deviations: 95 % as good as least squares where errors are normal.
HUBER: Final = 1.345
ROUNDS: Final = 12  # of reweighting; the weights have settled by then
MAX_RATIO: Final = 3.0  # of a measured step to the line; what is beyond it counts as this
# Of `dispatch` and `sample`: MAX_RATIO times that is the most that counts.
USUAL_SHARE: Final = 0.95
NEAR_SAMPLES: Final = 8  # of the same part of the window, from which a step's noise is drawn
# Prompts with several chunks that are needed to know the gap between two steps.
MIN_CHUNKED: Final = 5
QUIET_SHARE: Final = 0.25  # of all steps, which are shorter than an undisturbed one
MAX_WAKE_US: Final = 2000  # of an engine that is idle; a longer wait has another cause
WAKE_SHARE: Final = 0.05  # the shortest waits are those of prompts that found an idle engine
# Under async scheduling most of `dispatch` is the rest of another step.
ASYNC_LEAD_SHARE: Final = 0.1


@dataclass(slots=True)
class StepTimes:
    """How long steps take."""

    forward: tuple[float, float, float]  #: microseconds per pass, token and attention pair
    encoder: tuple[float, float]  #: per run, and media item
    moments: Sequence[int]  #: when the samples were taken, in order
    ratios: Sequence[float]  #: their passes, relative to the line
    leads: Sequence[int]  #: their `dispatch`
    samplings: Sequence[int]  #: their `sample`
    gap_us: int  #: from the sampled token to the next schedule()
    wake_us: int  #: from an arrival at an idle engine to its first schedule()
    decode_factor: float = 1.0  #: of passes without a prompt
    speed: float = 1.0  #: how much slower than the line this instance is
    pace: float = 1.0  #: times as fast as the recorded window the simulation's clock runs
    chance: random.Random | None = None  #: None for steps of mean length, without noise

    def measure_step(self, step: Step) -> StepLength:
        """The length of a step that has been composed."""
        base, per_token, per_pair = self.forward
        us = base + per_token * step.tokens + per_pair * step.pairs
        if not step.parts:
            us *= self.decode_factor
        near = self._find_near(round(step.scheduled * self.pace))
        us *= self.speed * self._draw(self.ratios, near, 1.0)
        encoder = self.encoder[0] + self.encoder[1] * step.items if step.items else 0.0
        return StepLength(
            lead=round(self._draw(self.leads, near, 0)),
            encoder=round(encoder),
            forward=round(us),
            sample=round(self._draw(self.samplings, near, 0)),
            gap=self.gap_us,
        )

    def _find_near(self, moment: int) -> range:
        """Positions of the samples that were taken nearest to `moment`."""
        first = bisect_left(self.moments, moment) - NEAR_SAMPLES // 2
        first = max(min(first, len(self.moments) - NEAR_SAMPLES), 0)
        return range(first, min(first + NEAR_SAMPLES, len(self.moments)))

    def _draw(self, values: Sequence[float], near: range, default: float) -> float:
        if not values:
            return default
        # The mean, because queues grow with it; a median would leave out what sometimes takes long.
        if self.chance is None:
            return sum(values[at] for at in near) / len(near)
        return values[self.chance.choice(near)]

    def build_undisturbed(self) -> StepTimes:
        """The same steps as they would be if nothing but their work had made them longer."""
        if not self.ratios:
            return self
        return replace(
            self,
            moments=[0],
            ratios=[float(numpy.quantile(self.ratios, QUIET_SHARE))],
            leads=[int(numpy.median(self.leads))],
            samplings=[int(numpy.median(self.samplings))],
        )


@dataclass(frozen=True, slots=True)
class StepFit:
    """What was learned of the engines of one role."""

    times: StepTimes
    speeds: Mapping[str, float]  #: by instance
    seen_tokens: tuple[int, int]  #: fewest and most tokens of a step
    error: float  #: median relative error of the line
    knows_gap: bool  #: whether prompts of several chunks show the time between two steps
    samples: int = 0
    seen_items: int = 0
    tokens_vary: bool = True
    #: By how much steps differ from what their work takes, on average, relative.
    unexplained: float = 0.0

    def build_times(
        self, instance: str, chance: random.Random | None, pace: float = 1.0
    ) -> StepTimes:
        """The step times of one instance; one that was not recorded is as fast as the others."""
        speed = self.speeds.get(instance, 1.0)
        return replace(self.times, speed=speed, pace=pace, chance=chance)


def fit_steps(visits: Sequence[EngineVisit], is_async: bool) -> StepFit:
    """Learn from the visits at engines of one role; there is at least one."""
    visits = sorted(visits, key=lambda each: each.arrived)
    prefills = [each for each in visits if each.stages.get("prefill.compute")]
    rows = numpy.array([_list_work(each) for each in prefills], dtype=numpy.float64).reshape(-1, 3)
    lengths = numpy.array([each.stages["prefill.compute"] for each in prefills], numpy.float64)
    forward = _fit_line(rows, lengths)
    expected = numpy.maximum(rows @ numpy.array(forward), 1.0)
    # One number by itself says nothing of single chunks, so those of several count with their mean.
    ratios = numpy.clip(lengths / expected, 1 / MAX_RATIO, MAX_RATIO)
    sampled = prefills or visits
    samplings = _clip_rare([each.stages.get("sample", 0) for each in sampled])
    gap, knows_gap = _find_gap(visits, samplings)
    turn = gap + round(float(numpy.median(samplings)))
    leads = _clip_rare([_find_lead(each, turn) for each in sampled])
    if is_async:
        lowest = sorted(leads)[: max(1, round(len(leads) * ASYNC_LEAD_SHARE))]
        leads = [round(sum(lowest) / len(lowest))] * len(leads)
    sizes = [each.step_tokens // each.chunks for each in prefills] or [0]
    return StepFit(
        times=StepTimes(
            forward=forward,
            encoder=_fit_encoder(visits),
            moments=[each.arrived for each in sampled],
            ratios=ratios.tolist(),
            leads=leads,
            samplings=samplings,
            gap_us=0 if is_async else gap,
            wake_us=_find_wake(visits),
        ),
        speeds=_find_speeds(prefills, ratios),
        seen_tokens=(min(sizes), max(sizes)),
        error=float(numpy.median(numpy.abs(ratios - 1))) if len(ratios) else 0.0,
        knows_gap=knows_gap or is_async,
        samples=len(prefills),
        seen_items=max((each.step_items for each in visits), default=0),
        tokens_vary=max(sizes) > 1.5 * max(min(sizes), 1),
        unexplained=_find_unexplained(lengths, expected, leads, samplings) if prefills else 0.0,
    )


def _find_unexplained(
    lengths: Array, expected: Array, leads: Sequence[int], samplings: Sequence[int]
) -> float:
    """The mean distance of measured steps from what their work takes, as a share of that."""
    usual = float(numpy.median(leads) + numpy.median(samplings))
    whole = lengths + numpy.array(leads) + numpy.array(samplings)
    ratios = numpy.clip(whole / (expected + usual), 1 / MAX_RATIO, MAX_RATIO)
    return float(numpy.mean(numpy.abs(ratios / numpy.median(ratios) - 1)))


def _clip_rare(values: Sequence[int]) -> list[int]:
    """The values; what is far above nearly all of them counts as less.

    A machine that stops for once delays one of a thousand steps, and one of a hundred requests: drawn for
    every so-manieth step, it would count ten times.
    """
    ordered = sorted(values)
    if not ordered:
        return []
    highest = round(MAX_RATIO * ordered[int(len(ordered) * USUAL_SHARE)])
    return [min(each, highest) for each in values]


def _list_work(visit: EngineVisit) -> tuple[int, int, int]:
    """Passes, tokens and attention pairs of the steps of one prompt; of others' prompts no pairs."""
    pairs = (2 * visit.cached + visit.computed + 1) * visit.computed // 2
    return visit.chunks, max(visit.step_tokens, visit.computed), pairs


def _fit_line(rows: Array, lengths: Array) -> tuple[float, float, float]:
    """Non-negative coefficients of the columns of `rows`; zeros where there are no rows."""
    if not len(rows):
        return (0.0, 0.0, 0.0)
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
    return (float(found[0]), float(found[1]), float(found[2]))


def _solve_positive(rows: Array, values: Array) -> Array:
    """Least squares without negative coefficients: the best of the subsets that have none."""
    count, best, lowest = rows.shape[1], numpy.zeros(rows.shape[1]), float("inf")
    for size in range(1, count + 1):
        for some in combinations(range(count), size):
            part, *_ = numpy.linalg.lstsq(rows[:, some], values, rcond=None)
            error = float(((rows[:, some] @ part - values) ** 2).sum())
            if (part >= 0).all() and error < lowest * (1 - 1e-9):
                best, lowest = numpy.zeros(count), error
                best[list(some)] = part
    return best


def _fit_encoder(visits: Sequence[EngineVisit]) -> tuple[float, float]:
    """Microseconds of an encoder's run, and of each item in it."""
    encoded = [each for each in visits if each.step_items and each.stages.get("encoder.compute")]
    if not encoded:
        return (0.0, 0.0)
    rows = numpy.array([[1, each.step_items, 0] for each in encoded], dtype=numpy.float64)
    lengths = numpy.array([each.stages["encoder.compute"] for each in encoded], numpy.float64)
    return _fit_line(rows, lengths)[:2]


def _find_gap(visits: Sequence[EngineVisit], samplings: Sequence[int]) -> tuple[int, bool]:
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


def _find_speeds(prefills: Sequence[EngineVisit], ratios: Array) -> dict[str, float]:
    """How much slower than the common line each instance is."""
    by_instance: dict[str, list[float]] = {}
    for visit, ratio in zip(prefills, ratios, strict=True):
        by_instance.setdefault(visit.instance, []).append(float(ratio))
    # Noise is drawn around the common line's median, which is taken off here.
    middle = float(numpy.median(ratios)) if len(ratios) else 1.0
    return {name: float(numpy.median(some)) / middle for name, some in by_instance.items()}
