# SPDX-License-Identifier: Apache-2.0
"""Every panel's query on real Tempo and Prometheus with 2 000 known requests: data, and right numbers.

Last, how soon a new trace is found, and by which of the dashboard's filters: counts change then.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Final

import msgspec
import pytest
import yaml
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource

from lab.stack import stack_parts
from tests.stack import filled_stack, otlp_requests
from tests.stack.filled_stack import FilledStack, PanelAsker, PanelQuery
from tests.stack.known_requests import (
    LEFT_ERRORS,
    REFUSED_ERRORS,
    SERVER_ERRORS,
    SLO_MS,
    KnownTruth,
    divide_by_work,
    get_reason,
    list_known_records,
    sum_queues_us,
)
from tests.stack.running_stack import wait_until
from ttft_otel.exporter.span_batch import build_spans
from ttft_otel.model import metric_table
from ttft_otel.model.metric_table import METRICS
from ttft_otel.model.names import keys, metric_names
from ttft_otel.model.record import encode_record
from ttft_otel.stack import stack_queries
from ttft_otel.tracing.handoff import RecordSender
from ttft_otel.tracing.settings import Settings

# Exponential histograms, 16 buckets an octave over what TTFT spans here: as wide as an error can be.
BUCKET = 2 ** (1 / 16) - 1
QUERIES = filled_stack.list_queries()


def build_asker(filled: FilledStack, **chosen: str) -> PanelAsker:
    """Asks over the whole time in which rows were sent, and a little before."""
    trace = filled.truth.list_slow_rows()[0].trace_id
    chosen = {"trace": trace, **chosen}
    urls = (filled.stack.prometheus.url, filled.stack.tempo.url)
    return PanelAsker(*urls, filled.start - 30, filled.end, chosen)


@pytest.fixture(scope="module")
def ask(filled: FilledStack) -> PanelAsker:
    """Asks with the variables that a dashboard has at first."""
    return build_asker(filled)


def get_query(title: str, ref: str = "A") -> PanelQuery:
    """A panel's query; the one of that title which gives a number, if there are two panels."""
    found = [each for each in QUERIES if each.name == f"ttft/{title}/{ref}"]
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


def read_numbers(ask: PanelAsker, title: str, *labels: str, ref: str = "A") -> dict[Any, float]:
    """What a panel shows over the whole range, by the values of one label or of several."""
    found: dict[Any, float] = {}
    for series in query_whole_range(ask, get_query(title, ref)):
        names = tuple(series["metric"][label] for label in labels)
        found[names if len(labels) > 1 else names[0]] = float(series["value"][1])
    return found


def read_stat(ask: PanelAsker, title: str, ref: str = "A") -> float:
    """What a stat panel shows."""
    [series] = query_whole_range(ask, get_query(title, ref))
    return float(series["value"][1])


def is_near(found: float, true: float, error: float) -> bool:
    """Within a relative error."""
    return abs(found - true) <= error * abs(true)


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.name)
def test_every_query_has_data(ask: PanelAsker, query: PanelQuery) -> None:
    """No panel is empty, and no value is anything but a number."""
    found = ask.run_query(query)
    assert found, ask.expand_variables(query)
    values = [
        float(value)
        for series in found
        if "metric" in series
        for _, value in series.get("values") or [series["value"]]
    ]
    assert not query.prometheus or any(map(math.isfinite, values)), values


def test_percentiles(ask: PanelAsker, filled: FilledStack) -> None:
    """p50, p90 and p99 are those of the rows that got a first token, within a bucket."""
    for share in (0.5, 0.9, 0.99):
        found = read_stat(ask, f"TTFT p{share * 100:.0f}")
        assert is_near(found, filled.truth.compute_quantile_s(share), BUCKET), share


def test_shares(ask: PanelAsker, filled: FilledStack) -> None:
    """The shares over the SLO and without a first token are exact: 1 s is a bucket's boundary."""
    true = filled.truth
    for title, share in (
        ("Over SLO", true.compute_share_over()),
        ("Server failed", true.compute_share_ended(SERVER_ERRORS)),
        ("Client left", true.compute_share_ended(LEFT_ERRORS)),
        ("Refused", true.compute_share_ended(REFUSED_ERRORS)),
    ):
        assert read_stat(ask, title) == pytest.approx(share, rel=0.01) and share > 0, title
    other = read_stat(build_asker(filled, slo="300"), "Over SLO")
    assert is_near(other, true.compute_share_over(300), 3 * BUCKET)


