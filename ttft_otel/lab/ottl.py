# SPDX-License-Identifier: Apache-2.0
"""Write the parts of collector/config.yaml that follow from stages.py and names.py.

`python -m ttft_otel.lab.ottl` rewrites them between their marks; a test compares. OTTL cannot sum over
keys of a map, so there is one statement per stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import indent
from typing import Final

from ttft_otel import names, stages

CONFIG: Final = Path(__file__).parents[2] / "collector" / "config.yaml"
MARKED: Final = re.compile(
    r"(?P<head>^ *# generated: (?P<name>\w+)[^\n]*\n).*?(?P<tail>^ *# generated end\n)", re.M | re.S
)

# What others send: seconds, as an attribute; or an event at the first token. Earlier ones win.
ATTRIBUTES: Final = (
    names.FIRST_CHUNK,
    "gen_ai.response.time_to_first_token",
    "gen_ai.latency.time_to_first_token",  # vLLM's own llm_request, SGLang
)
EVENTS: Final = (
    "first_token",
    "llm.first_token",
    "gen_ai.first_token",
    "gen_ai.content.chunk",
    "First Token Stream Event",  # OpenInference
    "ai.stream.firstChunk",
    "llm.content.completion.chunk",
)
LENGTH: Final = "(span.end_time - span.start_time)"
# Bounds that the semantic convention asks for, in seconds.
BUCKETS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0),
)
LABELS: Final = {
    names.METRIC_TTFT: (names.ROLE, names.MODEL, names.ERROR_TYPE),
    names.METRIC_STAGE: (
        *(names.ROLE, names.MODEL, names.STAGE, names.LEG, names.INSTANCE),
        names.ERROR_TYPE,
    ),
    names.METRIC_CONVENTION: (names.OPERATION, names.PROVIDER, names.MODEL),
}


def partition() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Full names of all stages: a server's own, and those that only a router has."""
    hops = (f"router.hop.{role}" for role in stages.ROLES if role != "router")
    legs = (f"{role}.{stage.name}" for stage in stages.STAGES for role in stage.roles)
    own = (name for name in stages.ROUTER if name != "router.hop")
    return stages.NAMES, (*own, *hops, *legs)


def attribute(name: str) -> str:
    """An attribute of the span at hand, in OTTL."""
    return f'span.attributes["{name}"]'


def derive() -> Iterator[str]:
    """Statements of transform/ttft: on our spans from their own numbers, on others' from theirs."""
    for router, summed in zip((False, True), partition(), strict=True):
        yield from _group(
            f'scope.name == "{names.SCOPE}"'
            f' and (span.name == "{names.TTFT}" or span.name == "{names.ENCODE}")'
            f' and {attribute(names.ROLE)} {"==" if router else "!="} "router"'
            " and span.end_time_unix_nano >= span.start_time_unix_nano",
            [
                f"set({attribute(names.DERIVED_MS)}, Milliseconds{LENGTH})",
                'set(span.cache["sum"], 0)',
                *map(_add, summed),
                f'set({attribute(names.DERIVED_SUM_US)}, span.cache["sum"])',
                f'set({attribute(names.DERIVED_REST_US)}, Microseconds{LENGTH} - span.cache["sum"])',
            ],
        )
    found = attribute(names.DERIVED_MS)
    first = " or ".join(f'spanevent.name == "{name}"' for name in EVENTS)
    yield from _group(
        f'scope.name != "{names.SCOPE}"',
        [
            f'delete_key(span.attributes, "{names.DERIVED_MS}")'
            f" where {found} != nil and not IsInt({found})",
            *map(_seconds, ATTRIBUTES),
        ],
    )
    yield from _group(
        f'scope.name != "{names.SCOPE}" and {found} == nil and ({first})'
        " and spanevent.time_unix_nano >= span.start_time_unix_nano",
        [f"set({found}, Milliseconds(spanevent.time - span.start_time))"],
        "spanevent",
    )


