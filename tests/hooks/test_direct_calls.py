# SPDX-License-Identifier: Apache-2.0
"""Requests that reach the engine without HTTP: whose trace they are, where it begins, and how it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace as trace_api
from opentelemetry.sdk.trace import TracerProvider

from hooks.process import DIRECT, wrap_methods
from hooks.server import DECODE_US, STAGES_US, FakeApiServer, FakeClient, ServerPlan
from ttft_otel import testing
from ttft_otel.model.names import keys
from ttft_otel.tracing import recorder

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


class FakeEngine:
    """AsyncLLM as its callers see it, in front of the fake server's processors."""

    def __init__(self, server: FakeApiServer) -> None:
        self.server = server
        self.vllm_config = None
        self.engine_core = server
        self.sent: dict[str, int] = {}

    async def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: Any,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Any = None,
        trace_headers: Any = None,
    ) -> str:
        """Preprocess, then hand over."""
        await self.server.renderer.render_chat_async({})
        self.sent = self.server._send_to_engine()
        return request_id

    async def generate(self, request_id: str, *, is_left: bool = False, **options: Any) -> None:
        """As AsyncLLM.generate(): all outputs of one request."""
        params = SimpleNamespace(output_kind=SimpleNamespace(name="DELTA"))
        await self.add_request(request_id, "prompt", params, **options)
        server, sent = self.server, self.sent
        if is_left:
            server.processors.abort_requests(list(sent))
            await wait_for_queries()
            return
        server.clock.tick(900 - 210 - 4)
        outputs = [server._make_output(name, at) for name, at in sent.items()]
        server.processors.process_outputs(outputs)
        server._decode(sent)


async def wait_for_queries() -> None:
    """Until the engine core has answered what is asked about aborted requests."""
    while DIRECT.ending.abort_tasks:
        await asyncio.gather(*DIRECT.ending.abort_tasks)


@pytest.fixture
def engine(client: FakeClient) -> Iterator[FakeEngine]:
    """An engine with our hooks around it."""
    kind = type("Engine", (FakeEngine,), dict(vars(FakeEngine)))
    wrap_methods(kind, {"frontend.direct": "add_request"})
    yield kind(client.server)
    assert not DIRECT.calls and not recorder.awaiting_traces and not recorder.unended_requests


def test_stages(engine: FakeEngine, records: testing.MemorySender) -> None:
    """The stages of an HTTP request but for those of HTTP; the sum is exact."""
    asyncio.run(engine.generate("r1"))
    ttft = next(each.ttft for each in records.kept if each.ttft is not None)

    expected = {name: us for name, us in STAGES_US.items() if name != "receive"}
    assert {**ttft.stages} == expected
    assert ttft.unattributed == 0
    assert ttft.end == sum(expected.values())


def test_span_of_the_call(engine: FakeEngine, records: testing.MemorySender) -> None:
    """Its span has no HTTP, ends with the generation, and is sent after the `ttft` span."""
    asyncio.run(engine.generate("r1"))
    first, second = records.kept

    assert first.ttft is not None and first.server is None
    assert second.ttft is None and second.server is not None
    assert (second.span_id, second.trace_id) == (first.span_id, first.trace_id)
    assert keys.HTTP_METHOD not in second.server.attributes
    assert second.server.attributes[keys.DIRECT] is True
    assert second.server.status == 0
    assert second.server.name.startswith("generate_content")
    assert second.server.end == first.ttft.end + DECODE_US


@pytest.mark.parametrize("name", ["traceparent", "Traceparent"])
def test_parent_of_the_caller(engine: FakeEngine, records: testing.MemorySender, name: str) -> None:
    """What the caller hands to vLLM as trace headers is the parent."""
    asyncio.run(engine.generate("r1", trace_headers={name: PARENT}))

    assert {(each.trace_id, each.parent_id) for each in records.kept} == {(TRACE_ID, SPAN_ID)}


def test_parent_is_the_current_span(engine: FakeEngine, records: testing.MemorySender) -> None:
    """Without headers it is the current OpenTelemetry span of the caller."""
    with TracerProvider().get_tracer("caller").start_as_current_span("agent"):
        above = trace_api.get_current_span().get_span_context()
        asyncio.run(engine.generate("r1"))

    assert {each.trace_id for each in records.kept} == {f"{above.trace_id:032x}"}
    assert {each.parent_id for each in records.kept} == {f"{above.span_id:016x}"}


def test_malformed_parent(engine: FakeEngine, records: testing.MemorySender) -> None:
    """A malformed header begins a new trace; nothing is lost."""
    asyncio.run(
        engine.generate("r1", trace_headers={"traceparent": "née", "tracestate": "x" * 999})
    )

    assert len(records.kept) == 2
    assert records.kept[0].parent_id == ""


