# SPDX-License-Identifier: Apache-2.0
"""What the hooks cost where they run: per traced request in the API server and the engine core, per
pure-decode step in core and worker, with a KV connector too. Host objects are plain stand-ins with empty
methods; the cost of the same calls without our wrappers is taken off, in turn (A B A B), median of the
rounds.

    python benchmarks/hooks.py [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import process_time_ns
from types import SimpleNamespace
from typing import Any

from ttft_otel import carrier, clock, handoff, meter, names, recorder
from ttft_otel.asgi import Middleware
from ttft_otel.carrier import Journey
from ttft_otel.hooks import engine, frontend, kv, scheduler, worker, wrap
from ttft_otel.hooks.targets import BY_NAME
from ttft_otel.settings import Settings

ROUNDS = 15
REQUESTS = 400
STEPS = 2000


class Sink:
    """Takes records and forgets them."""

    def send(self, data: bytes) -> bool:
        """Always room."""
        return True


class Host:
    """The methods of vLLM that we wrap, with nothing in them."""

    requests: dict[str, Any] = {}

    def schedule(self, output: Any) -> Any:
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        return model_runner_output.outputs

    def preprocess_add_request(self, request: Any) -> Any:
        return (request.made, 0)

    def _free_request(self, request: Any) -> None:
        return None

    def execute_model(self, scheduler_output: Any) -> None:
        self._execute_mm_encoder(scheduler_output)
        self._model_forward()

    def _execute_mm_encoder(self, scheduler_output: Any) -> None:
        return None

    def _model_forward(self) -> None:
        return None

    def _sample(self) -> None:
        return None

    def sample_tokens(self, result: Any) -> Any:
        self._sample()
        return result

    def start_load_kv(self, context: Any) -> None:
        return None

    def wait_for_save(self) -> None:
        return None

    def _update_from_kv_xfer_finished(self, output: Any) -> None:
        return None


def wrapped() -> type[Host]:
    """Host with our hooks in, as wrap.py puts them into vLLM."""

    class Wrapped(Host):
        pass

    for target, name in (
        ("scheduler.schedule", "schedule"),
        ("scheduler.update", "update_from_output"),
        ("scheduler.free", "_free_request"),
        ("engine.input", "preprocess_add_request"),
        ("worker.execute", "execute_model"),
        ("worker.encoder", "_execute_mm_encoder"),
        ("worker.forward", "_model_forward"),
        ("worker.sample", "_sample"),
        ("worker.tokens", "sample_tokens"),
        ("kv.load", "start_load_kv"),
        ("kv.save", "wait_for_save"),
        ("kv.arrive", "_update_from_kv_xfer_finished"),
    ):
        hooks = {**scheduler.HOOKS, **engine.HOOKS, **worker.HOOKS, **kv.HOOKS}
        wrap.put(BY_NAME[target], Wrapped, name, hooks[target])
    return Wrapped


def paired(plain: Callable[[], int], ours: Callable[[], int], count: int) -> float:
    """Microseconds per unit that `ours` takes more than `plain`: median over A B A B rounds."""
    plain(), ours()
    return statistics.median((ours() - plain()) / count / 1000 for _ in range(ROUNDS))


def step(new: list[Any], ids: dict[str, int]) -> Any:
    """A SchedulerOutput as the hooks read it."""
    return SimpleNamespace(
        scheduled_new_reqs=new,
        num_scheduled_tokens=ids,
        scheduled_encoder_inputs={},
        total_num_scheduled_tokens=sum(ids.values()),
        preempted_req_ids=None,
        ec_connector_metadata=None,
    )


def decode_steps(kind: type[Host]) -> int:
    """Pure decode: a batch of 64, nobody awaits a first token. CPU ns for STEPS steps."""
    host = kind()
    output = step([], {f"r{n}": 1 for n in range(64)})
    result = SimpleNamespace(outputs={}, req_ids=["r0"])
    began = process_time_ns()
    for _ in range(STEPS):
        host.schedule(output)
        host.execute_model(output)
        host.sample_tokens(result)
        host.update_from_output(output, result)
    return process_time_ns() - began


def connector_steps(kind: type[Host]) -> int:
    """What a KV connector's hooks add to such a step. CPU ns for STEPS steps."""
    host = kind()
    began = process_time_ns()
    for _ in range(STEPS):
        host.start_load_kv(None)
        host.wait_for_save()
        host._update_from_kv_xfer_finished(None)
    return process_time_ns() - began


