# SPDX-License-Identifier: Apache-2.0
"""PromQL and TraceQL of the dashboards, built from the names in names/ and stages.py.

All these metrics come from outermost spans only (the collector sees to that), so a request that crosses
router, encoder and decoder counts once; those of every server are in server_queries.py. `$__rate_interval` is
for lines, `$__range` for numbers.
"""

from __future__ import annotations

from typing import Final

from ttft_otel.model import metric_table, stages
from ttft_otel.model.names import keys, metric_names, span_names


def format_label(name: str) -> str:
    """An attribute's or metric's name as Prometheus writes it."""
    # Prometheus takes OTLP names with dots turned into underscores, and appends unit and type.
    return name.replace(".", "_")


# Native histograms: one series without suffix, to which histogram_quantile() and the like apply.
DURATION_METRIC: Final = f"{format_label(metric_names.TTFT_DURATION)}_seconds"
STAGE_METRIC: Final = f"{format_label(metric_names.STAGE_DURATION)}_seconds"
# The convention fixes bounds, so this is a classic histogram: one series per bucket, with `le`.
CONVENTION_METRIC: Final = (
    f"{format_label(metric_names.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN)}_seconds_bucket"
)
REQUEST_METRIC: Final = (
    f"{format_label(metric_names.GEN_AI_SERVER_REQUEST_DURATION)}_seconds_bucket"
)

MODEL_LABEL: Final = format_label(keys.MODEL)
ROLE_LABEL: Final = format_label(keys.ROLE)
LEG_LABEL: Final = format_label(keys.LEG)
STAGE_LABEL: Final = format_label(keys.STAGE)
INSTANCE_LABEL: Final = format_label(keys.INSTANCE)
ERROR_LABEL: Final = format_label(keys.ERROR_TYPE)
NAMESPACE_LABEL: Final = format_label(metric_table.K8S_NAMESPACE)
POD_LABEL: Final = format_label(metric_table.K8S_POD)

RANGE: Final = "$__range"
# At least four scrape intervals, by Grafana's promise: rate() needs two samples.
RATE: Final = "$__rate_interval"

# Encoders answer no client; their own histogram would mix image encoding into TTFT.
NOT_ENCODE_SELECTOR: Final = f'{ROLE_LABEL}!="encode"'
# Outside of Kubernetes the labels are absent, which Prometheus takes for empty: `All`, ".*", finds these too.
PLACE_SELECTOR: Final = f'{NAMESPACE_LABEL}=~"$namespace",{POD_LABEL}=~"$pod",instance=~"$instance"'
CHOSEN_SELECTOR: Final = (
    f'{NOT_ENCODE_SELECTOR},{MODEL_LABEL}=~"$model",{ROLE_LABEL}=~"$role",{PLACE_SELECTOR}'
)
# A request that failed has no first token; its span says how long it lived.
ANSWERED_SELECTOR: Final = f'{CHOSEN_SELECTOR},{ERROR_LABEL}=""'
# The others by whose doing it was. A client that left, or sent what was refused, says nothing of servers.
# Prometheus anchors patterns at both ends: `4..` is a status, not any text with a 4 in it.
LEFT_ERRORS: Final = f"{keys.ERROR_CANCELLED}|{keys.ERROR_DISCONNECTED}"
REFUSED_ERRORS: Final = "4.."
LEFT_SELECTOR: Final = f'{CHOSEN_SELECTOR},{ERROR_LABEL}=~"{LEFT_ERRORS}"'
REFUSED_SELECTOR: Final = f'{CHOSEN_SELECTOR},{ERROR_LABEL}=~"{REFUSED_ERRORS}"'
# The empty alternative stands for requests without an error.
FAILED_SELECTOR: Final = f'{CHOSEN_SELECTOR},{ERROR_LABEL}!~"|{LEFT_ERRORS}|{REFUSED_ERRORS}"'
# What the SLO judges by time; what failed has missed it at any time.
WAITED_SELECTOR: Final = f'{CHOSEN_SELECTOR},{ERROR_LABEL}=~"|{LEFT_ERRORS}"'
JUDGED_SELECTOR: Final = f'{CHOSEN_SELECTOR},{ERROR_LABEL}!~"{REFUSED_ERRORS}"'

# In the order in which the breakdown stacks them; "" is what no mark accounts for.
STAGE_KINDS: Final = ("wait", "work", "move", "host", "")


def escape_alternatives(words: list[str]) -> str:
    """An alternation of words as a regular expression inside a PromQL string."""
    # [.] instead of an escaped dot: in a PromQL string each backslash would have to be doubled.
    return "|".join(word.replace(".", "[.]") for word in words)


def match_legs(words: list[str]) -> str:
    """Alternatives for the stages `words`, with and without a leg's prefix."""
    servers = "|".join(role for role in stages.ROLES if role != "router")
    return f"(({servers})[.])?({escape_alternatives(words)})"


