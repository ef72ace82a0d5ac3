# SPDX-License-Identifier: Apache-2.0
"""The router's token ids equal the engine's for random chats and completions of all forms."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import shutil
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from PIL import Image

from lab import free_ports, tiny_models
from lab.local_servers import LocalServer
from lab.server_commands import HOST, ServerCommand, VllmOptions, build_vllm_environment
from tests.live.bench import LiveDeployment
from ttft_otel.router.routing.prompts.prompt_reader import LocalPromptReader, build_reader
from ttft_otel.router.routing.prompts.tokenizer_worker import Prompt
from ttft_otel.router.types import parse_instance_url
from ttft_otel.router.upstream.connection_pool import QueryClient
from ttft_otel.router.upstream.instance_pool import HealthMonitor, InstancePool

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
BLOCK_TOKENS = 16
REQUESTS = 80
SLOW = 900  # seconds: a server starts within it
PIECES = (
    "Hello", " world", "\n", "\n\n", "  ", "\t", "\r\n", "don't", "12345", "a" * 50, "",
    "é", "e\u0301", "\u200b", "\u2028", "日本語", "العربية", "😀👩‍👩‍👧", "🇩🇪",
    *("<|im_end|>", "<|im_start|>", "<|image_pa", "<|endoftext|>", "{{ x }}", "{% if %}"),
)  # fmt: skip
SIDES = ((1, 1), (28, 28), (30, 57), (500, 300), (1024, 768), (3, 400), (2000, 1500))
ROLES = ("user", "user", "assistant", "tool", "system")
# Prints all that it gets: what the tiny model's own template leaves out differs too.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m | tojson }}{% if m['content'] is not string %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|image_pad|>{% else %}{{ c['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{{ tools | tojson if tools else '' }}{{ documents | tojson if documents else '' }}"
    "{{ [enable_thinking, reasoning_effort, other, unread is defined, add_generation_prompt] }}"
)


class RandomRequests:
    """Random requests from a seed, within what vLLM accepts."""

    def __init__(self, seed: int, vision: bool = True) -> None:
        self.random = random.Random(seed)
        self.vision = vision

    def happens(self, share: float) -> bool:
        """True with this probability."""
        return self.random.random() < share

    def make_text(self, most: int = 12) -> str:
        """A few random pieces of text."""
        return "".join(self.random.choices(PIECES, k=self.random.randint(0, most)))

    def make_picture(self) -> dict[str, Any]:
        """An image of random size and format; JPEG with a random orientation, as from a camera."""
        kind, out = self.random.choice(("PNG", "JPEG", "GIF", "WEBP", "BMP")), BytesIO()
        image = Image.new("RGB", self.random.choice(SIDES), self.random.choice(("red", "blue")))
        exif = Image.Exif()
        exif[0x0112] = self.random.choice((1, 3, 6, 8))
        image.save(out, kind, **({"exif": exif.tobytes()} if kind == "JPEG" else {}))
        data = base64.b64encode(out.getvalue()).decode()
        return {
            "type": "image_url",
            "image_url": {"url": f"data:image/{kind.lower()};base64,{data}"},
        }

    def make_content(self) -> Any:
        """A text, or a list of text parts and images."""
        if self.happens(0.5):
            return self.make_text()
        parts: list[dict[str, Any]] = []
        for _ in range(self.random.randint(0, 4)):
            seen = self.vision and self.happens(0.4)
            parts.append(
                self.make_picture() if seen else {"type": "text", "text": self.make_text()}
            )
        return parts

    def make_message(self) -> dict[str, Any]:
        """A message of a random role."""
        role = self.random.choice(ROLES)
        found: dict[str, Any] = {"role": role, "content": self.make_text()}
        if role == "user":
            found["content"] = self.make_content()
        elif role == "assistant" and self.happens(0.5):
            arguments = self.random.choice(('{"b": 1, "a": "é"}', "", "[]", "{bad", '{"x": [1]}'))
            function = {"name": "f", "arguments": arguments}
            found["tool_calls"] = [{"id": "c", "type": "function", "function": function}]
            found["content"] = self.random.choice((None, "", "calls"))
            found["reasoning_content"] = self.make_text()
        elif role == "tool":
            found["tool_call_id"] = "c"
            found["content"] = [{"type": "text", "text": self.make_text()} for _ in range(2)]
        if self.happens(0.1):
            found["name"] = "somebody"
        return found

    def make_chat(self) -> dict[str, Any]:
        """A conversation with random options."""
        messages = [self.make_message() for _ in range(self.random.randint(1, 6))]
        body: dict[str, Any] = {"messages": messages}
        if self.happens(0.3):
            function = {
                "parameters": {"b": {}, "a": {}},
                "name": "f",
                "description": self.make_text(),
            }
            body["tools"] = [{"type": "function", "function": function}]
            body["tool_choice"] = "none"
        if self.happens(0.2):
            messages.append({"role": "assistant", "content": f"{self.make_text()}so "})
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.happens(0.2):
            body["chat_template_kwargs"] = {"enable_thinking": False, "other": 1, "nobody's": 2}
        if self.happens(0.1):
            body["documents"] = [{"title": "t", "text": "x"}]
        if self.happens(0.1):
            body["reasoning_effort"] = self.random.choice(("low", "none"))
        if self.happens(0.1):
            body["add_special_tokens"] = True
        return body

    def make_completion(self) -> dict[str, Any]:
        """One prompt or two, as text or as token ids."""
        ids = [self.random.randint(0, 300) for _ in range(self.random.randint(1, 60))]
        text = f"{self.make_text(200)}x"
        body = {"prompt": self.random.choice((text, text, ids, [text, "y"], [ids, [4, 5]]))}
        return {**body, "add_special_tokens": self.happens(0.8)}

    def make_request(self) -> tuple[str, bytes]:
        """The path and the body of a random request."""
        chat = self.happens(0.7)
        body = self.make_chat() if chat else self.make_completion()
        common = {"model": "tiny", "max_tokens": 1, "return_token_ids": True}
        return CHAT if chat else COMPLETION, json.dumps({**common, **body}).encode()


def make_closing_connector() -> aiohttp.TCPConnector:
    """A connector without keep-alive: after a 500 vLLM closes the connection, which fails a next request."""
    return aiohttp.TCPConnector(force_close=True)


async def load_reader(queries: QueryClient, url: str, mode: Any) -> LocalPromptReader:
    """A local prompt reader for this instance whose tokenizer is loaded."""
    fleet = InstancePool({"mono": [parse_instance_url(url, "mono")]})
    health = HealthMonitor(fleet)
    health.queries = queries
    for each in fleet:
        assert await health.refresh_models(each) == 200
    found = build_reader(None, mode, fleet)
    await found.start(queries)
    while await found.read_prompt(COMPLETION, "tiny", b'{"prompt": "x"}', BLOCK_TOKENS) is None:
        await asyncio.sleep(0.1)
    return found


def read_engine_tokens(path: str, answer: dict[str, Any]) -> tuple[int, list[int]]:
    """The number of prompt tokens as the engine counts them, and the first prompt's ids."""
    first = answer if path == CHAT else answer["choices"][0]
    return answer["usage"]["prompt_tokens"], first["prompt_token_ids"]


