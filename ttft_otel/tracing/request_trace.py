# SPDX-License-Identifier: Apache-2.0
"""HOT: state of one traced request, filled by recorder.py, asgi.py and hooks/api_server.py."""

from __future__ import annotations

from typing import Any

import msgspec

from ttft_otel.model.breakdown import Breakdown
from ttft_otel.tracing.context import TraceContext
from ttft_otel.tracing.engine_timeline import EngineTimeline


class EngineRequest(msgspec.Struct, eq=False, gc=False):
    """One engine request of an HTTP request (there are several for n > 1 or several prompts).

    Times are microseconds, 0: not yet.
    """

    #: It left the preprocessing.
    assign: int
    #: The engine core's serialized timeline.
    marks: str = ""
    #: Its first output came, and was processed.
    received: int = 0
    output: int = 0
    #: Its last output was processed; 0 for good where it was aborted.
    ended: int = 0
    #: Then what it made, -1 unknown, and vLLM's word for why it ended.
    output_tokens: int = 0
    finish_reason: str = ""
    #: Its end will be noticed.
    is_watched: bool = False


class RequestTrace(msgspec.Struct, eq=False, gc=False):
    """State of one traced request; times are microseconds of CLOCK_MONOTONIC, 0: not reached."""

    #: The ASGI call; of a direct one the call of the engine, or what its caller says.
    arrive: int
    context: TraceContext
    #: The caller asked for Server-Timing.
    timing_requested: bool
    #: The exporter counts it in metrics, also if it is not sampled.
    is_counted: bool = False
    #: Engine request ID -> end of its preprocessing.
    assign_times: dict[str, int] = {}
    timeline: EngineTimeline | None = None
    breakdown: Breakdown | None = None
    #: The engine core's clock minus this process's, estimated, and its error.
    clock_offset: int = 0
    clock_error: int = 0
    failed_stage: str = ""
    #: By the router's header: an encoder encoded some of its items.
    encoded_before: bool = False
    #: End of the response.
    end: int = 0
    #: Its response was sent, and is neither an error nor given up.
    is_answered: bool = False
    engine_requests: dict[str, EngineRequest] = {}
    error: str = ""
    first_output: EngineRequest | None = None
    #: The answer only says that the request is queued; its tokens are read by another one.
    is_background: bool = False
    #: The engine was called without HTTP: nothing of its answer is seen.
    is_direct: bool = False
    #: Then the engine that was called.
    direct_engine: Any = None
    #: Such a call hands over a stream of inputs: the headers with their parent, and whether an input's
    #: arrival time is when vLLM began to render it, not the caller's of the stream. This trace is not sent.
    session: tuple[list[tuple[bytes, bytes]], bool] | None = None
    #: It is one input of a session: its trace ends with its first output.
    is_input: bool = False
    #: Then how many earlier ones have not been answered to the end.
    inputs_before: int = 0
    #: Its engine requests are steps of a search, not generations.
    is_beam_search: bool = False
    #: The role that a router's header names, "" without one.
    leg: str = ""
    #: The role by its own transfer parameters, where vLLM's configuration does not decide it.
    request_role: str = ""
    #: This server's role for it, see roles.resolve_role(); "" before it is asked for.
    role: str = ""
    method: str = ""
    #: (name, start, end) of details inside stages.
    parts: list[tuple[str, int, int]] = []
    path: str = ""
    #: Start of the renderer.
    render: int = 0
    request_id: str = ""
    route: str = ""
    scheme: str = ""
    #: Address and port at which it arrived.
    server: tuple[str, int | None] = ("", None)
    #: `arrive` by the wall clock, once a record needs it.
    start_ns: int = 0
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
