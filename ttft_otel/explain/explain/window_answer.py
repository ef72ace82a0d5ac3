# SPDX-License-Identifier: Apache-2.0
"""Explain the late requests of a stored window, in sentences for the terminal and pages, and in JSON.

The command, the page's "Why?", alerts and the MCP server ask; requests by their ID have their own answer
here. Read are the window, the time before, and who held the late requests; the remedy is tried. The JSON
keeps to docs/explain.schema.json.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from rich.console import Console

from ttft_otel.explain.diff import change_answer
from ttft_otel.explain.diff.window_difference import LEVEL
from ttft_otel.explain.explain import cause_kinds
from ttft_otel.explain.explain.cause_kinds import CACHE_MEMORY, LOOK_AT
from ttft_otel.explain.explain.explanation import (
    MAX_LINES,
    Explanation,
    describe_reasons,
    describe_shares,
    explain_requests,
)
from ttft_otel.explain.explain.late_case import Candidate
from ttft_otel.explain.explain.late_requests import (
    HoldingWork,
    StagePart,
    choose_like,
    read_holding,
    split_window,
)
from ttft_otel.explain.whatif import what_if
from ttft_otel.explain.whatif.replay_facts import Recording
from ttft_otel.explain.whatif.what_if import TTFT, learn_fleet, predict_fleet
from ttft_otel.explain.whatif.window_check import PlannedChange
from ttft_otel.explain.window.request_facts import (
    CannotTellError,
    RequestFacts,
    build_facts,
    count_requests,
    describe_lost,
    refuse_foreign,
)
from ttft_otel.explain.window.window_reading import (
    describe_coverage,
    describe_reading,
    leave_foreign_out,
    read_window,
    record_window,
    track_replays,
)
from ttft_otel.model.names import keys
from ttft_otel.model.stages import UNATTRIBUTED, find_rule_group
from ttft_otel.model.waits import WAIT_STAGES
from ttft_otel.report.breakdown_source import (
    BreakdownSource,
    ComparedWindows,
    ExplainAnswer,
    ExplainQuestion,
    open_source,
    parse_window,
)
from ttft_otel.report.report_types import Request, SourceChoice
from ttft_otel.report.show.terminal import (
    format_short,
    format_signed,
    print_sentences,
    remove_controls,
    round_ms,
    to_local_time,
)
from ttft_otel.report.store.database_reader import MAX_REQUESTS, RequestFilter

QUALITATIVE = "qualitative"  # a price is what a setting trades
PREDICTED = "predicted"  # what-if has its figure, the time per output token
# Settings that a remedy can try -> the resource attribute that has their value, and PlannedChange's field.
TRIED_SETTINGS: Final = {
    "--max-num-seqs": (keys.ENGINE_MAX_SEQS, "max_num_seqs"),
    "--max-num-batched-tokens": (keys.ENGINE_MAX_TOKENS, "max_batched_tokens"),
    CACHE_MEMORY: (keys.ENGINE_KV_TOKENS, "kv_cache"),
}
REPETITIONS: Final = 20  # replays, as many as those of `whatif`
FEW_REPETITIONS: Final = 4  # replays that tell whether a remedy moves anything
MIN_BEFORE: Final = 50  # requests of the time before, to say what is usual
LIKE_LAST: Final = 1000  # requests among which those like a single one are looked for
# Where like requests are looked for, by default.
AROUND: Final = RequestFilter(last=LIKE_LAST)
AFTER_NS: Final = 600 * 10**9  # how long after a single request these may have begun


def list_explanation(explanation: Explanation, verbose: bool = False) -> list[str]:
    """The answer, then how late and what to do, as sentences without terminal controls.

    verbose: also what was looked at and refuted, and all figures.
    """
    read = f" {describe_reading(explanation.coverage)}" if explanation.coverage else ""
    sentences = [
        f"{_describe_answer(explanation)}{read}",
        _describe_lateness(explanation),
        *_list_short(explanation),
    ]
    if verbose:
        sentences += _list_details(explanation)
    else:
        sentences = sentences[:MAX_LINES]
    return [remove_controls(each) for each in sentences]


def _describe_answer(explanation: Explanation) -> str:
    cause = explanation.cause
    if not explanation.is_unusual:
        return "Not unusual: requests like it take as long."
    if not cause.is_cause:
        largest = (
            ""
            if cause.kind in (cause_kinds.NOTHING, cause_kinds.LOST_REQUESTS)
            else _name_largest(explanation)
        )
        return f"{cause.title}: {cause.sentence}.{largest}"
    # One request has no interval.
    is_single = len(explanation.difference.compared.late) == 1
    share = f"{min(max(cause.share, 0.0), 1.0):.0%}" if is_single else _format_share(cause)
    confidence = f"(confidence {cause.confidence})"
    return f"{cause.title}: {cause.sentence}. That is {share} of the lateness {confidence}."


def _name_largest(explanation: Explanation) -> str:
    refuted = [each for each in explanation.candidates if each.share >= 0.1][:2]
    looked = "; ".join(
        f"{each.kind} {each.share:.0%}{f', {each.refuted}' if each.refuted else ''}"
        for each in refuted
    )
    return f" Looked at: {looked}." if looked else ""


def _format_share(part: Candidate | StagePart) -> str:
    """A share of a difference with its interval; both are within 0 and 1 for readers."""
    shown = (min(max(each, 0.0), 1.0) for each in (part.share, part.low, part.high))
    return "{:.0%} ({:.0%} to {:.0%})".format(*shown)


def _describe_lateness(explanation: Explanation) -> str:
    compared = explanation.difference.compared
    late = compared.late
    longer = format_signed(explanation.difference.difference_us)
    if compared.likeness:
        (one,) = late
        return (
            f"{one.request_id}: first token after {format_short(one.ttft_us)}, {longer} "
            f"against {len(compared.window)} requests like it ({compared.likeness}); "
            f"{compared.rank:.0%} of them were faster."
        )
    count, whole = count_requests(late), count_requests(compared.window)
    who = (
        f"{count} of {whole} requests were later than {explanation.slo_us / 1000:g} ms"
        if explanation.slo_us
        else f"the slowest {count} of {whole} requests took "
        f"{format_short(min(each.ttft_us for each in late))} or more"
    )
    lost = f" Not among them: {explanation.lost.sentence}." if explanation.lost.total else ""
    return (
        f"p99 is {format_short(explanation.p99_us)}, p50 {format_short(explanation.p50_us)}; {who}, "
        f"{longer} against typical ones.{lost}"
    )


def _list_short(explanation: Explanation) -> Iterator[str]:
    """Stage, when, who held them, and what to do."""
    yield _describe_stage(explanation)
    if (
        len(explanation.difference.compared.late) > 1
        and explanation.cause.kind != cause_kinds.NOTHING
    ):
        yield explanation.bursts.sentence
    if explanation.holding is not None and explanation.holding.holders:
        yield _describe_holders_in_words(explanation.holding)
    remedy = explanation.remedy
    if remedy is not None:
        tried = f" {_describe_trial(explanation)}" if explanation.prediction else ""
        if explanation.no_prediction:
            tried = f" No prediction: {explanation.no_prediction}."
        yield f"{remedy.sentence}{tried}"
    elif explanation.prediction is not None:
        yield f"No remedy: the obvious one would move nothing. {_describe_trial(explanation)}"
    elif explanation.is_unusual and explanation.cause.kind == cause_kinds.NOT_KNOWN:
        look = LOOK_AT.get(find_rule_group(explanation.top.name))
        if look:
            yield f"Look at {look}."


def _describe_trial(explanation: Explanation) -> str:
    """What the remedy's setting would bring to the p99, and what it costs."""
    found = explanation.prediction
    assert found is not None
    p99 = found.figures[TTFT][-1]
    sentence = (
        f"Predicted with {explanation.setting}: p99 {p99.low / 1000:.0f} to {p99.high / 1000:.0f} ms "
        f"({what_if.LEVEL:.0%}), recorded {p99.recorded / 1000:.0f} ms; the model's error on the "
        f"window itself is {found.errors[-1]:+.0%}."
    )
    if not found.token_time:
        return sentence
    price = found.token_time[-1]
    return (
        f"{sentence} Its price: p99 of the time per output token {price.change:+.0%}, "
        f"{price.low / 1000:.1f} to {price.high / 1000:.1f} ms after {price.recorded / 1000:.1f} ms "
        f"(error {found.token_errors[-1]:+.0%})."
    )


