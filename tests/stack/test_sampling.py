# SPDX-License-Identifier: Apache-2.0
"""Tail sampling by TTFT, and two tiers of collectors: what is kept, what follows late, what is counted."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from math import isclose, sqrt
from typing import Any

import msgspec
import pytest

from tests.stack import known, send
from tests.stack.bench import Bench, Collector, until
from tests.stack.sink import QUICK, Metrics, Spans
from tests.stack.test_collector import TIER1, TIER2
from ttft_otel import names
from ttft_otel.lab.stack.parts import COLLECTOR_CONFIG, SAMPLING
from ttft_otel.record import Record

SHORT_S, LONG_S = 2.0, 60.0  # for a reason to keep a trace
KEEP = 0.1


@pytest.fixture
def sinks() -> Iterator[tuple[Spans, Metrics]]:
    """Fresh ones: these tests count."""
    spans, metrics = Spans(), Metrics()
    yield spans, metrics
    metrics.close()
    spans.stop()


def environment(spans: Spans, metrics: Metrics, wait: float = LONG_S) -> dict[str, str]:
    """Where to send to, and how long to wait."""
    return {**spans.env, **metrics.env, "TTFT_DECISION_WAIT": f"{wait:.0f}s"}


def halves(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """What is sent at the first token, and what when the stream ends."""
    replace = msgspec.structs.replace
    return (
        [replace(each, server=None, calls=()) for each in records],
        [replace(each, ttft=None) for each in records],
    )


def sent(collector: Collector, records: Sequence[Record]) -> None:
    """In portions, as exporters would."""
    for at in range(0, len(records), 200):
        assert send.post(collector.http, send.ours(records[at : at + 200])) == 200


def spans_of(records: Sequence[Record]) -> dict[str, set[bytes]]:
    """Ids of all spans but pieces (their ids are made anew), by trace."""
    found: dict[str, set[bytes]] = {}
    for each in records:
        mine = found.setdefault(each.trace_id, set())
        mine |= {bytes.fromhex(call.span_id) for call in each.calls}
        mine |= {bytes.fromhex(each.span_id)} if each.server else set()
        mine |= {bytes.fromhex(each.ttft.span_id)} if each.ttft else set()
    return found


def kept(spans: Spans) -> dict[str, set[bytes]]:
    """Ids of the spans that came out, by trace."""
    return {trace: {span.span_id for span in found} for trace, found in spans.traces().items()}


def settle(spans: Spans) -> None:
    """Wait until nothing more comes out."""
    last = -1

    def quiet() -> bool:
        nonlocal last
        before, last = last, len(spans.spans())
        return before == last

    until(quiet, 30, every=1)


def must(row: known.Known) -> bool:
    """Whether sampling has to keep it: slow, failed, or with an attempt that failed."""
    return bool(row.error or "router.retry" in row.own or row.ttft >= known.SLO_MS * 1000)


def check(
    rows: Sequence[known.Known], records: Sequence[Record], found: dict[str, set[bytes]]
) -> None:
    """Slow and failed ones are kept, all of them and whole; of the rest the ratio, within 3 sigma."""
    wanted = spans_of(records)
    chosen = {row.trace_id for row in rows if must(row)}
    rest = [row.trace_id for row in rows if row.trace_id not in chosen]
    lucky = [trace for trace in rest if trace in found]

    assert len(chosen) >= known.SLOW + known.FAILED
    assert chosen <= found.keys()
    for trace in found:
        assert wanted[trace] <= found[trace]
    spread = sqrt(KEEP * (1 - KEEP) * len(rest))
    assert abs(len(lucky) - KEEP * len(rest)) <= 3 * spread


def counted(rows: Sequence[known.Known], metrics: Metrics) -> None:
    """Metrics are those of all requests, kept or not."""
    until(lambda: metrics.total(names.METRIC_TTFT) >= len(rows))
    whole = sum(row.ttft for row in rows) / 1e6

    assert metrics.total(names.METRIC_TTFT) == len(rows)
    assert isclose(metrics.total(names.METRIC_TTFT, "sum"), whole)
    until(lambda: isclose(metrics.total(names.METRIC_STAGE, "sum"), whole))


def test_ratio(bench: Bench, sinks: tuple[Spans, Metrics]) -> None:
    """Of 2 000 requests whose halves come apart all slow and failed are kept, and a tenth of the rest."""
    spans, metrics = sinks
    rows = known.table()
    records = [told.record for row in rows for told in known.tell(row, time.time_ns())]
    with bench.collector(COLLECTOR_CONFIG, SAMPLING, QUICK, env=environment(*sinks)) as collector:
        assert isinstance(collector, Collector)
        for half in halves(records):
            sent(collector, half)
        settle(spans)
        check(rows, records, kept(spans))
        counted(rows, metrics)
        traces = kept(spans)
        exemplars = metrics.exemplars()
        linked = [each for each in exemplars if any(each.trace_id)]
        assert len(linked) > 20
        assert all(each.span_id in traces[each.trace_id.hex()] for each in linked)
        assert not [each for each in exemplars if not any(each.trace_id)]


def test_late(bench: Bench, sinks: tuple[Spans, Metrics]) -> None:
    """What comes after the wait: spans of kept traces follow, slow and failed ones are kept even then."""
    spans, _ = sinks
    draw = random.Random(3)
    slow = [send.record(2_000) for _ in range(5)]
    fast = [send.record(20, trace_id=f"{draw.getrandbits(128):032x}") for _ in range(200)]
    broken = [send.record(30) for _ in range(5)]  # fails in mid-stream
    early = [send.record(5, role="encode", name=names.ENCODE, outermost=False) for _ in range(5)]
    whole = [  # the router's own, of a request whose encoder was done long before
        msgspec.structs.replace(send.record(9_000, role="router"), trace_id=each.trace_id)
        for each in early
    ]
    first, last = halves([*slow, *fast, *broken])
    for place, each in enumerate(last[-5:], len(last) - 5):
        assert each.server
        server = msgspec.structs.replace(each.server, error="disconnected")
        last[place] = msgspec.structs.replace(each, server=server)
    with bench.collector(
        COLLECTOR_CONFIG, SAMPLING, QUICK, env=environment(*sinks, SHORT_S)
    ) as collector:
        assert isinstance(collector, Collector)
        sent(collector, [*first, *early])
        settle(spans)
        before = kept(spans)
        assert {each.trace_id for each in slow} <= before.keys()
        time.sleep(2 * SHORT_S)
        sent(collector, [*last, *whole])
        settle(spans)
    found = kept(spans)

    for half in (*first[:5], *last[:5], *whole, *last[-5:]):
        assert spans_of([half])[half.trace_id] <= found[half.trace_id]
    lucky = {each.trace_id for each in fast} & found.keys()
    assert 0 < len(lucky) < 60
    assert lucky <= before.keys()  # late spans change no decision about fast ones
    for half in (*first[5:205], *last[5:205]):
        if half.trace_id in lucky:
            assert spans_of([half])[half.trace_id] <= found[half.trace_id]


def test_two_tiers(bench: Bench, sinks: tuple[Spans, Metrics]) -> None:
    """Behind a first tier two collectors share the traces: each has its own whole, and counts are right."""
    one, metrics = sinks
    two = Spans()
    rows = [row for row in known.table() if row.number % 3 == 0 or must(row)]
    records = [told.record for row in rows for told in known.tell(row, time.time_ns())]
    layers: tuple[Any, ...] = (COLLECTOR_CONFIG, SAMPLING, TIER2, QUICK)
    with (
        bench.collector(*layers, env=environment(one, metrics)) as left,
        bench.collector(*layers, env=environment(two, metrics)) as right,
    ):
        assert isinstance(left, Collector) and isinstance(right, Collector)
        env = {**metrics.env, "TTFT_TIER2": f"[{left.grpc}, {right.grpc}]"}
        with bench.collector(TIER1, env=env) as front:
            assert isinstance(front, Collector)
            for half in halves(records):
                sent(front, half)
            counted(rows, metrics)
            settle(one)
            settle(two)
    halves_of = [kept(one), kept(two)]
    two.stop()

    assert all(len(each) > 40 for each in halves_of)
    assert not halves_of[0].keys() & halves_of[1].keys()
    check(rows, records, halves_of[0] | halves_of[1])
    owners = {labels["collector.instance.id"] for labels, _ in metrics.series(names.METRIC_TTFT)}
    assert len(owners) == 2
