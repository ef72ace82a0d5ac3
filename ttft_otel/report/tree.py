# SPDX-License-Identifier: Apache-2.0
"""A trace's spans -> rows of a waterfall, parents first; page and terminal draw them. Pure.

A span whose parent is not stored (the caller's own, or not here yet) is a root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ttft_otel import names
from ttft_otel.report.shape import Span

DEEP: Final = 40  # nesting shown; deeper rows stay at this indent


@dataclass(frozen=True, slots=True)
class Row:
    """One line: the span, its depth, and what it is: root, trunk, stage, part, call or other."""

    span: Span
    depth: int
    what: str
    role: str
    stage: str = ""
    children: int = 0

    @property
    def us(self) -> int:
        """The span's length in microseconds."""
        return (self.span.end_ns - self.span.start_ns) // 1000


def rows(spans: Sequence[Span]) -> list[Row]:
    """All spans as rows, depth first, siblings in time order; each once, whatever its ids say."""
    known = {span.span_id: span for span in spans}
    below: dict[str, list[Span]] = {}
    roots: list[Span] = []
    for span in sorted(spans, key=lambda each: (each.start_ns, -each.end_ns)):
        if span.parent_id in known and span.parent_id != span.span_id:
            below.setdefault(span.parent_id, []).append(span)
        else:
            roots.append(span)
    roles = _roles(spans)
    found: list[Row] = []
    seen: set[str] = set()
    stack = [(span, 0) for span in reversed(roots)]
    while len(seen) < len(known):
        if not stack:  # a loop of parents: take its earliest span as a root
            stack.append((next(span for span in spans if span.span_id not in seen), 0))
        span, depth = stack.pop()
        if span.span_id in seen:
            continue
        seen.add(span.span_id)
        under = below.get(span.span_id, [])
        found.append(_row(span, min(depth, DEEP), roles, len(under)))
        stack += [(child, depth + 1) for child in reversed(under)]
    return found


def window(spans: Sequence[Span]) -> tuple[int, int]:
    """What a waterfall shows first: from the first start to the last first token, in ns."""
    start = min(span.start_ns for span in spans)
    trunks = [span.end_ns for span in spans if span.trunk]
    end = max(trunks) if trunks else max(span.end_ns for span in spans)
    return start, max(end, start + 1000)


def _row(span: Span, depth: int, roles: dict[str, str], children: int) -> Row:
    have = span.attributes
    role = str(have.get(names.ROLE) or roles.get(span.service, ""))
    if span.trunk:
        return Row(span, depth, "trunk", role, "", children)
    if names.STAGE in have:
        return Row(span, depth, "stage", role, _full(span), children)
    if names.PART in have:
        return Row(span, depth, "part", role, str(have[names.PART]), children)
    what = "call" if span.kind == 3 else "server" if span.kind == 2 else "other"
    return Row(span, depth, what, role, "", children)


def _full(span: Span) -> str:
    """The stage's full name, with its leg where a router's span carries one."""
    stage = str(span.attributes[names.STAGE])
    leg = str(span.attributes.get(names.LEG, ""))
    if not leg or stage.startswith(("router.", f"{leg}.")):
        return stage
    return f"{leg}.{stage}"


def _roles(spans: Sequence[Span]) -> dict[str, str]:
    """Service -> role, from the spans that say both."""
    return {
        span.service: str(span.attributes[names.ROLE])
        for span in spans
        if names.ROLE in span.attributes
    }
