# SPDX-License-Identifier: Apache-2.0
"""Hooks in the engine core's input thread: end of `ipc`; attach an EngineTimeline to each Request.

scheduler.py fills the timeline. Also adds the utility methods to the engine core that the API server
calls: ABORTED_QUERY (in which stage an aborted request was), KEPT_BLOCKS_QUERY and KEPT_ITEMS_QUERY
(how long KV blocks and encodings were kept), ENCODER_QUERY (when an encoder ran that had not ended).
"""

from __future__ import annotations

from typing import Any, Final

from ttft_otel.hooks import encoder_runs, wrap
from ttft_otel.hooks.engine_core import (
    ec_kept,
    held_steps,
    kv,
    queue_reasons,
    scheduler,
    waiting,
)
from ttft_otel.model.names import header_names
from ttft_otel.tracing import clock
from ttft_otel.tracing.carrier import (
    ABORTED_QUERY,
    ENCODER_QUERY,
    KEPT_BLOCKS_QUERY,
    KEPT_ITEMS_QUERY,
)
from ttft_otel.tracing.engine_timeline import EngineTimeline


def stamp_engine_input(core: Any, request: Any, *args: Any, **kwargs: Any) -> int | None:
    """Before preprocess_add_request(): end of `ipc`; None for a request that is not traced."""
    headers = request.trace_headers
    return clock.monotonic_ns() // 1000 if headers and header_names.CARRIER_KEY in headers else None


def attach_timeline(added: int, result: Any, core: Any, *args: Any, **kwargs: Any) -> None:
    """After preprocess_add_request(): attach a timeline to vLLM's Request, with which it is freed."""
    request = result[0]
    timeline = request._ttft = EngineTimeline(added=added)
    try:
        is_paused = core.scheduler._pause_state
    except AttributeError:
        is_paused = False
    if is_paused:  # an engine core runs no step then that could tell
        timeline.open_details().reasons += (added, queue_reasons.PAUSED)
    # scheduler.py replaces its trace_headers at the first output; holders.py reads the traceparent here.
    request._ttft_headers = request.trace_headers
    # A deque, because this is the input thread, and the main thread takes requests out of it.
    waiting.arrived.append(held_steps.follow_request(request.request_id, timeline))


def add_queries(core: type[Any]) -> None:
    """Add the utility methods to the class `core`: vLLM looks them up by their names on the engine core."""
    setattr(core, ABORTED_QUERY, answer_aborted)
    setattr(core, KEPT_BLOCKS_QUERY, kv.answer_kept_blocks)
    setattr(core, KEPT_ITEMS_QUERY, ec_kept.answer_kept_items)
    setattr(core, ENCODER_QUERY, encoder_runs.answer_encoder_run)


def answer_aborted(core: Any, request_id: str) -> str:
    """Utility call: the timeline of a request that ended without a first token; "" when unknown.

    Removes it, so that it can be read once.
    """
    return scheduler.aborted_timelines.pop(request_id[-scheduler.MAX_ID_CHARS :], "")


HOOKS: Final = {
    "engine.input": wrap.Hook(before=stamp_engine_input, after=attach_timeline, extend=add_queries)
}
