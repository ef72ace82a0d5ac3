# SPDX-License-Identifier: Apache-2.0
"""Read a window's requests for a command: its option, a progress bar, and a note where it is too long."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

import click
from rich import progress
from rich.console import Console

from ttft_otel.explain.whatif.replay_facts import FindSpans
from ttft_otel.explain.window.time_windows import TimeWindow, parse_window
from ttft_otel.report.breakdown_source import BreakdownSource
from ttft_otel.report.report_types import Request, StoredSpan
from ttft_otel.report.store.database_reader import MAX_REQUESTS, RequestFilter


def parse_window_option(text: str) -> TimeWindow:
    """The window that an option names, clock times in the local zone. Raises click.UsageError."""
    try:
        return parse_window(text, datetime.now().astimezone())
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def list_with_progress(
    opened: BreakdownSource, wanted: RequestFilter, label: str, cut_note: str
) -> Iterable[Request]:
    """The requests that match, newest first, with a progress bar while they are used. Raises StoreError.

    label: stands beside the bar. cut_note: printed to stderr when there are MAX_REQUESTS or more.
    """
    requests = opened.list_latest(wanted)
    # To stderr, as the bar is: stdout may be JSON that a program reads.
    if len(requests) == MAX_REQUESTS:
        click.echo(cut_note, err=True)
    console = Console(stderr=True)
    # On a terminal only: a bar in a log is noise.
    return progress.track(
        requests, label, console=console, transient=True, disable=not console.is_terminal
    )


def make_span_finder(opened: BreakdownSource) -> FindSpans:
    """A function that reads all spans of a trace, by its ID; () when there is none."""

    def find_spans(trace_id: str) -> Sequence[StoredSpan]:
        trace = opened.find_trace(trace_id)
        return trace.spans if trace else ()

    return find_spans
