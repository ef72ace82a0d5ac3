# SPDX-License-Identifier: Apache-2.0
"""A linear model of prefill time, fitted to measured prefills; policy `ttft` predicts with it.

seconds = a + b * tokens + d * pairs + e * decodes, with the tokens and attention pairs that have to be
computed (PrefillWork), and the answers under way that its steps continue as well. With a = b = 0 it orders
prompts like the trapezoid formula. All instances of a model share one line; each has a speed factor by which
it is slower or faster than that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from typing import Final, NamedTuple

MIN_SAMPLES: Final = 8  # samples before a fit is used
# Weight of a sample after each later one: half after ln 0.5 / ln 0.998 = 346 of them.
FORGETTING_FACTOR: Final = 0.998
OUTCOME_FORGETTING: Final = 0.99  # like it, for the outcome of a prediction
# Added to the expected seconds in the weights: without it an error of 1 ms in a prefill of 2 ms would
# count more than one of 100 ms in a second.
ERROR_FLOOR_S: Final = 0.01
# Units of the constant, tokens, pairs and decodes, so that the sums are of similar magnitude.
COEFFICIENT_UNITS: Final = (1.0, 1e3, 1e6, 10.0)
_TERMS: Final = range(len(COEFFICIENT_UNITS))
# The line is solved for after every sample up to this number, later after every SOLVE_EVERY-th.
SOLVE_EACH_UNTIL: Final = 64
SOLVE_EVERY: Final = 16
MAX_TRACKED: Final = 4096  # speeds, and outcomes, kept; the oldest is dropped
# Like FORGETTING_FACTOR, for the speed of one instance: half the weight after 14 samples.
SPEED_FORGETTING: Final = 0.95
# Use a speed factor of an instance only beyond two standard errors (4 = 2²).
SIGNIFICANCE: Final = 4.0
# Outliers count as at most e^3, about 20 times, slower or faster than expected.
MAX_LOG_RATIO: Final = 3.0
_SUBSETS: Final = [some for size in (4, 3, 2, 1) for some in combinations(_TERMS, size)]


# Integers, so that sums of pending work return to exactly zero.
class PrefillWork(NamedTuple):
    """Prompt tokens to compute (linear cost), and the (query, key) pairs of their causal attention."""

    tokens_to_compute: int
    pairs: int


def count_pairs(prompt_tokens: int, cached_tokens: int) -> int:
    """Attention pairs left to compute for a prompt whose first `cached_tokens` are cached.

    Token k attends to k tokens, so this is the sum of cached_tokens + 1 .. `prompt_tokens`, a trapezoid.
    """
    # Always even, since the factors differ in parity: // only keeps it an integer.
    return (cached_tokens + 1 + prompt_tokens) * (prompt_tokens - cached_tokens) // 2


def compute_work(prompt_tokens: int, cached_tokens: int) -> PrefillWork:
    """The work of a prompt of `prompt_tokens`, of which the first `cached_tokens` are cached."""
    return PrefillWork(prompt_tokens - cached_tokens, count_pairs(prompt_tokens, cached_tokens))


class PredictionQuality:
    """Compares predictions with outcomes."""

    def __init__(self) -> None:
        self.outcomes = 0
        self._count = self._relative_error_sum = self._squared_error_sum = self._actual_sum = (
            self._actual_square_sum
        ) = 0.0

    def add_outcome(self, predicted_s: float, actual_s: float) -> None:
        """Add one prediction and its outcome.

        predicted_s, actual_s: seconds.
        """
        error, forgetting = predicted_s - actual_s, OUTCOME_FORGETTING
        relative_error = abs(error) / max(actual_s, 1e-6)
        self.outcomes += 1
        # Sums that fade and no list: constant memory, and old models do not count for ever.
        self._count = self._count * forgetting + 1
        self._relative_error_sum = self._relative_error_sum * forgetting + relative_error
        self._squared_error_sum = self._squared_error_sum * forgetting + error * error
        self._actual_sum = self._actual_sum * forgetting + actual_s
        self._actual_square_sum = self._actual_square_sum * forgetting + actual_s * actual_s

    def describe_quality(self) -> dict[str, float | None]:
        """Both measures and the number of outcomes, for GET /instances."""
        return {"outcomes": self.outcomes, "mape": self.mape, "r2": self.r2}

    @property
    def mape(self) -> float | None:
        """Mean absolute percentage error as a fraction (0.1 is 10 %); None without outcomes."""
        return self._relative_error_sum / self._count if self._count else None

    @property
    def r2(self) -> float | None:
        """Coefficient of determination: 1 - residual sum of squares / total; None without variance."""
        if not self._count:
            return None
        # Of a difference of two large sums only rounding is left when all outcomes are equal.
        spread = self._actual_square_sum - self._actual_sum * self._actual_sum / self._count
        if spread <= 1e-9 * self._actual_square_sum:
            return None
        return 1 - self._squared_error_sum / spread


class PrefillLine(NamedTuple):
    """Coefficients in seconds: `a` per prefill, `b` per token computed, `d` per attention pair, and `e` per
    answer under way.
    """

    a: float
    b: float
    d: float
    e: float = 0.0

    def predict_seconds(self, work: PrefillWork, prompt_count: int = 1, decodes: int = 0) -> float:
        """Seconds for `work`, the sum of the work of `prompt_count` prompts, beside so many answers."""
        alone_s = self.a * prompt_count + self.b * work.tokens_to_compute + self.d * work.pairs
        return alone_s + self.e * decodes


class PrefillFit:
    """Weighted least squares with exponential forgetting and non-negative coefficients.

    Errors are relative to the expected seconds. Only the sums of the normal equations are kept. With four
    unknowns, the best non-negative solution is found by solving for each of the fifteen subsets of
    coefficients, with the others zero, and taking the best solution that is non-negative.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.line: PrefillLine | None = None
        self.quality = PredictionQuality()
        self._left = [[0.0] * len(_TERMS) for _ in _TERMS]
        self._right = [0.0] * len(_TERMS)

    def add_sample(self, work: PrefillWork, seconds: float, decodes: int = 0) -> None:
        """Learn from one measured prefill of `seconds` beside so many answers."""
        # The first samples have no prediction to be weighted by.
        expected_s = seconds
        # The prediction is judged before the sample changes the line.
        if self.line is not None:
            expected_s = self.line.predict_seconds(work, decodes=decodes)
            self.quality.add_outcome(expected_s, seconds)
        # Weighting by the measured seconds would favour samples that are short by chance.
        weight = 1 / (expected_s + ERROR_FLOOR_S) ** 2
        row = (
            1.0,
            work.tokens_to_compute / COEFFICIENT_UNITS[1],
            work.pairs / COEFFICIENT_UNITS[2],
            decodes / COEFFICIENT_UNITS[3],
        )
        for i in _TERMS:
            self._right[i] = self._right[i] * FORGETTING_FACTOR + weight * row[i] * seconds
            for j in _TERMS:
                self._left[i][j] = self._left[i][j] * FORGETTING_FACTOR + weight * row[i] * row[j]
        self.samples += 1
        # Four unknowns would fit four samples exactly, noise included.
        if self.samples >= MIN_SAMPLES and (
            self.samples < SOLVE_EACH_UNTIL or not self.samples % SOLVE_EVERY
        ):
            self.line = self._solve_line()

    def _solve_line(self) -> PrefillLine | None:
        best, lowest = self.line, 0.0
        for subset in _SUBSETS:
            right = [self._right[i] for i in subset]
            solution = _solve_system([[self._left[i][j] for j in subset] for i in subset], right)
            # A negative coefficient would make longer prompts look faster.
            if solution is None or min(solution) < 0:
                continue
            # At a solution of the normal equations the error falls by
            # exactly this: no second pass over samples.
            value = -sum(x * y for x, y in zip(solution, right, strict=True))
            if value < lowest:
                coefficients = [0.0] * len(_TERMS)
                for index, x in zip(subset, solution, strict=True):
                    coefficients[index] = x / COEFFICIENT_UNITS[index]
                best, lowest = PrefillLine(*coefficients), value
        return best


