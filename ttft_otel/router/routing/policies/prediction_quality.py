# SPDX-License-Identifier: Apache-2.0
"""How good predictions of prefill time were: r2 and MAPE, later outcomes counting more.

prefill_model.py keeps one of each line, policy_state.py one of each instance; operators read them.
"""

from __future__ import annotations


class PredictionQuality:
    """Compares predictions with outcomes; `forgetting` is the weight of one after each later one."""

    def __init__(self, forgetting: float = 0.99) -> None:
        self.outcomes = 0
        self._forgetting = forgetting
        self._count = self._relative_error_sum = self._squared_error_sum = self._actual_sum = (
            self._actual_square_sum
        ) = 0.0

    def add_outcome(self, predicted_s: float, actual_s: float) -> None:
        """Add one prediction and its outcome.

        predicted_s, actual_s: seconds.
        """
        error = predicted_s - actual_s
        forgetting = self._forgetting
        self.outcomes += 1
        # Sums that fade and no list: constant memory, and old models do not count for ever.
        self._count = self._count * forgetting + 1
        self._relative_error_sum = self._relative_error_sum * forgetting + abs(error) / max(
            actual_s, 1e-6
        )
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
        return (
            1 - self._squared_error_sum / spread
            if spread > 1e-9 * self._actual_square_sum
            else None
        )
