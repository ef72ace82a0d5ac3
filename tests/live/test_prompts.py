# SPDX-License-Identifier: Apache-2.0
"""The router's token ids are the engine's own, over random chats and completions of every shape."""

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

from tests.live.bench import Bench
from ttft_otel.lab import models, ports
from ttft_otel.lab.recipes import HOST, Command, Options, environment
from ttft_otel.lab.servers import Server
from ttft_otel.router.choose import instance
from ttft_otel.router.fleet import Fleet
from ttft_otel.router.health import Health
from ttft_otel.router.prompts import Prompt, Reader, reader

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
SIZE = 16
NUMBER = 80
SLOW = 900  # seconds: a server starts within it
PIECES = (
    *("Hello", " world", "\n", "\n\n", "  ", "\t", "\r\n", "don't", "12345", "a" * 50, ""),
    *("é", "e\u0301", "\u200b", "\u2028", "日本語", "العربية", "😀👩‍👩‍👧", "🇩🇪"),
    *("<|im_end|>", "<|im_start|>", "<|image_pa", "<|endoftext|>", "{{ x }}", "{% if %}"),
    "x-anthropic-billing-header: cch=1\nrest",
)
SIDES = ((1, 1), (28, 28), (30, 57), (500, 300), (1024, 768), (3, 400), (2000, 1500))
ROLES = ("user", "user", "assistant", "tool", "developer", "system")
# Prints all that it gets: what the tiny model's own template leaves out differs too.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m | tojson }}{% if m['content'] is not string %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|image_pad|>{% else %}{{ c['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{{ tools | tojson if tools else '' }}{{ documents | tojson if documents else '' }}"
    "{{ [enable_thinking, reasoning_effort, other, unread is defined, add_generation_prompt] }}"
)


class Requests:
    """Random ones of a seed; what a client may send and vLLM takes."""

    def __init__(self, seed: int, vision: bool = True) -> None:
        self.random = random.Random(seed)
        self.vision = vision

    def may(self, share: float) -> bool:
        """Sometimes."""
        return self.random.random() < share

    def text(self, most: int = 12) -> str:
        """Some pieces."""
        return "".join(self.random.choices(PIECES, k=self.random.randint(0, most)))

    def picture(self) -> dict[str, Any]:
        """One of any size and kind, JPEG's turned as cameras turn them."""
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

    def content(self) -> Any:
        """Text, or parts of it, with pictures."""
        if self.may(0.5):
            return self.text()
        parts: list[dict[str, Any]] = []
        for _ in range(self.random.randint(0, 4)):
            seen = self.vision and self.may(0.4)
            parts.append(self.picture() if seen else {"type": "text", "text": self.text()})
        return parts

    def message(self) -> dict[str, Any]:
        """Of any role."""
        role = self.random.choice(ROLES)
        found: dict[str, Any] = {"role": role, "content": self.text()}
        if role == "user":
            found["content"] = self.content()
        elif role == "assistant" and self.may(0.5):
            arguments = self.random.choice(('{"b": 1, "a": "é"}', "", "[]", "{bad", '{"x": [1]}'))
            function = {"name": "f", "arguments": arguments}
            found["tool_calls"] = [{"id": "c", "type": "function", "function": function}]
            found["content"] = self.random.choice((None, "", "calls"))
            found["reasoning_content"] = self.text()
        elif role == "tool":
            found["tool_call_id"] = "c"
            found["content"] = [{"type": "text", "text": self.text()} for _ in range(2)]
        if self.may(0.1):
            found["name"] = "somebody"
        return found

    def chat(self) -> dict[str, Any]:
        """A conversation and its options."""
        messages = [self.message() for _ in range(self.random.randint(1, 6))]
        body: dict[str, Any] = {"messages": messages}
        if self.may(0.3):
            function = {"parameters": {"b": {}, "a": {}}, "name": "f", "description": self.text()}
            body["tools"] = [{"type": "function", "function": function}]
            body["tool_choice"] = "none"
        if self.may(0.2):
            messages.append({"role": "assistant", "content": f"{self.text()}so "})
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.may(0.2):
            body["chat_template_kwargs"] = {"enable_thinking": False, "other": 1, "nobody's": 2}
        if self.may(0.1):
            body["documents"] = [{"title": "t", "text": "x"}]
        if self.may(0.1):
            body["reasoning_effort"] = self.random.choice(("low", "none"))
        if self.may(0.1):
            body["add_special_tokens"] = True
        return body

    def completion(self) -> dict[str, Any]:
        """Text or token ids, one prompt or two."""
        ids = [self.random.randint(0, 300) for _ in range(self.random.randint(1, 60))]
        text = f"{self.text(200)}x"
        body = {"prompt": self.random.choice((text, text, ids, [text, "y"], [ids, [4, 5]]))}
        return {**body, "add_special_tokens": self.may(0.8)}

    def one(self) -> tuple[str, bytes]:
        """Where to, and what."""
        chat = self.may(0.7)
        body = self.chat() if chat else self.completion()
        # a picture's placeholder cut off is a 500 of vLLM's own
        if self.may(0.3) and "image_url" not in json.dumps(body):
            body["truncate_prompt_tokens"] = self.random.choice((-1, 1, 5, 20, 50))
            if self.may(0.6):
                body["truncation_side"] = self.random.choice(("left", "right"))
        common = {"model": "tiny", "max_tokens": 1, "return_token_ids": True}
        return CHAT if chat else COMPLETION, json.dumps({**common, **body}).encode()


