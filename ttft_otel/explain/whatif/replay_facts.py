# SPDX-License-Identifier: Apache-2.0
"""What a replay needs of a recorded request, and what the steps of its engines had to do. Pure; needs numpy.

Input: requests of a store with their spans. Output: ReplayRequests, which engine_model.py replays; samples
of steps, from which step_fit.py learns. Times are microseconds; moments count from `epoch_ns`.

A traced prompt is a sample: `prefill.compute` is its steps' whole length, and `ttft.prefill.step_tokens` has
all of their tokens. An answer whose time per token is known is one, too. What requests beside it add to its
steps, contexts that decodes read among them, follows from when they ran.
The steps also tell whether the requests of a window are all that its engines served: they have the tokens
of everybody, and what is missing was not sampled or kept. window_reading.py says so to explain and diff;
what-if refuses, because it replays the load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy

from ttft_otel.explain.window.request_facts import read_count, refuse_foreign
from ttft_otel.model import stages
from ttft_otel.model.names import keys
from ttft_otel.model.stages import UNATTRIBUTED
from ttft_otel.report.report_types import Leg, ReadRequest, Request, StoredSpan

RANK_MARK: Final = " rank "
SERVER_KIND: Final = 2  # of a span, as in OTLP
Array = numpy.ndarray[Any, numpy.dtype[numpy.float64]]

# Passes with a prompt, passes without one, their tokens, token pairs that prompts' attention compares, and
# tokens that decodes read.
WORK: Final = ("prompt", "decode", "token", "pair", "context")
MAX_ANSWERS: Final = 400  # that are samples, of each instance, evenly over the window
MIN_STEPS: Final = 8  # of them
MAX_UNSEEN: Final = 1.5  # of the tokens of others in a step, as recorded to as accounted for
FEW_TOKENS: Final = 4.0
MIN_TELLING: Final = 20  # prompts whose steps are looked at; fewer say nothing
MAX_LOOKED_AT: Final = 400  # prompts whose steps are looked at, evenly over the window


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


@dataclass(frozen=True, slots=True)
class WorkSamples:
    """Samples of the engines of one role: prompts in the order of the visits, then answers."""

    work: Array  #: a row of WORK for each
    lengths: Array  #: microseconds of all its passes
    instances: tuple[str, ...]
    spans: Array  #: of each prompt its full steps, their tokens, and those of its last step
    shares: Array  #: of each answer, which part of each prompt's steps was among its own
    decodes: Array  #: of each answer, tokens of a step without prompts

    def list_rows(self, knee: int) -> Array:
        """`work`, and hypot(tokens, knee) of all steps, which is flat below the knee; 0 without one."""
        rounded = numpy.zeros(len(self.work))
        if knee:
            full, size, last = self.spans.T
            prompts = full * numpy.hypot(size, knee) + numpy.hypot(last, knee)
            alone = self.work[len(prompts) :, 1] * numpy.hypot(self.decodes, knee)
            rounded = numpy.concatenate([prompts, self.shares @ prompts + alone])
        return numpy.column_stack([self.work, rounded])


def collect_work(
    visits: Sequence[EngineVisit], budgets: Mapping[str, int], between_us: float
) -> WorkSamples:
    """The samples of `visits`, which have prompts. budgets: tokens of a step, by instance.

    between_us: what lies between two passes and is not a part of them.
    """
    count = len(visits)
    work, spans = numpy.zeros((count, len(WORK))), numpy.zeros((count, 3))
    lengths = [float(each.stages["prefill.compute"]) for each in visits]
    rows, names, shares, decodes = [], [each.instance for each in visits], [], []
    for name in dict.fromkeys(names):
        at = numpy.array([number for number, each in enumerate(names) if each == name])
        some = Neighbours([visits[number] for number in at], budgets.get(name, 0))
        work[at], spans[at] = some.list_prompts(), some.spans
        for number in some.list_answers():
            row, share, decoded = some.measure_answer(number)
            decodes.append(decoded)
            rows.append(row)
            names.append(name)
            shares.append(numpy.zeros(count))
            shares[-1][at] = share
            lengths.append(
                max(some.left[number] - some.ended[number] - row[:2].sum() * between_us, 0)
            )
    return WorkSamples(
        numpy.array([*work, *rows]).reshape(-1, len(WORK)),
        numpy.array(lengths),
        tuple(names),
        spans,
        numpy.array(shares).reshape(len(rows), count),
        numpy.array(decodes),
    )


class Neighbours:
    """The visits at one engine, all of which have prompts, as columns."""

    def __init__(self, visits: Sequence[EngineVisit], budget: int = 0) -> None:
        def read(name: str) -> Array:
            return numpy.array([float(getattr(each, name)) for each in visits])

        self.computed, self.cached, self.chunks = read("computed"), read("cached"), read("chunks")
        self.tokens = numpy.maximum(read("step_tokens"), self.computed)
        self.ended = read("sampled")
        sample = numpy.array([each.stages.get("sample", 0) for each in visits])
        compute = numpy.array([each.stages["prefill.compute"] for each in visits])
        self.begun, self.computed_at = self.ended - sample - compute, self.ended - sample
        self.middle = (self.begun + self.computed_at) / 2
        answers, token_us = read("output_tokens"), read("token_us")
        self.is_timed = (token_us > 0) & (answers > MIN_STEPS) & (read("preemptions") == 0)
        usual = float(numpy.median(token_us[self.is_timed])) if self.is_timed.any() else 0.0
        self.left = self.ended + numpy.maximum(read("answer_us"), 0)
        guessed = (self.left - self.ended) / usual if usual else numpy.zeros(len(visits))
        self.steps = numpy.where(answers > 0, numpy.maximum(answers - 1, 0), guessed)
        known = (token_us > 0) & (answers > 0)
        self.left = numpy.where(known, self.ended + token_us * self.steps, self.left)
        self.spans = self._list_spans(budget)

    def _list_spans(self, budget: int) -> Array:
        full, last = self.chunks - 1, self.tokens - (self.chunks - 1) * budget
        is_full = (0 < last) & (last <= max(budget, 0))
        mean = self.tokens / self.chunks
        return numpy.stack(
            [full, numpy.where(is_full, budget, mean), numpy.where(is_full, last, mean)], axis=1
        )

    def _read_contexts(self, at: float | Array) -> Array:
        """Tokens in the context of each at a moment, or at one for each, whether it decodes then or not."""
        part = (at - self.ended) / numpy.maximum(self.left - self.ended, 1)
        contexts: Array = self.cached + self.computed + numpy.clip(part, 0, 1) * self.steps
        return contexts

    def find_decoding(self, at: float) -> Any:
        """Which of them decode at a moment: those that had their first token and have not left."""
        return (self.ended <= at) & (at < self.left)

    def share_prompts(self, begin: float, end: float) -> Array:
        """Which part of its time each prompt was computed between two moments."""
        shared = numpy.minimum(self.computed_at, end) - numpy.maximum(self.begun, begin)
        part: Array = shared / numpy.maximum(self.computed_at - self.begun, 1)
        return numpy.clip(part, 0, 1)

    def count_pairs(self, begin: float, end: float) -> tuple[float, float]:
        """Tokens of all prompts between two moments, and the pairs of these: later chunks have more."""
        length = numpy.maximum(self.computed_at - self.begun, 1)
        low, high = (numpy.clip((at - self.begun) / length, 0, 1) for at in (begin, end))
        tokens = self.computed * (high - low)
        pairs = tokens * (self.cached + self.computed * (high + low) / 2)
        return float(tokens.sum()), float(pairs.sum())

    def list_prompts(self) -> Array:
        """The rows of the prompts."""
        contexts = [
            float(self._read_contexts(at)[self.find_decoding(at)].sum()) for at in self.middle
        ]
        own = self.computed * (self.cached + self.computed / 2)
        counted = [*map(self.count_pairs, self.begun, self.computed_at)]
        tokens, pairs = numpy.array(counted).reshape(-1, 2).T
        # No more than its steps had of others.
        part = (self.tokens - self.computed) / numpy.maximum(tokens - self.computed, 1)
        pairs = own + (pairs - own) * numpy.minimum(part, 1)
        no, read = numpy.zeros(len(self.chunks)), self.chunks * numpy.array(contexts)
        return numpy.stack([self.chunks, no, self.tokens, pairs, read], axis=1)

    def list_answers(self) -> list[int]:
        """The numbers of those whose answers are samples."""
        timed = numpy.flatnonzero(self.is_timed)
        return [int(each) for each in timed[:: max(1, -(-len(timed) // MAX_ANSWERS))]]

    def measure_answer(self, number: int) -> tuple[Array, Array, float]:
        """An answer's row, which part of each prompt's steps it was in, and decodes of a step."""
        begin, end = self.ended[number], self.left[number]
        low, high = numpy.maximum(self.ended, begin), numpy.minimum(self.left, end)
        part = numpy.clip((high - low) / numpy.maximum(self.left - self.ended, 1), 0, 1)
        decoded = part * self.steps
        # In the middle of what they share; contexts grow evenly.
        contexts = self._read_contexts((low + high) / 2)
        part = self.share_prompts(begin, end)
        # Several prompts of a step count as one pass.
        share = part * numpy.minimum(self.computed / self.tokens, 1)
        passes = min(float((share * self.chunks).sum()), self.steps[number])
        row = [
            passes,
            self.steps[number] - passes,
            decoded.sum() + (part * self.computed).sum(),
            self.count_pairs(begin, end)[1],
            (decoded * contexts).sum(),
        ]
        return numpy.array(row), share, float(decoded.sum() / self.steps[number])


def find_unseen(
    visits: Sequence[EngineVisit], weights: Sequence[float] | None = None
) -> tuple[float, float] | None:
    """Where requests are missing: the tokens of others in a step, as recorded, and those of stored requests.

    On average; None also where too few prompts tell, or ends of answers are not known.
    """
    weights = weights or [1.0] * len(visits)
    by_instance: dict[str, list[tuple[EngineVisit, float]]] = {}
    for visit, weight in zip(visits, weights, strict=True):
        if visit.stages.get("prefill.compute") and visit.answer_us >= 0:
            by_instance.setdefault(visit.instance, []).append((visit, weight))
    known = sum(map(len, by_instance.values()))
    if known < MIN_TELLING or 2 * known < len(visits):
        return None
    sums = numpy.sum(
        [
            _sum_instance(some, max(1, len(some) * len(by_instance) // MAX_LOOKED_AT))
            for some in by_instance.values()
        ],
        axis=0,
    )
    chunks, recorded, expected = (float(each) for each in sums)
    is_partial = recorded > MAX_UNSEEN * expected + FEW_TOKENS * chunks
    return (recorded / chunks, expected / chunks) if is_partial else None


def _sum_instance(some: Sequence[tuple[EngineVisit, float]], every: int) -> Array:
    """Chunks of every so-manieth prompt, the tokens of others with them, and those accounted for."""
    near = Neighbours([visit for visit, _ in some])
    weights, sums = numpy.array([weight for _, weight in some]), numpy.zeros(3)
    for at in range(0, len(some), every):
        visit, weight = some[at]
        if visit.step_tokens < visit.own_tokens or not visit.own_tokens:
            continue
        decoding = weights[near.find_decoding(near.middle[at])].sum()
        parts = near.share_prompts(near.begun[at], near.computed_at[at]) * near.computed * weights
        recorded = visit.step_tokens - visit.own_tokens
        expected = visit.chunks * decoding + parts.sum() - parts[at]
        sums += weight * numpy.array([visit.chunks, recorded, expected])
    return sums
