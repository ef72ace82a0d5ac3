# SPDX-License-Identifier: Apache-2.0
"""PromQL and TraceQL of the dashboards, built from the names in names.py and stages.py.

All metrics come from outermost spans only (the collector sees to that), so a request that crosses
router, encoder and decoder counts once. `$__rate_interval` is for lines, `$__range` for numbers.
"""

from __future__ import annotations

from typing import Final

from ttft_otel import names, palette, stages


def label(name: str) -> str:
    """An attribute's or metric's name as Prometheus writes it."""
    return name.replace(".", "_")


DURATION: Final = f"{label(names.METRIC_TTFT)}_seconds"
STAGE: Final = f"{label(names.METRIC_STAGE)}_seconds"
CONVENTION: Final = f"{label(names.METRIC_CONVENTION)}_seconds_bucket"

MODEL: Final = label(names.MODEL)
ROLE: Final = label(names.ROLE)
LEG: Final = label(names.LEG)
OF_STAGE: Final = label(names.STAGE)
INSTANCE: Final = label(names.INSTANCE)
FAILURE: Final = label(names.ERROR_TYPE)

RANGE: Final = "$__range"
RATE: Final = "$__rate_interval"

# Encoders answer no client; their own histogram would mix image encoding into TTFT.
NOT_ENCODE: Final = f'{ROLE}!="encode"'
CHOSEN: Final = f'{NOT_ENCODE},{MODEL}=~"$model",{ROLE}=~"$role",instance=~"$instance"'
# A request that failed has no first token; its span says how long it lived.
ANSWERED: Final = f'{CHOSEN},{FAILURE}=""'
FAILED: Final = f'{CHOSEN},{FAILURE}!=""'

# In the order in which the breakdown stacks them; "" is what no mark accounts for.
KINDS: Final = ("wait", "work", "move", "host", "")


def escaped(words: list[str]) -> str:
    """An alternation of words as a regular expression inside a PromQL string."""
    return "|".join(word.replace(".", "[.]") for word in words)


def legs(words: list[str]) -> str:
    """The words as any leg's stages and as a server's own."""
    servers = "|".join(role for role in stages.ROLES if role != "router")
    return f"(({servers})[.])?({escaped(words)})"


def kind(name: str) -> str:
    """A regular expression for the full names of all stages of one kind."""
    if not name:
        return legs([stages.UNATTRIBUTED])
    own = [stage.name for stage in stages.STAGES if stage.kind == name]
    router = [word for word, its in palette.ROUTER_KINDS.items() if its == name]
    alone = [word for word in router if word != "router.hop"]
    parts = [legs(own), *([escaped(alone)] if alone else [])]
    return "|".join(parts + (["router[.]hop[.].+"] if "router.hop" in router else []))


def rate(metric: str, chosen: str, window: str) -> str:
    """The histogram's rate over a window."""
    return f"rate({metric}{{{chosen}}}[{window}])"


def real(query: str) -> str:
    """Without the NaN of times when nothing was asked: it would spoil the means in legends."""
    return f"{query} >= 0"


def each(query: str, window: str) -> str:
    """Seconds per second of time as seconds per answered request."""
    return f"{query} / on () group_left () ({requests(window, ANSWERED)} > 0)"


def quantile(part: float, window: str, by: str = "") -> str:
    """A quantile of TTFT among answered requests, of all together or by a label."""
    over = f" by ({by})" if by else ""
    return real(f"histogram_quantile({part}, sum{over} ({rate(DURATION, ANSWERED, window)}))")


def over_slo(window: str, by: str = "") -> str:
    """The share of requests that were still without a first token at the SLO."""
    over = f" by ({by})" if by else ""
    late = f"histogram_fraction($slo / 1000, +Inf, sum{over} ({rate(DURATION, CHOSEN, window)}))"
    return real(late)


def requests(window: str, chosen: str = CHOSEN, by: str = "") -> str:
    """Requests per second."""
    over = f" by ({by})" if by else ""
    return f"sum{over} (histogram_count({rate(DURATION, chosen, window)}))"


def failed(window: str, by: str = "") -> str:
    """The share of requests that failed or were aborted before their first token; 0 if none did."""
    total = requests(window, by=by)
    return real(f"(({requests(window, FAILED, by)}) or 0 * {total}) / {total}")


