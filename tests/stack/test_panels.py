# SPDX-License-Identifier: Apache-2.0
"""Every panel's query against real Tempo and Prometheus with 2 000 known requests: data, right numbers.

Queries are asked directly, variables as a dashboard opens with them; test_browser.py sees them drawn.
Lines use a short window, numbers the whole range: here both take the whole range, so both have one truth.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.stack import panels
from tests.stack.filled import Filled
from tests.stack.known import SLO_MS, Truth
from tests.stack.panels import Asker, Query

# Exponential histograms, 16 buckets an octave over what TTFT spans here: as wide as an error can be.
BUCKET = 2 ** (1 / 16) - 1
QUERIES = panels.queries()


def asker(filled: Filled, **chosen: str) -> Asker:
    """Asks over the whole time in which rows were sent, and a little before."""
    trace = filled.truth.slow()[0].trace_id
    stack = filled.stack
    return Asker(
        *(stack.prometheus.url, stack.tempo.url, filled.start - 30, filled.end),
        {"trace": trace, **chosen},
    )


def of(title: str, ref: str = "A", board: str = "ttft") -> Query:
    """A panel's query; the one of that title which gives a number, if there are two panels."""
    found = [
        query
        for query in QUERIES
        if (query.dashboard.uid, query.title, query.ref) == (board, title, ref)
    ]
    assert found, f"no panel {title!r} with a query {ref}"
    return min(found, key=lambda query: not query.instant)


def whole(ask: Asker, query: Query) -> list[Any]:
    """A query's vector with the whole range as its window."""
    span = f"{round(ask.end - ask.start)}s"
    return ask.promql(replace(ask, chosen={**ask.chosen, "__rate_interval": span}).written(query))


def number(ask: Asker, title: str) -> float:
    """What a stat panel shows."""
    [series] = whole(ask, of(title))
    return float(series["value"][1])


def near(found: float, true: float, error: float) -> bool:
    """Within a relative error."""
    return abs(found - true) <= error * abs(true)


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.name)
def test_every_query_has_data(filled: Filled, query: Query) -> None:
    """No panel is empty, and no value is anything but a number."""
    found = asker(filled).ask(query)
    assert found, asker(filled).written(query)
    values = [
        float(value)
        for series in found
        if "metric" in series
        for _, value in series.get("values") or [series["value"]]
    ]
    assert not query.prometheus or any(map(math.isfinite, values)), values


@pytest.mark.parametrize("share", (0.5, 0.9, 0.99))
def test_percentiles(filled: Filled, share: float) -> None:
    """p50, p90 and p99 are those of the rows that got a first token, within a bucket."""
    found = number(asker(filled), f"TTFT p{share * 100:.0f}")
    assert near(found, filled.truth.quantile(share), BUCKET)


def test_shares(filled: Filled) -> None:
    """Over SLO and failed are exact: 1 s is a bucket's bound."""
    assert number(asker(filled), "Over SLO") == pytest.approx(filled.truth.over(), rel=0.01)
    found = number(asker(filled), "Failed before a first token")
    assert found == pytest.approx(filled.truth.failed(), rel=0.01)
    other = Truth(filled.rows).over(300)
    assert near(number(asker(filled, slo="300"), "Over SLO"), other, 3 * BUCKET)


def stages(ask: Asker, title: str) -> dict[str, float]:
    """What a stacked panel stacks, by stage."""
    found: dict[str, float] = {}
    for query in QUERIES:
        if query.title == title and query.dashboard.uid == "ttft":
            for series in whole(ask, query):
                name = series["metric"]["ttft_stage"]
                assert name not in found, f"{name} is stacked twice"
                found[name] = float(series["value"][1])
    return found


def test_the_breakdown_adds_up(filled: Filled) -> None:
    """Stacked stage means are the rows' own, and add up to the mean TTFT, within 1 %."""
    found = stages(asker(filled), "Mean TTFT by stage")
    true = filled.truth.stages()
    assert set(found) == set(true)
    assert not {
        name: (found[name], true[name]) for name in true if not near(found[name], true[name], 0.01)
    }
    assert near(sum(found.values()), filled.truth.mean(), 0.01)
    assert sum(stages(asker(filled), "Share of TTFT by stage").values()) == pytest.approx(1.0)


