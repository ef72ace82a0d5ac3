# SPDX-License-Identifier: Apache-2.0
"""An API server of vLLM's shape on a still clock: ASGI app, renderer, processors, an engine's marks.

Its times in microseconds: receive 10, preprocess 200, ipc 20, queue 30, dispatch 40, forward 500,
sample 6, output 94 (so the first token is processed at 900), then 5 to the first chunk.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tracing_fakes import FakeClock, MemorySender

from hooks.process import PATCHER, wrap_copy
from ttft_otel.hooks import api_server, vllm_fields
from ttft_otel.model import breakdown
from ttft_otel.model.names import header_names
from ttft_otel.model.record import Ttft
from ttft_otel.tracing import carrier, clock
from ttft_otel.tracing.asgi import TracingMiddleware
from ttft_otel.tracing.carrier import EngineDetails, EngineTimeline
from ttft_otel.tracing.settings import Settings

FIRST_TOKEN_US = 900  # until process_outputs has returned
EGRESS_US = 5
DECODE_US = 4000
STAGES_US = {
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
class ServerPlan:
    """What the server does: `early` chunks come before the first token; `fail` names where it raises.

    extra: SamplingParams.extra_args of its requests. background: it answers that they are queued.
    tokens, finish_reason: of each generation, told with its last step. external_id: of its requests.
    """

    stream: bool = True
    status: int = 200
    early: tuple[bytes, ...] = ()
    fail: str = ""
    count: int = 1
    marks: bool = True
    kept: int = 0  # bits of EngineDetails.kept
    ends: str = ""  # the engine's only output ends it with this reason and no token
    refused: int = 200  # the status after that, where it is one
    dies: bool = False  # there is no output at all, and the answer ends
    body: bytes = b"{}"  # of a plain answer
    answers_first: bool = False  # with `background`: nothing was sent to the engine yet
    extra: dict[str, Any] | None = None
    background: bool = False
    is_left: bool = False  # after the first chunk, as Starlette ends a stream then
    tokens: int = 5
    finish_reason: str = "stop"
    external_id: str = ""
    drafts: bool = False  # before its output is ready
    renders: bool = False  # it answers with the prompt's tokens, as `vllm launch render` does


class FakeRenderer:
    """As in vllm/renderers/base.py."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock

    async def render_chat_async(self, request: Any) -> None:
        self.clock.tick(50)
        await self.tokenize_prompts_async([request])
        await self.process_for_engine_async({"prompt": "x", "multi_modal_data": {}})

    async def tokenize_prompts_async(self, prompts: Any) -> None:
        self.clock.tick(100)

    async def process_for_engine_async(self, prompt: Any) -> None:
        self.clock.tick(50)


