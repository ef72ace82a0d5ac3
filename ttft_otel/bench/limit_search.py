# SPDX-License-Identifier: Apache-2.0
"""The highest rate, or concurrency, at which percentiles stay below limits: `ttft-otel bench --find`.

bench_session.py sends rounds at the rates that LimitSearch names and records their values here;
result_document.py describes what is found. A rate holds, or fails, where the share of requests beyond the
limit is below, or above, what the percentile allows by more than chance. Requests of one round wait in the
same queue, so that they count as fewer independent ones. The share only grows with the rate: rounds at
higher rates are evidence that a lower one holds, those at lower rates that a higher one fails.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist
from time import monotonic_ns
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ttft_otel.bench.load_driver import LoadRun
from ttft_otel.model.statistics import compute_t_quantile

CONDITION: Final = re.compile(
    r"\s*(ttft|tpot|latency)\.p(\d{1,2})\s*<\s*(\d+(?:\.\d+)?)\s*(?:ms)?\s*"
)
CONFIDENCE: Final = 0.95
# Chance of one wrong verdict. Up to 30 rounds are judged, each with those before it: in simulations of five
# kinds of servers the limit is then outside of the interval in fewer than 5 of 100 searches.
ERROR_PER_VERDICT: Final = 0.0007
PRECISION: Final = 1.1  # ratio of the interval's ends at which the search ends
MIN_ROUNDS: Final = 2  # behind each verdict
MAX_ROUNDS: Final = 30  # of a search, by default
# Of a round's requests: the queue they meet is still shorter than it will be
WARMUP_SHARE: Final = 0.25
BATCHES: Final = 5  # of a round, whose spread tells how far requests depend on each other
TAIL_REQUESTS: Final = 10  # of a round, expected beyond the limit
# A round lasts so many times as long as the limit: queues settle slowly
LIMITS_PER_ROUND: Final = 40
ROUNDS_PER_CLIENT: Final = 20  # requests of each client of a closed loop in a round
# Between two rates, up to which the limit is only bracketed by single rounds
COARSE_RATIO: Final = 1.25
# A round ends early where so many of its requests are beyond a limit that allows a tenth of it at most.
OVERLOAD_SHARE: Final = 0.3
MAX_OVERLOAD_TAIL: Final = 0.1
MAX_REPEATS: Final = 3  # rounds at an outermost rate that decide nothing
MAX_HALVINGS: Final = 5  # of the first rate: an hour at a request a minute would follow

Values: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LimitCondition:
    """One condition as typed: `ttft.p95<500`."""

    text: str
    metric: str  #: ttft, tpot or latency
    tail: float  #: share of requests that may be beyond the limit: 0.05 for p95
    limit_ms: float


def parse_condition(text: str) -> LimitCondition:
    """Read a condition. Raises ValueError with a sentence."""
    found = CONDITION.fullmatch(text)
    if not found or not int(found[2]) or not float(found[3]):
        raise ValueError(
            f"{text!r} is no condition: write 'ttft.p95<500' (ttft, tpot or latency; p1 to p99; milliseconds)"
        )
    return LimitCondition(text.replace(" ", ""), found[1], 1 - int(found[2]) / 100, float(found[3]))


@dataclass(slots=True)
class RateEvidence:
    """What the rounds at one rate say of one condition."""

    rounds: list[Values] = field(default_factory=list)
    counted: int = 0  #: requests, of rounds that ended early those not sent, too
    beyond: int = 0  #: of these
    #: Requests that count as one independent one.
    dependence: float = 1.0
    degrees: int = 0  #: of freedom of its estimate

    def add_round(self, values: Values, planned: int, condition: LimitCondition) -> None:
        """Add a round's values in the order of sending. planned: values of a whole round."""
        self.rounds.append(values)
        self.counted += max(planned, len(values))
        self.beyond += int((values > condition.limit_ms).sum())
        joined = np.concatenate(self.rounds)
        # At the percentile itself, wherever it is: beyond the limit may be none.
        threshold = np.quantile(joined, 1 - condition.tail, method="lower")
        means = np.array([
            (batch > threshold).mean()
            for each in self.rounds
            for batch in np.array_split(each, min(BATCHES, len(each)))
        ])  # fmt: skip
        self.degrees = len(means) - 1
        independent = condition.tail * (1 - condition.tail)
        variance = float(means.var(ddof=1)) if self.degrees else 0.0
        self.dependence = max(1.0, len(joined) / len(means) * variance / independent)


