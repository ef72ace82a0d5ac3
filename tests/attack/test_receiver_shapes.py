# SPDX-License-Identifier: Apache-2.0
"""OTLP of any shape: the receiver stores it or refuses it, and its pages show what it has stored."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from ttft_otel.model import stages
from ttft_otel.model.names import keys, span_names
from ttft_otel.report.report_server import ReportServer, run_server
from ttft_otel.report.serve_options import ServeOptions

JSON_TYPE, PROTOBUF_TYPE = "application/json", "application/x-protobuf"
TIMES = st.one_of(
    st.sampled_from([0, 1, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]),
    st.integers(0, (1 << 64) - 1),
)
TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", "\x00", "x" * 5000, "<script>alert(1)</script>", "\U0001f600" * 300]),
)
# Few IDs, so that spans meet: the same twice, loops of parents, parents in other traces.
TRACE_IDS = st.sampled_from([b"\x01" * 16, b"\x02" * 16, b"\x00" * 16, b"\x03" * 15, b""])
SPAN_IDS = st.sampled_from([bytes([number]) * 8 for number in range(5)] + [b"\x01" * 7])
OUR_KEYS = (
    *(keys.ROLE, keys.OUTERMOST, keys.TOTAL_US, keys.UNATTRIBUTED_US, keys.REQUEST_ID),
    *(keys.MODEL, keys.ERROR_TYPE, keys.DIED_IN, keys.STREAMING, keys.EC_RECOMPUTED_ITEMS),
    "ttft.stage.sample_us",
    "service.name",
    "service.instance.id",
)
NUMBERS = st.one_of(
    st.integers(-(1 << 63), (1 << 63) - 1), st.sampled_from([0, 1, -1, (1 << 63) - 1])
)
VALUES = st.recursive(
    st.one_of(
        st.fixed_dictionaries({"stringValue": TEXTS}),
        st.fixed_dictionaries({"stringValue": st.sampled_from([*stages.ROLES])}),
        st.fixed_dictionaries({"intValue": NUMBERS}),
        st.fixed_dictionaries({"doubleValue": st.floats(allow_nan=False, allow_infinity=False)}),
        st.fixed_dictionaries({"doubleValue": st.sampled_from(["NaN", "Infinity", "-Infinity"])}),
        st.fixed_dictionaries({"boolValue": st.booleans()}),
        st.just({}),
    ),
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {"arrayValue": st.fixed_dictionaries({"values": st.lists(inner, max_size=3)})}
        ),
        st.fixed_dictionaries(
            {
                "kvlistValue": st.fixed_dictionaries(
                    {
                        "values": st.lists(
                            st.fixed_dictionaries({"key": TEXTS, "value": inner}), max_size=3
                        )
                    }
                )
            }
        ),
    ),
    max_leaves=8,
)
ATTRIBUTES = st.lists(
    st.fixed_dictionaries({"key": st.one_of(st.sampled_from(OUR_KEYS), TEXTS), "value": VALUES}),
    max_size=8,
)
SPANS = st.fixed_dictionaries(
    {
        "traceId": TRACE_IDS.map(bytes.hex),
        "spanId": SPAN_IDS.map(bytes.hex),
        "name": st.one_of(st.sampled_from([span_names.TTFT, span_names.ENCODE]), TEXTS),
        "startTimeUnixNano": TIMES.map(str),
        "endTimeUnixNano": TIMES.map(str),
    },
    optional={
        "parentSpanId": SPAN_IDS.map(bytes.hex),
        "kind": st.integers(-(1 << 31), (1 << 31) - 1),
        "attributes": ATTRIBUTES,
        "status": st.fixed_dictionaries({"code": st.integers(0, 5), "message": TEXTS}),
        "droppedAttributesCount": st.integers(0, (1 << 32) - 1),
    },
)
EXPORTS = st.lists(
    st.fixed_dictionaries(
        {
            "resource": st.fixed_dictionaries({"attributes": ATTRIBUTES}),
            "scopeSpans": st.lists(
                st.fixed_dictionaries(
                    {
                        "scope": st.fixed_dictionaries(
                            {"name": st.one_of(st.just(span_names.SCOPE), TEXTS)}
                        ),
                        "spans": st.lists(SPANS, max_size=6),
                    }
                ),
                max_size=2,
            ),
        }
    ),
    max_size=2,
).map(lambda groups: {"resourceSpans": groups})
# JSON of any shape below the keys of OTLP.
ODD_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.floats(), TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(
                [
                    "resourceSpans",
                    "scopeSpans",
                    "spans",
                    "traceId",
                    "attributes",
                    "value",
                    "resource",
                ]
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=20,
)


@contextmanager
def run_receiver() -> Iterator[str]:
    """A receiver of its own; yields its URL."""
    with TemporaryDirectory() as folder:
        ready = Event()
        servers: list[ReportServer] = []

        def note_started(server: ReportServer) -> None:
            servers.append(server)
            ready.set()

        options = ServeOptions(Path(folder) / "spans.db", http_port=0, grpc_port=-1)
        thread = Thread(target=run_server, args=(options, note_started))
        thread.start()
        assert ready.wait(20)
        yield f"http://127.0.0.1:{servers[0].http_port}"
        servers[0].close()
        thread.join(20)


@pytest.fixture(scope="module")
def receiver_url() -> Iterator[str]:
    """One receiver for all cases, whose database keeps what they have left."""
    with run_receiver() as url:
        yield url


def request_status(url: str, data: bytes | None = None, kind: str = JSON_TYPE) -> int:
    """The status of a request; its answer is read to the end."""
    request = urllib.request.Request(url, data, {"Content-Type": kind})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def check_pages(url: str) -> None:
    """The list, the traces and the API show what is stored."""
    paths = ["/", "/?error=any", "/api/requests", "/api/summary", "/healthz"]
    paths += [f"/{page}/{each * 16}" for page in ("trace", "api/trace") for each in ("01", "02")]
    for path in paths:
        assert request_status(url + path) in (200, 404), path


ANY_SHAPE = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


@ANY_SHAPE
@given(export=EXPORTS)
def test_spans_of_any_content(receiver_url: str, export: dict[str, Any]) -> None:
    """Spans with any times, IDs, parents, attributes and resources are stored, or refused one by one."""
    assert request_status(f"{receiver_url}/v1/traces", json.dumps(export).encode()) == 200
    check_pages(receiver_url)


@ANY_SHAPE
@given(value=ODD_JSON)
def test_json_of_any_shape(receiver_url: str, value: Any) -> None:
    """JSON that is not OTLP is 400, and changes nothing of what pages show."""
    for body in (value, {"resourceSpans": value}, {"resourceSpans": [{"scopeSpans": value}]}):
        status = request_status(f"{receiver_url}/v1/traces", json.dumps(body).encode())
        assert status in (200, 400)
    check_pages(receiver_url)


@ANY_SHAPE
@given(data=st.binary(max_size=200), cut=st.integers(0, 400))
def test_protobuf_of_any_shape(receiver_url: str, data: bytes, cut: int) -> None:
    """Bytes, and messages that end anywhere or go on with anything, are 200 or 400."""
    message = ExportTraceServiceRequest()
    span = message.resource_spans.add().scope_spans.add().spans.add()
    span.trace_id, span.span_id, span.name = b"\x01" * 16, b"\x09" * 8, span_names.TTFT
    for body in (data, (message.SerializeToString() * 8)[:cut] + data):
        status = request_status(f"{receiver_url}/v1/traces", body, PROTOBUF_TYPE)
        assert status in (200, 400)
    check_pages(receiver_url)
