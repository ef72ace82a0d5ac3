# SPDX-License-Identifier: Apache-2.0
"""Compare two targets, metric by metric and stage by stage, with 95 % intervals.

Input are targets of result_document.py's JSON, from one run with --ab or from two files. Requests of
one round are correlated, so the sample is the rounds: each gives one figure, and rounds of --ab are
paired. How much rounds differ is unknown from fewer than three: there is no interval then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ttft_otel.bench.request_statistics import QUEUE_WAIT, list_metrics, list_stages
from ttft_otel.model.statistics import compute_t_quantile

MIN_ROUNDS: Final = 3  # with fewer the differences between rounds are unknown
# These need no breakdown, so they compare servers without ttft-otel, too.
CLIENT_METRICS: Final = ("ttft", "tpot", "itl", "latency")
TRACED: Final = f"{QUEUE_WAIT} mean"  # of rounds with breakdowns
MONO_PREFIX: Final = "mono."  # of stages of the only server behind a router
# Of the TTFT only: percentiles of stages do not add up to one of it.
TTFT_PERCENTILES: Final = (50, 95, 99)

Table: TypeAlias = NDArray[np.float64]


def compare_targets(a: Mapping[str, Any], b: Mapping[str, Any], paired: bool) -> dict[str, Any]:
    """B minus A in milliseconds, with 95 % intervals.

    a, b: targets of result documents. paired: round i of A was measured right beside round i of B.
    Raises ValueError when there is nothing to compare.
    """
    rounds_a, rounds_b = _estimate_rounds(a), _estimate_rounds(b)
    for name, rounds in (("A", rounds_a), ("B", rounds_b)):
        if not any(rounds):
            raise ValueError(f"{name} has no successful request")
    if paired:
        # An interrupted benchmark has a round on one side only: not strict. Rounds without a
        # successful request on both sides are left out.
        pairs = [pair for pair in zip(rounds_a, rounds_b, strict=False) if all(pair)]
        rounds_a, rounds_b = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    rounds_a, rounds_b = list(filter(None, rounds_a)), list(filter(None, rounds_b))
    if not rounds_a or not rounds_b:
        raise ValueError("A and B have no round in which both have a successful request")
    # Rounds weigh alike from here on, however many requests each of them had.
    names, figures_a, figures_b = _build_tables(rounds_a, rounds_b)
    averages_a, averages_b, margins = compute_margins(figures_a, figures_b, paired)
    columns = zip(names, averages_a, averages_b, margins, strict=True)
    return {
        "a": a["url"],
        "b": b["url"],
        # One late generator spoils the difference, whichever side it was on.
        "valid": bool(a["valid"] and b["valid"]),
        "rounds": min(len(rounds_a), len(rounds_b)),
        "paired": paired,
        "rows": [_build_row(*values) for values in columns],
    }


def list_load_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The flags in which the loads of two documents differ; slos, repeat and model may differ."""
    # slos and repeat change nothing of what is sent; the model may be what is compared.
    ignored = ("slos", "repeat", "model")
    names = dict.fromkeys((*a["load"], *b["load"]))
    return [
        name for name in names if name not in ignored and a["load"].get(name) != b["load"].get(name)
    ]


def compute_margins(figures_a: Table, figures_b: Table, paired: bool) -> tuple[Table, Table, Table]:
    """Averages of A's and of B's rounds, and the half width of the 95 % interval of their difference.

    figures_a, figures_b: a row for each round, a column for each quantity, NaN where it is unknown.
    paired: row i of A belongs to row i of B, so that what both have in common cancels out. Else the
    variances of A and B may differ (Welch). The margin is NaN with fewer than MIN_ROUNDS rounds.
    """
    if paired:
        # A pair with one unknown side must drop out of both averages, or they would be of different rounds.
        unknown = np.isnan(figures_a) | np.isnan(figures_b)
        figures_a, figures_b = (np.where(unknown, np.nan, each) for each in (figures_a, figures_b))
        _, variance, rounds = _describe_rounds(figures_b - figures_a)
        degrees = rounds - 1
        averages_a, averages_b = (_describe_rounds(each)[0] for each in (figures_a, figures_b))
    else:
        averages_a, variance_a, rounds_a = _describe_rounds(figures_a)
        averages_b, variance_b, rounds_b = _describe_rounds(figures_b)
        rounds, variance = np.minimum(rounds_a, rounds_b), variance_a + variance_b
        # Welch-Satterthwaite: degrees of freedom of a difference with two variances.
        spread = variance_a**2 / np.maximum(1, rounds_a - 1)
        spread += variance_b**2 / np.maximum(1, rounds_b - 1)
        # Without spread, rounds were equal: the margin is 0 whatever the degrees are.
        degrees = np.divide(variance**2, spread, out=np.ones_like(variance), where=spread > 0)
        # Welch's degrees are too many by up to 2 % of marks where three rounds meet many.
        degrees = np.where(rounds_a == rounds_b, degrees, rounds - 1)
    quantiles = np.array([compute_t_quantile(max(1.0, float(each))) for each in degrees])
    margins = np.where(rounds >= MIN_ROUNDS, quantiles * np.sqrt(variance), np.nan)
    return averages_a, averages_b, margins