def judge_evidence(found: Sequence[RateEvidence], tail: float, error: float) -> int:
    """1 if less than `tail` of all requests is beyond the limit, -1 if more, 0 if that cannot be told.

    error: chance of a wrong verdict.
    """
    counted = sum(each.counted for each in found)
    degrees = sum(each.degrees for each in found)
    if sum(len(each.rounds) for each in found) < MIN_ROUNDS or not degrees:
        return 0
    dependence = sum(each.counted * each.dependence for each in found) / counted
    beyond = sum(each.beyond for each in found)
    share = beyond / counted
    if share < tail:
        # As if half of one more independent request were beyond it: none at all is no proof.
        share = min(tail, (beyond + dependence / 2) / (counted + dependence / 2))
    # The likelihood ratio of the binomial; Student's t for the spread, which is estimated itself.
    needed = _find_normal_quantile(1 - error) * compute_t_quantile(degrees)
    needed /= compute_t_quantile(10_000)
    evidence = counted / dependence * _compute_divergence(share, tail)
    return 0 if evidence <= needed**2 / 2 else 1 if share < tail else -1


_find_normal_quantile = lru_cache(NormalDist().inv_cdf)


def _compute_divergence(share: float, tail: float) -> float:
    """Kullback-Leibler divergence of two binomial shares."""
    parts = ((share, tail), (1 - share, 1 - tail))
    return sum(one * math.log(one / other) for one, other in parts if one > 0)


