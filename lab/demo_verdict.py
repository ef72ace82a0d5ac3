# SPDX-License-Identifier: Apache-2.0
"""Check the demo's traces: complete, exact sums, nothing unattributed, nothing encoded twice. Pure.

An empty list of faults is success.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ttft_otel.model.names import keys
from ttft_otel.report.report_types import SPAN_KINDS, StoredSpan
from ttft_otel.report.store.database_reader import StoredTrace

SERVER_KIND: Final = SPAN_KINDS.index("server")
ENCODED_TWICE_REMEDY: Final = 'see "Encoded twice" in docs/router.md'


@dataclass(frozen=True, slots=True)
class RequestObservation:
    """What is known of one request after its run.

    name: the key of its faults. status: of HTTP. legs: number of servers behind the router
    that it needs. trace: as the receiver stored it; None when no span of it arrived.
    """

    name: str
    status: int
    legs: int
    trace: StoredTrace | None


def find_missing_spans(trace: StoredTrace | None, legs: int) -> str:
    """What a routed request's trace lacks; "" when it is complete.

    legs: number of servers behind the router, each of which has a server and a `ttft` span.
    """
    if trace is None:
        return "no span of it was stored"
    # The router is a server too, with a server and a `ttft` span of its own.
    expected_servers = 1 + legs
    servers = [span for span in trace.spans if span.kind == SERVER_KIND]
    trunks = [span for span in trace.spans if span.is_ttft_span]
    # `<`, not `!=`: a leg that was tried twice has one more.
    if len(servers) < expected_servers or len(trunks) < expected_servers:
        return f"{len(servers)} server and {len(trunks)} ttft spans of {expected_servers} each"
    span_ids = {span.span_id for span in trace.spans}
    roots = [span for span in trace.spans if not span.parent_id]
    # A parent that never arrived: its process lost a record.
    orphans = [
        span.name for span in trace.spans if span.parent_id and span.parent_id not in span_ids
    ]
    if orphans:
        return f"parents are missing of {', '.join(orphans)}"
    # The demo's client sends no context, so the router's span is the one root.
    return "" if len(roots) == 1 else f"{len(roots)} roots"


def find_faults(observation: RequestObservation) -> list[str]:
    """What is wrong with one request, its trace, or its sums; [] when nothing is."""
    problems = [] if observation.status == 200 else [f"was answered with {observation.status}"]
    if missing := find_missing_spans(observation.trace, observation.legs):
        problems.append(f"its trace is not whole: {missing}")
    for span in observation.trace.spans if observation.trace else ():
        if span.is_ttft_span:
            problems += _find_sum_faults(span)
    return problems


def judge_requests(all_seen: Sequence[RequestObservation]) -> dict[str, list[str]]:
    """Request name -> its faults, for those that have any."""
    return {seen.name: found for seen in all_seen if (found := find_faults(seen))}


def _find_sum_faults(span: StoredSpan) -> list[str]:
    """Faults of one span that carries a breakdown, from its attributes alone."""
    attributes = span.attributes
    role = attributes.get(keys.ROLE)
    parts = [attributes[key] for key in attributes if keys.parse_stage_attribute(key)]
    # Attributes, not child spans: they hold the sums as the server made them.
    total = attributes[keys.TOTAL_US]
    problems = []
    if sum(parts) != total:
        problems.append(f"{role}: stages and unattributed are {sum(parts)} µs, ttft {total} µs")
    if any(part < 0 for part in parts):
        problems.append(f"{role}: a stage is negative")
    unattributed_us = attributes.get(keys.UNATTRIBUTED_US, 0)
    if unattributed_us and role != "router":
        problems.append(f"{role}: {unattributed_us} µs unattributed")
    if recomputed_items := attributes.get(keys.EC_RECOMPUTED_ITEMS):
        problems.append(
            f"{role}: encoded {recomputed_items} media items that an encoder had encoded; "
            f"{ENCODED_TWICE_REMEDY}"
        )
    if error := attributes.get(keys.ERROR_TYPE):
        problems.append(f"{role}: error {error}")
    return problems