class FakeProcessors:
    """vLLM's input and output processor in one."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.requests: dict[str, Any] = {}
        self.request_states: dict[str, Any] = {}  # of sessions alone

    @staticmethod
    def assign_request_id(request: Any) -> None:
        request.request_id += "-1f"

    def add_request(self, request: Any, prompt: str | None = None) -> None:
        self.requests[request.request_id] = request

    def process_outputs(self, engine_core_outputs: Any) -> None:
        self.clock.tick(4)

    def abort_requests(self, request_ids: Any, internal: bool = False) -> list[str]:
        """The caller has left; returns the engine requests that there were."""
        return [each for each in request_ids if self.requests.pop(each, None) is not None]

    def _update_stats_from_finished(
        self, req_state: Any, finish_reason: Any, iteration_stats: Any
    ) -> None:
        """Called in process_outputs(), once for each request that has ended."""


def make_wrapped_classes() -> tuple[Any, Any]:
    """Renderer and processors, classes of their own, carrying the real hooks."""
    rendering = {
        "frontend.render": "render_chat_async",
        "frontend.tokenize": "tokenize_prompts_async",
        "frontend.multimodal": "process_for_engine_async",
    }
    processing = {
        "frontend.assign": "assign_request_id",
        "frontend.register": "add_request",
        "frontend.outputs": "process_outputs",
        "frontend.end": "_update_stats_from_finished",
        "frontend.abort": "abort_requests",
    }
    return wrap_copy(FakeRenderer, rendering), wrap_copy(FakeProcessors, processing)


class FakeApiServer:
    """The app; `died` is what its engine core answers about a request that is no more, `sent` how
    long it kept one's blocks, `fetched` its encodings.
    """

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.plan = ServerPlan()
        self.renderer, self.processors = (kind(clock) for kind in make_wrapped_classes())
        self.waiting = asyncio.Event()
        self.count = 0
        self.aborted_answer = ""
        self.blocks_answer = ""
        self.items_answer = ""
        self.encoder_answers: list[str] = []
        self.queried_ids: list[str] = []
        self.background_tasks: list[asyncio.Task[None]] = []
        self.state = SimpleNamespace(engine_client=SimpleNamespace(engine_core=self))

    async def call_utility_async(self, method: str, engine_id: str) -> str:
        """vLLM's utility channel to the engine core."""
        self.queried_ids.append(engine_id)
        self.clock.tick(10_000)  # what was kept is freed only then
        answers = {
            carrier.KEPT_BLOCKS_QUERY: self.blocks_answer,
            carrier.KEPT_ITEMS_QUERY: self.items_answer,
        }
        if method == carrier.ENCODER_QUERY:
            return self.encoder_answers.pop(0)
        return answers.get(method, self.aborted_answer)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope["app"], scope["route"] = self, SimpleNamespace(path=scope["path"])
        self.clock.tick(10)
        self._fail_if_planned("body")
        if self.plan.status != 200:
            await send_answer(send, self.plan.status, b"{}", "application/json")
            return
        await self.renderer.render_chat_async({})
        await asyncio.sleep(0)  # others' turn
        if self.plan.renders:
            await send_answer(send, 200, b"{}", "application/json")
            return
        if self.plan.answers_first or self.plan.background:
            if self.plan.answers_first:
                self.background_tasks.append(asyncio.create_task(self._run_background_request()))
            else:
                self.send_to_engine()
            body = b'{"id":"resp_1","background":true,"status":"queued"}'
            await send_answer(send, 200, body, "application/json")
            return
        sent = self.send_to_engine()
        if self.plan.stream:
            await send_head(send, 200, "text/event-stream; charset=utf-8")
            for chunk in self.plan.early:
                await send_chunk(send, chunk)
        if self.plan.dies:
            if self.plan.stream:
                await send_chunk(send, b"data: [DONE]\n\n", last=True)
            else:
                await send_answer(send, 200, self.plan.body, "application/json")
            return
        self._fail_if_planned("queue")
        if self.plan.fail == "hang":
            self.waiting.set()
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        self.clock.tick(FIRST_TOKEN_US - 210 - 4)
        self.process_first(sent)
        self.clock.tick(EGRESS_US)
        if self.plan.refused != 200:
            await send_answer(send, self.plan.refused, b"{}", "application/json")
            return
        if not self.plan.stream:
            self.decode(sent)
            await send_answer(send, 200, b"{}", "application/json")
            return
        await send_chunk(send, b"data: one\n\n")
        if self.plan.is_left:
            return
        self.decode(sent)
        await send_chunk(send, b"data: two\n\n", last=True)

    def decode(self, sent: dict[str, int]) -> None:
        """All further tokens of these, and their ends."""
        self.clock.tick(DECODE_US)
        self._fail_if_planned("decode")
        for name in sent:
            detokenizer = SimpleNamespace(num_output_tokens=lambda: self.plan.tokens)
            state = SimpleNamespace(request_id=name, detokenizer=detokenizer)
            self.processors._update_stats_from_finished(state, self.plan.finish_reason, None)

    async def _run_background_request(self) -> None:
        await asyncio.sleep(0.01)
        self.send_to_engine()  # and its client cancels it: there is no output

    def _fail_if_planned(self, where: str) -> None:
        if self.plan.fail == where:
            raise RuntimeError("the host's own")

    def send_to_engine(self) -> dict[str, int]:
        """A request, of as many engine requests as are planned: their IDs, and when each left."""
        self.count += 1
        request = SimpleNamespace(
            request_id=f"chat-{self.count}",
            sampling_params=SimpleNamespace(extra_args=self.plan.extra),
            trace_headers=None,
            external_req_id=self.plan.external_id or None,
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

    def process_first(self, sent: dict[str, int]) -> None:
        """The first outputs of the engine requests `sent` (ID -> when it left)."""
        self.processors.process_outputs([self.make_output(name, at) for name, at in sent.items()])

    def make_output(self, name: str, left: int) -> Any:
        """The first output of an engine request that left at `left`."""
        headers = self.processors.requests.pop(name).trace_headers
        if headers is not None and self.plan.marks:  # else as the request brought them
            text = carrier.encode_timeline(self._make_timeline(left))
            headers = {header_names.CARRIER_KEY: text}
        return SimpleNamespace(
            request_id=name,
            trace_headers=headers,
            finish_reason=self.plan.ends or None,
            new_token_ids=[] if self.plan.ends else [7],
        )

    def _make_timeline(self, left: int) -> EngineTimeline:
        if self.plan.ends and self.plan.ends != "stop":  # it waited for an encoding that never came
            return EngineTimeline(added=left + 20, details=EngineDetails(asked=left + 50))
        begin = left + 20 + 30 + 40
        timeline = EngineTimeline(added=left + 20, scheduled=left + 50, entered=begin + 550)
        timeline.prompt, timeline.chunks, timeline.complete = 12, 1, True
        timeline.details = EngineDetails(kept=self.plan.kept)
        step = (clock.get_boot_number(), begin + 506, 0, breakdown.CODE_FORWARD, begin, begin + 500)
        draft = (carrier.CODE_DRAFT, begin + 510, begin + 530) if self.plan.drafts else ()
        timeline.add_step(step + draft)
        return timeline


async def send_head(send: Any, status: int, kind: str) -> None:
    """The response's head."""
    headers = [(b"content-type", kind.encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def send_chunk(send: Any, data: bytes, last: bool = False) -> None:
    """A chunk."""
    await send({"type": "http.response.body", "body": data, "more_body": not last})


async def send_answer(send: Any, status: int, data: bytes, kind: str) -> None:
    """A whole answer."""
    await send_head(send, status, kind)
    await send_chunk(send, data, last=True)


class FakeClient:
    """Calls the server through the middleware and keeps what came, with its time."""

    def __init__(self, server: FakeApiServer, settings: Settings, records: MemorySender) -> None:
        self.server = server
        self.records = records  # that would have been sent to the exporter
        self.app = TracingMiddleware(
            server,
            settings,
            lambda app: api_server.identify_server(PATCHER, vllm_fields.get_vllm_config(app.state)),
            api_server.query_engine,
        )
        self.messages: list[tuple[int, Any]] = []
        self.sends: list[Any] = []

    def get_ttft(self) -> Ttft:
        (ttft,) = [record.ttft for record in self.records.kept if record.ttft is not None]
        return ttft

    def run(
        self, plan: ServerPlan | None = None, path: str = "/v1/chat/completions", **headers: str
    ) -> None:
        """One POST to a server that does as is planned."""
        self.server.plan = plan or ServerPlan()
        asyncio.run(self.call_server(path, **headers))

    async def call_server(self, path: str = "/v1/chat/completions", **headers: str) -> None:
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
        await asyncio.gather(*self.server.background_tasks)
        while waits := self.app.ending.abort_tasks | self.app.ending.kept_span_tasks:
            await asyncio.gather(*waits)

    async def receive(self) -> Any:
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.messages.append((self.server.clock.at - 1_000_000, message))

    def list_types(self) -> list[str]:
        """What came, in order: `start` and each body."""
        return [
            "start" if message["type"].endswith("start") else message["body"].decode().strip()
            for _, message in self.messages
        ]

    def get_header(self, name: str = header_names.SERVER_TIMING) -> str:
        """A header of the response, "" when it has none."""
        return str(dict(self.messages[0][1]["headers"]).get(name.encode(), b"").decode())


@asynccontextmanager
async def hang_in_queue(
    client: FakeClient, call: Callable[[], Any]
) -> AsyncIterator[asyncio.Task[None]]:
    """A call that waits in the engine's queue."""
    client.server.plan.fail = "hang"
    task = asyncio.ensure_future(call())
    await client.server.waiting.wait()
    yield task
