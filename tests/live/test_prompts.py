# SPDX-License-Identifier: Apache-2.0
"""What the router knows of prompts is what a real engine says: token ids of random chats and completions
of all forms, media of each path, and from its KV events what that engine finds in its cache.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import pytest
from PIL import Image

from lab import free_ports, tiny_models
from lab.local_servers import LocalServer
from lab.server_commands import HOST, ServerCommand, VllmOptions, build_vllm_environment
from tests.live.bench import LiveDeployment
from tests.live.conftest import BLOCK_TOKENS
from tests.router import media_bodies
from ttft_otel.model.endpoints import MESSAGES_PATH, RESPONSES_PATH
from ttft_otel.router.disagg.request_body import parse_body
from ttft_otel.router.routing.policies.block_index import compute_block_keys
from ttft_otel.router.routing.prefixes.kv_events_source import KvEventsSource
from ttft_otel.router.routing.prefixes.prefix_source import PrefixSource
from ttft_otel.router.routing.prompts.prompt_parts import Prompt
from ttft_otel.router.routing.prompts.prompt_reader import PROMPT_READERS, LocalPromptReader
from ttft_otel.router.types import parse_instance_url
from ttft_otel.router.upstream.connection_pool import QueryClient
from ttft_otel.router.upstream.instance_pool import HealthMonitor, InstancePool

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HASHED_TOKENS = 16  # of a block
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

    def make_request(self) -> tuple[str, bytes]:
        """The path and the body of a random request: a chat, or one or two prompts as text or token ids."""
        if chat := self.happens(0.7):
            body = self.make_chat()
        else:
            ids = [self.random.randint(0, 300) for _ in range(self.random.randint(1, 60))]
            text = f"{self.make_text(200)}x"
            prompt = self.random.choice((text, text, ids, [text, "y"], [ids, [4, 5]]))
            body = {"prompt": prompt, "add_special_tokens": self.happens(0.8)}
        common = {"model": "tiny", "max_tokens": 1, "return_token_ids": True}
        return CHAT if chat else COMPLETION, json.dumps({**common, **body}).encode()


async def load_reader(queries: QueryClient, url: str, mode: Any) -> LocalPromptReader:
    """A local prompt reader for this instance whose tokenizer is loaded."""
    fleet = InstancePool({"mono": [parse_instance_url(url, "mono")]})
    health = HealthMonitor(fleet)
    health.queries = queries
    for each in fleet:
        assert await health.refresh_models(each) == 200
    found = PROMPT_READERS[mode](None, fleet)
    await found.start(queries)
    while await found.read_prompt(COMPLETION, "tiny", b'{"prompt": "x"}', HASHED_TOKENS) is None:
        await asyncio.sleep(0.1)
    return found


async def read_patiently(read: LocalPromptReader, path: str, body: bytes) -> Prompt:
    """Read a prompt with several attempts: on a busy machine the limit of one second can be too short."""
    for _ in range(30):
        late = read.counts["failed-late"] + read.counts["failed-loading"]
        found = await read.read_prompt(path, "tiny", body, HASHED_TOKENS)
        if found is not None:
            return found
        if read.counts["failed-late"] + read.counts["failed-loading"] == late:
            break
        await asyncio.sleep(0.5)
    raise AssertionError((read.counts, body[:2000]))


@pytest.mark.timeout(SLOW)
async def test_ids_are_the_engines(newer: LiveDeployment) -> None:
    """For every prompt that the server accepts our ids equal its own, placeholders of images included."""
    url, requests, taken, pictures = newer.front_url, RandomRequests(7), 0, 0
    async with (
        # After a 500 vLLM closes the connection, which fails a next request.
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
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
                    told = await answer.json()
                tokens = told["usage"]["prompt_tokens"]
                ids = (told if path == CHAT else told["choices"][0])["prompt_token_ids"]
                found = await read_patiently(read, path, body)
                assert found.tokens == tokens, body[:2000]
                if found.token_ids:
                    assert list(found.token_ids) == ids, body[:2000]
                taken, pictures = taken + 1, pictures + sum(found.item_tokens)
        finally:
            await read.close()
    assert not read.counts["differs"]
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
async def test_both_ways_are_one(small: LiveDeployment) -> None:
    """vLLM's renderer and the local tokenizer give the same ids and blocks for a prompt."""
    await compare_with_renderer(small.front_url, RandomRequests(8, vision=False))


@pytest.mark.full
@pytest.mark.timeout(SLOW)
async def test_both_ways_are_one_with_images(render: LocalServer) -> None:
    """The same with images, and a template that prints all it gets."""
    await compare_with_renderer(render.url, RandomRequests(8))


EC_PARAMS = {"a": {"peer_host": "h", "unknown": [1]}}
# In a process of its own: vLLM's imports warn, and warnings are errors here.
CONVERT_SCRIPT = """
import json, sys
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages

given = json.load(sys.stdin)
messages = AnthropicMessagesRequest(**given["messages"])
chat = AnthropicServingMessages.to_chat_completion_request(messages)
responses = ResponsesRequest(**given["responses"])
plain = ChatCompletionRequest(messages=[], ec_transfer_params=given["params"])
found = {
    "messages": chat.model_dump(mode="json")["messages"],
    "responses": [dict(each) for each in construct_input_messages(request_input=responses.input)],
    "params": [each.ec_transfer_params for each in (plain, messages, chat, responses)],
}
print("\\n" + json.dumps(found, default=list))
"""


def list_message_images(messages: list[dict[str, Any]]) -> list[str]:
    """The images of chat messages, each once."""
    urls = []
    for message in messages:
        for part in message.get("content") or []:
            if isinstance(part, dict) and part["type"] in ("image_url", "input_image"):
                url = part["image_url"]
                urls.append(url if isinstance(url, str) else url["url"])
    return list(dict.fromkeys(urls))