def core_requests(kind: type[Host]) -> int:
    """One text request of one chunk through the engine core. CPU ns for REQUESTS requests."""
    host = kind()
    made = []
    for n in range(REQUESTS):
        name = f"r{n}"
        request = SimpleNamespace(
            request_id=name,
            trace_headers={names.CARRIER: "1", names.TRACEPARENT: "x"},
            num_computed_tokens=100,
            num_prompt_tokens=100,
            num_tokens=100,
            mm_features=None,
            kv_transfer_params=None,
        )
        entered = SimpleNamespace(trace_headers=request.trace_headers, made=request)
        new = step([SimpleNamespace(req_id=name)], {name: 100})
        first = SimpleNamespace(request_id=name, trace_headers=request.trace_headers)
        outputs = {0: SimpleNamespace(outputs=[first])}
        result = SimpleNamespace(outputs=outputs, _ttft=(1, 9, 0, 10, 5, 8))
        made.append((name, request, entered, new, result))
    Host.requests = {name: request for name, request, *_ in made}
    began = process_time_ns()
    for _, request, entered, new, result in made:
        host.preprocess_add_request(entered)
        host.schedule(new)
        host.update_from_output(new, result)
        host._free_request(request)
    return process_time_ns() - began


async def app(scope: Any, receive: Any, send: Any) -> None:
    """A stream of one chunk; `marks` tells whether our front-end hooks run inside it."""
    if scope["marks"]:
        trip_marks(scope["id"])
    await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
    await send({"type": "http.response.body", "body": b"data: x\n\n", "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
CARRIED = carrier.fold(
    Journey(
        added=10**9,
        scheduled=10**9 + 1,
        entered=10**9 + 5,
        prompt=9,
        steps=[(clock.boot_once(), 10**9 + 4, 0, 10, 10**9 + 2, 10**9 + 3)],
    )
)
REQUEST = SimpleNamespace(request_id="", trace_headers=None, sampling_params=True)
OUTPUT = SimpleNamespace(request_id="", trace_headers={names.CARRIER: CARRIED})


def trip_marks(name: str) -> None:
    """The front-end hooks of one text request."""
    frontend.rendering()
    token = frontend.starting()
    frontend.HOOKS["frontend.tokenize"].after(token)  # type: ignore[misc]
    REQUEST.request_id = OUTPUT.request_id = name
    frontend.assigned(None, None, REQUEST)
    frontend.registering(None, REQUEST)
    frontend.received(frontend.receiving(), None, None, [OUTPUT])


def api_requests(handler: Any, marks: bool) -> int:
    """REQUESTS requests through the ASGI app. CPU ns."""

    async def run() -> int:
        headers = [(b"host", b"x"), (b"content-type", b"application/json"), (b"accept", b"*/*")]
        scopes = [
            {
                "type": "http",
                "method": "POST",
                "path": "/v1/chat/completions",
                "headers": headers,
                "app": None,
                "marks": marks,
                "id": f"r{n}",
            }
            for n in range(REQUESTS)
        ]
        began = process_time_ns()
        for scope in scopes:
            await handler(scope, receive, send)
        return process_time_ns() - began

    return asyncio.run(run())


async def receive() -> dict[str, Any]:
    return {"type": "http.request"}


async def send(message: Any) -> None:
    return None


def figures() -> dict[str, dict[str, Any]]:
    """All figures, in microseconds of CPU time."""
    kind = wrapped()
    handoff.sender = Sink  # type: ignore[assignment]
    meter.sent()

    def middle(sampler: str) -> Middleware:
        settings = Settings(on=True, sampler=sampler)
        return Middleware(app, settings, lambda _: None, None)  # type: ignore[arg-type]

    def api(sampler: str, marks: bool) -> float:
        traced = middle(sampler)
        return paired(
            lambda: api_requests(app, False), lambda: api_requests(traced, marks), REQUESTS
        )

    recorder.identity.role = "mono"
    found = {
        "api_request_us": (api("always_on", True), 60),
        "api_request_unsampled_us": (api("always_off", False), 10),
        "core_request_us": (
            paired(lambda: core_requests(Host), lambda: core_requests(kind), REQUESTS),
            5,
        ),
        "decode_step_us": (
            paired(lambda: decode_steps(Host), lambda: decode_steps(kind), STEPS),
            1,
        ),
        "decode_step_connector_us": (
            paired(lambda: connector_steps(Host), lambda: connector_steps(kind), STEPS),
            0.5,
        ),
    }
    return {
        name: {"value": round(value, 3), "goal": goal, "met": value <= goal}
        for name, (value, goal) in found.items()
    }


def main() -> None:
    """Measure, print, and write the file that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write {figure: {value, goal, met}} there")
    wanted = parser.parse_args()
    found = figures()
    for name, figure in found.items():
        sys.stdout.write(f"{name:28} {figure['value']:8.2f}   goal {figure['goal']}\n")
    if wanted.json:
        wanted.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