def test_the_distribution(filled: Filled) -> None:
    """Requests per bucket are the rows' own; all buckets have the same points, as Grafana 10 needs."""
    query = of("TTFT distribution")
    drawn = asker(filled).promql(asker(filled).written(query), instant=False)
    assert len({tuple(time for time, _ in series["values"]) for series in drawn}) == 1
    up_to = {
        float(series["metric"]["le"]): float(series["value"][1])
        for series in whole(asker(filled), query)
    }
    rows = filled.truth.good
    for le, count in up_to.items():
        true = sum(row.ttft <= le * 1e6 for row in rows) / len(rows)
        assert count / up_to[math.inf] == pytest.approx(true, abs=0.002), le


def test_who(filled: Filled) -> None:
    """The table has one row per model, role and instance, each with its own rows' numbers."""
    keys = {(row.model, row.role, row.instance) for row in filled.truth.all}
    ask = asker(filled)
    for ref, share in (("B", 0.5), ("C", 0.9), ("D", 0.99)):
        found = {
            (
                series["metric"]["gen_ai_request_model"],
                series["metric"]["ttft_role"],
                series["metric"]["instance"],
            ): float(series["value"][1])
            for series in whole(ask, of("Models, roles and instances", ref))
        }
        assert set(found) == keys
        for model, role, instance in keys:
            true = filled.truth.where(model=model, role=role, instance=instance)
            assert near(found[model, role, instance], true.quantile(share), BUCKET)


def test_by_role(filled: Filled) -> None:
    """Router and legs, per request: what the rows say, and together the mean TTFT."""
    found = {
        series["metric"]["role"]: float(series["value"][1])
        for series in whole(asker(filled), of("Mean TTFT by role"))
    }
    sums = dict.fromkeys(found, 0)
    for row in filled.truth.good:
        sums[row.role] += sum(row.own.values()) + (row.unattributed if row.routed else 0)
        for leg in row.legs:
            sums[leg.role] += leg.ttft - (leg.lost if row.routed else 0)
            sums[row.role] += leg.hop
    for role, us in sums.items():
        assert near(found[role], us / len(filled.truth.good) / 1e6, 0.01), role
    assert near(sum(found.values()), filled.truth.mean(), 0.01)


def test_by_instance(filled: Filled) -> None:
    """Each server's own time per request that it served."""
    found = {
        series["metric"]["server"]: float(series["value"][1])
        for series in whole(asker(filled), of("Mean time by instance"))
    }
    served: dict[str, list[int]] = {}
    for row in filled.truth.good:
        for leg in row.legs:
            place = leg.instance
            served.setdefault(place, []).append(sum(leg.lengths.values()))
    routers = {row.instance for row in filled.truth.all if row.routed}
    assert set(found) == set(served) | routers
    for place, lengths in served.items():
        assert near(found[place], sum(lengths) / len(lengths) / 1e6, 0.02), place


def test_the_slow_list(filled: Filled) -> None:
    """The requests over the SLO are exactly the known ones."""
    found = asker(filled).ask(of("Requests over the SLO"))
    assert {each["traceID"].zfill(32) for each in found} == {
        row.trace_id for row in filled.truth.slow()
    }
    assert len(found) == len(filled.truth.slow(SLO_MS))


def test_exemplars_are_traces(filled: Filled) -> None:
    """The dots on the percentiles lead to traces that Tempo has."""
    ask = asker(filled)
    text = ask.written(of("TTFT percentiles", "p99"))
    found = {each["labels"]["trace_id"] for each in ask.exemplars(text)}
    assert len(found) >= 20
    known = {row.trace_id: row for row in filled.truth.good}
    assert found <= set(known)
    for trace_id in sorted(found)[:10]:
        assert filled.stack.tempo.trace(trace_id), trace_id


@pytest.mark.parametrize("name", ("model", "role", "instance"))
def test_variables_filter(filled: Filled, name: str) -> None:
    """A chosen model, role or instance gives the numbers of its own rows."""
    values = {str(getattr(row, name)) for row in filled.truth.all}
    for value in sorted(values):
        true = filled.truth.where(**{name: value})
        ask = asker(filled, **{name: value})
        assert near(number(ask, "TTFT p90"), true.quantile(0.9), BUCKET), value
        assert near(sum(stages(ask, "Mean TTFT by stage").values()), true.mean(), 0.01), value
