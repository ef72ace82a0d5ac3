# SPDX-License-Identifier: Apache-2.0
"""Generate what the collector derives and counts, from metric_table.py, stages.py, names/ and products.py.

`python -m lab.collector_config` rewrites the parts of collector/config.yaml and scale-out/tier2.yaml that lie
between marks; a test compares. OTTL (the collector's transformation language) cannot sum over the keys of a
map, hence one statement per stage.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ttft_otel.model import stages
from ttft_otel.model.metric_table import (
    FOREIGN_METRICS,
    MAX_EXEMPLARS,
    MAX_HISTOGRAM_BUCKETS,
    MAX_IDLE_S,
    MAX_SERIES,
    METRICS,
    OVERFLOW_LABEL,
    PLACE_LABELS,
    PUSH_INTERVAL_S,
    STATUS_LABEL,
)
from ttft_otel.model.names import keys, metric_names, span_names
from ttft_otel.report.foreign.products import PRODUCTS, TOTAL, ForeignNames, ForeignProduct

COLLECTOR: Final = Path(__file__).parents[1] / "collector"
GENERATED_FILES: Final = (COLLECTOR / "config.yaml", COLLECTOR / "scale-out" / "tier2.yaml")
# The head line stays as it is: it names the block, and a person may have added to it.
GENERATED_BLOCK: Final = re.compile(
    r"(?P<head>^ *# generated: (?P<name>\w+)[^\n]*\n).*?(?P<tail>^ *# generated end\n)", re.M | re.S
)

# TTFT on spans of other instrumentations: an attribute in seconds, or an event at the first token.
# The first one that is present is used.
TTFT_SECONDS_ATTRIBUTES: Final = (
    keys.TIME_TO_FIRST_CHUNK,
    "gen_ai.response.time_to_first_token",
    "gen_ai.latency.time_to_first_token",  # vLLM's own llm_request, SGLang
)
FIRST_TOKEN_EVENTS: Final = (
    "first_token",
    "llm.first_token",
    "gen_ai.first_token",
    "gen_ai.content.chunk",
    "First Token Stream Event",  # OpenInference
    "ai.stream.firstChunk",
    "llm.content.completion.chunk",
)
# What is counted here; the exporter process counts METRICS alone.
COUNTED: Final = METRICS | FOREIGN_METRICS
MAX_TTFT_S: Final = 86_400  # what is more is another unit, or nonsense, and would spoil every mean
COMMENT_CHARS: Final = 114  # in a line of a comment
SPAN_DURATION: Final = "(span.end_time - span.start_time)"


def list_full_stage_names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Full names of all stages: a server's, and a router's (its own, hops, and its legs')."""
    # A router has no hop to itself.
    hops = (f"router.hop.{role}" for role in stages.ROLES if role != "router")
    legs = (f"{role}.{stage.name}" for stage in stages.STAGES for role in stage.roles)
    own = (name for name in stages.ROUTER_STAGES if name != "router.hop")
    return stages.STAGE_NAMES, (*own, *hops, *legs)


def format_attribute(name: str) -> str:
    """The span attribute `name` as an OTTL path."""
    return f'span.attributes["{name}"]'


