# SPDX-License-Identifier: Apache-2.0
"""Explain one stored request: find it and those like it; the command and window_answer.py ask."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ttft_otel.explain.explain.explanation import Explanation, explain_requests
from ttft_otel.explain.window.holding_work import read_holding
from ttft_otel.explain.window.late_requests import choose_like
from ttft_otel.explain.window.request_facts import CannotTellError, build_evidence
from ttft_otel.explain.window.window_reading import read_window
from ttft_otel.model.wait_reasons import WAIT_STAGES
from ttft_otel.report.breakdown_source import BreakdownSource
from ttft_otel.report.report_types import Request
from ttft_otel.report.store.database_reader import RequestFilter

LIKE_LAST: Final = 1000  # requests among which those like a single one are looked for
# Where like requests are looked for, by default.
AROUND: Final = RequestFilter(last=LIKE_LAST)
AFTER_NS: Final = 600 * 10**9  # how long after a single request these may have begun


def add_holding(opened: BreakdownSource, explanation: Explanation) -> Explanation:
    """The explanation with who held the late requests, where their largest stage waits. Raises StoreError."""
    if explanation.difference.word not in WAIT_STAGES:
        return explanation
    return replace(explanation, holding=read_holding(opened, explanation.difference.compared.late))


def explain_one(
    opened: BreakdownSource,
    request_id: str | None,
    trace_id: str | None,
    like: RequestFilter = AROUND,
    group_by: str = "",
) -> Explanation:
    """Explain one request, by either ID, against its like. Raises CannotTellError, StoreError.

    like: where its like are looked for; without a window around the request's own time.
    group_by: an attribute that separates requests.
    """
    request = find_request(opened, request_id, trace_id)
    if request.error or request.pending:
        what = f"failed ({request.error})" if request.error else "is not complete yet"
        raise CannotTellError(
            f"{request.request_id} {what}: it has no first token to explain; its stages: "
            f"ttft-otel report --trace {request.trace_id}"
        )
    until_ns = like.until_ns or request.start_ns + AFTER_NS
    wanted = replace(like, model=request.model, until_ns=until_ns)
    others = read_window(opened, wanted, group_by=group_by).evidence
    trace = opened.find_trace(request.trace_id)
    own = build_evidence(request, trace.spans if trace else (), group_by)
    return add_holding(opened, explain_requests(choose_like(own, others)))


def find_request(opened: BreakdownSource, request_id: str | None, trace_id: str | None) -> Request:
    """The request by either ID. Raises CannotTellError where there is none."""
    if request_id is not None:
        request = opened.find_request(request_id)
    else:
        trace = opened.find_trace((trace_id or "").lower())
        # A client's trace may have several: the slowest one is asked about.
        request = max(trace.requests if trace else (), key=lambda each: each.ttft_us, default=None)
    if request is None:
        name = trace_id if request_id is None else request_id
        raise CannotTellError(
            f"nothing is stored for {name!r}: it was not traced, has not arrived yet, or was removed; "
            "`ttft-otel report --last 20 --json` lists what is"
        )
    return request
