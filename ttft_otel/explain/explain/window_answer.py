# SPDX-License-Identifier: Apache-2.0
"""Explain the late requests of a stored window: read it and the time before, who held them, try the remedy.

The command, the page's "Why?" and alerts ask; requests by their ID have their own answer here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from ttft_otel.explain.diff import difference_text
from ttft_otel.explain.diff.change_cause import compare_sides
from ttft_otel.explain.explain.explanation import Explanation, explain_requests
from ttft_otel.explain.explain.explanation_text import describe_explanation, list_explanation
from ttft_otel.explain.explain.late_requests import choose_like, split_window
from ttft_otel.explain.explain.remedies import CACHE_MEMORY
from ttft_otel.explain.whatif.planned_change import PlannedChange
from ttft_otel.explain.whatif.replay_facts import Recording
from ttft_otel.explain.whatif.what_if import learn_fleet, predict_fleet
from ttft_otel.explain.window.holding_work import read_holding
from ttft_otel.explain.window.request_facts import (
    CannotTellError,
    RequestFacts,
    build_facts,
    refuse_foreign,
)
from ttft_otel.explain.window.window_reading import (
    leave_foreign_out,
    read_window,
    record_window,
    track_replays,
)
from ttft_otel.model.names import keys
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
from ttft_otel.report.store.database_reader import MAX_REQUESTS, RequestFilter

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
    answer = compare_sides(*sides)
    return ExplainAnswer(
        difference_text.list_sentences(answer), difference_text.describe_answer(answer)
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
