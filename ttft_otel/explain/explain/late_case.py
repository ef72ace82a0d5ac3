# SPDX-License-Identifier: Apache-2.0
"""What the detectors of `explain` are asked about: late requests among all of their time, and what is usual.

Input: LateDifference, and the window before where the store has one. Output: a window's requests as columns
(RequestTable), contrasts between some of them and their like, and how much of the lateness an exposure
accounts for; the detectors, and those of `diff`, make Candidates of it. Intervals are a bootstrap of the
window's time: requests of a burst are not independent. Pure; needs numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy

from ttft_otel.explain.explain import cause_kinds
from ttft_otel.explain.explain.late_requests import LateDifference
from ttft_otel.explain.window.request_facts import RequestFacts
from ttft_otel.model import stages
from ttft_otel.model.statistics import compute_weighted_quantiles, draw_weights, find_interval

Floats = numpy.ndarray[Any, numpy.dtype[numpy.float64]]
Mask = numpy.ndarray[Any, numpy.dtype[numpy.bool_]]
Codes = numpy.ndarray[Any, numpy.dtype[numpy.int64]]

BLOCKS: Final = 40  # pieces of a window's time, of which the bootstrap draws
DRAWS: Final = 400
LEVEL: Final = 0.95
MIN_SIDE: Final = 3  # requests of a stratum on each side
HIGH, MEDIUM, LOW = "high", "medium", "low"
MIN_SHARE: Final = 0.5  # of the difference, from which on a candidate explains it
MIN_ODD_SHARE: Final = 0.25  # the same of a cause that no healthy window has any of
OUTLIER_Z: Final = 4.0  # standard deviations: of a million sizes some thirty are beyond by chance
MAD_TO_DEVIATION: Final = 1.4826
SURE_Z: Final = 3.0  # standard errors by which more late requests are exposed than chance makes
# Causes that are faults, not what every window has a little of.
ODD_KINDS: Final = (
    cause_kinds.SLOW_INSTANCE, cause_kinds.SLOW_FLEET, cause_kinds.PROCESS_PAUSE, cause_kinds.SLOW_HOP,
    cause_kinds.ROUTER_BUSY, cause_kinds.FAILED_ATTEMPTS, cause_kinds.LOST_INSTANCE,
)  # fmt: skip
# Stages from where the engine takes a prompt to its first token.
STEP_WORDS: Final = ("dispatch", "pipeline", "prefill.compute", "prefill.stall", "sample")
MIN_FACTOR: Final = 1.25  # of like steps, from which on an instance is slow
SURE_FACTOR: Final = 1.1  # the least that the interval of that factor must exceed
MIN_OWN_REQUESTS: Final = 10  # of an instance, to know its speed
STEP_FLOOR_US: Final = 300.0  # below it, relative lengths of steps say nothing


@dataclass(frozen=True, slots=True)
class Contrast:
    """A mean of some requests minus that of their like, and what it adds up to; with intervals."""

    value: float
    low: float
    high: float
    #: All of the outcome that the contrast accounts for, as a share of the outcome of all requests.
    share: float
    share_low: float
    share_high: float
    blocks: int  #: pieces of time in which exposed requests had some of the outcome
    others: float = 0.0  #: the mean of their like

    @property
    def holds(self) -> bool:
        """Whether both intervals are above 0."""
        return self.low > 0 and self.share_low > 0


NO_CONTRAST: Final = Contrast(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)


class RequestTable:
    """Columns of a window, one row for each request; times in microseconds, moments in seconds."""

    def __init__(self, requests: Sequence[RequestFacts]) -> None:
        self.requests = requests
        self.epoch_ns = min((each.start_ns for each in requests), default=0)
        self.start: Floats = numpy.array(
            [(each.start_ns - self.epoch_ns) / 1e9 for each in requests]
        )
        self.weights: Floats = numpy.array([each.weight for each in requests])
        self.ttft: Floats = numpy.array([float(each.ttft_us) for each in requests])
        # Counts may have been sent by anybody.
        self.tokens: Floats = numpy.clip([float(each.tokens) for each in requests], 0, 1e9)
        self.cached: Floats = numpy.clip([float(each.cached) for each in requests], 0, self.tokens)
        self.instances = [each.instance for each in requests]
        self.compute: Floats = numpy.array([float(each.compute_us) for each in requests])
        self.chunks: Floats = numpy.clip([float(each.chunks) for each in requests], 1, 1e6)
        self.step_tokens: Floats = numpy.clip(
            [float(each.step_tokens) for each in requests], 0, 1e9
        )

    def __len__(self) -> int:
        return len(self.requests)

    @cached_property
    def words(self) -> dict[str, Floats]:
        """By the stages' names without legs, the time of all legs."""
        names = {name for each in self.requests for name in each.stages}
        found: dict[str, Floats] = {}
        for name in sorted(names):
            us = numpy.array([float(each.stages.get(name, 0)) for each in self.requests])
            word = stages.strip_leg(name)
            found[word] = found[word] + us if word in found else us
        return found

    def sum_words(self, *words: str) -> Floats:
        zero = numpy.zeros(len(self.requests))
        return sum((self.words.get(word, zero) for word in words), zero)

    @cached_property
    def computed(self) -> Floats:
        """Tokens of the prompts that no cache had."""
        return numpy.maximum(self.tokens - self.cached, 1)

    @cached_property
    def pools(self) -> Codes:
        """Instances that serve a model in common are one pool; a request's pool as a number."""
        parent: dict[tuple[str, str], tuple[str, str]] = {}

        def find(node: tuple[str, str]) -> tuple[str, str]:
            while parent.setdefault(node, node) != node:
                node = parent[node]
            return node

        keys = [(("model", each.model), ("instance", each.instance)) for each in self.requests]
        for model, instance in set(keys):
            parent[find(model)] = find(instance)
        numbers: dict[tuple[str, str], int] = {}
        return numpy.array(
            [numbers.setdefault(find(instance), len(numbers)) for _, instance in keys], numpy.int64
        )

    @cached_property
    def sizes(self) -> Codes:
        """Strata of like requests: pool, kind, and size to half an octave of the prompt."""
        octaves = numpy.round(2 * numpy.log2(numpy.maximum(self.tokens, 1))).astype(numpy.int64)
        kinds = numpy.array([each.kind == "media" for each in self.requests], numpy.int64)
        codes: Codes = (self.pools * 2 + kinds) * 100 + octaves
        return codes

    @cached_property
    def work(self) -> Codes:
        """Strata of steps with like work: pool, chunks, tokens of a step to half an octave; -1 unknown."""
        per_step = self.step_tokens / self.chunks
        octaves = numpy.round(2 * numpy.log2(numpy.maximum(per_step, 1))).astype(numpy.int64)
        context = numpy.round(numpy.log2(numpy.maximum(self.tokens, 1))).astype(numpy.int64)
        chunks = numpy.minimum(self.chunks, 20).astype(numpy.int64)
        codes = ((self.pools * 100 + octaves) * 40 + context) * 21 + chunks
        return numpy.where((self.step_tokens > 0) & (self.compute > 0), codes, -1)

    @cached_property
    def blocks(self) -> Codes:
        """The piece of the window's time in which each request began."""
        length = max(float(self.start.max(initial=0.0)), 1e-9)
        return numpy.minimum(self.start / length * BLOCKS, BLOCKS - 1).astype(numpy.int64)

    def contrast(
        self, outcome: Floats, exposed: Mask, strata: Codes, among: Mask | None = None
    ) -> Contrast:
        """The mean outcome of exposed requests minus that of others of their strata.

        among: the requests that count; those of a negative stratum do not.
        """
        used = strata >= 0 if among is None else (strata >= 0) & among
        if not exposed[used].any() or exposed[used].all():
            return NO_CONTRAST
        outcome, one = outcome[used], numpy.ones(used.sum())
        sides = (exposed[used], ~exposed[used])
        _, codes = numpy.unique(strata[used], return_inverse=True)
        _, pieces = numpy.unique(self.blocks[used], return_inverse=True)
        count, number = int(codes.max()) + 1, int(pieces.max()) + 1
        cell = pieces * count + codes

        def gather(side: Mask, values: Floats) -> Floats:
            summed = numpy.bincount(cell[side], values[side], minlength=number * count)
            found: Floats = summed.reshape(number, count).astype(numpy.float64)
            return found

        weights, draws = self.weights[used], draw_pieces(number)
        n_in, n_out = (draws @ gather(side, weights) for side in sides)
        y_in, y_out = (draws @ gather(side, weights * outcome) for side in sides)
        # Strata with too few on a side say nothing; which ones is decided once, on the data.
        usable = numpy.all([gather(side, one).sum(0) >= MIN_SIDE for side in sides], axis=0)
        if not usable.any():
            return NO_CONTRAST
        valid = usable & (n_in > 0) & (n_out > 0)
        mean_out = y_out / numpy.maximum(n_out, 1e-9)
        above = numpy.where(valid, y_in - n_in * mean_out, 0.0).sum(1)
        size = numpy.maximum(numpy.where(valid, n_in, 0.0).sum(1), 1e-9)
        total = (y_in + y_out).sum(1)
        shares = numpy.divide(
            above, total, out=numpy.zeros_like(above), where=numpy.abs(total) > 1e-9
        )
        values = above / size
        carried = (gather(sides[0] & (outcome > 0), one).sum(1) > 0).sum()
        own = numpy.where(valid[0], y_in[0], 0.0).sum() / size[0]
        found = (values[0], *find_interval(values[1:], LEVEL))
        parts = (shares[0], *find_interval(shares[1:], LEVEL))
        value, low, high, share, share_low, share_high = (float(each) for each in (*found, *parts))
        return Contrast(
            value, low, high, share, share_low, share_high, int(carried), float(own) - value
        )

    def find_quantile(self, values: Floats, share: float = 0.5, among: Mask | None = None) -> float:
        """A quantile of a column, by default its median; among: the requests that count."""
        used = numpy.ones(len(values), bool) if among is None else among
        chosen, weights = (each[used].tolist() for each in (values, self.weights))
        return compute_weighted_quantiles(chosen, weights, (share,))[0]