def test_what_ate_the_budget(ask: PanelAsker, filled: FilledStack) -> None:
    """Late and failed requests by model and instance are the known ones, and add up to all of them."""
    judged = [row for row in filled.truth.all if row.error not in REFUSED_ERRORS]
    missed = [row for row in judged if row.ttft > 1_000_000 or row.error in SERVER_ERRORS]
    for by, label in (("model", "gen_ai_request_model"), ("instance", "instance")):
        shares = read_numbers(ask, f"Late or failed, by {by}", label)
        true = Counter(getattr(row, by) for row in missed)
        assert sum(shares.values()) == pytest.approx(1, rel=0.01)
        for name, share in shares.items():
            assert share == pytest.approx(true[name] / len(missed), rel=0.02, abs=0.002), (by, name)
        assert {name for name, share in shares.items() if share > 0.001} == set(true)


def test_failed_requests_are_counted_apart(ask: PanelAsker, filled: FilledStack) -> None:
    """Requests that end within a millisecond without a token are in our counts, by error, alone.

    The rows that failed are among those sent: test_percentiles finds them in no percentile.
    """
    ended = sum(bool(row.error) for row in filled.truth.all)
    assert ended >= 20
    failed = "histogram_count(ttft_duration_seconds{error_type!='',ttft_role!='encode'})"
    answered = "gen_ai_server_time_to_first_token_seconds_count"
    for counted, many in ((failed, ended), (answered, len(filled.truth.good))):
        (found,) = ask.query_prometheus(f"sum({counted})")
        assert float(found["value"][1]) == many


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


def test_the_breakdown_adds_up(ask: PanelAsker, filled: FilledStack) -> None:
    """Stacked stage means are the rows' own, and add up to the mean TTFT, within 1 %."""
    found = read_stacked_stages(ask, "Mean TTFT by stage")
    assert found == pytest.approx(filled.truth.compute_stage_means_s(), rel=0.01)
    assert is_near(sum(found.values()), filled.truth.compute_mean_s(), 0.01)
    shares = read_stacked_stages(ask, "Share of TTFT by stage")
    assert sum(shares.values()) == pytest.approx(1.0)


def test_the_distribution(ask: PanelAsker, filled: FilledStack) -> None:
    """Requests per bucket are the rows' own; all buckets have the same points, as Grafana 10 needs."""
    text = ask.expand_variables(get_query("TTFT distribution"))
    drawn = ask.query_prometheus(text, instant=False)
    assert len({tuple(time for time, _ in series["values"]) for series in drawn}) == 1
    up_to = read_numbers(ask, "TTFT distribution", "le")
    rows = filled.truth.good
    for le, count in up_to.items():
        true = sum(row.ttft <= float(le) * 1e6 for row in rows) / len(rows)
        assert count / up_to["+Inf"] == pytest.approx(true, abs=0.002), le


def test_who(ask: PanelAsker, filled: FilledStack) -> None:
    """The table has one row for each model, role and instance, with that row's numbers."""
    groups = {(row.model, row.role, row.instance) for row in filled.truth.all}
    labels = ("gen_ai_request_model", "ttft_role", "instance")
    for ref, share in (("B", 0.5), ("C", 0.9), ("D", 0.99)):
        found = read_numbers(ask, "Models, roles and instances", *labels, ref=ref)
        assert set(found) == groups
        for model, role, instance in groups:
            true = filled.truth.select_rows(model=model, role=role, instance=instance)
            assert is_near(found[model, role, instance], true.compute_quantile_s(share), BUCKET)


def test_by_role(ask: PanelAsker, filled: FilledStack) -> None:
    """Router and legs, per request: what the rows say, and together the mean TTFT."""
    found = read_numbers(ask, "Mean TTFT by role", "role")
    sums = dict.fromkeys(found, 0)
    for row in filled.truth.good:
        sums[row.role] += sum(row.own.values()) + (row.unattributed if row.routed else 0)
        for leg in row.legs:
            sums[leg.role] += leg.ttft - (leg.lost if row.routed else 0)
            sums[row.role] += leg.hop
    for role, us in sums.items():
        assert is_near(found[role], us / len(filled.truth.good) / 1e6, 0.01), role
    assert is_near(sum(found.values()), filled.truth.compute_mean_s(), 0.01)


def test_by_instance(ask: PanelAsker, filled: FilledStack) -> None:
    """Each server's own time per request that it served."""
    found = read_numbers(ask, "Mean time by instance", "server")
    served: dict[str, list[int]] = {}
    for row in filled.truth.good:
        for leg in row.legs:
            served.setdefault(leg.instance, []).append(sum(leg.lengths.values()))
    routers = {row.instance for row in filled.truth.all if row.routed}
    assert set(found) == set(served) | routers
    for place, lengths in served.items():
        assert is_near(found[place], sum(lengths) / len(lengths) / 1e6, 0.02), place


