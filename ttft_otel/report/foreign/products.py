# SPDX-License-Identifier: Apache-2.0
"""What other products call our stages, as data, and the `ttft` spans that their traces make by it. Pure.

Input: the spans of one trace, of the store or of Tempo. The rest of the report takes what comes out as spans
of ours: stages with `unattributed` are their TTFT, to the microsecond. A span's length counts where it lies
between a request's begin and its first token, the inner one's where spans are nested; an attribute's length
counts as it is, unless a span tells of the same stage. Lengths of more than the TTFT tell nothing.
docs/generate_reference.py makes docs/reference/vocabulary.md of the table.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, Literal

from ttft_otel.model import breakdown, stages
from ttft_otel.model.names import keys, metric_names, span_names
from ttft_otel.report.report_types import STATUS_ERROR, StoredSpan

TOTAL: Final = "the TTFT"
_TIME_TO_FIRST_TOKEN: Final = "gen_ai.latency.time_to_first_token"
_TIME_IN_QUEUE: Final = "gen_ai.latency.time_in_queue"


@dataclass(frozen=True, slots=True)
class ForeignNames:
    """Names of another product for one of our stages.

    stage: ours, TOTAL, or "" for none. form: what has the name, a span or an attribute in such a unit.
    note: what it means beyond our stage. roles: of requests for which it stands for the stage; () for all.
    below: the role of requests below the span; "" where it tells none. alone: whether a span tells the stage
    without others of its trace, as metrics need it.
    """

    stage: str
    names: tuple[str, ...]
    note: str = ""
    form: Literal["span", "s", "ms", "ms text"] = "span"
    roles: tuple[str, ...] = ()
    below: str = ""
    alone: bool = True


@dataclass(frozen=True, slots=True)
class ForeignProduct:
    """Another product's names.

    read: where they were read, and how exact they are. scope: how the names of its instrumentation scopes
    begin; "" for any. requests: names of the spans of whole requests, which have TOTAL; a first group is the
    role. None: its traces are not read. role: the attribute with a request's role, in the words of `roles`.
    """

    name: str
    read: str
    rows: tuple[ForeignNames, ...]
    scope: str = ""
    requests: re.Pattern[str] | None = None
    role: str = ""
    roles: dict[str, str] = field(default_factory=dict)


PRODUCTS: Final = (
    ForeignProduct(
        "vLLM's own tracing",
        "span `llm_request`, 0.32 and 0.33",
        (
            ForeignNames(
                TOTAL, (_TIME_TO_FIRST_TOKEN,), "without `receive` and `egress`", form="s"
            ),
            ForeignNames(
                "prefill.queue",
                (_TIME_IN_QUEUE,),
                "without the wait for the running step, with `encoder.queue` and waits for connectors",
                form="s",
            ),
            ForeignNames(
                "prefill.compute",
                ("gen_ai.latency.time_in_model_prefill",),
                "with all from `dispatch` to the engine's part of `output`",
                form="s",
            ),
        ),
        scope="vllm",
        requests=re.compile("llm_request"),
    ),
    ForeignProduct(
        "vLLM, proposed",
        "pull request 44402, open, not run, not in metrics",
        (
            ForeignNames("prefill.queue", ("vllm_queue",)),
            ForeignNames(
                "kv.transfer", ("vllm_async_kv_transfer",), "the wait, not loads inside a step"
            ),
            ForeignNames("prefill.compute", ("vllm_prefill",), "as above"),
        ),
        scope="vllm",
    ),
    ForeignProduct(
        "SGLang",
        "`req_time_stats.py` of 0.5.23, without an engine; a host's times, also of a GPU",
        (
            ForeignNames(TOTAL, (_TIME_TO_FIRST_TOKEN,), form="s"),
            ForeignNames("preprocess", ("tokenize",)),
            ForeignNames(
                "ipc",
                (
                    "api_server_dispatch", "dpc_dispatch", "request_process", "prefill_prepare",
                    "decode_prepare",
                ),
            ),
            ForeignNames("prefill.queue", ("prefill_waiting",)),
            ForeignNames(
                "prefill.queue",
                ("decode_waiting",),
                "of decode instances; not in metrics",
                roles=("decode",),
                alone=False,
            ),
            ForeignNames("encoder.compute", ("mm_encode",)),
            ForeignNames(
                "prefill.compute",
                ("prefill_forward",),
                "with `dispatch`, `sample`, `prefill.stall`",
            ),
            ForeignNames(
                "prefill.compute",
                ("chunked_prefill",),
                "inside of it; not in metrics",
                alone=False,
            ),
            ForeignNames(
                "kv.transfer",
                (
                    "prefill_bootstrap", "prefill_transfer_kv_cache", "decode_bootstrap",
                    "decode_transferred",
                ),
            ),
            ForeignNames(
                "",
                ("gen_ai.latency.time_in_model_prefill",),
                "unlike vLLM's it has the queue in it",
                form="s",
            ),
        ),
        scope="sglang",
        requests=re.compile(r"(prefill|decode|) ?Req .*"),
    ),
    ForeignProduct(
        "TensorRT-LLM",
        "its pull request 5897, not run",
        (
            ForeignNames(TOTAL, (_TIME_TO_FIRST_TOKEN,), form="s"),
            ForeignNames("prefill.queue", (_TIME_IN_QUEUE,), form="s"),
            ForeignNames("kv.transfer", ("gen_ai.latency.kv_cache_transfer_time",), form="s"),
        ),
        scope="trt",
        requests=re.compile(".*"),
    ),
    ForeignProduct(
        "Dynamo",
        "1.6.1; `engine.generate` by its pull requests 9543, 9327, not run",
        (
            ForeignNames(
                TOTAL,
                ("ttft_ms",),
                "of `http-request`, or of an instance's `engine.generate`",
                "ms text",
            ),
            ForeignNames("", ("router.route_request", "handle_payload"), "to the last token"),
        ),
        requests=re.compile(r"http-request|engine\.generate"),
        role="disagg_role",
        roles={"agg": "mono", "prefill": "prefill", "decode": "decode", "encode": "encode"},
    ),
    ForeignProduct(
        "llm-d",
        "its router's source, not run, not in metrics; the TTFT is the engine's",
        (
            ForeignNames("router.route", ("gateway.request_orchestration",)),
            ForeignNames("", ("prefill", "llm_d.pd_proxy.prefill"), "legs", below="prefill"),
            ForeignNames("", ("decode", "llm_d.pd_proxy.decode"), "legs", below="decode"),
            ForeignNames("", ("gateway.request", "forward_request"), "the request"),
            ForeignNames("", ("llm_d.pd_proxy.true_ttft_ms",), "ends where decode begins", "ms"),
        ),
        scope="llm-d",
    ),
    ForeignProduct(
        "GenAI conventions",
        "we emit both; not read of others",
        (
            ForeignNames(
                TOTAL,
                (keys.TIME_TO_FIRST_CHUNK, metric_names.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN),
                form="s",
            ),
        ),
    ),
)  # fmt: skip

MAX_ANCESTORS: Final = 64  # followed: anybody's data may contain a loop
MAX_US: Final = 1 << 42
UNITS_US: Final = {"s": 1e6, "ms": 1e3, "ms text": 1e3}
# Turned in a request span's ID for the ID of the span that is made of it: the same at each reading.
_ID_BITS: Final = 0x7474_6674_0000_0000
_DECIMAL: Final = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?")
REQUEST_ID_ATTRIBUTES: Final = ("gen_ai.request.id", "rid", "request_id")
MODEL_ATTRIBUTES: Final = (keys.MODEL, keys.RESPONSE_MODEL, "model")
# Attributes that make a span a request's, for searches.
TOTAL_ATTRIBUTES: Final = tuple(
    dict.fromkeys(
        name
        for product in PRODUCTS
        if product.requests
        for row in product.rows
        if row.stage == TOTAL
        for name in row.names
    )
)
_SPAN_ROWS: Final = {
    (product.scope, name): row
    for product in PRODUCTS
    for row in product.rows
    if row.form == "span"
    for name in row.names
}
_SCOPES: Final = tuple({product.scope for product in PRODUCTS if product.scope})


_NAMES: Final = (*stages.STAGE_NAMES, *stages.ROUTER_STAGES)
_CODES: Final = {name: code for code, name in enumerate(_NAMES)}


@dataclass(slots=True)
class _ForeignRequest:
    """A span that stands for a whole request, and what spans below it tell."""

    span: StoredSpan
    product: ForeignProduct
    total_us: int
    role: str
    pieces: list[tuple[int, int, int]] = field(default_factory=list)  #: code of a stage, begin, end
    told_us: dict[str, int] = field(default_factory=dict)  #: by attributes

    def add_span(self, span: StoredSpan, row: ForeignNames) -> None:
        """Count a span of a stage, as far as it is before the first token."""
        begin = self.span.start_ns // 1000
        start, stop = (
            min(max(at // 1000 - begin, 0), self.total_us) for at in (span.start_ns, span.end_ns)
        )
        if start < stop:
            self.pieces.append((_CODES[row.stage], start, stop))

    def add_attributes(self, span: StoredSpan, product: ForeignProduct) -> None:
        """Count the lengths that a request's span has as attributes."""
        for row in product.rows:
            if row.form != "span" and row.stage in _CODES:
                self.told_us[row.stage] = self.told_us.get(row.stage, 0) + _read_us(span, row)

    def sum_stages(self) -> dict[str, int]:
        """Microseconds by stage; {} where they are more than the TTFT."""
        lengths: dict[str, int] = {}
        for code, start, stop in breakdown.flatten_intervals(sorted(self.pieces)):
            lengths[_NAMES[code]] = lengths.get(_NAMES[code], 0) + stop - start
        lengths = self.told_us | lengths
        return lengths if sum(lengths.values()) <= self.total_us else {}


