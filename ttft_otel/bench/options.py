# SPDX-License-Identifier: Apache-2.0
"""The flags of `ttft-otel bench`, in groups; command.py puts them together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource

from ttft_otel.bench.plan import DATASETS
from ttft_otel.bench.replay import BLOCK

Command = TypeVar("Command", bound=Callable[..., Any])
Option = Callable[[Any], Any]

COUNT: Final = click.IntRange(min=1)
LENGTH: Final = click.IntRange(min=0)
ABOVE: Final = click.FloatRange(min=0, min_open=True)
FILE: Final = click.Path(path_type=Path, dir_okay=False)


def _power(_context: click.Context, _option: click.Parameter, value: int) -> int:
    """A divisor of a trace's blocks. Raises BadParameter."""
    if BLOCK % value:
        raise click.BadParameter(
            f"{value} does not divide blocks of {BLOCK} tokens. Give a power of two, 1 to {BLOCK}; "
            "--max-input cuts prompts to any length."
        )
    return value


def misplaced(context: click.Context, dataset: str) -> list[str]:
    """Flags that were given although they are another dataset's, as their help says."""
    others = {f"{each}:" for each in DATASETS} - {f"{dataset}:"}
    return [
        each.opts[0]
        for each in context.command.params
        if isinstance(each, click.Option)
        and (each.help or "").split(" ")[0] in others
        and context.get_parameter_source(each.name or "") is ParameterSource.COMMANDLINE
    ]


def _number(name: str, kind: Any, default: Any, says: str) -> Option:
    """An option with a number, whose default --help shows."""
    return click.option(name, type=kind, default=default, show_default=True, help=says)


WHERE: Final = (
    click.option("--url", metavar="URL", help="The server or router: http://host:port"),
    click.option(
        "--ab", nargs=2, metavar="URL_A URL_B", help="Two of them in turn, round by round."
    ),
    click.option(
        "--apart",
        is_flag=True,
        help="--ab: other prompts for B, as where both lead to one server with its prefix cache.",
    ),
    click.option("--model", help="Model name.  [default: the first of /v1/models]"),
    click.option(
        "--header", "headers", multiple=True, metavar="'NAME: VALUE'", help="Send it too."
    ),
    _number("--timeout", ABOVE, 600.0, "Seconds until a request counts as failed."),
)
WHAT: Final = (
    click.option("--dataset", type=click.Choice(DATASETS), default="random", show_default=True),
    click.argument("file", required=False, type=click.Path(path_type=Path)),
    click.option("--api", type=click.Choice(("completions", "chat")), help="Which API to ask."),
    click.option(
        "--requests",
        type=COUNT,
        help="How many.  [default: 100; replay: all; multi-round: until --time]",
    ),
    _number("--input-len", COUNT, 512, "Prompt tokens (shared-prefix: after the prefix)."),
    _number("--output-len", COUNT, 64, "Answer tokens."),
    _number("--spread", click.FloatRange(0, 1), 0.0, "Lengths differ by so much: 0.2 is ±20 %."),
    _number("--prefix-len", LENGTH, 256, "shared-prefix: tokens of a prefix."),
    _number("--prefixes", COUNT, 1, "shared-prefix: how many different ones."),
    _number("--images", COUNT, 1, "images: pictures in a request."),
    _number("--image-size", COUNT, 224, "images: their edge in pixels."),
    click.option(
        "--vocab",
        type=click.IntRange(min=200),
        help="Token ids are 100 to this.  [default: those of plain words, which the server tells]",
    ),
    _number("--speed", ABOVE, 1.0, "replay: so many times as fast."),
    click.option(
        "--shrink",
        type=click.IntRange(1, BLOCK),
        default=1,
        show_default=True,
        callback=_power,
        help="replay: prompts so many times as short; a power of two.",
    ),
    click.option("--max-input", type=COUNT, help="replay: cut prompts to so many tokens."),
    click.option("--max-output", type=COUNT, help="replay: cut answers to so many tokens."),
)
ROUNDS: Final = (
    _number("--num-users", COUNT, 5, "multi-round: users at once."),
    _number("--num-rounds", COUNT, 10, "multi-round: questions of a user."),
    _number("--qps", ABOVE, 1.0, "multi-round: questions per second, of all users."),
    _number("--shared-system-prompt", LENGTH, 100, "multi-round: tokens that all users share."),
    _number("--user-history-prompt", LENGTH, 200, "multi-round: tokens of a user's own."),
    _number("--question-len", COUNT, 20, "multi-round: tokens of a question."),
    _number("--answer-len", COUNT, 100, "multi-round: tokens of an answer."),
    _number("--time", ABOVE, 60.0, "multi-round: seconds."),
)
WHEN: Final = (
    click.option("--rate", type=ABOVE, help="Open loop: requests per second."),
    click.option(
        "--arrivals",
        type=click.Choice(("poisson", "constant")),
        default="poisson",
        show_default=True,
    ),
    click.option("--concurrency", type=COUNT, help="Closed loop: so many requests at once."),
    click.option(
        "--max-unfinished",
        "--max-unfinished-queries",
        "most",
        type=COUNT,
        help="Hold requests back while so many are under way.",
    ),
    _number("--warmup", LENGTH, 0, "Requests before each run, not counted."),
    _number("--repeat", COUNT, 1, "Rounds."),
    _number("--seed", click.INT, 0, "Same seed, same prompts and times; each round adds 1."),
)
OUT: Final = (
    click.option(
        "--slo", "slos", multiple=True, metavar="NAME=MS", help="Goodput: ttft, tpot, latency."
    ),
    click.option("--json", "as_json", is_flag=True, help="JSON instead of tables."),
    click.option("--output", type=FILE, help="Write the JSON here, too."),
    click.option("--html", type=FILE, help="Write tables and charts here as a page, too."),
)


def flags(*groups: tuple[Option, ...]) -> Callable[[Command], Command]:
    """Give a command all options of some groups, in their order."""

    def give(command: Command) -> Command:
        for option in reversed([each for group in groups for each in group]):
            command = option(command)
        return command

    return give
