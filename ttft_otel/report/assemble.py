# SPDX-License-Identifier: Apache-2.0
"""Spans of one trace -> Requests: which legs belong to which outermost span, in whatever order they
came; store.py calls it at each commit, query.py when it reads. Pure.

With our router its `ttft` span is the whole. Behind another router every server believes that it is
outermost: then the legs of one request are chained backwards from the one that gave the token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ttft_otel import names, stages
from ttft_otel.report.shape import ERROR, Leg, Request, Span

LAST: Final = frozenset({"decode", "prefill_decode", "mono"})  # roles that give the first token
SKEW_NS: Final = 2_000_000  # clocks of two hosts may differ by this much without losing a leg
LONGEST_US: Final = 1 << 42  # 50 days; what foreign data claims beyond that is not a duration
DEEP: Final = 64  # parents followed before giving up: a loop in foreign data must end


def leg(span: Span) -> Leg:
    """Read a `ttft` or `encode` span's attributes."""
    have = span.attributes
    found = {
        stage: _count(have, key)
        for key in have
        if (stage := names.stage_of(key)) and stages.split(stage)[1] != stages.UNATTRIBUTED
    }
    return Leg(
        span_id=span.span_id,
        service=span.service,
        role=_text(have, names.ROLE),
        outermost=have.get(names.OUTERMOST) is True,
        start_ns=span.start_ns,
        ttft_us=_count(have, names.TOTAL_US),
        unattributed_us=_count(have, names.UNATTRIBUTED_US),
        stages=found,
        request_id=_text(have, names.REQUEST_ID),
        model=_text(have, names.MODEL),
        error=_text(have, names.ERROR_TYPE) or ("error" if span.status == ERROR else ""),
        died=_text(have, names.DIED_IN),
        streaming=have.get(names.STREAMING) is True,
    )


def requests(trace_id: str, trunks: Iterable[Span], parents: Mapping[str, str]) -> list[Request]:
    """Assemble a trace's requests, oldest first. parents: span id -> parent id of all its spans."""
    legs = sorted((leg(span) for span in trunks), key=lambda each: (each.start_ns, each.span_id))
    routers = [each for each in legs if each.role == "router" and each.outermost]
    owned: dict[str, list[Leg]] = {router.span_id: [] for router in routers}
    loose: list[Leg] = []
    for each in legs:
        if each.role == "router":
            continue
        owner = _owner(each, routers, parents)
        (owned[owner] if owner else loose).append(each)
    built = [_routed(trace_id, router, owned[router.span_id]) for router in routers]
    built += [_chained(trace_id, group) for group in _groups(loose)]
    return sorted(built, key=lambda request: request.start_ns)


def _owner(each: Leg, routers: Sequence[Leg], parents: Mapping[str, str]) -> str:
    """The router span above a leg: by parentage, or, with a parent missing, by time."""
    above = {router.span_id: router.span_id for router in routers}
    for router in routers:  # a client span may hang below the router's server span
        if parents.get(router.span_id):
            above[parents[router.span_id]] = router.span_id
    at = parents.get(each.span_id, "")
    for _ in range(DEEP):
        if at in above:
            return above[at]
        if not at:
            return ""
        if at not in parents:
            break
        at = parents[at]
    if each.outermost:
        return ""
    around = [
        router
        for router in routers
        if router.start_ns - SKEW_NS <= each.start_ns <= router.end_ns + SKEW_NS
    ]
    return around[-1].span_id if around else ""


def _routed(trace_id: str, router: Leg, legs: list[Leg]) -> Request:
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


def _groups(legs: Sequence[Leg]) -> list[list[Leg]]:
    """Cut legs without a router into requests: same request id, else up to each first token."""
    shared: dict[str, list[Leg]] = {}
    for each in legs:
        shared.setdefault(each.request_id, []).append(each)
    groups: list[list[Leg]] = []
    opened: list[Leg] = []
    for each in legs:
        same = shared[each.request_id] if each.request_id else []
        if len({other.role for other in same}) > 1:
            if each is same[0]:
                groups.append(same)
            continue
        opened.append(each)
        if each.role in LAST:
            groups.append(opened)
            opened = []
    return [*groups, opened] if opened else groups


def _chained(trace_id: str, legs: Sequence[Leg]) -> Request:
    """Add up legs that no router's span holds; what lies between them is unattributed."""
    path = _path(legs)
    last = path[-1]
    found = (
        last.stages
        if len(path) == 1
        else {f"{each.role}.{name}": us for each in path for name, us in each.stages.items()}
    )
    known = sum(found.values())
    wall = (last.end_ns - path[0].start_ns) // 1000
    ttft = last.ttft_us if len(path) == 1 else max(wall, sum(each.ttft_us for each in path))
    broken = next((each for each in reversed(legs) if each.error), None)
    return Request(
        trace_id=trace_id,
        request_id=last.request_id or trace_id,
        model=next((each.model for each in reversed(legs) if each.model), ""),
        start_ns=path[0].start_ns,
        ttft_us=ttft,
        unattributed_us=last.unattributed_us if len(path) == 1 else ttft - known,
        stages=found,
        legs=tuple(legs),
        error=broken.error if broken else "",
        died=broken.died if broken else "",
        streaming=last.streaming,
        pending=not any(each.outermost for each in legs),
    )


def _path(legs: Sequence[Leg]) -> list[Leg]:
    """The critical path: backwards from the last leg to whichever ended last before it began."""
    last = max(legs, key=lambda each: (each.role in LAST, each.end_ns))
    path = [last]
    rest = [each for each in legs if each is not last and each.role != last.role]
    while rest:
        before = [each for each in rest if each.end_ns <= path[0].start_ns + SKEW_NS]
        if not before:
            break
        chosen = max(before, key=lambda each: each.end_ns)
        path.insert(0, chosen)
        rest = [each for each in rest if each.role != chosen.role]
    return path


def _text(have: Mapping[str, Any], key: str) -> str:
    value = have.get(key, "")
    return value if isinstance(value, str) else ""


def _count(have: Mapping[str, Any], key: str) -> int:
    value = have.get(key, 0)
    return value if isinstance(value, int) and 0 <= value < LONGEST_US else 0
