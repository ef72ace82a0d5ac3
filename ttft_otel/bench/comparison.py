# SPDX-License-Identifier: Apache-2.0
"""Compare two targets, metric by metric and stage by stage, with 95 % intervals.

Input are targets of result_document.py's JSON, from one run with --ab or from two files. Requests of
one round are correlated, so the sample is the rounds: each gives one figure, and rounds of --ab are
paired. How much rounds differ is unknown from fewer than three: there is no interval then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ttft_otel.bench.request_statistics import (
    PREFILL_TO_FIRST_TOKEN,
    QUEUE_WAIT,
    sum_prefill,
    sum_queue_wait,
)
from ttft_otel.model.statistics import compute_t_quantile

MIN_ROUNDS: Final = 3  # with fewer the differences between rounds are unknown
# These need no breakdown, so they compare servers without ttft-otel, too.
CLIENT_METRICS: Final = ("ttft", "tpot", "itl", "latency")
STAGE_SUMS: Final = {QUEUE_WAIT: sum_queue_wait, PREFILL_TO_FIRST_TOKEN: sum_prefill}
MONO_PREFIX: Final = "mono."  # of stages of the only server behind a router
# Of the TTFT only: percentiles of stages do not add up to one of it.
TTFT_PERCENTILES: Final = (50, 95, 99)

Table: TypeAlias = NDArray[np.float64]


def compare_targets(a: Mapping[str, Any], b: Mapping[str, Any], paired: bool) -> dict[str, Any]:
    """B minus A in milliseconds, with 95 % intervals.

    a, b: targets of result documents. paired: round i of A was measured right beside round i of B.
    Raises ValueError when there is nothing to compare.
    """
    # Both tables get the same columns, so that they can be subtracted.
    names = _list_quantities(a, b)
    tables_a, tables_b = _build_tables(a, names), _build_tables(b, names)
    for name, tables in (("A", tables_a), ("B", tables_b)):
        if not any(map(len, tables)):
            raise ValueError(f"{name} has no successful request")
    if paired:
        # An interrupted benchmark has a round on one side only: not strict. Rounds without a
        # successful request on both sides are left out.
        pairs = [pair for pair in zip(tables_a, tables_b, strict=False) if all(map(len, pair))]
        tables_a, tables_b = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    tables_a = [table for table in tables_a if len(table)]
    tables_b = [table for table in tables_b if len(table)]
    if not tables_a or not tables_b:
        raise ValueError("A and B have no round in which both have a successful request")
    # Rounds weigh alike from here on, however many requests each of them had.
    figures_a, figures_b = (_estimate_rounds(tables, names) for tables in (tables_a, tables_b))
    averages_a, averages_b, margins = compute_margins(figures_a, figures_b, paired)
    titles = [f"{name} mean" for name in names] + [f"ttft p{q}" for q in TTFT_PERCENTILES]
    columns = zip(titles, averages_a, averages_b, margins, strict=True)
    return {
        "a": a["url"],
        "b": b["url"],
        # One late generator spoils the difference, whichever side it was on.
        "valid": bool(a["valid"] and b["valid"]),
        "rounds": min(len(tables_a), len(tables_b)),
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


def _list_requests(target: Mapping[str, Any]) -> list[list[Mapping[str, Any]]]:
    return [run["requests"] for run in target["runs"]]


def _list_quantities(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Quantities to compare: metrics that both have, and all stages if both have breakdowns."""
    client_metrics = [
        name for name in CLIENT_METRICS if all(_has_quantity(target, name) for target in (a, b))
    ]
    stage_names = [
        # A server's stages are named alike with a router in front of it and without.
        [name.removeprefix(MONO_PREFIX) for name in target["summary"]["stages_ms"]]
        for target in (a, b)
    ]
    # Without breakdowns on one side the difference of every stage would be unknown.
    if not all(stage_names):
        return client_metrics
    return [
        # TTFT first, then its two sums, as in the terminal's table.
        *client_metrics[:1],
        *STAGE_SUMS,
        *client_metrics[1:],
        *dict.fromkeys(stage_names[0] + stage_names[1]),
    ]


def _has_quantity(target: Mapping[str, Any], name: str) -> bool:
    return any(
        _read_quantity(request, name)[1] for run in _list_requests(target) for request in run
    )


def _build_tables(target: Mapping[str, Any], names: Sequence[str]) -> list[Table]:
    """One table per round, of shape (requests, quantities, 2).

    The last axis holds the sum of a quantity's values and their number, which is 0 when it is unknown.
    """
    return [
        np.array(
            [[_read_quantity(request, name) for name in names] for request in run], dtype=np.float64
        )
        for run in _list_requests(target)
    ]


def _read_quantity(request: Mapping[str, Any], name: str) -> tuple[float, int]:
    """Sum and number of a quantity's values in one request.

    A stage that is not in the breakdown took 0; without a breakdown the number is 0 (unknown).
    """
    if name in CLIENT_METRICS:
        value = request.get(f"{name}_ms")
        count = request.get("itl_count", 0) if name == "itl" else 1
        # The mean ITL of a request is weighted by its gaps, so that all gaps count alike.
        return (0.0, 0) if value is None else (value * count, count)
    parts = request["stages_ms"]
    if not parts:
        return 0.0, 0
    if name in STAGE_SUMS:
        return STAGE_SUMS[name](parts), 1
    return float(parts.get(name, parts.get(f"{MONO_PREFIX}{name}", 0.0))), 1


def _estimate_rounds(tables: Sequence[Table], names: Sequence[str]) -> Table:
    """A row for each round: the means of all quantities, then the percentiles of the TTFT."""
    column = names.index("ttft")
    rows = []
    for table in tables:
        sums, counts = table.sum(axis=0).T
        means = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
        rows.append(np.concatenate((means, np.percentile(table[:, column, 0], TTFT_PERCENTILES))))
    return np.array(rows)
