# SPDX-License-Identifier: Apache-2.0
"""Traces of other products are shown with our stages: exact sums, one request each, no reasons.

tests/golden/foreign/ has what their own code made. vllm.json: OutputProcessor.do_tracing() of vLLM 0.32, with
the times of two requests. sglang.json: req_time_stats.py and trace.py of SGLang 0.5.23, without an engine:
one process with the calls of its tokenizer manager, two with those of its schedulers, which slept; a
plain request, one in three chunks, and a prefill and a decode instance that work for one request.
dynamo.json: the frontend and a worker of Dynamo 1.6.1 with vLLM 0.32, two requests. Names of hosts and
processes, links and events are left out. Traces of the others are made up by their documents.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from sample_records import RunningServer, fetch_page, fill_database

from tests.commands.test_answers import make_record
from tests.fake_tempo import FILES, FakeTempo, read_golden, to_sdk_span
from ttft_otel.commands import main as cli
from ttft_otel.model.names import keys, span_names
from ttft_otel.report.assemble.request_assembly import MAX_DURATION_US
from ttft_otel.report.breakdown_source import open_source
from ttft_otel.report.report_types import Request, SourceChoice, StoredSpan
from ttft_otel.report.store.database_reader import (
    RequestFilter,
    build_stored_trace,
    open_reader,
)
from ttft_otel.report.store.span_store import SpanStore
from ttft_otel.report.tempo import tempo_source
from ttft_otel.report.tempo.tempo_client import TempoError

MS = 1_000_000
BEGIN_S = int(time.time()) - 600
TOTAL = "gen_ai.latency.time_to_first_token"
QUEUE = "gen_ai.latency.time_in_queue"


def list_requests(spans: list[StoredSpan]) -> list[Request]:
    """The requests of all traces, by their begin."""
    traces: dict[str, list[StoredSpan]] = {}
    for span in spans:
        traces.setdefault(span.trace_id, []).append(span)
    found = [
        each for name, some in traces.items() for each in build_stored_trace(name, some).requests
    ]
    return sorted(found, key=lambda request: request.start_ns)


def make_span(
    number: int,
    name: str,
    scope: str,
    parent: int = 0,
    at: tuple[int, int] = (0, 1000),
    **more: Any,
) -> StoredSpan:
    """A span of another product. at: begin and end in ms."""
    start_ns, end_ns = (10**18 + each * MS for each in at)
    parent_id = f"{parent:016x}" if parent else ""
    return StoredSpan(
        "a" * 32, f"{number:016x}", parent_id, name, 2, start_ns, end_ns, scope=scope,
        attributes={key.replace("__", "."): value for key, value in more.items()},
    )  # fmt: skip


def make_request(scope: str = "vllm.tracing.otel", **more: Any) -> StoredSpan:
    """A span of a request with a TTFT of 200 ms."""
    return make_span(1, "llm_request", scope, gen_ai__latency__time_to_first_token=0.2, **more)


def test_sglang() -> None:
    """A piece of a stage counts once, until the first token: of nested ones the inner one."""
    spans = read_golden("sglang")
    plain, chunked, split = list_requests(spans)
    forward = next(
        span
        for span in spans
        if span.name == "prefill_forward" and span.trace_id == chunked.trace_id
    )

    words = {"preprocess", "ipc", "prefill.queue", "prefill.compute"}
    assert set(plain.stages) == set(chunked.stages) == words
    length = forward.end_ns // 1000 - forward.start_ns // 1000
    assert abs(chunked.stages["prefill.compute"] - length) <= 1
    assert chunked.model == "tiny" and chunked.request_id == "b1b2c3d4e5f60718"
    assert split.roles == ("prefill", "decode")
    assert set(split.stages) == {"preprocess", "ipc", "kv.transfer", "prefill.queue"}


@pytest.mark.parametrize("name", FILES)
def test_sums_are_exact(name: str) -> None:
    """Stages and unattributed time are their TTFT, of every request and leg; and each is complete."""
    found = list_requests(read_golden(name))

    assert found and all(each.closed and not each.pending for each in found)
    by_id = {span.span_id: span for span in read_golden(name)}
    for leg in (leg for each in found for leg in each.legs):
        told = by_id[f"{int(leg.span_id, 16) ^ 0x7474_6674_0000_0000:016x}"]
        ms = told.attributes.get("ttft_ms") or told.attributes[TOTAL] * 1000
        assert leg.ttft_us == round(float(ms) * 1000) and not leg.reasons and not leg.held


def test_vllm_and_dynamo() -> None:
    """vLLM tells the queue and the prompt, Dynamo's frontend no stage; the rest is unattributed."""
    first, second = list_requests(read_golden("vllm"))
    told, other = list_requests(read_golden("dynamo"))

    assert (first.ttft_us, first.unattributed_us) == (250_000, 30_000)
    assert first.stages == {"prefill.queue": 100_000, "prefill.compute": 120_000}
    assert (second.ttft_us, second.request_id) == (81_234, "cmpl-2")
    assert [leg.foreign for leg in second.legs] == ["vLLM's own tracing"]
    assert (told.ttft_us, other.ttft_us) == (16_690, 58_070)
    assert not told.stages and told.unattributed_us == told.ttft_us
    assert told.request_id and [leg.foreign for leg in told.legs] == ["Dynamo"]


