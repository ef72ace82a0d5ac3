# SPDX-License-Identifier: Apache-2.0
"""The command `ttft-otel diff`: what changed in the TTFT between two windows, releases or instances.

Reads the embedded store, or Tempo; prints sentences and a table, or JSON (docs/diff.schema.json).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import click

from ttft_otel.commands import source_options
from ttft_otel.explain.diff import difference_text
from ttft_otel.explain.diff.stage_difference import Difference, compare_windows
from ttft_otel.explain.window.lost_requests import LostRequests, collect_lost, count_lost
from ttft_otel.explain.window.request_facts import (
    CannotTellError,
    RequestFacts,
    build_facts,
    read_facts,
)
from ttft_otel.explain.window.window_reading import (
    WINDOW_HELP,
    filter_window,
    list_with_progress,
)
from ttft_otel.report import breakdown_source
from ttft_otel.report.breakdown_source import BreakdownSource
from ttft_otel.report.report_types import Request, SourceChoice
from ttft_otel.report.store.database_reader import MAX_REQUESTS


@click.command(
    epilog="""\b
Examples:
  ttft-otel diff --a 2h..1h --b 1h..                  the last hour with the one before
  ttft-otel diff --a 14:00..14:05 --b 14:05..14:10 --json
  ttft-otel diff --by service.version --a 1.4 --b 1.5 --since 1d..
  ttft-otel diff --by service.instance.id --a chat-1 --b chat-2
  ttft-otel diff --a 2h..1h --b 1h.. --tempo http://127.0.0.1:3200
"""
)
@click.option("--a", required=True, help=f"Window A: {WINDOW_HELP} With --by: the value of A.")
@click.option("--b", required=True, help="Window B, in the same form; changes are B minus A.")
@click.option("--by", metavar="ATTRIBUTE", default="", help="Compare two values of this attribute.")
@click.option(
    "--since", metavar="WINDOW", default="", help="With --by: only requests of this window."
)
@click.option("--model", default="", help="Only requests for this model.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of sentences.")
@source_options.add_source_options
def diff(
    a: str, b: str, by: str, since: str, model: str, as_json: bool, source: SourceChoice
) -> None:
    """Say which stages changed between A and B, by how much, and what is only a changed mix."""
    # Without --by both windows have times already: a third one could only contradict them.
    if since and not by:
        raise click.UsageError("--since goes with --by; without it --a and --b are the windows")
    with source_options.report_refusals(CannotTellError, as_json=as_json):
        with breakdown_source.open_source(source) as opened:
            sides = _load_sides(opened, a, b, by, since, model)
        difference = _compare_sides(*sides)
    # The form is a contract: tests compare it with docs/diff.schema.json.
    if as_json:
        click.echo(json.dumps(difference_text.describe_difference(difference), indent=2))
    else:
        difference_text.print_difference(difference)


@dataclass(frozen=True, slots=True)
class ComparedSide:
    """The requests of one side, oldest first, and those that have no first token."""

    facts: list[RequestFacts]
    lost: LostRequests


def _load_sides(
    opened: BreakdownSource, a: str, b: str, by: str, since: str, model: str
) -> tuple[ComparedSide, ComparedSide]:
    """A and B. Raises CannotTellError, StoreError."""
    if not by:
        first, second = (_load_window(opened, window, model, "") for window in (a, b))
        return ComparedSide(first[0], count_lost(first[1])), ComparedSide(
            second[0], count_lost(second[1])
        )
    # One read for both sides: a request is told apart by its value, not by its time.
    facts, lost = _load_window(opened, since, model, by)
    of_a, of_b = ([each for each in facts if each.group == value] for value in (a, b))
    # One value without requests is left to compare_windows(), which says how many it needs.
    if not of_a and not of_b:
        raise CannotTellError(_describe_values(facts, by))
    groups = [build_facts(each, opened.find_trunks(each.trace_id), by).group for each in lost]
    lost_a, lost_b = (
        count_lost([each for each, group in zip(lost, groups, strict=True) if group == value])
        for value in (a, b)
    )
    return ComparedSide(of_a, lost_a), ComparedSide(of_b, lost_b)


def _compare_sides(a: ComparedSide, b: ComparedSide) -> Difference:
    """Compare them. Raises CannotTellError, which also says who has no first token."""
    try:
        found = compare_windows(a.facts, b.facts)
    except CannotTellError as error:
        lost = " ".join(
            f"In {name} {side.lost.sentence}."
            for name, side in (("A", a), ("B", b))
            if side.lost.total
        )
        raise CannotTellError(f"{error}. {lost}" if lost else str(error)) from error
    return replace(found, lost_a=a.lost, lost_b=b.lost)


def _load_window(
    opened: BreakdownSource, window: str, model: str, by: str
) -> tuple[list[RequestFacts], list[Request]]:
    """The newest MAX_REQUESTS requests of `window` ("" for all times), oldest first, and the lost ones."""
    requests = list_with_progress(
        opened,
        filter_window(window, model, MAX_REQUESTS),
        f"reading {window or 'requests'}",
        f"{window or 'all times'}: only the newest {MAX_REQUESTS} requests are compared",
    )
    lost: list[Request] = []
    facts = list(read_facts(opened, collect_lost(requests, lost), by))
    # The store lists the newest first; a change's start is looked for in the order of time.
    return facts[::-1], lost


def _describe_values(requests: Sequence[RequestFacts], by: str) -> str:
    """An error text: which values of the attribute there are."""
    # Mostly a typing error in the value: those that exist help more than "not found".
    values = sorted({each.group for each in requests if each.group})
    if not values:
        return f"no stored request has the attribute {by}"
    return f"no request has one of these values; {by} is one of: {', '.join(values[:20])}"