async def compare_token_ids(url: str) -> tuple[int, int]:
    """Compare each request's ids; returns the number of requests and of placeholder tokens of images."""
    requests, taken, pictures = RandomRequests(7), 0, 0
    async with (
        aiohttp.ClientSession(connector=make_closing_connector()) as session,
        QueryClient() as queries,
    ):
        read = await load_reader(queries, url, "local")
        try:
            for _ in range(REQUESTS):
                path, body = requests.make_request()
                named = {"Content-Type": "application/json"}
                async with session.post(
                    f"{url}{path}", data=BytesIO(body), headers=named
                ) as answer:
                    if answer.status != 200:
                        continue
                    tokens, ids = read_engine_tokens(path, await answer.json())
                found = await read_patiently(read, path, body)
                assert found.tokens == tokens, body[:2000]
                if found.token_ids:
                    assert list(found.token_ids) == ids, body[:2000]
                taken, pictures = taken + 1, pictures + sum(found.item_tokens)
        finally:
            await read.close()
    assert not read.counts["differs"]
    return taken, pictures


async def read_patiently(read: LocalPromptReader, path: str, body: bytes) -> Prompt:
    """Read a prompt with several attempts: on a busy machine the limit of one second can be too short."""
    for _ in range(30):
        late = read.counts["failed-late"] + read.counts["failed-loading"]
        found = await read.read_prompt(path, "tiny", body, BLOCK_TOKENS)
        if found is not None:
            return found
        if read.counts["failed-late"] + read.counts["failed-loading"] == late:
            break
        await asyncio.sleep(0.5)
    raise AssertionError((read.counts, body[:2000]))


