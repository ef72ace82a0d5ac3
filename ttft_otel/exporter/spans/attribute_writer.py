# SPDX-License-Identifier: Apache-2.0
"""Write attributes into OTLP span messages for span_writer.py; encodings that recur are kept."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from ttft_otel.model.names import keys
from ttft_otel.model.record import Attributes, Value

MAX_VALUE_CHARS: Final = 256  # characters of one attribute's value
MAX_ATTRIBUTES: Final = 128  # attributes of one span
MAX_CACHED_PARTS: Final = 4096  # encodings of each kind that are kept; about 1 MB
# Of attributes whose encoding is kept; numbers are not, because 1 == 1.0 == True for a cache.
CONSTANT_TYPES: Final = frozenset({str, bool})


def write_attributes(span: Span, attributes: Attributes) -> None:
    """Add attributes, the last MAX_ATTRIBUTES of them, in any order."""
    if len(attributes) > MAX_ATTRIBUTES:  # later ones are ours and matter more
        attributes = dict(list(attributes.items())[-MAX_ATTRIBUTES:])
    numbers: dict[str, int] = {}
    constants: list[bytes] = []
    for name, value in attributes.items():
        if isinstance(value, str):
            if name == keys.REQUEST_ID:  # never the same again
                span.attributes.add(key=name).value.string_value = value[:MAX_VALUE_CHARS]
            else:
                constants.append(_encode_constant(name, value[:MAX_VALUE_CHARS]))
        elif isinstance(value, bool):
            constants.append(_encode_constant(name, value))
        elif isinstance(value, int):
            numbers[name] = value
        elif isinstance(value, float):
            span.attributes.add(key=name).value.double_value = value
        else:
            span.attributes.add(key=name, value=_make_value(value))
    if numbers:
        before = len(span.attributes)
        span.MergeFromString(_encode_zeros(tuple(numbers)))
        for attribute, number in zip(span.attributes[before:], numbers.values(), strict=True):
            attribute.value.int_value = number
    span.MergeFromString(b"".join(constants))


@lru_cache(MAX_CACHED_PARTS)
def _encode_constant(name: str, value: Value) -> bytes:
    """A span's encoded attribute. value: of CONSTANT_TYPES."""
    return Span(attributes=[KeyValue(key=name, value=_make_value(value))]).SerializeToString()


@lru_cache(MAX_CACHED_PARTS)
def _encode_zeros(attribute_names: tuple[str, ...]) -> bytes:
    """A span's encoded attributes of these names, each 0: half the time of adding one after the other."""
    zero = AnyValue(int_value=0)
    return Span(
        attributes=[KeyValue(key=name, value=zero) for name in attribute_names]
    ).SerializeToString()


def _make_value(value: Value) -> AnyValue:
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    return AnyValue(array_value=ArrayValue(values=map(_make_value, value)))
