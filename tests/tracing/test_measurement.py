# SPDX-License-Identifier: Apache-2.0
"""What an unsampled request sends: all that metrics count of its Record, and nothing else."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import tracing_fakes
from tracing_fakes import make_short_record

from ttft_otel.model import breakdown, stages
from ttft_otel.model.names import keys, span_names
from ttft_otel.model.record import Piece, Record, RecordDecodeError, Server, Ttft
from ttft_otel.tracing import measurement, recorder
from ttft_otel.tracing.carrier import (
    BIT_ANNOUNCED,
    SOURCE_ENCODED,
    SOURCE_REMOTE,
    EngineDetails,
    EngineTimeline,
)
from ttft_otel.tracing.context import TraceContext
from ttft_otel.tracing.measurement import (
    MEASUREMENT_VERSION,
    NOT_MEASURED,
    MeasurementHead,
)
from ttft_otel.tracing.request_trace import EngineRequest, RequestTrace, identity

PIECES = (
    Piece("stage", "router.receive", 0, 10),
    Piece("stage", "mono.prefill.compute", 10, 90, {keys.INSTANCE: "a:1"}),
    Piece("part", "tokenize", 0, 5),
    Piece("stage", "unattributed", 90, 100),
)
TTFT = Ttft("00f067aa0ba902b8", span_names.TTFT, 0, 100, {"router.receive": 10}, 10, 0, PIECES)
RECORD = make_short_record(
    flags=0,
    role="router",
    service="ttft-otel-router",
    request_id="secret",
    attributes={keys.MODEL: "m", keys.OPERATION: "chat"},
    ttft=TTFT,
)


def change_record(**fields: object) -> Record:
    """RECORD with other fields."""
    return msgspec.structs.replace(RECORD, **fields)


def change_ttft(**fields: object) -> Record:
    """RECORD with other fields of its TTFT."""
    return change_record(ttft=msgspec.structs.replace(TTFT, **fields))


def test_round_trip() -> None:
    """The exporter gets each stage's length under the labels that its span would have had."""
    data = measurement.encode_for_exporter(RECORD)
    found = measurement.decode_measurement(data)

    assert found.times_us == (100, 10, 80, 10)
    assert found.recomputed_items == NOT_MEASURED
    assert measurement.decode_head(bytes(found.head)) == MeasurementHead(
        "ttft-otel-router",
        "router",
        "m",
        "chat",
        "",
        True,
        False,
        (("router.receive", ""), ("mono.prefill.compute", "a:1"), ("unattributed", "")),
    )
    assert b"secret" not in data and RECORD.trace_id.encode() not in data


@pytest.mark.parametrize(
    "record",
    [
        change_record(outermost=False),  # behind a router
        change_record(ttft=None, outermost=False, server=Server("POST", 5, 200)),
        # An answer that says "queued", and a request that generates nothing.
        change_record(ttft=None, server=Server("POST", 5, 200, {keys.BACKGROUND: True})),
        change_record(ttft=None, server=Server("POST", 5, 200), attributes={}),
    ],
)
def test_nothing_to_count(record: Record) -> None:
    """What no metric counts is not sent."""
    assert measurement.encode_for_exporter(record) == b""


def test_backwards() -> None:
    """A span that ends before it begins has no length; neither has its measurement one below 0."""
    record = change_ttft(start=200, pieces=(Piece("stage", "ipc", 9, 3),))
    found = measurement.decode_measurement(measurement.encode_for_exporter(record))

    assert found.times_us == (0, 0)


@pytest.mark.parametrize(
    "data",
    [
        b"m",
        measurement.encode_for_exporter(RECORD)[:-1],
        measurement.encode_for_exporter(RECORD) + b"x",
        b"m" + msgspec.msgpack.encode((MEASUREMENT_VERSION + 1, (), (1,), -1)),
        b"m" + msgspec.msgpack.encode((MEASUREMENT_VERSION, (), (-1,), -1)),
        b"m" + msgspec.msgpack.encode((MEASUREMENT_VERSION, (), (1,), -1, ((99, 1),))),
        b"m" + msgspec.msgpack.encode((MEASUREMENT_VERSION, (), (1,), -1, (), ((0, -1),))),
    ],
)
def test_foreign(data: bytes) -> None:
    """Anything else is refused, a length below 0 included."""
    with pytest.raises(RecordDecodeError):
        measurement.decode_measurement(data)


MEDIA = ([], [1, 1, 0, 0, SOURCE_ENCODED | BIT_ANNOUNCED], [0, 0, 9, 0, SOURCE_REMOTE])


class BytesSink:
    """A sink that keeps the bytes."""

    def __init__(self) -> None:
        self.kept: list[bytes] = []

    def send(self, data: bytes) -> bool:
        """Keep `data`."""
        self.kept.append(data)
        return True


