# SPDX-License-Identifier: Apache-2.0
"""The report's data types: spans as stored, requests assembled from them, and what is read of a window. Pure.

otlp_decoder.py creates StoredSpans, request_assembly.py Requests; pages, terminal and JSON show them.
database_reader.py and tempo_source.py count a window's requests by stratum, and read those that SamplePlan
names: all late ones, and a random sample of the others; explain/window/window_reading.py makes its evidence
of them, each with its weight.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

from ttft_otel.model import stages
from ttft_otel.model.names import keys, span_names

# 0 is unset, 1 is ok.
STATUS_ERROR: Final = 2  # OTLP status code
# Both carry a request's stages as attributes; nothing else is read for the sums.
TTFT_SPAN_NAMES: Final = (span_names.TTFT, span_names.ENCODE)
# In the order of OTLP's numbers.
SPAN_KINDS: Final = ("unspecified", "internal", "server", "client", "producer", "consumer")

LATE_SHARE: Final = 0.01  # the slowest of a window, where no objective says who is late
MIN_LATE: Final = 5
# Strata: with a first token, later than Coverage.late_us or not; without one; refused with 4xx.
LATE, OTHER, LOST, REFUSED = "late", "other", "lost", "refused"
MAX_READ: Final[Mapping[str, int]] = {LATE: 2000, OTHER: 2000, LOST: 500, REFUSED: 0}
THRESHOLD_DIGITS: Final = 14  # of a sampling threshold; trailing zeros are left out
MAX_ADJUSTED: Final = 10_000.0  # requests that one stands for: anybody may send a tracestate
THRESHOLD: Final = re.compile(r"(?:^|,)\s*ot=(?:[^,]*;)?th:([0-9a-f]{1,14})(?=[;,\s]|$)")


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """One span: IDs in lower-case hex, times in Unix nanoseconds, kind and status as in OTLP."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    start_ns: int
    end_ns: int
    service: str = ""
    scope: str = ""  #: name of the instrumentation scope
    status: int = 0
    message: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    resource: dict[str, Any] = field(default_factory=dict)
    dropped: int = 0  #: number of attributes that were left out
    trace_state: str = ""  #: W3C's header, with the probability of a sampler that writes it

    @property
    def is_ttft_span(self) -> bool:
        """Whether this is a `ttft` (or `encode`) span, which carries all stages as attributes."""
        return (
            self.name in TTFT_SPAN_NAMES
            and self.scope == span_names.SCOPE
            and isinstance(self.attributes.get(keys.TOTAL_US), int)
        )


@dataclass(frozen=True, slots=True)
class Leg:
    """One server's `ttft` or `encode` span, in microseconds: stages + unattributed_us = ttft_us."""

    span_id: str
    service: str
    role: str
    outermost: bool
    start_ns: int
    ttft_us: int
    unattributed_us: int
    stages: dict[str, int]
    request_id: str = ""
    model: str = ""
    error: str = ""
    died: str = ""  #: the stage in which the request failed
    streaming: bool = False
    instance: str = ""  #: service.instance.id of its resource
    #: Media items that it encoded although an encoder had encoded them for this request.
    recomputed_items: int = 0
    is_engine_only: bool = False  #: its front-end has no hooks, so that no router had its stages
    foreign: str = ""  #: the product whose own spans told it; "" where ours did
    clock_error_us: int = 0  #: by how much marks may be off that were not taken by its own clock
    #: "queue" and "stall", each with the microseconds of its reasons (stages.WAIT_REASONS).
    reasons: dict[str, dict[str, int]] = field(default_factory=dict)
    #: Microseconds of the queue for each kind of work that held the engine (stages.HOLDING_KINDS).
    held: dict[str, int] = field(default_factory=dict)

    @property
    def end_ns(self) -> int:
        """End of the span: its first token, or an encoder's answer, was sent."""
        return self.start_ns + self.ttft_us * 1000

    @property
    def closed(self) -> bool:
        """Whether its stages and remainder add up to its total, to the microsecond."""
        return sum(self.stages.values()) + self.unattributed_us == self.ttft_us


@dataclass(frozen=True, slots=True)
class TimeBefore:
    """Time from the start of a foreign router's span to the arrival at our server; not in any sum."""

    us: int  #: microseconds
    #: its error bound, as two clocks are compared; None when nothing bounds it
    error_us: int | None
    caller: str  #: the router's service name
    span_id: str  #: the router's span