def generate_derive_statements() -> Iterator[str]:
    """The statements of transform/ttft, for our own spans and for those of other instrumentations."""
    # Two groups: a router's span has legs with stages, of which a server's statements need not ask.
    for router, summed in zip((False, True), list_full_stage_names(), strict=True):
        yield from _format_group(
            # Our spans by scope, not by name: anybody may call a span `ttft`.
            f'scope.name == "{span_names.SCOPE}"'
            f' and (span.name == "{span_names.TTFT}" or span.name == "{span_names.ENCODE}")'
            f' and {format_attribute(keys.ROLE)} {"==" if router else "!="} "router"'
            # A clock that went backwards would make a negative length.
            " and span.end_time_unix_nano >= span.start_time_unix_nano",
            [
                f"set({format_attribute(keys.DERIVED_MS)}, Milliseconds{SPAN_DURATION})",
                'set(span.cache["sum"], 0)',
                *map(_format_add_stage, summed),
                f'set({format_attribute(keys.DERIVED_STAGE_SUM_US)}, span.cache["sum"])',
                f"set({format_attribute(keys.DERIVED_UNATTRIBUTED_US)}, Microseconds{SPAN_DURATION} - "
                f'span.cache["sum"])',
            ],
        )
    ttft_ms = format_attribute(keys.DERIVED_MS)
    is_first_token = " or ".join(f'spanevent.name == "{name}"' for name in FIRST_TOKEN_EVENTS)
    yield from _format_group(
        f'scope.name != "{span_names.SCOPE}"',
        [
            # Another program's attribute of this name, Dynamo's for example: TraceQL compares integers.
            f"set({ttft_ms}, Double({ttft_ms})) where {ttft_ms} != nil and IsString({ttft_ms})"
            f' and IsMatch({ttft_ms}, "^[0-9]{{1,18}}([.][0-9]{{1,18}})?$")',
            f"set({ttft_ms}, Int({ttft_ms})) where {ttft_ms} != nil and IsDouble({ttft_ms})"
            f" and {ttft_ms} >= 0 and {ttft_ms} < 86400000",
            f'delete_key(span.attributes, "{keys.DERIVED_MS}")'
            f" where {ttft_ms} != nil and not IsInt({ttft_ms})",
            *map(_format_seconds_to_ms, TTFT_SECONDS_ATTRIBUTES),
        ],
    )
    yield from _format_group(
        f'scope.name != "{span_names.SCOPE}" and {ttft_ms} == nil and ({is_first_token})'
        " and spanevent.time_unix_nano >= span.start_time_unix_nano",
        [f"set({ttft_ms}, Milliseconds(spanevent.time - span.start_time))"],
        "spanevent",
    )


def _format_add_stage(stage: str) -> str:
    """Add one stage to the sum. Compare with nil first: IsInt(nil) is an error, which is slow."""
    span_attribute = format_attribute(keys.name_stage_attribute(stage))
    return (
        f'set(span.cache["sum"], span.cache["sum"] + {span_attribute}) where {span_attribute} '
        f"!= nil and IsInt({span_attribute})"
    )


def _format_seconds_to_ms(name: str) -> str:
    """Seconds -> whole milliseconds; rounded to microseconds first, else 0.29 s became 289 ms."""
    span_attribute, ttft_ms = format_attribute(name), format_attribute(keys.DERIVED_MS)
    return (
        f"set({ttft_ms}, Int(Double({span_attribute}) * 1000000.0 + 0.5) / 1000) where {ttft_ms} == nil"
        f" and (IsDouble({span_attribute}) or IsInt({span_attribute})) and {span_attribute} >= 0 "
        f"and {span_attribute} < {MAX_TTFT_S}"
    )


def _format_group(
    condition: str, statements: Iterable[str], context: str = "span"
) -> Iterator[str]:
    yield f"- context: {context}"
    yield f"  conditions: ['{condition}']"
    yield "  statements:"
    yield from (f"    - {statement}" for statement in statements)


def generate_own_keys() -> Iterator[str]:
    """A statement that removes all attributes from our spans that are not in our vocabulary."""
    conventions = ("ttft.", "gen_ai.", "http.", "url.", "server.", "error.")
    own_keys = {
        value
        for value in vars(keys).values()
        if isinstance(value, str) and value.startswith(conventions)
    }
    server, router = list_full_stage_names()
    own_keys |= {keys.name_stage_attribute(stage) for stage in (*server, *router)}
    own_keys |= {
        keys.name_reason_attribute(stage, reason)
        for stage in (*stages.QUEUE_STAGES, stages.STALL_STAGE)
        for reason in stages.WAIT_REASON_NAMES
    }
    own_keys |= {keys.name_held_attribute(kind) for kind in stages.HOLDING_KIND_NAMES}
    after = (*router, span_names.FIRST_DECODE, stages.UNATTRIBUTED)
    own_keys |= {keys.name_handover_attribute(stage) for stage in after}
    yield "- keep_keys(span.attributes, ["
    yield from (f'    "{key}",' for key in sorted(own_keys)[:-1])
    yield f'    "{sorted(own_keys)[-1]}"])'