def match_stage_kind(name: str) -> str:
    """A regular expression for the full names of all stages of one kind."""
    if not name:
        return match_legs([stages.UNATTRIBUTED])
    # A kind can have stages of servers and of routers; a hop's full name ends with its leg.
    own = [stage.name for stage in stages.STAGES if stage.kind == name]
    router = [word for word, its in stages.ROUTER_STAGES.items() if its.kind == name]
    alone = [word for word in router if word != "router.hop"]
    parts = [match_legs(own), *([escape_alternatives(alone)] if alone else [])]
    return "|".join(parts + (["router[.]hop[.].+"] if "router.hop" in router else []))


def histogram_rate(metric: str, chosen: str, window: str) -> str:
    """The histogram's rate over a window."""
    return f"rate({metric}{{{chosen}}}[{window}])"


def drop_nan(query: str) -> str:
    """Drop NaN of times without requests, which would make the means in legends NaN."""
    return f"{query} >= 0"


def per_request(query: str, window: str) -> str:
    """Seconds per second of time as seconds per answered request."""
    # `> 0` leaves nothing where nothing was answered, instead of dividing by zero.
    return f"{query} / on () group_left () ({request_rate(window, ANSWERED_SELECTOR)} > 0)"


def ttft_quantile(part: float, window: str, by: str = "") -> str:
    """A quantile of TTFT among answered requests, of all together or by a label."""
    over = f" by ({by})" if by else ""
    return drop_nan(
        f"histogram_quantile({part}, sum{over} "
        f"({histogram_rate(DURATION_METRIC, ANSWERED_SELECTOR, window)}))"
    )


def share_over_slo(window: str, by: str = "") -> str:
    """The share of requests that were without a first token at the SLO, or failed, however soon.

    As grafana/prometheus/rules records it. Refused requests are not among them.
    """
    return drop_nan(f"{missed_rate(window, by)} / {request_rate(window, JUDGED_SELECTOR, by)}")


def missed_rate(window: str, by: str = "") -> str:
    """Requests per second that were without a first token at the SLO, or failed, however soon."""
    over = f" by ({by})" if by else ""
    waited = f"sum{over} ({histogram_rate(DURATION_METRIC, WAITED_SELECTOR, window)})"
    # histogram_fraction() interpolates inside a bucket: the SLO need not be a bucket's bound.
    late = f"histogram_fraction($slo / 1000, +Inf, {waited}) * histogram_count({waited})"
    failed = request_rate(window, FAILED_SELECTOR, by)
    # Apart by a label, so that either may be missing.
    return (
        f'sum{over} (label_replace({drop_nan(late)}, "end", "late", "", "") '
        f'or label_replace({failed}, "end", "failed", "", ""))'
    )


def share_of_missed(window: str, by: str) -> str:
    """Of all requests that missed the SLO, the share of each value of a label; together one."""
    return f"{missed_rate(window, by)} / on () group_left () ({missed_rate(window)} > 0)"


def request_rate(window: str, chosen: str = CHOSEN_SELECTOR, by: str = "") -> str:
    """Requests per second."""
    over = f" by ({by})" if by else ""
    return f"sum{over} (histogram_count({histogram_rate(DURATION_METRIC, chosen, window)}))"


def share_ended(chosen: str, window: str, by: str = "") -> str:
    """The share of requests that ended without a first token as `chosen` says; 0 if none did."""
    total = request_rate(window, by=by)
    return drop_nan(f"(({request_rate(window, chosen, by)}) or 0 * {total}) / {total}")


def stage_time(window: str, chosen: str = "", by: str = STAGE_LABEL) -> str:
    """Seconds that answered requests spent in stages, per second."""
    # Stages of failed requests are left out, since the mean is per answered request.
    found = f"{ANSWERED_SELECTOR},{chosen}" if chosen else ANSWERED_SELECTOR
    return f"sum by ({by}) (histogram_sum({histogram_rate(STAGE_METRIC, found, window)}))"


def stage_mean(window: str, name: str | None = None) -> str:
    """Mean time of each stage per request: these add up to the mean TTFT. `name` is a kind."""
    chosen = "" if name is None else f'{STAGE_LABEL}=~"{match_stage_kind(name)}"'
    return per_request(stage_time(window, chosen), window)


def stage_share(window: str, name: str) -> str:
    """Each stage's share of the mean TTFT; the shares add up to one."""
    own = f'{STAGE_LABEL}=~"{match_stage_kind(name)}"'
    # Of stages, not of TTFT: whole and parts come from the same metric, so shares add up to one.
    whole = f"sum (histogram_sum({histogram_rate(STAGE_METRIC, ANSWERED_SELECTOR, window)}))"
    return f"{stage_time(window, own)} / on () group_left () ({whole} > 0)"


def stage_quantile(part: float, window: str) -> str:
    """A quantile of every stage's spans."""
    return drop_nan(
        f"histogram_quantile({part}, sum by ({STAGE_LABEL}) "
        f"({histogram_rate(STAGE_METRIC, ANSWERED_SELECTOR, window)}))"
    )