@dataclass(frozen=True, slots=True)
class Request:
    """One request as its client saw it: the outermost `ttft` span and the legs below it."""

    trace_id: str
    request_id: str  #: the client's x-request-id, or the trace ID where it sent none
    model: str
    start_ns: int
    ttft_us: int
    unattributed_us: int
    stages: dict[str, int]
    legs: tuple[Leg, ...]
    router: Leg | None = None
    error: str = ""
    died: str = ""
    streaming: bool = False
    #: The outermost span has not arrived (yet), and the numbers are the sum over the legs. Legs of encoders
    #: and prefill instances behind a router that sends no `traceparent` stay pending.
    pending: bool = False
    before: TimeBefore | None = None  #: from the span of a foreign router

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the servers, in the order in which they began; the router first."""
        roles = ["router"] if self.router else []
        roles += [leg.role for leg in self.legs]
        return tuple(dict.fromkeys(roles))

    @property
    def closed(self) -> bool:
        """Whether Σ stages + unattributed = ttft, to the microsecond, here and in every leg."""
        total = sum(self.stages.values()) + self.unattributed_us
        return total == self.ttft_us and all(leg.closed for leg in self.legs)

    @property
    def ordered_stages(self) -> list[tuple[str, int]]:
        """Full names of its stages with their microseconds, in the order in which they happen."""
        return sorted(self.stages.items(), key=lambda part: stages.rank_stage(part[0]))

    def list_wait_reasons(self, stage: str) -> list[tuple[str, int]]:
        """(reason, microseconds) of the full stage name `stage`, longest first; [] where none is known."""
        leg = self._find_stage_leg(stage)
        if leg is None:
            return []
        group = "stall" if stages.strip_leg(stage) == stages.STALL_STAGE else "queue"
        return sorted(leg.reasons.get(group, {}).items(), key=lambda part: (-part[1], part[0]))

    def list_holding_kinds(self, stage: str) -> list[tuple[str, int]]:
        """(kind of work, microseconds) that held a queue, the full stage name `stage`, longest first."""
        leg = self._find_stage_leg(stage)
        if leg is None or stages.strip_leg(stage) == stages.STALL_STAGE:
            return []
        return sorted(leg.held.items(), key=lambda part: (-part[1], part[0]))

    def _find_stage_leg(self, stage: str) -> Leg | None:
        """The leg whose stage this is; None for a stage that does not wait in a scheduler."""
        word, role = stages.strip_leg(stage), stages.find_leg(stage)
        # A stage of a router's sum is that of the leg that it belongs to.
        leg = (
            self.find_leg(role)
            if role
            else next((leg for leg in reversed(self.legs) if leg.stages == self.stages), None)
        )
        # Of both queues a request has one: which of them is decided by its first step.
        waits = (*stages.QUEUE_STAGES, stages.STALL_STAGE)
        return leg if leg is not None and word in waits and word in leg.stages else None

    def find_leg(self, role: str) -> Leg | None:
        """The slowest leg of `role`, which is the one on the critical path; None without one."""
        legs = [leg for leg in self.legs if leg.role == role]
        return max(legs, key=lambda leg: leg.ttft_us, default=None)


@dataclass(frozen=True, slots=True)
class SourceChoice:
    """The source that a user has chosen: Tempo where `tempo` is its URL, else the database `db`."""

    db: Path | None = None
    tempo: str = ""
    #: For Tempo; they have credentials and are in no representation.
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    ca_file: Path | None = None  #: of a private CA that signed Tempo's certificate
    timeout_s: float = 30.0  #: for one answer of Tempo


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A request that was read, with its `ttft` and `encode` spans and all that are above these."""

    request: Request
    spans: Sequence[StoredSpan]
    weight: float = 1.0  #: how many requests of the window it stands for


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a window has, and what was read of it."""

    counts: Mapping[str, int]  #: requests by stratum
    read: Mapping[str, int]  #: those that were read, likewise
    incomplete: int = 0  #: left out: their outermost span is not stored
    first_ns: int = 0  #: Unix nanoseconds at which the first request began; 0 without any
    last_ns: int = 0  #: likewise the last one
    late_us: int = 0  #: longer TTFTs are late
    foreign: Mapping[str, int] = field(default_factory=dict)  #: left out, by who told them
    sampling: str = (
        ""  #: why the stored requests are not all that there were; "" where nothing says so
    )

    @property
    def requests(self) -> int:
        return sum(self.counts.values()) + self.incomplete

    @property
    def is_whole(self) -> bool:
        """Whether all with a first token were read."""
        return all(self.read[stratum] == self.counts[stratum] for stratum in (LATE, OTHER))


@dataclass(frozen=True, slots=True)
class WindowSample:
    """A window's coverage, and its chosen requests, which are read one after another."""

    coverage: Coverage
    requests: Iterator[ReadRequest]


class SamplePlan:
    """Which requests of each stratum are read, by their position in it, and what each stands for.

    counts: requests by stratum. limits: how many are read of each, MAX_READ by default. The same counts
    give the same positions, so that an answer can be repeated.
    """

    def __init__(self, counts: Mapping[str, int], limits: Mapping[str, int] | None = None) -> None:
        limits = MAX_READ if limits is None else limits
        self.counts = counts
        self.read = {name: min(count, limits[name]) for name, count in counts.items()}

    def choose_positions(self, stratum: str) -> Sequence[int]:
        """The positions that are read, ascending."""
        count, read = self.counts[stratum], self.read[stratum]
        if read == count:
            return range(count)
        return sorted(random.Random(f"{stratum} {count}").sample(range(count), read))

    def choose(self, stratum: str, rows: Iterable[tuple[int]]) -> Iterator[int]:
        """The first columns of the rows at these positions, which are read one after another."""
        left, at = iter(rows), 0
        for position in self.choose_positions(stratum):
            yield next(islice(left, position - at, None))[0]
            at = position + 1

    def get_weight(self, stratum: str) -> float:
        """How many requests each one that is read stands for."""
        return self.counts[stratum] / max(self.read[stratum], 1)


def count_late(count: int) -> int:
    """How many of `count` requests with a first token are late where no objective says so."""
    return min(count, max(MIN_LATE, round(LATE_SHARE * count)))


def read_adjusted_count(trace_state: str) -> float:
    """How many requests one stands for by the sampling threshold of a `tracestate`; 1.0 without one.

    OpenTelemetry's probability sampling, of an SDK or a collector, writes `ot=th:c` where it kept a quarter.
    """
    found = THRESHOLD.search(trace_state)
    rejected = int(found[1].ljust(THRESHOLD_DIGITS, "0"), 16) if found else 0
    whole = 16**THRESHOLD_DIGITS
    return min(whole / (whole - rejected), MAX_ADJUSTED)