@lru_cache(256)
def _match_scope(scope: str) -> str:
    return next((each for each in _SCOPES if scope.startswith(each)), "")


def is_known(scope: str, name: str) -> bool:
    """Whether a span of others can tell of a request's TTFT, by its scope and its name."""
    return _find_row(scope, name) is not None or _find_product(scope, name) is not None


def _find_row(scope: str, name: str) -> ForeignNames | None:
    row = _SPAN_ROWS.get((_match_scope(scope), name))
    return row if row is not None and (row.stage or row.below) else None


def _find_product(scope: str, name: str) -> ForeignProduct | None:
    matched = _match_scope(scope)
    for product in PRODUCTS:
        if product.requests and product.scope == matched and product.requests.fullmatch(name):
            return product
    return None


def add_ttft_spans(spans: Sequence[StoredSpan], parents: Mapping[str, str]) -> list[StoredSpan]:
    """The spans, those of others with the stage that they are, and a `ttft` span for each request of others.

    parents: span ID -> parent ID of all spans of the trace. Where a server of ours has told of itself, what
    others say of the same requests is left alone. The order of spans changes nothing.
    """
    # Spans that were sent twice: of two with one ID any one will do.
    if len({span.span_id for span in spans}) < len(spans):
        spans = list({span.span_id: span for span in sorted(spans, key=repr)}.values())
        parents = {**parents, **{span.span_id: span.parent_id for span in spans}}
    ours = [span for span in spans if span.is_ttft_span]
    if any(span.attributes.get(keys.ROLE) != "router" for span in ours):
        return list(spans)
    requests = {each.span.span_id: each for each in map(_read_request, spans) if each}
    # What one product says of a request that another one has passed on is a part of that one's.
    nested = {each for each in requests if _is_nested(each, requests, parents)}
    requests = {span_id: each for span_id, each in requests.items() if span_id not in nested}
    if not requests:
        return list(spans)
    rows = {span.span_id: row for span in spans if (row := _find_row(span.scope, span.name))}
    for each in requests.values():
        for above in _list_ancestors(each.span.span_id, parents):
            if above in rows and rows[above].below:
                each.role = rows[above].below
    labelled = [_take_span(span, rows.get(span.span_id), requests, parents) for span in spans]
    return labelled + [_build_ttft_span(each, bool(ours)) for each in requests.values()]


