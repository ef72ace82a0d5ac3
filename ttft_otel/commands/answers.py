# SPDX-License-Identifier: Apache-2.0
"""The commands `ttft-otel explain`, `diff` and `whatif`: why requests were late, what changed, what would be.

They read the embedded store, or Tempo, and print sentences and tables, or JSON (docs/explain.schema.json,
diff.schema.json, whatif.schema.json). With --fail-if the exit code of `diff` is a verdict.
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
from ttft_otel.commands.command_options import add_watch_option, make_parsed_option, write_whole
from ttft_otel.explain.diff import change_answer, window_difference
from ttft_otel.explain.diff.change_answer import ChangeAnswer, compare_sides
from ttft_otel.explain.diff.window_difference import Condition, Verdict
from ttft_otel.explain.explain import window_answer
from ttft_otel.explain.explain.window_answer import LIKE_LAST, explain_one, explain_window
from ttft_otel.explain.whatif import what_if
from ttft_otel.explain.whatif.what_if import Targets
from ttft_otel.explain.whatif.window_check import (
    PlannedChange,
    parse_more,
    parse_rate,
    parse_share,
)
from ttft_otel.explain.window.request_facts import (
    CannotTellError,
    RequestFacts,
    build_facts,
    count_lost,
)
from ttft_otel.explain.window.window_reading import (
    WindowReading,
    describe_coverage,
    describe_reading,
    read_window,
    record_window,
    track_replays,
)
from ttft_otel.report.breakdown_source import (
    WINDOW_HELP,
    BreakdownSource,
    filter_window,
    open_source,
)
from ttft_otel.report.report_types import LOST, SourceChoice
from ttft_otel.report.show.terminal import print_sentence, remove_controls
from ttft_otel.report.store.database_reader import MAX_REQUESTS
from ttft_otel.report.store.database_schema import StoreError
from ttft_otel.router.routing.policies.policy_registry import POLICIES


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
    with refusals, open_source(source) as opened:
        if is_single:
            like = filter_window(since, "", last or LIKE_LAST)
            explanation = explain_one(opened, request_id, trace_id, like, group_by)
        else:
            # Without a window the newest ones, which a store of months has in its newest part.
            wanted = filter_window(since, model, last or (0 if since else MAX_REQUESTS))
            explanation = explain_window(opened, wanted, slo_us, group_by, thorough=predict)
    if as_json:
        click.echo(json.dumps(window_answer.describe_explanation(explanation), indent=2))
    else:
        window_answer.print_explanation(explanation, verbose)


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
@make_parsed_option(
    "--fail-if",
    "CONDITION",
    window_difference.parse_condition,
    "'ttft.p95 > +10%', 'prefill.queue.mean > +20ms'; several times. The exit code is 1 if one "
    "holds, 2 if that cannot be told, else 0.",
    list_name="conditions",
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
    cannot_tell = window_difference.EXIT_CODES[window_difference.UNKNOWN] if conditions else 1
    with source_options.report_refusals(CannotTellError, as_json=as_json, exit_code=cannot_tell):
        try:
            with open_source(source) as opened:
                sides = _load_sides(opened, a, b, by, since, model, group_by)
            answer = compare_sides(*sides)
        except (CannotTellError, StoreError) as error:
            verdicts = window_difference.refuse_all(conditions, remove_controls(str(error)))
            _write_verdicts(verdicts, junit)
            if markdown:
                click.echo(window_difference.build_markdown(verdicts, ()), nl=False)
            raise
    verdicts = window_difference.judge_windows(
        conditions, sides[0].requests, sides[1].requests, (sides[0].lost_share, sides[1].lost_share)
    )
    _write_verdicts(verdicts, junit)
    _print_answer(answer, verdicts, as_json, markdown, verbose)
    if verdicts:
        outcome = window_difference.find_outcome(verdicts)
        click.get_current_context().exit(window_difference.EXIT_CODES[outcome])


def _write_verdicts(verdicts: Sequence[Verdict], junit: Path | None) -> None:
    if junit:
        try:
            write_whole(junit, window_difference.build_junit(verdicts))
        except OSError as error:
            raise click.ClickException(f"cannot write {junit}: {error.strerror}") from error


def _print_answer(
    answer: ChangeAnswer, verdicts: Sequence[Verdict], as_json: bool, markdown: bool, verbose: bool
) -> None:
    # The form is a contract: tests compare it with docs/diff.schema.json.
    if as_json:
        described = change_answer.describe_answer(answer)
        gate = {"gate": window_difference.describe_gate(verdicts)} if verdicts else {}
        click.echo(json.dumps({**described, **gate}, indent=2))
    elif markdown:
        sentences = change_answer.list_sentences(answer, verbose=True)
        click.echo(window_difference.build_markdown(verdicts, sentences), nl=False)
    else:
        for line in window_difference.list_lines(verdicts):
            print_sentence(Console(highlight=False), remove_controls(line))
        change_answer.print_answer(answer, verbose)


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


@click.command(
    epilog="""\b
