# SPDX-License-Identifier: Apache-2.0
"""An API server of vLLM's shape on a still clock: ASGI app, renderer, processors, an engine's marks.

Its times in microseconds: receive 10, preprocess 200, ipc 20, queue 30, dispatch 40, forward 500,
sample 6, output 94 (so the first token is processed at 900), then 5 to the first chunk.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ttft_otel import breakdown, carrier, clock, names
from ttft_otel.asgi import Middleware
from ttft_otel.hooks import frontend, wrap
from ttft_otel.hooks.targets import BY_NAME
from ttft_otel.settings import Settings
from ttft_otel.testing import Clock

FIRST = 900  # until process_outputs has returned
EGRESS = 5
DECODE = 4000
STAGES = {
    "receive": 10,
    "preprocess": 200,
    "ipc": 20,
    "prefill.queue": 30,
    "dispatch": 40,
    "prefill.compute": 500,
    "sample": 6,
    "output": 94,
}


@dataclass
class Plan:
    """What the server does: `early` chunks come before the first token; `fail` names where it raises."""

    stream: bool = True
    status: int = 200
    early: tuple[bytes, ...] = ()
    fail: str = ""
    count: int = 1
    marks: bool = True
    kept: bool = False
    reports: list[str] = field(default_factory=list)


class Renderer:
    """As in vllm/renderers/base.py."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    async def render_chat_async(self, request: Any) -> None:
        """Template, then tokenizer."""
        self.clock.tick(50)
        await self.tokenize_prompts_async([request])
        await self.process_for_engine_async({"prompt": "x", "multi_modal_data": {}})

    async def tokenize_prompts_async(self, prompts: Any) -> None:
        """The tokenizer."""
        self.clock.tick(100)

    async def process_for_engine_async(self, prompt: Any) -> None:
        """The multimodal processor."""
        self.clock.tick(50)


class Processors:
    """vLLM's input and output processor in one."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.requests: dict[str, Any] = {}

    @staticmethod
    def assign_request_id(request: Any) -> None:
        """The engine's own id."""
        request.request_id += "-1f"

    def add_request(self, request: Any, prompt: str | None = None) -> None:
        """The request leaves."""
        self.requests[request.request_id] = request

    def process_outputs(self, engine_core_outputs: Any) -> None:
        """Detokenize."""
        self.clock.tick(4)


def classes() -> tuple[Any, Any]:
    """Renderer and processors, classes of their own, carrying the real hooks."""
    renderer = type("Renderer", (Renderer,), dict(vars(Renderer)))
    processors = type("Processors", (Processors,), dict(vars(Processors)))
    for target, kind, name in (
        ("frontend.render", renderer, "render_chat_async"),
        ("frontend.tokenize", renderer, "tokenize_prompts_async"),
        ("frontend.multimodal", renderer, "process_for_engine_async"),
        ("frontend.assign", processors, "assign_request_id"),
        ("frontend.register", processors, "add_request"),
        ("frontend.outputs", processors, "process_outputs"),
    ):
        wrap.put(BY_NAME[target], kind, name, frontend.HOOKS[target])
    return renderer, processors


