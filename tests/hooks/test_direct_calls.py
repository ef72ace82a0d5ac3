# SPDX-License-Identifier: Apache-2.0
"""Requests that reach the engine without HTTP: whose trace they are, where it begins, and how it ends."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace as trace_api
from opentelemetry.sdk.trace import TracerProvider
from tracing_fakes import MemorySender

from hooks.process import DIRECT, wrap_copy, wrap_methods
from hooks.server import DECODE_US, STAGES_US, FakeApiServer, FakeClient, ServerPlan, send_answer
from ttft_otel.hooks import api_server
from ttft_otel.model.names import keys
from ttft_otel.model.record import Ttft
from ttft_otel.tracing import recorder

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
PARAMS = SimpleNamespace()


class FakeEngine:
    """AsyncLLM as its callers see it, in front of the fake server's processors."""

    def __init__(self, server: FakeApiServer) -> None:
        self.server = server
        self.vllm_config = None
        self.engine_core = server
        self.sent: dict[str, int] = {}

    async def add_request(self, request_id: str, prompt: Any, params: Any, **more: Any) -> str:
        """Preprocess, then hand over; of a stream each input, in a task of its own."""
        if isinstance(prompt, FakeSession):
            prompt.start(request_id)
            return request_id
        await self.server.renderer.render_chat_async({})
        self.sent = self.server.send_to_engine()
        return request_id

    async def generate(self, request_id: str, **options: Any) -> None:
        """As AsyncLLM.generate(): all outputs of one request."""
        params = SimpleNamespace(output_kind=SimpleNamespace(name="DELTA"))
        await self.add_request(request_id, "prompt", params, **options)
        self.server.clock.tick(900 - 210 - 4)
        self.answer(self.sent)
        await asyncio.sleep(0)  # what is done behind the outputs' readers

    def answer(self, sent: dict[str, int]) -> None:
        self.server.process_first(sent)
        self.server.decode(sent)


class FakeSession(AsyncGenerator[None, None]):
    """A stream of inputs, with the task in which AsyncLLM reads it, and the answers to them.

    age_s: since when each input was rendered, by the caller's wall clock.
    """

    def __init__(self, server: FakeApiServer, age_s: float = -1.0) -> None:
        self.server, self.age_s = server, age_s
        self.inputs: asyncio.Queue[bool] = asyncio.Queue()
        self.sent: list[tuple[Any, int]] = []
        self.name = ""

    async def asend(self, value: None) -> None:
        if not await self.inputs.get():
            raise StopAsyncIteration

    async def athrow(self, *args: Any) -> None:
        """As a generator that catches nothing."""
        raise StopAsyncIteration

    def start(self, request_id: str) -> None:
        self.name = request_id
        self.task = asyncio.create_task(self._handle_inputs())

    async def _handle_inputs(self) -> None:
        first = self._make_request(is_last=True)
        self.server.processors.assign_request_id(first)
        self.name = first.request_id
        async for _ in self:
            self._add(self._make_request())
        self._add(first)

    def _make_request(self, is_last: bool = False) -> Any:
        return SimpleNamespace(
            request_id=self.name, sampling_params=SimpleNamespace(extra_args=None),
            trace_headers=None, external_req_id="session", resumable=not is_last,
            arrival_time=time.time() - self.age_s,
        )  # fmt: skip

    def _add(self, request: Any) -> None:
        self.server.processors.add_request(request, "prompt")
        if not request.resumable:
            return
        self.sent.append((request, self.server.clock.at))
        state = self.server.processors.request_states.setdefault(
            self.name, SimpleNamespace(input_chunk_queue=None)
        )
        if state.input_chunk_queue is None:
            state.input_chunk_queue = deque()
        else:
            state.input_chunk_queue.append(request)

    async def put(self, *inputs: bool) -> None:
        """Give these inputs to the stream; False ends it."""
        for each in inputs:
            self.inputs.put_nowait(each)
        for _ in range(4):
            await asyncio.sleep(0)

    async def answer(self, number: int, tokens: int = 3, after_us: int = 900) -> None:
        request, at = self.sent[number]
        for token in range(tokens):
            self.server.clock.tick(DECODE_US if token else after_us)
            output = SimpleNamespace(request_id=self.name, trace_headers=None, new_token_ids=[7])
            if not token:
                self.server.processors.requests[self.name] = request
                output = self.server.make_output(self.name, at)
            output.finish_reason = "length" if token == tokens - 1 else None
            state = self.server.processors.request_states[self.name]
            if output.finish_reason and state.input_chunk_queue:
                state.input_chunk_queue.popleft()
            elif output.finish_reason:
                state.input_chunk_queue = None
            self.server.processors.process_outputs([output])
            await asyncio.sleep(0)