def _format_is_no_number(attribute: str) -> str:
    return f"{attribute} == nil or not IsInt({attribute})"


def _format_length(attribute: str, unit_ns: int) -> str:
    """Make a span as long as `attribute` says: span_metrics sums nothing but lengths of spans."""
    end = f"span.start_time_unix_nano + {attribute} * {unit_ns}"
    return f"set(span.end_time_unix_nano, {end})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanBranch:
    """The spans of one metric, or of several: a filter, a transformation if it has one, and a pipeline."""

    #: Of its filter, its transformation, its pipeline and the connector from which it gets spans.
    name: str
    #: The comment above its filter.
    why: str
    #: OTTL conditions, of which each drops the spans that meet it.
    dropped: tuple[str, ...]
    #: Where its spans go: names of metrics, and of branches.
    feeds: tuple[str, ...]
    #: The comment above its transformation.
    changed_why: str = ""
    #: OTTL statements on each span that meets `changed_if`.
    changed: tuple[str, ...] = ()
    changed_if: str = ""
    #: The branch whose spans it shares, instead of its own.
    source: str = ""

    @property
    def processors(self) -> list[str]:
        """The processors of its pipeline."""
        return [f"filter/{self.name}", *([f"transform/{self.name}"] if self.changed else [])]


_STAGE: Final = format_attribute(keys.STAGE)
_REASON: Final = format_attribute(keys.QUEUE_REASON)
_OUTERMOST: Final = format_attribute(keys.OUTERMOST)
_TOKEN_TIME: Final = format_attribute(keys.TIME_PER_OUTPUT_TOKEN_US)
_RECOMPUTED: Final = format_attribute(keys.EC_RECOMPUTED_ITEMS)
_ERROR: Final = format_attribute(keys.ERROR_TYPE)
_STATUS: Final = format_attribute(keys.HTTP_STATUS)
_IS_NO_QUEUE: Final = " and ".join(
    (f"{_REASON} == nil", *(f'{_STAGE} != "{stage}"' for stage in reversed(stages.QUEUE_STAGES)))
)
_IS_NO_SERVER: Final = "span.kind != SPAN_KIND_SERVER"
_US: Final = 1_000  # nanoseconds
_S: Final = 1_000_000_000  # nanoseconds

# The products of whose requests metrics are made; what the others tell, needs the rest of its trace.
_COUNTED_PRODUCTS: Final = tuple(each for each in PRODUCTS if each.requests)
_FOREIGN: Final = format_attribute(keys.FOREIGN)
_TOTAL_US: Final = format_attribute(keys.TOTAL_US)


def _list_lengths(product: ForeignProduct) -> dict[str, ForeignNames]:
    """The rows of attributes with lengths that are ours, by the attribute of ours."""
    rows = {row.stage: row for row in product.rows if row.form != "span" and row.stage}
    named = {stage: keys.name_stage_attribute(stage) for stage in rows} | {TOTAL: keys.TOTAL_US}
    return {named[stage]: row for stage, row in rows.items()}


def _match_request(product: ForeignProduct) -> str:
    """An OTTL condition for the spans of a product's whole requests."""
    assert product.requests and (product.scope or product.requests.pattern != ".*")
    name = product.requests.pattern.replace("\\", "\\\\")
    scope = [f'HasPrefix(scope.name, "{product.scope}")'] if product.scope else []
    named = [f'IsMatch(span.name, "^({name})$")'] if name != ".*" else []
    return " and ".join(scope + named)


def _match_stages(product: ForeignProduct) -> Iterator[tuple[str, str]]:
    """The stages that spans of a product tell by themselves, with OTTL conditions for these."""
    for row in product.rows:
        if row.form == "span" and row.stage and row.alone:
            names = " or ".join(f'span.name == "{name}"' for name in row.names)
            yield row.stage, f'HasPrefix(scope.name, "{product.scope}") and ({names})'