@lru_cache(maxsize=BLOCKS)  # every contrast asks
def draw_pieces(count: int) -> Floats:
    """The bootstrap of so many pieces of time: how often each is in each draw; the first is the data."""
    return draw_weights(numpy.random.default_rng(0), count, DRAWS)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A cause that was looked at: what speaks for it, and how much of the lateness it accounts for.

    What is concluded is one of them, or one of NO_CAUSES, with a confidence.
    """

    kind: str
    sentence: str  #: its own contrast, with figures
    share: float = 0.0  #: of the difference that it accounts for
    low: float = 0.0
    high: float = 0.0
    blocks: int = 0  #: separate pieces of time that carry it
    refuted: str = ""  #: why it is not the cause; "" where it holds
    subject: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)  #: for the JSON
    is_change: bool = False  #: against the time before, whose lateness is nothing to explain
    confidence: str = ""

    @property
    def is_cause(self) -> bool:
        return self.kind not in cause_kinds.NO_CAUSES

    @property
    def title(self) -> str:
        """The kind in words."""
        return self.kind.replace("_", " ").capitalize()

    @property
    def holds(self) -> bool:
        """Whether it survives, and explains most."""
        return not self.refuted and self.share >= (MIN_ODD_SHARE if self.is_odd else MIN_SHARE)

    @property
    def is_odd(self) -> bool:
        """Whether it is a fault or a change, not what every window has a little of."""
        return self.is_change or self.kind in ODD_KINDS


class LateCase:
    """Late requests, everybody of their time as a table, and contrasts of the lateness."""

    def __init__(
        self,
        difference: LateDifference,
        everyone: Sequence[RequestFacts],
        before: Sequence[RequestFacts] = (),
    ) -> None:
        self.difference = difference
        self.table = RequestTable(everyone)
        self.before = RequestTable(before) if before else None

        def mark(some: Sequence[RequestFacts]) -> Mask:
            chosen = {id(each) for each in some}
            return numpy.array([id(each) in chosen for each in everyone])

        self.late, self.typical = mark(difference.compared.late), mark(difference.compared.typical)
        #: Of the window that is asked about; `diff` has the one before among everyone, too.
        self.asked: Mask = ~mark(before)
        usual = float(
            numpy.average(self.table.ttft[self.typical], weights=self.table.weights[self.typical])
        )
        #: By how much late requests are longer than typical ones; 0 for all others.
        self.excess: Floats = numpy.where(self.late, self.table.ttft - usual, 0.0)
        self.is_single = len(difference.compared.late) == 1

    def attribute(self, exposed: Mask) -> Contrast:
        """How much of the lateness goes back to an exposure: more of it than the like others have."""
        if not self.is_single:
            return self._attribute_lateness(exposed)
        # One request has no rate of lateness: what the exposure takes from others counts, if it has it.
        found = self.table.contrast(self.table.ttft, exposed, self.table.sizes)
        row = int(numpy.argmax(self.late))
        whole = max(float(self.excess[row]), 1.0)
        share, low, high = (
            min(max(each / whole, 0.0), 1.0) if exposed[row] else 0.0
            for each in (found.value, found.low, found.high)
        )
        return replace(found, share=share, share_low=low, share_high=high)

    def _attribute_lateness(self, exposed: Mask) -> Contrast:
        """The lateness of exposed requests beyond that of their unexposed like, as a share of all.

        Late requests are few: the bootstrap draws among the pieces of time that have some, and that exposed
        ones are late more often is asked of their number.
        """
        weights = self.table.weights
        _, codes = numpy.unique(self.table.sizes, return_inverse=True)
        one = numpy.ones(len(codes))

        def gather(side: Mask, values: Floats) -> Floats:
            found: Floats = numpy.bincount(
                codes[side], (weights * values)[side], minlength=codes.max() + 1
            ).astype(numpy.float64)
            return found

        inside, outside = gather(exposed, one), gather(~exposed, one)
        usable = (inside >= MIN_SIDE) & (outside >= MIN_SIDE)
        others = numpy.where(
            usable, gather(~exposed, self.excess) / numpy.maximum(outside, 1e-9), 0.0
        )
        compared = usable[codes]
        beyond = numpy.where(exposed & compared, self.excess - others[codes], 0.0)
        late = compared & self.late
        chance = (inside / numpy.maximum(inside + outside, 1e-9))[codes][late]
        spread = float(numpy.sqrt((chance * (1 - chance)).sum()))
        is_sure = (exposed & late).sum() - chance.sum() > SURE_Z * max(spread, 1e-9)
        found = measure_share(self, beyond, numpy.ones(len(codes), bool))
        low = found.share_low if is_sure else min(found.share_low, 0.0)
        return replace(found, low=low, share_low=low)

    @cached_property
    def new_share(self) -> float:
        """Which share of the lateness the slowest of the time before did not have; 0 without that."""
        if self.before is None:
            return 0.0
        weights = self.table.weights
        late, excess = (
            float(numpy.average(each[self.late], weights=weights[self.late]))
            for each in (self.table.ttft, self.excess)
        )
        share = weights[self.late].sum() / weights.sum()
        least = self.before.find_quantile(self.before.ttft, 1 - share)
        slow = self.before.ttft >= least
        then = float(numpy.average(self.before.ttft[slow], weights=self.before.weights[slow]))
        return min(max((late - then) / max(excess, 1.0), 0.0), 1.0)

    @cached_property
    def expected_compute(self) -> Floats:
        """What the steps of each prompt usually take for their work; 0 where that is not known."""
        return expect_compute(self.table)

    @cached_property
    def own_time(self) -> Floats:
        """What each prompt's own tokens take of its steps; with its turnarounds, where it has several."""
        table, expected = self.table, self.expected_compute
        step = numpy.maximum(table.step_tokens, table.computed)
        own = numpy.where(expected > 0, expected * table.computed / numpy.maximum(step, 1), 0.0)
        return numpy.where(table.chunks > 1, own + table.sum_words("dispatch"), own)

    @cached_property
    def spans(self) -> tuple[Floats, Floats]:
        """When the engine took each request, and when it had its first token; seconds."""
        table = self.table
        after = table.sum_words("output", "egress", "router.egress", "unattributed")
        inside = table.sum_words(*STEP_WORDS)
        done = table.start + (table.ttft - after) / 1e6
        return done - inside / 1e6, done


