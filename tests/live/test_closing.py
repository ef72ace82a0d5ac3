# SPDX-License-Identifier: Apache-2.0
"""For each kind of request on real servers: stages add up to the TTFT, nothing is unattributed, the trace is
complete; and what is told at its end is what the answer's own `usage` and the client's clock say. One goes
through the real collector to Tempo and Prometheus: exporters have one endpoint and the deployment is shared,
so the spans that its receiver stored are exported again, unchanged.

Last, vLLM's features on one server: LoRA, structured outputs, priorities, pauses, sleep mode, background
responses. Answers are fine, sums close, no hook fails, and nothing is left behind. Elsewhere: prefill and
decode, and encodings over NIXL (test_transfers.py), drafts (test_alone.py), pauses that keep what runs
(test_waits.py). What this machine cannot run is in docs/limits.md.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from lab import ttft_client
from lab.stack import binaries
from lab.stack.go_builds import GoMissingError
from lab.ttft_client import TimedRequest, TimedResponse
from tests.fake_tempo import to_sdk_span
from tests.live.bench import (
    LiveDeployment,
    check_closed,
    make_parent_header,
    make_trace_id,
    read_breakdown,
    read_output_tokens,
)
from tests.live.conftest import ADAPTERS
from tests.stack.known_requests import export_spans
from tests.stack.running_stack import RunningStack, StackStarter, wait_until
from ttft_otel.model import stages, timing
from ttft_otel.model.endpoints import CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH
from ttft_otel.model.names import header_names, keys, metric_names, span_names
from ttft_otel.report.store.database_reader import open_reader
from ttft_otel.stack import stack_queries

pytestmark = pytest.mark.untimed  # bounds are of one exchange with itself
TEXTS: dict[str, dict[str, Any]] = {
    "text": {},
    "text plain": {"stream": False},
    "completion": {"path": COMPLETIONS_PATH},
    "completion plain": {"path": COMPLETIONS_PATH, "stream": False},
}
KINDS: dict[str, dict[str, Any]] = {
    **TEXTS,
    "responses": {"path": RESPONSES_PATH},
    "responses plain": {"path": RESPONSES_PATH, "stream": False},
    "three chunks": {"words": 1300},
    "two answers": {"n": 2},
    "two answers plain": {"n": 2, "stream": False},
    "one image": {"pictures": (1,)},
    "same image again": {"pictures": (1,)},
    "two images": {"pictures": (2, 3)},
    "image plain": {"pictures": (4,), "stream": False},
    "image after a long text": {"pictures": (5,), "words": 1300},
}


def test_each_kind_closes_through_router_and_servers(epd: LiveDeployment) -> None:
    """A request through router, the encoder and prefill_decode leaves one whole trace."""
    traces = {}
    for kind, fields in KINDS.items():
        answer, traces[kind] = epd.send_traced(**fields)
        assert answer.status == 200, kind
    for kind, trace in traces.items():
        encoders = ["encode" for _ in KINDS[kind].get("pictures", ())]
        check_closed(epd.wait_for_roles(trace, "router", "prefill_decode", *encoders))


def test_each_kind_closes_on_cudas_runner(newer: LiveDeployment) -> None:
    """The same holds on one server with the V2 runner and async scheduling."""
    for kind, fields in KINDS.items():
        found = read_breakdown(newer.send_request(newer.front_url, **fields))
        assert found[stages.UNATTRIBUTED] == 0, kind
        assert sum(us for name, us in found.items() if name != "ttft") == found["ttft"], kind


def test_many_in_a_row_and_at_once_leave_whole_traces(epd: LiveDeployment) -> None:
    """After 80 requests in a row and 50 at once no span is missing."""
    traces = [make_trace_id() for _ in range(130)]
    for trace in traces[:80]:
        epd.send_request(epd.front_url, headers=make_parent_header(trace), max_tokens=1)
    many = [TimedRequest(headers=make_parent_header(trace), max_tokens=2) for trace in traces[80:]]
    ttft_client.send_timed_requests(epd.front_url, many)

    wanted = set(stages.STAGE_NAMES) - {
        "encoder.queue", "encoder.compute", "ec.transfer", "kv.transfer", "prefill.stall", "pipeline",
    }  # fmt: skip
    for trace in traces:
        spans = epd.wait_for_roles(trace, "router", "prefill_decode")
        own = [span for span in spans if span["attributes"].get(keys.ROLE) == "prefill_decode"]
        assert wanted <= {span["attributes"].get(keys.STAGE) for span in own}, trace


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


def test_a_live_request_through_the_stack(epd: LiveDeployment, stack: RunningStack) -> None:
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
    [found] = wait_until(partial(stack_queries.search_traces, stack.tempo.url, query), 60)
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


USAGE = {"stream_options": {"include_usage": True}, "ignore_eos": True}
END_NAMES = {keys.OUTPUT_TOKENS, keys.FINISH_REASONS, keys.TIME_PER_OUTPUT_TOKEN_US}


def ask(bench: LiveDeployment, **fields: Any) -> tuple[TimedResponse, dict[str, Any]]:
    """One request to the server that decodes; its answer, and its server span's attributes."""
    answer, trace = bench.send_traced(bench.fleet.get_url("prefill_decode"), **fields)
    spans = bench.wait_for_trace(
        trace, lambda got: any(keys.HTTP_METHOD in span["attributes"] for span in got)
    )
    (server,) = [span for span in spans if keys.HTTP_METHOD in span["attributes"]]
    others = [span for span in spans if span is not server]
    assert not any(END_NAMES & set(span["attributes"]) for span in others)
    return answer, server["attributes"]


