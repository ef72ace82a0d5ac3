# SPDX-License-Identifier: Apache-2.0
"""The command `ttft-otel whatif`: what a recorded window's TTFT would be with other settings.

Reads the embedded store, or Tempo; prints a table and sentences, or JSON (docs/whatif.schema.json).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click
from rich.console import Console

from ttft_otel.commands import source_options
from ttft_otel.commands.command_options import OptionDecorator
from ttft_otel.explain.whatif import plan_search, what_if, what_if_text
from ttft_otel.explain.whatif.planned_change import (
    PlannedChange,
    parse_more,
    parse_rate,
    parse_share,
)
from ttft_otel.explain.whatif.what_if import Targets
from ttft_otel.explain.window.request_facts import CannotTellError
from ttft_otel.explain.window.window_reading import (
    describe_coverage,
    describe_reading,
    record_window,
    track_replays,
)
from ttft_otel.report import breakdown_source
from ttft_otel.report.breakdown_source import WINDOW_HELP, filter_window
from ttft_otel.report.report_types import SourceChoice
from ttft_otel.report.show.terminal import print_sentence
from ttft_otel.report.store.database_reader import MAX_REQUESTS
from ttft_otel.router.routing.policies.policy_registry import POLICIES


def _declare_change(
    flag: str, metavar: str, parse: Callable[[str], object], help_text: str
) -> OptionDecorator:
    """An option of the planned change; the command gets None where it is not given.

    parse: reads its text, and raises ValueError for one that it cannot read.
    """

    def check(context: Any, option: Any, text: str) -> object:
        try:
            return parse(text) if text else None
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return click.option(flag, metavar=metavar, default="", callback=check, help=help_text)


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
@_declare_change(
    "--instances", "+N", parse_more, "So many more instances, each like the first one."
)
@_declare_change("--encoders", "+N", parse_more, "So many more encoder instances.")
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
@_declare_change("--rate", "FACTORx", parse_rate, "The same requests, so many times as fast: 1.5x.")
@_declare_change(
    "--cache-hit",
    "SHARE%",
    parse_share,
    "So much more of all prompt tokens is in the prefix cache: +20%.",
)
@_declare_change(
    "--kv-cache",
    "FACTORx",
    parse_rate,
    "The KV cache holds so many times as much: 2x for --kv-cache-dtype fp8.",
)
@_declare_change(
    "--autotune",
    "TARGETS",
    plan_search.parse_targets,
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
        with breakdown_source.open_source(source) as opened:
            wanted = filter_window(since, model, MAX_REQUESTS)
            recording, coverage = record_window(opened, wanted, f"reading {since}")
        replays = plan_search.count_replays(repetitions) if autotune else repetitions
        with track_replays(replays) as track:
            fleet = what_if.learn_fleet(recording, recorded)
            answer = (
                plan_search.search_plan(fleet, autotune, change, repetitions, track)
                if autotune
                else what_if.predict_fleet(fleet, change, repetitions, track)
            )
    described = what_if_text.describe_answer(answer)
    if as_json:
        click.echo(json.dumps({**described, "coverage": describe_coverage(coverage)}, indent=2))
        return
    console = Console(highlight=False)
    print_sentence(console, describe_reading(coverage))
    if autotune:
        print_sentence(console, what_if_text.name_found(answer))
    what_if_text.print_answer(answer, console)
