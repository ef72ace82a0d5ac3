# SPDX-License-Identifier: Apache-2.0
"""Order a trace's spans as rows of a waterfall, parents first, for pages and terminal. Pure.

A span whose parent is not stored (the client's span, or one that has not arrived) is a root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ttft_otel.model.names import keys
from ttft_otel.report.report_types import StoredSpan

MAX_DEPTH: Final = 40  # levels of indentation; deeper rows stay at this one


@dataclass(frozen=True, slots=True)
class WaterfallRow:
    span: StoredSpan
    depth: int
    what: str  #: trunk (a `ttft` or `encode` span), stage, part, call, server or other
    role: str
    stage: str = ""  #: full stage name, or the part's name
    children: int = 0  #: number of child spans

    @property
    def us(self) -> int:
        """The span's length in microseconds."""
        return (self.span.end_ns - self.span.start_ns) // 1000


def build_rows(spans: Sequence[StoredSpan]) -> list[WaterfallRow]:
    """All `spans` as rows, depth first, siblings in time order; each once, even with parent loops."""
    known = {span.span_id: span for span in spans}
    children: dict[str, list[StoredSpan]] = {}
    roots: list[StoredSpan] = []
    # The longer one first among those that begin together: usually the parent.
    for span in sorted(spans, key=lambda each: (each.start_ns, -each.end_ns)):
        if span.parent_id in known and span.parent_id != span.span_id:
            children.setdefault(span.parent_id, []).append(span)
        else:
            roots.append(span)
    # Service -> role, from the spans that have both.
    roles = {
        span.service: str(span.attributes[keys.ROLE])
        for span in spans
        if keys.ROLE in span.attributes
    }
    built: list[WaterfallRow] = []
    seen: set[str] = set()
    stack = [(span, 0) for span in reversed(roots)]  # an explicit stack: foreign traces may be deep
    while len(seen) < len(known):
        if not stack:  # a loop of parents: take its earliest span as a root
            stack.append((next(span for span in spans if span.span_id not in seen), 0))
        span, depth = stack.pop()
        if span.span_id in seen:
            continue
        seen.add(span.span_id)
        own_children = children.get(span.span_id, [])
        built.append(_make_row(span, min(depth, MAX_DEPTH), roles, len(own_children)))
        # Reversed, since the stack gives the last one first.
        stack += [(child, depth + 1) for child in reversed(own_children)]
    return built


def find_window(spans: Sequence[StoredSpan]) -> tuple[int, int]:
    """The time range that a waterfall shows: from the first start to the last first token, in ns.

    spans: not empty; spans may extend beyond the range.
    """
    start = min(span.start_ns for span in spans)
    # A generation lasts seconds: on its axis the stages would be too short to see.
    trunks = [span.end_ns for span in spans if span.is_ttft_span]
    end = max(trunks) if trunks else max(span.end_ns for span in spans)
    return start, max(end, start + 1000)


def _make_row(span: StoredSpan, depth: int, roles: dict[str, str], children: int) -> WaterfallRow:
    attributes = span.attributes
    # A span without a role has that of its service.
    role = str(attributes.get(keys.ROLE) or roles.get(span.service, ""))
    if span.is_ttft_span:
        return WaterfallRow(span, depth, "trunk", role, "", children)
    if keys.STAGE in attributes:
        return WaterfallRow(span, depth, "stage", role, _get_full_stage(span), children)
    if keys.PART in attributes:
        return WaterfallRow(span, depth, "part", role, str(attributes[keys.PART]), children)
    what = "call" if span.kind == 3 else "server" if span.kind == 2 else "other"
    return WaterfallRow(span, depth, what, role, "", children)


def _get_full_stage(span: StoredSpan) -> str:
    """The stage's full name, with its leg where a router's span carries one."""
    stage = str(span.attributes[keys.STAGE])
    leg = str(span.attributes.get(keys.LEG, ""))
    if not leg or stage.startswith(("router.", f"{leg}.")):
        return stage
    return f"{leg}.{stage}"