def _is_nested(span_id: str, requests: Collection[str], parents: Mapping[str, str]) -> bool:
    """Whether a request is below another one. In a loop of parents none is below the others."""
    return any(
        above in requests and span_id not in _list_ancestors(above, parents)
        for above in _list_ancestors(span_id, parents)
    )


def _take_span(
    span: StoredSpan,
    row: ForeignNames | None,
    requests: Mapping[str, _ForeignRequest],
    parents: Mapping[str, str],
) -> StoredSpan:
    """Count a span for the request that it is of; the span, with the stage that it is."""
    product = _find_product(span.scope, span.name)
    if row is None and product is None:
        return span
    above = (span.span_id, *_list_ancestors(span.span_id, parents))
    owner = next((requests[each] for each in above if each in requests), None)
    if owner is not None and product is not None:
        owner.add_attributes(span, product)
    role = owner.role if owner is not None else ""
    if row is None or not row.stage or (row.roles and role not in row.roles):
        return span
    if owner is not None:
        owner.add_span(span, row)
    return replace(span, attributes={**span.attributes, keys.STAGE: row.stage})


def make_trunks(
    told: Sequence[StoredSpan], parents: Mapping[str, str]
) -> tuple[list[StoredSpan], dict[str, str]]:
    """The `ttft` and `encode` spans of a trace, of others too, and all parents with theirs.

    told: its spans that is_known(), and ours. parents: as for add_ttft_spans().
    """
    trunks = [span for span in add_ttft_spans(told, parents) if span.is_ttft_span]
    return trunks, {**parents, **{span.span_id: span.parent_id for span in trunks}}