class InstanceSpeed:
    """How much slower (`factor` > 1) or faster than average one instance is with one model."""

    def __init__(self, pool: PrefillFit) -> None:
        self.samples = 0
        self.factor = 1.0
        self.mean_log_ratio = 0.0  # mean of log(measured seconds / seconds by the shared line)
        self.sample_weight = 0.0  # sum of the weights of the samples in that mean
        self.quality = PredictionQuality()
        self._pool = pool

    @property
    def line(self) -> PrefillLine | None:
        """The shared line times the speed factor; None before the first fit."""
        if self._pool.line is None:
            return None
        return PrefillLine(*(self.factor * x for x in self._pool.line))


def describe_fit(fit: PrefillFit | InstanceSpeed) -> dict[str, float | None]:
    """Samples, coefficients in seconds, and prediction quality, for GET /instances."""
    line = fit.line._asdict() if fit.line else dict.fromkeys(PrefillLine._fields)
    return {"samples": fit.samples, **line, **fit.quality.describe_quality()}


class SharedModel:
    """The shared line of one model and the speed factors of its instances.

    A factor differs from 1 only where an instance deviates by more than noise explains.
    """

    def __init__(self) -> None:
        self.pooled_fit = PrefillFit()
        self.speeds: dict[str, InstanceSpeed] = {}
        self.speed_factors: dict[str, float] = {}  # factors other than 1, by URL
        self._mean_sum = 0.0  # sum of `mean_log_ratio` over all instances
        self._noise_variance = 0.0  # variance of samples around their instance's mean
        self._noise_samples = 0

    def add_sample(self, url: str, work: PrefillWork, seconds: float, decodes: int) -> None:
        """Learn from one prefill of `seconds`; the line from what it would take on an average instance."""
        speed, line = self.speeds[url], self.pooled_fit.line
        speed.samples += 1
        expected_s = 0.0 if line is None else line.predict_seconds(work, decodes=decodes)
        # Ratios, hence logarithms: twice as slow and twice as fast are equally far from 1.
        if expected_s > 0 and seconds > 0:
            speed.quality.add_outcome(expected_s * speed.factor, seconds)
            error = (
                max(-MAX_LOG_RATIO, min(MAX_LOG_RATIO, math.log(seconds / expected_s)))
                - speed.mean_log_ratio
            )
            if speed.sample_weight:
                # Welford's incremental variance; the limit of samples makes it forget, as the line does.
                self._noise_samples = min(
                    self._noise_samples + 1, round(1 / (1 - FORGETTING_FACTOR))
                )
                square = error * error * speed.sample_weight / (speed.sample_weight + 1)
                self._noise_variance += (square - self._noise_variance) / self._noise_samples
            speed.sample_weight = speed.sample_weight * SPEED_FORGETTING + 1
            speed.mean_log_ratio += error / speed.sample_weight
            self._mean_sum += error / speed.sample_weight
            speed.factor = math.exp(self._estimate_deviation(speed))
            if speed.factor == 1.0:
                self.speed_factors.pop(url, None)
            else:
                self.speed_factors[url] = speed.factor
        # A slow instance must not make the shared line slower.
        self.pooled_fit.add_sample(work, seconds / speed.factor, decodes)

    def drop_instance(self, url: str) -> None:
        """Drop what was learned about the instance at `url`."""
        # The others are compared with the average of those that are left.
        self._mean_sum -= self.speeds.pop(url).mean_log_ratio
        self.speed_factors.pop(url, None)

    def _estimate_deviation(self, speed: InstanceSpeed) -> float:
        """Deviation of the instance from the average log ratio, shrunk towards 0 (James-Stein).

        It is 0 within two standard errors, so that noise does not make instances look different.
        """
        if self._noise_samples < MIN_SAMPLES:
            return 0.0  # the noise is not known yet
        deviation = speed.mean_log_ratio - self._mean_sum / len(self.speeds)
        chance = SIGNIFICANCE * self._noise_variance / speed.sample_weight
        square = deviation * deviation
        return deviation * (1 - chance / square) if square > chance else 0.0