def _add(stage: str) -> str:
    """One stage to the sum. Asked for nil first: IsInt makes an error of it, which costs."""
    each = attribute(names.stage_us(stage))
    return (
        f'set(span.cache["sum"], span.cache["sum"] + {each}) where {each} != nil and IsInt({each})'
    )


def _seconds(name: str) -> str:
    """Seconds -> whole milliseconds, rounded to microseconds first: 0.29 s is not 289 ms."""
    each, found = attribute(name), attribute(names.DERIVED_MS)
    return (
        f"set({found}, Int(Double({each}) * 1000000.0 + 0.5) / 1000) where {found} == nil"
        f" and (IsDouble({each}) or IsInt({each})) and {each} >= 0 and {each} < 86400"
    )


def _group(condition: str, statements: Iterable[str], context: str = "span") -> Iterator[str]:
    yield f"- context: {context}"
    yield f"  conditions: ['{condition}']"
    yield "  statements:"
    yield from (f"    - {statement}" for statement in statements)


def own() -> Iterator[str]:
    """The keys that our own spans may have: whatever else is on them is a mistake, and goes."""
    conventions = ("ttft.", "gen_ai.", "http.", "url.", "server.", "error.")
    keys = {
        value
        for value in vars(names).values()
        if isinstance(value, str) and value.startswith(conventions) and value not in LABELS
    }
    server, router = partition()
    keys |= {names.stage_us(stage) for stage in (*server, *router)}
    after = (*router, names.FIRST_DECODE, stages.UNATTRIBUTED)
    keys |= {names.handover_us(stage) for stage in after}
    yield "- keep_keys(span.attributes, ["
    yield from (f'    "{key}",' for key in sorted(keys)[:-1])
    yield f'    "{sorted(keys)[-1]}"])'


def connectors() -> Iterator[str]:
    """One span_metrics per metric: labels are listed, so no id can become one."""
    buckets = ", ".join(f"{bound * 1000:g}ms" for bound in BUCKETS)
    for metric, labels in LABELS.items():
        left = ["service.name", "span.name", "span.kind", "collector.instance.id"]
        left += [] if metric == names.METRIC_TTFT else ["status.code"]
        yield f"span_metrics/{metric}:"
        yield f"  namespace: {metric.removesuffix('.duration')}"
        yield "  histogram:"
        yield "    unit: s"
        if metric == names.METRIC_CONVENTION:
            yield f"    explicit: {{buckets: [{buckets}]}}"
        else:
            yield "    exponential: {max_size: 160}"
        yield "  dimensions:"
        yield from (f"    - name: {label}" for label in labels)
        yield f"  exclude_dimensions: [{', '.join(left)}]"
        yield from EVERY


# The same for every metric. Labels stay below the limit or fall into one series, `otel_metric_overflow`.
EVERY: Final = (
    "  aggregation_cardinality_limit: ${env:TTFT_SERIES_LIMIT:-2000}",
    "  resource_metrics_key_attributes: [service.name, service.instance.id]",
    "  add_resource_attributes: true",
    "  exemplars: {enabled: true, max_per_data_point: 10}",
    "  metrics_flush_interval: ${env:TTFT_METRICS_INTERVAL:-15s}",
    "  metrics_expiration: 1h",
    "  series_expiration: 1h",
)
WRITERS: Final = {"derive": derive, "own": own, "connectors": connectors}


def rewrite(text: str) -> str:
    """The same configuration with its marked parts written anew."""

    def write(found: re.Match[str]) -> str:
        margin = found["tail"][: found["tail"].index("#")]
        lines = "\n".join(WRITERS[found["name"]]()) + "\n"
        return found["head"] + indent(lines, margin) + found["tail"]

    return MARKED.sub(write, text)


if __name__ == "__main__":
    CONFIG.write_text(rewrite(CONFIG.read_text("utf-8")), "utf-8")