def _list_ancestors(span_id: str, parents: Mapping[str, str]) -> Iterable[str]:
    for _ in range(MAX_ANCESTORS):
        span_id = parents.get(span_id, "")
        if not span_id:
            return
        yield span_id


def _read_request(span: StoredSpan) -> _ForeignRequest | None:
    product = _find_product(span.scope, span.name) if not span.is_ttft_span else None
    if product is None or product.requests is None:
        return None
    total_us = next((_read_us(span, row) for row in product.rows if row.stage == TOTAL), 0)
    if not total_us:
        return None
    found = product.requests.fullmatch(span.name)
    role = product.roles.get(str(span.attributes.get(product.role)), "")
    if found and product.requests.groups:
        role = found[1]
    return _ForeignRequest(span, product, total_us, role or stages.MONO)


def _read_us(span: StoredSpan, row: ForeignNames) -> int:
    """Microseconds of the first of a row's attributes that is a length; 0 without one."""
    for name in row.names:
        value = span.attributes.get(name)
        if row.form == "ms text" and isinstance(value, str):
            value = float(value) if _DECIMAL.fullmatch(value) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            us = value * UNITS_US[row.form]
            return round(us) if 0 < us < MAX_US else 0  # NaN and infinity are no lengths
    return 0


def _build_ttft_span(request: _ForeignRequest, is_routed: bool) -> StoredSpan:
    """A request as its server would have told it. is_routed: our router is above it."""
    span, lengths = request.span, request.sum_stages()
    attributes: dict[str, Any] = {
        keys.FOREIGN: request.product.name,
        keys.ROLE: request.role,
        keys.OUTERMOST: not is_routed and request.role not in stages.INTERMEDIATE_ROLES,
        keys.TOTAL_US: request.total_us,
        keys.UNATTRIBUTED_US: request.total_us - sum(lengths.values()),
        **{keys.name_stage_attribute(stage): us for stage, us in lengths.items() if us},
    }
    for key, names in ((keys.REQUEST_ID, REQUEST_ID_ATTRIBUTES), (keys.MODEL, MODEL_ATTRIBUTES)):
        value = next((span.attributes[name] for name in names if name in span.attributes), None)
        if isinstance(value, str):
            attributes[key] = value
    if is_routed:
        attributes[keys.ENGINE_ONLY] = True
    if span.status == STATUS_ERROR:
        attributes[keys.ERROR_TYPE] = str(span.attributes.get(keys.ERROR_TYPE, keys.ERROR_ENGINE))
    return replace(
        span,
        span_id=f"{int(span.span_id, 16) ^ _ID_BITS:016x}",
        parent_id=span.span_id,
        name=span_names.TTFT,
        kind=1,
        end_ns=span.start_ns + request.total_us * 1000,
        scope=span_names.SCOPE,
        attributes=attributes,
    )
