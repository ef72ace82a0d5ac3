# SPDX-License-Identifier: Apache-2.0
"""A window's requests as columns, and contrasts between some of them and their like. Pure; needs numpy.

Input: RequestFacts of one window, or of two. The detectors of explain/ and diff/ ask for the columns and
for contrasts, whose intervals are a bootstrap of the window's time: requests of a burst are not independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy

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