def _list_known() -> Iterator[str]:
    """OTTL conditions for all spans of other products that are counted."""
    for product in _COUNTED_PRODUCTS:
        yield _match_request(product)
        yield from (matched for _, matched in _match_stages(product))


_IS_OURS: Final = f'scope.name == "{span_names.SCOPE}"'
_IS_KNOWN: Final = " or ".join(f"({each})" for each in _list_known())
# Outermost spans, from which the other branches get theirs.
OUTERMOST: Final = SpanBranch(
    name="outermost",
    why="Router, prefill and decode have a ttft span each, for one request: metrics take the caller's, and"
    " its stages. A span with ttft.ec.recomputed_items, of an encoder-cache consumer behind the caller,"
    " passes for that metric alone; so does a queue, and a part of one with ttft.queue.reason: only the"
    " server knows why a request waited, and behind what; and a server's span with its time per output"
    " token: only the instance that decodes knows it. A process that counts its requests itself"
    " (metrics/in) says so in its resource.",
    dropped=(
        f'scope.name != "{span_names.SCOPE}" and not ({_IS_KNOWN})',
        f'resource.attributes["{keys.METRICS_SOURCE}"] == "{keys.METRICS_FROM_EXPORTER}"',
        f"{_OUTERMOST} != true and {_IS_NO_QUEUE} and {_TOKEN_TIME} == nil and {_IS_OURS}"
        f' and (span.name != "{span_names.TTFT}" or {_RECOMPUTED} == nil)',
        f'span.name != "{span_names.TTFT}" and span.name != "{span_names.ENCODE}"'
        f" and {_IS_NO_SERVER} and {_STAGE} == nil and {_REASON} == nil and {_IS_OURS}",
    ),
    feeds=("whole", "stage", "waits", "recomputed", "request", "token_time"),
)
SPAN_BRANCHES: Final = (
    SpanBranch(
        name="whole",
        why="Whole requests to one metric, their stages to another. Those of other products go with the few,"
        " because every branch copies what it is given.",
        dropped=(
            f"{_IS_OURS} and ({_STAGE} != nil or {_REASON} != nil or span.kind == SPAN_KIND_SERVER)",
            f"{_IS_OURS} and {_OUTERMOST} != true",
        ),
        feeds=("ttft", "foreign"),
    ),
    SpanBranch(
        name="ttft",
        why="",
        dropped=(f'scope.name != "{span_names.SCOPE}"',),
        feeds=(metric_names.TTFT_DURATION, "convention"),
    ),
    SpanBranch(
        name="stage",
        why="",
        dropped=(f"{_STAGE} == nil", f"{_OUTERMOST} != true"),
        feeds=(metric_names.STAGE_DURATION,),
    ),
    SpanBranch(
        name="waits",
        why="A queue with one reason is its stage's span, with several it has a span below for each;"
        " what held it is on the stage's.",
        dropped=(_IS_NO_QUEUE,),
        feeds=("reason", "held"),
    ),
    SpanBranch(
        name="reason",
        why="",
        dropped=(f"{_REASON} == nil",),
        feeds=(metric_names.QUEUE_REASON_DURATION,),
    ),
    *(
        SpanBranch(
            name=f"held_{kind}",
            why=f"Queues that work of the kind {kind} held.",
            dropped=(f"{_STAGE} == nil or {_format_is_no_number(held)}",),
            changed_why="In this branch a span is as long as that work held it.",
            changed=(
                _format_length(held, _US),
                f'set({format_attribute(keys.HELD_BY_KIND)}, "{kind}")',
            ),
            feeds=(metric_names.QUEUE_HELD_DURATION,),
            source="held",
        )
        for kind in stages.HOLDING_KIND_NAMES
        for held in (format_attribute(keys.name_held_attribute(kind)),)
    ),
    SpanBranch(
        name="recomputed",
        why="Servers that take encodings from others; also those that encoded nothing again, so that the"
        " counter begins at 0.",
        dropped=(f'span.name != "{span_names.TTFT}" or {_format_is_no_number(_RECOMPUTED)}',),
        changed_why="In this branch a span is as many seconds long as it has items.",
        changed=(_format_length(_RECOMPUTED, _S),),
        feeds=(metric_names.EC_RECOMPUTED,),
    ),
    SpanBranch(
        name="convention",
        why="The convention counts answers that began; an encoder's has no token.",
        dropped=(f'span.name != "{span_names.TTFT}" or {_ERROR} != nil',),
        feeds=(metric_names.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN,),
    ),
    SpanBranch(
        name="request",
        why='Whole requests, to the last byte; answers that only say "queued" are none.',
        dropped=(
            f"{_IS_NO_SERVER} or {_OUTERMOST} != true",
            f"{format_attribute(keys.OPERATION)} == nil or {format_attribute(keys.BACKGROUND)} != nil",
        ),
        changed_why="A refusal is the client's error and not one of the server's span; a duration without it"
        " would count as an answer's.",
        changed_if=f"{_ERROR} == nil and {_STATUS} != nil and {_STATUS} >= 400",
        changed=(f"set({_ERROR}, String({_STATUS}))",),
        feeds=(metric_names.GEN_AI_SERVER_REQUEST_DURATION,),
    ),
    SpanBranch(
        name="token_time",
        why="Servers that decode, behind the caller too; of an answer with several generations there"
        " is none.",
        dropped=(f"{_IS_NO_SERVER} or {_format_is_no_number(_TOKEN_TIME)}",),
        changed_why="In this branch a span is as long as one of its tokens took.",
        changed=(_format_length(_TOKEN_TIME, _US),),
        feeds=(metric_names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN,),
    ),
)


