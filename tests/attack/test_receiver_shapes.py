# SPDX-License-Identifier: Apache-2.0
"""OTLP of any shape: the receiver stores it or refuses it, and its pages show what it has stored."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attack.serve_thread import run_serve
from ttft_otel.model import stages
from ttft_otel.model.names import keys, span_names

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


def request_status(url: str, data: bytes | None = None) -> int:
    """The status of a request; its answer is read to the end."""
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


PATHS = (
    *("/", "/?error=any", "/api/requests", "/api/summary", "/healthz"),
    *(f"/{page}/{each * 16}" for page in ("trace", "api/trace") for each in ("01", "02")),
)


def test_spans_of_any_content(tmp_path: Path) -> None:
    """Spans with any times, IDs, parents, attributes and resources are stored, or refused one by one.

    Whatever is stored, list, traces and API show it.
    """
    with run_serve(tmp_path) as server:
        url = f"http://127.0.0.1:{server.http_port}"

        @settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
        @given(export=EXPORTS)
        def check_export(export: dict[str, Any]) -> None:
            assert request_status(f"{url}/v1/traces", json.dumps(export).encode()) == 200
            for path in PATHS:
                assert request_status(url + path) in (200, 404), path

        check_export()
