# SPDX-License-Identifier: Apache-2.0
"""Requests and traces as JSON: the answers of /ttft_report and /api, `report --json`, and Perfetto's traces.

Answers' times are in milliseconds, except those named _ns. A document for Perfetto is in the Trace Event
format, which its UI and chrome://tracing open: processes are tracks, spans are slices, and arrows lead from
a call to what it called, and from the requests that held a queue to the one that waited in it. Requests that
share an engine's step have the same forward or encoder pass in their stages; steps without a traced
request's prompt or media items left no record, and are not drawn. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from heapq import heappop, heappush
from typing import Any, Final

from ttft_otel.model.names import keys, span_names
from ttft_otel.model.timing import ServerTiming, build_ttft_report, to_ms
from ttft_otel.report.assemble.request_assembly import WaterfallRow, build_rows
from ttft_otel.report.assemble.summary import (
    Recomputed,
    Summary,
    SummaryLine,
    collect_recomputed,
)
from ttft_otel.report.receive.otlp_decoder import read_holders
from ttft_otel.report.report_types import SPAN_KINDS, Leg, Request, StoredSpan
from ttft_otel.report.store.database_reader import StoredTrace

Event = dict[str, Any]
Place = tuple[int, int]  # the number of a process, and of a track in it
# Processes from top to bottom, as a request passes them; others come before them: they call us.
ROLE_ORDER: Final = ("router", "encode", "prefill", "prefill_decode", "decode")

# Numbers that no request's track reaches.
STEP_TRACKS: Final = {"encode": 1_000_001, "forward": 1_000_002}
PASSES: Final = {"encoder.compute": "encode", "prefill.compute": "forward"}
MAX_REQUESTS: Final = 16  # of a step, that are named


def build_report(request: Request) -> dict[str, Any]:
    """The TTFT report of `request`; of several legs of one role it has the slowest."""
    # The slowest leg is the one that the first token waited for.
    by_role = {
        role: ServerTiming(leg.stages, leg.unattributed_us, leg.ttft_us)
        for role in request.roles
        if (leg := request.find_leg(role))
    }
    # The router's own sums, which contain what no leg can see.
    combined = ServerTiming(request.stages, request.unattributed_us, request.ttft_us)
    return build_ttft_report(request.request_id, by_role, combined)


def describe_request(assembled: Request) -> dict[str, Any]:
    """One request with the breakdown of each of its servers; no spans."""
    return {
        "request_id": assembled.request_id,
        "trace_id": assembled.trace_id,
        "start_ns": assembled.start_ns,
        "model": assembled.model,
        "roles": list(assembled.roles),
        "ttft_ms": to_ms(assembled.ttft_us),
        "unattributed_ms": to_ms(assembled.unattributed_us),
        "stages": {name: to_ms(value) for name, value in assembled.stages.items()},
        # Beside the sums, never in them: another process measured it.
        "before": describe_before(assembled),
        "recomputed": list_recomputed(collect_recomputed([assembled])),
        "streaming": assembled.streaming,
        # null and not "": readers ask whether there is one.
        "error": assembled.error or None,
        "died_in": assembled.died or None,
        # Legs of it may still arrive: the figures can grow.
        "pending": assembled.pending,
        "closed": assembled.closed,
        "legs": [{"role": part.role, **describe_leg(part)} for part in assembled.legs],
    }


def describe_before(assembled: Request) -> dict[str, Any] | None:
    """Time in a foreign router before our spans, which is not part of the sums.

    None when no span of such a router is stored.
    """
    if assembled.before is None:
        return None
    error_us = assembled.before.error_us
    return {
        "ms": to_ms(assembled.before.us),
        "error_ms": None if error_us is None else to_ms(error_us),
        "caller": assembled.before.caller,
        "span_id": assembled.before.span_id,
    }


def list_recomputed(items: Recomputed) -> list[dict[str, Any]]:
    """The instances that encoded media items again, those with most of them first; [] if there are none."""
    return [
        {"role": role, "instance": instance, "items": count}
        for (role, instance), count in items.most_common()
    ]


def describe_leg(server_leg: Leg) -> dict[str, Any]:
    return {
        "service": server_leg.service,
        "instance": server_leg.instance,
        "ttft_ms": to_ms(server_leg.ttft_us),
        "unattributed_ms": to_ms(server_leg.unattributed_us),
        "stages": {name: to_ms(value) for name, value in server_leg.stages.items()},
        "reasons": {
            group: {name: to_ms(value) for name, value in reasons.items()}
            for group, reasons in server_leg.reasons.items()
        },
        "held": {kind: to_ms(value) for kind, value in server_leg.held.items()},
        "clock_error_ms": to_ms(server_leg.clock_error_us),
        "foreign": server_leg.foreign,
    }


def describe_trace(stored_trace: StoredTrace) -> dict[str, Any]:
    """A trace: its requests with their legs, and its spans in the order of the waterfall."""
    return {
        "trace_id": stored_trace.trace_id,
        "requests": [describe_request(one) for one in stored_trace.requests],
        "spans": _describe_spans(stored_trace),
    }


def describe_one(request: Request, stored_trace: StoredTrace) -> dict[str, Any]:
    """The report of one request, with the request itself and all spans of its trace."""
    return {
        **build_report(request),
        "request": describe_request(request),
        "spans": _describe_spans(stored_trace),
    }


def describe_summary(totals: Summary) -> dict[str, Any]:
    """Percentiles of TTFT and stages; summary.py defines them."""
    return {
        "count": totals.count,
        "failed": totals.failed,
        "left": totals.left,
        "refused": totals.refused,
        "closed": totals.closed,
        "ttft": _list_numbers(totals.ttft),
        "stages": {line.name: _list_numbers(line) for line in totals.stages},
        "before": _list_numbers(totals.before) if totals.before else None,
        "recomputed": list_recomputed(totals.recomputed),
    }


def _list_numbers(line: SummaryLine) -> dict[str, Any]:
    # The name is the key already.
    return {name: value for name, value in asdict(line).items() if name != "name"}


def _describe_spans(stored_trace: StoredTrace) -> list[dict[str, Any]]:
    return [
        {
            **asdict(span),
            # Words as in OpenTelemetry's text; numbers differ between its formats.
            "kind": SPAN_KINDS[span.kind] if span.kind < len(SPAN_KINDS) else "unspecified",
        }
        for span in (row.span for row in build_rows(stored_trace.spans))
    ]


@dataclass(slots=True)
class Process:
    """The tracks of one `service.instance.id`."""

    number: int
    name: str
    role: str = ""
    #: Slices on one track nest, those that overlap need another one: of each, numbered from 1, the spans that
    #: contain the place reached so far, outermost first. What has ended is removed when a track is looked at.
    tracks: list[list[StoredSpan]] = field(default_factory=list)
    #: Heap of the numbers of tracks on which no span is open.
    free: list[int] = field(default_factory=list)
    #: Heap of when the outermost span of each of the others ends, with its number.
    busy: list[tuple[int, int]] = field(default_factory=list)
    step_words: set[str] = field(default_factory=set)  #: kinds of engine steps that it has

    def place_span(self, span: StoredSpan, parent: StoredSpan | None, track: int) -> int:
        """The track of `span`: its parent's, `track`, where it nests there, else the first that is free.

        track: 0 where the parent is not in this process.
        """
        if parent and track and span.end_ns <= parent.end_ns:
            open_spans = self.tracks[track - 1]
            while open_spans and open_spans[-1].end_ns <= span.start_ns:
                open_spans.pop()
            # A sibling that runs at the same time would contain it in the drawing: then not on this track.
            if open_spans and open_spans[-1] is parent:
                open_spans.append(span)
                return track
        while self.busy and self.busy[0][0] <= span.start_ns:
            heappush(self.free, heappop(self.busy)[1])
        if not self.free:
            self.tracks.append([])
        number = heappop(self.free) if self.free else len(self.tracks)
        self.tracks[number - 1] = [span]
        heappush(self.busy, (span.end_ns, number))
        return number


class TraceBuilder:
    """Collects the events of one document; times are microseconds since `start_ns`."""

    def __init__(self, start_ns: int) -> None:
        self.start_ns = start_ns
        self.events: list[Event] = []
        self.processes: dict[str, Process] = {}
        self.places: dict[tuple[str, str], Place] = {}  # of each span that is drawn

    def add_row(self, trace_id: str, row: WaterfallRow, parent: StoredSpan | None) -> None:
        """Draw the span of `row`; rows come in the order of their start.

        parent: its stored parent span. An arrow leads from there when the two are not nested.
        """
        span = row.span
        process = self.find_process(span, row.role)
        above = self.places.get((trace_id, parent.span_id)) if parent else None
        track = above[1] if above and above[0] == process.number else 0
        place = process.number, process.place_span(span, parent, track)
        self.places[trace_id, span.span_id] = place
        args = {"trace_id": trace_id, "span_id": span.span_id, **span.attributes}
        self.add_slice(row.stage or span.name, row.what, span, place, args)
        if parent and above and above != place:
            self.add_arrow(parent, above, span, place)

    def add_holders(self, spans: Mapping[tuple[str, str], StoredSpan]) -> None:
        """Arrows from the requests that held a queue to the end of its slice, where both are drawn.

        spans: all drawn ones, by trace and span ID.
        """
        for (trace_id, span_id), span in spans.items():
            for holder in read_holders(span.attributes):
                cause = (holder.trace_id, holder.span_id)
                if cause in self.places:
                    start, end = self.places[cause], self.places[trace_id, span_id]
                    self.add_arrow(spans[cause], start, span, end, word="held", at_end=True)

    def add_steps(self, steps: Iterable[StoredStep]) -> None:
        """The engine's steps, on a track of their own below each process's requests."""
        for step in steps:
            process = self.find_process(step.span, "")
            args = {
                "traced requests": step.requests,
                "request ids": step.request_ids,
                "traced prompt tokens": step.prompt_tokens,
                "tokens of the step": step.step_tokens,
            }
            place = process.number, STEP_TRACKS[step.word]
            self.add_slice(step.word, "engine step", step, place, args)
            process.step_words.add(step.word)

    def add_slice(
        self, name: str, kind: str, shown: StoredSpan | StoredStep, place: Place, args: Event
    ) -> None:
        """A slice as long as `shown`."""
        self.events.append(
            {
                "ph": "X", "name": name, "cat": kind,
                "ts": self.to_us(shown.start_ns),
                "dur": max(shown.end_ns - shown.start_ns, 0) / 1000,
                "pid": place[0], "tid": place[1], "args": args,
            }
        )  # fmt: skip

    def add_arrow(
        self,
        cause: StoredSpan,
        start: Place,
        effect: StoredSpan,
        end: Place,
        word: str = "call",
        at_end: bool = False,
    ) -> None:
        """An arrow from the slice of `cause` to the slice of `effect`: its start, or its end.

        word: what it stands for.
        """
        number = len(self.events)  # any number that no other arrow has
        # The last nanosecond that is inside of the slice.
        until_ns = max(effect.start_ns, effect.end_ns - 1) if at_end else effect.start_ns
        # An arrow must begin inside of its slice, also where two hosts' clocks disagree.
        begin_ns = min(max(effect.start_ns, cause.start_ns), cause.end_ns)
        for kind, at_ns, (process, track) in (("s", begin_ns, start), ("f", until_ns, end)):
            self.events.append(
                {
                    "ph": kind, "id": number, "name": word, "cat": word, "ts": self.to_us(at_ns),
                    "pid": process, "tid": track,
                    **({"bp": "e"} if kind == "f" else {}),
                }
            )  # fmt: skip

    def find_process(self, span: StoredSpan, role: str) -> Process:
        """The process that made `span`, by its instance; a service without one is one process."""
        instance = str(span.resource.get("service.instance.id") or "")
        key = f"{span.service} {instance}".strip() or "unknown service"
        process = self.processes.setdefault(key, Process(len(self.processes) + 1, key))
        process.role = process.role or role
        return process

    def to_us(self, at_ns: int) -> float:
        """Microseconds since the document's start; three decimals are nanoseconds."""
        return (at_ns - self.start_ns) / 1000

    def describe_processes(self) -> list[Event]:
        events: list[Event] = []
        for process in self.processes.values():
            title = f"{process.role} · {process.name}" if process.role else process.name
            rank = ROLE_ORDER.index(process.role) + 1 if process.role in ROLE_ORDER else 0
            events += [
                _make_label(process, 0, "process_name", {"name": title}),
                _make_label(process, 0, "process_sort_index", {"sort_index": rank}),
            ]
            for number in range(1, len(process.tracks) + 1):
                name = {"name": f"requests {number}"}
                events.append(_make_label(process, number, "thread_name", name))
            for word in sorted(process.step_words):
                name = {"name": f"engine steps: {word}"}
                events.append(_make_label(process, STEP_TRACKS[word], "thread_name", name))
        return events


