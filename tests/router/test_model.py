# SPDX-License-Identifier: Apache-2.0
"""The model of a prefill's time, fitted to prefills whose time is known."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import pytest

from ttft_otel.router.policies.model import ENOUGH, MOST, Fit, Line, Models, Quality
from ttft_otel.router.policies.work import Work, work

TRUE = Line(0.005, 40e-6, 1.3e-9)


def prompts(count: int, seed: int = 1) -> Iterator[Work]:
    """Lengths from 16 to 64k tokens, with any part of them cached."""
    chance = random.Random(seed)
    for _ in range(count):
        tokens = round(16 * 4096 ** chance.random())
        yield work(tokens, chance.randrange(tokens) // 16 * 16)


def test_exact() -> None:
    """Times without noise give the very coefficients."""
    fit = Fit()
    for each in prompts(50):
        fit.add(each, TRUE.seconds(each))

    assert fit.line == pytest.approx(TRUE, rel=1e-3)
    assert fit.quality.mape == pytest.approx(0, abs=0.01)


def test_noise() -> None:
    """With 10 % of noise its errors are about that noise; long prompts are predicted within a few percent."""
    fit, chance = Fit(), random.Random(2)
    for each in prompts(2000):
        fit.add(each, TRUE.seconds(each) * chance.lognormvariate(0, 0.1))
    assert fit.line is not None
    assert fit.quality.mape is not None
    assert fit.quality.r2 is not None

    for tokens in (2000, 8000, 32_000):
        assert fit.line.seconds(work(tokens, 0)) == pytest.approx(
            TRUE.seconds(work(tokens, 0)), rel=0.05
        )
    assert 0.06 < fit.quality.mape < 0.12
    assert fit.quality.r2 > 0.95


@pytest.mark.parametrize("kept", list(product((0, 1), repeat=3)))
def test_never_negative(kept: tuple[int, ...]) -> None:
    """Where a part costs nothing its coefficient is none, whatever the noise says."""
    true = Line(*(x * keep for x, keep in zip(TRUE, kept, strict=True)))
    fit, chance = Fit(), random.Random(4)
    for each in prompts(300):
        fit.add(each, true.seconds(each) + chance.gauss(0, 1e-4))
        assert fit.line is None or min(fit.line) >= 0

    if any(kept):
        assert fit.line is not None
        probe = work(30_000, 0)
        assert fit.line.seconds(probe) == pytest.approx(true.seconds(probe), rel=0.1, abs=1e-3)


def test_one_length() -> None:
    """Prompts that are all alike tell one number; it is right for them."""
    fit = Fit()
    for _ in range(ENOUGH):
        fit.add(work(1000, 0), 0.25)

    assert fit.line is not None
    assert fit.line.seconds(work(1000, 0)) == pytest.approx(0.25)


def test_forgets() -> None:
    """When an instance becomes twice as slow, so do its predictions."""
    fit = Fit(forget=0.98)
    for each in prompts(500):
        fit.add(each, TRUE.seconds(each))
    for each in prompts(500, seed=2):
        fit.add(each, 2 * TRUE.seconds(each))
    assert fit.line is not None

    assert fit.line.seconds(work(8000, 0)) == pytest.approx(2 * TRUE.seconds(work(8000, 0)), 0.02)


def test_trapezoid() -> None:
    """Pairs alone are the trapezoid formula."""
    assert Line(0, 0, 1).seconds(work(4096, 2048)) == 6_292_480


def test_pool() -> None:
    """Start values, then all instances' fit, then the instance's own; other models have no part in it."""
    start = Line(1, 0, 0)
    models = Models(start)
    assert models.lines("m", ["a"]) == [start]
    assert Models().lines("m", ["a"]) is None
    for each in prompts(ENOUGH):
        models.add("m", "a", each, TRUE.seconds(each))
    for each in prompts(ENOUGH - 1):
        models.add("m", "b", each, 3 * TRUE.seconds(each))
    lines = models.lines("m", ["a", "b", "c"])
    assert lines is not None
    own, pooled, new = lines

    assert own == pytest.approx(TRUE, rel=1e-3)
    assert pooled == new != own
    assert models.lines("other", ["a"]) == [start]


def test_bounded() -> None:
    """However many models are named, no more than so many fits are kept."""
    models = Models()
    for number in range(MOST):
        models.add(f"m{number}", "a", work(10, 0), 0.1)

    assert len(models.fits()) == MOST


def test_quality() -> None:
    """The errors' mean size, and the share of the variance that was foreseen."""
    quality = Quality(forget=1)
    assert (quality.mape, quality.r2) == (None, None)
    for predicted, actual in ((1.1, 1), (1.8, 2), (3, 3)):
        quality.add(predicted, actual)

    assert quality.mape == pytest.approx(0.2 / 3)
    assert quality.r2 == pytest.approx(1 - 0.05 / 2)