@pytest.mark.timeout(SLOW)
def test_ids_are_the_engines(newer: LiveDeployment) -> None:
    """For every prompt that the server accepts our ids equal its own, placeholders of images included."""
    taken, pictures = asyncio.run(compare_token_ids(newer.front_url))

    assert taken > 0.9 * REQUESTS
    assert pictures > 1000


@pytest.fixture
def render(tmp_path: Path) -> Iterator[LocalServer]:
    """vLLM's renderer without an engine, with a template that prints everything it is given."""
    folder = tmp_path / "model"
    skipped = shutil.ignore_patterns("*.safetensors", "chat_template.jinja")
    shutil.copytree(tiny_models.build_model(tiny_models.VISION_RECIPE), folder, ignore=skipped)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    port = free_ports.find_free_port()
    argv = (
        sys.executable, "-m", "vllm.entrypoints.cli.main", "launch", "render", str(folder),
        "--served-model-name", "tiny", "--host", HOST, "--port", str(port),
    )  # fmt: skip
    env = {**build_vllm_environment(VllmOptions(model=folder)), "TTFT_OTEL": "0"}
    with LocalServer(ServerCommand("render", argv, env, port), tmp_path / "render.log") as server:
        yield server


async def compare_with_renderer(url: str, requests: RandomRequests) -> None:
    """Render each request by vLLM and here: both give the same, or both refuse it, which few are."""
    same, refused = 0, 0
    async with QueryClient() as queries:
        local, engine = [await load_reader(queries, url, mode) for mode in ("local", "engine")]
        try:
            for _ in range(REQUESTS):
                path, body = requests.make_request()
                refusals = engine.counts["failed-refused"]
                try:
                    found = await read_patiently(engine, path, body)
                except AssertionError:
                    refused += 1
                    assert engine.counts["failed-refused"] > refusals
                    continue
                ours = await read_patiently(local, path, body)
                assert (ours.tokens, ours.item_tokens) == (found.tokens, found.item_tokens)
                assert list(ours.token_ids) == list(found.token_ids), body[:2000]
                if not found.item_tokens:  # what stands for a picture is the engine's own
                    assert ours.block_keys == found.block_keys
                same += 1
        finally:
            await local.close()
            await engine.close()
    assert same > 0.8 * REQUESTS
    assert same + refused == REQUESTS


@pytest.mark.timeout(SLOW)
def test_both_ways_are_one(small: LiveDeployment) -> None:
    """vLLM's renderer and the local tokenizer give the same ids and blocks for a prompt."""
    asyncio.run(compare_with_renderer(small.front_url, RandomRequests(8, vision=False)))


@pytest.mark.full
@pytest.mark.timeout(SLOW)
def test_both_ways_are_one_with_images(render: LocalServer) -> None:
    """The same with images, and a template that prints all it gets."""
    asyncio.run(compare_with_renderer(render.url, RandomRequests(8)))
