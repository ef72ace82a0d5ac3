# SPDX-License-Identifier: Apache-2.0
"""What the analyses need of a request: stages, size, attributes, why each stage waited and where it ran.

window_reading.py reads RequestFacts from the embedded store, or from Tempo; explain and diff put them into
strata, so that like is compared with like.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from ttft_otel.model import stages
from ttft_otel.model.names import keys
from ttft_otel.model.stages import UNATTRIBUTED
from ttft_otel.report.assemble.summary import find_clock_error
from ttft_otel.report.report_types import Request, StoredSpan
from ttft_otel.report.show.terminal import format_short, round_ms

TEXT, MEDIA = "text", "media"
ENCODER_STAGE: Final = "encoder.compute"
HOP: Final = "router.hop."
PREFILL_COMPUTE: Final = "prefill.compute"
MIN_PER_WINDOW: Final = 5  # requests of each window in a stratum; with fewer a coarser one is used
UNMATCHED: Final = "unmatched"  # the stratum of requests whose kind a window has too few of


class CannotTellError(ValueError):
    """The stored requests cannot answer; the text says why, and what to do."""


def refuse_foreign(product: str) -> None:
    """Raise CannotTellError where another product, by its name, has told a request; "" is none."""
    if product:
        raise CannotTellError(
            f"requests are told by {product}: its spans say how long, and not why. Choose others (--model, "
            "--since), or compare two times: ttft-otel diff"
        )


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """One request that got its first token, and why its stages took as long as they did."""

    request_id: str
    start_ns: int
    stages: Mapping[str, int]  #: microseconds, UNATTRIBUTED among them; they add up to the TTFT
    tokens: int = 0  #: of the prompt; 0 where that is not known
    cached: int = 0  #: of these, found in the prefix cache
    kind: str = TEXT  #: TEXT, or MEDIA where an encoder ran for it or media came from elsewhere
    group: str = ""  #: the value of the attribute that was asked for, "" without
    model: str = ""  #: "" where that is not known
    clock_error_us: int = 0  #: by how much the boundaries of its stages may be off, see summary.py
    #: How many requests of its window it stands for, where not all are read (SamplePlan).
    weight: float = 1.0
    foreign: str = ""  #: the product that told it, "" where our spans did
    failed: str = ""  #: address of the instance on which an attempt failed before; "" without one
    trace_id: str = ""
    closed: bool = True  #: its stages add up to its TTFT, in every leg
    #: Microseconds by reason, of stages that wait.
    reasons: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    instances: Mapping[str, str] = field(default_factory=dict)  #: where a stage ran
    #: Microseconds of waiting by the kind of work that the engine did meanwhile (stages.HOLDING_KINDS).
    held: Mapping[str, int] = field(default_factory=dict)
    legs: frozenset[str] = frozenset()  #: IDs of the spans that have its stages
    #: service.instance.id where its prompt was computed; "" where that is not known.
    instance: str = ""
    chunks: int = 1  #: of the prompt
    step_tokens: int = 0  #: of all requests in these steps; 0 where that is not known
    compute_us: int = 0  #: of the engine's forward passes in these steps

    @property
    def ttft_us(self) -> int:
        return sum(self.stages.values())


def build_facts(request: Request, trunks: Sequence[StoredSpan], group_by: str = "") -> RequestFacts:
    """Join `request` with the attributes of its `ttft` and `encode` spans.

    group_by: a span's or resource's attribute, for example `service.version`, or that of the tenant.
    """
    legs = {leg.span_id for leg in request.legs}
    of_legs = [span for span in trunks if span.span_id in legs]
    router = request.router.span_id if request.router else ""
    spans = [span for span in trunks if span.span_id in legs or span.span_id == router]
    # endswith(): behind a router the stage has its leg's prefix, `encode.encoder.compute`.
    has_media = any(name.endswith(ENCODER_STAGE) for name in request.stages) or any(
        read_count(span, keys.EC_ITEMS) for span in spans
    )
    reasons = {name: dict(request.list_wait_reasons(name)) for name in request.stages}
    places = {name: find_instance(request, name) for name in request.stages}
    # The leg that computed most of the prompt.
    main = max(request.legs, key=lambda leg: leg.stages.get(PREFILL_COMPUTE, 0), default=None)
    steps = next((span for span in of_legs if main and span.span_id == main.span_id), None)
    return RequestFacts(
        # A request may have come without an ID; the trace's is always there.
        request_id=request.request_id or request.trace_id,
        start_ns=request.start_ns,
        # As a stage, so that the stages add up to the TTFT and lost time can be named as a change.
        stages={**request.stages, UNATTRIBUTED: request.unattributed_us},
        # Each leg has the whole prompt; an encoder's leg may have less.
        tokens=max((read_count(span, keys.INPUT_TOKENS) for span in spans), default=0),
        cached=max((read_count(span, keys.CACHED_TOKENS) for span in spans), default=0),
        kind=MEDIA if has_media else TEXT,
        group=_find_value(spans, group_by) if group_by else "",
        model=request.model,
        clock_error_us=find_clock_error([request]),
        foreign=next((leg.foreign for leg in request.legs if leg.foreign), ""),
        failed=_find_failed(request, trunks) if request.stages.get(stages.RETRY) else "",
        trace_id=request.trace_id,
        closed=request.closed,
        reasons={name: found for name, found in reasons.items() if found},
        instances={name: place for name, place in places.items() if place},
        held={
            kind: us
            for kind in stages.HOLDING_KIND_NAMES
            if (us := sum(read_count(span, keys.name_held_attribute(kind)) for span in of_legs))
        },
        legs=frozenset(legs),
        instance=main.instance if main else "",
        chunks=max(read_count(steps, keys.PREFILL_CHUNKS), 1) if steps else 1,
        step_tokens=max(read_count(steps, keys.PREFILL_STEP_TOKENS), 0) if steps else 0,
        compute_us=main.stages.get(PREFILL_COMPUTE, 0) if main else 0,
    )


def _find_failed(request: Request, spans: Iterable[StoredSpan]) -> str:
    """The address that the router called in vain; its calls are beside its `ttft` span."""
    by_id = {span.span_id: span for span in spans}
    router = by_id.get(request.router.span_id) if request.router else None
    for span in by_id.values():
        is_call = router is not None and span.parent_id == router.parent_id
        if is_call and {keys.LEG, keys.ERROR_TYPE} <= span.attributes.keys():
            place = (span.attributes.get(key) for key in (keys.SERVER_ADDRESS, keys.SERVER_PORT))
            return ":".join(str(each) for each in place if each is not None)
    return ""


def _find_value(spans: Iterable[StoredSpan], name: str) -> str:
    """The attribute's values on a request's spans or their resources, joined where servers differ."""
    # In order of time, so that the same servers always join to the same text.
    ordered = sorted(spans, key=lambda each: each.start_ns)
    values = (span.attributes.get(name, span.resource.get(name)) for span in ordered)
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))


def read_count(span: StoredSpan, name: str) -> int:
    """An attribute that is a count; 0 where it is missing or no integer."""
    value = span.attributes.get(name)
    # Spans may come from anybody; and True is an int to Python, but no count.
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def count_requests(requests: Iterable[RequestFacts]) -> int:
    """How many requests of their window these stand for."""
    return round(sum(each.weight for each in requests))


def count_values(
    requests: Iterable[RequestFacts], read: Callable[[RequestFacts], str]
) -> dict[str, float]:
    """How many requests of their window have each value, the most frequent one first."""
    counts: dict[str, float] = {}
    for each in requests:
        value = read(each)
        counts[value] = counts.get(value, 0.0) + each.weight
    return dict(sorted(counts.items(), key=lambda part: -part[1]))


def find_instance(request: Request, stage: str) -> str:
    """The service.instance.id of the server that had `stage`; "" where that is not known."""
    if stage.startswith(HOP):
        # A hop's time passes on the way to its leg, and in that leg's accept queue.
        leg = request.find_leg(stage.removeprefix(HOP))
    elif stage in stages.ROUTER_STAGES:
        leg = request.router
    elif role := stages.find_leg(stage):
        leg = request.find_leg(role)
    else:
        leg = request.legs[-1] if request.legs else None
    return leg.instance if leg is not None else ""


def assign_strata(
    a: Sequence[RequestFacts], b: Sequence[RequestFacts]
) -> tuple[list[Hashable], list[Hashable]]:
    """The stratum of each request of `a` and of `b`, in their order.

    A stratum is a model, a kind of request and a size of prompt (to a factor of two); not the share that
    is cached, which is an outcome. Where either window has too few of one, the size is left out; what is
    still left joins the stratum of its model and kind that is nearest in size. Windows without a common
    model are two models compared, or one under two names: then it does not count.
    """
    by_model = bool({each.model for each in a} & {each.model for each in b})
    found_a: list[Hashable] = [UNMATCHED] * len(a)
    found_b: list[Hashable] = [UNMATCHED] * len(b)
    left_a, left_b = list(range(len(a))), list(range(len(b)))
    # From fine to coarse: whoever finds enough of its like early is compared most closely.
    for detail in (2, 1):
        labels_a = {index: describe_request(a[index], detail, by_model) for index in left_a}
        labels_b = {index: describe_request(b[index], detail, by_model) for index in left_b}
        count_a, count_b = Counter(labels_a.values()), Counter(labels_b.values())
        enough = {
            label
            for label in count_a
            # Both windows need enough: a mean of two or three requests would pass for a change.
            if min(count_a[label], count_b.get(label, 0)) >= MIN_PER_WINDOW
        }
        for labels, found, left in ((labels_a, found_a, left_a), (labels_b, found_b, left_b)):
            for index, label in labels.items():
                if label in enough:
                    found[index] = label
                    left.remove(index)
    # Those of A suffice: a stratum is used only if both windows have it.
    used = {label for label in found_a if isinstance(label, tuple)}
    for window, found, left in ((a, found_a, left_a), (b, found_b, left_b)):
        for index in left:
            found[index] = _find_nearest(window[index], used, by_model)
    return found_a, found_b


def _find_nearest(
    facts: RequestFacts, used: set[tuple[Hashable, ...]], by_model: bool = False
) -> Hashable:
    """The stratum of `used` of the same kind that is nearest in size; UNMATCHED without one."""
    size = facts.tokens.bit_length()
    (kind,) = describe_request(facts, 1, by_model)
    distances = {
        label: abs(size - label[1]) if len(label) > 1 and isinstance(label[1], int) else 0
        for label in used
        if label[0] == kind
    }
    return min(distances, key=lambda label: (distances[label], str(label)), default=UNMATCHED)


def describe_request(
    facts: RequestFacts, detail: int, by_model: bool = False
) -> tuple[Hashable, ...]:
    """The label of a request's stratum.

    detail: 1 for the kind alone, 2 with the size of the prompt, 3 with the share of cached tokens.
    by_model: kinds of two models are two kinds.
    """
    kind = (facts.kind, facts.model) if by_model else facts.kind
    share = facts.cached / facts.tokens if facts.tokens else 0.0
    # Thirds: a prompt is mostly computed, partly, or mostly found in the cache.
    return (kind, facts.tokens.bit_length(), min(int(share * 3), 2))[:detail]


@dataclass(frozen=True, slots=True)
class LostRequests:
    """Requests of a window that ended without a first token."""

    total: int = 0
    left: int = 0  #: of these the client gave up
    died: Mapping[str, int] = field(default_factory=dict)  #: by the stage they were in
    lengths_us: tuple[int, ...] = ()  #: how long those that were read took

    @property
    def median_us(self) -> float:
        return float(median(self.lengths_us)) if self.lengths_us else 0.0

    @property
    def sentence(self) -> str:
        """What became of them; "" where there are none."""
        if not self.total:
            return ""
        word = "request" if self.total == 1 else "requests"
        summary = (
            f"{self.total} {word} ended without a first token, after {format_short(self.median_us)}"
        )
        details = [f"given up by their clients: {self.left}"] if self.left else []
        if self.died:
            stage, count = max(self.died.items(), key=lambda each: (each[1], each[0]))
            details.append(f"most in {stage}: {count}")
        return f"{summary} at the median" + (f" ({'; '.join(details)})" if details else "")


def count_lost(lost: Sequence[Request], weight: float = 1.0) -> LostRequests:
    """What became of requests without a first token; `weight` is how many each stands for."""
    died = Counter(each.died for each in lost if each.died)
    return LostRequests(
        total=round(weight * len(lost)),
        left=round(weight * sum(each.error in keys.CLIENT_LEFT_ERRORS for each in lost)),
        died={stage: round(weight * count) for stage, count in died.items()},
        lengths_us=tuple(each.ttft_us for each in lost),
    )


def describe_lost(lost: LostRequests) -> dict[str, Any]:
    return {
        "requests": lost.total,
        "left": lost.left,
        "died_in": dict(lost.died),
        "median_ms": round_ms(lost.median_us),
    }
