# SPDX-License-Identifier: Apache-2.0
"""An API server of vLLM's shape in FastAPI, with our hooks, for test_coexistence.py; another tool starts it.

It prints its port, answers a completion with what others have put around it, and ends with its input.
"""

from __future__ import annotations

import json
import socket
import sys
import threading

from ttft_otel.hooks import api_server, wrap

PATCHER = wrap.Patcher()
app_hook = {
    "frontend.app": api_server.build_hooks(PATCHER, api_server.DirectCallTracer(PATCHER))[
        "frontend.app"
    ]
}
PATCHER.install_hooks(app_hook)

import fastapi  # noqa: E402 - the hook is installed before, as by vLLM
import uvicorn  # noqa: E402

app = fastapi.FastAPI()


@app.post("/v1/completions")
async def complete() -> dict[str, str]:
    """Nothing is generated; the answer says which tracers are there."""
    return {"tracers": ",".join(sorted({"ddtrace", "opentelemetry.sdk.trace"} & set(sys.modules)))}


listener = socket.create_server(("127.0.0.1", 0))
sys.stdout.write(json.dumps(listener.getsockname()[1]) + "\n")
sys.stdout.flush()
server = uvicorn.Server(uvicorn.Config(app, log_level="error"))


def stop_at_end_of_input() -> None:
    """The test closes our standard input."""
    sys.stdin.read()
    server.should_exit = True


threading.Thread(target=stop_at_end_of_input, daemon=True).start()
server.run([listener])
