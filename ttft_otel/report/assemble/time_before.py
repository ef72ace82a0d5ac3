# SPDX-License-Identifier: Apache-2.0
"""Time that a request spent in a foreign router before our server, from that router's own span.

Shown as `ttft.before_us` beside the sum of stages and not part of it, because another process measured
its start, perhaps with another host's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ttft_otel.model.names import keys, span_names
from ttft_otel.report.report_types import Leg, Request, StoredSpan, TimeBefore
from ttft_otel.tracing import clock

SERVER_KIND: Final = 2  # OTLP span kind
MAX_ANCESTORS: Final = 64  # ancestors followed: foreign data may contain a loop
# Host names that different hosts share, so that they cannot prove a common clock.
UNUSABLE_HOSTS: Final = frozenset({"", "localhost", "localhost.localdomain"})


def collect_ancestors(span_ids: Iterable[str], parents: Mapping[str, str]) -> set[str]:
    """IDs of all stored ancestors of `span_ids`, up to MAX_ANCESTORS levels.

    parents: span ID -> parent ID of all stored spans of the trace.
    """
    above: set[str] = set()
    for span_id in span_ids:
        for _ in range(MAX_ANCESTORS):
            span_id = parents.get(span_id, "")
            if span_id not in parents or span_id in above:
                break
            above.add(span_id)
    return above


def add_before(
    requests: Sequence[Request], parents: Mapping[str, str], above: Mapping[str, StoredSpan]
) -> list[Request]:
    """The requests with `before` set where a foreign span above them is stored.

    parents: span ID -> parent ID. above: the spans of collect_ancestors(), by ID.
    """
    extended = []
    for request in requests:
        head_leg = _find_head_leg(request)
        # The leg's own parent: our server span, which the foreign router called.
        server = above.get(parents.get(head_leg.span_id, ""))
        # The TTFT of a failed request ends with its response, which may be after its caller's span.
        sent_ns = head_leg.start_ns if head_leg.error else head_leg.end_ns
        before = measure_before(server, sent_ns, above) if server is not None else None
        extended.append(replace(request, before=before) if before else request)
    return extended


def measure_before(
    server: StoredSpan, sent_ns: int, above: Mapping[str, StoredSpan]
) -> TimeBefore | None:
    """Time from the calling router's span to `server`, our span of the HTTP request.

    Uses the span with which that router received the request (kind server), else our direct parent.
    None without a foreign span above ours.
    sent_ns: when our first token was sent, by our clock. above: ancestors by ID.
    """
    chain = _list_foreign_ancestors(server, above)
    if not chain:
        return None
    # Spans of one resource come from one process, hence from one clock.
    same_clock = [span for span in chain if span.resource == chain[0].resource]
    caller = next((span for span in same_clock if span.kind == SERVER_KIND), chain[0])
    # On one host wall clocks are equal up to the conversion's error; else causality bounds the shift.
    if _list_hosts(server.resource) & _list_hosts(caller.resource):
        shift, error = 0, clock.WALL_ERROR_US * 1000
    else:
        shift, error = _bound_clock_shift(server.start_ns, sent_ns, same_clock)
    return TimeBefore(
        # Clocks can disagree by more than the time that passed.
        us=max(0, server.start_ns + shift - caller.start_ns) // 1000,
        # Rounded up: an error bound must not be too small.
        error_us=None if error < 0 else -(-error // 1000),
        caller=caller.service or caller.name,
        span_id=caller.span_id,
    )


def annotate_spans(spans: Sequence[StoredSpan], requests: Sequence[Request]) -> list[StoredSpan]:
    """The spans, with `before` as attributes on the span with which each request begins."""
    added: dict[str, dict[str, Any]] = {}
    for request in requests:
        if request.before:
            attributes: dict[str, Any] = {keys.BEFORE_US: request.before.us}
            if request.before.error_us is not None:
                attributes[keys.BEFORE_ERROR_US] = request.before.error_us
            added[_find_head_leg(request).span_id] = attributes
    return [
        replace(span, attributes=span.attributes | added[span.span_id])
        if span.span_id in added
        else span
        for span in spans
    ]


def _find_head_leg(request: Request) -> Leg:
    """The leg with which the request's TTFT begins: the router's, or the earliest."""
    if request.router:
        return request.router
    return next((leg for leg in request.legs if leg.start_ns == request.start_ns), request.legs[0])


def _list_foreign_ancestors(
    server: StoredSpan, above: Mapping[str, StoredSpan]
) -> list[StoredSpan]:
    """Foreign spans directly above ours, nearest first; [] when our own parent is a span of ours."""
    chain: list[StoredSpan] = []
    span = above.get(server.parent_id)
    while span is not None and span.scope != span_names.SCOPE and len(chain) < MAX_ANCESTORS:
        chain.append(span)
        span = above.get(span.parent_id)
    return chain


def _bound_clock_shift(
    start_ns: int, sent_ns: int, callers: Sequence[StoredSpan]
) -> tuple[int, int]:
    """Bound the difference of two hosts' clocks by causality; nanoseconds.

    A caller's span begins before our server gets the request, and ends after the caller has our first
    token. (The end of our own span would be a closer bound, but our process may note it after the caller
    has the answer: up to 26 ms later on a busy machine.) Some callers end their spans with the response's
    headers: a span that ends before the first token, by the clocks, counts only if all do.

    Returns the shift to add to our times (the smallest that puts them inside all callers' spans, usually
    0), and its error bound; -1 when nothing bounds it, because all callers ended before the first token.
    """
    low = max(span.start_ns - start_ns for span in callers)
    length = sent_ns - start_ns
    slacks = [span.end_ns - sent_ns for span in callers if span.end_ns - span.start_ns >= length]
    high = min((slack for slack in slacks if slack >= 0), default=max(slacks, default=low - 1))
    shift = max(0, low) if high < low else min(max(0, low), high)
    return shift, -1 if high < low else max(high - shift, shift - low)


def _list_hosts(resource: Mapping[str, Any]) -> set[str]:
    """Host names and IDs in a resource; service.instance.id often is `host:pid`."""
    instance = str(resource.get("service.instance.id", ""))
    words = {str(resource.get(key, "")) for key in ("host.name", "host.id")}
    return (words | {instance.rpartition(":")[0] or instance}) - UNUSABLE_HOSTS
