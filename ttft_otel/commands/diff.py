# SPDX-License-Identifier: Apache-2.0
"""The command `ttft-otel diff`: what changed in the TTFT between two windows, releases or instances.

Reads the embedded store, or Tempo; prints sentences and a table, Markdown, or JSON (docs/diff.schema.json).
With --fail-if its exit code is a verdict.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from ttft_otel.commands import source_options
from ttft_otel.commands.command_options import write_whole
from ttft_otel.explain.diff import difference_text, release_gate
from ttft_otel.explain.diff.change_cause import ChangeAnswer, compare_sides
from ttft_otel.explain.diff.release_gate import Condition, Verdict
from ttft_otel.explain.window.request_facts import (
    CannotTellError,
    RequestFacts,
    build_facts,
    count_lost,
)
from ttft_otel.explain.window.window_reading import WindowReading, read_window
from ttft_otel.report import breakdown_source
from ttft_otel.report.breakdown_source import WINDOW_HELP, BreakdownSource, filter_window
from ttft_otel.report.report_types import LOST, SourceChoice
from ttft_otel.report.show.terminal import print_sentence, remove_controls
from ttft_otel.report.store.database_schema import StoreError


def _read_conditions(context: Any, option: Any, texts: tuple[str, ...]) -> list[Condition]:
    try:
        return [release_gate.parse_condition(text) for text in texts]
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command(
    epilog="""\b
Examples:
  ttft-otel diff --a 2h..1h --b 1h..                  the last hour with the one before
  ttft-otel diff --a 14:00..14:05 --b 14:05..14:10 --json
  ttft-otel diff --by service.version --a 1.4 --b 1.5 --since 1d..
  ttft-otel diff --by service.instance.id --a vllm-0 --b vllm-1 --since 1h..
  ttft-otel diff --a 2h..1h --b 1h.. --fail-if 'ttft.p95 > +10%' \\
      --fail-if 'prefill.queue.mean > +20ms' --junit gate.xml
  ttft-otel diff --a 2h..1h --b 1h.. --tempo http://127.0.0.1:3200