@pytest.mark.parametrize("name", FILES)
def test_from_tempo(name: str, tmp_path: Path) -> None:
    """Tempo's requests are the store's: the newest, by ID, and of a window."""
    spans = read_golden(name)
    path = fill_database(tmp_path / "spans.db", spans=spans)
    window = RequestFilter(
        since_ns=min(span.start_ns for span in spans) - 10**9,
        until_ns=max(span.end_ns for span in spans) + 10**9,
    )
    with FakeTempo(retention="") as tempo, open_reader(path) as stored:
        tempo.add([to_sdk_span(span) for span in spans])
        with open_source(SourceChoice(tempo=tempo.url)) as searched:
            expected = stored.list_latest(window)
            assert expected and searched.list_latest(window) == expected
            samples = (each.sample_window(window).requests for each in (searched, stored))
            first, second = (sorted(one.request.start_ns for one in some) for some in samples)
            assert first == second == sorted(each.start_ns for each in expected)
            named = expected[0]
            assert searched.find_trace(named.trace_id) == stored.find_trace(named.trace_id)
            models = replace(window, model="tiny")
            assert searched.list_latest(models) == stored.list_latest(models)


def test_a_window_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trace of others is read once for a window, eight at a time, and too many are refused."""
    first, second = read_golden("vllm", (BEGIN_S + 30) * 10**9)
    window = RequestFilter(since_ns=BEGIN_S * 10**9)
    with FakeTempo(retention="") as tempo:
        many = [replace(first, trace_id=f"{number:032x}") for number in range(1, 20)]
        tempo.add([to_sdk_span(span) for span in [*many, second]])
        with open_source(SourceChoice(tempo=tempo.url)) as searched:
            assert searched.sample_window(window).coverage.requests == 20
        read = [path for path, _ in tempo.asked if path.startswith("/api/traces/")]
        assert len(read) == len(set(read)) == 20
        monkeypatch.setattr(tempo_source, "MAX_WHOLE_TRACES", 19)
        with open_source(SourceChoice(tempo=tempo.url)) as searched:
            with pytest.raises(TempoError, match="more than 19 traces .* shorter window"):
                searched.sample_window(window)


@pytest.mark.parametrize("name", FILES)
def test_any_order_of_arrival(name: str, store: SpanStore) -> None:
    """Spans that come one by one, the last first, give the same requests as all at once."""
    spans = read_golden(name)
    for span in sorted(spans, key=lambda each: -each.end_ns):
        store.add([span]).result(20)

    with open_reader(store.path) as stored:
        found = stored.list_latest(RequestFilter())
        assert sorted(found, key=lambda each: each.start_ns) == list_requests(spans)
        assert stored.find_request(found[0].request_id) == found[0]


def test_other_products() -> None:
    """TensorRT-LLM by attributes, Dynamo by its instance's TTFT with what the engine says below it."""
    (trt,) = list_requests(
        [
            make_request(
                "trt.llm",
                gen_ai__latency__time_in_queue=0.05,
                gen_ai__latency__kv_cache_transfer_time=0.03,
            )
        ]
    )
    (dynamo,) = list_requests(
        [
            make_span(9, "router.route_request", "any"),
            make_span(
                2, "engine.generate", "any", 9, ttft_ms=250.0, disagg_role="agg", model="tiny"
            ),
            replace(make_request(gen_ai__latency__time_in_queue=0.1), parent_id=f"{2:016x}"),
        ]
    )

    assert trt.stages == {"prefill.queue": 50_000, "kv.transfer": 30_000} and trt.closed
    assert (dynamo.ttft_us, dynamo.stages, dynamo.model) == (
        250_000, {"prefill.queue": 100_000}, "tiny",
    )  # fmt: skip
    assert dynamo.closed and dynamo.roles == ("mono",)


