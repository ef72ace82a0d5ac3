# SPDX-License-Identifier: Apache-2.0
"""Tail sampling by TTFT, and two tiers of collectors: which traces are kept, whether late spans follow
them, and what metrics count.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from math import isclose, sqrt

import msgspec
import pytest

from lab.otlp_sinks import QUICK_FLUSH_CONFIG, MetricSink, SpanSink
from lab.stack.stack_parts import COLLECTOR_CONFIG, SAMPLING_CONFIG
from tests.stack import known_requests, otlp_requests
from tests.stack.running_stack import RunningCollector, StackStarter, wait_until
from ttft_otel.model.names import metric_names, span_names
from ttft_otel.model.record import Record

SCALE_OUT = COLLECTOR_CONFIG.parent / "scale-out"
SAMPLED = (COLLECTOR_CONFIG, SAMPLING_CONFIG)
SHORT_S, LONG_S = 2.0, 60.0  # for a reason to keep a trace
KEEP = 0.1


def build_environment(spans: SpanSink, metrics: MetricSink, wait: float = LONG_S) -> dict[str, str]:
    """Where to send to, and how long to wait."""
    return {**spans.env, **metrics.env, "TTFT_DECISION_WAIT": f"{wait:.0f}s"}


def split_records(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """What is sent at the first token, and what when the stream ends."""
    replace = msgspec.structs.replace
    return (
        [replace(each, server=None, calls=()) for each in records],
        [replace(each, ttft=None) for each in records],
    )


def send_in_portions(collector: RunningCollector, records: Sequence[Record]) -> None:
    """Send `records`, two hundred in one request, as exporters would."""
    otlp_requests.post_records(collector.http, records, portion=200)


def list_span_ids(records: Sequence[Record]) -> dict[str, set[bytes]]:
    """Ids of all spans but pieces (their ids are made anew), by trace."""
    found: dict[str, set[bytes]] = {}
    for each in records:
        mine = found.setdefault(each.trace_id, set())
        mine |= {bytes.fromhex(call.span_id) for call in each.calls}
        mine |= {bytes.fromhex(each.span_id)} if each.server else set()
        mine |= {bytes.fromhex(each.ttft.span_id)} if each.ttft else set()
    return found


def list_kept_ids(spans: SpanSink) -> dict[str, set[bytes]]:
    """Ids of the spans that came out, by trace."""
    return {
        trace: {span.span_id for span in found} for trace, found in spans.group_by_trace().items()
    }


def wait_until_settled(spans: SpanSink) -> None:
    """Wait until nothing more comes out."""
    last = -1

    def is_quiet() -> bool:
        nonlocal last
        before, last = last, len(spans.list_spans())
        return before == last

    wait_until(is_quiet, 30, interval_s=1)


def must_be_kept(row: known_requests.KnownRequest) -> bool:
    """Whether sampling has to keep the trace: slow, failed, or with a failed attempt."""
    return bool(row.error or "router.retry" in row.own or row.ttft >= known_requests.SLO_MS * 1000)


def check_kept_traces(
    rows: Sequence[known_requests.KnownRequest],
    records: Sequence[Record],
    found: dict[str, set[bytes]],
) -> None:
    """Check that all slow and failed traces are kept whole, and of the others the ratio, within 3 sigma."""
    wanted = list_span_ids(records)
    chosen = {row.trace_id for row in rows if must_be_kept(row)}
    rest = [row.trace_id for row in rows if row.trace_id not in chosen]
    lucky = [trace for trace in rest if trace in found]

    assert len(chosen) >= known_requests.SLOW_ROWS + known_requests.FAILED_ROWS
    assert chosen <= found.keys()
    for trace in found:
        assert wanted[trace] <= found[trace]
    spread = sqrt(KEEP * (1 - KEEP) * len(rest))
    assert abs(len(lucky) - KEEP * len(rest)) <= 3 * spread


def check_counts(rows: Sequence[known_requests.KnownRequest], metrics: MetricSink) -> None:
    """Metrics are those of all requests, kept or not."""
    wait_until(lambda: metrics.sum_field(metric_names.TTFT_DURATION) >= len(rows))
    whole = sum(row.ttft for row in rows) / 1e6

    assert metrics.sum_field(metric_names.TTFT_DURATION) == len(rows)
    assert isclose(metrics.sum_field(metric_names.TTFT_DURATION, "sum"), whole)
    wait_until(lambda: isclose(metrics.sum_field(metric_names.STAGE_DURATION, "sum"), whole))


@pytest.mark.full
def test_ratio(bench: StackStarter, sinks: tuple[SpanSink, MetricSink]) -> None:
    """Of 2 000 requests whose halves come apart all slow and failed are kept, and a tenth of the rest."""
    spans, metrics = sinks
    rows = known_requests.build_known_requests()
    records = known_requests.list_known_records(rows)
    env = build_environment(*sinks)
    with bench.start_collector(*SAMPLED, QUICK_FLUSH_CONFIG, env=env) as collector:
        for half in split_records(records):
            send_in_portions(collector, half)
        wait_until_settled(spans)
        check_kept_traces(rows, records, list_kept_ids(spans))
        check_counts(rows, metrics)
        traces = list_kept_ids(spans)
        exemplars = metrics.list_exemplars()
        linked = [each for each in exemplars if any(each.trace_id)]
        assert len(linked) > 20
        assert all(each.span_id in traces[each.trace_id.hex()] for each in linked)
        assert not [each for each in exemplars if not any(each.trace_id)]


def test_late(bench: StackStarter, sinks: tuple[SpanSink, MetricSink]) -> None:
    """Spans that arrive after the decision follow it; slow and failed traces are kept even then."""
    spans, _ = sinks
    draw = random.Random(3)
    slow = [otlp_requests.build_own_record(2_000) for _ in range(5)]
    fast = [
        otlp_requests.build_own_record(20, trace_id=f"{draw.getrandbits(128):032x}")
        for _ in range(200)
    ]
    broken = [otlp_requests.build_own_record(30) for _ in range(5)]  # fails in mid-stream
    early = [
        otlp_requests.build_own_record(5, role="encode", name=span_names.ENCODE, outermost=False)
        for _ in range(5)
    ]
    whole = [  # the router's own, of a request whose encoder was done long before
        msgspec.structs.replace(
            otlp_requests.build_own_record(9_000, role="router"), trace_id=each.trace_id
        )
        for each in early
    ]
    first, last = split_records([*slow, *fast, *broken])
    for place, each in enumerate(last[-5:], len(last) - 5):
        assert each.server
        server = msgspec.structs.replace(each.server, error="disconnected")
        last[place] = msgspec.structs.replace(each, server=server)
    env = build_environment(*sinks, SHORT_S)
    with bench.start_collector(*SAMPLED, QUICK_FLUSH_CONFIG, env=env) as collector:
        send_in_portions(collector, [*first, *early])
        wait_until_settled(spans)
        before = list_kept_ids(spans)
        assert {each.trace_id for each in slow} <= before.keys()
        time.sleep(2 * SHORT_S)
        send_in_portions(collector, [*last, *whole])
        wait_until_settled(spans)
    found = list_kept_ids(spans)

    for half in (*first[:5], *last[:5], *whole, *last[-5:]):
        assert list_span_ids([half])[half.trace_id] <= found[half.trace_id]
    lucky = {each.trace_id for each in fast} & found.keys()
    assert 0 < len(lucky) < 60
    assert lucky <= before.keys()  # late spans change no decision about fast ones
    for half in (*first[5:205], *last[5:205]):
        if half.trace_id in lucky:
            assert list_span_ids([half])[half.trace_id] <= found[half.trace_id]


@pytest.mark.full
def test_two_tiers(bench: StackStarter, sinks: tuple[SpanSink, MetricSink]) -> None:
    """Behind a first tier each of two collectors gets whole traces, and counts are right."""
    one, metrics = sinks
    two = SpanSink()
    rows = [
        row
        for row in known_requests.build_known_requests()
        if row.number % 3 == 0 or must_be_kept(row)
    ]
    records = known_requests.list_known_records(rows)
    layers = (*SAMPLED, SCALE_OUT / "tier2.yaml", QUICK_FLUSH_CONFIG)
    with (
        bench.start_collector(*layers, env=build_environment(one, metrics)) as left,
        bench.start_collector(*layers, env=build_environment(two, metrics)) as right,
    ):
        env = {**metrics.env, "TTFT_TIER2": f"[{left.grpc}, {right.grpc}]"}
        with bench.start_collector(SCALE_OUT / "tier1.yaml", env=env) as front:
            for half in split_records(records):
                send_in_portions(front, half)
            check_counts(rows, metrics)
            wait_until_settled(one)
            wait_until_settled(two)
    halves_of = [list_kept_ids(one), list_kept_ids(two)]
    two.stop()

    assert all(len(each) > 40 for each in halves_of)
    assert not halves_of[0].keys() & halves_of[1].keys()
    check_kept_traces(rows, records, halves_of[0] | halves_of[1])
    owners = {
        labels["collector.instance.id"]
        for labels, _ in metrics.get_series(metric_names.TTFT_DURATION)
    }
    assert len(owners) == 2
