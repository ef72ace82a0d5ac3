# SPDX-License-Identifier: Apache-2.0
"""A prefill (P) and a decode (D) server with vLLM's behaviour, NIXL's fatal assertion included."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from router import fake_instances
from ttft_otel.model import timing
from ttft_otel.tracing import clock

BLOCK_TOKENS = 8
ANSWER_TOKENS = ("Hel", "lo", ", ", "you")  # the generated tokens; token i has the id 100 + i
CHAT_PATH = "/v1/chat/completions"


@dataclass
class PairModel:
    """State shared by both servers, and how they misbehave.

    length: tokens of every prompt. held_requests: requests whose blocks P still holds. nixl: whether P
    returns kv_transfer_params. finish: P's finish reason. first: D's first token, if it differs from P's.
    slow: seconds of prefill in P. late: seconds before D responds. gap: after each of its events. merged:
    tokens in D's first event.
    """

    tokens: Sequence[str] = ANSWER_TOKENS
    length: int = 5
    nixl: bool = True
    finish: str = "length"
    first: str = ""
    slow: float = 0.02
    late: float = 0.0
    gap: float = 0.01
    merged: int = 1
    created: int = 100
    block: int = BLOCK_TOKENS
    longest: int = 1000
    version: str = "0.32.0+cpu"
    refuses: int = 0  # D's status for a stream
    stuck: float = 0.0  # seconds before D takes P's blocks
    held_requests: set[str] = field(default_factory=set)
    is_dead: bool = False
    is_foreign: bool = False  # P's answers are not of vLLM's form


class PairServer(fake_instances.FakeInstance):
    """P, or D if `is_decode`."""

    def __init__(self, model: PairModel, is_decode: bool) -> None:
        super().__init__(fake_instances.InstancePlan())
        self.model, self.is_decode = model, is_decode

    async def _answer_request(self, request: web.Request) -> web.StreamResponse:
        model, body = self.model, await request.json()
        kv_params = body.get("kv_transfer_params") or {}
        if model.is_dead and self.is_decode:
            return web.json_response({"error": {"message": "EngineDeadError"}}, status=500)
        start = clock.now_us()
        if body.get("model") != "tiny":
            model.held_requests.discard(kv_params.get("remote_request_id", ""))
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        ids = kv_params.get("prompt_token_ids") or body.get("prompt")
        known_tokens = len(ids) - model.length if isinstance(ids, list) else 0
        if kv_params.get("do_remote_prefill"):
            await asyncio.sleep(model.stuck)
            model.is_dead = known_tokens > 0 and model.length % BLOCK_TOKENS == 0
            model.held_requests.discard(kv_params["remote_request_id"])
        await asyncio.sleep(model.late if self.is_decode else model.slow)
        max_tokens = int(body.get("max_tokens", body.get("max_completion_tokens", 16)))
        texts = list(model.tokens)[known_tokens : known_tokens + max_tokens]
        if self.is_decode and model.first and not known_tokens:
            texts[0] = model.first
        spent = clock.now_us() - start
        stage = "kv.transfer" if self.is_decode else "prefill.compute"
        headers = {"Server-Timing": timing.format_server_timing({stage: spent}, 0, spent)}
        if self.is_decode and body.get("stream") and model.refuses:
            error = {"error": {"message": "refused", "code": model.refuses}}
            return web.json_response(error, status=model.refuses)
        if not body.get("stream"):
            keep = kv_params.get("do_remote_decode") and model.nixl
            return web.json_response(
                self._build_answer(request, body, texts, keep), headers=headers
            )
        return await self._stream_answer(request, body, texts, known_tokens, headers)

    def _build_answer(
        self, request: web.Request, body: dict[str, Any], texts: list[str], keep: bool
    ) -> dict[str, Any]:
        chat, model = request.path == CHAT_PATH, self.model
        choice: dict[str, Any] = {"index": 0, "finish_reason": model.finish, "stop_reason": None}
        answer: dict[str, Any] = {"id": self._build_id(request), "created": 100, "model": "tiny"}
        text = "".join(texts)
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        if body.get("return_token_ids"):
            choice["token_ids"] = [100]
            (answer if chat else choice)["prompt_token_ids"] = list(range(1, model.length + 1))
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
        known_tokens: int,
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
            usage = self._build_usage(len(texts), known_tokens)
            await write_event(response, top | {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    def _build_usage(self, completion_tokens: int, known_tokens: int = 0) -> dict[str, int]:
        prompt_tokens = self.model.length + known_tokens
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
    """Run P, or D if `is_decode`."""
    pair_server = PairServer(model, is_decode)

    async def answer_health(_: web.Request) -> web.Response:
        return web.Response()

    async def answer_models(_: web.Request) -> web.Response:
        card = {"id": "tiny", "max_model_len": model.longest}
        return web.json_response({"object": "list", "data": [card]})

    async def answer_metrics(_: web.Request) -> web.Response:
        labels = f'block_size="{model.block}",enable_prefix_caching="True",engine="0"'
        return web.Response(text=f"# HELP x\nvllm:cache_config_info{{{labels}}} 1.0\n")

    async def answer_version(_: web.Request) -> web.Response:
        return web.json_response({"version": model.version})

    app = web.Application()
    app.router.add_get("/version", answer_version)
    app.router.add_get("/health", answer_health)
    app.router.add_get("/v1/models", answer_models)
    app.router.add_get("/metrics", answer_metrics)
    app.router.add_post("/{path:.*}", pair_server.handle_request)
    async with fake_instances.run_web_app(app) as pair_server.url:
        yield pair_server


@contextlib.asynccontextmanager
async def run_disaggregated(
    model: PairModel, encoder: fake_instances.InstancePlan | None = None, **options: Any
) -> AsyncIterator[tuple[Any, ...]]:
    """Run P and D with the same `model`, and a router; with a plan for one, an encoder before them.

    Gives the router, then the servers: encoder, P, D. options: of run_router.
    """
    async with contextlib.AsyncExitStack() as stack:
        encoders = []
        if encoder is not None:
            encoders.append(await stack.enter_async_context(fake_instances.run_instance(encoder)))
        prefill = await stack.enter_async_context(run_server(model, False))
        decode = await stack.enter_async_context(run_server(model, True))
        router = await stack.enter_async_context(
            fake_instances.run_router(
                [],
                [each.url for each in encoders],
                prefills=[prefill.url],
                decodes=[decode.url],
                **options,
            )
        )
        yield (router, *encoders, prefill, decode)


@dataclass
class PairFleet:
    """P, D, their shared state, and the router in front of them."""

    model: PairModel
    prefill: PairServer
    decode: PairServer
    router: fake_instances.RunningRouter

    async def send_request(self, path: str = CHAT_PATH, **fields: Any) -> PairAnswer:
        """Send a streamed request; `fields` override those of the body."""
        body: dict[str, Any] = {"model": "tiny", "stream": True, "max_tokens": 4}
        body |= (
            {"prompt": "x"}
            if path != CHAT_PATH
            else {"messages": [{"role": "user", "content": "x"}]}
        )
        status, headers, data = await self.router.post_body(path, body | fields)
        return PairAnswer(status, headers, data)

    async def wait_until_freed(self) -> bool:
        """Whether P releases all blocks within a second."""
        for _ in range(100):
            if not self.model.held_requests:
                return True
            await asyncio.sleep(0.01)
        return False


@dataclass
class PairAnswer:
    """The response that the client received."""

    status: int
    headers: Any
    body: bytes

    @property
    def events(self) -> list[Any]:
        """Its parsed events; [DONE] as text."""
        texts = [each.removeprefix(b"data: ") for each in self.body.split(b"\n\n") if each]
        return [text.decode() if text == b"[DONE]" else json.loads(text) for text in texts]

    @property
    def texts(self) -> list[str]:
        """The texts of its events, without the role event of a chat."""
        choices = [each["choices"][0] for each in self.events[:-1] if each.get("choices")]
        deltas = [choice.get("delta", choice) for choice in choices]
        return [delta.get("content", delta.get("text")) for delta in deltas if "role" not in delta]


@contextlib.asynccontextmanager
async def run_fleet(mode: str = "strip", **fields: Any) -> AsyncIterator[PairFleet]:
    """Run one P, one D and a router with --first-token `mode`; `fields` are those of PairModel."""
    model = PairModel(**fields)
    async with run_disaggregated(model, first_token=mode, probe_interval_s=0.05) as (
        router,
        prefill,
        decode,
    ):
        yield PairFleet(model, prefill, decode, router)
