# SPDX-License-Identifier: Apache-2.0
"""An LMCache controller that answers to harm the router: requests are routed without it, at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from attack.loop_watch import watch_loop
from ttft_otel.router.routing import prefixes
from ttft_otel.router.routing.policies.block_keys import compute_block_keys
from ttft_otel.router.routing.prefixes import PrefixSource, lmcache_source
from ttft_otel.router.routing.prompts.prompt_reader import Prompt
from ttft_otel.router.types import parse_instance_url
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.router.upstream.query_client import QueryClient

A, B = "http://127.0.0.1:1", "http://127.0.0.2:2"
PROMPT_IDS = tuple(range(64))
PROMPT = Prompt(64, PROMPT_IDS, compute_block_keys(PROMPT_IDS, 16))
ABSURD = {
    "lists in lists": b'{"layout_info":' + b"[" * 60_000,
    "maps in maps": b'{"layout_info":' + b'{"a":' * 10_000,
    "infinite": b'{"layout_info":{"a":["x",1e999]}}',
    "digits": b'{"layout_info":{"a":["x",' + b"9" * 50_000 + b"]}}",
    "digits as text": b'{"layout_info":{"a":["x","' + b"9" * 50_000 + b'"]}}',
    "no number": b'{"layout_info":{"a":["x",NaN]}}',
    "not text": b'{"layout_info":{"\xff":["x",1]}}',
    "empty lists": b'{"layout_info":[' + b"[]," * 5_000_000 + b"[]]}",
    "too long": b'{"layout_info":{"a":["' + b"x" * 20_000_000 + b'",1]}}',
}


@dataclass
class HostileController:
    """Answers every question with `body`, or by `answer_question`."""

    body: bytes = b"{}"
    answer_question: Callable[[int], web.StreamResponse] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    questions: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """POST to any path."""
        await request.read()
        self.questions += 1
        if self.answer_question:
            return self.answer_question(self.questions)
        return web.Response(body=self.body, headers=self.headers)


@asynccontextmanager
async def run_controller(controller: HostileController) -> AsyncIterator[str]:
    """A server of this controller; gives its URL."""
    app = web.Application()
    app.router.add_post("/{path:.*}", controller.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def run_source(controller: HostileController, *names: str) -> AsyncIterator[PrefixSource]:
    """A source before this controller, for instances A and B; its loop is watched."""
    async with run_controller(controller) as url, QueryClient() as queries:
        source = prefixes.build_source("lmcache", lmcache_url=url, lmcache_instances=names)
        try:
            pool = InstancePool({"mono": [parse_instance_url(each, "mono") for each in (A, B)]})
            await source.start(queries, pool)
            async with watch_loop():
                yield source
        finally:
            await source.close()


@pytest.fixture(autouse=True)
def extend_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is judged, not how fast this machine sends it."""
    monkeypatch.setattr(lmcache_source, "LOOKUP_TIMEOUT_S", 30.0)


@pytest.mark.parametrize("body", ABSURD.values(), ids=ABSURD.keys())
async def test_absurd_answers(body: bytes) -> None:
    """A malformed, deep or long answer is counted; prefixes that were sent decide instead."""
    controller = HostileController(body)

    async with run_source(controller, "a", "b") as source:
        source.index.record_served(B, PROMPT.block_keys)
        assert await source.look_up("m", PROMPT, [A, B]) is None
        counts = source.describe_instances()[A]["counts"]
        assert counts == {"failed": 1}
        assert source.index.match_blocks(PROMPT.block_keys, [A, B]) == [0, 4]


async def test_more_than_the_prompt() -> None:
    """A reported match is limited to the length of the prompt, and to zero from below."""
    huge = b'{"layout_info":{"a":["x",1000000000000000000],"b":["x",-5],"c":["x",64]}}'

    async with run_source(HostileController(huge), "a", "b") as source:
        assert await source.look_up("m", PROMPT, [A, B]) == {A: 64, B: 0}


async def test_redirect() -> None:
    """Prompts go to the controller's configured URL only: redirects are not followed."""
    victim = HostileController()

    async with run_controller(victim) as url:

        def answer_redirect(_: int) -> web.Response:
            return web.Response(status=307, headers={"Location": f"{url}/lookup"})

        controller = HostileController(answer_question=answer_redirect)
        async with run_source(controller, "a", "b") as source:
            assert await source.look_up("m", PROMPT, [A, B]) is None
            assert source.describe_instances()[A]["counts"] == {"failed": 1}
    assert victim.questions == 0


async def test_names_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance has one ID at a time, however often the controller gives it another."""
    monkeypatch.setattr(lmcache_source, "LOCATE_INTERVAL_S", 0.0)

    def answer_name(count: int) -> web.Response:
        return web.json_response({"instance_id": f"name {count}"})

    controller = HostileController(answer_question=answer_name)

    async with run_source(controller) as source:
        assert isinstance(source, lmcache_source.LMCacheSource)
        while controller.questions < 50:
            await asyncio.sleep(0.01)
        assert set(source._url_by_id.values()) <= {A, B} and len(source._url_by_id) <= 2