def _describe_stage(explanation: Explanation) -> str:
    top, instance = explanation.top, explanation.difference.instance
    place = f" on {instance}" if instance else ""
    sentence = (
        f"{top.name}{place} has {_format_share(top)} of it: "
        f"{format_short(top.late_us)}, usual are {format_short(top.typical_us)}"
    )
    reasons = describe_reasons(explanation.difference.reasons)
    reported = f"; reason {reasons}" if reasons else ""
    return f"{sentence}{reported} (confidence {explanation.stage_confidence})."


def _list_details(explanation: Explanation) -> Iterator[str]:
    """What was looked at, and all figures."""
    for each in explanation.candidates:
        yield _describe_candidate(each, explanation)
    others = [part for part in explanation.difference.parts[1:4] if part.name != UNATTRIBUTED]
    if others:
        shares = ", ".join(f"{part.name} {_format_share(part)}" for part in others)
        yield f"Other stages: {shares}."
    if explanation.holding is not None:
        kinds = ", ".join(
            f"{kind} {share:.0%}"
            for kind, share in explanation.holding.kinds.items()
            if share >= 0.01
        )
        yield f"While they were in the queue, the engine's time went to: {kinds}."
    if explanation.slo:
        total = sum(explanation.slo.values())
        eaten = ", ".join(
            f"{us / total:.0%} {name}" for name, us in list(explanation.slo.items())[:4]
        )
        yield f"What ate the {explanation.slo_us / 1000:g} ms: {eaten}."
    compared = explanation.difference.compared
    error_us = max(each.clock_error_us for each in (*compared.late, *compared.typical))
    if error_us:
        yield f"Boundaries of the workers' stages are up to {error_us / 1000:.1f} ms off."
    if explanation.remedy is not None:
        yield f"Source: {explanation.remedy.page}"
    if len(compared.late) > 1:
        yield f"See: {', '.join(each.request_id for each in explanation.examples)}."


