# SPDX-License-Identifier: Apache-2.0
"""Engine core's input thread: end of ipc, and the Journey that a traced Request carries with it.

scheduler.py takes the Journey over; `ttft_otel_died` answers the API server's question where an
aborted request was, over vLLM's own utility channel.
"""

from __future__ import annotations

from typing import Any, Final

from ttft_otel import clock, names
from ttft_otel.carrier import Journey
from ttft_otel.hooks import scheduler, wrap


def entering(core: Any, request: Any, *args: Any, **kwargs: Any) -> int | None:
    """Before preprocess_add_request(): pure IPC ends here, what follows is queueing."""
    headers = request.trace_headers
    return clock.now() if headers and names.CARRIER in headers else None


def entered(added: int, result: Any, core: Any, *args: Any, **kwargs: Any) -> None:
    """After it: hang the Journey on vLLM's Request, so that it goes when the request goes."""
    result[0]._ttft = Journey(added=added)
    if not hasattr(type(core), DIED):
        setattr(type(core), DIED, died)


def died(core: Any, request_id: str) -> str:
    """Utility call: the marks of a request that ended without a first token, once; "" if unknown."""
    return scheduler.dead.pop(request_id, "")


DIED: Final = "ttft_otel_died"

HOOKS: Final = {"engine.input": wrap.Hook(before=entering, after=entered)}