def make_trace(chance: random.Random, sampled: bool) -> RequestTrace:
    """A counted trace that has ended, of any kind; the same for the same state of `chance`."""
    ids = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "")
    trace = RequestTrace(1000, TraceContext(*ids, int(sampled), ""), False, True)
    trace.path = chance.choice(["/v1/completions", "/v1/chat/completions", "/v1/messages"])
    trace.leg = chance.choice(["", "", "decode", "prefill", "encode"])
    trace.status = chance.choice([200, 200, 200, 0, 404, 503])
    trace.error = chance.choice(["", "", keys.ERROR_ENGINE, keys.ERROR_CANCELLED])
    trace.is_background = chance.random() < 0.1
    trace.is_beam_search = chance.random() < 0.1
    trace.end = 5000 + chance.randrange(1000)
    trace.timeline = EngineTimeline(
        complete=True, details=EngineDetails(media=chance.choice(MEDIA))
    )
    for number in range(chance.choice([0, 1, 1, 1, 2])):
        engine = EngineRequest(1100, "", 0, 1800, chance.choice([0, 2000 + number, 4000]))
        engine.output_tokens = chance.choice([-1, 0, 1, 7])
        engine.finish_reason = chance.choice(["stop", "length", "abort"])
        trace.engine_requests[str(number)] = engine
        trace.first_output = trace.first_output or chance.choice([engine, None])
    steps = [breakdown.EngineStep([(breakdown.CODE_FORWARD, 1500, 1600)], 1700)]
    marks = breakdown.Marks(1000, 1010, 1100, 1300, chance.choice([0, 1400]), steps=steps)
    marks.output, marks.egress = 1800, chance.choice([0, 1900])
    since = sorted(chance.sample(range(1250, 1500), chance.choice([0, 0, 1, 3, 150])))
    marks.reasons = [(at, chance.randrange(len(stages.WAIT_REASON_NAMES))) for at in since]
    marks.held = chance.choice(
        [[], [1300, 40, 10, 20, 5, 0], [1310, 60, 30, 0, 0, 30, 20, 0, 20, 0, 0]]
    )
    trace.breakdown = chance.choice([breakdown.partition_marks(marks)] * 3 + [None])
    return trace


def send_halves(seed: int, sampled: bool, halves: bool) -> list[bytes]:
    """What is sent of the trace of this seed, its TTFT before its end if `halves`."""
    chance, sink = random.Random(seed), BytesSink()
    trace = make_trace(chance, sampled)
    if halves:
        recorder.send_known_halves(trace, sink, server=False)
    recorder.send_known_halves(trace, sink, server=True)
    return sink.kept


def read_measurement(data: bytes) -> tuple[Any, ...]:
    """The measurement in `data`, its head decoded and first; waits in no order."""
    found = measurement.decode_measurement(data)
    head = measurement.decode_head(bytes(found.head))
    waits = sorted(found.reasons), sorted(found.held)
    return head, found.version, found.times_us, found.recomputed_items, *waits


@pytest.mark.usefixtures("blank_identity", "no_state_left")
@pytest.mark.parametrize("role", ["mono", "prefill", "decode", "encode", "prefill_decode", ""])
@pytest.mark.parametrize("halves", [False, True])
def test_as_its_record(role: str, halves: bool) -> None:
    """Over traces of all kinds: heads, times and items again are those of the sampled request's Record."""
    identity.role, identity.model, identity.takes_encodings = role, "m", role != "encode"
    identity.ec_connector = "ec" if halves else ""
    kinds: set[Any] = set()
    waits: set[int] = set()
    for seed in range(150):
        with tracing_fakes.captured_records() as sender:
            for data in send_halves(seed, True, halves):
                sender.send(data)
        unsampled = [msgspec.structs.replace(record, flags=0) for record in sender.kept]
        sent = [measurement.encode_for_exporter(record) for record in unsampled]
        made = [read_measurement(data) for data in send_halves(seed, False, halves)]

        assert made == [read_measurement(data) for data in sent if data]
        kinds |= {head for head, *_ in made}
        waits |= {len(reasons) for *_, reasons, _ in made}
    assert {1, 2, 3} <= waits
    # An encoder's requests are counted by no head of their own here: others are of many kinds.
    assert len(kinds) >= (20 if role in ("mono", "decode", "prefill_decode", "") else 0)


@pytest.mark.usefixtures("blank_identity", "no_state_left")
def test_heads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many errors and stages there are, kept heads are not more than their limit."""
    monkeypatch.setattr(measurement, "MAX_HEADS", 3)
    identity.role = "mono"
    for seed in range(50):
        for data in send_halves(seed, False, True):
            assert msgspec.msgpack.decode(data[len(measurement.PREFIX) :])
    assert len(measurement._heads) <= 3
