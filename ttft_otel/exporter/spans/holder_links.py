# SPDX-License-Identifier: Apache-2.0
"""Write who held a waiting request into its queue's span: as links for span_writer.py, or as events.

A link needs the holder's span context: a holder that is not sampled has none, and a link with an invalid
context would be dropped, or shown as a broken one, by backends.
"""

from __future__ import annotations

from typing import Final

from opentelemetry.proto.trace.v1.trace_pb2 import Span, SpanFlags

from ttft_otel.exporter.spans.attribute_writer import MAX_VALUE_CHARS
from ttft_otel.model.names import keys
from ttft_otel.model.record import Attributes, HeldBy

# Its span may be another process's.
_REMOTE_LINK: Final = (
    SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
)


def write_holders(span: Span, holders: tuple[HeldBy, ...]) -> None:
    """A link to each holder's server span; an event, at the span's start, for one that has none.

    Raises ValueError for IDs that are not hex numbers.
    """
    for holder in holders:
        place: Span.Link | Span.Event
        if holder.trace_id:
            place = span.links.add(
                trace_id=bytes.fromhex(holder.trace_id),
                span_id=bytes.fromhex(holder.span_id),
                flags=_REMOTE_LINK,
            )
        else:
            place = span.events.add(name=keys.HELD_BY, time_unix_nano=span.start_time_unix_nano)
        for name, value in list_holder_attributes(holder).items():
            value_field = place.attributes.add(key=name).value
            if isinstance(value, int):
                value_field.int_value = value
            else:
                value_field.string_value = str(value)[:MAX_VALUE_CHARS]


def list_holder_attributes(holder: HeldBy) -> Attributes:
    """Attributes of a link or an event that names a holder."""
    return {
        keys.HELD_BY_US: holder.us,
        keys.HELD_BY_TOKENS: holder.tokens,
        keys.HELD_BY_KIND: holder.kind,
        keys.HELD_BY_REQUEST_ID: holder.request_id,
    }
