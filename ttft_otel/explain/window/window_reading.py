# SPDX-License-Identifier: Apache-2.0
"""Read a window's requests for a command: a progress bar, what was read of it.

Input: a source's sample of the window (SamplePlan). Output: WindowReading, whose requests have weights;
explain, diff and what-if say its coverage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import click
from rich import progress
from rich.console import Console

from ttft_otel.explain.whatif.replay_facts import (
    EngineVisit,
    Recording,
    collect_recording,
    find_unseen,
    read_request,
)
from ttft_otel.explain.window.request_facts import (
    LostRequests,
    RequestFacts,
    build_facts,
    count_lost,
    count_requests,
)
from ttft_otel.report.breakdown_source import BreakdownSource
from ttft_otel.report.report_types import (
    LATE,
    LOST,
    MAX_READ,
    OTHER,
    REFUSED,
    Coverage,
    ReadRequest,
    read_adjusted_count,
)
from ttft_otel.report.show.terminal import to_local_time
from ttft_otel.report.store.database_reader import MAX_REQUESTS, RequestFilter


@dataclass(frozen=True, slots=True)
class WindowReading:
    """What was read of a window: all late requests and a sample of the others, by their `weight`."""

    requests: Sequence[RequestFacts]  #: with a first token, oldest first
    lost: LostRequests  #: all without one
    coverage: Coverage
    failed: Sequence[ReadRequest] = ()  #: some of these

    @property
    def lost_share(self) -> float:
        """Of its requests, those without a first token."""
        return self.lost.total / max(self.lost.total + count_requests(self.requests), 1)


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
    requests: list[RequestFacts] = []
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
        built = build_facts(request, each.spans, group_by)
        weight = each.weight * stands_for
        requests.append(replace(built, weight=weight))
        replay = read_request(request, each.spans, sample.coverage.first_ns, {})
        if replay is not None:
            visits.append(replay.main)
            weights.append(weight)
    requests.sort(key=lambda each: each.start_ns)
    weight = sample.coverage.counts[LOST] / max(len(failed), 1)
    return WindowReading(
        requests,
        count_lost([each.request for each in failed], weight),
        replace(sample.coverage, sampling=_describe_sampling(kept, visits, weights)),
        failed,
    )


def leave_foreign_out(reading: WindowReading) -> WindowReading:
    """What was read without the requests that spans of other products tell: these do not say why."""
    told = Counter[str]()
    for each in reading.requests:
        told[each.foreign] += round(each.weight)
    ours = [each for each in reading.requests if not each.foreign]
    del told[""]
    return replace(reading, requests=ours, coverage=replace(reading.coverage, foreign=told))


def record_window(
    opened: BreakdownSource, wanted: RequestFilter, label: str = "reading requests"
) -> tuple[Recording, Coverage]:
    """The newest MAX_REQUESTS that match, each of them, for a replay. Raises StoreError."""
    # A replay needs all arrivals of a stretch of time: a sample of them would be another load.
    limits = {**dict.fromkeys(MAX_READ, MAX_REQUESTS), REFUSED: 0}
    sample = opened.sample_window(replace(wanted, last=MAX_REQUESTS), limits=limits)
    coverage = sample.coverage
    # To stderr, as the bar is: stdout may be JSON that a program reads.
    if coverage.requests == MAX_REQUESTS:
        click.echo(f"only the newest {MAX_REQUESTS} requests are replayed", err=True)
    found = collect_recording(
        _track(sample.requests, label, sum(coverage.read.values())), coverage.first_ns
    )
    return replace(found, unreadable=found.unreadable + coverage.incomplete), coverage


def _describe_sampling(kept: float, visits: Sequence[EngineVisit], weights: Sequence[float]) -> str:
    """Why the stored requests are not all that there were, as a sentence; "" where nothing says so.

    kept: the most requests that one stands for by its tracestate.
    """
    if kept > 1:
        return f"Traces were sampled: one stands for up to {kept:.3g} requests, by its tracestate."
    unseen = find_unseen(visits, weights)
    if unseen is None:
        return ""
    return (
        f"Only a part of the requests is stored: their steps have {unseen[0]:.0f} tokens of other "
        f"requests, the stored ones account for {unseen[1]:.0f}. If slow traces are kept first (tail "
        "sampling), percentiles are those of the kept ones."
    )


def describe_reading(coverage: Coverage) -> str:
    """What was read of a window, as a sentence."""
    counts, read = coverage.counts, coverage.read
    if not coverage.requests:
        return "No requests."
    begin, end = (to_local_time(each) for each in (coverage.first_ns, coverage.last_ns))
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
            *(
                (count, f"told by {name}, which does not say why, left out")
                for name, count in coverage.foreign.items()
            ),
        )
        if count
    ]
    return f"{text}; {'; '.join(parts)}."


def describe_coverage(coverage: Coverage) -> dict[str, Any]:
    """The JSON of what was read of a window."""
    counts, read = coverage.counts, coverage.read
    return {
        "requests": coverage.requests,
        "read": sum(read.values()),
        "from": to_local_time(coverage.first_ns).isoformat() if coverage.requests else None,
        "to": to_local_time(coverage.last_ns).isoformat() if coverage.requests else None,
        "late": {"requests": counts[LATE], "read": read[LATE]},
        "others": {"requests": counts[OTHER], "read": read[OTHER]},
        "lost": {"requests": counts[LOST], "read": read[LOST]},
        "left_out": {
            "incomplete": coverage.incomplete,
            "refused": counts[REFUSED],
            "foreign": sum(coverage.foreign.values()),
        },
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