def _format_foreign_request(product: ForeignProduct) -> Iterator[str]:
    """Statements on a request's span: its role, its TTFT and its stages, which fit into that."""
    matched, lengths = _match_request(product), _list_lengths(product)
    role = format_attribute(keys.ROLE)
    yield f'set({role}, "{stages.MONO}") where {matched}'
    for word, ours in product.roles.items():
        told = format_attribute(product.role)
        if ours != stages.MONO:
            yield f'set({role}, "{ours}") where {matched} and {told} == "{word}"'
    for word in stages.ROLES:
        if product.requests and product.requests.groups and word in product.requests.pattern:
            yield f'set({role}, "{word}") where {matched} and HasPrefix(span.name, "{word} ")'
    for ours, row in lengths.items():
        # A text is a number by now, see generate_derive_statements().
        per_s, attribute = (1 if row.form == "s" else 1000), format_attribute(ours)
        for told in map(format_attribute, row.names):
            yield (
                f"set({attribute}, Int(Double({told}) * {1e6 / per_s} + 0.5)) where {matched}"
                f" and {attribute} == nil and {told} != nil and (IsDouble({told}) or IsInt({told}))"
                f" and {told} > 0 and {told} < {MAX_TTFT_S * per_s}"
            )
    parts = [format_attribute(each) for each in lengths if each != keys.TOTAL_US]
    if parts:
        yield f'set(span.cache["sum"], 0) where {matched}'
    for part in parts:
        yield f'set(span.cache["sum"], span.cache["sum"] + {part}) where {matched} and {part} != nil'
    for each in lengths:
        if each != keys.TOTAL_US:
            is_wrong = f'({_TOTAL_US} == nil or span.cache["sum"] > {_TOTAL_US})'
            yield f'delete_key(span.attributes, "{each}") where {matched} and {is_wrong}'


