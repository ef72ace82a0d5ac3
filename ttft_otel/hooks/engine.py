# SPDX-License-Identifier: Apache-2.0
"""Engine core's input thread: end of ipc, and the Journey that a traced Request carries with it.

scheduler.py takes the Journey over; `ttft_otel_died` answers the API server's question where an
aborted request was, `ttft_otel_sent` how long blocks were kept, over vLLM's own utility channel.
"""

from __future__ import annotations

from typing import Any, Final

from ttft_otel import clock, names
from ttft_otel.carrier import DIED, SENT, Journey
from ttft_otel.hooks import kv, scheduler, wrap


def entering(core: Any, request: Any, *args: Any, **kwargs: Any) -> int | None:
    """Before preprocess_add_request(): pure IPC ends here, what follows is queueing."""
    headers = request.trace_headers
    return clock.now() if headers and names.CARRIER in headers else None


def entered(added: int, result: Any, core: Any, *args: Any, **kwargs: Any) -> None:
    """After it: hang the Journey on vLLM's Request, so that it goes when the request goes."""
    result[0]._ttft = Journey(added=added)
    if not hasattr(type(core), DIED):
        setattr(type(core), DIED, died)
        setattr(type(core), SENT, kv.sent)


def died(core: Any, request_id: str) -> str:
    """Utility call: the marks of a request that ended without a first token, once; "" if unknown."""
    return scheduler.dead.pop(request_id, "")


HOOKS: Final = {"engine.input": wrap.Hook(before=entering, after=entered)}