def test_llm_d() -> None:
    """Its legs give vLLM's spans their roles, and its router's span is the time before."""
    router = "llm-d-router/pkg/epp/handlers"
    spans = [
        make_span(10, "gateway.request", router, at=(0, 900)),
        make_span(11, "gateway.request_orchestration", router, 10, (1, 6)),
        make_span(12, "forward_request", "llm-d-router/pkg/sidecar/proxy", 10, (10, 900)),
        replace(make_span(13, "prefill", "llm-d-router/pkg/sidecar/proxy", 12, (12, 300)), kind=1),
        replace(make_request(at=(20, 290)), span_id=f"{3:016x}", parent_id=f"{13:016x}"),
        replace(make_span(14, "decode", "llm-d-router/pkg/sidecar/proxy", 12, (300, 900)), kind=1),
        replace(make_request(at=(310, 890)), span_id=f"{4:016x}", parent_id=f"{14:016x}"),
    ]
    (request,) = list_requests(spans)

    assert request.roles == ("prefill", "decode") and request.closed
    assert request.ttft_us == 490_000 and request.unattributed_us == 490_000
    assert request.before and request.before.us == 10_000
    shown = build_stored_trace("a" * 32, spans).spans
    stages = {span.name: span.attributes.get(keys.STAGE) for span in shown}
    assert stages["gateway.request_orchestration"] == "router.route"


def make_ours(role: str, ms: int, unattributed_ms: int) -> StoredSpan:
    """A server's `ttft` span of ours."""
    return make_span(
        7, span_names.TTFT, span_names.SCOPE, at=(0, ms),
        ttft__total_us=ms * 1000, ttft__unattributed_us=unattributed_ms * 1000, ttft__role=role,
        ttft__outermost=True,
    )  # fmt: skip


def test_ours_wins() -> None:
    """With our hooks and vLLM's own tracing on, one request is counted, with our stages."""
    ours = make_ours("mono", 210, 210)
    (request,) = list_requests([ours, make_request()])
    (alone,) = list_requests([make_request()])

    assert request.ttft_us == 210_000 and not request.legs[0].foreign
    assert alone.ttft_us == 200_000


def test_below_our_router() -> None:
    """Behind our router their stages come out of what it could not attribute, and the sum stays its own."""
    above = make_ours("router", 230, 220)
    above.attributes["ttft.router.route_us"] = 10_000
    engine = replace(make_request(gen_ai__latency__time_in_queue=0.1), parent_id=above.span_id)
    (request,) = list_requests([above, engine])

    assert request.stages == {"router.route": 10_000, "mono.prefill.queue": 100_000}
    assert request.ttft_us == 230_000 and request.closed


def test_odd_lengths() -> None:
    """What cannot be a length, or does not fit, is unattributed; without a TTFT there is no request."""
    for queue, stages in (
        (0.2, {"prefill.queue": 200_000}),
        (0.201, {}),  # more than the TTFT
        *((odd, {}) for odd in (-0.1, "0.1", True, 10**30)),
    ):
        (request,) = list_requests([make_request(gen_ai__latency__time_in_queue=queue)])
        assert request.stages == stages and request.closed, queue
    for total in (0, -1.0, "0.2", True, MAX_DURATION_US, float("nan"), -float("inf")):
        span = make_span(1, "llm_request", "vllm.x", gen_ai__latency__time_to_first_token=total)
        assert list_requests([span]) == [], total
    assert list_requests([make_request("my.agent")]) == []
    # Of two requests that have each other as a parent both stay, whichever comes first.
    spans = [
        make_span(1, "http-request", "", 2, ttft_ms="120"),
        make_span(2, "http-request", "", 1, at=(2000, 3000), ttft_ms="80"),
    ]
    assert [each.ttft_us for each in list_requests(spans)] == [120_000, 80_000]
    assert list_requests(spans) == list_requests(spans[::-1])


