# SPDX-License-Identifier: Apache-2.0
"""HOT: state of one traced HTTP request, filled by recorder.py, asgi.py and hooks/api_server.py."""

from __future__ import annotations

import msgspec

from ttft_otel.model.breakdown import Breakdown
from ttft_otel.tracing.context import TraceContext
from ttft_otel.tracing.engine_timeline import EngineTimeline


class EngineRequest(msgspec.Struct, eq=False, gc=False):
    """One engine request of an HTTP request (there are several for n > 1 or several prompts).

    assign: it left the preprocessing; received, output: its first output came, was processed
    (microseconds, 0: not yet). marks: the engine core's serialized timeline. ended: when its last output
    was processed, 0 before, and for good where it was aborted; then also what it made, output_tokens (-1
    unknown), and vLLM's word for why it ended, finish_reason. is_watched: whether its end will be noticed.
    """

    assign: int
    marks: str = ""
    received: int = 0
    output: int = 0
    ended: int = 0
    output_tokens: int = 0
    finish_reason: str = ""
    is_watched: bool = False


class RequestTrace(msgspec.Struct, eq=False, gc=False):
    """State of one traced HTTP request; times are microseconds of CLOCK_MONOTONIC, 0: not reached.

    arrive, render, end: ASGI call, start of the renderer, end of the response.
    timing_requested: the caller asked for Server-Timing.
    assign_times: engine request id -> end of its preprocessing.
    parts: (name, start, end) of details inside stages.
    server: address and port at which the request arrived.
    leg: the role that a router's header names, "" without one.
    is_counted: the exporter counts it in metrics, also if it is not sampled.
    is_background: the answer only says that the request is queued; its tokens are read by another one.
    is_beam_search: its engine requests are steps of a search, not generations.
    """

    arrive: int
    context: TraceContext
    timing_requested: bool
    is_counted: bool = False
    assign_times: dict[str, int] = {}
    timeline: EngineTimeline | None = None
    breakdown: Breakdown | None = None
    clock_error: int = 0  # of clock_offset
    clock_offset: int = 0  # the engine core's clock minus this process's, estimated
    failed_stage: str = ""
    encoded_before: bool = False  # by the router's header: an encoder encoded some of its items
    end: int = 0
    is_answered: bool = False  # its response was sent, and is neither an error nor given up
    engine_requests: dict[str, EngineRequest] = {}
    error: str = ""
    first_output: EngineRequest | None = None
    is_background: bool = False
    is_beam_search: bool = False
    leg: str = ""
    method: str = ""
    parts: list[tuple[str, int, int]] = []
    path: str = ""
    render: int = 0
    request_id: str = ""
    # From its own transfer parameters, where vLLM's configuration does not decide the role.
    request_role: str = ""
    role: str = ""  # of this server, see roles.resolve_role()
    route: str = ""
    scheme: str = ""
    server: tuple[str, int | None] = ("", None)
    start_ns: int = 0  # `arrive` by the wall clock, once a record needs it
    status: int = 0
    streamed: bool = False
    ttft_sent: bool = False

    @property
    def is_unended(self) -> bool:
        """Whether vLLM has not reported the end of one of its engine requests."""
        for engine in self.engine_requests.values():  # any() takes three times as long for one
            if engine.is_watched and not engine.ended:
                return True
        return False

    @property
    def has_first_token(self) -> bool:
        """Whether a first output is there, and is not withheld by an error response (one prompt of
        several failed)."""
        return self.first_output is not None and self.status < 400
