# SPDX-License-Identifier: Apache-2.0
"""What an explanation needs of a request: its stages, why each waited, where each ran, and its counts.

Read from the embedded store or from Tempo; late_requests.py and cause_findings.py get it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ttft_otel.explain.window.request_facts import RequestFacts, build_facts, read_count
from ttft_otel.model import stages
from ttft_otel.model.names import keys
from ttft_otel.report.assemble.wait_lines import list_wait_reasons
from ttft_otel.report.breakdown_source import BreakdownSource
from ttft_otel.report.report_types import Leg, Request, StoredSpan

HOP: Final = "router.hop."
# Figures of a request beside its stages: what cause_rules.py asks for -> the attribute that has it.
COUNTS: Final[Mapping[str, str]] = {
    "preemptions": keys.PREEMPTIONS,
    "chunks": keys.PREFILL_CHUNKS,
    "recomputed_items": keys.EC_RECOMPUTED_ITEMS,
}


@dataclass(frozen=True, slots=True)
class RequestEvidence:
    """One request with a first token.

    legs: IDs of the spans that have its stages. closed: these add up to its TTFT, in every leg. reasons:
    microseconds by reason, of stages that wait. instances: where a stage ran. counts: by the names of COUNTS.
    held: microseconds of waiting by the kind of work that the engine did meanwhile (stages.HOLDING_KINDS).
    """

    facts: RequestFacts
    trace_id: str
    closed: bool
    reasons: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    instances: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    legs: frozenset[str] = frozenset()


def read_evidence(
    opened: BreakdownSource, requests: Iterable[Request]
) -> Iterator[RequestEvidence]:
    """The evidence of those `requests` that got a first token, in their order."""
    for request in requests:
        # A failed request has no first token; a pending one lacks the span that has the sum.
        if not request.error and not request.pending:
            yield build_evidence(request, opened.find_trunks(request.trace_id))


def build_evidence(request: Request, trunks: Sequence[StoredSpan]) -> RequestEvidence:
    """Join `request` with the attributes of its `ttft` and `encode` spans."""
    legs = frozenset(leg.span_id for leg in request.legs)
    spans = [span for span in trunks if span.span_id in legs]
    reasons = {name: dict(list_wait_reasons(request, name)) for name in request.stages}
    places = {name: find_instance(request, name) for name in request.stages}
    return RequestEvidence(
        facts=build_facts(request, trunks),
        trace_id=request.trace_id,
        closed=request.closed,
        legs=legs,
        reasons={name: found for name, found in reasons.items() if found},
        instances={name: place for name, place in places.items() if place},
        # Legs that ran side by side each tell their own.
        counts={
            count: sum(read_count(span, attribute) for span in spans)
            for count, attribute in COUNTS.items()
        },
        held={
            kind: us
            for kind in stages.HOLDING_KIND_NAMES
            if (us := sum(read_count(span, keys.name_held_attribute(kind)) for span in spans))
        },
    )


def find_instance(request: Request, stage: str) -> str:
    """The service.instance.id of the server that had `stage`; "" where it is not told."""
    if stage.startswith(HOP):
        # A hop's time passes on the way to its leg, and in that leg's accept queue.
        return name_instance(request.find_leg(stage.removeprefix(HOP)))
    if stage in stages.ROUTER_STAGES:
        return name_instance(request.router)
    role = stages.find_leg(stage)
    if role:
        return name_instance(request.find_leg(role))
    return name_instance(request.legs[-1] if request.legs else None)


def name_instance(leg: Leg | None) -> str:
    """A leg's instance; "" without one."""
    return leg.instance if leg is not None else ""