@pytest.mark.untimed
@pytest.mark.full  # vLLM's imports take half a minute
def test_media_are_those_of_vllms_own_conversion() -> None:
    """From /v1/messages and /v1/responses the router takes the images that vLLM makes chat messages of, those
    of tool results included; and vLLM keeps the encoder's parameters of requests on every path unchanged.
    """
    given = {
        "messages": {**media_bodies.MESSAGES_BODY, "ec_transfer_params": EC_PARAMS},
        "responses": {**media_bodies.RESPONSES_BODY, "ec_transfer_params": EC_PARAMS},
        "params": EC_PARAMS,
    }
    command, sent = [sys.executable, "-c", CONVERT_SCRIPT], json.dumps(given)
    done = subprocess.run(command, input=sent, stdout=subprocess.PIPE, text=True, check=True)
    converted = json.loads(done.stdout.splitlines()[-1])

    for name, path, body in (
        ("messages", MESSAGES_PATH, media_bodies.MESSAGES_BODY),
        ("responses", RESPONSES_PATH, media_bodies.RESPONSES_BODY),
    ):
        urls = list_message_images(converted[name])
        # Those that the router sends to encoders, in the prompt's order, each once.
        items = map(json.loads, parse_body(json.dumps(body).encode(), path).media_items)
        assert len(urls) == 3 and [each["image_url"]["url"] for each in items] == urls
    assert converted["params"] == [EC_PARAMS] * 4


PROMPTS = 40


class CacheComparer:
    """Asks the server and the index how much of a prompt is cached."""

    def __init__(self, url: str, session: aiohttp.ClientSession, source: PrefixSource) -> None:
        self.url, self.session, self.source = url, session, source

    def predict_cached_tokens(self, ids: list[int]) -> int:
        """Tokens of a prompt that the index expects to be cached; the engine always computes the last one."""
        depth = self.source.index.match_blocks(compute_block_keys(ids, BLOCK_TOKENS), [self.url])[0]
        return min(depth, (len(ids) - 1) // BLOCK_TOKENS) * BLOCK_TOKENS

    async def read_cached_tokens(self, ids: list[int]) -> int:
        """Tokens of a prompt that the engine finds in its cache."""
        body = {"model": "tiny", "prompt": ids, "max_tokens": 1, "return_token_ids": True}
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            answer: dict[str, Any] = await response.json()
        assert answer["choices"][0]["prompt_token_ids"] == ids
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def wait_until_stored(self, ids: list[int]) -> None:
        """Wait until the engine has published all blocks of this prompt."""
        end = monotonic() + 30
        while (
            self.source.index.match_blocks(compute_block_keys(ids, BLOCK_TOKENS), [self.url])[0]
            < len(ids) // BLOCK_TOKENS
        ):
            assert monotonic() < end, self.source.describe_instances()
            await asyncio.sleep(0.02)


def generate_prompts(chance: random.Random) -> Iterator[list[int]]:
    """Prompts with common beginnings, which end at a block's boundary or not."""
    before: list[list[int]] = [[]]
    for _ in range(PROMPTS):
        shared = chance.choice(before)
        shared = shared[: chance.randrange(len(shared) // BLOCK_TOKENS + 1) * BLOCK_TOKENS]
        more = chance.choice(
            [1, 5, BLOCK_TOKENS, 3 * BLOCK_TOKENS, 4 * BLOCK_TOKENS - 1, 7 * BLOCK_TOKENS + 40]
        )
        ids = [*shared, *(chance.randrange(10, 200) for _ in range(more))]
        before.append(ids)
        yield ids
        if chance.random() < 0.3:
            yield ids


@pytest.mark.timeout(SLOW)
async def test_index_is_the_engines_cache(small: LiveDeployment) -> None:
    """For prompts with common beginnings, repeated, concurrent or evicted, both count the same tokens."""
    chance, url = random.Random(7), small.front_url
    fleet = InstancePool({"mono": [parse_instance_url(url, "mono")]})
    pairs = []  # what is expected, and what the engine found
    async with aiohttp.ClientSession() as session, QueryClient() as queries:
        source, late = KvEventsSource(), KvEventsSource()
        await source.start(queries, fleet)
        try:
            asker = CacheComparer(url, session, source)
            for ids in generate_prompts(chance):
                expected = asker.predict_cached_tokens(ids)
                both = await asyncio.gather(
                    *(asker.read_cached_tokens(ids) for _ in range(chance.choice([1, 2])))
                )
                pairs.append((expected, both[0]))
                await asker.wait_until_stored(ids)
            await late.start(queries, fleet)
            await CacheComparer(url, session, late).wait_until_stored(ids)
            blocks = [each.describe_instances()[url]["blocks"] for each in (source, late)]
            assert blocks[0] == blocks[1]
            await late.close()
            async with session.post(f"{url}/reset_prefix_cache") as response:
                assert response.status == 200
            await asker.read_cached_tokens([11])  # an engine tells with its next step
            end = monotonic() + 30
            while asker.predict_cached_tokens(ids):
                assert monotonic() < end
                await asyncio.sleep(0.02)
            pairs.append((asker.predict_cached_tokens(ids), await asker.read_cached_tokens(ids)))
            counts = source.describe_instances()[url]["counts"]
        finally:
            await source.close()

    assert [pair for pair in pairs if pair[0] != pair[1]] == []
    assert sum(expected > 0 for expected, _ in pairs) > 10
    assert counts["removed"] > 10 and counts["cleared"] == 1
    assert not {"gaps", "lost", "malformed", "orphans", "restarts"} & counts.keys()
