# SPDX-License-Identifier: Apache-2.0
"""Reports the first tokens and the ends of exchanges, after what they report has left the router.

endpoint.py says what has happened; the exporter gets Records of it, /ttft_report the breakdowns.
"""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from operator import itemgetter
from typing import Any, Final, TypeAlias

import msgspec

from ttft_otel.model import stages
from ttft_otel.model.breakdown import Breakdown
from ttft_otel.model.endpoints import find_route
from ttft_otel.model.names import keys, span_names
from ttft_otel.model.record import (
    RECORD_VERSION,
    Attributes,
    Call,
    Handover,
    HandoverCall,
    Piece,
    Record,
    Server,
    Ttft,
)
from ttft_otel.model.stages import ENCODE
from ttft_otel.model.timing import MAX_HEADER_CHARS, ServerTiming, build_ttft_report
from ttft_otel.router.timeline import Attempt, Exchange, RequestTimeline, partition_timeline
from ttft_otel.router.types import DEFAULT_POLICY, MODE_STRIP, Decision
from ttft_otel.tracing import clock
from ttft_otel.tracing.context import new_span_id
from ttft_otel.tracing.guard import Guard
from ttft_otel.tracing.measurement import encode_for_exporter

MAX_REPORTS: Final = 10_000  # requests kept for /ttft_report, about 2 KB each
MAX_CLIENT_STRING_CHARS: Final = 256  # characters of a string the client chose
MAX_REPORTED_CANDIDATES: Final = 16  # candidates of a decision on a span, the best ones
_ROUTE: Final = "router.route"
_NO_ATTRIBUTES: Final[Attributes] = {}  # shared, since Records are not modified

# When its request had its first token, in µs of CLOCK_MONOTONIC, and what /ttft_report shows.
DatedReport: TypeAlias = tuple[int, dict[str, Any]]
ReportFinder = Callable[[str, str], Awaitable[list[DatedReport]]]


class RecentReports(msgspec.Struct):
    """Breakdowns of the latest `max_reports` requests, by request ID and owner.

    An owner is who has sent the request, as admission.py tells by its key: "" where keys are not checked.
    Of several requests with one ID it is the newest; without an owner the first one, as nobody can tell
    whether the others are the same caller's.
    """

    max_reports: int = MAX_REPORTS
    ask_elsewhere: ReportFinder | None = None  # of other workers, with --workers
    # By owner and request ID: when it ended, its legs, and the whole.
    _reports: OrderedDict[tuple[str, str], tuple[int, dict[str, ServerTiming], ServerTiming]] = (
        msgspec.field(default_factory=OrderedDict)
    )

    def __len__(self) -> int:
        return len(self._reports)

    def add_report(
        self, owner: str, request_id: str, timeline: RequestTimeline, breakdown: Breakdown
    ) -> None:
        """Keep the breakdown of `request_id`: of each leg on the critical path, and of the whole."""
        key = owner, request_id
        if not owner and key in self._reports:
            return
        legs: dict[str, ServerTiming] = {}
        for attempt in (chain[-1] for chain in timeline.critical_path if chain):
            if (server_timing := attempt.read_server_timing()) is not None:
                legs[attempt.leg] = server_timing
        length_us = breakdown.end - breakdown.start
        totals = ServerTiming(breakdown.stages, breakdown.unattributed, length_us)
        self._reports[key] = (breakdown.end, legs, totals)
        # An ID that is used again is the newest: assignment alone would leave it in its old place.
        self._reports.move_to_end(key)
        while len(self._reports) > self.max_reports:
            self._reports.popitem(last=False)

    def get_report(self, owner: str, request_id: str) -> DatedReport | None:
        """The owner's report of `request_id`; None if it is unknown or no longer kept."""
        kept = self._reports.get((owner, request_id))
        return None if kept is None else (kept[0], build_ttft_report(request_id, *kept[1:]))

    async def find_report(self, owner: str, request_id: str) -> dict[str, Any] | None:
        """The same without its time, of all workers of this router."""
        own = self.get_report(owner, request_id)
        found = [] if own is None else [own]
        if self.ask_elsewhere is not None:
            found += await self.ask_elsewhere(owner, request_id)
        choose = max if owner else min
        return choose(found, key=itemgetter(0))[1] if found else None