def _describe_rounds(figures: Table) -> tuple[Table, Table, Table]:
    """Mean of each column, the variance of that mean, and the number of rounds that have it."""
    known = ~np.isnan(figures)
    rounds = known.sum(axis=0)
    mean = np.where(known, figures, 0.0).sum(axis=0) / np.maximum(1, rounds)
    squares = (np.where(known, figures - mean, 0.0) ** 2).sum(axis=0)
    # Bessel's correction, then the variance of a mean; one round has neither and is masked later.
    return mean, squares / np.maximum(1, rounds - 1) / np.maximum(1, rounds), rounds


def _build_row(name: str, a: float, b: float, margin: float) -> dict[str, Any]:
    numbers = {"a": a, "b": b, "difference": b - a}
    row: dict[str, Any] = {key: round(float(number), 3) for key, number in numbers.items()}
    # null: unknown. A difference below a microsecond is none.
    low, high = (
        None if math.isnan(margin) else round(float(b - a + sign * margin), 3) for sign in (-1, 1)
    )
    # Strictly beyond 0: an interval that touches it does not exclude it.
    clear = low is not None and high is not None and bool(low > 0 or high < 0)
    return {"name": name, **row, "low": low, "high": high, "clear": clear}


def _estimate_rounds(target: Mapping[str, Any]) -> list[dict[str, float]]:
    """Of each round the means of all quantities, then the percentiles of the TTFT; {} of a failed one."""
    found = []
    for rows in (run["requests"] for run in target["runs"]):
        figures = {
            # A server's stages are named alike with a router in front of it and without.
            f"{name.removeprefix(MONO_PREFIX)} mean": fmean(values)
            for name, values in (list_metrics(rows) | list_stages(rows)).items()
            if values
        }
        if rows:
            percentiles = np.percentile([row["ttft_ms"] for row in rows], TTFT_PERCENTILES)
            names = (f"ttft p{q}" for q in TTFT_PERCENTILES)
            figures |= zip(names, percentiles.tolist(), strict=True)
        found.append(figures)
    return found


def _build_tables(
    a: Sequence[Mapping[str, float]], b: Sequence[Mapping[str, float]]
) -> tuple[list[str], Table, Table]:
    """The quantities that both sides have, and of each side a row for each round."""
    # Percentiles last, as in a round.
    names = sorted(
        dict.fromkeys(name for figures in (*a, *b) for name in figures),
        key=lambda name: not name.endswith(" mean"),
    )
    tables = [np.array([_list_figures(figures, names) for figures in rounds]) for rounds in (a, b)]
    # Without breakdowns on one side the difference of every stage would be unknown.
    shared = ~(np.isnan(tables[0]).all(axis=0) | np.isnan(tables[1]).all(axis=0))
    kept = [name for name, is_shared in zip(names, shared, strict=True) if is_shared]
    return kept, tables[0][:, shared], tables[1][:, shared]


def _list_figures(figures: Mapping[str, float], names: Iterable[str]) -> list[float]:
    """A round's quantities. A stage that is not in its breakdowns took 0; without any it is unknown."""
    stage_ms = 0.0 if TRACED in figures else math.nan
    return [
        figures.get(name, math.nan if name.removesuffix(" mean") in CLIENT_METRICS else stage_ms)
        for name in names
    ]