class Server:
    """The app; `died` is what its engine core answers about a request that is no more, `sent` how
    long it kept one's blocks.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.plan = Plan()
        self.renderer, self.processors = (kind(clock) for kind in classes())
        self.waiting = asyncio.Event()
        self.count = 0
        self.died = ""
        self.sent = ""
        self.asked: list[str] = []
        self.state = SimpleNamespace(engine_client=SimpleNamespace(engine_core=self))

    async def call_utility_async(self, method: str, engine_id: str) -> str:
        """vLLM's utility channel to the engine core."""
        self.asked.append(engine_id)
        return self.sent if method == carrier.SENT else self.died

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        scope["app"], scope["route"] = self, SimpleNamespace(path=scope["path"])
        self.clock.tick(10)
        self._maybe("body")
        if self.plan.status != 200:
            await say(send, self.plan.status, b"{}", "application/json")
            return
        await self.renderer.render_chat_async({})
        await asyncio.sleep(0)  # others' turn
        sent = self._leave()
        if self.plan.stream:
            await start(send, 200, "text/event-stream; charset=utf-8")
            for chunk in self.plan.early:
                await body(send, chunk)
        self._maybe("queue")
        if self.plan.fail == "hang":
            self.waiting.set()
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        self.clock.tick(FIRST - 210 - 4)
        self.processors.process_outputs([self._output(name, at) for name, at in sent.items()])
        self.clock.tick(EGRESS)
        if not self.plan.stream:
            self.clock.tick(DECODE)
            await say(send, 200, b"{}", "application/json")
            return
        await body(send, b"data: one\n\n")
        self.clock.tick(DECODE)
        self._maybe("decode")
        await body(send, b"data: two\n\n", last=True)

    def _maybe(self, where: str) -> None:
        if self.plan.fail == where:
            raise RuntimeError("the host's own")

    def _leave(self) -> dict[str, int]:
        self.count += 1
        request = SimpleNamespace(
            request_id=f"chat-{self.count}", sampling_params=object(), trace_headers=None
        )
        self.processors.assign_request_id(request)
        sent = {}
        for number in range(self.plan.count):
            child = SimpleNamespace(**vars(request))
            if self.plan.count > 1:
                child.request_id = f"{number}_{request.request_id}"
            self.processors.add_request(child, "prompt")
            sent[child.request_id] = self.clock.at
        return sent

    def _output(self, name: str, left: int) -> Any:
        headers = self.processors.requests.pop(name).trace_headers
        if headers is None or not self.plan.marks:
            return SimpleNamespace(request_id=name, trace_headers=None)
        begin = left + 20 + 30 + 40
        journey = carrier.Journey(added=left + 20, scheduled=left + 50, entered=begin + 550)
        journey.prompt, journey.chunks, journey.kept = 12, 1, self.plan.kept
        journey.step((clock.boot_once(), begin + 506, 0, breakdown.FORWARD, begin, begin + 500))
        return SimpleNamespace(
            request_id=name, trace_headers={names.CARRIER: carrier.fold(journey)}
        )


async def start(send: Any, status: int, kind: str) -> None:
    """The response's head."""
    headers = [(b"content-type", kind.encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def body(send: Any, data: bytes, last: bool = False) -> None:
    """A chunk."""
    await send({"type": "http.response.body", "body": data, "more_body": not last})


async def say(send: Any, status: int, data: bytes, kind: str) -> None:
    """A whole answer."""
    await start(send, status, kind)
    await body(send, data, last=True)


class Client:
    """Calls the server through the middleware and keeps what came, with its time."""

    def __init__(self, server: Server, settings: Settings) -> None:
        self.server = server
        self.app = Middleware(server, settings, frontend.know, frontend.ask)
        self.came: list[tuple[int, Any]] = []
        self.sends: list[Any] = []

    async def call(self, path: str = "/v1/chat/completions", **headers: str) -> None:
        """One POST; header names' underscores are hyphens."""
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "scheme": "http",
            "headers": [
                (name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()
            ],
        }
        await self.app(scope, self.receive, self.send)
        while waits := self.app.late | self.app.kept:
            await asyncio.gather(*waits)

    async def receive(self) -> Any:
        """Nothing more comes from the client."""
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        """Keep what came."""
        self.came.append((self.server.clock.at - 1_000_000, message))

    def types(self) -> list[str]:
        """What came, in order: `start` and each body."""
        return [
            "start" if message["type"].endswith("start") else message["body"].decode().strip()
            for _, message in self.came
        ]

    def header(self, name: str = names.TIMING) -> str:
        """A header of the response, "" when it has none."""
        return str(dict(self.came[0][1]["headers"]).get(name.encode(), b"").decode())


@asynccontextmanager
async def hanging(client: Client, call: Callable[[], Any]) -> AsyncIterator[asyncio.Task[None]]:
    """A call that waits in the engine's queue."""
    client.server.plan.fail = "hang"
    task = asyncio.ensure_future(call())
    await client.server.waiting.wait()
    yield task
