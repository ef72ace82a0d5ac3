# SPDX-License-Identifier: Apache-2.0
"""Where the breakdowns of requests come from: the embedded database, or Tempo; and of which window of time.

Commands make a SourceChoice of their flags (commands/source_options.py) and read through open_source(); what
they get is the same from either (BreakdownSource). filter_window() makes the RequestFilter of a window as
users write it (`2h..1h`), for --since. Pages and alerts ask an Explainer, which `serve` gets from
commands/main.py: explain/ is above this room. ServeOptions are the ports, limits and token of `serve`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import click
from rich.console import Console
from rich.progress import Progress

from ttft_otel.report.report_types import SourceChoice
from ttft_otel.report.store import database_schema
from ttft_otel.report.store.database_reader import (
    MAX_REQUESTS,
    DatabaseReader,
    RequestFilter,
    open_reader,
)

if TYPE_CHECKING:
    from ttft_otel.report.tempo.tempo_source import TempoSource

UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
AGO_PATTERN: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
CLOCK_PATTERN: Final = re.compile(r"\d{1,2}:\d{2}(:\d{2})?")
WINDOW_HELP: Final = (
    "SINCE..UNTIL, each 15m or 2h (ago), 14:05 or ISO 8601. Without UNTIL: until now."
)


# What the embedded store and Tempo both answer. Every call may raise database_schema.StoreError.
BreakdownSource: TypeAlias = "DatabaseReader | TempoSource"


@dataclass(frozen=True, slots=True)
class ExplainQuestion:
    """What is to be explained: one request, by either ID, or without them the late ones of a window."""

    request_id: str = ""
    trace_id: str = ""
    wanted: RequestFilter = RequestFilter(last=MAX_REQUESTS)
    slo_us: int = 0  #: longer TTFTs are late; 0: the slowest hundredth


@dataclass(frozen=True, slots=True)
class ComparedWindows:
    """Two windows to compare, as parse_window() reads them; model: "" for all."""

    a: str
    b: str
    model: str = ""


@dataclass(frozen=True, slots=True)
class ExplainAnswer:
    """An explanation, or why there is none."""

    sentences: Sequence[str]  #: the first one is the answer in short
    document: Mapping[str, Any]  #: the same by docs/explain.schema.json, or diff.schema.json

    @classmethod
    def refuse(cls, reason: str) -> ExplainAnswer:
        return cls([reason], {"answered": False, "refusal": reason})


# Raises StoreError.
Explainer = Callable[[SourceChoice, ExplainQuestion | ComparedWindows], ExplainAnswer]


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `ttft-otel serve` was asked for: commands/serve.py makes it of its flags."""

    path: Path  #: of the database
    host: str = "127.0.0.1"
    http_port: int = 4318  #: 0 takes a free one
    grpc_port: int = 4317  #: likewise; -1 disables gRPC
    # Limits of the database; the oldest traces are removed.
    max_traces: int = 20_000
    max_age_hours: float = 168.0
    max_bytes: int = 2 << 30
    allowed_hosts: tuple[str, ...] = ()  #: further Host headers to accept
    token: str = ""  #: that whoever sends or reads has to show; "" asks nobody
    #: Answers the page's "Why?" and alerts; None: neither is there.
    explain: Explainer | None = None
    #: What pages show instead of the database; nothing is received then.
    tempo: SourceChoice | None = None
    page_url: str = ""  #: where people reach the pages, for links in an alert's answer
    grafana_url: str = ""  #: where people reach the dashboards, for the pages' links; "": no links
    alertmanager_url: str = ""  #: where answers to alerts go; "": only to who asked

    @property
    def source(self) -> SourceChoice:
        """What pages and answers are made of."""
        return self.tempo or SourceChoice(db=self.path)


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
        from ttft_otel.report.tempo.tempo_source import TempoSource
    except ModuleNotFoundError as error:
        raise database_schema.StoreError(
            f"--tempo needs {error.name}, which is not installed: pip install 'ttft-otel[explain]'"
        ) from error
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
        with closing(
            TempoSource(choice, report_progress, lambda text: click.echo(f"note: {text}", err=True))
        ) as tempo:
            yield tempo
    finally:
        bar.stop()


def parse_window(text: str, now: datetime) -> tuple[int, int]:
    """The Unix nanoseconds between which `text` lies, the end excluded; see WINDOW_HELP.

    now: with its time zone, in which clock times are read. Raises ValueError with a sentence.
    """
    # Two dots, because ISO 8601 moments and clock times already have "-" and ":" in them.
    since_text, dots, until_text = text.partition("..")
    since = _parse_moment(since_text, now)
    # `now` is the same for both ends: 1h..30m is half an hour, however long parsing takes.
    until = _parse_moment(until_text, now) if dots and until_text else now
    if since >= until:
        raise ValueError(f"{text!r} ends before it begins")
    return _to_ns(since), _to_ns(until)


def _parse_moment(text: str, now: datetime) -> datetime:
    """One moment. Raises ValueError with a sentence."""
    text = text.strip()
    try:
        if ago := AGO_PATTERN.fullmatch(text):
            return now - timedelta(seconds=float(ago[1]) * UNIT_SECONDS[ago[2]])
        if CLOCK_PATTERN.fullmatch(text):
            clock = datetime.strptime(text, "%H:%M:%S" if text.count(":") == 2 else "%H:%M")
            moment = now.replace(
                hour=clock.hour, minute=clock.minute, second=clock.second, microsecond=0
            )
            # Shortly after midnight, 23:50 is yesterday's.
            return moment if moment <= now else moment - timedelta(days=1)
        moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError):  # years before the first one are none
        raise ValueError(f"{text!r} is not a time: 15m, 2h, 14:05 or 2026-01-31T14:05") from None
    # Without a zone it is the reader's own time, as a clock time is.
    return moment if moment.tzinfo else moment.replace(tzinfo=now.tzinfo)


def _to_ns(moment: datetime) -> int:
    """Unix nanoseconds; exact to the microsecond, which a float of seconds is not."""
    epoch = datetime.fromtimestamp(0, moment.tzinfo)
    return (moment - epoch) // timedelta(microseconds=1) * 1000


def filter_window(text: str, model: str, last: int) -> RequestFilter:
    """The conditions for the newest `last` requests of a window. Raises click.UsageError.

    text: an option's value, clock times in the local zone; "" for all times. model: "" for all models.
    """
    since_ns = until_ns = 0
    if text:
        try:
            since_ns, until_ns = parse_window(text, datetime.now().astimezone())
        except ValueError as error:
            raise click.UsageError(str(error)) from error
    return RequestFilter(model=model, since_ns=since_ns, until_ns=until_ns, last=last)
