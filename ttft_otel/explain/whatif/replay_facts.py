# SPDX-License-Identifier: Apache-2.0
"""What a replay needs of a recorded request: when it reached which engine, its size, and how it left.

Input: requests of a store with their spans. Output: ReplayRequests, which
step_fit.py learns from and fleet_model.py replays. Times are microseconds; moments count from `epoch_ns`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ttft_otel.explain.window.request_facts import read_count, refuse_foreign
from ttft_otel.model import stages
from ttft_otel.model.names import keys
from ttft_otel.model.stages import UNATTRIBUTED
from ttft_otel.report.report_types import Leg, ReadRequest, Request, StoredSpan

RANK_MARK: Final = " rank "
SERVER_KIND: Final = 2  # of a span, as in OTLP


def _list_replayed(*kinds: str) -> tuple[str, ...]:
    """The stages whose row in stages.py says one of `kinds` in `replayed`."""
    return tuple(stage.name for stage in stages.STAGES if stage.replayed in kinds)


# What the model of the engine makes anew; all other stages stay as they were recorded.
MODELLED_STAGES: Final = _list_replayed("modelled")
ENGINE_STAGES: Final = _list_replayed("modelled", "inside")
# Between the request's arrival and the scheduler; the connectors' waits are cut out of the queue.
STAGES_BEFORE: Final = _list_replayed("before")
STAGES_AFTER: Final = _list_replayed("after")


@dataclass(frozen=True, slots=True)
class EngineVisit:
    """One request at one engine, as recorded."""

    instance: str  #: service.instance.id, with its rank from 1 on
    role: str
    arrived: int  #: when the engine had it
    computed: int  #: tokens of the prompt
    cached: int  #: likewise
    stages: Mapping[str, int]
    chunks: int = 1
    own_tokens: int = 0
    step_tokens: int = 0
    items: int = 0  #: media items encoded for it
    step_items: int = 0  #: media items encoded by its steps
    output_tokens: int = 0  #: 0 where that is not known
    token_us: int = 0  #: between two of them, likewise
    #: From the first token to the end of the answer, -1 where that is not known.
    answer_us: int = -1
    after_us: int = 0  #: from the end of its last step to its end
    preemptions: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)

    @property
    def sampled(self) -> int:
        """When its last step had ended."""
        return self.arrived + sum(self.stages.get(name, 0) for name in ENGINE_STAGES)


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """One request that got its first token."""

    request_id: str
    start: int
    main: EngineVisit  #: at the engine that gave it
    stages: Mapping[str, int]
    encodes: tuple[EngineVisit, ...] = ()  #: at encoder instances, before that
    prefix: str = ""  #: of the main engine's stages in `stages`, "" without a router
    policy: str = ""  #: by which a router chose the main engine
    model: str = ""  #: "" where that is not known
    router: str = ""  #: its instance, likewise

    @property
    def ttft_us(self) -> int:
        return sum(self.stages.values())


@dataclass(frozen=True, slots=True)
class Recording:
    requests: tuple[ReplayRequest, ...]
    #: Of each main instance, from the resource of its spans.
    settings: Mapping[str, Mapping[str, int]]
    failed: int = 0  #: requests without a first token
    unreadable: int = 0  #: those whose engine's part is not known
    roles: frozenset[str] = frozenset()


def collect_recording(read: Iterable[ReadRequest], epoch_ns: int) -> Recording:
    """The recording of a window's requests, in any order, of which the first begins at `epoch_ns`."""
    found: list[ReplayRequest] = []
    settings: dict[str, Mapping[str, int]] = {}
    failed = unreadable = 0
    roles: set[str] = set()
    for request, spans in ((each.request, each.spans) for each in read):
        roles.update(request.roles)
        refuse_foreign(next((leg.foreign for leg in request.legs if leg.foreign), ""))
        if request.error:
            # What the client sent was refused: no engine has seen it.
            failed += not keys.is_refusal(request.error)
            continue
        replay = None if request.pending else read_request(request, spans, epoch_ns, settings)
        if replay is None:
            unreadable += 1
        else:
            found.append(replay)
    found.sort(key=lambda each: each.start)
    return Recording(tuple(found), settings, failed, unreadable, frozenset(roles))