class ExchangeReporter(msgspec.Struct):
    """Reports what happened in one turn of the event loop together, at its end.

    One after the other that costs half as much, as code and data of the last one are still in the
    processor's caches; and no first token of another request waits for it. send_record: takes a Record's
    bytes and never waits. counts_all: metrics count every request, sampled or not.
    """

    send_record: Callable[[bytes], bool]
    reports: RecentReports
    counts_all: bool
    _waiting: list[tuple[Exchange, int]] = []  # and when it ended, 0 for its first token

    def report(self, exchange: Exchange, is_over: bool) -> None:
        """It is over, however it ended; or the first token of a stream is out, before a crash can lose it."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._report_waiting)
        self._waiting.append((exchange, clock.now_us() if is_over else 0))

    def _report_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for exchange, ended_us in waiting:
            with Guard("router.end" if ended_us else "router.first"):
                if ended_us:
                    exchange.record_ended(ended_us)
                breakdown = None
                if exchange.has_ttft and not exchange.has_reported_ttft:
                    breakdown = partition_timeline(exchange.timeline)
                    # Whoever has no key must not push out the reports of those who have one.
                    if exchange.owner is not None:
                        self.reports.add_report(
                            exchange.owner, exchange.request_id, exchange.timeline, breakdown
                        )
                    exchange.record_ttft_reported()
                if breakdown is None and not ended_us:
                    continue
                # Of one that is not sampled metrics get its numbers alone.
                if exchange.trace_context.sampled or self.counts_all:
                    data = encode_for_exporter(build_record(exchange, breakdown, ended_us))
                    if data:  # else nothing to export or to count
                        self.send_record(data)


def build_record(exchange: Exchange, breakdown: Breakdown | None, ended_us: int = 0) -> Record:
    """Build a Record of the known parts: `breakdown` gives the TTFT, `ended_us` the server span."""
    context = exchange.trace_context
    arrived_us = exchange.timeline.arrived_us
    return Record(
        RECORD_VERSION,
        context.trace_id,
        context.span_id,
        context.parent_id,
        context.flags,
        context.tracestate,
        clock.to_wall_ns(arrived_us),
        "router",
        exchange.is_outermost,
        stages.SERVICE_NAMES["router"],
        exchange.request_id,
        attributes=_build_identity(exchange),
        ttft=None if breakdown is None else _build_ttft(exchange, breakdown),
        server=_build_server(exchange, ended_us - arrived_us) if ended_us else None,
        calls=tuple(_build_calls(exchange, ended_us)) if ended_us else (),
        handover=_build_handover(exchange) if ended_us else None,
    )


def _build_identity(exchange: Exchange) -> Attributes:
    attributes: Attributes = {keys.PROVIDER: keys.PROVIDER_VLLM}
    if exchange.operation:
        attributes[keys.OPERATION] = exchange.operation
        attributes[keys.STREAM] = exchange.wants_stream
    # Only names that an instance knows: it may become a label of metrics, of which each value is a series.
    if exchange.model and (exchange.is_model_listed or exchange.has_answered):
        attributes[keys.MODEL] = exchange.model[:MAX_CLIENT_STRING_CHARS]
    return attributes


def _build_ttft(exchange: Exchange, breakdown: Breakdown) -> Ttft:
    # Instance attributes by leg, so that a slow instance can be found.
    # Of a leg that was retried only the last attempt has stages; the others are router.retry.
    servers: dict[str, Attributes] = {
        chain[-1].leg: {keys.INSTANCE: f"{chain[-1].instance.host}:{chain[-1].instance.port}"}
        for chain in exchange.timeline.critical_path
        if chain
    }
    start = breakdown.start
    decisions = _describe_decisions(exchange.timeline)
    hold = exchange.timeline.hold
    held: Attributes = {} if hold is None else {keys.QUEUE_REASON: hold.reason}
    return Ttft(
        span_id=new_span_id(),
        name=span_names.TTFT,
        start=0,
        end=breakdown.end - start,
        stages=breakdown.stages,
        unattributed=breakdown.unattributed,
        clamped=breakdown.clamped,
        # A list within: a generator would be resumed for each piece.
        pieces=tuple(
            [
                Piece(
                    "stage",
                    name,
                    low - start,
                    high - start,
                    # our own stages have no server; of choices only the last piece tells
                    decisions.get(high, _NO_ATTRIBUTES)
                    if name == _ROUTE
                    else held
                    if name == stages.HOLD
                    else servers.get(_find_stage_leg(name), _NO_ATTRIBUTES),
                )
                for name, low, high in breakdown.pieces
            ]
        ),
        attributes=_describe_first_token(exchange),
        error="" if exchange.has_answered else exchange.error,
        died=exchange.failed_stage,
    )


def _describe_first_token(exchange: Exchange) -> Attributes:
    attributes: Attributes = {keys.STREAMING: exchange.is_streaming}
    mode, reason = exchange.first_token_outcome
    if mode:
        attributes[keys.FIRST_TOKEN] = mode
    if reason:
        attributes[keys.FIRST_TOKEN_REASON] = reason
    for chain in exchange.timeline.critical_path:
        load_entry = chain[-1].load_entry if chain else None
        if load_entry is None or load_entry.predicted_ttft_s is None or chain[-1].leg == ENCODE:
            continue
        attributes[keys.PREDICTED_MS] = round(load_entry.predicted_ttft_s * 1000)
        if load_entry.prediction_error_s is not None:
            attributes[keys.PREDICTION_ERROR_MS] = round(load_entry.prediction_error_s * 1000)
    return attributes


def _describe_decisions(timeline: RequestTimeline) -> dict[int, Attributes]:
    """Attributes of each routing decision, by the time when the request was sent."""
    decisions = {}
    for chain in timeline.critical_path:
        for attempt in chain:
            # round_robin adds nothing to the attributes of the call spans
            if attempt.policy != DEFAULT_POLICY and attempt.decision is not None:
                decisions[attempt.sent_us] = _describe_decision(attempt, attempt.decision)
    return decisions


def _describe_decision(attempt: Attempt, decision: Decision) -> Attributes:
    # seconds become microseconds: no doubles
    unit = 1 if decision.predicted_ttft_s is None else 1e6
    scores = decision.candidate_scores
    cached_tokens = decision.candidate_cached_tokens
    best_positions = sorted(range(len(scores)), key=scores.__getitem__)[:MAX_REPORTED_CANDIDATES]
    candidates = attempt.candidates
    attributes: Attributes = {
        keys.ROUTE_POLICY: attempt.policy,
        keys.ROUTE_REASON: decision.reason,
        keys.ROUTE_CANDIDATES: len(candidates),
    }
    if scores:
        attributes[keys.ROUTE_SCORE] = round(decision.score * unit)
        attributes[keys.ROUTE_SCORES] = tuple(
            round(scores[position] * unit) for position in best_positions
        )
        attributes[keys.ROUTE_INSTANCES] = tuple(
            f"{candidates[position].host}:{candidates[position].port}"
            for position in best_positions
        )
    if cached_tokens:
        attributes[keys.ROUTE_CACHED_TOKENS] = tuple(
            cached_tokens[position] for position in best_positions
        )
    return attributes


def _build_handover(exchange: Exchange) -> Handover | None:
    """The wait between P's token and D's next one; None without one, or if it has no end."""
    timeline = exchange.handover_timeline
    arrived_us = exchange.timeline.arrived_us
    if timeline is None or not timeline.ended_us:
        return None
    return Handover(
        timeline.arrived_us - arrived_us,
        timeline.ended_us - arrived_us,
        exchange.first_token_outcome[0] == MODE_STRIP,
        tuple(
            [
                HandoverCall(
                    each.leg,
                    each.sent_us - arrived_us,
                    each.first_byte_us and each.first_byte_us - arrived_us,
                    each.ended_us and each.ended_us - arrived_us,
                    each.is_lost,
                    each.resumed_us and each.resumed_us - arrived_us,
                    _clean_timing(each.timing_header),
                )
                for chain in timeline.critical_path
                for each in chain
            ]
        ),
    )


def _clean_timing(header: str) -> str:
    """A Server-Timing header as a Record can hold it; "" for one that nobody would parse."""
    if len(header) > MAX_HEADER_CHARS:
        return ""
    # Bytes that are no text are lone surrogates here, and no entry of ours has any such character.
    return header if header.isascii() else header.encode("ascii", "replace").decode()


@functools.cache  # as many as there are stages
def _find_stage_leg(stage: str) -> str:
    return stages.split_stage(stage)[0] or stage.removeprefix("router.hop.")


def _build_server(exchange: Exchange, duration_us: int) -> Server:
    return Server(
        name=f"POST {exchange.route}",
        end=duration_us,
        status=exchange.status,
        attributes={
            keys.HTTP_METHOD: "POST",
            keys.HTTP_ROUTE: exchange.route,
            # Cut: a path may be as long as --max-target allows.
            keys.URL_PATH: exchange.path[:MAX_CLIENT_STRING_CHARS],
            keys.URL_SCHEME: exchange.scheme,
            **({keys.FIRST_TOKEN_MISMATCH: True} if exchange.first_token_mismatch else {}),
            **({keys.BACKGROUND: True} if exchange.is_queued_only else {}),
        },
        # a 4xx is the client's error, not this server's
        error="" if 400 <= exchange.status < 500 else exchange.error,
    )


def _build_calls(exchange: Exchange, ended_us: int) -> Iterable[Call]:
    arrived_us = exchange.timeline.arrived_us
    for attempt in (attempt for chain in exchange.attempt_chains for attempt in chain):
        attributes: Attributes = {
            keys.HTTP_METHOD: "POST",
            keys.SERVER_ADDRESS: attempt.instance.host,
            keys.SERVER_PORT: attempt.instance.port,
        }
        if attempt.policy:
            attributes[keys.ROUTE_POLICY] = attempt.policy
            attributes[keys.ROUTE_CANDIDATES] = len(attempt.candidates)
        if attempt.number > 1:
            attributes[keys.ATTEMPT] = attempt.number
        yield Call(
            attempt.span_id,
            f"POST {find_route(attempt.path)}",
            attempt.leg,
            attempt.sent_us - arrived_us,
            (attempt.ended_us or ended_us) - arrived_us,
            attempt.status,
            attributes,
            attempt.error,
        )
