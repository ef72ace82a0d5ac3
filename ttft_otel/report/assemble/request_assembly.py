# SPDX-License-Identifier: Apache-2.0
"""Assemble Requests from the spans of one trace, independent of the order of arrival. Pure.

span_store.py calls it at each commit, database_reader.py at each read. Behind our router, its `ttft`
span covers the whole request. Behind a foreign router there are only the servers' own spans: the legs
of a request are then chained backwards from the one that gave the first token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from ttft_otel.model import stages
from ttft_otel.model.names import keys
from ttft_otel.report.report_types import STATUS_ERROR, Leg, Request, StoredSpan

INSTANCE_ID: Final = "service.instance.id"  # OpenTelemetry's name
FIRST_TOKEN_ROLES: Final = frozenset(stages.ANSWERING_ROLES)
MAX_SKEW_NS: Final = 2_000_000  # accepted difference of two hosts' clocks
MAX_DURATION_US: Final = 1 << 42  # 50 days; larger values in foreign data are ignored
MAX_PARENTS: Final = 64  # parents followed: foreign data may contain a loop
# The same few dozen attributes in every span. Bounded, because anybody can send others.
_parse_stage: Final = lru_cache(512)(keys.parse_stage_attribute)
_parse_reason: Final = lru_cache(512)(keys.parse_reason_attribute)


def _read_leg(span: StoredSpan) -> Leg:
    """The Leg in the attributes of `span`, a `ttft` or `encode` span; invalid values read as 0 or ""."""
    attributes = span.attributes
    leg_stages = {
        stage: _get_count(attributes, key)
        for key in attributes
        # `unattributed` has a field of its own: twice it would not add up.
        if (stage := _parse_stage(key)) and stages.split_stage(stage)[1] != stages.UNATTRIBUTED
    }
    return Leg(
        span_id=span.span_id,
        service=span.service,
        role=_get_text(attributes, keys.ROLE),
        outermost=attributes.get(keys.OUTERMOST) is True,
        start_ns=span.start_ns,
        ttft_us=_get_count(attributes, keys.TOTAL_US),
        unattributed_us=_get_count(attributes, keys.UNATTRIBUTED_US),
        stages=leg_stages,
        request_id=_get_text(attributes, keys.REQUEST_ID),
        model=_get_text(attributes, keys.MODEL),
        error=_get_text(attributes, keys.ERROR_TYPE)
        or ("error" if span.status == STATUS_ERROR else ""),
        died=_get_text(attributes, keys.DIED_IN),
        streaming=attributes.get(keys.STREAMING) is True,
        instance=_get_text(span.resource, INSTANCE_ID),
        recomputed_items=_get_count(attributes, keys.EC_RECOMPUTED_ITEMS),
        is_engine_only=attributes.get(keys.ENGINE_ONLY) is True,
        foreign=_get_text(attributes, keys.FOREIGN),
        clock_error_us=_get_count(attributes, keys.CLOCK_ERROR_US),
        reasons=_read_reasons(attributes),
        held=_read_held(attributes),
    )


def _read_reasons(attributes: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    reasons: dict[str, dict[str, int]] = {}
    for key in attributes:
        found = _parse_reason(key)
        if found and (length := _get_count(attributes, key)):
            reasons.setdefault(found[0], {})[found[1]] = length
    return reasons


def _read_held(attributes: Mapping[str, Any]) -> dict[str, int]:
    values = {kind: keys.name_held_attribute(kind) for kind in stages.HOLDING_KINDS}
    found = {kind: _get_count(attributes, key) for kind, key in values.items()}
    return {kind: length for kind, length in found.items() if length}


def assemble_requests(
    trace_id: str, trunks: Iterable[StoredSpan], parents: Mapping[str, str]
) -> list[Request]:
    """Assemble a trace's requests, oldest first.

    trunks: its `ttft` and `encode` spans. parents: span ID -> parent ID of all its spans.
    """
    # By ID among equal starts, so that the result does not depend on the order of arrival.
    legs = sorted((_read_leg(span) for span in trunks), key=lambda leg: (leg.start_ns, leg.span_id))
    # An inner router's request is part of the outermost one's.
    routers = [leg for leg in legs if leg.role == "router" and leg.outermost]
    owned: dict[str, list[Leg]] = {router.span_id: [] for router in routers}
    unrouted: list[Leg] = []
    for leg in legs:
        if leg.role == "router":
            continue
        owner = _find_owner(leg, routers, parents)
        (owned[owner] if owner else unrouted).append(leg)
    built = [_build_routed_request(trace_id, router, owned[router.span_id]) for router in routers]
    built += [_chain_legs(trace_id, group) for group in _group_legs(unrouted)]
    return sorted(built, key=lambda request: request.start_ns)


def _find_owner(leg: Leg, routers: Sequence[Leg], parents: Mapping[str, str]) -> str:
    """ID of the router's span above a leg: by parent IDs, or, where a parent is missing, by time."""
    above = {router.span_id: router.span_id for router in routers}
    for router in routers:  # a client span may hang below the router's server span
        if parents.get(router.span_id):
            above[parents[router.span_id]] = router.span_id
    span_id = parents.get(leg.span_id, "")
    for _ in range(MAX_PARENTS):
        if span_id in above:
            return above[span_id]
        if not span_id:
            return ""
        # A span of the chain was not sent or has not arrived: only time can tell.
        if span_id not in parents:
            break
        span_id = parents[span_id]
    if leg.outermost:  # it was called without our router's header
        return ""
    candidates = [
        router
        for router in routers
        if router.start_ns - MAX_SKEW_NS <= leg.start_ns <= router.end_ns + MAX_SKEW_NS
    ]
    # The latest to begin: of nested intervals it is the closest.
    return candidates[-1].span_id if candidates else ""


