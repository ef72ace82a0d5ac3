# SPDX-License-Identifier: Apache-2.0
"""A live request through the encoder, prefill_decode and router, sent through the real collector to Tempo
and Prometheus.

Exporters have one endpoint and the deployment is shared, so the spans that its receiver stored are
exported again, unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from lab.stack import binaries
from lab.stack.go_builds import GoMissingError
from tests.fake_tempo import to_sdk_span
from tests.live.bench import LiveDeployment as Live
from tests.stack.known_requests import export_spans
from tests.stack.running_stack import RunningStack, StackStarter, wait_until
from ttft_otel.model.names import keys, span_names
from ttft_otel.report.store.database_reader import open_reader

pytestmark = pytest.mark.untimed


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """Collector, Tempo and Prometheus for this module."""
    try:
        programs = binaries.gather_binaries(lambda _: None)
    except GoMissingError as error:
        pytest.skip(f"{error}; then scripts/stack build")
    bench = StackStarter(programs, tmp_path_factory.mktemp("stack"))
    try:
        yield bench.start_stack(env={"TTFT_METRICS_INTERVAL": "2s"})
    finally:
        bench.close()


def get_tempo_attribute(span: dict[str, Any], name: str) -> Any:
    """An attribute of a span in Tempo's JSON."""
    [found] = [each["value"] for each in span["attributes"] if each["key"] == name]
    [(kind, plain)] = found.items()
    return int(plain) if kind == "intValue" else plain


def test_a_live_request_through_the_stack(epd: Live, stack: RunningStack) -> None:
    """One trace is found by request ID; its ttft_ms is the router's TTFT rounded down; metrics add up."""
    answer, trace_id = epd.send_traced(pictures=(epd.new_picture_seed(),), max_tokens=2)
    epd.wait_for_roles(trace_id, "router", "encode", "prefill_decode")
    report = epd.get_json(f"/ttft_report/{answer.request_id}", "router")
    own = round(report["combined"]["ttft_ms"] * 1000)
    with open_reader(epd.fleet.database) as database:
        stored = database.find_trace(trace_id)
    assert stored is not None
    export_spans(stack.collector.http, [to_sdk_span(span) for span in stored.spans])

    wait_until(lambda: len(stack.tempo.fetch_trace(trace_id)) == len(stored.spans), 60)
    spans = stack.tempo.fetch_trace(trace_id)
    query = f'{{ span.{keys.REQUEST_ID} = "{answer.request_id}" }}'
    [found] = wait_until(partial(stack.tempo.search_traces, query), 60)
    assert found["traceID"].zfill(32) == trace_id

    trunks = [span for span in spans if span["name"] in (span_names.TTFT, span_names.ENCODE)]
    for span in trunks:
        total, *parts = (
            get_tempo_attribute(span, name)
            for name in (keys.TOTAL_US, "ttft_stage_sum_us", "ttft_unattributed_us")
        )
        assert get_tempo_attribute(span, "ttft_ms") == total // 1000
        assert sum(parts) == total
    [outermost] = [span for span in trunks if get_tempo_attribute(span, keys.OUTERMOST)]
    assert get_tempo_attribute(outermost, keys.ROLE) == "router"
    assert get_tempo_attribute(outermost, "ttft_ms") == own // 1000

    count = "sum(histogram_count(ttft_duration_seconds))"
    wait_until(lambda: stack.prometheus.query_number(count) == 1, 30)
    seconds = "sum(histogram_sum(ttft_duration_seconds))"
    assert stack.prometheus.query_number(seconds) == pytest.approx(own / 1e6, abs=2e-6)
    stages = "sum(histogram_sum(ttft_stage_duration_seconds))"
    wait_until(lambda: stack.prometheus.query_number(stages), 30)
    assert stack.prometheus.query_number(stages) == pytest.approx(own / 1e6, abs=1e-4)
    served = stack.prometheus.query_vector(
        'group by (ttft_instance) (ttft_stage_duration_seconds{ttft_leg!=""})'
    )
    places = {each["metric"].get("ttft_instance") for each in served}
    legs = {
        epd.fleet.get_url(name).removeprefix("http://") for name in ("encode", "prefill_decode")
    }
    assert places == legs
