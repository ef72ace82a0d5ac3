# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel report --perfetto`: a file that keeps the Trace Event format's rules and has every span."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import sample_records
from click.testing import CliRunner

from ttft_otel.commands.main import main
from ttft_otel.report.report_types import StoredSpan
from ttft_otel.report.show import perfetto_trace
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
    document = perfetto_trace.build_document([StoredTrace("t", spans, ())])
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
        records = sample_records.make_routed_records(
            f"r{number}", 1 + number / 10, encoders=2, start_ns=10**18 + number * 30 * MS
        )
        sample_records.store_records(store, records)
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


def test_parallel_siblings_do_not_contain_each_other() -> None:
    """Two calls at the same time are on two tracks, also where one is inside of the other's time."""
    drawn = draw_spans(
        make_span("parent", 0, 100),
        make_span("long", 10, 90, "parent"),
        make_span("short", 20, 30, "parent"),
    )
    assert drawn["parent"]["tid"] == drawn["long"]["tid"] != drawn["short"]["tid"]


def test_a_track_is_used_again() -> None:
    """Requests one after the other are on one track, those at the same time are not."""
    drawn = draw_spans(
        make_span("first", 0, 10), make_span("second", 10, 30), make_span("third", 20, 40)
    )
    assert [drawn[name]["tid"] for name in ("first", "second", "third")] == [1, 1, 2]


def test_a_clock_that_is_behind() -> None:
    """A child whose host's clock is behind is drawn where that clock says."""
    drawn = draw_spans(make_span("call", 50, 90), make_span("work", 10, 20, "call", host="b"))
    assert (drawn["work"]["ts"], drawn["call"]["ts"]) == (0.0, 40_000.0)
    assert drawn["work"]["pid"] != drawn["call"]["pid"]


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
