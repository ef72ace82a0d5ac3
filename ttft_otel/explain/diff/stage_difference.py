# SPDX-License-Identifier: Apache-2.0
"""What changed between two windows of requests: the mix of requests, and each stage of like requests.

Input: RequestFacts of windows A and B. Output: a Difference, whose parts add up to the change of the
mean TTFT; `ttft-otel diff` shows it. Pure; needs numpy.

With strata s, shares p and means m of a stage:  m_B - m_A = Σ p_B(s) (m_B(s) - m_A(s))  [like requests]
+ Σ (p_B(s) - p_A(s)) m_A(s)  [mix], the Oaxaca-Blinder decomposition. Intervals are a bootstrap by
request; they hold for all parts at once (the largest of the studentized deviations, Romano and Wolf),
so that a window compared with itself rarely names anything.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy

from ttft_otel.explain.window.request_facts import (
    MEDIA,
    TEXT,
    UNMATCHED,
    CannotTellError,
    RequestFacts,
    assign_strata,
)
from ttft_otel.model import stages
from ttft_otel.model.statistics import (
    average_draws,
    draw_quantiles,
    draw_weights,
    find_interval,
    find_joint_intervals,
    find_start,
)

Array = numpy.ndarray[Any, numpy.dtype[numpy.float64]]

# With fewer a bootstrap draws the same few values again and its intervals are too narrow.
MIN_REQUESTS: Final = 20  # of a window
# Enough for the 97 % quantile: some 30 draws lie beyond it.
RESAMPLES: Final = 1000
# Of all intervals together; a bootstrap of skewed times falls short of its level.
LEVEL: Final = 0.97
MIX: Final = "mix of requests"
MAIN_SHARE: Final = 0.8  # of a change, from which on it is said to be one kind's


@dataclass(frozen=True, slots=True)
class Change:
    """B minus A of one mean, in microseconds, with its interval."""

    name: str
    a_us: float
    b_us: float
    change_us: float
    low_us: float
    high_us: float
    #: Of request that has most of the change although not most of the requests, "" without.
    kind: str = ""
    since_ns: int = 0  #: when it began inside of B, 0 when from its start on

    @property
    def named(self) -> bool:
        """Whether the change is more than chance makes."""
        return bool(self.low_us > 0 or self.high_us < 0)


@dataclass(frozen=True, slots=True)
class Difference:
    """Two windows compared. mix and stages add up to ttft."""

    requests_a: int
    requests_b: int
    ttft: Change
    p50: Change  #: of the TTFT, not adjusted
    p95: Change  #: likewise
    mix: Change
    stages: tuple[Change, ...]  #: changes of like requests, in the order of a request
    unmatched_share: float  #: of B's requests of a kind that A has too few of; they count as mix
    shared: int = 0  #: requests that are in both windows
    clock_error_us: int = 0  #: by how much the boundaries of stages may be off

    @property
    def named(self) -> list[Change]:
        """Mix and stages that changed, the largest first."""
        found = [change for change in (self.mix, *self.stages) if change.named]
        return sorted(found, key=lambda change: -abs(change.change_us))


@dataclass(frozen=True, slots=True)
class Window:
    """One window's requests: microseconds by request and stage, and each request's stratum."""

    lengths: Array
    strata: Sequence[Hashable]
    weights: Array  #: how many requests each stands for

    @property
    def means(self) -> Array:
        found: Array = numpy.average(self.lengths, axis=0, weights=self.weights)
        return found

    def sum_strata(self, weights: Array, keys: Sequence[Hashable]) -> tuple[Array, Array]:
        """Shares (draw, stratum) and means (draw, stratum, stage) with `weights` (draw, request)."""
        shares, means = [], []
        for key in keys:
            # Strata are fixed, weights vary: a matrix product does all draws of a stratum at once.
            here = numpy.array([stratum == key for stratum in self.strata])
            weight = weights[:, here].sum(1)
            # A draw may miss a small stratum; its mean is then that of the data.
            total = weights[:, here] @ self.lengths[here]
            own = self.weights[here]
            fallback = own @ self.lengths[here] / own.sum() if here.any() else 0.0
            drawn = weight[:, None] > 0
            means.append(numpy.where(drawn, total / numpy.maximum(weight, 1)[:, None], fallback))
            shares.append(weight / weights.sum(1))
        return numpy.stack(shares, 1), numpy.stack(means, 1)


def compare_windows(
    a: Sequence[RequestFacts], b: Sequence[RequestFacts], seed: int = 0
) -> Difference:
    """Compare the requests of two windows. Raises CannotTellError.

    seed: of the bootstrap; the same requests and seed give the same intervals.
    """
    for name, window in (("A", a), ("B", b)):
        # Refused, not answered with wide intervals: "nothing changed" would be read as good news.
        if len(window) < MIN_REQUESTS:
            raise CannotTellError(
                f"window {name} has {len(window)} requests with a first token; "
                f"{MIN_REQUESTS} are needed to tell a change from chance"
            )
    # Of both windows: a stage that only one has is a change, too.
    names = sorted({name for each in (*a, *b) for name in each.stages}, key=stages.rank_stage)
    # Once, on the data: draws reweight the requests and do not sort them anew.
    strata_a, strata_b = assign_strata(a, b)
    window_a, window_b = _build_window(a, names, strata_a), _build_window(b, names, strata_b)
    chance = numpy.random.default_rng(seed)
    # Each window is drawn by itself: they are independent samples, not pairs.
    weights_a, weights_b = (
        draw_weights(chance, len(window.weights), RESAMPLES) * window.weights
        for window in (window_a, window_b)
    )
    like, mix = _decompose(window_a, window_b, weights_a, weights_b)
    ttft = like.sum(1) + mix
    # Together, because an interval holds for all parts at once only if all share one width.
    parts = numpy.column_stack([like, mix, ttft])
    low, high = find_joint_intervals(parts, LEVEL)
    means_a, means_b = ([*window.means, window.means.sum()] for window in (window_a, window_b))
    changes = []
    for index, name in enumerate(names):
        change = Change(
            name, means_a[index], means_b[index], parts[0, index], low[index], high[index]
        )
        changes.append(_locate_change(change, window_a, window_b, b, index))
    totals_a, totals_b = window_a.lengths.sum(1), window_b.lengths.sum(1)
    return Difference(
        requests_a=round(window_a.weights.sum()),
        requests_b=round(window_b.weights.sum()),
        ttft=Change("ttft", means_a[-1], means_b[-1], parts[0, -1], low[-1], high[-1]),
        p50=_compare_quantile("p50", 0.5, totals_a, totals_b, weights_a, weights_b),
        p95=_compare_quantile("p95", 0.95, totals_a, totals_b, weights_a, weights_b),
        mix=Change(MIX, 0.0, parts[0, -2], parts[0, -2], low[-2], high[-2]),
        stages=tuple(changes),
        unmatched_share=float(
            numpy.average([key == UNMATCHED for key in strata_b], weights=window_b.weights)
        ),
        clock_error_us=max(each.clock_error_us for each in (*a, *b)),
        shared=_count_shared(a, b),
    )


def _build_window(
    requests: Sequence[RequestFacts], names: Sequence[str], strata: Sequence[Hashable]
) -> Window:
    rows = [[each.stages.get(name, 0) for name in names] for each in requests]
    weights = numpy.array([each.weight for each in requests])
    return Window(numpy.array(rows, dtype=numpy.float64), strata, weights)


def _count_shared(a: Sequence[RequestFacts], b: Sequence[RequestFacts]) -> int:
    """How many requests are in both windows, whichever of them were read; 0 for windows that only touch."""
    known = {(each.request_id, each.start_ns) for each in a}
    if not any((each.request_id, each.start_ns) in known for each in b):
        return 0
    first, last = (find(each.start_ns for each in b) for find in (min, max))
    return round(sum(each.weight for each in a if first <= each.start_ns <= last))


def _decompose(a: Window, b: Window, weights_a: Array, weights_b: Array) -> tuple[Array, Array]:
    """Change of like requests (draw, stage) and of the mix (draw), microseconds."""
    keys = sorted({*a.strata, *b.strata} - {UNMATCHED}, key=str)
    overall_a = average_draws(a.lengths, weights_a)
    overall_b = average_draws(b.lengths, weights_b)
    # Without a common stratum nothing is alike, and all of the change is mix.
    like = numpy.zeros_like(overall_a)
    if keys:
        _, means_a = a.sum_strata(weights_a, keys)
        shares_b, means_b = b.sum_strata(weights_b, keys)
        like = (shares_b[:, :, None] * (means_b - means_a)).sum(1)
    # What is left of the change of the means is the mix, by the identity above.
    return like, (overall_b - overall_a - like).sum(1)


def _compare_quantile(
    name: str, share: float, a: Array, b: Array, weights_a: Array, weights_b: Array
) -> Change:
    """B minus A of the TTFT's quantile `share`, with the bootstrap's percentiles as the interval."""
    drawn_a, drawn_b = draw_quantiles(a, weights_a, share), draw_quantiles(b, weights_b, share)
    low, high = find_interval((drawn_b - drawn_a)[1:], LEVEL)
    return Change(name, drawn_a[0], drawn_b[0], drawn_b[0] - drawn_a[0], float(low), float(high))


def _locate_change(
    change: Change, a: Window, b: Window, requests: Sequence[RequestFacts], stage: int
) -> Change:
    """Add to a named change whose requests have it, and since when."""
    # Where chance explains the change, whose it is would be chance as well.
    if not change.named:
        return change
    expected = {}
    for key in set(a.strata):
        here = numpy.array([stratum == key for stratum in a.strata])
        expected[key] = numpy.average(a.lengths[here, stage], weights=a.weights[here])
    # The unmatched have no like in A to be expected from: they count as mix, not here.
    matched = [index for index, key in enumerate(b.strata) if key != UNMATCHED]
    excess = [b.lengths[index, stage] - expected[b.strata[index]] for index in matched]
    total = sum(b.weights[matched] * excess)
    kind = ""
    for each in (TEXT, MEDIA):
        own = b.weights[matched] * [requests[index].kind == each for index in matched]
        is_most = own @ excess / total >= MAIN_SHARE if total else False
        # A kind that is nearly all of the traffic has nearly every change: that says nothing.
        if is_most and own.sum() / b.weights[matched].sum() < MAIN_SHARE:
            kind = each
    timed = [
        (requests[index].start_ns, value, requests[index].weight)
        for index, value in zip(matched, excess, strict=True)
        if not kind or requests[index].kind == kind
    ]
    return replace(change, kind=kind, since_ns=find_start(timed))
