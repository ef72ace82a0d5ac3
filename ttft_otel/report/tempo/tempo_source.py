# SPDX-License-Identifier: Apache-2.0
"""Requests from Tempo, as DatabaseReader gives them from the embedded store: the same objects.

Tempo's search has no cursor: windows of time are halved until each has fewer traces than the limit of a
search, newest first, and no more traces are fetched than the answer needs. Of a window that is sampled the
searches select what tells its requests' TTFT, and only those that are chosen are fetched; of traces that
other products have told, all, up to a bound. No trace is fetched twice: its bytes are kept, compressed, for
the holders and the replay of the same requests. breakdown_source.py opens it.
"""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from ttft_otel.model.names import keys
from ttft_otel.report.assemble.request_assembly import assemble_requests
from ttft_otel.report.foreign import products
from ttft_otel.report.receive import otlp_decoder
from ttft_otel.report.report_types import (
    LATE,
    LOST,
    OTHER,
    REFUSED,
    TTFT_SPAN_NAMES,
    Coverage,
    ReadRequest,
    Request,
    SamplePlan,
    SourceChoice,
    StoredSpan,
    WindowSample,
    count_late,
)
from ttft_otel.report.store.database_reader import (
    MAX_REQUESTS,
    RequestFilter,
    StoredTrace,
    build_stored_trace,
    get_time_order,
    list_possible_ids,
)
from ttft_otel.report.store.span_store import MAX_TRACE_SPANS
from ttft_otel.report.tempo.tempo_client import (
    FoundTrace,
    SearchTooLargeError,
    TempoClient,
    TempoError,
    is_trace_id,
)

SEARCH_LIMIT: Final = 1000  # traces of one search
MAX_SECOND_LIMIT: Final = 20_000  # of a search in one second, which cannot be divided
MAX_PARALLEL: Final = 8  # traces that are fetched at the same time
MAX_WHOLE_TRACES: Final = 5000  # fetched for a window, where a search does not tell their requests
# Of those that it tells without an outermost span; behind some routers all are so, and stay as they are told.
MAX_PARTIAL_TRACES: Final = 500
MAX_KEPT_BYTES: Final = 64 << 20  # compressed, of traces that were fetched; one has about 3 kB
# How far back a search without a window goes; Tempo's own retention is two weeks by default.
MAX_LOOKBACK_S: Final = 14 * 86_400

Answer = TypeVar("Answer")
# (what is done, how many are done, of how many; 0 where that is not known)
ProgressReporter = Callable[[str, int, int], None]
# Of the search backwards from now; each further window is twice as long.
FIRST_WINDOW_S: Final = 900
MAX_WINDOW_S: Final = 86_400  # of one search
# Of a trace in a search; Tempo's own limit by default. Traces with more are fetched.
OUTLINE_SPANS: Final = 100
# What tells which requests a trace has, and how long they took.
OUTLINE_KEYS: Final = (
    keys.TOTAL_US, keys.OUTERMOST, keys.ROLE, keys.REQUEST_ID, keys.MODEL, keys.ERROR_TYPE,
)  # fmt: skip
INCOMPLETE: Final = "incomplete"


@dataclass(frozen=True, slots=True)
class RequestOutline:
    """What a search tells of a request: when it began, how long it took, and what became of it."""

    trace_id: str
    start_ns: int
    ttft_us: int
    stratum: str  #: LOST, REFUSED, INCOMPLETE; OTHER with a first token, also where that was late