def build_perfetto_trace(traces: Iterable[StoredTrace]) -> dict[str, Any]:
    """The document of `traces` for Perfetto, as a value for json.dump.

    Its times count from the earliest span; `otherData` has that moment in Unix nanoseconds.
    Raises ValueError when no trace has a span.
    """
    found = [(trace.trace_id, row) for trace in traces for row in build_rows(trace.spans)]
    if not found:
        raise ValueError("no span to draw")
    spans = {(trace_id, row.span.span_id): row.span for trace_id, row in found}
    # Over all traces: a track is free for the next request once the one before it has ended.
    found.sort(key=lambda each: (each[1].span.start_ns, -each[1].span.end_ns, each[1].depth))
    builder = TraceBuilder(found[0][1].span.start_ns)
    for trace_id, row in found:
        builder.add_row(trace_id, row, spans.get((trace_id, row.span.parent_id)))
    builder.add_holders(spans)
    builder.add_steps(find_steps(spans.values()))
    return {
        "displayTimeUnit": "ms",
        "otherData": {"start_unix_ns": str(builder.start_ns), "scope": span_names.SCOPE},
        "traceEvents": [*builder.describe_processes(), *builder.events],
    }


def _make_label(process: Process, track: int, kind: str, args: Event) -> Event:
    return {"ph": "M", "pid": process.number, "tid": track, "name": kind, "args": args}


