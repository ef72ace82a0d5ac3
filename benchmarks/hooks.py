# SPDX-License-Identifier: Apache-2.0
"""CPU time of the hooks: per traced request in the API server and the engine core, per
pure-decode step in core and worker, with connectors of KV blocks and of the encoder cache too, per
step while requests wait, and per marked step with a device's events.

Host objects are stand-ins with empty methods; the time of the same calls without our wrappers is
subtracted. Goals are for ratios to a reference in the same round: for a request, or a step that is marked
for one, one span of the OpenTelemetry SDK, and for a request also the 12 spans that the SDK makes and
encodes for export, as a server with tracing of its own would do; for other steps, empty wrappers.

    python -m benchmarks.hooks [--json FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import process_time_ns
from typing import Final

from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import SpanKind, Tracer

from benchmarks import engine_loops
from benchmarks.api_requests import run_api_requests, serve_one_chunk
from benchmarks.engine_loops import REQUESTS_PER_ROUND, STEPS_PER_ROUND, FakeVllmHost
from benchmarks.figures import (
    Figure,
    build_figure,
    build_figure_parser,
    divide_rounds,
    report_figures,
)
from benchmarks.sdk_exporter import build_exported_spans
from benchmarks.waiting_steps import run_waiting_steps
from ttft_otel.model.endpoints import CHAT_PATH
from ttft_otel.tracing import handoff, request_trace
from ttft_otel.tracing.asgi import TracingMiddleware
from ttft_otel.tracing.settings import Settings

ROUNDS: Final = 15
EXPORTED_SPANS: Final = 12  # of a text request: server, ttft and its stages
MAX_API_SHARE, MAX_CORE_SHARE = 0.08, 0.01  # of what EXPORTED_SPANS cost
MAX_STEP_WRAPPERS: Final = 8.0  # wrappers that only pass a call on, for a decode step
DECODE_STEP_CALLS: Final = 7  # wrapped methods that engine_loops.run_decode_steps() calls in a step
SERVER_SPAN_NAME: Final = f"POST {CHAT_PATH}"
SERVER_SPAN_ATTRIBUTES: Final = {
    "http.request.method": "POST",
    "http.route": CHAT_PATH,
    "url.scheme": "http",
    "url.path": CHAT_PATH,
    "server.address": "127.0.0.1",
    "network.protocol.version": "1.1",
}

Loop = Callable[[], int]  # runs a round, returns its CPU time in ns


class DiscardingSink:
    """A record sink that discards records."""

    def send(self, data: bytes) -> bool:
        """Accept and discard `data`."""
        return True


@dataclass(frozen=True, slots=True)
class HookCase:
    """One thing that hooks cost. Loops without and with hooks, and the reference of both.

    reference: a loop whose cost, less that of `reference_base` if there is one, is the unit.
    count: how many units of work each loop does. exported_goal: of the ratio to the spans that the SDK
    exports of a request, None for a step.
    """

    name: str
    plain: Loop
    hooked: Loop
    reference_name: str
    reference: Loop
    reference_base: Loop | None
    count: int
    goal: float
    exported_goal: float | None = None


def run_sdk_spans(tracer: Tracer) -> int:
    """A server span of the OpenTelemetry SDK for each of REQUESTS_PER_ROUND requests. CPU ns."""
    began_ns = process_time_ns()
    for _ in range(REQUESTS_PER_ROUND):
        with tracer.start_as_current_span(
            SERVER_SPAN_NAME, kind=SpanKind.SERVER, attributes=SERVER_SPAN_ATTRIBUTES
        ) as span:
            span.set_attribute("http.response.status_code", 200)
    return process_time_ns() - began_ns


def create_tracer() -> Tracer:
    """A tracer that records all spans and discards them when they end."""
    provider = TracerProvider(sampler=ALWAYS_ON, shutdown_on_exit=False)
    provider.add_span_processor(SpanProcessor())
    return provider.get_tracer("benchmark")


def build_request_case(
    name: str, plain: Loop, ours: Loop, goal: float, exported_goal: float | None = None
) -> HookCase:
    """A case of requests, or of what a request has one of; the SDK's server span is the reference."""
    sdk_spans = partial(run_sdk_spans, create_tracer())
    count = REQUESTS_PER_ROUND
    return HookCase(name, plain, ours, "sdk_span", sdk_spans, None, count, goal, exported_goal)


def build_api_case(
    name: str, settings: Settings, marks: bool, goal: float, exported_goal: float | None = None
) -> HookCase:
    """Requests through the middleware."""
    traced = TracingMiddleware(serve_one_chunk, settings, lambda _: None, None)  # type: ignore[arg-type]
    plain = partial(run_api_requests, serve_one_chunk, False)
    return build_request_case(
        name, plain, partial(run_api_requests, traced, marks), goal, exported_goal
    )


