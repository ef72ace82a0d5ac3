# SPDX-License-Identifier: Apache-2.0
"""What the report works with: spans as stored, and requests as assembled from them; plain data.

otlp.py makes Spans, assemble.py makes Requests, pages.py, terminal.py and export.py read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from ttft_otel import names

ERROR: Final = 2  # OTLP status code
TRUNK: Final = (names.TTFT, names.ENCODE)
KINDS: Final = ("unspecified", "internal", "server", "client", "producer", "consumer")


@dataclass(frozen=True, slots=True)
class Span:
    """One span; ids are lower-case hex, times Unix nanoseconds, attributes what OTLP can carry."""

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
    def trunk(self) -> bool:
        """Whether this is a `ttft` (or `encode`) span, which carries all stages as attributes."""
        return (
            self.name in TRUNK
            and self.scope == names.SCOPE
            and isinstance(self.attributes.get(names.TOTAL_US), int)
        )


@dataclass(frozen=True, slots=True)
class Leg:
    """One server's `ttft` or `encode` span: its stages and remainder add up to its total."""

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

    @property
    def end_ns(self) -> int:
        """When its first token (or its answer) was out."""
        return self.start_ns + self.ttft_us * 1000

    @property
    def closed(self) -> bool:
        """Whether its stages and remainder add up to its total, to the microsecond."""
        return sum(self.stages.values()) + self.unattributed_us == self.ttft_us


@dataclass(frozen=True, slots=True)
class Request:
    """One request as its caller saw it: the outermost `ttft` span and the legs below it.

    request_id: the caller's x-request-id, or the trace id when the caller gave none.
    pending: no outermost span has come (yet); the numbers are then the legs', added up.
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

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that took part, in the order in which they began; the router first."""
        seen = ["router"] if self.router else []
        seen += [leg.role for leg in self.legs]
        return tuple(dict.fromkeys(seen))

    @property
    def closed(self) -> bool:
        """Whether Σ stages + unattributed = ttft, to the microsecond, here and in every leg."""
        total = sum(self.stages.values()) + self.unattributed_us
        return total == self.ttft_us and all(leg.closed for leg in self.legs)

    def leg(self, role: str) -> Leg | None:
        """The leg of a role on the critical path: of several encoders the slowest."""
        found = [leg for leg in self.legs if leg.role == role]
        return max(found, key=lambda leg: leg.ttft_us, default=None)
