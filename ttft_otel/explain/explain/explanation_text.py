# SPDX-License-Identifier: Apache-2.0
"""An Explanation as sentences for the terminal and for pages, and as JSON (docs/explain.schema.json)."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from ttft_otel.explain.diff.difference_text import format_signed
from ttft_otel.explain.diff.stage_difference import LEVEL
from ttft_otel.explain.explain.cause_rules import describe_source
from ttft_otel.explain.explain.explanation import Explanation, describe_reasons
from ttft_otel.explain.window.holding_work import HoldingWork
from ttft_otel.explain.window.lost_requests import describe_lost
from ttft_otel.report.show.terminal import format_short, remove_controls, round_ms

QUALITATIVE = "qualitative"  # a price is what a setting trades
PREDICTED = "predicted"  # what-if has its figure, the time per output token


def list_explanation(explanation: Explanation) -> list[str]:
    """What happened and what to do, as sentences without terminal controls, most important first."""
    sentences = [_describe_headline(explanation), _describe_cause(explanation)]
    if explanation.holding is not None:
        sentences += _describe_holding(explanation.holding)
    if explanation.slo:
        total = sum(explanation.slo.values())
        eaten = ", ".join(
            f"{us / total:.0%} {name}" for name, us in list(explanation.slo.items())[:4]
        )
        sentences.append(f"What ate the {explanation.slo_us / 1000:g} ms: {eaten}.")
    rule = explanation.rule
    if explanation.is_named and rule is not None:
        sentences.append(rule.sentence)
        sentences.append(f"Try: {rule.remedy} Price (qualitative): {rule.price}")
        if explanation.prediction is not None:
            sentences.append(explanation.prediction.sentence)
        elif explanation.no_prediction:
            sentences.append(f"No prediction: {explanation.no_prediction}.")
        sentences.append(f"Source: {describe_source(rule)}")
    elif explanation.model.is_other:
        # Its steps may always take longer: that is no reason, and no setting makes it the other one.
        sentences.append(
            "No cause is named: these are two models, not late and typical requests of one. Take each by "
            f"itself: --model {explanation.model.name or 'NAME'}."
        )
    elif explanation.is_unusual:
        largest = ", ".join(
            f"{part.name} {part.share:.0%}" for part in explanation.difference.parts[:4]
        )
        sentences.append(
            f"No single cause: the largest parts are {largest}. Take other requests together "
            "(--slo, --model, a shorter --since), or one by itself (--request)."
        )
    sentences += [each.sentence for each in explanation.alternatives]
    sentences.append(
        f"Confidence {explanation.confidence}: in {explanation.difference.first_share:.0%} of "
        "resampled requests it is the same stage."
    )
    if explanation.lost.total:
        sentences.append(f"Not among them: {explanation.lost.sentence}.")
    ids = ", ".join(each.facts.request_id for each in explanation.examples)
    if len(explanation.difference.compared.late) > 1:
        sentences.append(f"See: {ids}.")
    return [remove_controls(each) for each in sentences]


def _describe_headline(explanation: Explanation) -> str:
    compared = explanation.difference.compared
    late = compared.late
    longer = format_signed(explanation.difference.difference_us)
    if compared.likeness:
        (one,) = late
        sentence = (
            f"{one.facts.request_id}: first token after {format_short(one.facts.ttft_us)}, {longer} "
            f"against {len(compared.window)} requests like it ({compared.likeness}); "
            f"{compared.rank:.0%} of them were faster."
        )
        return sentence if explanation.is_unusual else f"{sentence} That is not unusual."
    who = (
        f"{len(late)} of {len(compared.window)} requests were later than {explanation.slo_us / 1000:g} ms"
        if explanation.slo_us
        else f"the slowest {len(late)} of {len(compared.window)} requests took "
        f"{format_short(min(each.facts.ttft_us for each in late))} or more"
    )
    return (
        f"p99 is {format_short(explanation.p99_us)}, p50 {format_short(explanation.p50_us)}; {who}, "
        f"{longer} against typical ones."
    )


def _describe_cause(explanation: Explanation) -> str:
    top, finding = explanation.top, explanation.difference.finding
    place = f" on {finding.instance}" if finding.instance else ""
    sentence = (
        f"{top.share:.0%} of that ({top.low:.0%} to {top.high:.0%}) is {top.name}{place}: "
        f"{format_short(top.late_us)}, usual are {format_short(top.typical_us)}"
    )
    reasons = describe_reasons(explanation.difference.reasons)
    return f"{sentence}; reason {reasons}." if reasons else f"{sentence}."


def _describe_holding(holding: HoldingWork) -> list[str]:
    kinds = ", ".join(
        f"{kind} {share:.0%}" for kind, share in holding.kinds.items() if share >= 0.01
    )
    sentences = [f"Meanwhile the engine's time went to: {kinds}."]
    if holding.holders:
        shown = ", ".join(
            f"{each.request_id} ({each.kind}, {each.tokens} tokens, {format_short(each.us)}, "
            f"{each.delayed} held)"
            for each in holding.holders[:3]
        )
        sentences.append(f"Held longest by: {shown}.")
    return sentences


def print_explanation(explanation: Explanation) -> None:
    """Print the sentences; the first one is the answer in short."""
    console = Console(highlight=False)
    first, *rest = list_explanation(explanation)
    # Not wrapped by rich: in a pipe, a sentence stays on one line for grep.
    console.print(Text(first, style="bold"), soft_wrap=True)
    for sentence in rest:
        console.print(Text(f"• {sentence}"), soft_wrap=True)


def describe_explanation(explanation: Explanation) -> dict[str, Any]:
    """The JSON of an explanation; times in milliseconds, shares of 1."""
    difference = explanation.difference
    compared = difference.compared
    late_us = sum(explanation.slo.values())
    return {
        "answered": True,
        "sentences": list_explanation(explanation),
        "requests": {side: len(getattr(compared, side)) for side in ("window", "late", "typical")},
        "without_token": describe_lost(explanation.lost),
        "unusual": explanation.is_unusual,
        "rank": round(compared.rank, 4),
        "p50_ms": round_ms(explanation.p50_us),
        "p99_ms": round_ms(explanation.p99_us),
        "difference_ms": round_ms(difference.difference_us),
        "level": LEVEL,
        "stages": [
            {
                "name": part.name,
                "late_ms": round_ms(part.late_us),
                "typical_ms": round_ms(part.typical_us),
                **{name: round(getattr(part, name), 4) for name in ("share", "low", "high")},
            }
            for part in difference.parts
        ],
        "reasons": {reason: round(share, 4) for reason, share in difference.reasons},
        "held": _describe_holders(explanation.holding),
        "instances": [
            {"name": name, "share": round(share, 4), "requests": round(requests, 4)}
            for name, share, requests in difference.instances
        ],
        "figures": {name: round(value, 4) for name, value in difference.finding.figures.items()},
        "cause": _describe_named_cause(explanation),
        "confidence": explanation.confidence,
        "first_share": round(difference.first_share, 4),
        "alternatives": [
            {"name": each.name, "excluded": each.excluded, "sentence": each.sentence}
            for each in explanation.alternatives
        ],
        "slo": {
            "ms": explanation.slo_us / 1000,
            "stages": [
                {"name": name, "ms": round_ms(us), "share": round(us / late_us, 4)}
                for name, us in explanation.slo.items()
            ],
        }
        if explanation.slo_us
        else None,
        "examples": [
            {
                "request_id": each.facts.request_id,
                "trace_id": each.trace_id,
                "ttft_ms": round_ms(each.facts.ttft_us),
            }
            for each in explanation.examples
        ],
    }


def _describe_named_cause(explanation: Explanation) -> dict[str, Any] | None:
    rule, finding = explanation.rule, explanation.difference.finding
    if rule is None or not explanation.is_named:
        return None
    prediction = explanation.prediction
    has_price = prediction is not None and prediction.token_time is not None
    return {
        "rule": rule.name,
        "stage": finding.stage,
        "instance": finding.instance or None,
        "sentence": rule.sentence,
        "remedy": rule.remedy,
        "settings": list(rule.settings),
        "price": rule.price,
        "price_kind": PREDICTED if has_price else QUALITATIVE,
        "source": describe_source(rule),
        "prediction": _describe_prediction(explanation),
    }


def _describe_holders(holding: HoldingWork | None) -> dict[str, Any] | None:
    """Who held the late requests; None where that is not known."""
    if holding is None:
        return None
    return {
        "requests": holding.requests,
        "kinds": {kind: round(share, 4) for kind, share in holding.kinds.items()},
        "holders": [
            {
                "request_id": each.request_id,
                "trace_id": each.trace_id,
                "kind": each.kind,
                "ms": round_ms(each.us),
                "tokens": each.tokens,
                "delayed": each.delayed,
            }
            for each in holding.holders
        ],
    }


def _describe_prediction(explanation: Explanation) -> dict[str, Any] | None:
    """What the remedy would bring; None where nobody asked, a refusal where what-if cannot tell."""
    if explanation.no_prediction:
        return {"refusal": explanation.no_prediction}
    if explanation.prediction is None:
        return None
    found = explanation.prediction
    return {
        "setting": found.setting,
        "recorded_p99_ms": round_ms(found.recorded_us),
        "low_p99_ms": round_ms(found.low_us),
        "high_p99_ms": round_ms(found.high_us),
        "replay_error": round(found.error, 4),
        "time_per_output_token": {
            "recorded_p99_ms": round_ms(found.token_time.recorded),
            "low_p99_ms": round_ms(found.token_time.low),
            "high_p99_ms": round_ms(found.token_time.high),
            "change": round(found.token_time.change, 4),
            "replay_error": round(found.token_error, 4),
        }
        if found.token_time
        else None,
    }
