# SPDX-License-Identifier: Apache-2.0
"""The same spans in a real Tempo and in the embedded store: `--tempo` gives the same requests."""

from __future__ import annotations

import itertools
import json
import sys
import time
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult

from lab import free_ports
from lab.local_servers import LocalServer
from lab.server_commands import ServerCommand
from tests.fake_tempo import FILES, read_golden, to_sdk_span
from tests.report.sample_records import fill_database
from tests.stack.known_requests import build_known_requests, build_known_spans
from tests.stack.running_stack import RunningTempo, StackStarter, wait_until
from ttft_otel.commands import main as cli
from ttft_otel.report.breakdown_source import open_source
from ttft_otel.report.receive import otlp_decoder
from ttft_otel.report.report_types import LATE, LOST, OTHER, REFUSED, SourceChoice
from ttft_otel.report.store.database_reader import RequestFilter, open_reader
from ttft_otel.report.tempo import tempo_source
from ttft_otel.report.tempo.tempo_client import TempoError

EACH = 12  # of the known requests one of so many, which are of every kind, and the failed ones
BATCH = 500


@pytest.fixture(scope="module")
def tempo(bench: StackStarter) -> RunningTempo:
    """A Tempo of its own: every trace in it is known."""
    return bench.start_tempo()


@pytest.fixture(scope="module")
def database(tempo: RunningTempo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Known requests in a database, and the same spans, straight from the exporter's code, in Tempo."""
    rows = [row for row in build_known_requests() if not row.number % EACH or row.error]
    spans = build_known_spans(rows, time.time_ns())
    client = OTLPSpanExporter(endpoint=tempo.env["TTFT_TEMPO_OTLP"], insecure=True)
    for start in range(0, len(spans), BATCH):
        assert client.export(spans[start : start + BATCH]) is SpanExportResult.SUCCESS
    client.shutdown()
    assert len({row.kind for row in rows}) == 4
    stored = otlp_decoder.decode_export(encode_spans(spans).SerializeToString()).spans
    return fill_database(tmp_path_factory.mktemp("known") / "spans.db", spans=stored)


def test_same_requests(
    tempo: RunningTempo, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All requests, and filtered ones, are equal field by field; small searches page through them."""
    with open_reader(database) as stored:
        expected = stored.list_latest(RequestFilter(last=2000))
        models = sorted({request.model for request in expected if request.model})
        with open_source(SourceChoice(tempo=tempo.url)) as searched:
            # Tempo shows a trace some seconds after its last span.
            wait_until(
                lambda: len(searched.list_latest(RequestFilter(last=2000))) == len(expected), 60, 2
            )
        monkeypatch.setattr(tempo_source, "SEARCH_LIMIT", 100)
        with open_source(SourceChoice(tempo=tempo.url)) as searched:
            by_trace = {(each.trace_id, each.start_ns): each for each in expected}
            found = searched.list_latest(RequestFilter(last=2000))
            assert {(each.trace_id, each.start_ns): each for each in found} == by_trace
            middle = expected[len(expected) // 2].start_ns
            for wanted in (
                RequestFilter(model=models[0], last=2000),
                RequestFilter(error="any", last=2000),
                RequestFilter(min_us=1_000_000, last=2000),
                RequestFilter(since_ns=middle, last=2000),
                RequestFilter(since_ns=middle - 10**9, until_ns=middle, last=2000),
            ):
                same = {each.trace_id for each in stored.list_latest(wanted)}
                assert {each.trace_id for each in searched.list_latest(wanted)} == same
                assert same, wanted
            for request in expected[:10]:
                trace = stored.find_trace(request.trace_id)
                assert trace and searched.find_trace(request.trace_id) == trace
                assert searched.find_request(request.request_id) == request


def test_sampled_window(tempo: RunningTempo, database: Path) -> None:
    """A search tells the same requests of a window as the store, and what is chosen is fetched once."""
    limits = {LATE: 20, OTHER: 30, LOST: 5, REFUSED: 0}
    with open_reader(database) as stored, open_source(SourceChoice(tempo=tempo.url)) as searched:
        models = sorted({each.model for each in stored.list_latest(RequestFilter()) if each.model})
        filters = (RequestFilter(last=0), RequestFilter(last=0, model=models[0]))
        for wanted, slo_us in itertools.product(filters, (0, 400_000)):
            asked = (wanted, slo_us, limits)
            expected = stored.sample_window(*asked).coverage
            assert expected.requests > 40 and expected.counts[LATE]
            # Tempo may show a trace before all of its spans.
            wait_until(
                lambda asked=asked, expected=expected: (
                    searched.sample_window(*asked).coverage == expected
                ),
                60,
                2,
            )
            for each in searched.sample_window(*asked).requests:
                trace = stored.find_trace(each.request.trace_id)
                assert trace and each.request in trace.requests


@pytest.mark.full
def test_other_products(bench: StackStarter, tmp_path: Path) -> None:
    """Their golden traces in a real Tempo: report, diff and page give what they give from the store."""
    begin_s = int(time.time()) - 120
    spans = [
        replace(span, trace_id=f"{number:08x}{span.trace_id[8:]}")
        for number in range(20)
        for name in FILES
        for span in read_golden(name, (begin_s + 2 * number) * 10**9)
    ]
    path = fill_database(tmp_path / "spans.db", spans=spans)
    tempo = bench.start_tempo()
    client = OTLPSpanExporter(endpoint=tempo.env["TTFT_TEMPO_OTLP"], insecure=True)
    assert client.export([to_sdk_span(span) for span in spans]) is SpanExportResult.SUCCESS
    client.shutdown()
    first, middle, last = (
        datetime.fromtimestamp(begin_s + each, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        for each in (0, 20, 100)
    )
    wanted = RequestFilter(last=2000)
    with open_reader(path) as stored, open_source(SourceChoice(tempo=tempo.url)) as searched:
        count = len(stored.list_latest(wanted))
        wait_until(lambda: len(searched.list_latest(wanted)) == count, 60, 2)
    assert count == 20 * (2 + 3 + 2)

    def ask(*words: str) -> list[Any]:
        """What a command says of the store and of Tempo."""
        sources = (("--db", str(path)), ("--tempo", tempo.url))
        found = [CliRunner().invoke(cli.main, [*words, "--json", *each]) for each in sources]
        assert all(each.exit_code == 0 for each in found), [each.output for each in found]
        return [json.loads(each.stdout) for each in found]

    stored_, searched_ = (
        sorted(each["requests"], key=lambda request: (request["start_ns"], request["trace_id"]))
        for each in ask("report", "--since", f"{first}..{last}")
    )
    assert stored_ == searched_ and len(stored_) == count
    assert {"prefill.queue", "kv.transfer"} <= {name for each in stored_ for name in each["stages"]}
    windows = ("--a", f"{first}..{middle}", "--b", f"{middle}..{last}")
    # Without the intervals: resampling follows the order in which requests came.
    stored_, searched_ = (
        [[each[name] for name in ("name", "a_ms", "b_ms", "change_ms")] for each in found["stages"]]
        for found in ask("diff", *windows)
    )
    assert stored_ == searched_ and stored_
    port = free_ports.find_free_port()
    words = ("-m", "ttft_otel.commands.main", "serve", "--tempo", tempo.url, f"--http-port={port}")
    page = ServerCommand("page", (sys.executable, *words), {}, port, "/healthz")
    sglang = next(span.trace_id for span in spans if span.name == "prefill_forward")
    with LocalServer(page, tmp_path / "page.log") as server:
        shown = httpx.get(f"{server.url}/trace/{sglang}", timeout=30).raise_for_status().text
    assert "told by others" in shown and "prefill.compute" in shown


def test_version_and_retention(tempo: RunningTempo) -> None:
    """Tempo is known as Tempo, and says for how long it keeps traces."""
    source = tempo_source.TempoSource(SourceChoice(tempo=tempo.url))
    try:
        kept_s = source._run(source._client.read_retention_s())
        assert kept_s == 336 * 3600  # block_retention of grafana/tempo/native.yaml
        with pytest.raises(TempoError, match="unexpected|parse|invalid"):
            source._run(source._client.search("{ no query", 1, 2, 10))
    finally:
        source.close()