def _list_foreign_branches() -> Iterator[SpanBranch]:
    """The branches of spans of other products, each to one of their two metrics."""
    told = {product.role for product in _COUNTED_PRODUCTS if product.role}
    labelled = list[str]()
    for product in _COUNTED_PRODUCTS:
        found = list(_match_stages(product))
        told.update(name for row in _list_lengths(product).values() for name in row.names)
        own = [_match_request(product), *(matched for _, matched in found)]
        labelled += [f'set({_FOREIGN}, "{product.name}") where {matched}' for matched in own]
        labelled += _format_foreign_request(product)
        labelled += [f'set({_STAGE}, "{stage}") where {each}' for stage, each in found]
    kept = ", ".join(f'"{each}"' for each in sorted(told))
    yield SpanBranch(
        name="foreign",
        why="Spans of other products, by the table in ttft_otel/report/foreign/products.py: of each instance,"
        " as they come. What depends on others of the trace is left out; what no stage tells, is a panel's"
        " difference.",
        dropped=(_IS_OURS,),
        changed_why="Labels are this table's and nobody else's.",
        changed=(f"keep_keys(span.attributes, [{kept}])", *labelled),
        feeds=("foreign_part",),
    )
    yield SpanBranch(
        name="foreign_ttft",
        why="Whole requests to one metric.",
        dropped=(f"{_TOTAL_US} == nil",),
        changed_why="A request's span lasts until the last token.",
        changed=(_format_length(_TOTAL_US, _US),),
        feeds=(metric_names.FOREIGN_DURATION,),
        source="foreign_part",
    )
    yield SpanBranch(
        name="foreign_stage",
        why="Spans that are a stage to the other.",
        dropped=(f"{_STAGE} == nil",),
        feeds=(metric_names.FOREIGN_STAGE_DURATION,),
        source="foreign_part",
    )
    lengths = {
        ours: row.stage
        for product in _COUNTED_PRODUCTS
        for ours, row in _list_lengths(product).items()
    }
    for ours, stage in lengths.items():
        if ours != keys.TOTAL_US:
            yield SpanBranch(
                name=f"foreign_{stage}",
                why=f"Requests that have {stage} as an attribute.",
                dropped=(f"{format_attribute(ours)} == nil",),
                changed_why="In this branch a span is as long as its attribute says of the stage.",
                changed=(_format_length(format_attribute(ours), _US), f'set({_STAGE}, "{stage}")'),
                feeds=(metric_names.FOREIGN_STAGE_DURATION,),
                source="foreign_part",
            )


ALL_BRANCHES: Final = (OUTERMOST, *SPAN_BRANCHES, *_list_foreign_branches())


def _format_comment(text: str) -> Iterator[str]:
    yield from (f"# {line}" for line in textwrap.wrap(text, COMMENT_CHARS))


def _format_processor(name: str, error_mode: str, kind: str, lines: Iterable[str]) -> Iterator[str]:
    yield f"{name}:"
    yield f"  error_mode: {error_mode}"
    yield f"  {kind}:"
    yield from (f"    {line}" for line in lines)


def _format_transformation(
    context: str, statements: Sequence[str], condition: str = ""
) -> Iterator[str]:
    yield f"- context: {context}"
    if condition:
        yield f"  conditions: ['{condition}']"
    yield "  statements:"
    yield from (f"    - {statement}" for statement in statements)


def generate_branches() -> Iterator[str]:
    """The processors of all branches of spans."""
    for branch in ALL_BRANCHES:
        yield from _format_comment(branch.why)
        conditions = (f"- {condition}" for condition in branch.dropped)
        yield from _format_processor(
            f"filter/{branch.name}", "ignore", "trace_conditions", conditions
        )
        if branch.changed:
            yield from _format_comment(branch.changed_why)
            statements = _format_transformation("span", branch.changed, branch.changed_if)
            yield from _format_processor(
                f"transform/{branch.name}", "silent", "trace_statements", statements
            )


def _escape(metric: str) -> str:
    """A metric's name in a pattern, in a string of OTTL."""
    return re.escape(metric).replace("\\", "\\\\")