def list_cases() -> list[HookCase]:
    """All cases. Goals are 10 to 50 % above what an idle machine needed."""
    hooked, passing = engine_loops.wrap_fake_host(), engine_loops.wrap_fake_host_empty()

    def build_core_case(
        name: str,
        items: int,
        goal: float,
        exported_goal: float | None = None,
        overlaps: bool = False,
    ) -> HookCase:
        run = partial(engine_loops.run_core_requests, items=items, overlaps=overlaps)
        plain, ours = partial(run, FakeVllmHost), partial(run, hooked)
        return build_request_case(name, plain, ours, goal, exported_goal)

    def build_step_case(
        name: str, run: Callable[[type[FakeVllmHost]], int], goal: float
    ) -> HookCase:
        plain, ours, reference = (partial(run, host) for host in (FakeVllmHost, hooked, passing))
        count = STEPS_PER_ROUND
        return HookCase(name, plain, ours, "empty_wrappers", reference, plain, count, goal)

    return [
        build_api_case("api_request", Settings(on=True), True, 3.0, MAX_API_SHARE),
        build_api_case(
            "api_request_unsampled", Settings(on=True, sampler="always_off"), False, 0.3
        ),
        build_api_case(
            "api_request_counted", Settings(on=True, sampler="always_off", metrics=True), True, 3.0
        ),
        build_core_case("core_request", 0, 0.5, MAX_CORE_SHARE),
        build_core_case("core_request_async", 0, 1.0, overlaps=True),
        build_core_case("core_request_image", 1, 1.0),
        build_step_case("decode_step", engine_loops.run_decode_steps, 1.7),
        build_step_case("decode_step_connector", engine_loops.run_connector_steps, 1.5),
        # Against two wrappers; 2 us a step for reasons, and for whose work held the requests up.
        build_step_case("waiting_step", run_waiting_steps, 20.0),
        build_step_case("waiting_step_prompts", partial(run_waiting_steps, prompts=2), 80.0),
        build_request_case(
            "prefill_step_device",
            partial(engine_loops.run_device_steps, FakeVllmHost),
            partial(engine_loops.run_device_steps, hooked),
            0.6,
        ),
    ]


def measure_case(case: HookCase, rounds: int = ROUNDS) -> dict[str, Figure]:
    """The ratio, and beside it what hooks and reference cost in microseconds."""
    case.plain(), case.hooked(), case.reference()  # warm-up
    costs_us: list[float] = []
    references_us: list[float] = []
    exported_us: list[float] = []
    run_exported = None
    if case.exported_goal is not None:
        run_exported = build_exported_spans(REQUESTS_PER_ROUND, EXPORTED_SPANS)
    for _ in range(rounds):
        plain, hooked, reference = case.plain(), case.hooked(), case.reference()
        base = case.reference_base() if case.reference_base else 0
        costs_us.append((hooked - plain) / case.count / 1000)
        references_us.append((reference - base) / case.count / 1000)
        if run_exported is not None:
            exported_us.append(run_exported() / case.count / 1000)
    figures = {
        f"{case.name}_per_{case.reference_name}": build_figure(
            divide_rounds(costs_us, references_us), case.goal
        ),
        f"{case.name}_us": build_figure(costs_us, digits=3),
        f"{case.name}_reference_us": build_figure(references_us, digits=3),
    }
    if exported_us:
        shares = divide_rounds(costs_us, exported_us)
        name = f"{case.name}_per_{EXPORTED_SPANS}_sdk_spans"
        figures[name] = build_figure(shares, case.exported_goal, digits=4)
    if case.name == "decode_step":
        calls = [value / DECODE_STEP_CALLS for value in references_us]
        figures["decode_step_per_empty_wrapper"] = build_figure(
            divide_rounds(costs_us, calls), MAX_STEP_WRAPPERS
        )
    return figures


def measure_hook_figures(rounds: int = ROUNDS) -> dict[str, Figure]:
    """All figures of all cases."""
    handoff.get_sender = DiscardingSink  # type: ignore[assignment]
    request_trace.identity.role = "mono"
    figures: dict[str, Figure] = {}
    for case in list_cases():
        figures.update(measure_case(case, rounds))
    return figures


def main() -> int:
    """Measure, print, and write the file that was asked for; 1 when a goal is missed."""
    options = build_figure_parser(__doc__).parse_args()
    return report_figures(measure_hook_figures(), options.json)


if __name__ == "__main__":
    sys.exit(main())
