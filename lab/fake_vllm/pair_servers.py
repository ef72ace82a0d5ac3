# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode server with vLLM's behaviour, for the router's tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from lab.fake_vllm.instances import FakeInstance, InstancePlan, run_fake
from ttft_otel.model import timing
from ttft_otel.tracing import clock

BLOCK_TOKENS = 8
ANSWER_TOKENS = ("Hel", "lo", ", ", "you")  # the generated tokens; token i has the id 100 + i
CHAT_PATH = "/v1/chat/completions"


@dataclass
class PairModel:
    """State shared by both servers, and how they misbehave."""

    tokens: Sequence[str] = ANSWER_TOKENS
    length: int = 5  # tokens of every prompt
    nixl: bool = True  # whether the prefill server returns kv_transfer_params
    finish: str = "length"  # its finish reason
    first: str = ""  # the decode server's first token, if it differs from the prefill server's
    slow: float = 0.02  # seconds of prefill
    late: float = 0.0  # seconds before the decode server responds
    gap: float = 0.01  # seconds after each of its events
    merged: int = 1  # tokens in its first event
    created: int = 100
    block: int = BLOCK_TOKENS
    longest: int = 1000  # tokens of the model's context
    refuses: int = 0  # the decode server's status for a stream
    stuck: float = 0.0  # seconds before it takes the prefill server's blocks
    held_requests: set[str] = field(default_factory=set)  # whose blocks the prefill server keeps
    is_foreign: bool = False  # the prefill server's answers are not of vLLM's form


class PairServer(FakeInstance):
    """The prefill server, or the decode server if `is_decode`."""

    def __init__(self, model: PairModel, is_decode: bool) -> None:
        super().__init__(InstancePlan())
        self.model = model
        self.is_decode = is_decode

    def build_app(self) -> web.Application:
        """Also the metrics that the router reads."""
        app = super().build_app()
        app.router.add_get("/metrics", self.answer_metrics)
        return app

    async def answer_models(self, request: web.Request) -> web.Response:
        """One model with its context length."""
        card = {"id": "tiny", "max_model_len": self.model.longest}
        return web.json_response({"object": "list", "data": [card]})

    async def answer_metrics(self, _: web.Request) -> web.Response:
        """The line that says how long a block is."""
        labels = f'block_size="{self.model.block}",enable_prefix_caching="True",engine="0"'
        return web.Response(text=f"# HELP x\nvllm:cache_config_info{{{labels}}} 1.0\n")

    async def _answer_request(self, request: web.Request) -> web.StreamResponse:
        model = self.model
        body = await request.json()
        kv_params = body.get("kv_transfer_params") or {}
        start = clock.now_us()
        if body.get("model") != "tiny":
            model.held_requests.discard(kv_params.get("remote_request_id", ""))
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        if kv_params.get("do_remote_prefill"):
            await asyncio.sleep(model.stuck)
            model.held_requests.discard(kv_params["remote_request_id"])
        await asyncio.sleep(model.late if self.is_decode else model.slow)
        max_tokens = int(body.get("max_tokens", body.get("max_completion_tokens", 16)))
        texts = list(model.tokens)[:max_tokens]
        if self.is_decode and model.first:
            texts[0] = model.first
        spent = clock.now_us() - start
        stage = "kv.transfer" if self.is_decode else "prefill.compute"
        headers = {"Server-Timing": timing.format_server_timing({stage: spent}, 0, spent)}
        if self.is_decode and body.get("stream") and model.refuses:
            error = {"error": {"message": "refused", "code": model.refuses}}
            return web.json_response(error, status=model.refuses)
        if not body.get("stream"):
            keep = bool(kv_params.get("do_remote_decode")) and model.nixl
            return web.json_response(
                self._build_answer(request, body, texts, keep), headers=headers
            )
        return await self._stream_answer(request, body, texts, headers)

    def _build_answer(
        self, request: web.Request, body: dict[str, Any], texts: list[str], keep: bool
    ) -> dict[str, Any]:
        chat = request.path == CHAT_PATH
        model = self.model
        choice: dict[str, Any] = {"index": 0, "finish_reason": model.finish, "stop_reason": None}
        answer: dict[str, Any] = {"id": self._build_id(request), "created": 100, "model": "tiny"}
        text = "".join(texts)
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        answer |= {
            "choices": [choice],
            "usage": self._build_usage(len(texts)),
            "kv_transfer_params": None,
        }
        if model.is_foreign:
            answer["created"] = "now"
        if keep:
            key = f"{self._build_id(request)}-p"
            model.held_requests.add(key)
            answer["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_request_id": key,
                "remote_host": "10.0.0.1",
                "remote_port": 5600,
            }
        return answer

    async def _stream_answer(
        self,
        request: web.Request,
        body: dict[str, Any],
        texts: list[str],
        headers: dict[str, str],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        chat = request.path == CHAT_PATH
        top = {"id": self._build_id(request), "created": self.model.created, "model": "tiny"}
        event_texts = ["".join(texts[: self.model.merged]), *texts[self.model.merged :]]
        first = True
        for number, text in enumerate(event_texts):
            delta: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            end = "length" if number == len(event_texts) - 1 else None
            if chat and first:
                role = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                await write_event(response, top | {"choices": [{"index": 0, **role}]})
            first = False
            await write_event(
                response, top | {"choices": [{"index": 0, **delta, "finish_reason": end}]}
            )
            await asyncio.sleep(self.model.gap)
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = self._build_usage(len(texts))
            await write_event(response, top | {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    def _build_usage(self, completion_tokens: int) -> dict[str, int]:
        prompt_tokens = self.model.length
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
        }

    def _build_id(self, request: web.Request) -> str:
        return f"cmpl-{request.headers['X-Request-Id']}"


async def write_event(response: web.StreamResponse, event: dict[str, Any]) -> None:
    """Write one server-sent event in one piece, as vLLM does."""
    data = json.dumps(event, separators=(",", ":"))
    await response.write(f"data: {data}\n\n".encode())


@contextlib.asynccontextmanager
async def run_server(model: PairModel, is_decode: bool) -> AsyncIterator[PairServer]:
    """Run the prefill server, or the decode server if `is_decode`."""
    server = PairServer(model, is_decode)
    async with run_fake(server):
        yield server