def stage_time(window: str, chosen: str = "", by: str = OF_STAGE) -> str:
    """Seconds that answered requests spent in stages, per second."""
    found = f"{ANSWERED},{chosen}" if chosen else ANSWERED
    return f"sum by ({by}) (histogram_sum({rate(STAGE, found, window)}))"


def stage_mean(window: str, name: str | None = None) -> str:
    """Mean time of each stage per request: these add up to the mean TTFT. `name` is a kind."""
    chosen = "" if name is None else f'{OF_STAGE}=~"{kind(name)}"'
    return each(stage_time(window, chosen), window)


def stage_share(window: str, name: str) -> str:
    """Each stage's share of the mean TTFT; the shares add up to one."""
    own = f'{OF_STAGE}=~"{kind(name)}"'
    whole = f"sum (histogram_sum({rate(STAGE, ANSWERED, window)}))"
    return f"{stage_time(window, own)} / on () group_left () ({whole} > 0)"


def stage_quantile(part: float, window: str) -> str:
    """A quantile of every stage's spans."""
    return real(
        f"histogram_quantile({part}, sum by ({OF_STAGE}) ({rate(STAGE, ANSWERED, window)}))"
    )


def _placed(place: str, inner: str, outer: str, window: str, what: str, chosen: str) -> str:
    """A label `place`: the leg's own label where there is one, else the outermost server's."""
    parts = []
    for test, label_ in ((f'{inner}!=""', inner), (f'{inner}=""', outer)):
        value = f"{what}({rate(STAGE, f'{chosen},{test}', window)})"
        parts.append(f'label_join({value}, "{place}", "", "{label_}")')
    return f"sum by ({place}) ({' or '.join(parts)})"


def by_role(window: str) -> str:
    """Mean time per request spent in each role, router and legs; these add up to the mean TTFT."""
    return each(_placed("role", LEG, ROLE, window, "histogram_sum", ANSWERED), window)


def by_instance(window: str) -> str:
    """Mean time that each instance took per request that it served."""
    first = f'{ANSWERED},{OF_STAGE}=~"{legs(["receive"])}|router[.]receive"'
    place = ("server", INSTANCE, "instance", window)
    time = _placed(*place, "histogram_sum", ANSWERED)
    return real(f"{time} / {_placed(*place, 'histogram_count', first)}")


def heat(window: str) -> str:
    """The convention's histogram as counts per bucket, for a heatmap.

    Never without a series: Grafana 10 reports an error where a newer one draws nothing. And all of
    one length, as it subtracts them by position: the stand-in is there only if nothing else is.
    """
    found = f'{CONVENTION}{{{MODEL}=~"$model",instance=~"$instance"}}'
    nothing = f"0 * absent_over_time({found}[{RANGE}] @ end())"
    empty = f'label_replace({nothing}, "le", "+Inf", "", "")'
    return f"sum by (le) (increase({found}[{window}])) or {empty}"


def traceql(*conditions: str) -> str:
    """Outermost `ttft` spans of what is chosen, with further conditions."""
    own = (
        f'span:name = "{names.TTFT}"',
        f"span.{names.OUTERMOST} = true",
        f'span.{names.MODEL} =~ "${{model:pipe}}"',
        f'span.{names.ROLE} =~ "${{role:pipe}}"',
        'resource.service.instance.id =~ "${instance:pipe}"',
    )
    return "{ " + " && ".join((*own, *conditions)) + " }"


def slow() -> str:
    """The requests over the SLO, with what a reader asks next."""
    shown = (
        f"span.{names.MODEL}",
        f"span.{names.ROLE}",
        f"span.{names.INPUT_TOKENS}",
        f"span.{names.ERROR_TYPE}",
        f"span.{names.REQUEST_ID}",
    )
    return traceql("span.ttft_ms >= $slo") + f" | select({', '.join(shown)})"


def slow_stages() -> str:
    """Where the slow requests' time went, by stage, from their traces."""
    return (
        traceql("span.ttft_ms >= $slo")
        + f" > {{ span.{names.STAGE} != nil }} | sum_over_time(span:duration) by (span.{names.STAGE})"
    )