@pytest.mark.parametrize(("path", "stream"), [(CHAT_PATH, True), (COMPLETIONS_PATH, False)])
def test_end(epd: LiveDeployment, path: str, stream: bool) -> None:
    """Tokens are those of `usage`; decode steps of 30 ms make the time per token at least that."""
    epd.control.set_injections({"forward": 30})
    extra = USAGE if stream else {"ignore_eos": True}
    answer, reported = ask(epd, path=path, stream=stream, max_tokens=12, extra=extra)

    assert reported[keys.OUTPUT_TOKENS] == read_output_tokens(answer) == 12
    assert json.loads(reported[keys.FINISH_REASONS]) == ["length"]
    assert reported[keys.TIME_PER_OUTPUT_TOKEN_US] >= 30_000
    # What the server says of the time before its first output and after it fits into the client's exchange.
    # The client's own first chunk is no bound: it may come late. Rounding: half a microsecond a token.
    cut = read_breakdown(answer)
    until_output_us = cut["ttft"] - cut.get("egress", 0)
    assert until_output_us + reported[keys.TIME_PER_OUTPUT_TOKEN_US] * 11 <= answer.total_us + 6


def test_several_generations(epd: LiveDeployment) -> None:
    """With n = 2 tokens add up, and the steps are nobody's own."""
    answer, reported = ask(epd, stream=False, n=2, max_tokens=5, extra={"ignore_eos": True})

    assert reported[keys.OUTPUT_TOKENS] == read_output_tokens(answer) == 10
    assert json.loads(reported[keys.FINISH_REASONS]) == ["length"] * 2
    assert keys.TIME_PER_OUTPUT_TOKEN_US not in reported


