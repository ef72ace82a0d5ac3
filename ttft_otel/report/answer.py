# SPDX-License-Identifier: Apache-2.0
"""Requests and traces as plain dicts: what /ttft_report and /api answer and `report --json` prints.

query.py gives the requests; app.py and terminal.py send them on. Times are ms, or named _ns.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ttft_otel.original import Sums, ms, original
from ttft_otel.report import tree
from ttft_otel.report.query import Trace
from ttft_otel.report.shape import KINDS, Leg, Request, Span
from ttft_otel.report.summary import Summary


def report(request: Request) -> dict[str, Any]:
    """The original TTFT report of a request; an encoder leg there is the slowest one."""
    by_role = {role: sums(leg) for role in request.roles if (leg := request.leg(role))}
    combined = Sums(
        stages=request.stages, unattributed=request.unattributed_us, ttft=request.ttft_us
    )
    return original(request.request_id, by_role, combined)


def sums(leg: Leg) -> Sums:
    """A leg's sums, as original.py takes them."""
    return Sums(stages=leg.stages, unattributed=leg.unattributed_us, ttft=leg.ttft_us)


def request(each: Request) -> dict[str, Any]:
    """One request, short: what a list shows."""
    return {
        "request_id": each.request_id,
        "trace_id": each.trace_id,
        "start_ns": each.start_ns,
        "model": each.model,
        "roles": list(each.roles),
        "ttft_ms": ms(each.ttft_us),
        "unattributed_ms": ms(each.unattributed_us),
        "stages": {name: ms(value) for name, value in each.stages.items()},
        "streaming": each.streaming,
        "error": each.error or None,
        "died_in": each.died or None,
        "pending": each.pending,
        "closed": each.closed,
    }


def leg(each: Leg) -> dict[str, Any]:
    """One server's part of a request."""
    return {
        "service": each.service,
        "ttft_ms": ms(each.ttft_us),
        "unattributed_ms": ms(each.unattributed_us),
        "stages": {name: ms(value) for name, value in each.stages.items()},
    }


def trace(each: Trace) -> dict[str, Any]:
    """A whole trace: its requests with their legs, its spans in the waterfall's order."""
    return {
        "trace_id": each.trace_id,
        "requests": [
            {**request(one), "legs": [{"role": part.role, **leg(part)} for part in one.legs]}
            for one in each.requests
        ],
        "spans": [_span(row.span) for row in tree.rows(each.spans)],
    }


def summary(each: Summary) -> dict[str, Any]:
    """Percentiles, as summary.py defines them."""
    return {
        "count": each.count,
        "failed": each.failed,
        "closed": each.closed,
        "ttft": {name: value for name, value in asdict(each.ttft).items() if name != "name"},
        "stages": {
            line.name: {name: value for name, value in asdict(line).items() if name != "name"}
            for line in each.stages
        },
    }


def _span(span: Span) -> dict[str, Any]:
    return {**asdict(span), "kind": KINDS[span.kind] if span.kind < len(KINDS) else "unspecified"}