@dataclass(slots=True)
class StoredStep:
    """One pass of an instance, and what is known of it; times in Unix nanoseconds."""

    word: str
    span: StoredSpan  #: one of the spans that show it
    start_ns: int
    end_ns: int
    requests: int = 0  #: number of traced requests in it
    prompt_tokens: int = 0  #: of those with one chunk
    step_tokens: int = 0  #: all of the step, 0 where no request has their number
    #: Of the first MAX_REQUESTS traced requests.
    request_ids: list[str] = field(default_factory=list)


def find_steps(spans: Iterable[StoredSpan]) -> list[StoredStep]:
    """The steps in `spans`, which may be of several traces, in the order of their begin."""
    known = {(span.trace_id, span.span_id): span for span in spans}
    passes: dict[tuple[str, str, str], list[StoredSpan]] = defaultdict(list)
    for span in known.values():
        if span.scope == span_names.SCOPE and span.name in PASSES and span.end_ns > span.start_ns:
            instance = str(span.resource.get("service.instance.id") or "")
            passes[span.service, instance, PASSES[span.name]].append(span)
    steps: list[StoredStep] = []
    for (_, _, word), found in passes.items():
        step: StoredStep | None = None
        for span in sorted(found, key=lambda each: each.start_ns):
            # Passes of one worker follow each other: those that overlap are one.
            if step is None or span.start_ns >= step.end_ns:
                step = StoredStep(word, span, span.start_ns, span.end_ns)
                steps.append(step)
            step.end_ns = max(step.end_ns, span.end_ns)
            _add_request(step, known.get((span.trace_id, span.parent_id)))
    return sorted(steps, key=lambda each: each.start_ns)


def _add_request(step: StoredStep, ttft: StoredSpan | None) -> None:
    """Count the request whose `ttft` span is above one that shows the step."""
    step.requests += 1
    if ttft is None or not ttft.is_ttft_span:
        return
    if len(step.request_ids) < MAX_REQUESTS:
        step.request_ids.append(str(ttft.attributes.get(keys.REQUEST_ID, "")))
    own, total = (
        ttft.attributes.get(name) for name in (keys.PREFILL_OWN_TOKENS, keys.PREFILL_STEP_TOKENS)
    )
    # Of several chunks only their sums are known.
    if (
        ttft.attributes.get(keys.PREFILL_CHUNKS) == 1
        and isinstance(own, int)
        and isinstance(total, int)
    ):
        step.prompt_tokens += own
        step.step_tokens = max(step.step_tokens, total)