NAMES = (
    ("llm_request", "vllm.x", {TOTAL: 0.2, QUEUE: 0.05}),
    ("Req 1", "sglang", {TOTAL: 0.3}),
    ("prefill_waiting", "sglang", {}),
    ("tokenize", "sglang", {}),
    ("http-request", "", {"ttft_ms": "120"}),
    ("engine.generate", "", {"ttft_ms": "80", "disagg_role": "decode"}),
    ("llm_d.pd_proxy.decode", "llm-d", {}),
    ("POST /v1", "some.client", {}),
)
TIMES = st.sampled_from([(0, 400), (0, 100), (50, 100), (50, 300)])
ANY_SPAN = st.builds(
    lambda number, kind, parent, at: replace(
        make_span(number, kind[0], kind[1], parent, at), attributes=dict(kind[2])
    ),
    st.integers(1, 6),
    st.sampled_from(NAMES),
    st.integers(0, 7),  # of the span itself, of a loop, of one that is not there, or none
    TIMES,
)


@given(st.lists(ANY_SPAN, min_size=1, max_size=9), st.randoms(use_true_random=False))
def test_any_order(spans: list[StoredSpan], random: Random) -> None:
    """Loops of parents, missing ones and IDs that come twice: the order of spans changes nothing."""
    twice = [*spans, *spans[:2]]
    found = build_stored_trace("a" * 32, twice)
    random.shuffle(twice)
    other = build_stored_trace("a" * 32, twice)

    assert other.requests == found.requests
    assert sorted(map(repr, other.spans)) == sorted(map(repr, found.spans))
    for request in found.requests:
        assert sum(request.stages.values()) + request.unattributed_us == request.ttft_us


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """A database with 40 requests that vLLM's own tracing has told."""
    (golden, _) = read_golden("vllm")
    spans = [
        replace(
            golden, trace_id=f"{number + 1:032x}", start_ns=(BEGIN_S + number) * 10**9,
            attributes=golden.attributes | {TOTAL: 0.24 + number / 1e3, QUEUE: 0.01 + number / 1e3},
        )
        for number in range(40)
    ]  # fmt: skip
    return fill_database(tmp_path / "told.db", spans=spans)


def run(*words: str, width: int = 300) -> Result:
    """Run a command in a terminal so wide."""
    return CliRunner(env={"COLUMNS": str(width)}).invoke(cli.main, words)


@pytest.mark.parametrize(
    "words",
    [("explain",), ("explain", "--trace", f"{7:032x}"), ("whatif", "--instances", "+1")],
)
def test_reasons_are_refused(told: Path, words: tuple[str, ...]) -> None:
    """explain and whatif say that these spans do not tell why."""
    found = run(*words, "--db", str(told))

    assert found.exit_code and "told by vLLM's own tracing" in found.output
    assert "not why" in found.output


def test_others_are_left_out(told: Path) -> None:
    """explain answers of ours as without the others, and says how many these are."""
    records = [
        msgspec.structs.replace(make_record(number), trace_id=f"{number + 999:032x}")
        for number in range(80)
    ]
    alone = fill_database(told.with_name("alone.db"), *records)
    ours = fill_database(Path(shutil.copy(told, told.with_name("ours.db"))), *records)
    mixed, pure = (
        json.loads(run("explain", "--json", "--db", str(path)).stdout) for path in (ours, alone)
    )

    assert mixed["coverage"]["left_out"]["foreign"] == 40
    assert mixed["cause"] == pure["cause"]
    shown = run("explain", "--db", str(ours)).output
    assert "40 told by vLLM's own tracing, which does not say why, left out" in shown


def test_report_and_diff(told: Path) -> None:
    """The report has our stages and says whose times they are; diff compares them."""
    begin, middle, end = (
        datetime.fromtimestamp(BEGIN_S + each, timezone.utc).isoformat() for each in (0, 20, 60)
    )
    at = ("--db", str(told))
    shown = run("report", *at).output
    asked = json.loads(run("report", *at, "--json").output)
    windows = ("--a", f"{begin}..{middle}", "--b", f"{middle}..{end}")
    compared = json.loads(run("diff", *windows, "--json", *at).output)

    changed = {each["name"]: each for each in compared["stages"]}
    assert round(changed["prefill.queue"]["change_ms"]) == 20, changed
    assert "prefill.compute" in shown
    assert "40 of 40 requests are told by others' spans" in shown
    legs = [leg for each in asked["requests"] for leg in each["legs"]]
    assert {leg["foreign"] for leg in legs} == {"vLLM's own tracing"}


def test_page(start_report_server: Callable[..., RunningServer], told: Path) -> None:
    """The page lists the requests, and their trace has a bar for the TTFT, with the sentence below."""
    server = start_report_server(path=told)
    _, listed, _ = fetch_page(server, "/")
    _, trace, _ = fetch_page(server, f"/trace/{1:032x}")

    assert "told by others" in listed and "told by others" in trace
    assert "prefill.queue" in trace