async def wait_for_queries() -> None:
    """Until the engine core has answered what is asked about aborted requests."""
    while DIRECT.ending.abort_tasks:
        await asyncio.gather(*DIRECT.ending.abort_tasks)


@pytest.fixture
def engine(client: FakeClient) -> Iterator[FakeEngine]:
    """An engine with our hooks around it."""
    yield wrap_copy(FakeEngine, {"frontend.direct": "add_request"})(client.server)
    assert not DIRECT.calls and not recorder.awaiting_traces and not recorder.unended_requests


def read_ttft(records: MemorySender) -> Ttft:
    """What was sent first."""
    ttft = records.kept[0].ttft
    assert ttft is not None and ttft.end == sum(ttft.stages.values()) + ttft.unattributed
    return ttft


async def test_call(engine: FakeEngine, records: MemorySender) -> None:
    """The stages of an HTTP request but for those of HTTP.

    Its span has no HTTP, ends with the generation, and is sent after the `ttft` span.
    """
    await engine.generate("r1")
    ttft, (first, second) = read_ttft(records), records.kept

    assert {**ttft.stages} == {name: us for name, us in STAGES_US.items() if name != "receive"}
    assert ttft.unattributed == 0 and first.server is None
    assert second.ttft is None and second.server is not None
    assert (second.span_id, second.trace_id) == (first.span_id, first.trace_id)
    assert keys.HTTP_METHOD not in second.server.attributes
    assert second.server.attributes[keys.DIRECT] is True
    assert second.server.status == 0
    assert second.server.name.startswith("generate_content")
    assert second.server.end == ttft.end + DECODE_US


@pytest.mark.parametrize("name", ["traceparent", "Traceparent"])
async def test_parent_of_the_caller(engine: FakeEngine, records: MemorySender, name: str) -> None:
    """What the caller hands to vLLM as trace headers is the parent."""
    await engine.generate("r1", trace_headers={name: PARENT})

    assert {(each.trace_id, each.parent_id) for each in records.kept} == {(TRACE_ID, SPAN_ID)}


async def test_parent_is_the_current_span(engine: FakeEngine, records: MemorySender) -> None:
    """Without headers it is the current OpenTelemetry span of the caller."""
    with TracerProvider().get_tracer("caller").start_as_current_span("agent"):
        above = trace_api.get_current_span().get_span_context()
        await engine.generate("r1")

    assert {each.trace_id for each in records.kept} == {f"{above.trace_id:032x}"}
    assert {each.parent_id for each in records.kept} == {f"{above.span_id:016x}"}


@pytest.mark.parametrize(("age_s", "told_s"), [(2.0, 2), (-5.0, 0), (1e9, 0)])
async def test_arrival_of_the_caller(
    engine: FakeEngine, records: MemorySender, age_s: float, told_s: int
) -> None:
    """What the caller did before the call is preprocess; an arrival in the future, or long ago, is none."""
    await engine.generate("r1", arrival_time=time.time() - age_s)
    before = read_ttft(records).stages["preprocess"] - STAGES_US["preprocess"]

    assert told_s * 1_000_000 <= before < told_s * 1_250_000 + 1


async def test_calls_of_one_task(engine: FakeEngine, records: MemorySender) -> None:
    """Each call is a request of its own, also two that wait in one task, and vLLM's `n` is one request."""
    await engine.add_request("a", "prompt", PARAMS)
    first = engine.sent
    await engine.add_request("b", "prompt", PARAMS)
    engine.answer(first)
    engine.answer(engine.sent)
    await asyncio.sleep(0)
    assert len({each.trace_id for each in records.kept}) == 2
    records.kept.clear()

    engine.server.plan = ServerPlan(count=3)
    await engine.generate("n")
    assert len({each.span_id for each in records.kept}) == 1
    assert [each.server is not None for each in records.kept] == [False, True]


