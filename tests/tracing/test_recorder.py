# SPDX-License-Identifier: Apache-2.0
"""One request's trace: its context, sampled or not, bounded, counted, and in which role of this server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import tracing_fakes
from opentelemetry.sdk.trace import sampling

from ttft_otel.model import timing
from ttft_otel.model.names import keys
from ttft_otel.model.stages import ROLES
from ttft_otel.tracing import carrier, context, measurement, recorder
from ttft_otel.tracing.carrier import (
    BIT_ANNOUNCED,
    SOURCE_ENCODED,
    SOURCE_REMOTE,
    EngineDetails,
    EngineTimeline,
)
from ttft_otel.tracing.context import start_context
from ttft_otel.tracing.request_trace import RequestTrace, identity, is_outermost, resolve_role
from ttft_otel.tracing.settings import Settings

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ON = Settings(on=True)


def test_continued() -> None:
    """A valid parent is continued, its state kept, its decision trusted."""
    made = context.start_context(f"00-{TRACE_ID}-{PARENT_ID}-01", "vendor=1", ON)

    assert (made.trace_id, made.parent_id, made.tracestate, made.sampled) == (
        TRACE_ID,
        PARENT_ID,
        "vendor=1",
        True,
    )
    assert made.span_id != PARENT_ID and len(made.span_id) == 16
    assert made.format_traceparent() == f"00-{TRACE_ID}-{made.span_id}-01"


@pytest.mark.parametrize(
    "bad",
    [
        "",
        f"00-{'0' * 32}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"ff-{TRACE_ID}-{PARENT_ID}-01",
        f"00-{TRACE_ID.upper()}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{PARENT_ID}-01-more",
        f"00-{TRACE_ID}-{PARENT_ID}-01" + "x" * 200,
    ],
)
def test_malformed(bad: str) -> None:
    """What is malformed is ignored, with its state: a new trace starts."""
    made = context.start_context(bad, "vendor=1", ON)

    assert made.parent_id == "" and made.tracestate == ""
    assert len(made.trace_id) == 32 and int(made.trace_id, 16)
    assert made.trace_id != TRACE_ID


def test_future_version() -> None:
    """A later version's header is read as far as it is known."""
    made = context.start_context(f"cc-{TRACE_ID}-{PARENT_ID}-01-what-the-future-holds", "", ON)

    assert made.parent_id == PARENT_ID and made.sampled


@pytest.mark.parametrize("state", ["x=" + "y" * 600, "naïve=1"])
def test_state_bounded(state: str) -> None:
    """A state that is too long or not plain text is left out, the trace is continued."""
    made = context.start_context(f"00-{TRACE_ID}-{PARENT_ID}-01", state, ON)

    assert (made.parent_id, made.tracestate) == (PARENT_ID, "")


def test_untrusted() -> None:
    """Callers that are not trusted keep their trace id, not their sampling flag."""
    settings = Settings(on=True, trust_sampled=False, sampler="parentbased_always_off")
    made = context.start_context(f"00-{TRACE_ID}-{PARENT_ID}-01", "", settings)

    assert made.trace_id == TRACE_ID and made.parent_id == PARENT_ID and not made.sampled


def test_ratio_like_the_sdk() -> None:
    """Half the traces, and the same half as the SDK's sampler: traces stay whole across services."""
    settings = Settings(on=True, sampler="traceidratio", ratio=0.5)
    theirs = sampling.TraceIdRatioBased(0.5)
    for number in range(200):
        trace = f"{(number * 0x9E3779B97F4A7C15F39CC0605CEDC835 + 1) % (1 << 128):032x}"
        ours = context.start_context(f"00-{trace}-{PARENT_ID}-00", "", settings).sampled
        wanted = theirs.should_sample(None, int(trace, 16), "x").decision
        assert ours is (wanted is sampling.Decision.RECORD_AND_SAMPLE)


def test_ids_are_nobody_elses() -> None:
    """Whatever a host seeds, and in a forked child too, ids differ; their form is W3C's."""
    code = (
        "import os, random; from ttft_otel.tracing import context; context.new_span_id(); random.seed(0);"
        "child = os.fork(); child and os.waitpid(child, 0);"
        "os.write(1, f'{context.new_span_id()} {context.new_trace_id()} '.encode())"
    )
    runs = [subprocess.check_output([sys.executable, "-c", code], text=True) for _ in range(2)]
    ids = " ".join(runs).split()

    assert len(set(ids)) == len(ids) == 8
    assert {len(each) for each in ids} == {16, 32}
    assert set("".join(ids)) <= set("0123456789abcdef")