class PrefillModels:
    """Prefill models by model name.

    initial_line: used until enough samples are there, None to predict nothing until then.
    """

    def __init__(self, initial_line: PrefillLine | None = None) -> None:
        self.initial_line = initial_line
        self._shared_models: dict[str, SharedModel] = {}
        self._speeds: dict[tuple[str, str], InstanceSpeed] = {}  # by (model, URL), oldest first

    def add_sample(
        self, model: str, url: str, work: PrefillWork, seconds: float, decodes: int = 0
    ) -> None:
        """Learn from one measured prefill of `seconds` beside so many answers."""
        if (model, url) not in self._speeds:
            if len(self._speeds) >= MAX_TRACKED:
                self._drop_speed(*next(iter(self._speeds)))
            shared_model = self._shared_models.get(model)
            if shared_model is None:
                shared_model = self._shared_models[model] = SharedModel()
            self._speeds[model, url] = shared_model.speeds[url] = InstanceSpeed(
                shared_model.pooled_fit
            )
        self._shared_models[model].add_sample(url, work, seconds, decodes)

    def get_line(self, model: str) -> tuple[PrefillLine, Mapping[str, float]] | None:
        """The line of `model` and the speed factors other than 1, by URL; None before the first fit."""
        shared_model, line = self._shared_models.get(model), self.initial_line
        if shared_model is None:
            return None if line is None else (line, {})
        line = shared_model.pooled_fit.line or line
        return None if line is None else (line, shared_model.speed_factors)

    def drop_instance(self, url: str) -> None:
        """Drop what was learned about the instance at `url`."""
        for model in [model for model, at in self._speeds if at == url]:
            self._drop_speed(model, url)

    def list_fits(self) -> dict[tuple[str, str], PrefillFit | InstanceSpeed]:
        """What was learned by (model, URL); the URL is "" for the shared line."""
        pools = {(model, ""): shared.pooled_fit for model, shared in self._shared_models.items()}
        return {**pools, **self._speeds}

    def _drop_speed(self, model: str, url: str) -> None:
        del self._speeds[model, url]
        self._shared_models[model].drop_instance(url)
        # The last instance with this model is gone, and with it what the line was for.
        if not self._shared_models[model].speeds:
            del self._shared_models[model]


def _solve_system(matrix: list[list[float]], vector: list[float]) -> list[float] | None:
    """Solve a symmetric system of a few equations by elimination; None if it is singular."""
    size = len(vector)
    rows = [[*matrix[i], vector[i]] for i in range(size)]
    for i in range(size):
        if rows[i][i] <= 1e-10 * matrix[i][i]:  # linearly dependent, up to rounding
            return None
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [x - factor * y for x, y in zip(rows[k], rows[i], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - rest) / rows[i][i]
    return solution
