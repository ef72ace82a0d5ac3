# SPDX-License-Identifier: Apache-2.0
"""Where the breakdowns of requests come from: the embedded database, or Tempo.

Commands take their options from add_source_options() and read through open_source(); what they get is the
same from either (BreakdownSource).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Final, Protocol

import click
from opentelemetry.util.re import parse_env_headers
from rich.console import Console
from rich.progress import Progress

from ttft_otel import names
from ttft_otel.command_options import Command, add_options
from ttft_otel.report import database_schema
from ttft_otel.report.database_reader import RequestFilter, StoredTrace, open_reader
from ttft_otel.report.report_types import Request, StoredSpan
from ttft_otel.report.terminal import remove_controls

NEEDED_EXTRA: Final = "explain"  # the pip extra that reading from Tempo needs


class BreakdownSource(Protocol):
    """What the embedded store and Tempo both answer. Every call may raise database_schema.StoreError."""

    def list_latest(self, wanted: RequestFilter) -> list[Request]:
        """The newest requests that match `wanted`, newest first."""

    def find_request(self, request_id: str) -> Request | None:
        """The newest request with this ID; None when there is none."""

    def find_trace(self, trace_id: str) -> StoredTrace | None:
        """All spans and requests of a trace; None when there is none."""

    def find_trunks(self, trace_id: str) -> list[StoredSpan]:
        """The `ttft` and `encode` spans of a trace; [] when there is none."""


@dataclass(frozen=True, slots=True)
class SourceChoice:
    """The source that a user has chosen: Tempo where `tempo` is its URL, else the database `db`.

    headers: for Tempo; they hold credentials and are in no representation.
    """

    db: Path | None = None
    tempo: str = ""
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    ca_file: Path | None = None
    timeout_s: float = 30.0

    @property
    def name(self) -> str:
        """Which source it is, for messages."""
        return "Tempo" if self.tempo else "the embedded store"


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
            f"Others see a command line: ${names.ENV_TEMPO_HEADERS} takes NAME=VALUE,NAME=VALUE.",
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
    headers = dict(parse_env_headers(os.environ.get(names.ENV_TEMPO_HEADERS, ""), liberal=True))
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
def open_source(choice: SourceChoice) -> Iterator[BreakdownSource]:
    """Open the chosen source for reading. Raises StoreError, whose text has the remedy.

    Progress is drawn on a terminal's stderr, since stdout may be JSON; so are notes about the answer.
    """
    if not choice.tempo:
        with open_reader(choice.db or database_schema.get_default_path()) as db_reader:
            yield db_reader
        return
    try:
        # Here, because aiohttp comes with an extra that the embedded store does not need.
        from ttft_otel.report.tempo_access import TempoAccess
        from ttft_otel.report.tempo_source import TempoSource
    except ModuleNotFoundError as error:
        raise database_schema.StoreError(
            f"--tempo needs {error.name}, which is not installed: pip install 'ttft-otel[{NEEDED_EXTRA}]'"
        ) from error
    access = TempoAccess(choice.tempo, choice.headers, choice.ca_file, choice.timeout_s)
    with show_progress() as report_progress:
        # To stderr, as the bar is.
        with closing(
            TempoSource(access, report_progress, lambda text: click.echo(f"note: {text}", err=True))
        ) as tempo:
            yield tempo


@contextmanager
def report_refusals(*kinds: type[Exception], as_json: bool = False) -> Iterator[None]:
    """End the command with exit code 1 and one line of text at a StoreError, or an error of `kinds`.

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
            raise click.exceptions.Exit(1) from error
        raise click.ClickException(text) from error


@contextmanager
def show_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal's stderr, nothing elsewhere; it is there while its text is not empty."""
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("", total=None)

    def report_progress(text: str, done: int, total: int) -> None:
        # Gone between two calls, since the command may draw a bar of its own.
        if text:
            bar.update(task, description=text, completed=done, total=total or None)
            bar.start()
        else:
            bar.stop()

    try:
        yield report_progress
    finally:
        bar.stop()