def test_why_and_behind_what(ask: PanelAsker, filled: FilledStack) -> None:
    """Queues of all servers by reason and by the work that held them: the rows' own shares of one whole."""
    for title, label, divide in (
        ("Why requests wait", "ttft_queue_reason", lambda us: {get_reason(us): us}),
        ("What held waiting requests", "ttft_held_by_kind", divide_by_work),
    ):
        sums = sum_queues_us(filled.rows, divide)
        found = read_numbers(ask, title, label)
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
def test_whole_answers(ask: PanelAsker, filled: FilledStack, share: float) -> None:
    """Durations and times per output token are in the convention's bucket of the rows' own quantile."""
    durations, token_times = [], []
    for record in list_known_records(filled.rows, 0):
        if record.server is not None:
            if record.outermost and not record.server.error:
                durations.append(record.server.end)
            if token_us := record.server.attributes.get(keys.TIME_PER_OUTPUT_TOKEN_US):
                token_times.append(int(str(token_us)))
    for title, metric, values in (
        ("Request duration", metric_names.GEN_AI_SERVER_REQUEST_DURATION, durations),
        ("Time per output token", metric_names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN, token_times),
    ):
        shown = read_stat(ask, title, f"p{share * 100:.0f}")
        bounds = (0.0, *METRICS[metric].bounds_s, math.inf)
        true = sorted(values)[math.ceil(share * len(values)) - 1] / 1e6
        (low, high) = next(each for each in pairwise(bounds) if each[0] < true <= each[1])
        # The bounds themselves: rates round, and a quantile may lie on one.
        assert low * 0.999 <= shown <= high * 1.001, (title, true)


def test_media_encoded_twice(ask: PanelAsker, filled: FilledStack) -> None:
    """The counter has every item that a consumer encoded again, and the panel tells by whom; 0 too."""
    true: Counter[str] = Counter()
    for leg in (leg for row in filled.truth.all for leg in row.legs):
        if leg.recomputed is not None:
            true[leg.instance] += leg.recomputed
    reported = filled.stack.prometheus.query_vector("sum by (instance) (ttft_ec_recomputed_total)")
    assert {each["metric"]["instance"]: float(each["value"][1]) for each in reported} == true
    drawn = read_numbers(ask, "Media encoded twice", "ttft_role", "instance")
    assert {role for role, _ in drawn} == {"prefill_decode"}
    # increase() reaches beyond the first and the last sample of its window, by 1.1 of their mean
    # distance at most; samples before the window and after it tell nothing about that.
    (fewest,) = ask.query_prometheus(
        f"min(count_over_time(ttft_ec_recomputed_total[{round(ask.end - ask.start)}s]))"
    )
    tolerance = 2.2 / (float(fewest["value"][1]) - 1)
    assert tolerance < 0.5
    for (_, instance), items in drawn.items():
        assert is_near(items, true[instance], tolerance)
    assert len(drawn) == len(true) == 2 and 0 in true.values()


def test_other_products(ask: PanelAsker) -> None:
    """Their stages are the report's of the same traces, and with the rest they are their mean TTFT."""
    title, shown = "Stages, by other products' spans", defaultdict[str, dict[str, float]](dict)
    for (product, stage), value in read_numbers(ask, title, "ttft_foreign", "ttft_stage").items():
        shown[product][stage] = value

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


def test_the_slow_list(ask: PanelAsker, filled: FilledStack) -> None:
    """The table of requests over the SLO has exactly the known ones."""
    found = [
        each["traceID"].zfill(32) for each in ask.run_query(get_query("Requests over the SLO"))
    ]
    assert sorted(found) == sorted(row.trace_id for row in filled.truth.list_slow_rows(SLO_MS))


def test_exemplars_are_traces(ask: PanelAsker, filled: FilledStack) -> None:
    """The dots on the percentiles lead to traces that Tempo has."""
    text = ask.expand_variables(get_query("TTFT percentiles", "p99"))
    found = {each["labels"]["trace_id"] for each in ask.query_exemplars(text)}
    assert len(found) >= 20
    known = {row.trace_id: row for row in filled.truth.good}
    assert found <= set(known)
    for trace_id in sorted(found)[:10]:
        assert filled.stack.tempo.fetch_trace(trace_id), trace_id


def test_spans_lead_to_metrics(ask: PanelAsker, filled: FilledStack) -> None:
    """What Grafana asks at a click on a router's span: p99 of its service, and mean stages that add up."""
    [file] = (stack_parts.PROVISIONING / "datasources").glob("*.yaml")
    sources = {each["uid"]: each for each in yaml.safe_load(file.read_text("utf-8"))["datasources"]}
    link = sources["tempo"]["jsonData"]["tracesToMetrics"]
    [tag] = link["tags"]
    routed = KnownTruth(row for row in filled.rows if row.routed)
    service = next(
        each.service for each in list_known_records(routed.good[:1], 0) if each.outermost
    )
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
        stages_s = sum(read_stacked_stages(ask, "Mean TTFT by stage").values())
        assert is_near(stages_s, true.compute_mean_s(), 0.01), value


