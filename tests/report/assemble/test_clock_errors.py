# SPDX-License-Identifier: Apache-2.0
"""The error of marks taken on another host's clock is shown below the figures when it is large."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import sample_records
from rich.console import Console

from ttft_otel.model.names import keys
from ttft_otel.report.assemble.summary import NOTABLE_ERROR_US, summarize
from ttft_otel.report.report_types import Request
from ttft_otel.report.show import pages, terminal
from ttft_otel.report.store.database_reader import RequestFilter, StoredTrace, open_reader
from ttft_otel.report.store.span_store import SpanStore

SENTENCE = "up to 1.9 ms off"


def store_request(path: Path, error_us: int) -> tuple[Request, StoredTrace]:
    """A routed request whose servers tell this clock error."""
    records = sample_records.make_routed_records("r", start_ns=10**18)
    spans = [
        replace(span, attributes=span.attributes | {keys.CLOCK_ERROR_US: error_us})
        if span.is_ttft_span and span.attributes[keys.ROLE] != "router"
        else span
        for span in sample_records.make_stored_spans(records)
    ]
    store = SpanStore(path)
    store.add(spans).result(10)
    store.close()
    with open_reader(path) as db_reader:
        (request,) = db_reader.list_latest(RequestFilter())
        trace = db_reader.find_trace(request.trace_id)
    assert trace is not None
    return request, trace


@pytest.mark.parametrize(("error_us", "said"), [(1900, True), (NOTABLE_ERROR_US, False)])
def test_told(tmp_path: Path, error_us: int, said: bool) -> None:
    """Terminal and pages show it, for many requests and for one; not while it is small."""
    request, trace = store_request(tmp_path / "spans.db", error_us)
    console = Console(file=io.StringIO(), width=200)
    terminal.print_summary([request], console)
    terminal.print_waterfall(trace, console=console)
    assert isinstance(console.file, io.StringIO)

    assert console.file.getvalue().count(SENTENCE) == 2 * said
    assert pages.render_trace(trace).count(SENTENCE) == said
    assert summarize([request]).clock_error_us == error_us * said