async def test_single_token(engine: FakeEngine, records: MemorySender) -> None:
    """vLLM notices the end of a one-token answer before its output: both halves are there, once."""
    await engine.add_request("one", "prompt", PARAMS)
    engine.server.plan = ServerPlan(tokens=1)
    engine.server.decode(engine.sent)
    engine.server.process_first(engine.sent)
    await asyncio.sleep(0)

    assert [each.ttft is not None for each in records.kept] == [True, False]
    assert [each.server is not None for each in records.kept] == [False, True]


async def test_abort(engine: FakeEngine, records: MemorySender) -> None:
    """A caller that leaves before the first token: the engine core is asked how far the request got."""
    await engine.add_request("gone", "prompt", PARAMS)
    engine.server.processors.abort_requests(list(engine.sent))
    await wait_for_queries()

    assert read_ttft(records).error == keys.ERROR_CANCELLED
    assert engine.server.queried_ids and len(records.kept) == 1


def test_without_a_loop(engine: FakeEngine, records: MemorySender) -> None:
    """LLMEngine is called where no event loop runs: an aborted request is told without asking."""
    asyncio.run(engine.add_request("gone", "prompt", PARAMS))
    engine.server.processors.abort_requests(list(engine.sent))

    assert read_ttft(records).error == keys.ERROR_CANCELLED
    assert not engine.server.queried_ids and len(records.kept) == 1


async def test_engine_without_output(engine: FakeEngine, records: MemorySender) -> None:
    """The engine's only output ends the request without a token: it has failed."""
    engine.server.plan = ServerPlan(ends="error")
    await engine.generate("failed")
    await wait_for_queries()

    assert records.kept[-1].ttft is not None
    assert records.kept[-1].ttft.error == keys.ERROR_ENGINE


@pytest.mark.parametrize("begins_first", [True, False])
async def test_background_response(
    client: FakeClient, engine: FakeEngine, begins_first: bool
) -> None:
    """What vLLM's task for it asks the engine is a request below the HTTP one, answered already or not."""
    tasks, answered = [], asyncio.Event()

    async def _run_background_request() -> None:
        await engine.add_request("r1", "prompt", PARAMS)
        if begins_first:
            await asyncio.wait_for(answered.wait(), 10)
        client.server.clock.tick(900)
        engine.answer(engine.sent)

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        scope["app"] = client.server
        tasks.append(asyncio.create_task(_run_background_request()))
        if begins_first:
            await asyncio.sleep(0)
            assert recorder.awaiting_traces
        await send_answer(send, 200, b'{"background":true}', "application/json")

    client.app.app = serve
    await client.call_server("/v1/responses")
    answered.set()
    await asyncio.gather(*tasks)
    await asyncio.sleep(0)

    kept = client.records.kept
    (http,) = [each for each in kept if each.server and keys.DIRECT not in each.server.attributes]
    ttft, end = [each for each in kept if each is not http]
    assert http.ttft is None and http.server is not None and http.server.error == ""
    assert ttft.ttft is not None and end.server is not None
    assert sum(ttft.ttft.stages.values()) == ttft.ttft.end and ttft.ttft.unattributed == 0
    for each in (ttft, end):
        assert (each.trace_id, each.parent_id) == (http.trace_id, http.span_id)


def check_inputs(records: MemorySender, ends: list[int]) -> None:
    """Each input has both halves of its own trace; sums are exact. ends: of their TTFTs, after 900 us."""
    firsts = [each for each in records.kept if each.ttft is not None]
    assert len({each.trace_id for each in firsts}) == len(firsts) == len(ends)
    assert [each.server is not None for each in records.kept] == [False, True] * len(firsts)
    for record, end in zip(firsts, ends, strict=True):
        ttft = record.ttft
        assert ttft is not None and record.request_id == "session"
        assert sum(ttft.stages.values()) == ttft.end == 904 + end
        assert ttft.stages["prefill.compute"] == STAGES_US["prefill.compute"]
        assert "preprocess" not in ttft.stages and ttft.unattributed == 0


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("at_once", [False, True])
async def test_inputs(
    engine: FakeEngine, records: MemorySender, at_once: bool, tokens: int
) -> None:
    """Each input of a stream is a request, which begins when vLLM has taken it.

    Where they come at once, outputs of one are not taken for the first one of those behind it.
    """
    session = FakeSession(engine.server)
    await engine.add_request("s", session, PARAMS)
    if at_once:
        await session.put(True, True, True, False)
    for number in range(3):
        if not at_once:
            engine.server.clock.tick(1_000_000)  # nobody speaks
            await session.put(True)
        await session.answer(number, tokens)
    await session.put(False)

    each = (904 + (tokens - 1) * (DECODE_US + 4)) * at_once
    check_inputs(records, [0, each, 2 * each])