def _describe_candidate(each: Candidate, explanation: Explanation) -> str:
    if (each.kind, each.sentence) == (explanation.cause.kind, explanation.cause.sentence):
        verdict = "the cause"
    elif each.refuted:
        verdict = f"refuted: {each.refuted}"
    else:
        verdict = "holds, explains less" if each.share > 0 else "explains nothing"
    return f"Looked at {each.kind}: {each.sentence}; {each.share:.0%} of the lateness; {verdict}."


def _describe_holders_in_words(holding: HoldingWork) -> str:
    shown = ", ".join(
        f"{each.request_id} ({each.kind}, {each.tokens} tokens, {format_short(each.us)}, "
        f"{each.delayed} held)"
        for each in holding.holders[:3]
    )
    return f"Held longest by: {shown}."


def print_explanation(explanation: Explanation, verbose: bool = False) -> None:
    print_sentences(Console(highlight=False), list_explanation(explanation, verbose), verbose)


def describe_explanation(explanation: Explanation) -> dict[str, Any]:
    """The JSON of an explanation; times in milliseconds, shares of 1."""
    difference = explanation.difference
    compared = difference.compared
    return {
        "answered": True,
        "sentences": list_explanation(explanation, verbose=True),
        "coverage": describe_coverage(explanation.coverage) if explanation.coverage else None,
        "requests": {
            side: count_requests(getattr(compared, side)) for side in ("window", "late", "typical")
        },
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
                **describe_shares(part),
            }
            for part in difference.parts
        ],
        "reasons": {reason: round(share, 4) for reason, share in difference.reasons},
        "held": _describe_holders(explanation.holding),
        "instances": [
            {"name": name, "share": round(share, 4), "requests": round(requests, 4)}
            for name, share, requests in difference.instances
        ],
        "bursts": {
            "count": explanation.bursts.count,
            "first": _format_moment(explanation.bursts.first_ns),
            "last": _format_moment(explanation.bursts.last_ns),
        },
        "cause": _describe_cause(explanation),
        "looked_at": [
            {
                **{name: getattr(each, name) for name in ("kind", "subject", "sentence")},
                **describe_shares(each),
                "refuted": each.refuted,
            }
            for each in explanation.candidates
        ],
        "first_share": round(difference.first_share, 4),
        "slo": _describe_slo(explanation) if explanation.slo_us else None,
        "examples": [
            {
                "request_id": each.request_id,
                "trace_id": each.trace_id,
                "ttft_ms": round_ms(each.ttft_us),
            }
            for each in explanation.examples
        ],
    }


def _describe_slo(explanation: Explanation) -> dict[str, Any]:
    late_us = sum(explanation.slo.values())
    return {
        "ms": explanation.slo_us / 1000,
        "stages": [
            {"name": name, "ms": round_ms(us), "share": round(us / late_us, 4)}
            for name, us in explanation.slo.items()
        ],
    }


def _format_moment(unix_ns: int) -> str:
    return to_local_time(unix_ns).isoformat(timespec="milliseconds")


