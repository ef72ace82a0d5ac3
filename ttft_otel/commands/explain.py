# SPDX-License-Identifier: Apache-2.0
"""The command `ttft-otel explain`: why a request, or the late requests of a window, took so long.

Reads the embedded store, or Tempo; prints sentences, or JSON (docs/explain.schema.json).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import click

from ttft_otel.commands import source_options
from ttft_otel.explain.explain import explanation_text
from ttft_otel.explain.explain.explanation import Explanation, explain_requests
from ttft_otel.explain.explain.remedy_prediction import REPETITIONS, predict_remedy
from ttft_otel.explain.explain.single_answer import LIKE_LAST, add_holding, explain_one
from ttft_otel.explain.window.late_requests import split_window
from ttft_otel.explain.window.request_facts import CannotTellError, RequestEvidence
from ttft_otel.explain.window.window_reading import read_window, record_window, track_replays
from ttft_otel.report import breakdown_source
from ttft_otel.report.breakdown_source import BreakdownSource
from ttft_otel.report.report_types import SourceChoice
from ttft_otel.report.store.database_reader import MAX_REQUESTS, RequestFilter
from ttft_otel.report.time_window import WINDOW_HELP, filter_window

FEW_REPETITIONS: Final = 4  # replays that tell whether a remedy moves anything
MIN_BEFORE: Final = 50  # requests of the time before, to say what is usual


@click.command(
    epilog="""\b
Examples:
  ttft-otel explain                            the slowest of the last 2000 requests
  ttft-otel explain --since 1h --slo 500       those later than 500 ms, in the last hour
  ttft-otel explain --since 1h --verbose       also what was looked at and refuted
  ttft-otel explain --request ID               one request, against others like it
  ttft-otel explain --trace ID --tempo http://127.0.0.1:3200
  ttft-otel explain --since 2h..1h --json | jq .cause
"""
)
@click.option("--request", "request_id", metavar="ID", help="One request, by its request id.")
@click.option(
    "--trace", "trace_id", metavar="ID", help="One request, by its trace's 32 hex digits."
)
@click.option(
    "--last",
    type=click.IntRange(1, MAX_REQUESTS),
    help="The newest N requests.  [default: all of --since, else 2000]",
)
@click.option("--since", metavar="WINDOW", default="", help=f"Requests of a window: {WINDOW_HELP}")
@click.option(
    "--slo",
    metavar="MS",
    type=click.FloatRange(0.001, 1e9),
    callback=source_options.require_number,
    help="Late is what took longer than this.  [default: the slowest hundredth]",
)
@click.option("--model", default="", help="Only requests for this model.")
@click.option(
    "--predict",
    is_flag=True,
    help="Of a window: replay it 20 times with the remedy's setting, as whatif does, instead of 4 times.",
)
@click.option(
    "--group-by",
    metavar="ATTRIBUTE",
    default="",
    help="A span's or resource's attribute that separates requests, for example that of the tenant.",
)
@click.option(
    "--verbose", is_flag=True, help="Also what was looked at and refuted, and all figures."
)
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text.")
@source_options.add_source_options
def explain(
    request_id: str | None,
    trace_id: str | None,
    last: int | None,
    since: str,
    slo: float | None,
    model: str,
    predict: bool,
    group_by: str,
    verbose: bool,
    as_json: bool,
    source: SourceChoice,
) -> None:
    """Say why a request, or the late ones of a window, waited for their first token, and what to change."""
    is_single = request_id is not None or trace_id is not None
    if request_id is not None and trace_id is not None:
        raise click.UsageError("--request and --trace exclude each other")
    if is_single and slo:
        raise click.UsageError("--slo is for a window: a single request is compared with its like")
    if is_single and predict:
        raise click.UsageError("--predict is for a window, which what-if replays")
    slo_us = round((slo or 0) * 1000)
    refusals = source_options.report_refusals(CannotTellError, as_json=as_json)
    with refusals, breakdown_source.open_source(source) as opened:
        if is_single:
            like = filter_window(since, "", last or LIKE_LAST)
            explanation = explain_one(opened, request_id, trace_id, like, group_by)
        else:
            # Without a window the newest ones, which a store of months has in its newest part.
            wanted = filter_window(since, model, last or (0 if since else MAX_REQUESTS))
            explanation = _explain_window(opened, wanted, slo_us, group_by)
            explanation = add_holding(opened, explanation)
            explanation = _add_prediction(opened, explanation, wanted, thorough=predict)
    if as_json:
        click.echo(json.dumps(explanation_text.describe_explanation(explanation), indent=2))
    else:
        explanation_text.print_explanation(explanation, verbose)


def _explain_window(
    opened: BreakdownSource, wanted: RequestFilter, slo_us: int, group_by: str
) -> Explanation:
    """Explain the late ones of a window. Raises CannotTellError, StoreError."""
    reading = read_window(opened, wanted, slo_us, group_by)
    lost = reading.lost
    try:
        compared = split_window(reading.evidence, slo_us)
    except CannotTellError as error:
        # Those are the reason, where a window has nothing but requests that timed out.
        raise CannotTellError(f"{error}. {lost.sentence}" if lost.total else str(error)) from error
    before = _load_before(opened, wanted, group_by)
    return replace(explain_requests(compared, slo_us, lost, before), coverage=reading.coverage)


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
    opened: BreakdownSource, explanation: Explanation, wanted: RequestFilter, thorough: bool
) -> Explanation:
    """The explanation with what its remedy would bring, or why that is not known. Raises StoreError.

    thorough: as many replays as `whatif` makes, instead of a few that tell whether the remedy helps.
    """
    remedy = explanation.remedy
    if remedy is None or remedy.trial is None:
        return explanation
    repetitions = REPETITIONS if thorough else FEW_REPETITIONS
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