Examples:
  ttft-otel whatif --since 1h.. --instances +1
  ttft-otel whatif --max-num-batched-tokens 8192 --since 14:00..14:30
  ttft-otel whatif --rate 1.5x --cache-hit +20% --json
  ttft-otel whatif --instances +1 --routing-logic ttft --tempo http://127.0.0.1:3200
  ttft-otel whatif --autotune ttft_p99=500,tpot_p99=50    the cheapest that holds both
  ttft-otel whatif                                        how well it knows the window itself
"""
)
@make_parsed_option(
    "--instances", "+N", parse_more, "So many more instances, each like the first one."
)
@make_parsed_option("--encoders", "+N", parse_more, "So many more encoder instances.")
@click.option("--max-num-seqs", type=click.IntRange(1), help="vLLM's option of this name.")
@click.option(
    "--max-num-batched-tokens",
    "max_batched_tokens",
    type=click.IntRange(1),
    help="vLLM's option of this name.",
)
@click.option(
    "--routing-logic",
    "policy",
    type=click.Choice(list(POLICIES)),
    help="The router's policy; those that decide by shared prefixes or sessions are refused.",
)
@make_parsed_option(
    "--rate", "FACTORx", parse_rate, "The same requests, so many times as fast: 1.5x."
)
@make_parsed_option(
    "--cache-hit",
    "SHARE%",
    parse_share,
    "So much more of all prompt tokens is in the prefix cache: +20%.",
)
@make_parsed_option(
    "--kv-cache",
    "FACTORx",
    parse_rate,
    "The KV cache holds so many times as much: 2x for --kv-cache-dtype fp8.",
)
@make_parsed_option(
    "--autotune",
    "TARGETS",
    what_if.parse_targets,
    "Search the cheapest instances and settings that hold targets in ms: ttft_p99=500,tpot_p99=50.",
)
@click.option("--since", metavar="WINDOW", default="1h..", show_default=True, help=WINDOW_HELP)
@click.option("--model", default="", help="Only requests for this model.")
@click.option(
    "--recorded-max-num-seqs",
    type=click.IntRange(1),
    help="The recorded servers' setting, where their spans do not tell it.",
)
@click.option(
    "--recorded-max-num-batched-tokens",
    type=click.IntRange(1),
    help="The recorded servers' setting, where their spans do not tell it.",
)
@click.option(
    "--repetitions",
    type=click.IntRange(2, 1000),
    default=20,
    show_default=True,
    help="Replays of the window, each with its own noise; more give steadier intervals.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text.")
@source_options.add_source_options
def whatif(
    since: str,
    model: str,
    recorded_max_num_seqs: int | None,
    recorded_max_num_batched_tokens: int | None,
    repetitions: int,
    autotune: Targets | None,
    as_json: bool,
    source: SourceChoice,
    **changes: Any,
) -> None:
    """Say what a window's TTFT would be with other settings, and how well the window itself is known."""
    # The other options are named after PlannedChange's fields.
    given = {name: value for name, value in changes.items() if value is not None}
    change = PlannedChange(**given)
    if autotune and (change.instances or change.max_num_seqs or change.max_batched_tokens):
        raise click.UsageError("--autotune searches instances and settings: leave them out")
    recorded = PlannedChange(
        max_num_seqs=recorded_max_num_seqs or 0,
        max_batched_tokens=recorded_max_num_batched_tokens or 0,
    )
    with source_options.report_refusals(CannotTellError, as_json=as_json):
        with open_source(source) as opened:
            wanted = filter_window(since, model, MAX_REQUESTS)
            recording, coverage = record_window(opened, wanted, f"reading {since}")
        replays = what_if.count_replays(repetitions) if autotune else repetitions
        with track_replays(replays) as track:
            fleet = what_if.learn_fleet(recording, recorded)
            answer = (
                what_if.search_plan(fleet, autotune, change, repetitions, track)
                if autotune
                else what_if.predict_fleet(fleet, change, repetitions, track)
            )
    described = what_if.describe_answer(answer)
    if as_json:
        click.echo(json.dumps({**described, "coverage": describe_coverage(coverage)}, indent=2))
        return
    console = Console(highlight=False)
    print_sentence(console, describe_reading(coverage))
    if autotune:
        print_sentence(console, what_if.name_found(answer))
    what_if.print_answer(answer, console)
