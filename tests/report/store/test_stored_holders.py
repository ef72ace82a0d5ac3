# SPDX-License-Identifier: Apache-2.0
"""Requests that held others, and engine steps: from records to the database and to Perfetto's file."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import sample_records

from ttft_otel.model.names import keys
from ttft_otel.model.record import HeldBy, Record
from ttft_otel.report.report_types import StoredSpan
from ttft_otel.report.show import perfetto_trace
from ttft_otel.report.store.database_reader import StoredTrace
from ttft_otel.report.store.span_conversion import StoredHolder, read_holders

START_NS = 10**18


def make_held_records() -> tuple[Record, Record]:
    """A request that holds, and one that came 1 ms later and is held by it and by an untraced one."""
    holder = sample_records.make_leg_record("mono", sample_records.DECODE_US, start_ns=START_NS)
    held = sample_records.make_leg_record(
        "mono", sample_records.DECODE_US, start_ns=START_NS + 1_000_000
    )
    assert held.ttft is not None
    links = (
        HeldBy(6_000, 512, "prefill", "engine-1", holder.trace_id, holder.span_id),
        HeldBy(3_000, 4, "decode", "engine-2"),
    )
    pieces = tuple(
        msgspec.structs.replace(piece, held_by=links) if piece.name == "prefill.queue" else piece
        for piece in held.ttft.pieces
    )
    return holder, msgspec.structs.replace(
        held, ttft=msgspec.structs.replace(held.ttft, pieces=pieces)
    )


def find_queue(spans: list[StoredSpan]) -> StoredSpan:
    """The only span of a queue."""
    (queue,) = [span for span in spans if span.name == "prefill.queue"]
    return queue


def test_stored() -> None:
    """Links and events come out of the database as they were recorded, the largest first."""
    holder, held = make_held_records()
    queue = find_queue(sample_records.make_stored_spans([held]))

    assert read_holders(queue.attributes) == [
        StoredHolder(6_000, 512, "prefill", "engine-1", holder.trace_id, holder.span_id),
        StoredHolder(3_000, 4, "decode", "engine-2", "", ""),
    ]
    assert read_holders(find_queue(sample_records.make_stored_spans([holder])).attributes) == []


@pytest.mark.parametrize(
    "text",
    [
        *("[{}]", "{", "7", "[3]", '[{"us": "x"}]', 5, None),
        *("[" * 4000, '[{"us": 1e999, "tokens": 1, "kind": "a", "request_id": "b"}]'),
        f'[{{"us": 1{"0" * 3000}, "tokens": 1, "kind": "a", "request_id": "b"}}]',
        '[{"us": -5, "tokens": 1, "kind": "a", "request_id": "b"}]',
    ],
)
def test_foreign(text: Any) -> None:
    """An attribute of this name in another form is no holder."""
    assert read_holders({keys.HELD_BY: text}) == []


def test_arrows() -> None:
    """An arrow leads from the holder's slice to the queue's, and ends inside of it."""
    traces = [
        StoredTrace(each.trace_id, tuple(sample_records.make_stored_spans([each])), ())
        for each in make_held_records()
    ]
    events = perfetto_trace.build_document(traces)["traceEvents"]
    begin, end = [each for each in events if each["name"] == "held"]
    slices = [each for each in events if "span_id" in each.get("args", ())]
    (server,) = [each for each in slices if each["args"]["span_id"] == make_span_id(traces[0])]
    queue = next(
        each for each in slices if each["name"] == "prefill.queue" and keys.HELD_BY in each["args"]
    )

    assert (begin["ph"], end["ph"], begin["id"]) == ("s", "f", end["id"])
    assert (begin["pid"], begin["tid"]) == (server["pid"], server["tid"])
    assert server["ts"] <= begin["ts"] <= server["ts"] + server["dur"]
    assert (end["pid"], end["tid"]) == (queue["pid"], queue["tid"])
    assert queue["ts"] < end["ts"] <= queue["ts"] + queue["dur"]


def make_span_id(trace: StoredTrace) -> str:
    """The ID of the trace's server span."""
    return next(span.span_id for span in trace.spans if span.kind == 2)


def test_engine_steps() -> None:
    """Requests with the same forward pass are one step; a request at another time is in another one."""
    tokens = {keys.PREFILL_CHUNKS: 1, keys.PREFILL_OWN_TOKENS: 40, keys.PREFILL_STEP_TOKENS: 90}
    spans = []
    for number, delay_ms in enumerate((0, 0, 500)):
        record = sample_records.make_leg_record(
            "mono",
            sample_records.DECODE_US,
            start_ns=START_NS + delay_ms * 1_000_000,
            request_id=f"r{number}",
        )
        assert record.ttft is not None
        ttft = msgspec.structs.replace(record.ttft, attributes={**record.ttft.attributes, **tokens})
        spans += sample_records.make_stored_spans([msgspec.structs.replace(record, ttft=ttft)])
    shared, alone = perfetto_trace.find_steps(spans)

    assert (shared.word, shared.requests, shared.request_ids) == ("forward", 2, ["r0", "r1"])
    assert (shared.prompt_tokens, shared.step_tokens) == (80, 90)
    assert (alone.requests, alone.prompt_tokens) == (1, 40)
    assert shared.end_ns - shared.start_ns == 1000 * sample_records.DECODE_US["prefill.compute"]
    traces = [
        StoredTrace(trace, tuple(span for span in spans if span.trace_id == trace), ())
        for trace in dict.fromkeys(span.trace_id for span in spans)
    ]
    document = perfetto_trace.build_document(traces)
    drawn = [each for each in document["traceEvents"] if each.get("cat") == "engine step"]

    assert [each["args"]["traced requests"] for each in drawn] == [2, 1]
