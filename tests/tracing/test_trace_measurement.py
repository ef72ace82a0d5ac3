# SPDX-License-Identifier: Apache-2.0
"""A counted request's measurement is the one that its Record would have had, had it been sampled."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from ttft_otel import testing
from ttft_otel.model import breakdown, stages
from ttft_otel.model.names import keys
from ttft_otel.tracing import measurement, recorder, trace_measurement
from ttft_otel.tracing.context import TraceContext
from ttft_otel.tracing.engine_timeline import EngineDetails, EngineTimeline
from ttft_otel.tracing.measurement import Measurement
from ttft_otel.tracing.media_items import BIT_ANNOUNCED, SOURCE_ENCODED, SOURCE_REMOTE
from ttft_otel.tracing.request_trace import EngineRequest, RequestTrace
from ttft_otel.tracing.roles import identity

pytestmark = pytest.mark.usefixtures("blank_identity", "no_state_left")
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


def read_measurement(data: bytes) -> Measurement:
    """The measurement in `data`, its head decoded."""
    raw = measurement.decode_measurement(data)
    head = measurement.decode_head(bytes(raw.head))
    waits = sorted(raw.reasons), sorted(raw.held)
    return Measurement(raw.version, head, raw.times_us, raw.recomputed_items, *map(tuple, waits))


@pytest.mark.parametrize("role", ["mono", "prefill", "decode", "encode", "prefill_decode", ""])
@pytest.mark.parametrize("halves", [False, True])
def test_as_its_record(role: str, halves: bool) -> None:
    """Over traces of all kinds: heads, times and items again are those of the sampled request's Record."""
    identity.role, identity.model, identity.takes_encodings = role, "m", role != "encode"
    identity.ec_connector = "ec" if halves else ""
    kinds: set[Any] = set()
    waits: set[int] = set()
    for seed in range(400):
        with testing.captured_records() as sender:
            for data in send_halves(seed, True, halves):
                sender.send(data)
        found = [measurement.measure_record(record) for record in sender.kept]
        expected = [
            msgspec.structs.replace(
                each, reasons=tuple(sorted(each.reasons)), held=tuple(sorted(each.held))
            )
            for each in found
            if each is not None
        ]
        made = [read_measurement(data) for data in send_halves(seed, False, halves)]

        assert made == expected
        kinds |= {each.head for each in made}
        waits |= {len(each.reasons) for each in made}
    assert {1, 2, 3} <= waits
    # An encoder's requests are counted by no head of their own here: others are of many kinds.
    assert len(kinds) >= (30 if role in ("mono", "decode", "prefill_decode", "") else 0)


def test_heads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many errors and stages there are, kept heads are not more than their limit."""
    monkeypatch.setattr(trace_measurement, "MAX_HEADS", 3)
    identity.role = "mono"
    for seed in range(50):
        for data in send_halves(seed, False, True):
            assert msgspec.msgpack.decode(data[len(measurement.PREFIX) :])
    assert len(trace_measurement._heads) <= 3
