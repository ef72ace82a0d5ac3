# SPDX-License-Identifier: Apache-2.0
"""The report's data types: spans as stored, and requests assembled from them.

span_conversion.py and span_chunks.py create StoredSpans, request_assembly.py Requests; pages, terminal and
JSON show them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