def build_candidate(
    kind: str, sentence: str, found: Contrast, refuted: str, subject: str = "", **figures: object
) -> Candidate:
    """A candidate whose shares are those of a contrast."""
    return Candidate(
        kind,
        sentence,
        found.share,
        found.share_low,
        found.share_high,
        found.blocks,
        refuted,
        subject,
        figures,
    )


def is_outlier(sizes: Floats) -> Mask:
    """Which sizes are beyond what the spread of most of them makes of chance; of their logarithms."""
    logs = numpy.log(numpy.maximum(sizes, 1))
    middle = float(numpy.median(logs))
    spread = MAD_TO_DEVIATION * float(numpy.median(numpy.abs(logs - middle)))
    found: Mask = logs > middle + OUTLIER_Z * max(spread, 1e-3)
    return found


def expect_compute(table: RequestTable, learn: Mask | None = None) -> Floats:
    """The median length of steps with as many tokens, times the prompt's chunks; 0 where it is not known.

    learn: the requests from which it is learned; all of them by default.
    """
    known = (table.step_tokens > 0) & (table.compute > 0)
    expected = numpy.zeros(len(table))
    octaves = numpy.log2(numpy.maximum(table.step_tokens / table.chunks, 1))
    for pool in numpy.unique(table.pools):
        here = known & (table.pools == pool)
        taught = here if learn is None else here & learn
        if taught.sum() < 2:
            continue
        bins = numpy.round(2 * octaves[taught])
        lengths = table.compute[taught] / table.chunks[taught]
        places = numpy.unique(bins)
        weights = table.weights[taught]
        heights = numpy.array(
            [
                compute_weighted_quantiles(
                    lengths[bins == place].tolist(), weights[bins == place].tolist(), (0.5,)
                )[0]
                for place in places
            ]
        )
        centers = numpy.array([numpy.median(octaves[taught][bins == place]) for place in places])
        # Logarithms of both: within half an octave a step's length is a power of its tokens.
        found = numpy.exp(
            numpy.interp(octaves[here], centers, numpy.log(numpy.maximum(heights, 1.0)))
        )
        expected[here] = found * table.chunks[here]
    return expected


