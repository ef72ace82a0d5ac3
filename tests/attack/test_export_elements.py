# SPDX-License-Identifier: Apache-2.0
"""Exports of millions of empty elements, which gzip makes kilobytes of: decoded or refused in a moment."""

from __future__ import annotations

import contextlib
import time

import pytest
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from ttft_otel.report.receive import otlp_decoder

ELEMENTS = 2_000_000  # of two bytes each: 4 MB, the most that one export may have
# Of the time that protobuf's C code takes for the same bytes: 0.7 to 3 times were seen, and 10 to 40 before.
MAX_RATIO = 8.0
SPANS = 5000


def encode_field(number: int, data: bytes) -> bytes:
    """A field of a protobuf message that has a length."""
    length, rest = b"", len(data)
    while rest > 127:
        length += bytes([rest & 127 | 128])
        rest >>= 7
    return bytes([number << 3 | 2]) + length + bytes([rest]) + data


def encode_span(more: bytes, number: int = 1) -> bytes:
    """A span with valid IDs and times."""
    ids = encode_field(1, b"\1" * 16) + encode_field(2, number.to_bytes(8, "big"))
    return ids + b"\x39" + b"\1" * 8 + b"\x41" + b"\1" * 8 + more


def encode_export(span: bytes = b"", scope: bytes = b"", resource: bytes = b"") -> bytes:
    """An export of one span, with more fields of each message."""
    spans = encode_field(2, encode_field(1, scope) + encode_field(2, encode_span(span)))
    return encode_field(1, encode_field(1, resource) + spans)


def encode_value(number: int, data: bytes) -> bytes:
    """An attribute of a span whose value has this field."""
    return encode_field(9, encode_field(1, b"a") + encode_field(2, encode_field(number, data)))


def repeat_empty(tag: int) -> bytes:
    """So many empty elements."""
    return bytes([tag, 0]) * ELEMENTS


@pytest.mark.parametrize(
    ("build", "is_stored"),
    [
        (lambda: repeat_empty(0x0A), False),  # resource spans
        (lambda: encode_field(1, repeat_empty(0x12)), False),  # scope spans
        (lambda: encode_field(1, encode_field(2, repeat_empty(0x12))), False),  # spans
        (lambda: encode_export(repeat_empty(0x4A)), True),  # attributes
        (lambda: encode_export(repeat_empty(0x5A)), True),  # events
        (lambda: encode_export(repeat_empty(0x6A)), True),  # links
        (lambda: encode_export(encode_field(11, repeat_empty(0x1A))), True),  # of an event
        (lambda: encode_export(scope=repeat_empty(0x1A)), True),
        (lambda: encode_export(resource=repeat_empty(0x0A)), True),
        (lambda: encode_export(encode_value(5, repeat_empty(0x0A))), True),  # values of a list
        (lambda: encode_export(encode_value(6, repeat_empty(0x0A))), True),  # values of a map
    ],
)
def test_empty_elements(build: object, is_stored: bool) -> None:
    """Whatever is repeated, it costs the decoder no time; a span that has too much of it is stored, cut."""
    assert callable(build)
    data = build()
    assert len(data) <= 4 << 20
    start_s = time.thread_time()
    with contextlib.suppress(DecodeError):
        ExportTraceServiceRequest.FromString(data)
    parsed_s = time.thread_time()
    try:
        accepted = otlp_decoder.chunk_export(data).accepted
    except otlp_decoder.OtlpDecodeError:
        accepted = 0
    assert time.thread_time() - parsed_s < MAX_RATIO * (parsed_s - start_s)
    assert accepted == int(is_stored)


def test_an_honest_export() -> None:
    """The control: as many bytes of real spans are stored, each with its attributes."""
    attributes = b"".join(
        encode_field(9, encode_field(1, b"key%d" % at) + encode_field(2, encode_field(1, b"value")))
        for at in range(20)
    )
    spans = b"".join(encode_field(2, encode_span(attributes, at)) for at in range(1, SPANS + 1))
    data = encode_field(1, encode_field(2, spans))
    assert otlp_decoder.chunk_export(data).accepted == SPANS
    assert len(otlp_decoder.decode_export(data).spans[0].attributes) == 20
