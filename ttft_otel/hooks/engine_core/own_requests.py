# SPDX-License-Identifier: Apache-2.0
"""Requests of front-ends without our hooks: the engine core itself sends what it has measured of them.

vLLM's Rust front-end is one, and so is any other client of the engine core's sockets. An API server with our
hooks leaves a mark in the trace headers of each request, traced or not; a request without one has nobody
who would read a timeline in its first output. tracer.py asks here when it comes, and when it is answered.
"""

from __future__ import annotations

import logging
import re
from functools import cache
from typing import Any, Final

from ttft_otel.hooks import vllm_fields
from ttft_otel.hooks.api_server import identify_server, measure_age
from ttft_otel.hooks.wrap import Patcher
from ttft_otel.model.names import header_names
from ttft_otel.tracing import carrier, clock, context, handoff, settings
from ttft_otel.tracing.engine_report import REPORT_VERSION, EngineReport, encode_report
from ttft_otel.tracing.roles import identity

log = logging.getLogger("ttft_otel")
# Our router's request IDs, which front-ends put into their engine's, with a word of theirs before it.
_ROUTED_ID: Final = re.compile(r"(?:^|-)(00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})(?:-|$)")


def begin_report(patcher: Patcher, core: Any, request: Any) -> EngineReport | None:
    """In the input thread: an EngineCoreRequest without our key has come to `core`; None: not traced."""
    is_generation = getattr(request, "sampling_params", None) is not None
    # vLLM makes requests of the first kind to free another instance's KV blocks; the second one's
    # later parts have the ID of the first one.
    if not is_generation or getattr(request, "abort_immediately", False):
        return None
    if getattr(request, "resumable", False):
        return None
    chosen = settings.get_settings()
    headers = request.trace_headers or {}
    name = str(getattr(request, "external_req_id", None) or request.request_id)
    parent, routed = headers.get(header_names.TRACEPARENT, ""), None
    if not parent:
        routed = _ROUTED_ID.search(name)
        parent = routed[1] if routed else ""
    found = context.start_context(parent, headers.get(header_names.TRACESTATE, ""), chosen)
    if not (found.sampled or chosen.metrics):
        return None
    if not identity.is_known and (config := getattr(core, "vllm_config", None)) is not None:
        identify_server(patcher, config)
    _begin_sending()
    added = clock.now_us()
    # As an API server's, so that this request can be named as the holder of another one.
    request.trace_headers = {
        **headers,
        header_names.TRACEPARENT: found.format_traceparent(),
        header_names.CARRIER_KEY: carrier.ASKED,
    }
    return EngineReport(
        REPORT_VERSION,
        found,
        (routed[1] if routed else name)[:256],
        identity.role or vllm_fields.get_request_role(request) or identity.default_role,
        routed is not None,
        identity.model,
        identity.kv_connector,
        identity.ec_connector,
        identity.takes_encodings,
        added - _measure_age(core, request),
        added,
    )


@cache
def _begin_sending() -> None:
    """At the first of them."""
    log.info(
        "ttft-otel: requests come from a front-end without its hooks: the engine core sends their "
        "stages, from its input to the first token that leaves it"
    )
    # In this thread: it takes milliseconds, which a step would wait for.
    handoff.get_sender().start_exporter()


def send_report(report: EngineReport, timeline: str, error: str) -> None:
    """Its first token leaves the engine core now, or it has ended without one for the reason `error`."""
    report.left, report.timeline, report.error = clock.now_us(), timeline, error
    handoff.get_sender().send(encode_report(report))


def _measure_age(core: Any, request: Any) -> int:
    """Microseconds since the request's front-end had it, by the wall clock that both share; 0 unknown."""
    addresses = getattr(getattr(core, "addresses", None), "inputs", ("ipc:",))
    index = getattr(request, "client_index", 0)
    # A front-end on another host has another clock.
    if not (index < len(addresses) and str(addresses[index]).startswith(("ipc:", "tcp://127."))):
        return 0
    return measure_age(getattr(request, "arrival_time", None))