def _describe_cause(explanation: Explanation) -> dict[str, Any]:
    """What is concluded; `figures` of the detector stand beside the kind."""
    cause, remedy = explanation.cause, explanation.remedy
    kind = cause.kind if explanation.is_unusual else cause_kinds.NOTHING
    prediction = explanation.prediction
    has_price = prediction is not None and bool(prediction.token_time)
    described: dict[str, Any] = {
        "kind": kind,
        "subject": cause.subject,
        "confidence": cause.confidence,
        "stage": explanation.difference.stage,
        "stage_confidence": explanation.stage_confidence,
        "sentence": cause.sentence,
        "remedy": None,
    }
    if cause.is_cause:
        described |= {**cause.figures, **describe_shares(cause)}
    if remedy is not None:
        described["remedy"] = {
            "text": remedy.text,
            "settings": list(remedy.settings),
            "price": remedy.price,
            "price_kind": PREDICTED if has_price else QUALITATIVE,
            "source": remedy.page,
        }
    return described | {"prediction": _describe_prediction(explanation)}


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
    found, p99 = explanation.prediction, explanation.prediction.figures[TTFT][-1]
    price = found.token_time[-1] if found.token_time else None
    return {
        "setting": explanation.setting,
        "recorded_p99_ms": round_ms(p99.recorded),
        "low_p99_ms": round_ms(p99.low),
        "high_p99_ms": round_ms(p99.high),
        "replay_error": round(found.errors[-1], 4),
        "time_per_output_token": {
            "recorded_p99_ms": round_ms(price.recorded),
            "low_p99_ms": round_ms(price.low),
            "high_p99_ms": round_ms(price.high),
            "change": round(price.change, 4),
            "replay_error": round(found.token_errors[-1], 4),
        }
        if price
        else None,
    }


def answer_question(
    source: SourceChoice, question: ExplainQuestion | ComparedWindows
) -> ExplainAnswer:
    """What a page or an alert asks, as `ttft-otel explain` and `diff` answer it. Raises StoreError."""
    with open_source(source) as opened:
        try:
            if isinstance(question, ComparedWindows):
                return _compare_windows(opened, question)
            if question.request_id or question.trace_id:
                explanation = explain_one(
                    opened, question.request_id or None, question.trace_id or None
                )
            else:
                explanation = explain_window(opened, question.wanted, question.slo_us)
        except CannotTellError as error:
            return ExplainAnswer.refuse(str(error))
    return ExplainAnswer(list_explanation(explanation), describe_explanation(explanation))


def _compare_windows(opened: BreakdownSource, asked: ComparedWindows) -> ExplainAnswer:
    """The answer of `ttft-otel diff`. Raises CannotTellError, StoreError."""
    sides = []
    for text in (asked.a, asked.b):
        try:
            since_ns, until_ns = parse_window(text, datetime.now().astimezone())
        except ValueError as error:
            raise CannotTellError(str(error)) from error
        wanted = RequestFilter(model=asked.model, since_ns=since_ns, until_ns=until_ns, last=0)
        sides.append(read_window(opened, wanted, label=f"reading {text}"))
    answer = change_answer.compare_sides(*sides)
    return ExplainAnswer(
        change_answer.list_sentences(answer), change_answer.describe_answer(answer)
    )


def explain_window(
    opened: BreakdownSource,
    wanted: RequestFilter,
    slo_us: int = 0,
    group_by: str = "",
    thorough: bool = False,
) -> Explanation:
    """Explain the late ones of a window. Raises CannotTellError, StoreError.

    thorough: the remedy is replayed as often as by `whatif`; else so often that it shows whether it helps.
    """
    reading = leave_foreign_out(read_window(opened, wanted, slo_us, group_by))
    lost, foreign = reading.lost, reading.coverage.foreign
    try:
        compared = split_window(reading.requests, slo_us)
    except CannotTellError as error:
        # These are the reason, where a window has nothing but requests that timed out, or others told.
        reasons = [str(error), *([lost.sentence] if lost.total else [])]
        reasons += [
            f"{count} more are told by {name}, whose spans say how long, and not why: `ttft-otel diff` "
            "compares these"
            for name, count in foreign.items()
        ]
        raise CannotTellError(". ".join(reasons)) from error
    before = _load_before(opened, wanted, group_by)
    found = replace(explain_requests(compared, slo_us, lost, before), coverage=reading.coverage)
    repetitions = REPETITIONS if thorough else FEW_REPETITIONS
    return _add_prediction(opened, add_holding(opened, found), wanted, repetitions)


