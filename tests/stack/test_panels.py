# SPDX-License-Identifier: Apache-2.0
"""Every panel's query on real Tempo and Prometheus with 2 000 known requests: data, and right numbers."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import yaml

from lab.stack import stack_parts
from tests.stack import panel_queries
from tests.stack.filled_stack import FilledStack
from tests.stack.known_requests import (
    LEFT_ERRORS,
    REFUSED_ERRORS,
    SERVER_ERRORS,
    SLO_MS,
    KnownTruth,
    list_known_records,
    sum_held_us,
    sum_reasons_us,
)
from tests.stack.panel_queries import PanelAsker, PanelQuery
from ttft_otel.model.metric_table import METRICS
from ttft_otel.model.names import keys, metric_names

# Exponential histograms, 16 buckets an octave over what TTFT spans here: as wide as an error can be.
BUCKET = 2 ** (1 / 16) - 1
QUERIES = panel_queries.list_queries()


def build_asker(filled: FilledStack, **chosen: str) -> PanelAsker:
    """Asks over the whole time in which rows were sent, and a little before."""
    trace = filled.truth.list_slow_rows()[0].trace_id
    stack = filled.stack
    return PanelAsker(
        stack.prometheus.url, stack.tempo.url, filled.start - 30, filled.end,
        {"trace": trace, **chosen},
    )  # fmt: skip


def get_query(title: str, ref: str = "A", board: str = "ttft") -> PanelQuery:
    """A panel's query; the one of that title which gives a number, if there are two panels."""
    found = [
        query
        for query in QUERIES
        if (query.dashboard.uid, query.title, query.ref) == (board, title, ref)
    ]
    assert found, f"no panel {title!r} with a query {ref}"
    return min(found, key=lambda query: not query.instant)


def query_whole_range(ask: PanelAsker, query: PanelQuery) -> list[Any]:
    """A query's vector with the whole range as its window."""
    span = f"{round(ask.end - ask.start)}s"
    return ask.query_prometheus(
        replace(ask, chosen={**ask.chosen, "__rate_interval": span}).expand_variables(query)
    )


def measure_extension(ask: PanelAsker, query: PanelQuery) -> float:
    """By what Prometheus's rate() over the range is too high: it extends what it saw to the range's ends.

    Of the histogram that `query` is about: its rate of counts beside the counts that there are.
    """
    metric = re.search(r"\bttft_\w+_seconds\b", query.text)
    assert metric, query.text
    seconds = round(ask.end - ask.start)
    [rate] = ask.query_prometheus(f"sum(histogram_count(rate({metric[0]}[{seconds}s])))")
    [count] = ask.query_prometheus(f"sum(histogram_count({metric[0]}))")
    return float(rate["value"][1]) * seconds / float(count["value"][1])


def read_stat(ask: PanelAsker, title: str) -> float:
    """What a stat panel shows."""
    [series] = query_whole_range(ask, get_query(title))
    return float(series["value"][1])


def is_near(found: float, true: float, error: float) -> bool:
    """Within a relative error."""
    return abs(found - true) <= error * abs(true)


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.name)
def test_every_query_has_data(filled: FilledStack, query: PanelQuery) -> None:
    """No panel is empty, and no value is anything but a number."""
    found = build_asker(filled).run_query(query)
    assert found, build_asker(filled).expand_variables(query)
    values = [
        float(value)
        for series in found
        if "metric" in series
        for _, value in series.get("values") or [series["value"]]
    ]
    assert not query.prometheus or any(map(math.isfinite, values)), values


def test_percentiles(filled: FilledStack) -> None:
    """p50, p90 and p99 are those of the rows that got a first token, within a bucket."""
    for share in (0.5, 0.9, 0.99):
        found = read_stat(build_asker(filled), f"TTFT p{share * 100:.0f}")
        assert is_near(found, filled.truth.compute_quantile_s(share), BUCKET), share


def test_shares(filled: FilledStack) -> None:
    """The shares over the SLO and without a first token are exact: 1 s is a bucket's boundary."""
    assert read_stat(build_asker(filled), "Over SLO") == pytest.approx(
        filled.truth.compute_share_over(), rel=0.01
    )
    for title, errors in (
        ("Server failed", SERVER_ERRORS),
        ("Client left", LEFT_ERRORS),
        ("Refused", REFUSED_ERRORS),
    ):
        true = filled.truth.compute_share_ended(errors)
        assert true > 0
        assert read_stat(build_asker(filled), title) == pytest.approx(true, rel=0.01), title
    other = KnownTruth(filled.rows).compute_share_over(300)
    assert is_near(read_stat(build_asker(filled, slo="300"), "Over SLO"), other, 3 * BUCKET)


