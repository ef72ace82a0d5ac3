# SPDX-License-Identifier: Apache-2.0
"""W3C trace context of one request: continue the caller's trace or start one, and decide sampling.

Our own forty lines because this runs per request inside vLLM, where the SDK is not imported; the
decisions are those of the SDK's samplers of the same names.
"""

from __future__ import annotations

import os
import random
import re
from dataclasses import dataclass
from typing import Final

from ttft_otel.settings import Settings

SAMPLED: Final = 1
STATE_LIMIT: Final = 512  # W3C asks for at least 512 characters
_PARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_LOW: Final = (1 << 64) - 1
# Not the host's generator, which vLLM seeds; not the kernel's, which costs 4 us a call on a VM.
_random: Final = random.Random()
os.register_at_fork(after_in_child=_random.seed)


@dataclass(frozen=True, slots=True)
class Context:
    """Ids of our server span; parent_id "" for a root; flags are W3C trace flags."""

    trace_id: str
    span_id: str
    parent_id: str
    flags: int
    state: str

    @property
    def sampled(self) -> bool:
        """Whether this request's spans are exported."""
        return bool(self.flags & SAMPLED)

    def parent(self, span_id: str = "") -> str:
        """The `traceparent` for whatever happens below the server span (or below another of ours)."""
        return f"00-{self.trace_id}-{span_id or self.span_id}-{self.flags:02x}"


NONE: Final = Context("", "", "", 0, "")  # of a request that nobody traces


def start(traceparent: str, tracestate: str, settings: Settings) -> Context:
    """Continue `traceparent`; start a new trace when it is empty or malformed (W3C: ignore it)."""
    found = _read(traceparent)
    if found is None:
        trace_id = new_trace()
        sampled = _decide(trace_id, None, settings)
        return Context(trace_id, new_id(), "", SAMPLED if sampled else 0, "")
    trace_id, parent_id, flags = found
    sampled = _decide(trace_id, bool(flags & SAMPLED), settings)
    state = tracestate if len(tracestate) <= STATE_LIMIT and tracestate.isascii() else ""
    return Context(trace_id, new_id(), parent_id, SAMPLED if sampled else 0, state)


def new_id() -> str:
    """A fresh span id: 16 lower-case hex digits."""
    return f"{_random.getrandbits(64):016x}"


def new_trace() -> str:
    """A fresh trace id: 32 lower-case hex digits."""
    return f"{_random.getrandbits(128):032x}"


def _read(text: str) -> tuple[str, str, int] | None:
    match = _PARENT.fullmatch(text.strip()) if len(text) <= 128 else None
    if match is None:
        return None
    version, trace_id, parent_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more):
        return None
    if not int(trace_id, 16) or not int(parent_id, 16):
        return None
    return trace_id, parent_id, int(flags, 16)


def _decide(trace_id: str, parent: bool | None, settings: Settings) -> bool:
    name = settings.sampler
    if name.startswith("parentbased_"):
        if parent is not None and settings.trust:
            return parent
        name = name.removeprefix("parentbased_")
    if name == "traceidratio":
        return int(trace_id[16:], 16) & _LOW < round(settings.ratio * (1 << 64))
    return name == "always_on"
