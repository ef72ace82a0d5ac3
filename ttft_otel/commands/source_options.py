# SPDX-License-Identifier: Apache-2.0
"""The flags with which commands choose where requests come from, and how they say that there are none.

report, diff, explain and whatif decorate themselves with add_source_options(); report/breakdown_source.py
opens what was chosen.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import click
from opentelemetry.util.re import parse_env_headers

from ttft_otel.commands.command_options import Command, add_options
from ttft_otel.model.names import env_names
from ttft_otel.report.report_types import SourceChoice
from ttft_otel.report.show.terminal import remove_controls
from ttft_otel.report.store import database_schema


def add_source_options(command: Command) -> Command:
    """Give a click command the options of its source; it gets them as `source`, a SourceChoice."""

    @wraps(command)
    def call(
        *args: Any,
        db: Path | None,
        tempo: str,
        tempo_header: tuple[str, ...],
        tempo_ca: Path | None,
        tempo_timeout: float,
        **rest: Any,
    ) -> Any:
        if db and tempo:
            raise click.UsageError(
                "--db and --tempo exclude each other: requests come from one of them"
            )
        choice = SourceChoice(db, tempo, parse_headers(tempo_header), tempo_ca, tempo_timeout)
        return command(*args, source=choice, **rest)

    decorate = add_options(
        click.option(
            "--db",
            type=click.Path(path_type=Path, dir_okay=False),
            help=database_schema.DB_OPTION_HELP,
        ),
        click.option(
            "--tempo",
            metavar="URL",
            default="",
            help="Read from Tempo instead, for example http://127.0.0.1:3200.",
        ),
        click.option(
            "--tempo-header",
            metavar="NAME=VALUE",
            multiple=True,
            # Not click's envvar: its help would print what the variable holds.
            help="Header for Tempo, for example a token or X-Scope-OrgID; several times. "
            f"Others see a command line: ${env_names.TTFT_OTEL_TEMPO_HEADERS} takes NAME=VALUE,NAME=VALUE.",
        ),
        click.option(
            "--tempo-ca",
            type=click.Path(path_type=Path, dir_okay=False),
            help="PEM file of the CA that signed Tempo's certificate.  [default: the system's]",
        ),
        click.option(
            "--tempo-timeout",
            metavar="SECONDS",
            default=30.0,
            show_default=True,
            type=click.FloatRange(0.1, 86_400),
            callback=require_number,
            help="How long one answer of Tempo may take.",
        ),
    )
    decorated: Any = decorate(call)
    result: Command = decorated
    return result


def require_number(context: click.Context, option: click.Parameter, value: Any) -> Any:
    """For options that are numbers: "nan" is one to Python, and in every range to click."""
    if isinstance(value, float) and value != value:
        raise click.BadParameter("nan is not a number", context, option)
    return value


def parse_headers(given: tuple[str, ...]) -> dict[str, str]:
    """Headers of the environment, and those `given` as NAME=VALUE, which go first.

    Raises click.UsageError, which does not repeat the value.
    """
    headers = dict(
        parse_env_headers(os.environ.get(env_names.TTFT_OTEL_TEMPO_HEADERS, ""), liberal=True)
    )
    for each in given:
        name, found, value = each.partition("=")
        # "Name: value" is what curl takes.
        if not found or ":" in name:
            name, found, value = each.partition(":")
        if not found or not name.strip() or not value.strip():
            raise click.UsageError("--tempo-header is NAME=VALUE, with a name and a value")
        # They would end the header, or not be sent at all.
        if not (name.strip() + value.strip()).isprintable() or not name.strip().isascii():
            raise click.UsageError("--tempo-header has characters that no header may have")
        headers[name.strip().lower()] = value.strip()
    return headers


@contextmanager
def report_refusals(
    *kinds: type[Exception], as_json: bool = False, exit_code: int = 1
) -> Iterator[None]:
    """End the command with `exit_code` and one line of text at a StoreError, or an error of `kinds`.

    as_json: the text is in a JSON document on stdout, {"answered": false, "refusal": ...}.
    """
    expected: tuple[type[Exception], ...] = (database_schema.StoreError, *kinds)
    try:
        yield
    except expected as error:
        # It may quote request IDs, instances and attributes, which anybody may have sent.
        text = remove_controls(str(error))
        # The same exit code either way: a script must not take a refusal for an answer.
        if as_json:
            click.echo(json.dumps({"answered": False, "refusal": text}, indent=2))
            raise click.exceptions.Exit(exit_code) from error
        click.ClickException(text).show()
        raise click.exceptions.Exit(exit_code) from error