def read_request(
    request: Request,
    spans: Sequence[StoredSpan],
    epoch_ns: int,
    settings: dict[str, Mapping[str, int]],
) -> ReplayRequest | None:
    """One request; None where its engine's part was not measured. Adds to `settings` by instance.

    spans: its `ttft` and `encode` spans, and those above them.
    """
    by_id = {span.span_id: span for span in spans}
    visits: list[EngineVisit] = []
    main: EngineVisit | None = None
    for leg in request.legs:
        span = by_id.get(leg.span_id)
        if span is None or leg.error:
            continue
        visit = _read_visit(leg, span, by_id.get(span.parent_id), epoch_ns)
        if leg.role == stages.ENCODE:
            visits.append(visit)
        elif leg.role in stages.ANSWERING_ROLES and leg.stages.get("prefill.compute"):
            main = visit
            settings.setdefault(visit.instance, dict(read_settings(span.resource)))
    if main is None or not main.computed:
        return None
    # What stands before the names of the main engine's stages: its role and a dot, or nothing.
    return ReplayRequest(
        request_id=request.request_id or request.trace_id,
        start=(request.start_ns - epoch_ns) // 1000,
        main=main,
        stages={**request.stages, UNATTRIBUTED: request.unattributed_us},
        encodes=tuple(visits),
        prefix=f"{main.role}." if f"{main.role}.prefill.compute" in request.stages else "",
        policy=_find_policy(spans, main.role),
        model=request.model,
        router=request.router.instance if request.router else "",
    )


def _read_visit(
    leg: Leg, span: StoredSpan, server: StoredSpan | None, epoch_ns: int
) -> EngineVisit:
    """A leg at its engine. server: the HTTP span above it, whose end is that of the answer."""
    begun = (leg.start_ns - epoch_ns) // 1000
    cached = read_count(span, keys.CACHED_TOKENS)
    is_http = server is not None and server.kind == SERVER_KIND
    after = sum(leg.stages.get(name, 0) for name in STAGES_AFTER) + leg.unattributed_us
    # The engine is done with a stream when the last token leaves, some time before the answer ends:
    # the way of the first token is taken as that of the last one.
    answer_us = (server.end_ns - leg.end_ns) // 1000 if server is not None and is_http else -1
    # Behind one API server each data-parallel rank is an engine of its own.
    rank = read_count(span, keys.RANK)
    return EngineVisit(
        instance=f"{leg.instance}{RANK_MARK}{rank}" if rank > 0 else leg.instance,
        role=leg.role,
        arrived=begun + sum(leg.stages.get(name, 0) for name in STAGES_BEFORE),
        # vLLM computes at least the last token of a prompt, for its logits.
        computed=max(read_count(span, keys.INPUT_TOKENS) - cached, 1),
        cached=cached,
        stages={name: leg.stages[name] for name in ENGINE_STAGES if name in leg.stages},
        chunks=max(read_count(span, keys.PREFILL_CHUNKS), 1),
        own_tokens=read_count(span, keys.PREFILL_OWN_TOKENS),
        step_tokens=read_count(span, keys.PREFILL_STEP_TOKENS),
        items=read_count(span, keys.ENCODER_OWN_ITEMS),
        step_items=read_count(span, keys.ENCODER_STEP_ITEMS),
        output_tokens=read_count(server, keys.OUTPUT_TOKENS) if server is not None else 0,
        token_us=read_count(server, keys.TIME_PER_OUTPUT_TOKEN_US) if server is not None else 0,
        answer_us=max(answer_us, 0) if is_http else -1,
        after_us=after,
        preemptions=read_count(span, keys.PREEMPTIONS),
        reasons=leg.reasons.get("queue", {}),
    )


def read_settings(resource: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The scheduler's settings among a resource's attributes, those that it has."""
    for name in keys.ENGINE_SETTINGS:
        value = resource.get(name)
        # True is an int to Python, and asynchronous scheduling is given as 0 or 1.
        if isinstance(value, int) and value >= 0:
            yield name, int(value)


def _find_policy(spans: Iterable[StoredSpan], role: str) -> str:
    """The policy by which a router chose the instance of `role`; "" without a router's span."""
    for span in spans:
        if span.attributes.get(keys.LEG) == role and keys.ROUTE_POLICY in span.attributes:
            return str(span.attributes[keys.ROUTE_POLICY])
    return ""