def unkept() -> aiohttp.TCPConnector:
    """vLLM hangs up after a 500 of its own, which is not the next request's."""
    return aiohttp.TCPConnector(force_close=True)


async def loaded(session: aiohttp.ClientSession, url: str, mode: Any) -> Reader:
    """A reader that has its tokenizer, before this instance."""
    fleet = Fleet({"mono": [instance(url, "mono")]})
    health = Health(fleet)
    health._session = session
    for each in fleet:
        assert await health.learn(each) == 200
    found = reader(None, mode, fleet)
    await found.start(session)
    while await found.read(COMPLETION, "tiny", b'{"prompt": "x"}', SIZE) is None:
        await asyncio.sleep(0.1)
    return found


def theirs(path: str, answer: dict[str, Any]) -> tuple[int, list[int]]:
    """Prompt tokens as the engine counts them, and the first prompt's ids."""
    first = answer if path == CHAT else answer["choices"][0]
    return answer["usage"]["prompt_tokens"], first["prompt_token_ids"]


async def compared(url: str) -> tuple[int, int]:
    """Each request given to the engine, and read here; how many were, and how many pictures' tokens."""
    requests, taken, pictures = Requests(7), 0, 0
    async with aiohttp.ClientSession(connector=unkept()) as session:
        read = await loaded(session, url, "local")
        try:
            for _ in range(NUMBER):
                path, body = requests.one()
                named = {"Content-Type": "application/json"}
                async with session.post(
                    f"{url}{path}", data=BytesIO(body), headers=named
                ) as answer:
                    if answer.status != 200:
                        continue
                    tokens, ids = theirs(path, await answer.json())
                found = await patient(read, path, body)
                assert found.tokens == tokens, body[:2000]
                if found.ids:
                    assert list(found.ids) == ids, body[:2000]
                taken, pictures = taken + 1, pictures + found.encoder_tokens
        finally:
            await read.close()
    assert not read.counts["differs"]
    return taken, pictures


async def patient(read: Reader, path: str, body: bytes) -> Prompt:
    """On a busy machine a second is not always enough."""
    for _ in range(30):
        late = read.counts["failed-late"]
        found = await read.read(path, "tiny", body, SIZE)
        if found is not None:
            return found
        if read.counts["failed-late"] == late:
            break
    raise AssertionError((read.counts, body[:2000]))


@pytest.mark.timeout(SLOW)
def test_ids_are_the_engines(newer: Bench) -> None:
    """Every prompt that a real server took has here the same ids, pictures' placeholders included."""
    taken, pictures = asyncio.run(compared(newer.front))

    assert taken > 0.9 * NUMBER
    assert pictures > 1000


@pytest.fixture
def render(tmp_path: Path) -> Iterator[Server]:
    """vLLM's own renderer, without an engine, with a template that prints all that it gets."""
    folder = tmp_path / "model"
    skipped = shutil.ignore_patterns("*.safetensors", "chat_template.jinja")
    shutil.copytree(models.build(models.VISION), folder, ignore=skipped)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    port = ports.free()
    argv = (
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "launch", "render", str(folder)),
        *("--served-model-name", "tiny", "--host", HOST, "--port", str(port)),
    )
    env = {**environment(Options(model=folder)), "TTFT_OTEL": "0"}
    with Server(Command("render", argv, env, port), tmp_path / "render.log") as server:
        yield server


async def both(url: str) -> tuple[int, int]:
    """Each request rendered by vLLM and here; how many were, and how many refused by both."""
    requests, same, refused = Requests(8), 0, 0
    async with aiohttp.ClientSession(connector=unkept()) as session:
        local, engine = await loaded(session, url, "local"), await loaded(session, url, "engine")
        try:
            for _ in range(NUMBER):
                path, body = requests.one()
                refusals = engine.counts["failed-refused"]
                try:
                    found = await patient(engine, path, body)
                except AssertionError:
                    refused += 1
                    assert engine.counts["failed-refused"] > refusals
                    continue
                ours = await patient(local, path, body)
                assert (ours.tokens, ours.encoder_items) == (found.tokens, found.encoder_items)
                assert list(ours.ids) == list(found.ids), body[:2000]
                if not found.encoder_tokens:  # what stands for a picture is the engine's own
                    assert ours.blocks == found.blocks
                same += 1
        finally:
            await local.close()
            await engine.close()
    return same, refused


@pytest.mark.timeout(SLOW)
def test_both_ways_are_one(render: Server) -> None:
    """Asked for a prompt, vLLM's renderer and our own tokenizer say the same, ids and blocks."""
    same, refused = asyncio.run(both(render.url))

    assert same > 0.8 * NUMBER
    assert same + refused == NUMBER
