# SPDX-License-Identifier: Apache-2.0
"""Who held late requests: links and events of their queues come through store and Tempo, and add up."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from tests.commands.test_explain import COUNT, EXPLAIN, make_record
from tests.explain.stored_records import build_spans, store_spans
from tests.fake_tempo import FakeTempo
from ttft_otel.explain.window.holding_work import list_holders
from ttft_otel.model.names import keys, span_names
from ttft_otel.model.record import HeldBy, Record
from ttft_otel.report.breakdown_source import open_source
from ttft_otel.report.report_types import SourceChoice, StoredSpan
from ttft_otel.report.store.span_conversion import StoredHolder

LONG = HeldBy(150_000, 4096, "prefill", "long-1", "ab" * 16, "cd" * 8)
HIDDEN = HeldBy(50_000, 300, "decode", "hidden")  # not sampled: no span to link to


def make_held_record(number: int) -> Record:
    """The record of a late request, held by a long prompt, a decode, and nobody for a fifth of the time."""
    record = make_record(number)
    ttft = record.ttft
    assert ttft is not None
    held = {"prefill": 150_000, "decode": 50_000, "idle": 50_000}
    attributes = {keys.name_held_attribute(kind): us for kind, us in held.items()}
    pieces = tuple(
        msgspec.structs.replace(piece, attributes=attributes, held_by=(LONG, HIDDEN))
        if piece.name == "prefill.queue"
        else piece
        for piece in ttft.pieces
    )
    more = {**ttft.attributes, **attributes}
    return msgspec.structs.replace(
        record, ttft=msgspec.structs.replace(ttft, pieces=pieces, attributes=more)
    )


def test_holders(tmp_path: Path) -> None:
    """Kinds are shares of the wait, holders are joined over all that they held; from either source."""
    made = [
        make_record(number) if number % 16 else make_held_record(number) for number in range(COUNT)
    ]
    spans = build_spans(made, {"service.instance.id": "chat-0"})
    path = store_spans(tmp_path / "held.db", spans)
    result = EXPLAIN.run(path, "--slo", "150", "--json")
    reported = json.loads(result.stdout)
    assert reported["held"]["kinds"] == {"prefill": 0.6, "decode": 0.2, "idle": 0.2}
    assert reported["held"]["holders"] == [
        {
            "request_id": "long-1",
            "trace_id": "ab" * 16,
            "kind": "prefill",
            "ms": 150.0 * reported["requests"]["late"],
            "tokens": 4096,
            "delayed": reported["requests"]["late"],
        },
        {
            "request_id": "hidden",
            "trace_id": "",
            "kind": "decode",
            "ms": 50.0 * reported["requests"]["late"],
            "tokens": 300,
            "delayed": reported["requests"]["late"],
        },
    ]
    text = EXPLAIN.run(path, "--request", "r16", "--verbose").output
    assert (
        "While they were in the queue, the engine's time went to: prefill 60%, decode 20%, idle 20%."
        in text
    )
    assert "Held longest by: long-1 (prefill, 4096 tokens, 150.00 ms, 1 held), hidden" in text
    with (
        FakeTempo() as tempo,
        open_source(SourceChoice(db=path)) as stored,
        open_source(SourceChoice(tempo=tempo.url)) as searched,
    ):
        tempo.add(spans)
        assert searched.find_trace(f"{17:032x}") == stored.find_trace(f"{17:032x}")


def test_one_trace_for_many(tmp_path: Path) -> None:
    """Of requests that a client has put into one trace each is held by its own holders, and once."""
    records = [
        msgspec.structs.replace(make_held_record(number), trace_id="ef" * 16)
        if number % 16 == 0
        else make_record(number)
        for number in range(COUNT)
    ]
    spans = build_spans(records, {"service.instance.id": "chat-0"})
    path = store_spans(tmp_path / "shared.db", spans)
    reported = json.loads(EXPLAIN.run(path, "--slo", "150", "--json").stdout)
    late = reported["requests"]["late"]
    assert late == 13
    assert [(each["ms"], each["delayed"]) for each in reported["held"]["holders"]] == [
        (150.0 * late, late),
        (50.0 * late, late),
    ]


def test_foreign_text() -> None:
    """Only our own spans name holders; whatever somebody sends as such: no holder, and no error."""
    reported = json.dumps([{"us": 1, "tokens": 2, "kind": "k", "request_id": "r", "trace_id": ""}])
    foreign = ("", "[]", "[1]", "{}", '[{"us": 1}]', '[{"us": "x", "tokens": 1}]', "[[", 7)

    def read(text: object, scope: str = span_names.SCOPE) -> list[StoredHolder]:
        attributes = {keys.HELD_BY: text}
        return list_holders(StoredSpan(*"ab", "", "x", 0, 0, 1, scope=scope, attributes=attributes))

    assert read(reported) == [StoredHolder(us=1, tokens=2, kind="k", request_id="r")]
    assert read(reported, "") == [] and not any(map(read, foreign))