def test_what_ate_the_budget(filled: FilledStack) -> None:
    """Late and failed requests by model and instance are the known ones, and add up to all of them."""
    judged = [row for row in filled.truth.all if row.error not in REFUSED_ERRORS]
    missed = [row for row in judged if row.ttft > 1_000_000 or row.error in SERVER_ERRORS]
    for by, field in (("model", "model"), ("instance", "instance")):
        query = get_query(f"Late or failed, by {by}")
        drawn = build_asker(filled).run_query(query)
        label = "gen_ai_request_model" if by == "model" else by
        shares = {each["metric"][label]: float(each["value"][1]) for each in drawn}
        true = Counter(getattr(row, field) for row in missed)
        assert sum(shares.values()) == pytest.approx(1, rel=0.01)
        for name, share in shares.items():
            assert share == pytest.approx(true[name] / len(missed), rel=0.02, abs=0.002), (by, name)
        assert {name for name, share in shares.items() if share > 0.001} == set(true)


def test_failed_requests_are_counted_apart(filled: FilledStack) -> None:
    """Requests that end within a millisecond without a token are in our counts, by error, alone.

    The rows that failed are among those sent: test_percentiles finds them in no percentile.
    """
    ended = [row for row in filled.truth.all if row.error]
    assert len(ended) >= 20
    ask = build_asker(filled)
    counted = ask.query_prometheus(
        "sum(histogram_count(ttft_duration_seconds{error_type!='',ttft_role!='encode'}))"
    )
    assert float(counted[0]["value"][1]) == len(ended)
    convention = ask.query_prometheus("sum(gen_ai_server_time_to_first_token_seconds_count)")
    assert float(convention[0]["value"][1]) == len(filled.truth.good)


def read_stacked_stages(ask: PanelAsker, title: str) -> dict[str, float]:
    """What a stacked panel stacks, by stage."""
    found: dict[str, float] = {}
    for query in QUERIES:
        if query.title == title and query.dashboard.uid == "ttft":
            for series in query_whole_range(ask, query):
                name = series["metric"]["ttft_stage"]
                assert name not in found, f"{name} is stacked twice"
                found[name] = float(series["value"][1])
    return found


def test_the_breakdown_adds_up(filled: FilledStack) -> None:
    """Stacked stage means are the rows' own, and add up to the mean TTFT, within 1 %."""
    found = read_stacked_stages(build_asker(filled), "Mean TTFT by stage")
    true = filled.truth.compute_stage_means_s()
    assert set(found) == set(true)
    assert not {
        name: (found[name], true[name])
        for name in true
        if not is_near(found[name], true[name], 0.01)
    }
    assert is_near(sum(found.values()), filled.truth.compute_mean_s(), 0.01)
    assert sum(
        read_stacked_stages(build_asker(filled), "Share of TTFT by stage").values()
    ) == pytest.approx(1.0)


def test_the_distribution(filled: FilledStack) -> None:
    """Requests per bucket are the rows' own; all buckets have the same points, as Grafana 10 needs."""
    query = get_query("TTFT distribution")
    ask = build_asker(filled)
    drawn = ask.query_prometheus(ask.expand_variables(query), instant=False)
    assert len({tuple(time for time, _ in series["values"]) for series in drawn}) == 1
    up_to = {
        float(series["metric"]["le"]): float(series["value"][1])
        for series in query_whole_range(ask, query)
    }
    rows = filled.truth.good
    for le, count in up_to.items():
        true = sum(row.ttft <= le * 1e6 for row in rows) / len(rows)
        assert count / up_to[math.inf] == pytest.approx(true, abs=0.002), le


def test_who(filled: FilledStack) -> None:
    """The table has one row for each model, role and instance, with that row's numbers."""
    groups = {(row.model, row.role, row.instance) for row in filled.truth.all}
    ask = build_asker(filled)
    for ref, share in (("B", 0.5), ("C", 0.9), ("D", 0.99)):
        found = {
            (
                series["metric"]["gen_ai_request_model"],
                series["metric"]["ttft_role"],
                series["metric"]["instance"],
            ): float(series["value"][1])
            for series in query_whole_range(ask, get_query("Models, roles and instances", ref))
        }
        assert set(found) == groups
        for model, role, instance in groups:
            true = filled.truth.select_rows(model=model, role=role, instance=instance)
            assert is_near(found[model, role, instance], true.compute_quantile_s(share), BUCKET)


