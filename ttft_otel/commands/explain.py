# SPDX-License-Identifier: Apache-2.0
"""The command `ttft-otel explain`: why a request, or the late requests of a window, took so long.

Reads the embedded store, or Tempo; prints sentences, or JSON (docs/explain.schema.json).
"""

from __future__ import annotations

import json

import click

from ttft_otel.commands import source_options
from ttft_otel.commands.command_options import add_watch_option
from ttft_otel.explain.explain import explanation_text
from ttft_otel.explain.explain.window_answer import LIKE_LAST, explain_one, explain_window
from ttft_otel.explain.window.request_facts import CannotTellError
from ttft_otel.report import breakdown_source
from ttft_otel.report.breakdown_source import WINDOW_HELP, filter_window
from ttft_otel.report.report_types import SourceChoice
from ttft_otel.report.store.database_reader import MAX_REQUESTS


@click.command(
    epilog="""\b
Examples:
  ttft-otel explain                            the slowest of the last 2000 requests
  ttft-otel explain --since 1h --slo 500       those later than 500 ms, in the last hour
  ttft-otel explain --since 1h --verbose       also what was looked at and refuted
  ttft-otel explain --since 15m --watch 30     again every 30 seconds
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
@add_watch_option
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
            explanation = explain_window(opened, wanted, slo_us, group_by, thorough=predict)
    if as_json:
        click.echo(json.dumps(explanation_text.describe_explanation(explanation), indent=2))
    else:
        explanation_text.print_explanation(explanation, verbose)