def compare_speed(table: RequestTable, exposed: Mask, among: Mask | None = None) -> Contrast:
    """By what factor (logarithm) steps with like work take longer for some requests than for others."""
    lengths = numpy.log(numpy.maximum(table.compute, 0) + STEP_FLOOR_US * table.chunks)
    return table.contrast(lengths, exposed, table.work, among)


def measure_share(case: LateCase, beyond: Floats, among: Mask | None = None) -> Contrast:
    """Which share of the lateness is this much of each late request, or of `among`; by pieces of time."""
    weights, blocks = case.table.weights, case.table.blocks
    counted = case.late if among is None else among
    places = numpy.unique(blocks[case.late])
    found = numpy.where(counted, weights * beyond, 0.0)
    sums = numpy.array(
        [[found[blocks == at].sum(), (weights * case.excess)[blocks == at].sum()] for at in places]
    )
    # What is exposed at other times, and was not late.
    sums[:, 0] += found[~numpy.isin(blocks, places)].sum() / len(places)
    drawn = draw_pieces(len(places)) @ sums
    ratios = drawn[1:, 0] / numpy.maximum(drawn[1:, 1], 1.0)
    low, high = (float(each) for each in find_interval(ratios, LEVEL))
    share = float(sums[:, 0].sum() / max(sums[:, 1].sum(), 1.0))
    carried = int((sums[:, 0] > 0.1 * sums[:, 1]).sum())
    return Contrast(share, low, high, share, low, high, carried)