def _load_before(
    opened: BreakdownSource, wanted: RequestFilter, group_by: str
) -> Sequence[RequestFacts]:
    """The requests of the time before a window, as long as itself; [] where nothing comparable is stored."""
    if not wanted.since_ns:
        return []
    length = (wanted.until_ns or time.time_ns()) - wanted.since_ns
    earlier = replace(wanted, since_ns=wanted.since_ns - length, until_ns=wanted.since_ns)
    reading = read_window(opened, earlier, group_by=group_by, label="reading the time before")
    found = leave_foreign_out(reading).requests
    return found if len(found) >= MIN_BEFORE else []


def _add_prediction(
    opened: BreakdownSource, explanation: Explanation, wanted: RequestFilter, repetitions: int
) -> Explanation:
    """The explanation with what its remedy would bring, or why that is not known. Raises StoreError."""
    remedy = explanation.remedy
    if remedy is None or remedy.trial is None:
        return explanation
    with track_replays(repetitions) as track:
        try:
            recording, _ = record_window(opened, _choose_stretch(explanation, wanted))
            setting, change = _plan_trial(recording, *remedy.trial)
            fleet = learn_fleet(recording, PlannedChange())
            answer = predict_fleet(fleet, change, repetitions, track)
            return replace(explanation, prediction=answer, setting=setting)
        except CannotTellError as error:
            return replace(explanation, no_prediction=str(error))


def _plan_trial(recording: Recording, flag: str, factor: float) -> tuple[str, PlannedChange]:
    """A setting so many times as large, in words and as a change. Raises CannotTellError."""
    key, field = TRIED_SETTINGS[flag]
    recorded = max((known.get(key, 0) for known in recording.settings.values()), default=0)
    if not recorded:
        raise CannotTellError(
            f"the servers' spans do not tell {flag}; ttft-otel whatif takes it by hand"
        )
    is_memory = flag == CACHE_MEMORY
    value: Any = factor if is_memory else round(recorded * factor)
    setting = f"{factor:g} times the {flag}" if is_memory else f"{flag} {value}"
    return setting, PlannedChange(**{field: value})


def _choose_stretch(explanation: Explanation, wanted: RequestFilter) -> RequestFilter:
    """The part of a window around its late requests that can be replayed: MAX_REQUESTS end with it."""
    coverage = explanation.coverage
    if coverage is None or coverage.requests <= MAX_REQUESTS:
        return wanted
    starts = sorted(each.start_ns for each in explanation.difference.compared.late)
    length = (coverage.last_ns - coverage.first_ns) * MAX_REQUESTS // coverage.requests
    return replace(wanted, until_ns=starts[len(starts) // 2] + length // 2)


def add_holding(opened: BreakdownSource, explanation: Explanation) -> Explanation:
    """The explanation with who held the late requests, where their largest stage waits. Raises StoreError."""
    if explanation.difference.word not in WAIT_STAGES:
        return explanation
    return replace(explanation, holding=read_holding(opened, explanation.difference.compared.late))


def explain_one(
    opened: BreakdownSource,
    request_id: str | None,
    trace_id: str | None,
    like: RequestFilter = AROUND,
    group_by: str = "",
) -> Explanation:
    """Explain one request, by either ID, against its like. Raises CannotTellError, StoreError.

    like: where its like are looked for; without a window around the request's own time.
    group_by: an attribute that separates requests.
    """
    request = find_request(opened, request_id, trace_id)
    if request.error or request.pending:
        what = f"failed ({request.error})" if request.error else "is not complete yet"
        raise CannotTellError(
            f"{request.request_id} {what}: it has no first token to explain; its stages: "
            f"ttft-otel report --trace {request.trace_id}"
        )
    until_ns = like.until_ns or request.start_ns + AFTER_NS
    wanted = replace(like, model=request.model, until_ns=until_ns)
    trace = opened.find_trace(request.trace_id)
    own = build_facts(request, trace.spans if trace else (), group_by)
    refuse_foreign(own.foreign)
    others = leave_foreign_out(read_window(opened, wanted, group_by=group_by)).requests
    return add_holding(opened, explain_requests(choose_like(own, others)))


def find_request(opened: BreakdownSource, request_id: str | None, trace_id: str | None) -> Request:
    """The request by either ID. Raises CannotTellError where there is none."""
    if request_id is not None:
        request = opened.find_request(request_id)
    else:
        trace = opened.find_trace((trace_id or "").lower())
        # A client's trace may have several: the slowest one is asked about.
        request = max(trace.requests if trace else (), key=lambda each: each.ttft_us, default=None)
    if request is None:
        name = trace_id if request_id is None else request_id
        raise CannotTellError(
            f"nothing is stored for {name!r}: it was not traced, has not arrived yet, or was removed; "
            "`ttft-otel report --last 20 --json` lists what is"
        )
    return request