def test_arrival_of_the_caller(engine: FakeEngine, records: testing.MemorySender) -> None:
    """What the caller did before the call is preprocess, if it says when the request arrived."""
    asyncio.run(engine.generate("r1", arrival_time=time.time() - 2))
    ttft = records.kept[0].ttft

    assert ttft is not None
    assert 2_000_000 <= ttft.stages["preprocess"] - STAGES_US["preprocess"] < 2_500_000
    assert ttft.end == sum(ttft.stages.values())


@pytest.mark.parametrize("age_s", [-5.0, 1e9])
def test_unbelievable_arrival(
    engine: FakeEngine, records: testing.MemorySender, age_s: float
) -> None:
    """An arrival in the future, or decades ago, is none."""
    asyncio.run(engine.generate("r1", arrival_time=time.time() - age_s))
    ttft = records.kept[0].ttft

    assert ttft is not None and ttft.stages["preprocess"] == STAGES_US["preprocess"]


def test_calls_of_one_task(engine: FakeEngine, records: testing.MemorySender) -> None:
    """Each call is a request of its own, also two that wait in one task, and vLLM's `n` is one request."""

    async def call_twice() -> None:
        params = SimpleNamespace()
        await engine.add_request("a", "prompt", params)
        first = engine.sent
        await engine.add_request("b", "prompt", params)
        for sent in (first, engine.sent):
            outputs = [engine.server._make_output(name, at) for name, at in sent.items()]
            engine.server.processors.process_outputs(outputs)
            engine.server._decode(sent)

    asyncio.run(call_twice())
    assert len({each.trace_id for each in records.kept}) == 2
    records.kept.clear()

    engine.server.plan = ServerPlan(count=3)
    asyncio.run(engine.generate("n"))
    assert len({each.span_id for each in records.kept}) == 1
    assert [each.server is not None for each in records.kept] == [False, True]


def test_single_token(engine: FakeEngine, records: testing.MemorySender) -> None:
    """vLLM notices the end of a one-token answer before its output: both halves are there, once."""

    async def call() -> None:
        await engine.add_request("one", "prompt", SimpleNamespace())
        server, sent = engine.server, engine.sent
        outputs = [server._make_output(name, at) for name, at in sent.items()]
        server.plan = ServerPlan(tokens=1)
        server._decode(sent)
        server.processors.process_outputs(outputs)

    asyncio.run(call())
    assert [each.ttft is not None for each in records.kept] == [True, False]
    assert [each.server is not None for each in records.kept] == [False, True]


def test_abort(engine: FakeEngine, records: testing.MemorySender) -> None:
    """A caller that leaves before the first token: the engine core is asked how far the request got."""
    asyncio.run(engine.generate("gone", is_left=True))
    (record,) = records.kept

    assert record.ttft is not None and record.ttft.error == keys.ERROR_CANCELLED
    assert engine.server.queried_ids


def test_without_a_loop(engine: FakeEngine, records: testing.MemorySender) -> None:
    """LLMEngine is called where no event loop runs: an aborted request is told without asking."""
    asyncio.run(engine.add_request("gone", "prompt", SimpleNamespace()))
    engine.server.processors.abort_requests(list(engine.sent))
    (record,) = records.kept

    assert record.ttft is not None and record.ttft.error == keys.ERROR_CANCELLED
    assert not engine.server.queried_ids


def test_engine_without_output(engine: FakeEngine, records: testing.MemorySender) -> None:
    """The engine's only output ends the request without a token: it has failed."""
    engine.server.plan = ServerPlan(ends="error")

    async def call() -> None:
        await engine.generate("failed")
        await wait_for_queries()

    asyncio.run(call())
    assert records.kept[-1].ttft is not None
    assert records.kept[-1].ttft.error == keys.ERROR_ENGINE


def test_not_sampled(engine: FakeEngine, records: testing.MemorySender) -> None:
    """A caller's decision not to sample holds."""
    asyncio.run(engine.generate("r1", trace_headers={"traceparent": PARENT[:-1] + "0"}))

    assert not records.kept


@pytest.mark.parametrize("sampled", [True, False])
def test_call_of_an_http_request(client: FakeClient, engine: FakeEngine, sampled: bool) -> None:
    """vLLM's own server calls the engine for a request that has a trace, or is not to have one."""
    server = client.server
    send = server._send_to_engine
    sent: dict[str, int] = {}

    async def add_request(self: Any, request_id: str, prompt: Any, params: Any) -> None:
        sent.update(send())

    kind = type("Inner", (), {"add_request": add_request})
    wrap_methods(kind, {"frontend.direct": "add_request"})

    def send_as_vllm() -> dict[str, int]:
        with pytest.raises(StopIteration):  # in the context of the HTTP request
            kind().add_request("x", "prompt", None).send(None)
        return sent

    server._send_to_engine = send_as_vllm  # type: ignore[method-assign]
    asyncio.run(client.call_server(traceparent=PARENT if sampled else PARENT[:-1] + "0"))

    assert sent
    assert len(client.records.kept) == (2 if sampled else 0)
    assert all(each.server is None or each.server.status == 200 for each in client.records.kept)