UNSAMPLED = (b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00")

pytestmark = pytest.mark.usefixtures("blank_identity", "no_state_left")


@pytest.fixture(autouse=True)
def no_ends(no_state_left: None) -> Iterator[None]:
    """Most tests here look at a request's beginning alone: its end, which vLLM tells, never comes."""
    yield
    recorder.unended_requests.clear()


def make_trace(**fields: Any) -> RequestTrace:
    """A sampled trace of a request that arrived at 1000 us, with these fields."""
    known = {"path": "/v1/completions", "method": "POST", "timing_requested": False}
    return RequestTrace(1000, start_context("", "", ON), **(known | fields))


def test_begin() -> None:
    """Only what we know is read from the headers, and it is bounded."""
    made = recorder.begin_trace(
        [
            (b"x-ttft-timing", b"1"),
            (b"x-ttft-leg", b"encode"),
            (b"x-request-id", b"r" * 1000),
            (b"authorization", b"Bearer secret"),
        ],
        ON,
    )

    assert made is not None
    assert (made.timing_requested, made.leg, made.request_id) == (True, "encode", "r" * 256)
    assert made.context.sampled


def test_counted_but_not_sampled() -> None:
    """With metrics on an unsampled request is measured at every server: each has queues of its own."""
    counting = Settings(on=True, metrics=True)
    made = recorder.begin_trace([UNSAMPLED], counting)

    assert made is not None and made.is_counted and not made.context.sampled
    for leg in (b"encode", b"prefill", b"decode"):
        inner = recorder.begin_trace([UNSAMPLED, (b"x-ttft-leg", leg)], counting)
        assert inner is not None and inner.is_counted


def test_unsampled_sends_its_measurements() -> None:
    """A stream's TTFT goes with its first token, and at its end what is known only then."""
    sent: list[bytes] = []

    class Sink:
        def send(self, data: bytes) -> bool:
            sent.append(data)
            return True

    made = recorder.begin_trace([UNSAMPLED], Settings(on=True, metrics=True))
    assert made is not None
    made.path, made.method, made.streamed, made.status = "/v1/completions", "POST", True, 200
    recorder.register_engine_request(made, "e")
    recorder.record_first_output("e", "", made.arrive + 900, made.arrive + 1000)
    cut = recorder.close_ttft(made, made.arrive + 1200)
    recorder.send_known_halves(made, Sink(), server=False)
    recorder.record_end("e", "stop", 5)
    made.engine_requests["e"].ended = made.arrive + 8600
    made.end = made.arrive + 9000
    recorder.send_known_halves(made, Sink(), server=True)

    data, end = sent
    head = measurement.decode_head(bytes(measurement.decode_measurement(end).head))
    assert (head.has_ttft, head.end_error, head.has_token_time) == (False, "", True)
    assert measurement.decode_measurement(end).times_us == (9000, (8600 - 1000) // 4)
    found = measurement.decode_measurement(data)
    assert found.times_us[0] == 1200 == sum(found.times_us[1:])
    assert measurement.decode_head(bytes(found.head)).stages == tuple(
        (name, "") for name, _, _ in cut.pieces
    )


def test_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a first token has a bound; the oldest goes, and ends unattributed."""
    monkeypatch.setattr(recorder, "MAX_AWAITING_REQUESTS", 3)
    traces = [make_trace() for _ in range(5)]
    for number, made in enumerate(traces):
        recorder.register_engine_request(made, f"e{number}")

    assert list(recorder.awaiting_traces) == ["e2", "e3", "e4"]
    recorder.record_first_output("e0", "", 5, 6)
    assert traces[0].first_output is None
    for made in traces:
        recorder.forget_trace(made)


def test_no_content(records: tracing_fakes.MemorySender) -> None:
    """No header, prompt or token goes into a record beyond the names we publish."""
    made = make_trace()
    recorder.fail_trace(made, 2000)
    recorder.send_known_halves(made, records, server=True)
    (record,) = records.kept
    known = {value for key, value in vars(keys).items() if key.isupper()}

    assert record.ttft is not None and record.server is not None
    for attributes in (record.attributes, record.ttft.attributes, record.server.attributes):
        assert set(attributes) <= known


def make_closed_trace(media: list[int], **headers: str) -> RequestTrace:
    """A trace of an image request whose media items have these sources."""
    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    made = recorder.begin_trace(given, ON)
    assert made is not None
    recorder.register_engine_request(made, "e")
    timeline = EngineTimeline(
        added=made.arrive + 5, details=EngineDetails(media=media), complete=True
    )
    recorder.record_first_output(
        "e", carrier.encode_timeline(timeline), made.arrive + 900, made.arrive + 1000
    )
    recorder.close_ttft(made, made.arrive + 1100)
    return made


FETCHED_ONE = [1, 1, 64, 0, SOURCE_ENCODED, SOURCE_REMOTE | BIT_ANNOUNCED]


@pytest.mark.parametrize(
    ("leg", "encoded", "recomputed"),
    [
        ("prefill_decode", "1", 1),
        ("prefill", "1", 1),
        ("prefill_decode", "0", 0),
        ("decode", "1", 0),
        ("", "1", 0),
        # An encoder, also one that takes encodings: nothing is remote there, and nothing encoded again.
        ("encode", "1", None),
    ],
)
def test_encoded_before(
    monkeypatch: pytest.MonkeyPatch, leg: str, encoded: str, recomputed: int | None
) -> None:
    """A router's word that encoders have worked counts on the legs after them, where params name none."""
    monkeypatch.setattr(identity, "takes_encodings", True)
    made = make_closed_trace([1, 1, 0, 0, SOURCE_ENCODED], x_ttft_leg=leg, x_ttft_encoded=encoded)
    told = timing.parse_server_timing(recorder.format_timing_header(made, 9000))

    counts = None if recomputed is None else timing.EncoderCacheCounts(1, 0, 0, recomputed, 0)
    assert told is not None and told.ec == counts


def test_items_on_spans(
    monkeypatch: pytest.MonkeyPatch, records: tracing_fakes.MemorySender
) -> None:
    """The `ttft` span of a consumer says where each item came from."""
    monkeypatch.setattr(identity, "takes_encodings", True)
    monkeypatch.setattr(identity, "ec_connector", "ECCPUConnector")
    recorder.send_known_halves(make_closed_trace(FETCHED_ONE), records, server=False)
    (record,) = records.kept

    assert record.ttft is not None
    found = record.ttft.attributes
    assert found[keys.EC_CONNECTOR] == "ECCPUConnector"
    assert (found[keys.EC_ITEMS], found[keys.EC_REMOTE_ITEMS], found[keys.EC_BYTES]) == (
        *(2, 1, 64),
    )
    assert (found[keys.EC_LOCAL_ITEMS], found[keys.EC_RECOMPUTED_ITEMS]) == (0, 0)
    assert found[keys.ENCODER_CACHED_ITEMS] == 1


def test_header_counts_tokens() -> None:
    """Server-Timing says how long the prompt was and how much of it was cached; without marks nothing."""
    made = make_trace(timing_requested=True)
    recorder.register_engine_request(made, "e")
    timeline = EngineTimeline(prompt=4096, cached=512, own_tokens=3584, step_tokens=3600)
    recorder.record_first_output("e", carrier.encode_timeline(timeline), 2000, 2100)
    recorder.close_ttft(made, 2200)
    told = timing.parse_server_timing(recorder.format_timing_header(made, 2200))

    assert told is not None and told.tokens == timing.TokenCounts(4096, 512, 3584, 3600)
    blind = make_trace(timing_requested=True)
    recorder.close_ttft(blind, 2200)
    told = timing.parse_server_timing(recorder.format_timing_header(blind, 2200))
    assert told is not None and told.tokens is None


@pytest.mark.parametrize(
    ("configured", "leg", "request_role", "role"),
    [
        ("", "", "", "mono"),
        ("", "decode", "", "decode"),
        ("", "", "prefill", "prefill"),
        ("", "decode", "prefill", "decode"),
        ("mono", "prefill", "", "prefill"),
        ("encode", "prefill", "decode", "encode"),
        ("decode", "", "prefill", "decode"),
    ],
)
def test_configuration_then_header_then_request(
    configured: str, leg: str, request_role: str, role: str
) -> None:
    """Configuration counts first; where it cannot tell, the router's word; then the request's own."""
    identity.role = configured

    assert resolve_role(make_trace(leg=leg, request_role=request_role)) == role


@pytest.mark.parametrize("role", [each for each in ROLES if each != "router"])
def test_only_who_answers_the_client_is_outermost(role: str) -> None:
    """Encoders and prefill instances feed another one: theirs is not the client's first token."""
    identity.role = role

    assert is_outermost(make_trace()) == (role in ("decode", "prefill_decode", "mono"))
