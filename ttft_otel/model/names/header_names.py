# SPDX-License-Identifier: Apache-2.0
"""HTTP headers, the entries of Server-Timing, and the key of ours in vLLM's trace_headers."""

from __future__ import annotations

from typing import Final

# Headers.
ASK_TIMING: Final = "x-ttft-timing"  # "1": put the breakdown into Server-Timing
LEG: Final = "x-ttft-leg"  # sent by a router: the role in which it uses this server
MEDIA_ENCODED: Final = "x-ttft-encoded"  # "1": an encoder has encoded this request's media items
TTFT_LIMIT: Final = (
    "x-ttft-limit-ms"  # sent by a client: later than this its first token is of no use
)
SERVER_TIMING: Final = "server-timing"
REQUEST_ID: Final = "x-request-id"
TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

# Key in vLLM's own trace_headers that carries the engine's marks to the API server.
CARRIER_KEY: Final = "ttft-otel"

# Server-Timing entries that are not stages.
TIMING_TTFT: Final = "ttft"
TIMING_REST: Final = "rest"  # first token -> response, for an answer that is not streamed
TIMING_TOKENS: Final = "tokens"  # counts of timing.TokenCounts
TIMING_NO_TOKEN: Final = "no-token"  # the request ended without a first token: there is no `ttft`
TIMING_EC: Final = "ec"  # counts of timing.EncoderCacheCounts
TIMING_CLOCK: Final = "clock"  # which clock placed the worker's marks, timing.ClockNote