def test_stop_string(epd: LiveDeployment) -> None:
    """A stop string, found in the API server itself, ends the generation with vLLM's word for it."""
    fields = {"stream": False, "path": COMPLETIONS_PATH, "max_tokens": 12}
    extra = {"ignore_eos": True, "temperature": 0, "seed": 1}
    text = epd.send_request(epd.front_url, extra=extra, **fields).text
    stop = text[len(text) // 2 :][:3]
    answer, reported = ask(epd, extra={**extra, "stop": [stop]}, **fields)

    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    assert json.loads(reported[keys.FINISH_REASONS]) == ["stop"]
    assert reported[keys.OUTPUT_TOKENS] == read_output_tokens(answer) <= 12


@pytest.mark.full  # its first one takes ten seconds
def test_beam_search(epd: LiveDeployment) -> None:
    """The steps of a beam search are not the answer's: nothing is told of them."""
    extra = {"use_beam_search": True, "ignore_eos": True}
    answer, reported = ask(epd, stream=False, path=COMPLETIONS_PATH, n=2, max_tokens=4, extra=extra)

    assert answer.status == 200
    assert not END_NAMES & set(reported)


def test_client_leaves(epd: LiveDeployment) -> None:
    """Of a generation that the client cut off vLLM tells no end; the request has an error."""
    epd.control.set_injections({"forward": 50})
    answer, reported = ask(epd, max_tokens=200, abort_s=1.0, extra={"ignore_eos": True})

    assert answer.aborted
    assert reported[keys.ERROR_TYPE] == keys.ERROR_INCOMPLETE
    assert not END_NAMES & set(reported)


def test_unknown_model(epd: LiveDeployment) -> None:
    """A model that only the client knows is on no span, neither of the router nor of the server."""
    for url in (epd.front_url, epd.fleet.get_url("prefill_decode")):
        answer, trace = epd.send_traced(url, model="made-up", stream=False)
        assert answer.status == 404
        spans = epd.wait_for_spans(trace, "ttft")
        assert not any("made-up" in str(span["attributes"].values()) for span in spans)


LONG_TOKENS = 4000  # some ten seconds, unless it is aborted

FEATURES: dict[str, dict[str, Any]] = {
    "adapter": {"model": ADAPTERS[0]},
    "adapter plain": {"model": ADAPTERS[0], "stream": False},
    "choice": {"extra": {"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": False}},
    "urgent": {"extra": {"priority": -5}},
    "two answers of an adapter": {"model": ADAPTERS[0], "n": 2},
    "completion": {"path": ttft_client.COMPLETIONS_PATH, "words": 80},
    "responses": {"path": ttft_client.RESPONSES_PATH},
}


@pytest.fixture
def watched(features: LiveDeployment) -> Iterator[LiveDeployment]:
    """A server of which afterwards no hook has failed, nothing awaits a first token, and all still closes."""
    yield features
    wait_until(lambda: not features.sum_metric(metric_names.PENDING))
    assert features.sum_metric(f"{metric_names.HOOK_ERRORS}_total") == 0
    assert features.list_complaints("mono") == []
    after = read_breakdown(features.send_request(features.front_url, max_tokens=2))
    assert after[stages.UNATTRIBUTED] == 0


def test_each_feature_closes(watched: LiveDeployment) -> None:
    """Server-Timing and span add up, with nothing unattributed."""
    traces = {}
    for kind, fields in FEATURES.items():
        answer, traces[kind] = watched.send_traced(**fields)
        assert answer.status == 200, (kind, answer.body[:300])
        assert kind != "choice" or answer.text in ("yes", "no")
        assert read_breakdown(answer)[stages.UNATTRIBUTED] == 0, kind
    for kind, trace in traces.items():
        found = watched.fetch_ttft(trace)
        assert found[keys.UNATTRIBUTED_US] == 0 and keys.ERROR_TYPE not in found, kind


def test_a_pause_aborts(watched: LiveDeployment) -> None:
    """/pause aborts what runs and what waits: who has no token has no TTFT, and died where it was."""
    try:
        with (
            watched.run_request(max_tokens=LONG_TOKENS) as running,
            watched.run_request() as waiting,
        ):
            watched.call("/pause?mode=abort")
            (first, _), (second, trace) = running.result(), waiting.result()
    finally:
        watched.call("/resume")

    assert first.status == second.status == 200
    assert read_breakdown(first)[stages.UNATTRIBUTED] == 0
    assert timing.reports_no_token(second.headers[header_names.SERVER_TIMING])
    found = watched.fetch_ttft(trace)
    assert (found[keys.ERROR_TYPE], found[keys.DIED_IN]) == ("error", "prefill.queue")


def test_an_engine_that_sleeps_is_a_wait(watched: LiveDeployment) -> None:
    """What comes meanwhile waits in the queue, and is told so."""
    watched.call("/sleep?level=0&mode=abort")  # level 0 is all that a CPU can
    assert watched.call("/is_sleeping", "GET") == {"is_sleeping": True}
    timer = threading.Timer(0.8, watched.call, ("/wake_up?tags=scheduling",))
    timer.start()
    try:
        found = read_breakdown(watched.send_request(watched.front_url, max_tokens=2))
    finally:
        timer.join()

    assert found["prefill.queue"] > 400_000
    assert found[stages.UNATTRIBUTED] == 0


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_background_response(watched: LiveDeployment, is_cancelled: bool) -> None:
    """It is answered at once, and traced all the same, below its request, whichever is first."""
    answer, trace = watched.send_traced(
        path=ttft_client.RESPONSES_PATH,
        stream=False,
        max_tokens=LONG_TOKENS if is_cancelled else 8,
        # A random model may stop at any token otherwise.
        extra={"background": True, "store": True, "ignore_eos": True},
    )
    assert answer.status == 200, answer.body[:300]
    place = f"/v1/responses/{answer.json()['id']}"
    assert answer.json()["status"] == "queued"
    if is_cancelled:
        time.sleep(0.3)
        assert watched.call(f"{place}/cancel")["status"] == "cancelled"
    else:
        running = ("queued", "in_progress")
        wait_until(lambda: watched.call(place, "GET")["status"] not in running)
    spans = watched.wait_for_trace(
        trace, lambda got: any(keys.DIRECT in s["attributes"] for s in got) and len(got) > 2
    )

    (http,) = [span for span in spans if span["kind"] == "server"]
    assert http["name"] == "POST /v1/responses" and keys.ERROR_TYPE not in http["attributes"]
    (own,) = [span for span in spans if keys.DIRECT in span["attributes"]]
    assert own["parent_id"] == http["span_id"]
    assert (own["attributes"].get(keys.ERROR_TYPE) == keys.ERROR_CANCELLED) is is_cancelled
    assert watched.fetch_ttft(trace)[keys.UNATTRIBUTED_US] == 0