def test_by_role(filled: FilledStack) -> None:
    """Router and legs, per request: what the rows say, and together the mean TTFT."""
    found = {
        series["metric"]["role"]: float(series["value"][1])
        for series in query_whole_range(build_asker(filled), get_query("Mean TTFT by role"))
    }
    sums = dict.fromkeys(found, 0)
    for row in filled.truth.good:
        sums[row.role] += sum(row.own.values()) + (row.unattributed if row.routed else 0)
        for leg in row.legs:
            sums[leg.role] += leg.ttft - (leg.lost if row.routed else 0)
            sums[row.role] += leg.hop
    for role, us in sums.items():
        assert is_near(found[role], us / len(filled.truth.good) / 1e6, 0.01), role
    assert is_near(sum(found.values()), filled.truth.compute_mean_s(), 0.01)


def test_by_instance(filled: FilledStack) -> None:
    """Each server's own time per request that it served."""
    found = {
        series["metric"]["server"]: float(series["value"][1])
        for series in query_whole_range(build_asker(filled), get_query("Mean time by instance"))
    }
    served: dict[str, list[int]] = {}
    for row in filled.truth.good:
        for leg in row.legs:
            place = leg.instance
            served.setdefault(place, []).append(sum(leg.lengths.values()))
    routers = {row.instance for row in filled.truth.all if row.routed}
    assert set(found) == set(served) | routers
    for place, lengths in served.items():
        assert is_near(found[place], sum(lengths) / len(lengths) / 1e6, 0.02), place


def test_why_and_behind_what(filled: FilledStack) -> None:
    """Queues of all servers by reason and by the work that held them: the rows' own shares of one whole."""
    ask = build_asker(filled)
    for title, label, sums in (
        ("Why requests wait", "ttft_queue_reason", sum_reasons_us(filled.rows)),
        ("What held waiting requests", "ttft_held_by_kind", sum_held_us(filled.rows)),
    ):
        drawn = query_whole_range(ask, get_query(title))
        found = {each["metric"][label]: float(each["value"][1]) for each in drawn}
        whole, true_whole = sum(found.values()), sum(sums.values())
        assert set(found) == set(sums)
        for word, us in sums.items():
            assert found[word] / whole == pytest.approx(us / true_whole, rel=0.01), word
        # Requests that wait at one time, over the range: seconds of waiting per second.
        extension = measure_extension(ask, get_query(title))
        assert 0.9 < extension < 1.3  # by at most a sample's distance at each end, of ten or so
        seconds = round(ask.end - ask.start)
        assert is_near(whole * seconds / extension, true_whole / 1e6, 0.01), title


@pytest.mark.parametrize("share", (0.5, 0.9, 0.99))
def test_whole_answers(filled: FilledStack, share: float) -> None:
    """Durations and times per output token are in the convention's bucket of the rows' own quantile."""
    servers = [
        (record, record.server)
        for record in list_known_records(filled.rows, 0)
        if record.server is not None
    ]
    for title, metric, values in (
        (
            "Request duration",
            metric_names.GEN_AI_SERVER_REQUEST_DURATION,
            [each.end for record, each in servers if record.outermost and not each.error],
        ),
        (
            "Time per output token",
            metric_names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN,
            [
                int(str(each.attributes[keys.TIME_PER_OUTPUT_TOKEN_US]))
                for _, each in servers
                if keys.TIME_PER_OUTPUT_TOKEN_US in each.attributes
            ],
        ),
    ):
        ref = f"p{share * 100:.0f}"
        [drawn] = query_whole_range(build_asker(filled), get_query(title, ref))
        bounds = (0.0, *METRICS[metric].bounds_s, math.inf)
        true = sorted(values)[math.ceil(share * len(values)) - 1] / 1e6
        (low, high) = next(each for each in pairwise(bounds) if each[0] < true <= each[1])
        # The bounds themselves: rates round, and a quantile may lie on one.
        assert low * 0.999 <= float(drawn["value"][1]) <= high * 1.001, (title, true)


def test_media_encoded_twice(filled: FilledStack) -> None:
    """The counter has every item that a consumer encoded again, and the panel tells by whom; 0 too."""
    true = filled.truth.count_recomputed_items()
    reported = filled.stack.prometheus.query_vector("sum by (instance) (ttft_ec_recomputed_total)")
    assert {each["metric"]["instance"]: float(each["value"][1]) for each in reported} == true
    ask = build_asker(filled)
    drawn = query_whole_range(ask, get_query("Media encoded twice"))
    assert {each["metric"]["ttft_role"] for each in drawn} == {"prefill_decode"}
    # increase() reaches beyond the first and the last sample of its window, by 1.1 of their mean
    # distance at most; samples before the window and after it tell nothing about that.
    (fewest,) = ask.query_prometheus(
        f"min(count_over_time(ttft_ec_recomputed_total[{round(ask.end - ask.start)}s]))"
    )
    tolerance = 2.2 / (float(fewest["value"][1]) - 1)
    assert tolerance < 0.5
    for each in drawn:
        assert is_near(float(each["value"][1]), true[each["metric"]["instance"]], tolerance)
    assert len(drawn) == len(true) == 2 and 0 in true.values()