async def test_input_within_an_answer(
    engine: FakeEngine, records: MemorySender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that comes while the answer before it runs waits for its end; untraced ones count, too."""
    begin, calls = recorder.begin_trace, []

    def begin_some(*args: Any) -> Any:
        calls.append(args)
        return None if len(calls) in (1, 3) else begin(*args)

    monkeypatch.setattr(recorder, "begin_trace", begin_some)
    session = FakeSession(engine.server)
    await engine.add_request("s", session, PARAMS)
    await session.put(True, True, True, True, False)
    for number in range(4):
        await session.answer(number)

    assert len(calls) == 4
    each = 904 + 2 * (DECODE_US + 4)
    check_inputs(records, [each, 3 * each])


async def test_aborted_inputs(engine: FakeEngine, records: MemorySender) -> None:
    """A session whose caller leaves ends with all of its inputs."""
    session = FakeSession(engine.server)
    await engine.add_request("s", session, PARAMS)
    await session.put(True, True, True)
    await session.answer(0, tokens=2)
    engine.server.processors.requests[session.name] = session.sent[1][0]
    engine.server.processors.abort_requests([session.name])
    await wait_for_queries()
    session.task.cancel()

    errors = [each.ttft.error for each in records.kept if each.ttft is not None]
    assert errors == ["", keys.ERROR_CANCELLED, keys.ERROR_CANCELLED]


async def test_rendered_input(engine: FakeEngine, records: MemorySender) -> None:
    """An input begins when vLLM began to render it, under the caller's span."""
    session = FakeSession(engine.server, age_s=2)
    await engine.add_request("s", session, SimpleNamespace(), trace_headers={"traceparent": PARENT})
    for number in range(2):
        await session.put(True)
        await session.answer(number)
    await session.put(False)

    assert {(each.trace_id, each.parent_id) for each in records.kept} == {(TRACE_ID, SPAN_ID)}
    for each in records.kept:
        if each.ttft is not None:
            assert 2_000_000 <= each.ttft.stages["preprocess"] < 2_500_000


async def test_too_many_inputs(
    engine: FakeEngine, records: MemorySender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those behind an input only so many are kept; the next one that finds nobody is traced again."""
    monkeypatch.setattr(api_server, "MAX_QUEUED_INPUTS", 1)
    session = FakeSession(engine.server)
    await engine.add_request("s", session, PARAMS)
    await session.put(True, True, True)
    for number in range(3):
        await session.answer(number)
    await session.put(True, False)
    await session.answer(3)

    check_inputs(records, [0, 904 + 2 * (DECODE_US + 4), 0])


@pytest.mark.parametrize("sampled", [True, False])
def test_call_of_an_http_request(client: FakeClient, engine: FakeEngine, sampled: bool) -> None:
    """vLLM's own server calls the engine for a request that has a trace, or is not to have one."""
    server = client.server
    send = server.send_to_engine
    sent: dict[str, int] = {}

    async def add_request(self: Any, request_id: str, prompt: Any, params: Any) -> None:
        sent.update(send())

    kind = type("Inner", (), {"add_request": add_request})
    wrap_methods(kind, {"frontend.direct": "add_request"})

    def send_as_vllm() -> dict[str, int]:
        with pytest.raises(StopIteration):  # in the context of the HTTP request
            kind().add_request("x", "prompt", None).send(None)
        return sent

    server.send_to_engine = send_as_vllm  # type: ignore[method-assign]
    asyncio.run(client.call_server(traceparent=PARENT if sampled else PARENT[:-1] + "0"))

    assert sent
    assert len(client.records.kept) == (2 if sampled else 0)
    assert all(each.server is None or each.server.status == 200 for each in client.records.kept)