def generate_made() -> Iterator[str]:
    """The processors that give what span_metrics makes the names, and the unit, of the table."""
    sums = [name for name, metric in METRICS.items() if metric.is_sum]
    yield from _format_comment(
        "span_metrics counts calls too, which the histograms' counts say already; of items the sum is enough."
    )
    unwanted = [f'IsMatch(metric.name, "^{_escape(name)}[.]duration$")' for name in sums]
    yield from _format_processor(
        "filter/histograms",
        "ignore",
        "metric_conditions",
        (f"- {condition}" for condition in (r'IsMatch(metric.name, "\\.calls$")', *unwanted)),
    )
    yield "# span_metrics ends every name in .duration. A metric of items becomes a counter."
    renamed = [
        f'set(metric.name, "{name}") where metric.name == "{name}.duration"'
        for name in METRICS
        if not name.endswith(".duration") and name not in sums
    ]
    extracted = [f"extract_sum_metric(true) where {condition}" for condition in unwanted]
    lines = [*_format_transformation("metric", [*renamed, *extracted])]
    for name in sums:
        values = {
            "name": name,
            "unit": METRICS[name].unit,
            "description": METRICS[name].description,
        }
        lines += _format_transformation(
            "metric",
            [f'set(metric.{field}, "{value}")' for field, value in values.items()],
            f'IsMatch(metric.name, "^{_escape(name)}[.]duration_sum$")',
        )
    yield from _format_processor("transform/metrics", "ignore", "metric_statements", lines)


def generate_connectors() -> Iterator[str]:
    """One span_metrics connector per metric; its labels are listed, so that no ID becomes one."""
    yield from (f"forward/{name}:" for name in _list_forwards())
    yield from _format_comment(
        "Histograms of outermost spans by listed labels; job and instance come from the resource. Ours are"
        " exponential (off by 4.4 % at most over a factor of 1,000), the convention's have its own bounds."
    )
    for name, metric in COUNTED.items():
        yield f"span_metrics/{name}:"
        # The connector appends `.duration` itself.
        yield f"  namespace: {name.removesuffix('.duration')}"
        yield "  histogram:"
        yield "    unit: s"
        if metric.bounds_s:
            buckets = ", ".join(f"{bound * 1000:g}ms" for bound in metric.bounds_s)
            yield f"    explicit: {{buckets: [{buckets}]}}"
        elif metric.is_sum:
            yield "    explicit: {buckets: [1s]} # only the sum is taken out of it"
        else:
            yield f"    exponential: {{max_size: {MAX_HISTOGRAM_BUCKETS}}}"
        yield "  dimensions:"
        # Places come from the resource, which Prometheus does not turn into labels by itself.
        yield from (f"    - name: {label}" for label in (*metric.labels, *PLACE_LABELS))
        yield f"  exclude_dimensions: [{', '.join(_list_excluded(name, 'collector.instance.id'))}]"
        yield f"  aggregation_cardinality_limit: ${{env:TTFT_SERIES_LIMIT:-{MAX_SERIES}}}"
        yield "  resource_metrics_key_attributes: [service.name, service.instance.id]"
        yield "  add_resource_attributes: true"
        yield f"  exemplars: {{enabled: true, max_per_data_point: {MAX_EXEMPLARS}}}"
        yield f"  metrics_flush_interval: ${{env:TTFT_METRICS_INTERVAL:-{PUSH_INTERVAL_S}s}}"
        yield f"  metrics_expiration: {MAX_IDLE_S // 3600}h"
        yield f"  series_expiration: {MAX_IDLE_S // 3600}h"


def _list_excluded(metric: str, *others: str) -> list[str]:
    """Default dimensions of span_metrics that the metric does not have."""
    # service.name is a resource attribute already (`job`).
    status = [] if STATUS_LABEL in COUNTED[metric].all_labels else [STATUS_LABEL]
    return ["service.name", "span.name", "span.kind", *others, *status]


def generate_tier2_connectors() -> Iterator[str]:
    """The connectors' dimensions in a second tier, where collectors are told apart."""
    for name in COUNTED:
        yield f"span_metrics/{name}:"
        yield f"  exclude_dimensions: [{', '.join(_list_excluded(name))}]"


def _list_forwards() -> list[str]:
    """Names of the connectors between pipelines."""
    fed = (feed for branch in ALL_BRANCHES for feed in branch.feeds)
    return ["traces", OUTERMOST.name, *(name for name in fed if name not in COUNTED)]


