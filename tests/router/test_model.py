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
    """Start values, then a line that all instances have in common; other models have no part in it."""
    start = Line(1, 0, 0)
    models = Models(start)
    assert models.known("m") == (start, {})
    assert Models().known("m") is None
    for number, each in enumerate(prompts(ENOUGH)):
        models.add("m", f"http://{number}", each, TRUE.seconds(each))
    known = models.known("m")
    assert known is not None

    assert known[0] == pytest.approx(TRUE, rel=1e-3)
    assert known[1] == {}
    assert models.known("other") == (start, {})


def learnt(slow: dict[str, float], each: int, noise: float, instances: int = 8) -> Models:
    """What so many samples of every instance teach; those named in `slow` take so many times as long."""
    models, chance = Models(), random.Random(5)
    for number, todo in enumerate(prompts(each * instances)):
        url = str(number % instances)
        seconds = TRUE.seconds(todo) * slow.get(url, 1.0) * chance.lognormvariate(0, noise)
        models.add("m", url, todo, seconds)
    return models


def test_pace() -> None:
    """A few samples tell a slow instance from the others: its line is the common one times its pace."""
    models = learnt({"0": 2.0, "1": 2.0, "2": 0.5}, 20, 0.1)
    lines = {url: fit.line for (_, url), fit in models.fits().items()}
    todo = work(8000, 0)

    for url, times in (("0", 2.0), ("1", 2.0), ("2", 0.5), ("3", 1.0), ("7", 1.0)):
        line = lines[url]
        assert line is not None
        assert line.seconds(todo) == pytest.approx(times * TRUE.seconds(todo), rel=0.12)


@pytest.mark.parametrize(("each", "noise"), [(5, 0.1), (50, 0.1), (50, 0.5)])
def test_chance(each: int, noise: float) -> None:
    """Equally fast instances are not told apart by their noise: nearly all have no pace of their own."""
    known = learnt({}, each, noise, instances=64).known("m")
    assert known is not None
    _, factors = known

    assert len(factors) < 12
    assert all(abs(factor - 1) < noise / 2 for factor in factors.values())


def test_pace_changes() -> None:
    """An instance that becomes slow is known to be after a hundred prefills; all of them after more."""
    models = learnt({}, 60, 0.05, instances=4)
    todo = work(8000, 0)

    def times(slow: tuple[int, ...], samples: int) -> list[float]:
        for number, each in enumerate(prompts(samples, seed=3)):
            at = number % 4
            models.add("m", str(at), each, TRUE.seconds(each) * (3.0 if at in slow else 1.0))
        known = models.known("m")
        assert known is not None
        line, factors = known
        return [
            factors.get(str(at), 1.0) * line.seconds(todo) / TRUE.seconds(todo) for at in range(4)
        ]

    assert times((0,), 400) == pytest.approx([3, 1, 1, 1], rel=0.15)
    assert times((0, 1, 2, 3), 2000) == pytest.approx([3, 3, 3, 3], rel=0.15)


def test_wild() -> None:
    """A prefill that is a thousand times too long, or none at all, does not make its instance unusable."""
    models = learnt({}, 40, 0.1)
    models.add("m", "0", work(100, 0), 1000 * TRUE.seconds(work(100, 0)))
    models.add("m", "1", work(100, 0), 0.0)
    known = models.known("m")
    assert known is not None

    assert known[1].get("0", 1.0) < 1.3
    assert known[1].get("1", 1.0) > 0.8


def test_first() -> None:
    """One long prefill tells nothing of an instance while nobody knows how much they differ by chance."""
    models = Models()
    for each in prompts(ENOUGH):
        models.add("m", "a", each, TRUE.seconds(each))
    models.add("m", "b", work(1000, 0), 10 * TRUE.seconds(work(1000, 0)))
    known = models.known("m")
    assert known is not None

    assert known[1] == {}


def test_bounded() -> None:
    """However many models and instances are named, no more than so many are kept, the latest."""
    models = Models()
    for number in range(MOST + 100):
        models.add(f"m{number}", "a", work(10, 0), 0.1)
    kept = [key for key in models.fits() if key[1]]

    assert len(kept) == MOST
    assert kept[0] == ("m100", "a")
    assert ("m99", "") not in models.fits()


def test_drop() -> None:
    """An instance that is gone leaves no series and weighs nothing in what the others are held against."""
    models = learnt({"0": 4.0}, 40, 0.05, 2)
    models.add("other", "0", work(10, 0), 0.1)
    models.drop("0")
    assert set(models.fits()) == {("m", ""), ("m", "1")}
    todo = work(1000, 0)
    known = models.known("m")
    assert known is not None
    models.add("m", "1", todo, known[0].seconds(todo))
    known = models.known("m")
    assert known is not None and known[1] == {}


def test_quality() -> None:
    """The errors' mean size, and the share of the variance that was foreseen."""
    quality = Quality(forget=1)
    assert (quality.mape, quality.r2) == (None, None)
    for predicted, actual in ((1.1, 1), (1.8, 2), (3, 3)):
        quality.add(predicted, actual)

    assert quality.mape == pytest.approx(0.2 / 3)
    assert quality.r2 == pytest.approx(1 - 0.05 / 2)
