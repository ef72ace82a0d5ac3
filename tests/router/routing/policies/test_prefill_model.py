# SPDX-License-Identifier: Apache-2.0
"""The model of a prefill's time, fitted to prefills whose time is known."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import pytest

from ttft_otel.router.routing.policies.prefill_model import (
    MAX_TRACKED,
    MIN_SAMPLES,
    PredictionQuality,
    PrefillFit,
    PrefillLine,
    PrefillModels,
    PrefillWork,
    compute_work,
    describe_fit,
)

TRUE_LINE = PrefillLine(0.005, 40e-6, 1.3e-9)


def generate_work(count: int, seed: int = 1) -> Iterator[PrefillWork]:
    """Lengths from 16 to 64k tokens, with any part of them cached."""
    rng = random.Random(seed)
    for _ in range(count):
        tokens = round(16 * 4096 ** rng.random())
        yield compute_work(tokens, rng.randrange(tokens) // 16 * 16)


def test_exact() -> None:
    """From times without noise the fit finds the exact coefficients."""
    fit = PrefillFit()
    for each in generate_work(50):
        fit.add_sample(each, TRUE_LINE.predict_seconds(each))

    assert fit.line == pytest.approx(TRUE_LINE, rel=1e-3)
    assert fit.quality.mape == pytest.approx(0, abs=0.01)


def test_decodes() -> None:
    """What answers under way cost each prefill is found, and nothing where none are."""
    fit, chance = PrefillFit(), random.Random(3)
    true = TRUE_LINE._replace(e=0.0007)
    for each in generate_work(300):
        decodes = chance.randrange(100)
        seconds = true.predict_seconds(each, decodes=decodes)
        fit.add_sample(each, seconds * chance.lognormvariate(0, 0.05), decodes)

    assert fit.line is not None
    assert fit.line.e == pytest.approx(true.e, rel=0.1)
    assert describe_fit(fit)["e"] == fit.line.e


def test_noise() -> None:
    """With 10 % of noise its errors are about that noise; long prompts are predicted within a few percent."""
    fit, chance = PrefillFit(), random.Random(2)
    for each in generate_work(2000):
        fit.add_sample(each, TRUE_LINE.predict_seconds(each) * chance.lognormvariate(0, 0.1))
    assert fit.line is not None
    assert fit.quality.mape is not None
    assert fit.quality.r2 is not None

    for tokens in (2000, 8000, 32_000):
        assert fit.line.predict_seconds(compute_work(tokens, 0)) == pytest.approx(
            TRUE_LINE.predict_seconds(compute_work(tokens, 0)), rel=0.05
        )
    assert 0.06 < fit.quality.mape < 0.12
    assert fit.quality.r2 > 0.95


@pytest.mark.parametrize("kept", list(product((0, 1), repeat=3)))
def test_never_negative(kept: tuple[int, ...]) -> None:
    """A part that costs nothing has a coefficient of zero, never below, whatever the noise."""
    true = PrefillLine(*(x * keep for x, keep in zip(TRUE_LINE[:3], kept, strict=True)))
    fit, chance = PrefillFit(), random.Random(4)
    for each in generate_work(300):
        fit.add_sample(each, true.predict_seconds(each) + chance.gauss(0, 1e-4))
        assert fit.line is None or min(fit.line) >= 0

    if any(kept):
        assert fit.line is not None
        probe = compute_work(30_000, 0)
        assert fit.line.predict_seconds(probe) == pytest.approx(
            true.predict_seconds(probe), rel=0.1, abs=1e-3
        )


def test_one_length() -> None:
    """From prompts of one length the model predicts that length correctly."""
    fit = PrefillFit()
    for _ in range(MIN_SAMPLES):
        fit.add_sample(compute_work(1000, 0), 0.25)

    assert fit.line is not None
    assert fit.line.predict_seconds(compute_work(1000, 0)) == pytest.approx(0.25)


def test_forgets() -> None:
    """When an instance becomes twice as slow, so do its predictions."""
    fit = PrefillFit()
    for each in generate_work(500):
        fit.add_sample(each, TRUE_LINE.predict_seconds(each))
    for each in generate_work(3000, seed=2):
        fit.add_sample(each, 2 * TRUE_LINE.predict_seconds(each))
    assert fit.line is not None

    assert fit.line.predict_seconds(compute_work(8000, 0)) == pytest.approx(
        2 * TRUE_LINE.predict_seconds(compute_work(8000, 0)), 0.02
    )


def test_trapezoid() -> None:
    """Pairs alone are the trapezoid formula."""
    assert PrefillLine(0, 0, 1).predict_seconds(compute_work(4096, 2048)) == 6_292_480


def test_pool() -> None:
    """Start values, then a line that all instances have in common; other models have no part in it."""
    start = PrefillLine(1, 0, 0)
    models = PrefillModels(start)
    assert models.get_line("m") == (start, {})
    assert PrefillModels().get_line("m") is None
    for number, each in enumerate(generate_work(MIN_SAMPLES)):
        models.add_sample("m", f"http://{number}", each, TRUE_LINE.predict_seconds(each))
    known = models.get_line("m")
    assert known is not None

    assert known[0] == pytest.approx(TRUE_LINE, rel=1e-3)
    assert known[1] == {}
    assert models.get_line("other") == (start, {})


def train_models(
    slowdown_by_url: dict[str, float], samples_per_instance: int, noise: float, instances: int = 8
) -> PrefillModels:
    """What so many samples of every instance teach; those named in `slow` take so many times as long."""
    models, rng = PrefillModels(), random.Random(5)
    for number, todo in enumerate(generate_work(samples_per_instance * instances)):
        url = str(number % instances)
        seconds = (
            TRUE_LINE.predict_seconds(todo)
            * slowdown_by_url.get(url, 1.0)
            * rng.lognormvariate(0, noise)
        )
        models.add_sample("m", url, todo, seconds)
    return models


def test_pace() -> None:
    """A few samples tell a slow instance from the others: its line is the common one times its pace."""
    models = train_models({"0": 2.0, "1": 2.0, "2": 0.5}, 20, 0.1)
    lines = {url: fit.line for (_, url), fit in models.list_fits().items()}
    todo = compute_work(8000, 0)

    for url, times in (("0", 2.0), ("1", 2.0), ("2", 0.5), ("3", 1.0), ("7", 1.0)):
        line = lines[url]
        assert line is not None
        assert line.predict_seconds(todo) == pytest.approx(
            times * TRUE_LINE.predict_seconds(todo), rel=0.12
        )


@pytest.mark.parametrize(("each", "noise"), [(5, 0.1), (50, 0.1), (50, 0.5)])
def test_chance(each: int, noise: float) -> None:
    """Equally fast instances are not told apart by their noise: nearly all have no pace of their own."""
    known = train_models({}, each, noise, instances=64).get_line("m")
    assert known is not None
    _, factors = known

    assert len(factors) < 12
    assert all(abs(factor - 1) < noise / 2 for factor in factors.values())


def test_pace_changes() -> None:
    """An instance that becomes slow is known to be after a hundred prefills; all of them after more."""
    models = train_models({}, 60, 0.05, instances=4)
    todo = compute_work(8000, 0)

    def measure_errors(slow: tuple[int, ...], samples: int) -> list[float]:
        for number, each in enumerate(generate_work(samples, seed=3)):
            at = number % 4
            models.add_sample(
                "m", str(at), each, TRUE_LINE.predict_seconds(each) * (3.0 if at in slow else 1.0)
            )
        known = models.get_line("m")
        assert known is not None
        line, factors = known
        return [
            factors.get(str(at), 1.0) * line.predict_seconds(todo) / TRUE_LINE.predict_seconds(todo)
            for at in range(4)
        ]

    assert measure_errors((0,), 400) == pytest.approx([3, 1, 1, 1], rel=0.15)
    assert measure_errors((0, 1, 2, 3), 2000) == pytest.approx([3, 3, 3, 3], rel=0.15)


def test_wild() -> None:
    """A prefill time a thousand times too long, or zero, does not spoil the predictions of its instance."""
    models = train_models({}, 40, 0.1)
    models.add_sample(
        "m", "0", compute_work(100, 0), 1000 * TRUE_LINE.predict_seconds(compute_work(100, 0))
    )
    models.add_sample("m", "1", compute_work(100, 0), 0.0)
    known = models.get_line("m")
    assert known is not None

    assert known[1].get("0", 1.0) < 1.3
    assert known[1].get("1", 1.0) > 0.8


def test_first() -> None:
    """One long prefill tells nothing of an instance while nobody knows how much they differ by chance."""
    models = PrefillModels()
    for each in generate_work(MIN_SAMPLES):
        models.add_sample("m", "a", each, TRUE_LINE.predict_seconds(each))
    models.add_sample(
        "m", "b", compute_work(1000, 0), 10 * TRUE_LINE.predict_seconds(compute_work(1000, 0))
    )
    known = models.get_line("m")
    assert known is not None

    assert known[1] == {}


def test_bounded() -> None:
    """However many models and instances are named, no more than so many are kept, the latest."""
    models = PrefillModels()
    for number in range(MAX_TRACKED + 100):
        models.add_sample(f"m{number}", "a", compute_work(10, 0), 0.1)
    kept = [key for key in models.list_fits() if key[1]]

    assert len(kept) == MAX_TRACKED
    assert kept[0] == ("m100", "a")
    assert ("m99", "") not in models.list_fits()


def test_drop() -> None:
    """An instance that is gone leaves no series and weighs nothing in what the others are held against."""
    models = train_models({"0": 4.0}, 40, 0.05, 2)
    models.add_sample("other", "0", compute_work(10, 0), 0.1)
    models.drop_instance("0")
    assert set(models.list_fits()) == {("m", ""), ("m", "1")}
    todo = compute_work(1000, 0)
    known = models.get_line("m")
    assert known is not None
    models.add_sample("m", "1", todo, known[0].predict_seconds(todo))
    known = models.get_line("m")
    assert known is not None and known[1] == {}


def test_quality() -> None:
    """The errors' mean size, and the share of the variance that was foreseen."""
    quality = PredictionQuality()
    assert (quality.mape, quality.r2) == (None, None)
    for predicted, actual in ((1.1, 1), (1.8, 2), (3, 3)):
        quality.add_outcome(predicted, actual)

    # The later ones count more, but of three hardly.
    assert quality.mape == pytest.approx(0.2 / 3, rel=0.01)
    assert quality.r2 == pytest.approx(1 - 0.05 / 2, rel=0.01)