def generate_pipelines() -> Iterator[str]:
    """A pipeline for each branch of spans, one for the metrics made of them, one for those that come."""
    for branch in ALL_BRANCHES:
        # A caller's tracestate may claim a sampling ratio; span_metrics would multiply by it.
        processors = [*branch.processors, *(["transform/count"] if branch is OUTERMOST else [])]
        exporters = [
            f"span_metrics/{name}" if name in COUNTED else f"forward/{name}"
            for name in branch.feeds
        ]
        yield from _format_pipeline(
            f"traces/{branch.name}",
            [f"forward/{branch.source or branch.name}"],
            processors,
            exporters,
        )
    made = [f"span_metrics/{name}" for name in COUNTED]
    out = ["otlp_http/prometheus"]
    yield from _format_pipeline(
        "metrics/prometheus", made, ["transform/metrics", "filter/histograms"], out
    )
    yield "# What exporter processes have counted themselves; filter/outermost leaves their spans out above."
    received = ["memory_limiter", "filter/received", "transform/received", "deltatocumulative"]
    yield from _format_pipeline("metrics/in", ["otlp"], received, out)


def _format_pipeline(
    name: str, receivers: Sequence[str], processors: Sequence[str], exporters: Sequence[str]
) -> Iterator[str]:
    yield f"{name}:"
    yield f"  receivers: [{', '.join(receivers)}]"
    yield f"  processors: [{', '.join(processors)}]"
    yield f"  exporters: [{', '.join(exporters)}]"


# Resource attributes that may hold a secret; transform/scrub has the same for spans.
SECRET_KEYS: Final = (
    r"(?i)(process\\.command|authorization|api[._-]?key|cookie|passw|secret|credential|bearer"
    r"|(access|session|auth)[._-]token|private[._-]key)"
)


def generate_received() -> Iterator[str]:
    """Processors of metrics that exporter processes send: no other ones, no other labels."""
    known = "|".join(map(_escape, METRICS))
    conditions = (
        f'- scope.name != "{span_names.SCOPE}"',
        f'- not IsMatch(metric.name, "^({known})$")',
    )
    yield from _format_processor("filter/received", "ignore", "metric_conditions", conditions)
    yield "# Labels are those of the metrics made here, so that nobody's IDs become series."
    lines = [
        *_format_transformation(
            "resource",
            [
                f'delete_matching_keys(resource.attributes, "{SECRET_KEYS}")',
                "truncate_all(resource.attributes, 512)",
            ],
        )
    ]
    places = {label: f'resource.attributes["{label}"]' for label in PLACE_LABELS}
    for name, metric in METRICS.items():
        listed = ", ".join(f'"{label}"' for label in (*metric.all_labels, OVERFLOW_LABEL))
        lines += _format_transformation(
            "datapoint",
            [
                f"keep_keys(datapoint.attributes, [{listed}])",
                *(
                    f'set(datapoint.attributes["{label}"], {place}) where {place} != nil'
                    for label, place in places.items()
                ),
                "truncate_all(datapoint.attributes, 512)",
            ],
            f'metric.name == "{name}"',
        )
    yield from _format_processor("transform/received", "silent", "metric_statements", lines)


BLOCK_GENERATORS: Final = {
    "derive": generate_derive_statements,
    "own": generate_own_keys,
    "branches": generate_branches,
    "made": generate_made,
    "received": generate_received,
    "connectors": generate_connectors,
    "pipelines": generate_pipelines,
    "tier2": generate_tier2_connectors,
}


def rewrite_config(text: str) -> str:
    """The configuration `text` with its generated parts replaced."""

    # Indented like the closing mark, so that a block can be moved in the file.
    def replace_block(found: re.Match[str]) -> str:
        margin = found["tail"][: found["tail"].index("#")]
        lines = "\n".join(BLOCK_GENERATORS[found["name"]]()) + "\n"
        return found["head"] + textwrap.indent(lines, margin) + found["tail"]

    return GENERATED_BLOCK.sub(replace_block, text)


if __name__ == "__main__":
    for path in GENERATED_FILES:
        path.write_text(rewrite_config(path.read_text("utf-8")), "utf-8")
