# SPDX-License-Identifier: Apache-2.0
"""The report's data types: spans as stored, and requests assembled from them.

span_conversion.py and span_chunks.py create StoredSpans, request_assembly.py Requests; pages, terminal and
JSON show them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from ttft_otel.model.names import keys, span_names

# 0 is unset, 1 is ok.
STATUS_ERROR: Final = 2  # OTLP status code
# Both carry a request's stages as attributes; nothing else is read for the sums.
TTFT_SPAN_NAMES: Final = (span_names.TTFT, span_names.ENCODE)
# In the order of OTLP's numbers.
SPAN_KINDS: Final = ("unspecified", "internal", "server", "client", "producer", "consumer")


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """One span: IDs in lower-case hex, times in Unix nanoseconds, kind and status as in OTLP.

    scope: name of the instrumentation scope. dropped: number of attributes that were left out.
    """

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    start_ns: int
    end_ns: int
    service: str = ""
    scope: str = ""
    status: int = 0
    message: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    resource: dict[str, Any] = field(default_factory=dict)
    dropped: int = 0

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
    """One server's `ttft` or `encode` span, in microseconds: stages + unattributed_us = ttft_us.

    died: the stage in which the request failed. instance: service.instance.id of its resource.
    recomputed_items: media items that it encoded although an encoder had encoded them for this request.
    clock_error_us: by how much marks may be off that were not taken by its own clock.
    reasons: "queue" and "stall", each with the microseconds of its reasons (stages.WAIT_REASONS).
    held: microseconds of the queue for each kind of work that held the engine (stages.HOLDING_KINDS).
    """

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
    died: str = ""
    streaming: bool = False
    instance: str = ""
    recomputed_items: int = 0
    clock_error_us: int = 0
    reasons: dict[str, dict[str, int]] = field(default_factory=dict)
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
    """Time from the start of a foreign router's span to the arrival at our server; not in any sum.

    us: microseconds. error_us: error bound of `us`, because two clocks are compared; None when
    nothing bounds it. caller: the router's service name. span_id: the router's span.
    """

    us: int
    error_us: int | None
    caller: str
    span_id: str


@dataclass(frozen=True, slots=True)
class Request:
    """One request as its client saw it: the outermost `ttft` span and the legs below it.

    request_id: the client's x-request-id, or the trace ID where it sent none.
    pending: the outermost span has not arrived (yet), and the numbers are the sum over the legs. Legs of
        encoders and prefill instances behind a router that sends no `traceparent` stay pending.
    before: time before, from the span of a foreign router.
    """

    trace_id: str
    request_id: str
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
    pending: bool = False
    before: TimeBefore | None = None

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

    def find_leg(self, role: str) -> Leg | None:
        """The slowest leg of `role`, which is the one on the critical path; None without one."""
        legs = [leg for leg in self.legs if leg.role == role]
        return max(legs, key=lambda leg: leg.ttft_us, default=None)