def _sum_by_place(place: str, inner: str, outer: str, window: str, what: str, chosen: str) -> str:
    """A label `place`: the leg's own label where there is one, else the outermost server's."""
    parts = []
    # PromQL cannot rename a label: label_join() of a single one copies it under the new name.
    for test, label_ in ((f'{inner}!=""', inner), (f'{inner}=""', outer)):
        value = f"{what}({histogram_rate(STAGE_METRIC, f'{chosen},{test}', window)})"
        parts.append(f'label_join({value}, "{place}", "", "{label_}")')
    return f"sum by ({place}) ({' or '.join(parts)})"


def mean_by_role(window: str) -> str:
    """Mean time per request spent in each role, router and legs; these add up to the mean TTFT."""
    return per_request(
        _sum_by_place("role", LEG_LABEL, ROLE_LABEL, window, "histogram_sum", ANSWERED_SELECTOR),
        window,
    )


def mean_by_instance(window: str) -> str:
    """Mean time that each instance took per request that it served."""
    # Each server has `receive` once per request, so its count
    # is the requests that this server served.
    first = f'{ANSWERED_SELECTOR},{STAGE_LABEL}=~"{match_legs(["receive"])}|router[.]receive"'
    place = ("server", INSTANCE_LABEL, "instance", window)
    time = _sum_by_place(*place, "histogram_sum", ANSWERED_SELECTOR)
    return drop_nan(f"{time} / {_sum_by_place(*place, 'histogram_count', first)}")


def request_quantile(part: float, window: str) -> str:
    """A quantile of the durations of whole answers, interpolated between the convention's bounds."""
    chosen = f'{MODEL_LABEL}=~"$model",{PLACE_SELECTOR},{ERROR_LABEL}=""'
    return bounded_quantile(part, REQUEST_METRIC, chosen, window)


def bounded_quantile(part: float, metric: str, chosen: str, window: str) -> str:
    """A quantile of a histogram with given bounds."""
    rate = histogram_rate(metric, chosen, window)
    return drop_nan(f"histogram_quantile({part}, sum by (le) ({rate}))")


def ttft_heatmap(window: str) -> str:
    """The convention's histogram as counts per bucket, for a heatmap.

    Never without a series: Grafana 10 reports an error where a newer one draws nothing. And all of
    one length, as it subtracts them by position: the stand-in is there only if nothing else is.
    """
    found = f'{CONVENTION_METRIC}{{{MODEL_LABEL}=~"$model",{PLACE_SELECTOR}}}'
    nothing = f"0 * absent_over_time({found}[{RANGE}] @ end())"
    empty = f'label_replace({nothing}, "le", "+Inf", "", "")'
    return f"sum by (le) (increase({found}[{window}])) or {empty}"


# Attributes that a span may lack (the model of a refused request; places outside of Kubernetes), by the
# variable that filters them.
_OPTIONAL_ATTRIBUTES: Final = {
    "model": f"span.{keys.MODEL}",
    "namespace": f"resource.{metric_table.K8S_NAMESPACE}",
    "pod": f"resource.{metric_table.K8S_POD}",
}


def select_slow_spans() -> str:
    """Outermost `ttft` spans over the SLO, of what is chosen.

    In TraceQL no regular expression matches an absent attribute, so that "All" (`.*`) is compared by itself;
    after the attribute, because Tempo takes what follows a constant for a condition that has to be met.
    """
    conditions = (
        f'span:name = "{span_names.TTFT}"',
        f"span.{keys.OUTERMOST} = true",
        f'span.{keys.ROLE} =~ "${{role:pipe}}"',
        'resource.service.instance.id =~ "${instance:pipe}"',
        # Whole milliseconds: TraceQL aggregates and compares integers (collector/README.md).
        "span.ttft_ms >= $slo",
        *(
            f'({attribute} =~ "${{{variable}:pipe}}" || "${{{variable}:pipe}}" = ".*")'
            for variable, attribute in _OPTIONAL_ATTRIBUTES.items()
        ),
    )
    return "{ " + " && ".join(conditions) + " }"


def find_slow_requests() -> str:
    """The requests over the SLO, with what a reader asks next."""
    # A TraceQL search returns only attributes that it compares: select() adds these as columns.
    shown = (
        *_OPTIONAL_ATTRIBUTES.values(),
        f"span.{keys.ROLE}",
        f"span.{keys.INPUT_TOKENS}",
        f"span.{keys.ERROR_TYPE}",
        f"span.{keys.REQUEST_ID}",
    )
    return f"{select_slow_spans()} | select({', '.join(shown)})"


def sum_slow_stages() -> str:
    """Where the slow requests' time went, by stage, from their traces."""
    return (
        f"{select_slow_spans()} > {{ span.{keys.STAGE} != nil }}"
        f" | sum_over_time(span:duration) by (span.{keys.STAGE})"
    )
