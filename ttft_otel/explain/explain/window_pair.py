# SPDX-License-Identifier: Apache-2.0
"""Two windows as one table, and the causes that only a comparison of them tells. Pure; needs numpy.

Input: RequestFacts of A, which is before, and of B, which is asked about. Output: Candidates, for `diff`,
and for the detectors of `explain` where the store has the time before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy

from ttft_otel.explain.explain import cause_kinds
from ttft_otel.explain.explain.late_case import (
    BLOCKS,
    LEVEL,
    MIN_FACTOR,
    MIN_OWN_REQUESTS,
    STEP_WORDS,
    SURE_FACTOR,
    Candidate,
    Floats,
    Mask,
    RequestTable,
    compare_speed,
    draw_pieces,
    expect_compute,
)
from ttft_otel.explain.window.request_facts import RequestFacts, count_values
from ttft_otel.model.statistics import find_interval, find_start
from ttft_otel.report.show.terminal import format_signed, to_local_time

PART_FACTOR: Final = 1.5  # of like steps in a piece of the window
MIN_DROP: Final = 0.1  # of the cached share of like prompts
MIN_SHIFT: Final = 0.1  # of an instance's share of the requests
MIN_RATE: Final = 1.25  # times the rate of before
MAX_NAMES: Final = 20  # of an attribute's values, of which shares are told
HITS: Final = "prefix-cache hits"
SHARED_BY: Final[Mapping[str, Callable[[RequestFacts], str]]] = {
    "group": lambda each: each.group,
    "model": lambda each: each.model,
    "kind": lambda each: each.kind,
    "instance": lambda each: each.instance,
}
MISSED: Final = 12.0  # requests that an instance would have had since its last one
ENGINE_WORDS: Final = ("prefill.queue", "encoder.queue", *STEP_WORDS)
# That grow where an instance has more to do: queues, and steps that are shared or miss cached prefixes.
SHARED_WORDS: Final = (
    "prefill.queue", "prefill.stall", "prefill.compute", "encoder.queue", "encoder.compute",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WindowFigure:
    """What of the requests themselves is another one than before; shares are of 1."""

    name: str
    before: float
    now: float
    is_share: bool = True

    @property
    def is_notable(self) -> bool:
        if self.is_share:
            return abs(self.now - self.before) >= MIN_SHIFT
        return max(self.now, self.before) >= MIN_RATE * min(self.now, self.before)

    @property
    def sentence(self) -> str:
        if self.is_share:
            return f"{self.name} {self.before:.0%} to {self.now:.0%}"
        before, now = (
            f"{each:.0f}" if each >= 100 else f"{each:.3g}" for each in (self.before, self.now)
        )
        return f"{self.name} {before} to {now}"


class WindowPair:
    """The requests of two windows; the earlier ones are moved to just before the others."""

    def __init__(self, before: Sequence[RequestFacts], now: Sequence[RequestFacts]) -> None:
        later = min(each.start_ns for each in now) - 1
        later -= max(each.start_ns for each in before)
        moved = [replace(each, start_ns=each.start_ns + later) for each in before]
        self.sides = moved, list(now)
        self.table = RequestTable([*moved, *now])
        self.now: Mask = numpy.arange(len(self.table)) >= len(before)
        # Half of the pieces for each window, however long it is.
        halves = [RequestTable(side).blocks // 2 for side in self.sides]
        self.table.blocks = numpy.concatenate([halves[0], halves[1] + BLOCKS // 2])

    @cached_property
    def change(self) -> float:
        """Of the mean TTFT, microseconds."""
        return self.average(self.table.ttft, self.now) - self.average(self.table.ttft, ~self.now)

    def average(self, values: Floats, side: Mask) -> float:
        """A mean by weight; 0 of nobody."""
        weights = self.table.weights[side]
        return float(weights @ values[side] / weights.sum()) if side.any() else 0.0

    def find_rank(self, share: float) -> float:
        """A percentile of the TTFT before, microseconds."""
        return self.table.find_quantile(self.table.ttft, share, ~self.now)

    def measure_rate(self, side: Mask) -> float:
        """Requests in a second."""
        start = self.table.start[side]
        return float(self.table.weights[side].sum() / max(numpy.ptp(start), 1e-3))

    def measure_hits(self, side: Mask) -> float:
        """The share of the prompts' tokens that the prefix cache had."""
        table = self.table
        tokens = self.average(table.tokens, side)
        return self.average(table.cached, side) / max(tokens, 1.0)

    @cached_property
    def outcomes(self) -> list[WindowFigure]:
        """Rate, hits and size, then shares of groups, models (adapters are some), kinds and instances."""
        found = [
            WindowFigure(name, measure(~self.now), measure(self.now), name == HITS)
            for name, measure in (
                ("requests in a second", self.measure_rate),
                (HITS, self.measure_hits),
                ("mean prompt", lambda side: self.average(self.table.tokens, side)),
            )
        ]
        for word, read in SHARED_BY.items():
            before, now = (count_values(side, read) for side in self.sides)
            named = sorted({*before, *now} - {""}, key=lambda name: (-now.get(name, 0.0), name))
            found += [
                WindowFigure(
                    f"{word} {name}",
                    before.get(name, 0.0) / sum(before.values()),
                    now.get(name, 0.0) / sum(now.values()),
                )
                for name in named[:MAX_NAMES]
            ]
        return found

    def draw_composition(self, labels: Sequence[object]) -> Floats:
        """What the mean TTFT changes because other shares of it have other labels: data, then draws.

        A label of one window alone has the mean that it has there.
        """
        names = {label: number for number, label in enumerate(dict.fromkeys(labels))}
        codes = numpy.array([names[label] for label in labels], numpy.int64)
        cells = self.table.blocks * len(names) + codes
        weights = draw_pieces(BLOCKS // 2)
        sums = []
        for side, offset in ((~self.now, 0), (self.now, BLOCKS // 2)):
            for values in (self.table.weights, self.table.weights * self.table.ttft):
                found = numpy.bincount(cells[side], values[side], BLOCKS * len(names))
                rows = found.reshape(BLOCKS, len(names))[offset : offset + BLOCKS // 2]
                sums.append(weights @ rows)
        n_a, y_a, n_b, y_b = sums
        means = numpy.where(n_a > 0, y_a / numpy.maximum(n_a, 1e-9), y_b / numpy.maximum(n_b, 1e-9))
        shares = n_b / n_b.sum(1)[:, None] - n_a / n_a.sum(1)[:, None]
        drawn: Floats = (shares * means).sum(1)
        return drawn

    def build(
        self, kind: str, sentence: str, part: Floats | float, subject: str = "", **figures: object
    ) -> Candidate:
        """A candidate that has this part of the change, microseconds: the data, then draws."""
        shares = numpy.atleast_1d(part) / max(self.change, 1.0)
        low, high = find_interval(shares[1:], LEVEL) if len(shares) > 1 else (shares[0], shares[0])
        refuted = "" if low > 0 else "it does not make them later"
        return Candidate(
            kind, sentence, float(shares[0]), float(low), float(high), BLOCKS // 2, refuted, subject,
            figures,
        )  # fmt: skip

    @cached_property
    def engine_change(self) -> float:
        """Of the time in engines and their queues."""
        us = self.table.sum_words(*ENGINE_WORDS)
        return self.average(us, self.now) - self.average(us, ~self.now)


def detect_slow_steps(pair: WindowPair) -> Iterator[Candidate]:
    """Steps take longer than before for the same work: of all instances, or of some."""
    table, now = pair.table, pair.now
    names = numpy.array(table.instances)
    slow: dict[str, tuple[float, float, float]] = {}
    weights: dict[str, float] = {}  # of requests now, of the instances that can be compared
    for name in sorted(set(table.instances) - {""}):
        here = names == name
        if min((here & now).sum(), (here & ~now).sum()) < MIN_OWN_REQUESTS:
            continue
        weights[name] = float(table.weights[here & now].sum())
        factor, low, high = _compare_steps(pair, here, here & now)
        if factor >= MIN_FACTOR and low >= SURE_FACTOR:
            slow[name] = factor, low, high
        elif parts := _find_slow_parts(pair, here):
            slow[name] = float(numpy.median(parts)), min(parts), max(parts)
    if not slow:
        return
    known = sum(weights[name] for name in slow)
    if known >= 0.9 * sum(weights.values()) and (len(slow) > 1 or len(set(table.instances)) == 1):
        factor, since_ns = find_slowdown(table, ~pair.now, pair.now)
        which = "all" if len(slow) == len(weights) else f"{len(slow)} of {len(weights)}"
        yield pair.build(
            cause_kinds.SLOW_FLEET,
            f"steps of {which} instances take {factor:.1f} times as long as before for the same work"
            f"{describe_since(since_ns)}",
            pair.engine_change,
            factor=round(factor, 3),
        )
        return
    others = ", those of others do not" if len(slow) == 1 else ", as those of some others do"
    for name, (factor, low, high) in slow.items():
        here = names == name
        usual = pair.average(table.ttft, here & ~now)
        share = table.weights[here & now].sum() / table.weights[now].sum()
        yield pair.build(
            cause_kinds.SLOW_INSTANCE,
            f"steps of {name} take {factor:.2f} times as long as before for the same work "
            f"({low:.2f} to {high:.2f}){others}",
            float(share * (pair.average(table.ttft, here & now) - usual)),
            subject=name,
            factor=round(factor, 3),
            factor_low=round(low, 3),
            factor_high=round(high, 3),
        )


def _compare_steps(pair: WindowPair, here: Mask, exposed: Mask) -> tuple[float, float, float]:
    """By what factor an instance's steps are longer than those before with like work, and its interval."""
    found = compare_speed(pair.table, exposed, (here & ~pair.now) | exposed)
    factor, low, high = (float(numpy.exp(each)) for each in (found.value, found.low, found.high))
    return factor, low, high


def _find_slow_parts(pair: WindowPair, here: Mask) -> list[float]:
    """The factors of the pieces of time in which an instance was slow; [] where it was so in one at most."""
    table = pair.table
    found = []
    for piece in range(BLOCKS // 2, BLOCKS):
        part = here & (table.blocks == piece)
        if (
            part.sum() >= MIN_OWN_REQUESTS
            and (factor := _compare_steps(pair, here, part)[0]) >= PART_FACTOR
        ):
            found.append(factor)
    return found if len(found) > 1 else []


def find_slowdown(table: RequestTable, usual: Mask, now: Mask) -> tuple[float, int]:
    """By what factor all steps of `now` are longer than usual ones, and since when.

    The moment in Unix nanoseconds, 0 from the start on.
    """
    expected = expect_compute(table, usual)
    timed = [
        (
            table.requests[row].start_ns,
            float(table.compute[row] / expected[row]) - 1,
            float(table.weights[row]),
        )
        for row in numpy.flatnonzero(now & (expected > 0))
    ]
    since_ns = find_start(timed)
    late = [value for start, value, _ in timed if start >= since_ns]
    return 1 + float(numpy.median(late)) if late else 1.0, since_ns


def detect_lost_instances(pair: WindowPair) -> Iterator[Candidate]:
    """Instances that served no more from a moment on, and none came for them."""
    table = pair.table
    before, now = ([set(each.instances.values()) for each in side] for side in pair.sides)
    known = set().union(*before)
    if set().union(*now) - known:
        return
    starts, weights = table.start[pair.now], table.weights[pair.now]
    lost: list[str] = []
    since = numpy.inf
    for name in sorted(known - {""}):
        served = numpy.array([name in places for places in now])
        last = float(starts[served].max()) if served.any() else float(starts.min())
        # Of requests that need what it did: nobody misses an encoder while no media come.
        stages = {
            stage for each in pair.sides[0] for stage, at in each.instances.items() if at == name
        }
        needs = [
            [each.weight * bool(stages & each.instances.keys()) for each in side]
            for side in pair.sides
        ]
        had = sum(weight for weight, places in zip(needs[0], before, strict=True) if name in places)
        if had / sum(needs[0]) * float(numpy.array(needs[1])[starts > last].sum()) >= MISSED:
            lost.append(name)
            since = min(since, last)
    if not lost:
        return
    # Only what more work can bring about: the others had the work of the lost one.
    shared = table.sum_words(*SHARED_WORDS)
    usual = pair.average(shared, ~pair.now)
    since_ns = int(table.epoch_ns + since * 1e9) if since > float(starts.min()) else 0
    after = weights * (shared[pair.now] - usual) * (starts >= since)
    yield pair.build(
        cause_kinds.LOST_INSTANCE,
        f"{', '.join(lost)} served no more requests{describe_since(since_ns)}, others had the work",
        float(after.sum() / weights.sum()),
        subject=lost[0],
    )


def detect_shift(pair: WindowPair) -> Iterator[Candidate]:
    """Other instances served them."""
    table = pair.table
    before, now = (count_values(side, lambda each: each.instance) for side in pair.sides)
    shares = {
        name: (before.get(name, 0.0) / sum(before.values()), now.get(name, 0.0) / sum(now.values()))
        for name in {**before, **now}
    }
    name, (then, share) = max(shares.items(), key=lambda part: part[1][1] - part[1][0])
    if share - then < MIN_SHIFT:
        return
    drawn = pair.draw_composition(table.instances)
    each = pair.change - float(drawn[0])
    here = numpy.array(table.instances) == name
    then_us, now_us = (pair.average(table.ttft, here & side) for side in (~pair.now, pair.now))
    # What they wait longer there comes of the shift, too: its steps are as long as before.
    grown = share * max(now_us - then_us, 0.0) if then else 0.0
    yield pair.build(
        cause_kinds.INSTANCE_SHIFT,
        f"other instances served them ({name}: {then:.0%} to {share:.0%}): "
        f"{format_signed(float(drawn[0]))}; each by itself {format_signed(each)}",
        drawn + grown,
        subject=name,
        share_from=round(then, 4),
        share_to=round(share, 4),
    )


def detect_hits(pair: WindowPair) -> Iterator[Candidate]:
    """Less of like prompts was found in the prefix cache."""
    table, now = pair.table, pair.now
    if not table.cached.any():
        return
    shares = table.cached / numpy.maximum(table.tokens, 1)
    found = table.contrast(shares, now, table.sizes)
    if found.value > -MIN_DROP or found.high >= 0:
        return
    then, after = (pair.measure_hits(side) for side in (~now, now))
    thirds = numpy.minimum(shares * 3, 2).astype(numpy.int64)
    sizes = table.sizes.tolist()
    drawn = pair.draw_composition(list(zip(sizes, thirds.tolist(), strict=True)))
    drawn = drawn - pair.draw_composition(sizes)
    yield pair.build(
        cause_kinds.COLD_PREFIX_CACHE,
        f"{HITS} fell from {then:.0%} to {after:.0%}: {format_signed(float(drawn[0]))}",
        drawn,
        hits_from=round(then, 4),
        hits_to=round(after, 4),
    )


def detect_mix(pair: WindowPair) -> Iterator[Candidate]:
    """Other requests came: of other sizes, kinds, models or groups."""
    table = pair.table
    sizes = table.sizes.tolist()
    labels = [
        (size, each.model, each.group) for size, each in zip(sizes, table.requests, strict=True)
    ]
    drawn = pair.draw_composition(labels)
    yield pair.build(
        cause_kinds.MIX_CHANGE,
        f"other requests came: {_describe_mix(pair)}{format_signed(float(drawn[0]))}",
        drawn,
        tokens_from=round(pair.average(table.tokens, ~pair.now)),
        tokens_to=round(pair.average(table.tokens, pair.now)),
    )


def _describe_mix(pair: WindowPair) -> str:
    shares = (
        each
        for each in pair.outcomes
        if each.is_share and not each.name.startswith((HITS, "instance "))
    )
    size = pair.outcomes[2].sentence
    return next((each.sentence for each in shares if each.is_notable), f"{size} tokens") + ": "


def detect_rate(pair: WindowPair) -> Iterator[Candidate]:
    """More came in the same time."""
    then, rate = (pair.measure_rate(side) for side in (~pair.now, pair.now))
    if rate < MIN_RATE * then:
        return
    yield pair.build(
        cause_kinds.LOAD_INCREASE,
        f"{rate:.3g} requests came in a second, {then:.3g} before",
        pair.engine_change,
        rate_from=round(then, 3),
        rate_to=round(rate, 3),
    )


def describe_since(ns: int) -> str:
    return f" since {to_local_time(ns):%H:%M:%S}" if ns else ""


PAIR_DETECTORS: Final[tuple[Callable[[WindowPair], Iterator[Candidate]], ...]] = (
    detect_lost_instances,
    detect_slow_steps,
    detect_hits,
    detect_shift,
    detect_mix,
    detect_rate,
)
