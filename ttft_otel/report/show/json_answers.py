# SPDX-License-Identifier: Apache-2.0
"""Requests and traces as JSON objects: the answers of /ttft_report and /api, and `report --json`.

Times are in milliseconds, except those named _ns.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ttft_otel.model.timing import ServerTiming, build_ttft_report, to_ms
from ttft_otel.report.assemble import request_assembly
from ttft_otel.report.assemble.summary import (
    Recomputed,
    Summary,
    SummaryLine,
    collect_recomputed,
)
from ttft_otel.report.report_types import SPAN_KINDS, Leg, Request
from ttft_otel.report.store.database_reader import StoredTrace


def build_report(request: Request) -> dict[str, Any]:
    """The TTFT report of `request`; of several legs of one role it has the slowest."""
    # The slowest leg is the one that the first token waited for.
    by_role = {
        role: ServerTiming(leg.stages, leg.unattributed_us, leg.ttft_us)
        for role in request.roles
        if (leg := request.find_leg(role))
    }
    # The router's own sums, which contain what no leg can see.
    combined = ServerTiming(request.stages, request.unattributed_us, request.ttft_us)
    return build_ttft_report(request.request_id, by_role, combined)


def describe_request(assembled: Request) -> dict[str, Any]:
    """One request with the breakdown of each of its servers; no spans."""
    return {
        "request_id": assembled.request_id,
        "trace_id": assembled.trace_id,
        "start_ns": assembled.start_ns,
        "model": assembled.model,
        "roles": list(assembled.roles),
        "ttft_ms": to_ms(assembled.ttft_us),
        "unattributed_ms": to_ms(assembled.unattributed_us),
        "stages": {name: to_ms(value) for name, value in assembled.stages.items()},
        # Beside the sums, never in them: another process measured it.
        "before": describe_before(assembled),
        "recomputed": list_recomputed(collect_recomputed([assembled])),
        "streaming": assembled.streaming,
        # null and not "": readers ask whether there is one.
        "error": assembled.error or None,
        "died_in": assembled.died or None,
        # Legs of it may still arrive: the figures can grow.
        "pending": assembled.pending,
        "closed": assembled.closed,
        "legs": [{"role": part.role, **describe_leg(part)} for part in assembled.legs],
    }


def describe_before(assembled: Request) -> dict[str, Any] | None:
    """Time in a foreign router before our spans, which is not part of the sums.

    None when no span of such a router is stored.
    """
    if assembled.before is None:
        return None
    error_us = assembled.before.error_us
    return {
        "ms": to_ms(assembled.before.us),
        "error_ms": None if error_us is None else to_ms(error_us),
        "caller": assembled.before.caller,
        "span_id": assembled.before.span_id,
    }


def list_recomputed(items: Recomputed) -> list[dict[str, Any]]:
    """The instances that encoded media items again, those with most of them first; [] if there are none."""
    return [
        {"role": role, "instance": instance, "items": count}
        for (role, instance), count in items.most_common()
    ]


def describe_leg(server_leg: Leg) -> dict[str, Any]:
    return {
        "service": server_leg.service,
        "instance": server_leg.instance,
        "ttft_ms": to_ms(server_leg.ttft_us),
        "unattributed_ms": to_ms(server_leg.unattributed_us),
        "stages": {name: to_ms(value) for name, value in server_leg.stages.items()},
        "reasons": {
            group: {name: to_ms(value) for name, value in reasons.items()}
            for group, reasons in server_leg.reasons.items()
        },
        "held": {kind: to_ms(value) for kind, value in server_leg.held.items()},
        "clock_error_ms": to_ms(server_leg.clock_error_us),
        "foreign": server_leg.foreign,
    }


def describe_trace(stored_trace: StoredTrace) -> dict[str, Any]:
    """A trace: its requests with their legs, and its spans in the order of the waterfall."""
    return {
        "trace_id": stored_trace.trace_id,
        "requests": [describe_request(one) for one in stored_trace.requests],
        "spans": _describe_spans(stored_trace),
    }


def describe_one(request: Request, stored_trace: StoredTrace) -> dict[str, Any]:
    """The report of one request, with the request itself and all spans of its trace."""
    return {
        **build_report(request),
        "request": describe_request(request),
        "spans": _describe_spans(stored_trace),
    }


def describe_summary(totals: Summary) -> dict[str, Any]:
    """Percentiles of TTFT and stages; summary.py defines them."""
    return {
        "count": totals.count,
        "failed": totals.failed,
        "left": totals.left,
        "refused": totals.refused,
        "closed": totals.closed,
        "ttft": _list_numbers(totals.ttft),
        "stages": {line.name: _list_numbers(line) for line in totals.stages},
        "before": _list_numbers(totals.before) if totals.before else None,
        "recomputed": list_recomputed(totals.recomputed),
    }


def _list_numbers(line: SummaryLine) -> dict[str, Any]:
    # The name is the key already.
    return {name: value for name, value in asdict(line).items() if name != "name"}


def _describe_spans(stored_trace: StoredTrace) -> list[dict[str, Any]]:
    return [
        {
            **asdict(span),
            # Words as in OpenTelemetry's text; numbers differ between its formats.
            "kind": SPAN_KINDS[span.kind] if span.kind < len(SPAN_KINDS) else "unspecified",
        }
        for span in (row.span for row in request_assembly.build_rows(stored_trace.spans))
    ]