"""
)
@click.option("--a", required=True, help=f"Window A: {WINDOW_HELP} With --by: the value of A.")
@click.option("--b", required=True, help="Window B, in the same form; changes are B minus A.")
@click.option(
    "--by",
    metavar="ATTRIBUTE",
    default="",
    help="Compare two values of this attribute, of any server that had the request.",
)
@click.option(
    "--since", metavar="WINDOW", default="", help="With --by: only requests of this window."
)
@click.option("--model", default="", help="Only requests for this model.")
@click.option(
    "--fail-if",
    "conditions",
    metavar="CONDITION",
    multiple=True,
    callback=_read_conditions,
    help="'ttft.p95 > +10%', 'prefill.queue.mean > +20ms'; several times. The exit code is 1 if one "
    "holds, 2 if that cannot be told, else 0.",
)
@click.option(
    "--junit",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="With --fail-if: also write JUnit's XML to this file.",
)
@click.option(
    "--group-by",
    metavar="ATTRIBUTE",
    default="",
    help="Without --by: an attribute that separates requests, whose shares are told.",
)
@click.option("--verbose", is_flag=True, help="Also every stage, and all that was looked at.")
@click.option("--markdown", is_flag=True, help="Markdown instead of text.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text.")
@source_options.add_source_options
def diff(
    a: str,
    b: str,
    by: str,
    since: str,
    model: str,
    conditions: list[Condition],
    junit: Path | None,
    group_by: str,
    verbose: bool,
    markdown: bool,
    as_json: bool,
    source: SourceChoice,
) -> None:
    """Say which stages changed between A and B, by how much, and what is only a changed mix."""
    # Without --by both windows have times already: a third one could only contradict them.
    if by and group_by:
        raise click.UsageError("--by and --group-by exclude each other")
    if since and not by:
        raise click.UsageError("--since goes with --by; without it --a and --b are the windows")
    if junit and not conditions:
        raise click.UsageError("--junit goes with --fail-if")
    if markdown and as_json:
        raise click.UsageError("--markdown and --json exclude each other")
    cannot_tell = release_gate.EXIT_CODES[release_gate.UNKNOWN] if conditions else 1
    with source_options.report_refusals(CannotTellError, as_json=as_json, exit_code=cannot_tell):
        try:
            with breakdown_source.open_source(source) as opened:
                sides = _load_sides(opened, a, b, by, since, model, group_by)
            answer = compare_sides(*sides)
        except (CannotTellError, StoreError) as error:
            verdicts = release_gate.refuse_all(conditions, remove_controls(str(error)))
            _write_verdicts(verdicts, junit)
            if markdown:
                click.echo(release_gate.build_markdown(verdicts, ()), nl=False)
            raise
    verdicts = release_gate.judge_windows(
        conditions, sides[0].requests, sides[1].requests, (sides[0].lost_share, sides[1].lost_share)
    )
    _write_verdicts(verdicts, junit)
    _print_answer(answer, verdicts, as_json, markdown, verbose)
    if verdicts:
        outcome = release_gate.find_outcome(verdicts)
        click.get_current_context().exit(release_gate.EXIT_CODES[outcome])


def _write_verdicts(verdicts: Sequence[Verdict], junit: Path | None) -> None:
    if junit:
        try:
            write_whole(junit, release_gate.build_junit(verdicts))
        except OSError as error:
            raise click.ClickException(f"cannot write {junit}: {error.strerror}") from error


def _print_answer(
    answer: ChangeAnswer, verdicts: Sequence[Verdict], as_json: bool, markdown: bool, verbose: bool
) -> None:
    # The form is a contract: tests compare it with docs/diff.schema.json.
    if as_json:
        described = difference_text.describe_answer(answer)
        gate = {"gate": release_gate.describe_gate(verdicts)} if verdicts else {}
        click.echo(json.dumps({**described, **gate}, indent=2))
    elif markdown:
        sentences = difference_text.list_sentences(answer, verbose=True)
        click.echo(release_gate.build_markdown(verdicts, sentences), nl=False)
    else:
        for line in release_gate.list_lines(verdicts):
            print_sentence(Console(highlight=False), remove_controls(line))
        difference_text.print_answer(answer, verbose)


def _load_sides(
    opened: BreakdownSource, a: str, b: str, by: str, since: str, model: str, group_by: str
) -> tuple[WindowReading, WindowReading]:
    """A and B. Raises CannotTellError, StoreError."""
    if not by:
        wanted = [(filter_window(each, model, 0), f"reading {each}") for each in (a, b)]
        first, second = (read_window(opened, each, 0, group_by, label) for each, label in wanted)
        return first, second
    # One read for both sides: a request is told apart by its value, not by its time.
    reading = read_window(opened, filter_window(since, model, 0), group_by=by)
    found = [_choose_side(each.group, a, b) for each in reading.requests]
    # One value without requests is left to compare_windows(), which says how many it needs.
    if not {*found} & {"A", "B"}:
        raise CannotTellError(_describe_values(reading.requests, by))
    if both := found.count("AB"):
        click.echo(f"{both} requests have both values of {by}: they are left out", err=True)
    weight = reading.coverage.counts[LOST] / max(len(reading.failed), 1)

    def choose(name: str) -> WindowReading:
        # Without the value, which would be told as a mix that changed.
        requests = [
            replace(each, group="")
            for each, side in zip(reading.requests, found, strict=True)
            if side == name
        ]
        lost = [
            each.request
            for each in reading.failed
            if _choose_side(build_facts(each.request, each.spans, by).group, a, b) == name
        ]
        return WindowReading(requests, count_lost(lost, weight), reading.coverage)

    return choose("A"), choose("B")


def _choose_side(group: str, a: str, b: str) -> str:
    """Which of the values `a` and `b` a request has: "A", "B", "AB" for both, or "".

    group: the values of all of its servers, router and instances, joined by build_facts().
    """
    # The joined text, too: it is what one calls a request that took a certain way.
    values = {group, *group.split(", ")}
    return "".join(name for name, value in (("A", a), ("B", b)) if value in values)


def _describe_values(requests: Sequence[RequestFacts], by: str) -> str:
    """An error text: which values of the attribute there are."""
    # Mostly a typing error in the value: those that exist help more than "not found".
    values = sorted({value for each in requests for value in each.group.split(", ") if value})
    if not values:
        return f"no stored request has the attribute {by}"
    return f"no request has one of these values; {by} is one of: {', '.join(values[:20])}"
