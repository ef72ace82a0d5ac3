# SPDX-License-Identifier: Apache-2.0
"""Two targets against each other, figure by figure and stage by stage, with bootstrap intervals.

Targets are those of document.py's JSON, of one run with --ab or of two files; screen.py shows the rows.
From three rounds on whole rounds are drawn too, since requests of one round are alike; rounds of
--ab are drawn in pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ttft_otel.bench.figures import PREFILL, QUEUE, prefilled, queued

DRAWS: Final = 1000
ENOUGH: Final = 3  # rounds, to say something about how rounds differ
OWN: Final = ("ttft", "tpot", "itl", "latency")
SUMS: Final = {QUEUE: queued, PREFILL: prefilled}  # of stages
ALONE: Final = "mono."
TAIL: Final = (50, 95, 99)  # percentiles of the TTFT

# A row a request, a column a quantity: its sum and of how many; of none where nothing is known.
Table = NDArray[np.float64]


def compare(a: Mapping[str, Any], b: Mapping[str, Any], paired: bool) -> dict[str, Any]:
    """What B has more than A, in milliseconds. Raises ValueError when there is nothing to compare."""
    names = _names(a, b)
    left, right = _tables(a, names), _tables(b, names)
    for name, tables in (("A", left), ("B", right)):
        if not any(map(len, tables)):
            raise ValueError(f"{name} has no successful request")
    if paired:
        both = [pair for pair in zip(left, right, strict=False) if all(map(len, pair))]
        left, right = [pair[0] for pair in both], [pair[1] for pair in both]
    left, right = [each for each in left if len(each)], [each for each in right if len(each)]
    if not left or not right:
        raise ValueError("A and B have no round in which both have a successful request")
    measure = _measure(names)
    here, there = measure(np.concatenate(left)), measure(np.concatenate(right))
    drawn = _drawn(left, right, paired, measure)
    low, high = np.percentile(drawn, (2.5, 97.5), axis=0)
    titles = [f"{name} mean" for name in names] + [f"ttft p{q}" for q in TAIL]
    return {
        "a": a["url"],
        "b": b["url"],
        "valid": bool(a["valid"] and b["valid"]),
        "rounds": min(len(left), len(right)),
        "paired": paired,
        "rows": [_row(*values) for values in zip(titles, here, there, low, high, strict=True)],
    }


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The flags in which two documents' loads differ, those aside that need not be equal."""
    aside = ("slos", "repeat", "model")
    names = dict.fromkeys((*a["load"], *b["load"]))
    return [
        name for name in names if name not in aside and a["load"].get(name) != b["load"].get(name)
    ]


def _row(name: str, a: float, b: float, low: float, high: float) -> dict[str, Any]:
    numbers = {"a": a, "b": b, "difference": b - a, "low": low, "high": high}
    clear = bool(low > 0 or high < 0)
    return {"name": name, **{key: round(float(n), 3) for key, n in numbers.items()}, "clear": clear}


def _requests(target: Mapping[str, Any]) -> list[list[Mapping[str, Any]]]:
    return [run["requests"] for run in target["runs"]]


def _names(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """What both sides have: the client's figures, then the stages of either if both were told."""
    own = [name for name in OWN if all(_has(each, name) for each in (a, b))]
    told = [[_bare(name) for name in each["summary"]["stages_ms"]] for each in (a, b)]
    if not all(told):
        return own
    return [*own[:1], *SUMS, *own[1:], *dict.fromkeys(told[0] + told[1])]


def _has(target: Mapping[str, Any], name: str) -> bool:
    return any(_cell(each, name)[1] for run in _requests(target) for each in run)


def _tables(target: Mapping[str, Any], names: Sequence[str]) -> list[Table]:
    """One table a round."""
    return [
        np.array([[_cell(each, name) for name in names] for each in run], dtype=np.float64)
        for run in _requests(target)
    ]


def _cell(request: Mapping[str, Any], name: str) -> tuple[float, int]:
    """A stage that a breakdown lacks took 0; where there is no breakdown, nothing is known."""
    if name in OWN:
        value = request.get(f"{name}_ms")  # files of earlier versions have no ITL
        count = request.get("itl_count", 0) if name == "itl" else 1
        return (0.0, 0) if value is None else (value * count, count)
    parts = request["stages_ms"]
    if not parts:
        return 0.0, 0
    if name in SUMS:
        return SUMS[name](parts), 1
    return float(parts.get(name, parts.get(f"{ALONE}{name}", 0.0))), 1


def _bare(name: str) -> str:
    """A stage of the only server behind a router is the one that this server alone has."""
    return name.removeprefix(ALONE)


def _measure(names: Sequence[str]) -> Callable[[Table], Table]:
    """All means and then the percentiles of a table."""
    column = names.index("ttft")

    def measure(table: Table) -> Table:
        sums, counts = table.sum(axis=0).T
        return np.concatenate(
            (sums / np.maximum(1, counts), np.percentile(table[:, column, 0], TAIL))
        )

    return measure


def _drawn(
    left: Sequence[Table], right: Sequence[Table], paired: bool, measure: Callable[[Table], Table]
) -> Table:
    """Differences between both sides, drawn anew from what was seen."""
    chance = np.random.default_rng(0)

    def rounds(count: int) -> Any:
        return chance.integers(0, count, count) if count >= ENOUGH else range(count)

    def draw(side: Sequence[Table], which: Any) -> Table:
        seen = [side[place] for place in which]
        return np.concatenate([each[chance.integers(0, len(each), len(each))] for each in seen])

    found = []
    for _ in range(DRAWS):
        which = rounds(len(left))
        other = which if paired else rounds(len(right))
        found.append(measure(draw(right, other)) - measure(draw(left, which)))
    return np.array(found)
