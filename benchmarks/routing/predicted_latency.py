# SPDX-License-Identifier: Apache-2.0
"""llm-d's routing by predicted latency, for comparison in simulate.py: algorithm only, as published.

Its chart's values: boosted trees that are fitted again every 10 s to what requests took (TTFT, and the mean
time per output token), for clients that stream and name no objective. Its trees are XGBoost's: 200 of depth
6. Those here are numpy's, with coarser bins, 50 that learn four times as fast, and fitted again where there
are half as many samples more: a tenth of the time. Its own models for empty queues are not here.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy
from numpy.typing import NDArray

from benchmarks.routing.simulated_instance import SimulatedInstance
from ttft_otel.router.routing.policies.policy_state import US_PER_SECOND, PolicyState, RoutingPolicy
from ttft_otel.router.types import Decision, Instance, RoutingRequest

Array = NDArray[Any]

TREES: Final = 50
DEPTH: Final = 6
LEARNING_RATE: Final = 0.2
DRAWN_SHARE: Final = 0.8  # of the samples, and of the features, of a tree
MIN_SAMPLES_OF_LEAF: Final = 5
SHRINKAGE: Final = 0.1  # XGBoost's lambda
BINS: Final = 32
RETRAIN_US: Final = 10 * US_PER_SECOND
MIN_SAMPLES: Final = 100
SAMPLES_OF_BUCKET: Final = 500  # of a queue length, KV use and cached share
STICKY_SHARES: Final = (0.99, 0.8)  # of the prompt, one filter after the other
MAX_PREDICTED_PENALTY_S: Final = 5.0  # of a predicted TTFT, for which they stick
TTFT_WEIGHT: Final = 0.8
PREFIX_PARTS: Final = 4  # into which the cached share is divided, as a feature and for buckets


class BoostedTrees:
    """Regression trees, each fitted to what is left of the sum of those before it."""

    def __init__(self, rows: Array, values: Array) -> None:
        chance = numpy.random.default_rng(42)
        parts = numpy.linspace(0, 1, BINS + 1)[1:-1]
        self._edges = [numpy.unique(numpy.quantile(column, parts)) for column in rows.T]
        bins = self._find_bins(rows)
        self._mean = float(values.mean())
        nodes = 2 ** (DEPTH + 1) - 1
        # A node's children are at 2n + 1 and 2n + 2; -1 as its feature: it has none.
        self._features = numpy.full((TREES, nodes), -1)
        self._limits = numpy.zeros((TREES, nodes), int)
        self._values = numpy.zeros((TREES, nodes))
        left = values - self._mean
        for tree in range(TREES):
            drawn = chance.random(len(rows)) < DRAWN_SHARE
            columns = chance.permutation(rows.shape[1])[
                : max(round(DRAWN_SHARE * rows.shape[1]), 1)
            ]
            left = left - self._grow(tree, bins, left, drawn, columns)

    def predict(self, rows: Array) -> Array:
        """The value of each row."""
        bins, trees = self._find_bins(rows), numpy.arange(TREES)[:, None]
        at = numpy.zeros((TREES, len(rows)), int)
        for _ in range(DEPTH):
            features = self._features[trees, at]
            is_above = bins[numpy.arange(len(rows)), features] > self._limits[trees, at]
            at = numpy.where(features < 0, at, 2 * at + 1 + is_above)
        predicted: Array = self._mean + self._values[trees, at].sum(axis=0)
        return predicted

    def _find_bins(self, rows: Array) -> Array:
        pairs = zip(self._edges, rows.T, strict=True)
        return numpy.stack([numpy.searchsorted(*pair, side="left") for pair in pairs], axis=1)

    def _grow(self, tree: int, bins: Array, left: Array, drawn: Array, columns: Array) -> Array:
        """One tree; returns its value of each row."""
        at = numpy.zeros(len(left), int)
        is_open = numpy.ones(len(left), bool)
        own, rest, weights = bins[:, columns], left * drawn, drawn.astype(float)
        for depth in range(DEPTH):
            first, count = 2**depth - 1, 2**depth
            rows = numpy.flatnonzero(is_open)
            if not len(rows):
                break
            shape = (count, len(columns), BINS)
            places = (
                (at[rows] - first)[:, None] * len(columns) + numpy.arange(len(columns))
            ) * BINS
            places = (places + own[rows]).ravel()
            sums, counts = (
                numpy.bincount(
                    places,
                    numpy.repeat(each[rows], len(columns)),
                    minlength=count * shape[1] * BINS,
                )
                .reshape(shape)
                .cumsum(axis=2)
                for each in (rest, weights)
            )
            above, more = sums[:, :, -1:] - sums, counts[:, :, -1:] - counts
            gains = sums**2 / (counts + SHRINKAGE) + above**2 / (more + SHRINKAGE)
            gains -= sums[:, :, -1:] ** 2 / (counts[:, :, -1:] + SHRINKAGE)
            gains[(counts < MIN_SAMPLES_OF_LEAF) | (more < MIN_SAMPLES_OF_LEAF)] = 0
            best = gains.reshape(count, -1).argmax(axis=1)
            is_split = gains.reshape(count, -1)[numpy.arange(count), best] > 0
            features = numpy.where(is_split, columns[best // BINS], -1)
            self._features[tree, first : first + count] = features
            self._limits[tree, first : first + count] = best % BINS
            is_open[rows] = is_split[at[rows] - first]
            rows = rows[is_open[rows]]
            node = at[rows] - first
            at[rows] = 2 * at[rows] + 1 + (bins[rows, features[node]] > best[node] % BINS)
        size = self._values.shape[1]
        total, count_of = numpy.bincount(at, rest, size), numpy.bincount(at, weights, size)
        self._values[tree] = LEARNING_RATE * total / (count_of + SHRINKAGE)
        value: Array = self._values[tree, at]
        return value


def score_deficits(ttfts: Array, tpots: Array) -> Array:
    """Weights with which one of several instances is drawn, 0.01 to 1.01: least times, most weight."""
    parts, weights = [], []
    for each, weight in ((ttfts, TTFT_WEIGHT), (tpots, 1 - TTFT_WEIGHT)):
        spread = each.max() - each.min()
        parts.append((each - each.min()) / spread if spread > 1e-9 else numpy.full(len(each), 0.5))
        weights.append(weight if spread > 1e-9 else 0.0)
    if not sum(weights):
        weights = [1.0, 0.0]
    blend = (weights[0] * parts[0] + weights[1] * parts[1]) / sum(weights)
    scores: Array = (numpy.floor((1 - blend) * 100) + 1) / 100
    return scores


class PredictedLatencyPolicy(RoutingPolicy):
    """Drawn by predicted TTFT and TPOT, among those with the prompt's prefix, of these among idle ones.

    by_url: instances, whose queue and use of the KV cache their metrics tell.
    """

    name = "predicted_latency"

    def __init__(self, by_url: Mapping[str, SimulatedInstance], state: PolicyState) -> None:
        super().__init__(state)
        self._by_url = by_url
        self._chance = random.Random("predicted latency")
        self._rows: dict[str, Array] = {}  # of requests under way
        # What was learned: TTFTs, TPOTs. By bucket, so that rare situations are not forgotten.
        self._samples: tuple[dict[tuple[int, ...], deque[tuple[Array, float]]], ...] = tuple(
            defaultdict(lambda: deque(maxlen=SAMPLES_OF_BUCKET)) for _ in range(2)
        )
        self._models: list[BoostedTrees] = []
        self._new_samples = self._fitted_samples = self._trained_us = 0

    def choose_instance(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """Filters, then a draw by score."""
        # Half as many more: a fit to all but the same samples would only take time.
        is_due = self._new_samples >= max(MIN_SAMPLES, self._fitted_samples / 2)
        if is_due and now_us - self._trained_us >= RETRAIN_US:
            self._train(now_us)
        cached = self.state.estimate_cached(request, instances)
        rows = numpy.array(
            [self._describe(request, *each) for each in zip(instances, cached, strict=True)]
        )
        if self._models:
            ttfts, tpots = (model.predict(rows) for model in self._models)
            shares = numpy.array(cached) / request.prompt_tokens
            kept = filter_candidates(shares, ttfts, [each.in_flight for each in instances])
            scores = score_deficits(ttfts[kept], tpots[kept])
        else:
            # Free KV cache, the queue to the longest one, and the cached share count the same.
            kept, queues = numpy.arange(len(instances)), rows[:, 2]
            free = 1 - queues / max(queues.max(), 1)
            scores = (1 - rows[:, 0] + free + rows[:, 5]) / 3
        (position,) = self._chance.choices(kept.tolist(), (scores + 1e-9).tolist())
        self._rows[request.request_id] = rows[position]
        return Decision(instances[position], 0.0, self.name, cached[position])

    def record_first_token(self, request_id: str, ttft_s: float) -> None:
        """A sample, in milliseconds as llm-d has it."""
        self._new_samples += 1
        self._add_sample(0, self._rows[request_id], 1000 * ttft_s)

    def record_end(self, request_id: str, tpot_s: float) -> None:
        """An answer has ended; 0: it had one token."""
        row = self._rows.pop(request_id)
        if tpot_s:
            self._add_sample(1, row, 1000 * tpot_s)

    def _add_sample(self, which: int, row: Array, milliseconds: float) -> None:
        queue = int(numpy.searchsorted((0, 2, 5, 10), row[2]))
        self._samples[which][queue, int(20 * row[0]), int(row[7])].append((row, milliseconds))

    def _train(self, now_us: int) -> None:
        self._trained_us, self._new_samples = now_us, 0
        every = [[each for bucket in some.values() for each in bucket] for some in self._samples]
        self._fitted_samples = len(every[0])
        if min(map(len, every)) >= MIN_SAMPLES:
            self._models = [
                BoostedTrees(
                    numpy.array([row for row, _ in each]), numpy.array([y for _, y in each])
                )
                for each in every
            ]

    def _describe(self, request: RoutingRequest, instance: Instance, cached: int) -> list[float]:
        """What its models know of a request at an instance."""
        server = self._by_url[instance.url]
        share = cached / request.prompt_tokens
        return [
            # Requests that share blocks count them once each here; servers do not tell more than all.
            min(server.engine.kv_tokens / server.kv_tokens, 1.0),
            request.prompt_tokens,
            len(server.engine.waiting),
            instance.in_flight,
            self.state.pending.get_load(instance.url).tokens_to_compute,
            share,
            request.prompt_tokens - cached,
            min(int(share * PREFIX_PARTS), PREFIX_PARTS - 1),
        ]


def filter_candidates(shares: Array, ttfts_ms: Array, in_flight: Sequence[int]) -> Array:
    """The positions of those with enough of the prompt cached, unless they are much slower; idle ones first.

    shares: of the prompt that is cached. ttfts_ms: predicted. in_flight: requests.
    """
    kept = numpy.arange(len(shares))
    for least in STICKY_SHARES:
        is_sticky = shares[kept] >= least
        sticky, others = kept[is_sticky], kept[~is_sticky]
        if len(sticky) and len(others):
            if ttfts_ms[sticky].min() - ttfts_ms[others].min() <= 1000 * MAX_PREDICTED_PENALTY_S:
                kept = sticky
    idle = kept[numpy.array(in_flight)[kept] == 0]
    return idle if len(idle) else kept