FOUND_WITHIN_S: Final = 5.0
TTFT_MS: Final = 2000
INSTANCE: Final = "search:1"
# Namespace, pod and model of each request; "" is an attribute that it lacks.
REQUESTS: Final = {
    "in-prod": ("prod", "p-1", "a"),
    "in-dev": ("dev", "d-1", "a"),
    "nowhere": ("", "", "a"),
    "refused": ("prod", "p-2", ""),
}


def test_found_within_seconds(filled: FilledStack) -> None:
    """From a request's end, through exporter process and collector, until TraceQL finds it: 5 s."""
    sender = RecordSender(Settings(on=True, endpoint=filled.stack.collector.http))
    try:
        seconds = [measure_search(filled.stack.tempo.url, sender) for _ in range(4)]
    finally:
        sender.close(10)

    # The first one starts the exporter process.
    assert statistics.median(seconds[1:]) <= FOUND_WITHIN_S, seconds


def measure_search(tempo_url: str, sender: RecordSender) -> float:
    """Seconds until a search finds a request that has just ended."""
    record = otlp_requests.build_own_record(10.0, service="search-soon")
    ended = time.monotonic()
    assert sender.send(encode_record(record))
    query = f'{{ span.{keys.REQUEST_ID} = "{record.request_id}" }}'
    now = time.time()
    asked = (tempo_url, query, 20, now - 60, now + 60)
    wait_until(partial(stack_queries.search_traces, *asked), interval_s=0.1)
    return time.monotonic() - ended


@pytest.fixture(scope="module")
def sent(filled: FilledStack) -> dict[str, str]:
    """Names of REQUESTS by the ids of their traces, which Tempo has."""
    traces = {}
    for name, (namespace, pod, model) in REQUESTS.items():
        record = otlp_requests.build_own_record(float(TTFT_MS), model=model)
        if not model:
            kept = {key: each for key, each in record.attributes.items() if key != keys.MODEL}
            record = msgspec.structs.replace(record, attributes=kept)
        place = {metric_table.K8S_NAMESPACE: namespace, metric_table.K8S_POD: pod}
        resource = otlp_requests.build_own_resource(INSTANCE).merge(
            Resource({key: each for key, each in place.items() if each})
        )
        body = encode_spans(build_spans(record, resource))
        assert otlp_requests.post_export(filled.stack.collector.http, body) == 200
        traces[record.trace_id] = name
    wait_until(lambda: len(list_found(build_search(filled), traces)) == len(traces))
    return traces


def build_search(filled: FilledStack, **chosen: str) -> PanelAsker:
    """Asks for REQUESTS; `chosen` filters them."""
    urls, now = (filled.stack.prometheus.url, filled.stack.tempo.url), time.time()
    return PanelAsker(*urls, now - 300, now + 60, {"instance": INSTANCE, "slo": "1000", **chosen})


def list_found(search: PanelAsker, traces: dict[str, str]) -> set[str]:
    """Names of the requests in the table of slow ones."""
    rows = search.run_query(get_query("Requests over the SLO"))
    return {traces[row["traceID"].zfill(32)] for row in rows}


def sum_stages(search: PanelAsker) -> float:
    """Seconds of all stages in the panel of the slow requests' stages."""
    series: list[Any] = search.run_query(get_query("Stages of the slow requests"))
    return sum(sample.get("value", 0.0) for each in series for sample in each["samples"])


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, {"in-prod", "in-dev", "nowhere", "refused"}),
        ({"namespace": "prod"}, {"in-prod", "refused"}),
        ({"namespace": "prod|dev"}, {"in-prod", "in-dev", "refused"}),
        ({"namespace": "pro"}, set()),
        ({"pod": "p-1"}, {"in-prod"}),
        ({"model": "a"}, {"in-prod", "in-dev", "nowhere"}),
        ({"namespace": "prod", "model": "a"}, {"in-prod"}),
        ({"namespace": "dev", "pod": "p-1"}, set()),
    ],
    ids=lambda words: "-".join(sorted(words)),
)
def test_places_and_models(
    filled: FilledStack, sent: dict[str, str], chosen: dict[str, str], expected: set[str]
) -> None:
    """A filter finds what has the chosen value; All finds also what lacks the attribute."""
    assert list_found(build_search(filled, **chosen), sent) == expected
    # Of equally long requests: as many times their length as there are of them.
    length = pytest.approx(len(expected) * TTFT_MS / 1000)
    wait_until(lambda: sum_stages(build_search(filled, **chosen)) == length, 40)