class TempoSource:
    """Queries on Tempo, one after another; close() ends its connections.

    report_progress: called while traces are searched and fetched; with "" when that is over.
    report_note: gets what the reader of an answer should know, for example that Tempo does not keep all of
        the window.
    """

    def __init__(
        self,
        choice: SourceChoice,
        report_progress: ProgressReporter = lambda text, done, total: None,
        report_note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._client = TempoClient(choice)
        self._report_progress = report_progress
        self._report_note = report_note
        self._allowed = MAX_SECOND_LIMIT  # traces of one search, as far as Tempo has said
        self._kept: dict[str, bytes] = {}  # by trace ID, the oldest first
        self._kept_bytes = 0
        # Of its own, because the commands are not asynchronous.
        self._loop = asyncio.new_event_loop()
        try:
            self._run(self._open())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the connections; idempotent."""
        if not self._loop.is_closed():
            self._loop.run_until_complete(self._client.close())
            self._loop.close()

    def list_latest(self, wanted: RequestFilter) -> list[Request]:
        return self._run(
            self._list_latest(
                wanted, _build_query(wanted), lambda request: _matches_filter(request, wanted)
            )
        )

    def sample_window(
        self, wanted: RequestFilter, slo_us: int = 0, limits: Mapping[str, int] | None = None
    ) -> WindowSample:
        """As DatabaseReader.sample_window(), of traces with all of their requests. Raises TempoError."""
        outlines = self._run(self._outline_window(wanted))
        if wanted.last:
            outlines = sorted(outlines, key=lambda each: -each.start_ns)[: wanted.last]
        lengths = sorted((each.ttft_us for each in outlines if each.stratum == OTHER), reverse=True)
        if not slo_us:
            late = count_late(len(lengths))
            slo_us = lengths[late] if late < len(lengths) else -1
        strata = [
            LATE if each.stratum == OTHER and each.ttft_us > slo_us else each.stratum
            for each in outlines
        ]
        # A trace counts as what is most wanted of it.
        of_trace: dict[str, str] = {}
        for rank in (REFUSED, LOST, OTHER, LATE):
            for outline, stratum in zip(outlines, strata, strict=True):
                if stratum == rank:
                    of_trace[outline.trace_id] = rank
        traces = {rank: [name for name, own in of_trace.items() if own == rank] for rank in
                  (LATE, OTHER, LOST, REFUSED)}  # fmt: skip
        plan = SamplePlan({rank: len(some) for rank, some in traces.items()}, limits)
        chosen = {
            traces[rank][at]: plan.get_weight(rank)
            for rank in traces
            for at in plan.choose_positions(rank)
        }
        counts = Counter(strata)
        read = Counter(
            stratum
            for outline, stratum in zip(outlines, strata, strict=True)
            if outline.trace_id in chosen
        )
        starts = [each.start_ns for each in outlines] or [0]
        coverage = Coverage(
            {rank: counts[rank] for rank in traces}, {rank: read[rank] for rank in traces},
            counts[INCOMPLETE], min(starts), max(starts), slo_us,
        )  # fmt: skip
        oldest_ns = min(starts) if wanted.last else 0
        return WindowSample(coverage, self._read_chosen(chosen, wanted, oldest_ns))

    def _read_chosen(
        self, chosen: Mapping[str, float], wanted: RequestFilter, oldest_ns: int
    ) -> Iterator[ReadRequest]:
        """The requests of these traces, which are given with what each stands for."""
        names = sorted(chosen)
        for start in range(0, len(names), MAX_PARALLEL):
            some = names[start : start + MAX_PARALLEL]
            for name, spans in zip(some, self._run(self._fetch_all(some)), strict=True):
                stored = build_stored_trace(name, spans)
                for request in stored.requests:
                    if _matches_filter(request, wanted) and request.start_ns >= oldest_ns:
                        yield ReadRequest(request, stored.spans, chosen[name])

    def find_request(self, request_id: str) -> Request | None:
        for candidate in list_possible_ids(request_id):
            if len(candidate) == 32 and (trace := self.find_trace(candidate)):
                for request in trace.requests:
                    if request.request_id == candidate:
                        return request
            if found := self._run(self._find_request(candidate)):
                return found
        return None

    def find_trace(self, trace_id: str) -> StoredTrace | None:
        if not is_trace_id(trace_id):
            return None
        spans = self._run(self._fetch_spans(trace_id.lower()))
        return build_stored_trace(trace_id.lower(), spans) if spans else None

    def list_models(self) -> list[str]:
        return sorted({each.model for each in self.list_latest(RequestFilter()) if each.model})

    def _run(self, asked: Coroutine[Any, Any, Answer]) -> Answer:
        try:
            return self._loop.run_until_complete(asked)
        finally:
            self._report_progress("", 0, 0)

    async def _open(self) -> None:
        await self._client.open()
        if self._client.is_exposed:
            self._report_note(
                f"the credentials for {self._client.shown_url} are sent without encryption; use https://"
            )
        await self._client.read_version()

    async def _find_request(self, request_id: str) -> Request | None:
        named = (keys.REQUEST_ID, *products.REQUEST_ID_ATTRIBUTES)
        query = f"{{ {_match_any(named, request_id)} }}"
        found = await self._list_latest(
            RequestFilter(last=1), query, lambda request: request.request_id == request_id
        )
        return found[0] if found else None

    async def _list_latest(
        self, wanted: RequestFilter, query: str, check: Callable[[Request], bool]
    ) -> list[Request]:
        last = min(max(wanted.last, 1), MAX_REQUESTS)
        found: dict[tuple[str, int], Request] = {}
        async for begin_s, fresh in self._search_traces(query, wanted):
            await self._fetch_newest(fresh, last, check, found)
            # A trace may reach into a later window, its requests then are older than this one's begin.
            if sum(request.start_ns >= begin_s * 10**9 for request in found.values()) >= last:
                break
        newest = sorted(found.values(), key=lambda request: -request.start_ns)
        return newest[:last]

    async def _outline_window(self, wanted: RequestFilter) -> list[RequestOutline]:
        """The requests that match, as searches tell them, the newest first."""
        selected = ", ".join(["status", *(f"span.{name}" for name in OUTLINE_KEYS)])
        query = f"{_build_query(wanted)} | select({selected})"
        found: list[RequestOutline] = []
        fetched = read_again = 0
        async for begin_s, fresh in self._search_traces(query, wanted, OUTLINE_SPANS):
            untold = [each.trace_id for each in fresh if not _is_told(each)]
            fetched += len(untold)
            if fetched > MAX_WHOLE_TRACES:
                raise TempoError(
                    f"more than {MAX_WHOLE_TRACES} traces have to be read whole, because other products have "
                    "told them, or they have very many spans; ask for a shorter window, or for one model"
                )
            # Of a trace that came in parts a search may tell one alone, without the outermost span.
            partial = [
                each.trace_id for each in fresh if _is_told(each) and not _has_outermost(each)
            ]
            untold += partial[: MAX_PARTIAL_TRACES - read_again]
            read_again = min(read_again + len(partial), MAX_PARTIAL_TRACES)
            trunks: dict[str, Sequence[StoredSpan]] = {each.trace_id: each.spans for each in fresh}
            for start in range(0, len(untold), MAX_PARALLEL):
                self._report_progress("reading traces from Tempo", start, len(untold))
                some = untold[start : start + MAX_PARALLEL]
                for name, whole in zip(some, await self._fetch_all(some), strict=True):
                    # What the search told stays where Tempo has dropped the trace meanwhile.
                    if not whole and name in partial:
                        continue
                    above = {span.span_id: span.parent_id for span in whole}
                    trunks[name], _ = products.make_trunks(whole, above)
            for name, spans in trunks.items():
                found += _outline_trace(name, spans, wanted)
            # A trace may reach into a later window, its requests then are older than this one's begin.
            newest = sum(each.start_ns >= begin_s * 10**9 for each in found) if wanted.last else 0
            if wanted.last and newest >= wanted.last:
                break
        return found

    async def _search_traces(
        self, query: str, wanted: RequestFilter, spans: int = 1
    ) -> AsyncIterator[tuple[int, list[FoundTrace]]]:
        """The traces of each window of time, the newest first, with its begin; each trace once."""
        # A search with an end in the future finds what comes meanwhile, too.
        until_s = -(-wanted.until_ns // 10**9) if wanted.until_ns else int(time.time()) + 2
        since_s = wanted.since_ns // 10**9 if wanted.since_ns else until_s - MAX_LOOKBACK_S
        if wanted.since_ns:
            kept_s = await self._client.read_retention_s()
            if kept_s and since_s < time.time() - kept_s - 60:
                self._report_note(
                    f"the window begins before what Tempo keeps, {kept_s / 3600:.0f} h (block_retention): "
                    "requests before that are missing"
                )
        seen: set[str] = set()
        # The newest window is the last one; what is halved puts two in its place.
        windows = _list_windows(since_s, until_s)[::-1]
        while windows:
            begin_s, end_s = windows.pop()
            self._report_progress("searching Tempo", len(seen), 0)
            traces = await self._search_window(query, begin_s, end_s, windows, spans)
            if traces is None:
                continue
            fresh = [trace for trace in traces if trace.trace_id not in seen]
            seen.update(trace.trace_id for trace in fresh)
            yield begin_s, fresh

    async def _search_window(
        self, query: str, begin_s: int, end_s: int, windows: list[tuple[int, int]], spans: int
    ) -> list[FoundTrace] | None:
        """The traces of one window; None where it was put back as two halves."""
        middle_s = (begin_s + end_s) // 2
        is_divisible = begin_s < middle_s
        limit = min(SEARCH_LIMIT if is_divisible else MAX_SECOND_LIMIT, self._allowed)
        try:
            traces, is_complete = await self._client.search(query, begin_s, end_s, limit, spans)
        except SearchTooLargeError as error:
            if error.allowed >= limit or not (error.allowed or is_divisible):
                raise
            if error.allowed:
                self._allowed = error.allowed
                windows.append((begin_s, end_s))
            else:
                windows += [(begin_s, middle_s), (middle_s, end_s)]
            return None
        if not is_complete:
            raise TempoError(
                f"Tempo searched only a part of {_format_window(begin_s, end_s)}; figures would be of "
                "that part. Try again, or ask for a shorter window; its log says what failed"
            )
        if len(traces) < limit:
            return traces
        if not is_divisible:
            raise TempoError(
                f"{limit} traces or more in one second, {_format_window(begin_s, end_s)}, which a search "
                "cannot tell apart; ask for one model, or raise max_result_limit of Tempo"
            )
        windows += [(begin_s, middle_s), (middle_s, end_s)]
        return None

    async def _fetch_newest(
        self,
        traces: Sequence[FoundTrace],
        last: int,
        check: Callable[[Request], bool],
        found: dict[tuple[str, int], Request],
    ) -> None:
        """Add requests of `traces` until no trace that is left can have one of the newest `last`."""
        # By end: a request begins before its trace ends, so that the rest has only older ones.
        ordered = sorted(traces, key=lambda trace: -trace.end_ns)
        for start in range(0, len(ordered), MAX_PARALLEL):
            some = ordered[start : start + MAX_PARALLEL]
            if sum(request.start_ns > some[0].end_ns for request in found.values()) >= last:
                return
            self._report_progress("reading traces from Tempo", start, len(ordered))
            answers = await self._fetch_all([each.trace_id for each in some])
            for trace, its_spans in zip(some, answers, strict=True):
                stored = build_stored_trace(trace.trace_id, its_spans)
                found.update(
                    ((trace.trace_id, number), request)
                    for number, request in enumerate(stored.requests)
                    if check(request)
                )

    async def _fetch_all(self, trace_ids: Sequence[str]) -> list[list[StoredSpan]]:
        """The spans of these traces, all of which are fetched at once."""
        answers = await asyncio.gather(
            # All are waited for, so that none goes on after the first failure.
            *(self._fetch_spans(each) for each in trace_ids),
            return_exceptions=True,
        )
        found: list[list[StoredSpan]] = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            found.append(answer)
        return found

    async def _fetch_spans(self, trace_id: str) -> list[StoredSpan]:
        """A trace's spans in the order of the embedded store, each once; [] when Tempo has none."""
        body = await self._fetch_once(trace_id)
        if body is None:
            return []
        try:
            batch = otlp_decoder.decode_export(body)
        except otlp_decoder.OtlpDecodeError as error:
            raise TempoError(
                f"trace {trace_id} is not in Tempo's form: {error}; is --tempo the address of Tempo?"
            ) from error
        # Tempo stores what an exporter sent twice twice.
        unique = {span.span_id: span for span in reversed(batch.spans)}
        return sorted(unique.values(), key=get_time_order)[:MAX_TRACE_SPANS]

    async def _fetch_once(self, trace_id: str) -> bytes | None:
        """A trace's bytes, from those that are kept where it was fetched before."""
        if kept := self._kept.get(trace_id):
            return zlib.decompress(kept)
        body = await self._client.fetch_trace(trace_id)
        if body is not None:
            self._kept[trace_id] = zlib.compress(body, 1)
            self._kept_bytes += len(self._kept[trace_id])
        while self._kept_bytes > MAX_KEPT_BYTES:
            self._kept_bytes -= len(self._kept.pop(next(iter(self._kept))))
        return body


def _is_told(trace: FoundTrace) -> bool:
    """Whether a search has told what the requests of a trace are made of; not of those of other products."""
    return trace.matched <= len(trace.spans) and all(each.is_ttft_span for each in trace.spans)


def _has_outermost(trace: FoundTrace) -> bool:
    """Whether a search has told the span that a request's first token is counted by."""
    return any(each.attributes.get(keys.OUTERMOST) for each in trace.spans)


def _outline_trace(
    trace_id: str, spans: Sequence[StoredSpan], wanted: RequestFilter
) -> list[RequestOutline]:
    """The requests of a trace that match, of its `ttft` and `encode` spans alone."""
    # Whose leg a span is, then only its time can tell.
    parents = {span.span_id: "unknown" for span in spans}
    found = []
    for request in assemble_requests(trace_id, spans, parents):
        if request.error:
            stratum = REFUSED if keys.is_refusal(request.error) else LOST
        else:
            stratum = INCOMPLETE if request.pending else OTHER
        if _matches_filter(request, wanted):
            found.append(RequestOutline(trace_id, request.start_ns, request.ttft_us, stratum))
    return found


def _build_query(wanted: RequestFilter) -> str:
    """TraceQL for the traces that can have a request of `wanted`; _matches_filter() decides."""
    # Not only outermost ones: behind some routers a request has none, and is pending.
    named = " || ".join(f'name = "{name}"' for name in TTFT_SPAN_NAMES)
    conditions = [f"(({named}) && span.{keys.TOTAL_US} >= 0)"]
    conditions += [f"span.{name} != nil" for name in products.TOTAL_ATTRIBUTES]
    query = " || ".join(conditions)
    if wanted.model:
        query = f"({query}) && ({_match_any(products.MODEL_ATTRIBUTES, wanted.model)})"
    return f"{{ {query} }}"


def _match_any(names: Sequence[str], text: str) -> str:
    """TraceQL for a span of which one of these attributes is `text`."""
    # Go's quoted strings know JSON's escapes; \u keeps what is not ASCII.
    return " || ".join(f"span.{name} = {json.dumps(text)}" for name in names)


def _matches_filter(request: Request, wanted: RequestFilter) -> bool:
    """Whether `request` meets all conditions of `wanted`, as the embedded store decides it."""
    return (
        (not wanted.model or request.model == wanted.model)
        and (not wanted.role or wanted.role in request.roles)
        and {
            "": True,
            "any": bool(request.error),
            "none": not request.error,
        }.get(wanted.error, request.error == wanted.error)
        and request.ttft_us >= wanted.min_us
        and request.start_ns >= wanted.since_ns
        and (not wanted.until_ns or request.start_ns < wanted.until_ns)
    )


def _list_windows(since_s: int, until_s: int) -> list[tuple[int, int]]:
    """Windows from the newest to the oldest that fill [since_s, until_s]; each is at most a day."""
    windows = []
    length_s = FIRST_WINDOW_S
    while until_s > since_s:
        begin_s = max(since_s, until_s - length_s)
        windows.append((begin_s, until_s))
        until_s, length_s = begin_s, min(2 * length_s, MAX_WINDOW_S)
    return windows


def _format_window(begin_s: int, end_s: int) -> str:
    ends = (time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(end)) for end in (begin_s, end_s))
    return "..".join(ends)
