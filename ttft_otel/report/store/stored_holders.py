# SPDX-License-Identifier: Apache-2.0
"""Keep who held a waiting request as one attribute of its stored span, and read it back.

span_conversion.py passes the links and events of a span; perfetto_trace.py draws arrows from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from opentelemetry.proto.trace.v1 import trace_pb2

from ttft_otel.model.names import keys

MAX_HOLDERS: Final = 8  # of one span; ours have three
MAX_ID_CHARS: Final = 256  # of a request ID: anybody can send spans
# Of microseconds and tokens, with the bound that a stage's length has (request_assembly.MAX_DURATION_US).
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 42)]
_FIELDS: Final = (
    ("us", keys.HELD_BY_US),
    ("tokens", keys.HELD_BY_TOKENS),
    ("kind", keys.HELD_BY_KIND),
    ("request_id", keys.HELD_BY_REQUEST_ID),
)


class StoredHolder(msgspec.Struct, frozen=True):
    """A request that held another one; trace_id and span_id of its server span, "" without one."""

    us: Count
    tokens: Count
    kind: str
    request_id: str
    trace_id: str = ""
    span_id: str = ""


def write_holders(raw: trace_pb2.Span) -> str:
    """The holders in the links and events of a received span as JSON text; "" without any."""
    found = []
    events = [event for event in raw.events[:MAX_HOLDERS] if event.name == keys.HELD_BY]
    places: list[trace_pb2.Span.Link | trace_pb2.Span.Event] = [*raw.links[:MAX_HOLDERS], *events]
    for place in places:
        values = {each.key: each.value for each in place.attributes}
        if keys.HELD_BY_US not in values:
            continue
        holder: dict[str, Any] = {}
        for field, name in _FIELDS:
            value = values.get(name)
            if field in ("us", "tokens"):
                holder[field] = value.int_value if value is not None else 0
            else:
                holder[field] = value.string_value[:MAX_ID_CHARS] if value is not None else ""
        if isinstance(place, trace_pb2.Span.Link):
            holder |= {"trace_id": place.trace_id.hex(), "span_id": place.span_id.hex()}
        found.append(holder)
    found.sort(key=lambda holder: -holder["us"])
    return json.dumps(found[:MAX_HOLDERS], ensure_ascii=False) if found else ""


def read_holders(attributes: Mapping[str, Any]) -> list[StoredHolder]:
    """The holders of a stored span, the largest first; [] where there are none, or not in our form."""
    text = attributes.get(keys.HELD_BY)
    try:
        return msgspec.json.decode(text, type=list[StoredHolder]) if isinstance(text, str) else []
    except (msgspec.DecodeError, ValueError, RecursionError):
        return []  # an attribute of this name that somebody else has sent
