# SPDX-License-Identifier: Apache-2.0
"""HOT: state of one traced HTTP request, filled by recorder.py, asgi.py and hooks/api_server.py."""

from __future__ import annotations

from ttft_otel import breakdown, carrier, context


class EngineRequest:
    """One engine request of an HTTP request (there are several for n > 1 or several prompts).

    assign: it left the preprocessing; received, output: its first output came, was processed
    (microseconds, 0: not yet). marks: the engine core's serialized timeline. ended: when its last output
    was processed, 0 before, and for good where it was aborted; then also what it made, output_tokens (-1
    unknown), and vLLM's word for why it ended, finish_reason. is_watched: whether its end will be noticed.
    """

    __slots__ = (
        *("assign", "ended", "finish_reason", "is_watched", "marks", "output", "output_tokens"),
        "received",
    )

    def __init__(self, assign: int) -> None:
        self.assign = assign
        self.marks = ""
        self.received = 0
        self.output = 0
        self.ended = 0
        self.output_tokens = 0
        self.finish_reason = ""
        self.is_watched = False


class RequestTrace:
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

    __slots__ = (
        "arrive", "timing_requested", "assign_times", "context", "breakdown", "failed_stage",
        "encoded_before", "end", "clock_error", "clock_offset",
        "engine_requests", "error", "first_output", "is_background", "is_beam_search", "is_counted",
        "timeline", "leg",
        "method", "parts", "path", "render", "request_id", "request_role", "route", "scheme",
        "server",
        "is_answered", "status", "streamed", "ttft_sent", "ttft_id",
    )  # fmt: skip

    def __init__(
        self, arrive: int, trace_context: context.TraceContext, timing_requested: bool
    ) -> None:
        self.arrive = arrive
        self.context = trace_context
        self.timing_requested = timing_requested
        self.assign_times: dict[str, int] = {}
        self.timeline: carrier.EngineTimeline | None = None
        self.breakdown: breakdown.Breakdown | None = None
        self.clock_error = 0  # of clock_offset
        self.clock_offset = 0  # the engine core's clock minus this process's, estimated
        self.failed_stage = ""
        self.encoded_before = False  # by the router's header: an encoder encoded some of its items
        self.end = 0
        self.is_answered = False  # its response was sent, and is neither an error nor given up
        self.engine_requests: dict[str, EngineRequest] = {}
        self.error = ""
        self.first_output: EngineRequest | None = None
        self.is_background = False
        self.is_beam_search = False
        self.is_counted = False
        self.leg = ""
        self.method = ""
        self.parts: list[tuple[str, int, int]] = []
        self.path = ""
        self.render = 0
        self.request_id = ""
        # From its own transfer parameters, where vLLM's configuration does not decide the role.
        self.request_role = ""
        self.route = ""
        self.scheme = ""
        self.server: tuple[str, int | None] = ("", None)
        self.status = 0
        self.streamed = False
        self.ttft_sent = False
        self.ttft_id = context.new_span_id()

    @property
    def is_unended(self) -> bool:
        """Whether vLLM has not told the end of one of its engine requests."""
        engines = self.engine_requests.values()
        return any(engine.is_watched and not engine.ended for engine in engines)

    @property
    def has_first_token(self) -> bool:
        """Whether a first output is there, and is not withheld by an error response (one prompt of
        several failed)."""
        return self.first_output is not None and self.status < 400
