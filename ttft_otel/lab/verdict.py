# SPDX-License-Identifier: Apache-2.0
"""Judge what the demo got: whole traces, exact sums, nothing unattributed on a server. Pure.

demo.py gives the client's answers and the stored traces; an empty list of sentences is success.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ttft_otel import names
from ttft_otel.report.query import Trace
from ttft_otel.report.shape import KINDS, Span

SERVER: Final = KINDS.index("server")


@dataclass(frozen=True, slots=True)
class Seen:
    """One request from all sides; legs: servers it had to pass; trace None: nothing was stored."""

    name: str
    status: int
    legs: int
    trace: Trace | None


def lacking(trace: Trace | None, legs: int) -> str:
    """What a routed request's trace still lacks: the router, and each of its legs."""
    if trace is None:
        return "no span of it was stored"
    wanted = 1 + legs
    servers = [span for span in trace.spans if span.kind == SERVER]
    trunks = [span for span in trace.spans if span.trunk]
    if len(servers) < wanted or len(trunks) < wanted:
        return f"{len(servers)} server and {len(trunks)} ttft spans of {wanted} each"
    known = {span.span_id for span in trace.spans}
    roots = [span for span in trace.spans if not span.parent_id]
    orphans = [span.name for span in trace.spans if span.parent_id and span.parent_id not in known]
    if orphans:
        return f"parents are missing of {', '.join(orphans)}"
    return "" if len(roots) == 1 else f"{len(roots)} roots"


def faults(seen: Seen) -> list[str]:
    """Why one request did not close; empty when it did."""
    found = [] if seen.status == 200 else [f"was answered with {seen.status}"]
    if missing := lacking(seen.trace, seen.legs):
        found.append(f"its trace is not whole: {missing}")
    for span in seen.trace.spans if seen.trace else ():
        if span.trunk:
            found += _sums(span)
    return found


def verdict(all_seen: Sequence[Seen]) -> dict[str, list[str]]:
    """Request -> its faults, for those that have any."""
    return {seen.name: found for seen in all_seen if (found := faults(seen))}


def _sums(span: Span) -> list[str]:
    """Faults of one span that carries a breakdown, from its attributes alone."""
    have = span.attributes
    role = have.get(names.ROLE)
    parts = [have[key] for key in have if names.stage_of(key)]
    total = have[names.TOTAL_US]
    found = []
    if sum(parts) != total:
        found.append(f"{role}: stages and unattributed are {sum(parts)} µs, ttft {total} µs")
    if any(part < 0 for part in parts):
        found.append(f"{role}: a stage is negative")
    left = have.get(names.UNATTRIBUTED_US, 0)
    if left and role != "router":
        found.append(f"{role}: {left} µs unattributed")
    if error := have.get(names.ERROR_TYPE):
        found.append(f"{role}: error {error}")
    return found
