# SPDX-License-Identifier: Apache-2.0
"""W3C trace context of one request: continue the caller's trace or start one, and decide sampling.

Implemented here because it runs per request inside vLLM, where the OpenTelemetry SDK is not
imported. The sampling decisions are those of the SDK's samplers of the same names, but for callers that are
not trusted.
"""

from __future__ import annotations

import os
import random
import re
from hashlib import blake2b
from typing import Final

import msgspec

from ttft_otel.tracing.settings import Settings

SAMPLED_FLAG: Final = 1
MAX_TRACESTATE_CHARS: Final = 512  # W3C: propagate at least 512 characters; longer ones are dropped
_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
# A generator of our own: vLLM seeds Python's global one, so that IDs would repeat between servers.
# os.urandom costs 4 us a call on a virtual machine.
_random: Final = random.Random()
os.register_at_fork(after_in_child=_random.seed)
# Of draws for callers' trace IDs, where no key is set; forked workers have the same.
_process_key: Final = os.urandom(16)


class TraceContext(msgspec.Struct, frozen=True, gc=False):
    """IDs of our server span in hex; parent_id is "" for a root span; flags are W3C trace flags."""

    trace_id: str
    span_id: str
    parent_id: str
    flags: int
    tracestate: str

    @property
    def sampled(self) -> bool:
        """Whether this request's spans are exported."""
        return bool(self.flags & SAMPLED_FLAG)

    def format_traceparent(self, span_id: str = "") -> str:
        """The `traceparent` header for children of the server span, or of our span `span_id`."""
        return f"00-{self.trace_id}-{span_id or self.span_id}-{self.flags:02x}"


NO_CONTEXT: Final = TraceContext("", "", "", 0, "")  # of a request that is not traced


def start_context(traceparent: str, tracestate: str, settings: Settings) -> TraceContext:
    """Continue the trace of `traceparent`, or start a new one where it is empty or malformed.

    tracestate: passed on unchanged; dropped when it is too long or not ASCII.
    settings: sampler, its ratio, and whether the caller's `sampled` flag is honoured.
    """
    parsed = parse_traceparent(traceparent) if traceparent else None
    if parsed is None:
        trace_id = new_trace_id()
        sampled = _decide_sampling(trace_id, None, settings)
        return TraceContext(trace_id, new_span_id(), "", SAMPLED_FLAG if sampled else 0, "")
    trace_id, parent_id, flags = parsed
    sampled = _decide_sampling(trace_id, bool(flags & SAMPLED_FLAG), settings)
    state = tracestate if len(tracestate) <= MAX_TRACESTATE_CHARS and tracestate.isascii() else ""
    return TraceContext(trace_id, new_span_id(), parent_id, SAMPLED_FLAG if sampled else 0, state)


def new_span_id() -> str:
    """A random span ID: 16 lower-case hex digits."""
    # A third of the time of a formatted number, and two thirds of that of randbytes().
    return _random.getrandbits(64).to_bytes(8, "little").hex()


def new_trace_id() -> str:
    """A random trace ID: 32 lower-case hex digits."""
    return _random.getrandbits(128).to_bytes(16, "little").hex()


def parse_traceparent(text: str) -> tuple[str, str, int] | None:
    """Trace ID, span ID and flags of the header `text`; None where it is malformed."""
    match = _TRACEPARENT.fullmatch(text.strip()) if len(text) <= 128 else None
    if match is None:
        return None
    version, trace_id, parent_id, flags, more = match.groups()
    # W3C: version ff is invalid; version 00 has exactly four fields, later ones may append more.
    if version == "ff" or (version == "00" and more):
        return None
    if not int(trace_id, 16) or not int(parent_id, 16):  # W3C: all zeros is invalid
        return None
    return trace_id, parent_id, int(flags, 16)


def _decide_sampling(trace_id: str, parent: bool | None, settings: Settings) -> bool:
    sampler = settings.sampler
    if sampler.startswith("parentbased_"):
        if parent is not None and settings.trust_sampled:
            return parent
        sampler = sampler.removeprefix("parentbased_")
    if sampler == "traceidratio":
        # The low 64 bits, as the SDK's TraceIdRatioBased: all services decide alike for a trace.
        drawn = int(trace_id[16:], 16)
        if parent is not None and not settings.trust_sampled:
            # In place of bits that the caller may have chosen; always the same for one ID.
            key = settings.sampling_key.encode()[:64] or _process_key
            digest = blake2b(trace_id.encode(), digest_size=8, key=key).digest()
            drawn = int.from_bytes(digest, "big")
        return drawn < round(settings.ratio * (1 << 64))
    return sampler == "always_on"
