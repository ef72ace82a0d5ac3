# SPDX-License-Identifier: Apache-2.0
"""Generate the parts of collector/config.yaml that depend on stages.py and names/.

`python -m lab.collector_config` rewrites them between their marks; a test compares. OTTL (the
collector's transformation language) cannot sum over the own_keys of a map, hence one statement per stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import indent
from typing import Final

from ttft_otel.model import stages
from ttft_otel.model.metric_labels import (
    BUCKET_BOUNDS_S,
    MAX_HISTOGRAM_BUCKETS,
    METRIC_LABELS,
    OVERFLOW_LABEL,
    PLACE_LABELS,
    STATUS_LABEL,
)
from ttft_otel.model.names import keys, metric_names, span_names

CONFIG_PATH: Final = Path(__file__).parents[1] / "collector" / "config.yaml"
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
            # Another program's attribute of this name, if no integer: TraceQL could not compare it.
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
        # A day at most: what is more is another unit, or nonsense, and would spoil every mean.
        f"and {span_attribute} < 86400"
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


def generate_connectors() -> Iterator[str]:
    """One span_metrics connector per metric; its labels are listed, so that no ID becomes one."""
    for metric, labels in METRIC_LABELS.items():
        # Default dimensions of the connector; service.name is a resource attribute already (`job`).
        excluded = ["service.name", "span.name", "span.kind", "collector.instance.id"]
        excluded += [] if metric == metric_names.TTFT_DURATION else [STATUS_LABEL]
        yield f"span_metrics/{metric}:"
        # The connector appends `.duration` itself.
        yield f"  namespace: {metric.removesuffix('.duration')}"
        yield "  histogram:"
        yield "    unit: s"
        if metric in BUCKET_BOUNDS_S:
            buckets = ", ".join(f"{bound * 1000:g}ms" for bound in BUCKET_BOUNDS_S[metric])
            yield f"    explicit: {{buckets: [{buckets}]}}"
        elif metric == metric_names.EC_RECOMPUTED:
            yield "    explicit: {buckets: [1s]} # only the sum is taken out of it"
        else:
            yield f"    exponential: {{max_size: {MAX_HISTOGRAM_BUCKETS}}}"
        yield "  dimensions:"
        # Places come from the resource, which Prometheus does not turn into labels by itself.
        yield from (f"    - name: {label}" for label in (*labels, *PLACE_LABELS))
        yield f"  exclude_dimensions: [{', '.join(excluded)}]"
        yield from COMMON_CONNECTOR_SETTINGS


def generate_held() -> Iterator[str]:
    """Processors that make of a queue's span one for each kind of work that held it."""
    held = {
        kind: format_attribute(keys.name_held_attribute(kind)) for kind in stages.HOLDING_KIND_NAMES
    }
    yield "# Queues that work of one kind held."
    for kind, length in held.items():
        yield f"filter/held_{kind}:"
        yield "  error_mode: ignore"
        yield "  trace_conditions:"
        yield (
            f"    - {format_attribute(keys.STAGE)} == nil or {length} == nil or not IsInt({length})"
        )
    yield "# As of recomputed items: in its branch a span is as long as that work held it."
    for kind, length in held.items():
        yield f"transform/held_{kind}:"
        yield "  error_mode: silent"
        yield "  trace_statements:"
        yield "    - context: span"
        yield "      statements:"
        yield f"        - set(span.end_time_unix_nano, span.start_time_unix_nano + {length} * 1000)"
        yield f'        - set({format_attribute(keys.HELD_BY_KIND)}, "{kind}")'


def generate_held_pipelines() -> Iterator[str]:
    """A pipeline for each kind of work; all end in one connector."""
    for kind in stages.HOLDING_KIND_NAMES:
        yield f"traces/held_{kind}:"
        yield "  receivers: [forward/held]"
        yield f"  processors: [filter/held_{kind}, transform/held_{kind}]"
        yield f"  exporters: [span_metrics/{metric_names.QUEUE_HELD_DURATION}]"


# Resource attributes that may hold a secret; transform/scrub has the same for spans.
SECRET_KEYS: Final = (
    r"(?i)(process\\.command|authorization|api[._-]?key|cookie|passw|secret|credential|bearer"
    r"|(access|session|auth)[._-]token|private[._-]key)"
)
# The same for every metric. Beyond the limit all series are merged into one, `otel_metric_overflow`.
COMMON_CONNECTOR_SETTINGS: Final = (
    "  aggregation_cardinality_limit: ${env:TTFT_SERIES_LIMIT:-2000}",
    "  resource_metrics_key_attributes: [service.name, service.instance.id]",
    "  add_resource_attributes: true",
    "  exemplars: {enabled: true, max_per_data_point: 10}",
    "  metrics_flush_interval: ${env:TTFT_METRICS_INTERVAL:-15s}",
    "  metrics_expiration: 1h",
    "  series_expiration: 1h",
)


def generate_received() -> Iterator[str]:
    """Processors of metrics that exporter processes send: no other ones, no other labels."""
    known = "|".join(re.escape(metric) for metric in METRIC_LABELS).replace("\\", "\\\\")
    yield "filter/received:"
    yield "  error_mode: ignore"
    yield "  metric_conditions:"
    yield f'    - scope.name != "{span_names.SCOPE}"'
    yield f'    - not IsMatch(metric.name, "^({known})$")'
    yield "# Labels are those of the metrics made here, so that nobody's IDs become series."
    yield "transform/received:"
    yield "  error_mode: silent"
    yield "  metric_statements:"
    yield "    - context: resource"
    yield "      statements:"
    yield f'        - delete_matching_keys(resource.attributes, "{SECRET_KEYS}")'
    yield "        - truncate_all(resource.attributes, 512)"
    for metric, labels in METRIC_LABELS.items():
        kept = (
            *labels,
            *((STATUS_LABEL,) if metric == metric_names.TTFT_DURATION else ()),
            OVERFLOW_LABEL,
        )
        listed = ", ".join(f'"{label}"' for label in kept)
        yield "    - context: datapoint"
        yield f"      conditions: ['metric.name == \"{metric}\"']"
        yield "      statements:"
        yield f"        - keep_keys(datapoint.attributes, [{listed}])"
        for label in PLACE_LABELS:
            place = f'resource.attributes["{label}"]'
            yield f'        - set(datapoint.attributes["{label}"], {place}) where {place} != nil'
        yield "        - truncate_all(datapoint.attributes, 512)"


BLOCK_GENERATORS: Final = {
    "derive": generate_derive_statements,
    "own": generate_own_keys,
    "held": generate_held,
    "held_pipelines": generate_held_pipelines,
    "connectors": generate_connectors,
    "received": generate_received,
}


def rewrite_config(text: str) -> str:
    """The configuration `text` with its generated parts replaced."""

    # Indented like the closing mark, so that a block can be moved in the file.
    def replace_block(found: re.Match[str]) -> str:
        margin = found["tail"][: found["tail"].index("#")]
        lines = "\n".join(BLOCK_GENERATORS[found["name"]]()) + "\n"
        return found["head"] + indent(lines, margin) + found["tail"]

    return GENERATED_BLOCK.sub(replace_block, text)


if __name__ == "__main__":
    CONFIG_PATH.write_text(rewrite_config(CONFIG_PATH.read_text("utf-8")), "utf-8")
