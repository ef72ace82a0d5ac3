# SPDX-License-Identifier: Apache-2.0
"""Assemble Requests from the spans of one trace, and order these as rows of a waterfall. Pure.

Requests are independent of the order of arrival: span_store.py assembles them at each commit,
database_reader.py at each read. Rows, parents first, are for pages and terminal; a span whose parent is not
stored (the client's span, or one that has not arrived) is a root. Behind our router, its `ttft` span covers
the whole request. Behind a foreign router there are only the servers' own spans: the legs of a request are
then chained backwards from the one that gave the first token. The time that it spent in the foreign router,
from that router's own span, is shown as `ttft.before_us` beside the sum of stages and not part of it,
because another process measured its start, perhaps with another host's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from ttft_otel.model import stages
from ttft_otel.model.names import keys, span_names
from ttft_otel.report.report_types import STATUS_ERROR, Leg, Request, StoredSpan, TimeBefore
from ttft_otel.tracing import clock

INSTANCE_ID: Final = "service.instance.id"  # OpenTelemetry's name
FIRST_TOKEN_ROLES: Final = frozenset(stages.ANSWERING_ROLES)
MAX_SKEW_NS: Final = 2_000_000  # accepted difference of two hosts' clocks
MAX_DURATION_US: Final = 1 << 42  # 50 days; larger values in foreign data are ignored
MAX_DEPTH: Final = 40  # levels of a waterfall's indentation; deeper rows stay at this one
SERVER_KIND: Final = 2  # OTLP span kind
MAX_ANCESTORS: Final = 64  # ancestors followed: foreign data may contain a loop
# Host names that different hosts share, so that they cannot prove a common clock.
UNUSABLE_HOSTS: Final = frozenset({"", "localhost", "localhost.localdomain"})
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
    for _ in range(MAX_ANCESTORS):
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
    instance = str(resource.get(INSTANCE_ID, ""))
    words = {str(resource.get(key, "")) for key in ("host.name", "host.id")}
    return (words | {instance.rpartition(":")[0] or instance}) - UNUSABLE_HOSTS


@dataclass(frozen=True, slots=True)
class WaterfallRow:
    span: StoredSpan
    depth: int
    what: str  #: trunk (a `ttft` or `encode` span), stage, part, call, server or other
    role: str
    stage: str = ""  #: full stage name, or the part's name
    children: int = 0  #: number of child spans

    @property
    def us(self) -> int:
        """The span's length in microseconds."""
        return (self.span.end_ns - self.span.start_ns) // 1000


def build_rows(spans: Sequence[StoredSpan]) -> list[WaterfallRow]:
    """All `spans` as rows, depth first, siblings in time order; each once, even with parent loops."""
    known = {span.span_id: span for span in spans}
    children: dict[str, list[StoredSpan]] = {}
    roots: list[StoredSpan] = []
    # The longer one first among those that begin together: usually the parent.
    for span in sorted(spans, key=lambda each: (each.start_ns, -each.end_ns)):
        if span.parent_id in known and span.parent_id != span.span_id:
            children.setdefault(span.parent_id, []).append(span)
        else:
            roots.append(span)
    # Service -> role, from the spans that have both.
    roles = {
        span.service: str(span.attributes[keys.ROLE])
        for span in spans
        if keys.ROLE in span.attributes
    }
    built: list[WaterfallRow] = []
    seen: set[str] = set()
    stack = [(span, 0) for span in reversed(roots)]  # an explicit stack: foreign traces may be deep
    while len(seen) < len(known):
        if not stack:  # a loop of parents: take its earliest span as a root
            stack.append((next(span for span in spans if span.span_id not in seen), 0))
        span, depth = stack.pop()
        if span.span_id in seen:
            continue
        seen.add(span.span_id)
        own_children = children.get(span.span_id, [])
        built.append(_make_row(span, min(depth, MAX_DEPTH), roles, len(own_children)))
        # Reversed, since the stack gives the last one first.
        stack += [(child, depth + 1) for child in reversed(own_children)]
    return built


def find_window(spans: Sequence[StoredSpan]) -> tuple[int, int]:
    """The time range that a waterfall shows: from the first start to the last first token, in ns.

    spans: not empty; spans may extend beyond the range.
    """
    start = min(span.start_ns for span in spans)
    # A generation lasts seconds: on its axis the stages would be too short to see.
    trunks = [span.end_ns for span in spans if span.is_ttft_span]
    end = max(trunks) if trunks else max(span.end_ns for span in spans)
    return start, max(end, start + 1000)


def _make_row(span: StoredSpan, depth: int, roles: dict[str, str], children: int) -> WaterfallRow:
    attributes = span.attributes
    # A span without a role has that of its service.
    role = str(attributes.get(keys.ROLE) or roles.get(span.service, ""))
    if span.is_ttft_span:
        return WaterfallRow(span, depth, "trunk", role, "", children)
    if keys.STAGE in attributes:
        return WaterfallRow(span, depth, "stage", role, _get_full_stage(span), children)
    if keys.PART in attributes:
        return WaterfallRow(span, depth, "part", role, str(attributes[keys.PART]), children)
    what = "call" if span.kind == 3 else "server" if span.kind == 2 else "other"
    return WaterfallRow(span, depth, what, role, "", children)


def _get_full_stage(span: StoredSpan) -> str:
    """The stage's full name, with its leg where a router's span carries one."""
    stage = str(span.attributes[keys.STAGE])
    leg = str(span.attributes.get(keys.LEG, ""))
    if not leg or stage.startswith(("router.", f"{leg}.")):
        return stage
    return f"{leg}.{stage}"
