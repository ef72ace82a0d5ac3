# SPDX-License-Identifier: Apache-2.0
"""Read a window's requests for a command: its option (`2h..1h`), a progress bar, what was read of it.

Input: a source's sample of the window (window_sample.py). Output: WindowReading, whose requests have weights;
explain, diff and what-if say its coverage.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

import click
from rich import progress
from rich.console import Console

from ttft_otel.explain.whatif.replay_facts import EngineVisit, FindSpans, read_request
from ttft_otel.explain.window.lost_requests import LostRequests, count_lost
from ttft_otel.explain.window.request_facts import RequestEvidence, build_evidence
from ttft_otel.explain.window.unseen_work import compare_others
from ttft_otel.report.breakdown_source import BreakdownSource
from ttft_otel.report.report_types import Request, StoredSpan
from ttft_otel.report.store.database_reader import MAX_REQUESTS, RequestFilter
from ttft_otel.report.window_sample import (
    LATE,
    LOST,
    OTHER,
    REFUSED,
    Coverage,
    ReadRequest,
    read_adjusted_count,
)

UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
AGO_PATTERN: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
CLOCK_PATTERN: Final = re.compile(r"\d{1,2}:\d{2}(:\d{2})?")
WINDOW_HELP: Final = (
    "SINCE..UNTIL, each 15m or 2h (ago), 14:05 or ISO 8601. Without UNTIL: until now."
)


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
    return _track(requests, label, len(requests))


@dataclass(frozen=True, slots=True)
class WindowReading:
    """What was read of a window: all late requests and a sample of the others, by `weight` of their facts."""

    evidence: Sequence[RequestEvidence]  #: with a first token, oldest first
    failed: Sequence[ReadRequest]  #: some of those without one
    lost: LostRequests  #: of all of these
    coverage: Coverage


def read_window(
    opened: BreakdownSource,
    wanted: RequestFilter,
    slo_us: int = 0,
    group_by: str = "",
    label: str = "reading requests",
) -> WindowReading:
    """Read the requests that match `wanted`, of which `last` may be 0: all late ones, a sample of others.

    slo_us: from which TTFT on a request is late; 0: the slowest hundredth. group_by: as for build_facts().
    label: stands beside the bar. Raises StoreError.
    """
    sample = opened.sample_window(wanted, slo_us)
    evidence: list[RequestEvidence] = []
    failed: list[ReadRequest] = []
    visits: list[EngineVisit] = []
    weights: list[float] = []
    kept = 1.0
    for each in _track(sample.requests, label, sum(sample.coverage.read.values())):
        request = each.request
        if request.error:
            failed.append(each)
            continue
        stands_for = max(
            (read_adjusted_count(span.trace_state) for span in each.spans), default=1.0
        )
        kept = max(kept, stands_for)
        built = build_evidence(request, each.spans, group_by)
        weight = each.weight * stands_for
        evidence.append(replace(built, facts=replace(built.facts, weight=weight)))
        replay = read_request(request, each.spans, sample.coverage.first_ns, {})
        if replay is not None:
            visits.append(replay.main)
            weights.append(weight)
    evidence.sort(key=lambda each: each.facts.start_ns)
    weight = sample.coverage.counts[LOST] / max(len(failed), 1)
    return WindowReading(
        evidence,
        failed,
        count_lost([each.request for each in failed], weight),
        replace(sample.coverage, sampling=_describe_sampling(kept, visits, weights)),
    )


def _describe_sampling(kept: float, visits: Sequence[EngineVisit], weights: Sequence[float]) -> str:
    """Why the stored requests are not all that there were, as a sentence; "" where nothing says so.

    kept: the most requests that one stands for by its tracestate.
    """
    if kept > 1:
        return f"Traces were sampled: one stands for up to {kept:.3g} requests, by its tracestate."
    others = compare_others(visits, weights)
    if others is None or not others.is_partial:
        return ""
    return (
        f"Only a part of the requests is stored: their steps have {others.recorded:.0f} tokens of other "
        f"requests, the stored ones account for {others.expected:.0f}. If slow traces are kept first (tail "
        "sampling), percentiles are those of the kept ones."
    )


def describe_reading(coverage: Coverage) -> str:
    """What was read of a window, as a sentence."""
    counts, read = coverage.counts, coverage.read
    if not coverage.requests:
        return "No requests."
    begin, end = (_to_moment(each) for each in (coverage.first_ns, coverage.last_ns))
    text = f"{coverage.requests} requests from {begin:%Y-%m-%d %H:%M:%S} to {end:%H:%M:%S}"
    chosen = " and ".join(
        f"all {counts[stratum]} {name}"
        if read[stratum] == counts[stratum]
        else f"{read[stratum]} of {counts[stratum]} {name}, at random"
        for stratum, name in ((LATE, "late ones"), (OTHER, "others"))
    )
    parts = ["all read" if coverage.is_whole else f"read: {chosen}"]
    parts += [
        f"{count} {name}"
        for count, name in (
            (counts[LOST], "without a first token"),
            (counts[REFUSED], "refused"),
            (coverage.incomplete, "incomplete, left out"),
        )
        if count
    ]
    return f"{text}; {'; '.join(parts)}."


def _to_moment(ns: int) -> datetime:
    return datetime.fromtimestamp(ns / 1e9).astimezone()


def describe_coverage(coverage: Coverage) -> dict[str, Any]:
    """The JSON of what was read of a window."""
    counts, read = coverage.counts, coverage.read
    return {
        "requests": coverage.requests,
        "read": sum(read.values()),
        "from": _to_moment(coverage.first_ns).isoformat() if coverage.requests else None,
        "to": _to_moment(coverage.last_ns).isoformat() if coverage.requests else None,
        "late": {"requests": counts[LATE], "read": read[LATE]},
        "others": {"requests": counts[OTHER], "read": read[OTHER]},
        "lost": {"requests": counts[LOST], "read": read[LOST]},
        "left_out": {"incomplete": coverage.incomplete, "refused": counts[REFUSED]},
        "sampling": coverage.sampling or None,
    }


def _track(requests: Iterable[Any], label: str, total: int) -> Iterable[Any]:
    """The same requests, with a bar on a terminal's stderr: a bar in a log is noise."""
    console = Console(stderr=True)
    return progress.track(
        requests, label, total, console=console, transient=True, disable=not console.is_terminal
    )


@contextmanager
def track_replays(total: int) -> Iterator[Callable[[int], None]]:
    """A bar of `total` replays on a terminal; what it gives is called with the number of further ones."""
    console = Console(stderr=True)
    with progress.Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("replaying", total=total)
        yield lambda done: bar.update(task, advance=done)


def make_span_finder(opened: BreakdownSource) -> FindSpans:
    """A function that reads all spans of a trace, by its ID; () when there is none."""

    def find_spans(trace_id: str) -> Sequence[StoredSpan]:
        trace = opened.find_trace(trace_id)
        return trace.spans if trace else ()

    return find_spans
