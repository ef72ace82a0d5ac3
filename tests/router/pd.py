# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode server that keep vLLM's contract, NIXL's fatal assertion included."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from router import fakes
from ttft_otel import clock, timing

BLOCK = 8
TOKENS = ("Hel", "lo", ", ", "you")  # what the model says; token i has the id 100 + i
CHAT = "/v1/chat/completions"


@dataclass
class Model:
    """What both servers know, and how they misbehave.

    length: tokens of every prompt. kept: requests whose blocks P still holds. nixl: P says where its
    blocks are. finish: P's finish reason. first: D's own first token. slow: seconds in P; late:
    seconds before D answers. merged: D's first event holds so many tokens.
    """

    tokens: Sequence[str] = TOKENS
    length: int = 5
    nixl: bool = True
    finish: str = "length"
    first: str = ""
    slow: float = 0.02
    late: float = 0.0
    merged: int = 1
    created: int = 100
    block: int = BLOCK
    longest: int = 1000
    version: str = "0.32.0+cpu"
    refuses: int = 0  # D's status for a stream
    stuck: float = 0.0  # seconds before D takes P's blocks
    kept: set[str] = field(default_factory=set)
    dead: bool = False


class Server(fakes.Instance):
    """Either of them; `decodes` says which."""

    def __init__(self, model: Model, decodes: bool) -> None:
        super().__init__(fakes.Plan())
        self.model, self.decodes = model, decodes

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        model, body = self.model, await request.json()
        params = body.get("kv_transfer_params") or {}
        if model.dead and self.decodes:
            return web.json_response({"error": {"message": "EngineDeadError"}}, status=500)
        start = clock.now()
        if body.get("model") != "tiny":
            model.kept.discard(params.get("remote_request_id", ""))
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        ids = params.get("prompt_token_ids") or body.get("prompt")
        given = len(ids) - model.length if isinstance(ids, list) else 0
        if params.get("do_remote_prefill"):
            await asyncio.sleep(model.stuck)
            model.dead = given > 0 and model.length % BLOCK == 0
            model.kept.discard(params["remote_request_id"])
        await asyncio.sleep(model.late if self.decodes else model.slow)
        most = int(body.get("max_tokens", body.get("max_completion_tokens", 16)))
        said = list(model.tokens)[given : given + most]
        if self.decodes and model.first and not given:
            said[0] = model.first
        spent = clock.now() - start
        stage = "kv.transfer" if self.decodes else "prefill.compute"
        headers = {"Server-Timing": timing.write({stage: spent}, 0, spent)}
        if self.decodes and body.get("stream") and model.refuses:
            error = {"error": {"message": "refused", "code": model.refuses}}
            return web.json_response(error, status=model.refuses)
        if not body.get("stream"):
            keep = params.get("do_remote_decode") and model.nixl
            return web.json_response(self._plain(request, body, said, keep), headers=headers)
        return await self._stream(request, body, said, given, headers)

    def _plain(
        self, request: web.Request, body: dict[str, Any], said: list[str], keep: bool
    ) -> dict[str, Any]:
        chat, one = request.path == CHAT, self.model
        choice: dict[str, Any] = {"index": 0, "finish_reason": one.finish, "stop_reason": None}
        answer: dict[str, Any] = {"id": self._id(request), "created": 100, "model": "tiny"}
        text = "".join(said)
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        if body.get("return_token_ids"):
            choice["token_ids"] = [100]
            (answer if chat else choice)["prompt_token_ids"] = list(range(1, one.length + 1))
        answer |= {"choices": [choice], "usage": self._usage(len(said)), "kv_transfer_params": None}
        if keep:
            key = f"{self._id(request)}-p"
            one.kept.add(key)
            answer["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_request_id": key,
                "remote_host": "10.0.0.1",
                "remote_port": 5600,
            }
        return answer

    async def _stream(
        self,
        request: web.Request,
        body: dict[str, Any],
        said: list[str],
        given: int,
        headers: dict[str, str],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        chat = request.path == CHAT
        top = {"id": self._id(request), "created": self.model.created, "model": "tiny"}
        texts = ["".join(said[: self.model.merged]), *said[self.model.merged :]]
        first = True
        for number, text in enumerate(texts):
            delta: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            end = "length" if number == len(texts) - 1 else None
            if chat and first:
                role = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                await write(response, top | {"choices": [{"index": 0, **role}]})
            first = False
            await write(response, top | {"choices": [{"index": 0, **delta, "finish_reason": end}]})
            await asyncio.sleep(0.01)
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = self._usage(len(said), given)
            await write(response, top | {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    def _usage(self, said: int, given: int = 0) -> dict[str, int]:
        prompt = self.model.length + given
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + said,
            "completion_tokens": said,
        }

    def _id(self, request: web.Request) -> str:
        return f"cmpl-{request.headers['X-Request-Id']}"


async def write(response: web.StreamResponse, event: dict[str, Any]) -> None:
    """One server-sent event, in one piece, as vLLM writes it."""
    data = json.dumps(event, separators=(",", ":"))
    await response.write(f"data: {data}\n\n".encode())


@contextlib.asynccontextmanager
async def server(model: Model, decodes: bool) -> AsyncIterator[Server]:
    """A running one."""
    made = Server(model, decodes)

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def models(_: web.Request) -> web.Response:
        card = {"id": "tiny", "max_model_len": model.longest}
        return web.json_response({"object": "list", "data": [card]})

    async def metrics(_: web.Request) -> web.Response:
        labels = f'block_size="{model.block}",enable_prefix_caching="True",engine="0"'
        return web.Response(text=f"# HELP x\nvllm:cache_config_info{{{labels}}} 1.0\n")

    async def version(_: web.Request) -> web.Response:
        return web.json_response({"version": model.version})

    app = web.Application()
    app.router.add_get("/version", version)
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/metrics", metrics)
    app.router.add_post("/{path:.*}", made.handle)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    sock = fakes.free()
    await web.SockSite(runner, sock).start()
    made.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        yield made
    finally:
        await runner.cleanup()


@dataclass
class Fleet:
    """P, D, what they share, and the router before them."""

    model: Model
    prefill: Server
    decode: Server
    router: fakes.Router

    async def ask(self, path: str = CHAT, **fields: Any) -> Answer:
        """One streamed request."""
        body: dict[str, Any] = {"model": "tiny", "stream": True, "max_tokens": 4}
        body |= (
            {"prompt": "x"} if path != CHAT else {"messages": [{"role": "user", "content": "x"}]}
        )
        status, headers, data = await self.router.post(path, body | fields)
        return Answer(status, headers, data)

    async def freed(self) -> bool:
        """Whether P holds nothing any more, soon."""
        for _ in range(100):
            if not self.model.kept:
                return True
            await asyncio.sleep(0.01)
        return False


@dataclass
class Answer:
    """What the client got."""

    status: int
    headers: Any
    data: bytes

    @property
    def events(self) -> list[Any]:
        """Its events, parsed; [DONE] as it is."""
        texts = [each.removeprefix(b"data: ") for each in self.data.split(b"\n\n") if each]
        return [text.decode() if text == b"[DONE]" else json.loads(text) for text in texts]

    @property
    def texts(self) -> list[str]:
        """The texts of its events, the preamble's left out."""
        choices = [each["choices"][0] for each in self.events[:-1] if each.get("choices")]
        deltas = [choice.get("delta", choice) for choice in choices]
        return [delta.get("content", delta.get("text")) for delta in deltas if "role" not in delta]


@contextlib.asynccontextmanager
async def fleet(mode: str = "strip", **fields: Any) -> AsyncIterator[Fleet]:
    """One P, one D and a router in this mode; fields as in Model."""
    model = Model(**fields)
    async with (
        server(model, False) as prefill,
        server(model, True) as decode,
        fakes.router(
            [], prefills=[prefill.url], decodes=[decode.url], first_token=mode, pace=0.05
        ) as router,
    ):
        yield Fleet(model, prefill, decode, router)