def test_other_products(filled: FilledStack) -> None:
    """Their stages are the report's of the same traces, and with the rest they are their mean TTFT."""
    ask = build_asker(filled)
    shown: dict[str, dict[str, float]] = {}
    for series in query_whole_range(ask, get_query("Stages, by other products' spans")):
        labels, (_, value) = series["metric"], series["value"]
        shown.setdefault(labels["ttft_foreign"], {})[labels["ttft_stage"]] = float(value)

    assert shown.keys() == {"vLLM's own tracing", "SGLang", "Dynamo"}
    told = {"prefill.queue": 0.055002, "prefill.compute": 0.0900015, "unattributed": 0.020613}
    # Each metric's rate() extends what it saw to the range's ends by itself.
    assert shown["vLLM's own tracing"] == pytest.approx(told, abs=0.002)
    ttfts = {
        "vLLM's own tracing": (0.25, 0.081234),
        "SGLang": (0.529941, 0.403630, 0.229175, 0.480869),
        "Dynamo": (0.016, 0.058),
    }
    for product, lengths in ttfts.items():
        mean = sum(lengths) / len(lengths)
        assert sum(shown[product].values()) == pytest.approx(mean, abs=1e-5)
    assert all(each > 0 for each in shown["SGLang"].values())


def test_the_slow_list(filled: FilledStack) -> None:
    """The table of requests over the SLO has exactly the known ones."""
    found = build_asker(filled).run_query(get_query("Requests over the SLO"))
    assert {each["traceID"].zfill(32) for each in found} == {
        row.trace_id for row in filled.truth.list_slow_rows()
    }
    assert len(found) == len(filled.truth.list_slow_rows(SLO_MS))


def test_exemplars_are_traces(filled: FilledStack) -> None:
    """The dots on the percentiles lead to traces that Tempo has."""
    ask = build_asker(filled)
    text = ask.expand_variables(get_query("TTFT percentiles", "p99"))
    found = {each["labels"]["trace_id"] for each in ask.query_exemplars(text)}
    assert len(found) >= 20
    known = {row.trace_id: row for row in filled.truth.good}
    assert found <= set(known)
    for trace_id in sorted(found)[:10]:
        assert filled.stack.tempo.fetch_trace(trace_id), trace_id


def test_spans_lead_to_metrics(filled: FilledStack) -> None:
    """What Grafana asks at a click on a router's span: p99 of its service, and mean stages that add up."""
    [file] = (stack_parts.PROVISIONING / "datasources").glob("*.yaml")
    sources = {each["uid"]: each for each in yaml.safe_load(file.read_text("utf-8"))["datasources"]}
    link = sources["tempo"]["jsonData"]["tracesToMetrics"]
    [tag] = link["tags"]
    routed = KnownTruth(row for row in filled.rows if row.routed)
    service = next(
        each.service for each in list_known_records(routed.good[:1], 0) if each.outermost
    )
    ask = build_asker(filled)
    p99, stages = (
        ask.query_prometheus(
            each["query"]
            .replace("$$__tags", f'{tag["value"]}="{service}"')
            .replace("$$__rate_interval", f"{round(ask.end - ask.start)}s")
        )
        for each in link["queries"]
    )
    # All requests, failed ones too, as the queries do not filter.
    waits = sorted(row.ttft for row in routed.all)
    true = waits[math.ceil(0.99 * len(waits)) - 1] / 1e6
    assert tag["key"] == "service.name"
    assert is_near(float(p99[0]["value"][1]), true, BUCKET)
    mean = sum(waits) / len(waits) / 1e6
    assert is_near(sum(float(each["value"][1]) for each in stages), mean, 0.02)


@pytest.mark.parametrize("name", ("model", "role", "instance"))
def test_variables_filter(filled: FilledStack, name: str) -> None:
    """A chosen model, role or instance gives the numbers of its own rows."""
    values = {str(getattr(row, name)) for row in filled.truth.all}
    for value in sorted(values):
        true = filled.truth.select_rows(**{name: value})
        ask = build_asker(filled, **{name: value})
        assert is_near(read_stat(ask, "TTFT p90"), true.compute_quantile_s(0.9), BUCKET), value
        assert is_near(
            sum(read_stacked_stages(ask, "Mean TTFT by stage").values()),
            true.compute_mean_s(),
            0.01,
        ), value