@dataclass(slots=True)
class LimitSearch:
    """Names the next rate to try, until the interval of the limit is narrow or rounds are used up."""

    conditions: Sequence[LimitCondition]  #: all must hold
    start: float  #: the first rate
    is_whole: bool = False  #: rates are whole numbers (concurrency)
    max_rounds: int = MAX_ROUNDS
    round_requests: int | None = None  #: None: as many as the conditions need
    rate: float = field(init=False)  #: of the next round
    rounds: int = 0
    ended: str = ""  #: why the search is over, "" while it is not
    low: float = 0.0
    high: float = math.inf
    evidence: dict[float, list[RateEvidence]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rate = self.start

    def count_requests(self) -> int:
        """Requests of the next round."""
        if self.round_requests:
            return self.round_requests
        tail = min(each.tail for each in self.conditions)
        if self.is_whole:
            length = ROUNDS_PER_CLIENT * self.rate
        else:
            limits_ms = [each.limit_ms for each in self.conditions if each.metric != "tpot"]
            length = LIMITS_PER_ROUND * max(limits_ms, default=0.0) / 1000 * self.rate
        return math.ceil(max(TAIL_REQUESTS / tail, length))

    def record_round(self, values: Mapping[str, Sequence[float]], planned: int) -> None:
        """Record a round at the rate, and choose the next one.

        values: metric -> milliseconds of each request in the order of sending, infinite where it failed.
        planned: requests of a whole round.
        """
        found = self.evidence.setdefault(self.rate, [RateEvidence() for _ in self.conditions])
        dropped = int(WARMUP_SHARE * planned)
        for condition, evidence in zip(self.conditions, found, strict=True):
            kept = np.array(values[condition.metric][dropped:], dtype=np.float64)
            if len(kept):
                evidence.add_round(kept, planned - dropped, condition)
        self.rounds += 1
        brackets = [self._find_bracket(place) for place in range(len(self.conditions))]
        self.low = min(low for low, _ in brackets)
        self.high = min(high for _, high in brackets)
        self._choose_rate()

    def judge_rate(self, rate: float) -> str:
        """Whether `rate` holds, by all rounds: "holds", "fails" or "undecided"."""
        return "holds" if rate <= self.low else "fails" if rate >= self.high else "undecided"

    @property
    def estimate(self) -> float | None:
        """The likeliest limit: between the rates that held and failed by their mere shares."""
        below, above = self._guess_limit()
        return math.sqrt(below * above) if below and above < math.inf else None

    def _find_bracket(self, place: int) -> tuple[float, float]:
        """The highest rate that holds and the lowest that fails, by the condition at `place`."""
        rates = [rate for rate in sorted(self.evidence) if self.evidence[rate][place].rounds]
        found = [self.evidence[rate][place] for rate in rates]
        error = ERROR_PER_VERDICT / len(self.conditions)
        ends = range(len(rates) + 1)

        def judge(first: int, end: int) -> int:
            return judge_evidence(found[first:end], self.conditions[place].tail, error)

        holding = (
            rates[low]
            for low in reversed(ends[:-1])
            if any(judge(low, end) > 0 for end in ends[low:])
        )
        failing = (
            rates[end - 1] for end in ends[1:] if any(judge(low, end) < 0 for low in ends[:end])
        )
        return next(holding, 0.0), next(failing, math.inf)

    def _guess_limit(self) -> tuple[float, float]:
        """The highest rate whose share is below what is allowed, and the lowest above it; monotone."""
        below = above = math.inf
        for place, condition in enumerate(self.conditions):
            # Neighbours whose shares fall are pooled (isotonic regression).
            blocks: list[tuple[int, int, list[float]]] = []
            for rate in sorted(self.evidence):
                found = self.evidence[rate][place]
                blocks.append((found.beyond, found.counted, [rate]))
                while len(blocks) > 1 and _get_share(blocks[-2]) >= _get_share(blocks[-1]):
                    *blocks, (beyond, counted, rates), (more, others, higher) = blocks
                    blocks.append((beyond + more, counted + others, rates + higher))
            holding = [each[2][-1] for each in blocks if _get_share(each) < condition.tail]
            failing = [each[2][0] for each in blocks if _get_share(each) >= condition.tail]
            below = min(below, holding[-1] if holding else 0.0)
            above = min([above, *failing])
        return below, above

    def _choose_rate(self) -> None:
        below, above = self._guess_limit()
        rates = sorted(self.evidence)
        if self.low and self.high / self.low <= PRECISION:
            self.ended = "the interval is narrow"
        elif self.is_whole and self.high - self.low <= 1:
            self.ended = "the interval cannot be narrower"
        elif self.rounds >= self.max_rounds:
            self.ended = "its rounds are used up (--repeat)"
        elif not below:
            self.rate = self._round_rate(rates[0] / 2)
            if rates[0] <= self.start / 2**MAX_HALVINGS:
                self.ended = f"nothing holds from {rates[0]:g} on"
        elif above == math.inf:
            self.rate = self._round_rate(rates[-1] * 2)
        elif above / below > COARSE_RATIO:
            self.rate = self._round_rate(math.sqrt(below * above))
        else:
            self.rate = self._choose_side(math.sqrt(below * above), rates)

    def _choose_side(self, middle: float, rates: Sequence[float]) -> float:
        """Between the likely limit `middle` and the end of the interval that is farther away from it."""
        low, high = self.low or rates[0], min(self.high, rates[-1])
        # Half way: what is far from the limit is decided by few rounds, what is near by many.
        if not self.low:
            rate = self._repeat_outermost(low, 1 / COARSE_RATIO)
        elif self.high == math.inf:
            rate = self._repeat_outermost(high, COARSE_RATIO)
        elif middle * middle > low * high:
            rate = min(math.sqrt(low * middle), middle / math.sqrt(PRECISION))
        else:
            rate = max(math.sqrt(high * middle), middle * math.sqrt(PRECISION))
        rate = self._round_rate(rate)
        near = min(rates, key=lambda each: abs(math.log(each / rate)))
        # Rounds at one rate tell more than those at two that are nearly the same.
        return near if 0.97 < near / rate < 1.03 else rate

    def _repeat_outermost(self, rate: float, step: float) -> float:
        """`rate`, or one a `step` farther out if several rounds at it have decided nothing."""
        return rate if len(self.evidence[rate][0].rounds) < MAX_REPEATS else rate * step

    def _round_rate(self, rate: float) -> float:
        if self.is_whole:
            return max(1, round(rate))
        return float(f"{rate:.3g}")


def _get_share(block: tuple[int, int, Any]) -> float:
    return block[0] / max(1, block[1])


def list_waits(run: LoadRun, metric: str, now_ns: float = math.inf) -> list[float]:
    """Milliseconds of `metric` (ttft, tpot or latency), in the order of sending.

    Infinite for a request that failed; 0 where it has no value, such as the TPOT of a single token. One that
    is unanswered has waited until `now_ns`, in a run that has ended for ever.
    """
    waits = [
        (each.response.sent_ns, math.inf if each.error else getattr(each, f"{metric}_ms") or 0.0)
        for each in run.results
    ]
    if metric != "tpot":
        # Of those with a first piece nobody knows how they would have ended.
        waits += [
            (each.sent_ns, (now_ns - each.sent_ns) / 1e6)
            for each in run.in_flight.values()
            if each.sent_ns and not each.pieces
        ]
    return [wait_ms for _, wait_ms in sorted(waits)]


def is_overloaded(run: LoadRun, conditions: Sequence[LimitCondition], planned: int) -> bool:
    """Whether a run in progress already has far too many first tokens beyond a limit: the queue grows.

    planned: requests of the whole run.
    """
    # The first ones do not count; what is left is to prove something.
    waits_ms = list_waits(run, "ttft", monotonic_ns())[int(WARMUP_SHARE * planned) :]
    return any(
        sum(wait_ms > each.limit_ms for wait_ms in waits_ms) > OVERLOAD_SHARE * planned
        for each in conditions
        if each.metric == "ttft" and each.tail <= MAX_OVERLOAD_TAIL
    )
