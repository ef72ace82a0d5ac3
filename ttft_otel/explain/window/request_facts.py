# SPDX-License-Identifier: Apache-2.0
"""What the analyses need of a request: its stages, its size, and the attributes to group it by.

Read from the embedded store, or from Tempo; stage_difference.py and the commands get it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ttft_otel.model.names import keys
from ttft_otel.model.stages import UNATTRIBUTED
from ttft_otel.report.assemble.clock_errors import find_clock_error
from ttft_otel.report.breakdown_source import BreakdownSource
from ttft_otel.report.report_types import Request, StoredSpan

TEXT, MEDIA = "text", "media"
ENCODER_STAGE: Final = "encoder.compute"


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """One request that got its first token.

    stages: microseconds by stage, UNATTRIBUTED among them; they add up to the TTFT.
    tokens: of the prompt; cached: of these, found in the prefix cache; 0 where not told.
    kind: TEXT, or MEDIA where an encoder ran for it or media came from elsewhere.
    group: the value of the attribute that was asked for, "" without. model: "" where it is not told.
    clock_error_us: by how much the boundaries of its stages may be off, see clock_errors.py.
    """

    request_id: str
    start_ns: int
    stages: Mapping[str, int]
    tokens: int = 0
    cached: int = 0
    kind: str = TEXT
    group: str = ""
    model: str = ""
    clock_error_us: int = 0

    @property
    def ttft_us(self) -> int:
        """The time to first token, microseconds."""
        return sum(self.stages.values())


def read_facts(
    opened: BreakdownSource, requests: Iterable[Request], group_by: str = ""
) -> Iterator[RequestFacts]:
    """The facts of those `requests` that got a first token, in their order.

    group_by: a span's or resource's attribute, for example `service.version`.
    """
    for request in requests:
        # A failed request has no first token; a pending one lacks the span that has the sum.
        if request.error or request.pending:
            continue
        yield build_facts(request, opened.find_trunks(request.trace_id), group_by)


def build_facts(request: Request, trunks: Iterable[StoredSpan], group_by: str = "") -> RequestFacts:
    """Join `request` with the attributes of its `ttft` and `encode` spans."""
    legs = {leg.span_id for leg in (*request.legs, *([request.router] if request.router else []))}
    spans = [span for span in trunks if span.span_id in legs]
    # endswith(): behind a router the stage has its leg's prefix, `encode.encoder.compute`.
    has_media = any(name.endswith(ENCODER_STAGE) for name in request.stages) or any(
        read_count(span, keys.EC_ITEMS) for span in spans
    )
    return RequestFacts(
        # A request may have come without an ID; the trace's is always there.
        request_id=request.request_id or request.trace_id,
        start_ns=request.start_ns,
        # As a stage, so that the stages add up to the TTFT and lost time can be named as a change.
        stages={**request.stages, UNATTRIBUTED: request.unattributed_us},
        # Each leg tells the whole prompt; an encoder's leg may tell less.
        tokens=max((read_count(span, keys.INPUT_TOKENS) for span in spans), default=0),
        cached=max((read_count(span, keys.CACHED_TOKENS) for span in spans), default=0),
        kind=MEDIA if has_media else TEXT,
        group=find_value(spans, group_by) if group_by else "",
        model=request.model,
        clock_error_us=find_clock_error([request]),
    )


def find_value(spans: Iterable[StoredSpan], name: str) -> str:
    """The attribute's values on a request's spans or their resources, joined where servers differ."""
    found: dict[str, None] = {}
    # In order of time, so that the same servers always join to the same text.
    for span in sorted(spans, key=lambda each: each.start_ns):
        value: Any = span.attributes.get(name, span.resource.get(name))
        if value is not None:
            found[str(value)] = None
    return ", ".join(found)


def read_count(span: StoredSpan, name: str) -> int:
    """An attribute that is a count; 0 where it is missing or no integer."""
    value = span.attributes.get(name)
    # Spans may come from anybody; and True is an int to Python, but no count.
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
