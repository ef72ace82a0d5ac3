# SPDX-License-Identifier: Apache-2.0
"""Explain the late requests of a stored window: read it and the time before, who held them, try the remedy.

The command, the page's "Why?" and alerts ask; single_answer.py explains one request.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ttft_otel.explain.explain.explanation import Explanation, explain_requests
from ttft_otel.explain.explain.explanation_text import describe_explanation, list_explanation
from ttft_otel.explain.explain.remedy_prediction import REPETITIONS, predict_remedy
from ttft_otel.explain.explain.single_answer import add_holding, explain_one
from ttft_otel.explain.window.late_requests import split_window
from ttft_otel.explain.window.request_facts import CannotTellError, RequestEvidence
from ttft_otel.explain.window.window_reading import read_window, record_window, track_replays
from ttft_otel.report.breakdown_source import (
    BreakdownSource,
    ExplainAnswer,
    ExplainQuestion,
    open_source,
)
from ttft_otel.report.report_types import SourceChoice
from ttft_otel.report.store.database_reader import MAX_REQUESTS, RequestFilter

FEW_REPETITIONS: Final = 4  # replays that tell whether a remedy moves anything
MIN_BEFORE: Final = 50  # requests of the time before, to say what is usual


def answer_question(source: SourceChoice, question: ExplainQuestion) -> ExplainAnswer:
    """What a page or an alert asks, as `ttft-otel explain` answers it. Raises StoreError."""
    with open_source(source) as opened:
        try:
            if question.request_id or question.trace_id:
                explanation = explain_one(
                    opened, question.request_id or None, question.trace_id or None
                )
            else:
                explanation = explain_window(opened, question.wanted, question.slo_us)
        except CannotTellError as error:
            return ExplainAnswer.refuse(str(error))
    return ExplainAnswer(list_explanation(explanation), describe_explanation(explanation))


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
    reading = read_window(opened, wanted, slo_us, group_by)
    lost = reading.lost
    try:
        compared = split_window(reading.evidence, slo_us)
    except CannotTellError as error:
        # Those are the reason, where a window has nothing but requests that timed out.
        raise CannotTellError(f"{error}. {lost.sentence}" if lost.total else str(error)) from error
    before = _load_before(opened, wanted, group_by)
    found = replace(explain_requests(compared, slo_us, lost, before), coverage=reading.coverage)
    repetitions = REPETITIONS if thorough else FEW_REPETITIONS
    return _add_prediction(opened, add_holding(opened, found), wanted, repetitions)


def _load_before(
    opened: BreakdownSource, wanted: RequestFilter, group_by: str
) -> Sequence[RequestEvidence]:
    """The evidence of the time before a window, as long as itself; [] where nothing comparable is stored."""
    if not wanted.since_ns:
        return []
    length = (wanted.until_ns or time.time_ns()) - wanted.since_ns
    earlier = replace(wanted, since_ns=wanted.since_ns - length, until_ns=wanted.since_ns)
    found = read_window(
        opened, earlier, group_by=group_by, label="reading the time before"
    ).evidence
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
            return replace(
                explanation, prediction=predict_remedy(remedy, recording, repetitions, track)
            )
        except CannotTellError as error:
            return replace(explanation, no_prediction=str(error))


def _choose_stretch(explanation: Explanation, wanted: RequestFilter) -> RequestFilter:
    """The part of a window around its late requests that can be replayed: MAX_REQUESTS end with it."""
    coverage = explanation.coverage
    if coverage is None or coverage.requests <= MAX_REQUESTS:
        return wanted
    starts = sorted(each.facts.start_ns for each in explanation.difference.compared.late)
    length = (coverage.last_ns - coverage.first_ns) * MAX_REQUESTS // coverage.requests
    return replace(wanted, until_ns=starts[len(starts) // 2] + length // 2)