def _build_routed_request(trace_id: str, router: Leg, legs: list[Leg]) -> Request:
    # To the router the call of an engine without an API server of ours is unattributed as a whole.
    told = {
        f"{leg.role}.{name}": us
        for leg in legs
        if leg.is_engine_only and not leg.error
        for name, us in leg.stages.items()
    }
    if told and (known := sum(told.values())) <= router.unattributed_us:
        router = replace(
            router, stages={**router.stages, **told}, unattributed_us=router.unattributed_us - known
        )
    return Request(
        trace_id=trace_id,
        request_id=router.request_id or trace_id,
        model=router.model or next((each.model for each in legs if each.model), ""),
        start_ns=router.start_ns,
        ttft_us=router.ttft_us,
        unattributed_us=router.unattributed_us,
        stages=router.stages,
        legs=tuple(legs),
        router=router,
        error=router.error,
        died=router.died,
        streaming=router.streaming,
    )


def _group_legs(legs: Sequence[Leg]) -> list[list[Leg]]:
    """Group legs without our router into requests.

    By request ID where several roles share one; else, in time order, up to each first token.
    """
    shared: dict[str, list[Leg]] = {}
    for leg in legs:
        shared.setdefault(leg.request_id, []).append(leg)
    groups: list[list[Leg]] = []
    opened: list[Leg] = []
    for leg in legs:
        same = shared[leg.request_id] if leg.request_id else []
        # One ID on several roles is one request; the same role twice may be a client's reuse.
        if len({other.role for other in same}) > 1:
            if leg is same[0]:
                groups.append(same)
            continue
        opened.append(leg)
        # Whoever gives the first token ends a request: the next leg begins another.
        if leg.role in FIRST_TOKEN_ROLES:
            groups.append(opened)
            opened = []
    return [*groups, opened] if opened else groups


def _chain_legs(trace_id: str, legs: Sequence[Leg]) -> Request:
    """Add up legs without our router's span; the time between them is unattributed."""
    path = _find_critical_path(legs)
    last = path[-1]
    chained_stages = (
        last.stages
        if len(path) == 1
        else {f"{each.role}.{name}": us for each in path for name, us in each.stages.items()}
    )
    known = sum(chained_stages.values())
    # Includes the foreign router's time between the legs, which nobody measured.
    wall = (last.end_ns - path[0].start_ns) // 1000
    # Clocks of two hosts may overlap the legs: the total is never less than their sum.
    ttft = last.ttft_us if len(path) == 1 else max(wall, sum(each.ttft_us for each in path))
    failed_leg = next((each for each in reversed(legs) if each.error), None)
    return Request(
        trace_id=trace_id,
        request_id=last.request_id or trace_id,
        model=next((each.model for each in reversed(legs) if each.model), ""),
        start_ns=path[0].start_ns,
        ttft_us=ttft,
        unattributed_us=last.unattributed_us if len(path) == 1 else ttft - known,
        stages=chained_stages,
        legs=tuple(legs),
        error=failed_leg.error if failed_leg else "",
        died=failed_leg.died if failed_leg else "",
        streaming=last.streaming,
        pending=not any(each.outermost for each in legs),
    )


def _find_critical_path(legs: Sequence[Leg]) -> list[Leg]:
    """The critical path: from the last leg backwards, each time the leg that ended last before it."""
    last = max(legs, key=lambda each: (each.role in FIRST_TOKEN_ROLES, each.end_ns))
    path = [last]
    # One leg of each role: several of one ran side by side.
    rest = [each for each in legs if each is not last and each.role != last.role]
    while rest:
        before = [each for each in rest if each.end_ns <= path[0].start_ns + MAX_SKEW_NS]
        if not before:
            break
        chosen = max(before, key=lambda each: each.end_ns)
        path.insert(0, chosen)
        rest = [each for each in rest if each.role != chosen.role]
    return path


def _get_text(attributes: Mapping[str, Any], key: str) -> str:
    value = attributes.get(key, "")
    # Attributes of a foreign sender may have any type.
    return value if isinstance(value, str) else ""


def _get_count(attributes: Mapping[str, Any], key: str) -> int:
    value = attributes.get(key, 0)
    return value if isinstance(value, int) and 0 <= value < MAX_DURATION_US else 0
