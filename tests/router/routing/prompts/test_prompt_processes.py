# SPDX-License-Identifier: Apache-2.0
"""Readers with real processes and real sockets: children that hang or die, instances that refuse."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from router import fake_instances, small_tokenizer
from ttft_otel.router.errors import UnreadablePrompt
from ttft_otel.router.routing.policies.block_index import compute_block_keys, encode_extra_keys
from ttft_otel.router.routing.prompts import prompt_reader
from ttft_otel.router.routing.prompts.prompt_parts import NO_TOKENIZER, Prompt, TokenizeQuestion
from ttft_otel.router.routing.prompts.prompt_reader import (
    CHILD_MODULE,
    MAX_QUEUE_WAIT_S,
    PROMPT_READERS,
    REQUEST_WAIT_S,
    LocalPromptReader,
    TokenizerWorker,
)
from ttft_otel.router.types import parse_instance_url
from ttft_otel.router.upstream.connection_pool import QueryClient
from ttft_otel.router.upstream.instance_pool import InstancePool

CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"
HELLO_BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hello"}]}).encode()
STUCK_CHILD_CODE = "import time; time.sleep(60)"
GARBAGE_CHILD_CODE = (
    """
import sys
said = b'{}'
sys.stdout.buffer.write(len(said).to_bytes(4, 'big') + said); sys.stdout.flush()
"""
    + STUCK_CHILD_CODE
)
BROKEN_CHILDREN = [
    ("pass", "died"),
    (STUCK_CHILD_CODE, "stuck"),
    # These do not speak our frames.
    (GARBAGE_CHILD_CODE.format("x"), "died"),
    (GARBAGE_CHILD_CODE.format("\\x92\\1"), "died"),
]
ABSENT_URL = "http://127.0.0.1:9"
SECRET_BODIES = [
    HELLO_BODY.replace(b"Hello", b"s3cret"),
    b'{"messages": "s3cret"}',
    b"s3cret",
    b'{"messages": [{"role": "user", "content": ["s3cret", 1]}]}',
]


def build_fleet(*urls: str, root: str = "", leg: str = "mono", **card: Any) -> InstancePool:
    """Instances that have named their model."""
    instances = [parse_instance_url(url, leg) for url in urls or ("http://127.0.0.1:9",)]
    for each in instances:
        each.record_model_cards(({"id": "m", "root": root, **card},))
    return InstancePool({leg: instances})


async def wait_for_prompt(
    read: LocalPromptReader, body: bytes = HELLO_BODY, path: str = CHAT_PATH
) -> Prompt:
    """The prompt, as soon as the tokenizer is loaded."""
    while True:
        prompt = await read.read_prompt(path, "m", body, 4)
        if prompt is not None:
            return prompt
        assert not read.counts["failed-load"]
        await asyncio.sleep(0.05)


async def wait_for_failed_load(read: LocalPromptReader) -> None:
    """Ask for a prompt until its tokenizer could not be loaded."""
    while not read.counts["failed-load"]:
        assert await read.read_prompt(CHAT_PATH, "m", HELLO_BODY, 4) is None
        await asyncio.sleep(0.05)


@asynccontextmanager
async def run_reader(
    tokenizer: str | None, place: str, fleet: InstancePool, api_key: str = ""
) -> AsyncIterator[LocalPromptReader]:
    """A reader that is closed in the end."""
    async with QueryClient(api_key=api_key) as queries:
        reader = PROMPT_READERS[place](tokenizer, fleet)
        await reader.start(queries)
        try:
            yield reader
        finally:
            await reader.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer with a chat template, no model."""
    return small_tokenizer.build_tokenizer(tmp_path_factory.mktemp("tokenizer"))


LIGHT_TRANSFORMERS = Path(__file__).parents[2] / "light_transformers"


@pytest.fixture
def light_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children import the stand-in for transformers: these tests are about processes."""
    _, tests, checkout = LIGHT_TRANSFORMERS.parents[:3]
    folders = (LIGHT_TRANSFORMERS, tests, checkout)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))


@pytest.mark.parametrize(
    "module", [pytest.param("transformers", marks=pytest.mark.full), "light_transformers"]
)
async def test_local(
    folder: str,
    module: str,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The tokenizer that an instance names is loaded in a child, which ends with the reader.

    The stand-in's token ids are those of transformers, held against the Rust tokenizer's. An adapter has
    its base model's tokenizer and its own blocks. What a prompt says is in no log and no output, whatever
    is wrong with it.
    """
    if module == "light_transformers":
        request.getfixturevalue(module)
    caplog.set_level(logging.DEBUG)
    many = build_fleet(root=folder)
    (each,) = many
    adapter = {"id": "lora", "root": "/adapter", "parent": "m"}
    each.record_model_cards((*each.model_cards, adapter))

    async with run_reader(None, "local", many) as read:
        found = await wait_for_prompt(read)
        again = await read.read_prompt(CHAT_PATH, "m", HELLO_BODY, 4)
        lora = await read.read_prompt(CHAT_PATH, "lora", HELLO_BODY, 4)
        for body in SECRET_BODIES:
            await read.read_prompt(CHAT_PATH, "m", body, 4)
        (worker,) = read._workers.values()
        pid = worker.pid
        os.kill(pid, 0)

    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    wanted = small_tokenizer.PlainTokenizer(folder)(text, add_special_tokens=False)
    assert list(found.token_ids) == wanted["input_ids"]
    assert found.block_keys == compute_block_keys(found.token_ids, 4)
    assert found.tokens == len(found.token_ids) > 0
    assert again is not None and again.token_ids == found.token_ids
    assert read.counts["cached"] == 2
    assert lora is not None and lora.token_ids == found.token_ids
    more = {at: encode_extra_keys(["lora"]) for at in range(len(found.block_keys))}
    assert lora.block_keys == compute_block_keys(found.token_ids, 4, more)
    assert read.counts["failed-malformed"] == 3
    assert "s3cret" not in caplog.text + str(capfd.readouterr())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.usefixtures("light_transformers")
async def test_named(folder: str) -> None:
    """The tokenizer that the operator names is used whatever instances say, and before they do."""
    async with run_reader(folder, "local", InstancePool({"mono": []})) as early:
        found = await wait_for_prompt(early)
    async with run_reader(folder, "local", build_fleet(root="/nowhere")) as late:
        assert await wait_for_prompt(late) == found


@pytest.mark.usefixtures("light_transformers")
@pytest.mark.parametrize("place", ["local", "engine"])
async def test_gone(folder: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model's last instance its tokenizer's process goes too; it comes when it is needed."""
    monkeypatch.setattr(prompt_reader, "MODEL_CHECK_INTERVAL_S", 0.05)
    many = build_fleet(ABSENT_URL, root=folder)

    async with run_reader(None, place, many) as read:
        await asyncio.sleep(0.2)
        assert bool(read._workers) == (place == "local")
        await wait_for_prompt(read)
        (worker,) = read._workers.values()
        many.replace_instances({"mono": []})
        while read._workers:
            await asyncio.sleep(0.05)
        assert await read.read_prompt(CHAT_PATH, "m", HELLO_BODY, 4) is None
        assert read.counts["failed-model"] == 1
        await asyncio.gather(*read._closing_tasks)
        with pytest.raises(ProcessLookupError):
            os.kill(worker.pid, 0)


@pytest.mark.parametrize(("path", "size"), [("/v1/embeddings", 4), (CHAT_PATH, 0)])
async def test_path(path: str, size: int) -> None:
    """What is no prompt is not read, and that is counted."""
    async with run_reader(None, "local", build_fleet()) as read:
        assert await read.read_prompt(path, "m", HELLO_BODY, size) is None
        assert read.counts["failed-path"] == 1


@pytest.mark.usefixtures("light_transformers")
async def test_no_tokenizer(caplog: pytest.LogCaptureFixture) -> None:
    """A model that cannot be loaded is said once, with the remedy, and tried again after a pause."""
    async with run_reader(None, "local", build_fleet(root="/nowhere/model")) as read:
        await wait_for_failed_load(read)
        (worker,) = read._workers.values()
        task = worker.load_task
        for _ in range(3):
            assert await read.read_prompt(CHAT_PATH, "m", HELLO_BODY, 4) is None

        assert worker.load_task is task
        worker.retry_at_s = 0.0
        await read.read_prompt(CHAT_PATH, "m", HELLO_BODY, 4)
        assert worker.load_task is not task
        await worker.load_task
    (line,) = [
        each.getMessage() for each in caplog.records if "routed without" in each.getMessage()
    ]
    assert "'/nowhere/model'" in line
    assert "--tokenizer DIR" in line


@pytest.mark.usefixtures("light_transformers")
async def test_ids_need_no_tokenizer(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token ids are read while no tokenizer is there, as they are with it; text and odd ids are not."""
    monkeypatch.setattr(prompt_reader, "MODEL_CHECK_INTERVAL_S", 0.1)
    bodies = [
        json.dumps({"model": "m", **fields}).encode()
        for fields in (
            {"prompt": [*range(1, 11)]},
            {"prompt": [[1, 2, 3, 4, 5], [6, 7]]},
            {"prompt": [*range(1, 11)], "cache_salt": "s"},
        )
    ]
    text, odd = (json.dumps({"prompt": each}).encode() for each in ("Hello", [1, "a"]))

    async with run_reader(None, "local", build_fleet(root=folder)) as read:
        await wait_for_prompt(read)
        known = [await read.read_prompt(COMPLETIONS_PATH, "m", each, 4) for each in bodies]
        assert all(each is not None and each.block_keys for each in known)
        assert NO_TOKENIZER not in read._workers
    async with run_reader(None, "local", build_fleet(root="/nowhere/at/all")) as read:
        found = [await wait_for_prompt(read, each, COMPLETIONS_PATH) for each in bodies]
        assert found == known
        # A second check of the models does not take it for one that nobody wants.
        await asyncio.sleep(2.5 * prompt_reader.MODEL_CHECK_INTERVAL_S)
        assert await read.read_prompt(COMPLETIONS_PATH, "m", bodies[0], 4) == known[0]
        assert await read.read_prompt(COMPLETIONS_PATH, "m", text, 4) is None
        assert await read.read_prompt(COMPLETIONS_PATH, "m", odd, 4) is None
        assert read.counts["failed-malformed"] == 1
        assert read.counts["failed-load"] + read.counts["failed-loading"] >= 1
        pid = read._workers[NO_TOKENIZER].pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("module", ["jinja2", "transformers"])
async def test_missing(
    module: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a module of the extra `tokenize` the log says what to install, and the router goes on."""
    (tmp_path / f"{module}.py").write_text(f"raise ModuleNotFoundError('no', name='{module}')")

    checkout = LIGHT_TRANSFORMERS.parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, checkout))))
    async with run_reader(None, "local", build_fleet(root="/m")) as read:
        await wait_for_failed_load(read)
    remedy = "pip install 'ttft-otel[router,tokenize]' or use --tokenize engine"
    assert f"{module} is not installed; {remedy}" in caplog.text


@pytest.mark.full  # many seconds of waiting
@pytest.mark.usefixtures("light_transformers")
async def test_endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that never ends costs its own request a second, then the child is another one."""
    monkeypatch.setattr(prompt_reader, "PROMPT_TIMEOUT_S", 3.0)
    monkeypatch.setattr(prompt_reader, "_RESTART_DELAY_S", 0.0)
    monkeypatch.setattr(prompt_reader, "REQUEST_WAIT_S", 0.5)
    folder = small_tokenizer.build_tokenizer(
        tmp_path, template=small_tokenizer.ENDLESS_TEMPLATE + small_tokenizer.CHAT_TEMPLATE
    )
    body = HELLO_BODY.replace(b'"user"', b'"endless"')

    async with run_reader(None, "local", build_fleet(root=folder)) as read:
        found = await wait_for_prompt(read)
        (worker,) = read._workers.values()
        pid, begun = worker.pid, time.monotonic()
        assert await read.read_prompt(CHAT_PATH, "m", body, 4) is None
        assert time.monotonic() - begun < 3
        assert read.counts["failed-late"] == 1
        while worker._process is not None:
            await asyncio.sleep(0.05)
        while (again := await read.read_prompt(CHAT_PATH, "m", HELLO_BODY, 4)) is None:
            await asyncio.sleep(0.05)

        assert again == found
        assert worker.pid != pid
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def start_child(code: str) -> TokenizerWorker:
    """A worker whose child runs this code."""
    return TokenizerWorker([sys.executable, "-c", code])


@pytest.mark.parametrize(("code", "reason"), BROKEN_CHILDREN)
async def test_broken(code: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that dies, hangs or talks nonsense fails those who wait for it, and is not there any more."""
    # A child that dies may take long to start on a busy machine.
    monkeypatch.setattr(prompt_reader, "LOAD_TIMEOUT_S", 0.3 if reason == "stuck" else 30.0)
    found = start_child(code)

    try:
        for expected in (reason, "died"):  # the latter at once: no child a millisecond
            with pytest.raises(UnreadablePrompt, match=expected):
                await found.ask_child(TokenizeQuestion("m"))
    finally:
        await found.close()


@pytest.mark.usefixtures("light_transformers")
def test_orphan(tmp_path: Path) -> None:
    """A tokenizer process whose router was killed ends by itself, even while it is busy."""
    hurried = f"import {CHILD_MODULE} as child; child.PROMPT_TIMEOUT_S = 1; child.main()"
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", hurried], stdin=pipe, stdout=pipe)
    child = small_tokenizer.TokenizerChild(process)
    folder = small_tokenizer.build_tokenizer(tmp_path, template=small_tokenizer.ENDLESS_TEMPLATE)
    assert child.read_prompt(folder).error == ""

    with suppress(EOFError, msgspec.DecodeError):
        child.read_prompt(folder, "chat", messages=[{"role": "endless", "content": "a"}])

    assert child.close() == -signal.SIGALRM


async def test_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more wait than may, in number or in bytes; whoever waits at the end is told."""
    monkeypatch.setattr(prompt_reader, "MAX_QUESTIONS", 2)
    monkeypatch.setattr(prompt_reader, "MAX_QUESTION_BYTES", 100)
    found = start_child(STUCK_CHILD_CODE)

    one = asyncio.create_task(found.ask_child(TokenizeQuestion("m", "chat", b"x" * 60)))
    await asyncio.sleep(0.3)
    with pytest.raises(UnreadablePrompt, match="busy"):
        await found.ask_child(TokenizeQuestion("m", "chat", b"x" * 60))
    two = asyncio.create_task(found.ask_child(TokenizeQuestion("m", "chat", b"x")))
    await asyncio.sleep(0.1)
    with pytest.raises(UnreadablePrompt, match="busy"):
        await found.ask_child(TokenizeQuestion("m", "chat", b""))
    await found.close()
    for task in (one, two):
        with pytest.raises(UnreadablePrompt, match="closed"):
            await task


@pytest.mark.full  # a time
@pytest.mark.usefixtures("light_transformers")
async def test_loop_free(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of a hundred thousand tokens costs the event loop some milliseconds.

    The least of three: what it costs it does each time, a busy machine's cold caches it does not.
    """
    text = "".join(f"the quick brown fox {n} " for n in range(12_000))
    # The child may take its time: what counts is the loop's. Beside other tests it took more than 2 s.
    monkeypatch.setattr(prompt_reader, "PROMPT_TIMEOUT_S", 60.0)
    monkeypatch.setattr(prompt_reader, "REQUEST_WAIT_S", 60.0)

    spent_s = []
    async with run_reader(folder, "local", build_fleet()) as read:
        await wait_for_prompt(read, b'{"prompt": "x"}', COMPLETIONS_PATH)
        for number in range(3):
            body = json.dumps({"prompt": f"{number} {text}"}).encode()
            began_s = time.process_time()
            found = await wait_for_prompt(read, body, COMPLETIONS_PATH)
            spent_s.append(time.process_time() - began_s)

    assert found.tokens > 100_000
    assert len(found.block_keys) == found.tokens // 4
    assert min(spent_s) < 0.05, spent_s


class FakeVllm:
    """An instance that renders what it is told to, or refuses, and notes what it was asked."""

    def __init__(self, status: int = 200, answer: Any = None, delay_s: float = 0.0) -> None:
        self.status, self.answer, self.delay_s = status, answer, delay_s
        self.received: list[tuple[str, dict[str, Any], str]] = []

    async def answer_request(self, request: web.Request) -> web.Response:
        """One answer for all."""
        key = request.headers.get("Authorization", "")
        self.received.append((request.path, await request.json(), key))
        await asyncio.sleep(self.delay_s)
        if isinstance(self.answer, bytes):
            return web.Response(body=self.answer, content_type="application/json")
        return web.json_response(self.answer, status=self.status)

    @asynccontextmanager
    async def run_server(self) -> AsyncIterator[str]:
        """On a port of its own."""
        app = web.Application()
        app.router.add_route("POST", "/{path:.*}", self.answer_request)
        async with fake_instances.run_web_app(app) as url:
            yield url


IMAGE_ANSWER = {
    "token_ids": list(range(12)),
    "features": {
        "mm_hashes": {"image": ["hash"]},
        "mm_placeholders": {"image": [{"offset": 3, "length": 6}]},
    },
    "cache_salt": "s",
}


async def test_engine() -> None:
    """The instance's own tokens and media are the prompt, with the keys of its KV events.

    Of several prompts in one request all are counted.
    """
    vllm = FakeVllm(answer=IMAGE_ANSWER)
    async with (
        vllm.run_server() as url,
        run_reader(None, "engine", build_fleet(url), api_key="key") as read,
    ):
        found = await read.read_prompt(CHAT_PATH, "m", HELLO_BODY, 4)
        vllm.answer = [{"token_ids": [1, 2, 3, 4, 5]}, {"token_ids": [6, 7]}]
        two = await read.read_prompt(COMPLETIONS_PATH, "m", b'{"prompt": ["a", "b"]}', 4)

    extra_keys = ([("hash", 3), "s"], [("hash", -1)], [("hash", -5)])
    keys = dict(enumerate(map(encode_extra_keys, extra_keys)))
    assert found is not None and found.block_keys == compute_block_keys(range(12), 4, keys)
    assert (found.tokens, found.item_tokens) == (12, (6,))
    rendered = {**json.loads(HELLO_BODY), "mm_payload": "none"}
    assert vllm.received[0] == (f"{CHAT_PATH}/render", rendered, "Bearer key")
    assert two is not None and two.block_keys == compute_block_keys([1, 2, 3, 4], 4)
    assert (two.tokens, list(two.token_ids)) == (7, [])


@pytest.mark.usefixtures("light_transformers")
async def test_engine_refuses(
    folder: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instances that do not render, or want a key, are asked once; what is to be set is said once.

    One that is not there is left alone for a while, too. Tokens then come from the tokenizer.
    """
    monkeypatch.setattr(prompt_reader, "FAILURE_PAUSE_S", 600.0)
    with caplog.at_level(logging.WARNING):
        refusing = [FakeVllm(status=403), FakeVllm(status=401)]
        async with (
            refusing[0].run_server() as one,
            refusing[1].run_server() as other,
            run_reader(None, "engine", build_fleet(one, other, ABSENT_URL, root=folder)) as read,
        ):
            # None while the tokenizer is loading.
            assert await read.read_prompt(CHAT_PATH, "m", HELLO_BODY, 4) is None
            found = await wait_for_prompt(read)
            assert found.tokens == len(found.token_ids) > 0
            for vllm in refusing:
                asked = [path for path, _, _ in vllm.received if path != "/tokenize"]
                assert asked == [f"{CHAT_PATH}/render"]
            assert read.counts["failed-unreachable"] == 1
    assert caplog.text.count("--enable-scale-out") == caplog.text.count("--upstream-key") == 1


FAILING_SERVERS: list[tuple[FakeVllm, str]] = [
    (FakeVllm(status=400, answer={}), "refused"),
    (FakeVllm(status=500, answer={}), "refused"),
    (FakeVllm(answer={"token_ids": "x"}), "malformed"),
    (FakeVllm(answer={"token_ids": [-1]}), "malformed"),
    (FakeVllm(answer=b'{"token_ids": [1], "cache_salt": "\xff"}'), "malformed"),
    (FakeVllm(answer=b'{"token_ids": [1], "x": %b}' % (b"[" * 20_000)), "malformed"),
    (FakeVllm(answer=IMAGE_ANSWER, delay_s=5.0), "late"),
]


@pytest.mark.parametrize(("vllm", "reason"), FAILING_SERVERS)
async def test_engine_fails(vllm: FakeVllm, reason: str) -> None:
    """Whatever an instance answers, a request has its prompt or the reason why not, in a second."""
    async with vllm.run_server() as url, run_reader(None, "engine", build_fleet(url)) as read:
        begun = time.monotonic()
        assert await read.read_prompt(CHAT_PATH, "m", HELLO_BODY, 4) is None
        assert read.counts == {f"failed-{reason}": 1}
        assert time.monotonic() - begun < 3


@pytest.mark.usefixtures("light_transformers")
@pytest.mark.parametrize("same", [True, False])
async def test_differs(folder: str, same: bool, caplog: pytest.LogCaptureFixture) -> None:
    """An instance that reads chats in another way is named, with what to do; one that does not is not."""
    with caplog.at_level(logging.WARNING):
        vllm = FakeVllm(answer={"tokens": [1]})
        if same:
            async with run_reader(folder, "local", build_fleet()) as other:
                found = await wait_for_prompt(other, prompt_reader.build_probe_body("m"))
            vllm.answer = {"tokens": list(found.token_ids)}
        async with (
            vllm.run_server() as url,
            run_reader(None, "local", build_fleet(url, root=folder)) as read,
        ):
            await wait_for_prompt(read)
            (worker,) = read._workers.values()
            await worker.load_task
            assert read.counts["differs"] == (0 if same else 1)
            assert [path for path, _, _ in vllm.received] == ["/tokenize"]
    assert ("--tokenize engine" in caplog.text) is not same


# It works at a prompt for as many seconds as its body says.
SLOW_CHILD_CODE = """
import sys, time
from ttft_otel.router.routing.prompts.prompt_parts import (
    LENGTH_BYTES, Prompt, question_decoder, frame_message,
)
while len(head := sys.stdin.buffer.read(LENGTH_BYTES)) == LENGTH_BYTES:
    asked = question_decoder.decode(sys.stdin.buffer.read(int.from_bytes(head, "big")))
    time.sleep(float(asked.body or 0))
    sys.stdout.buffer.write(frame_message(Prompt()))
    sys.stdout.buffer.flush()
"""


async def classify_outcome(worker: TokenizerWorker, seconds: str) -> str:
    """How a request fares that waits for its prompt as local.py's do."""
    try:
        await asyncio.wait_for(
            worker.ask_child(TokenizeQuestion("m", "chat", seconds.encode())), REQUEST_WAIT_S
        )
    except asyncio.TimeoutError:
        return "late"
    except UnreadablePrompt as error:
        return error.reason
    return "answered"


@pytest.fixture
async def slow_child() -> AsyncIterator[TokenizerWorker]:
    """A worker whose child runs SLOW_CHILD_CODE already."""
    worker = start_child(SLOW_CHILD_CODE)
    await worker.ask_child(TokenizeQuestion("m"))
    yield worker
    await worker.close()


async def test_overload(slow_child: TokenizerWorker) -> None:
    """With five times what a child can do, it answers as many as it can, and the others at once."""
    tasks, begun = [], time.monotonic()
    for _ in range(150):  # 100 a second, and it can do 20
        tasks.append(asyncio.create_task(classify_outcome(slow_child, "0.05")))
        await asyncio.sleep(0.01)
    lasted = time.monotonic() - begun
    fared = await asyncio.gather(*tasks)
    assert await classify_outcome(slow_child, "0") == "answered"

    half = fared[len(fared) // 2 :]
    assert half.count("answered") > 0.4 * 20 * lasted / 2
    assert half.count("late") < 0.1 * len(half)
    assert set(fared) <= {"answered", "late", "busy"}


async def test_left(slow_child: TokenizerWorker) -> None:
    """A child works for nobody who has left: the next one waits for what it is at, no longer."""
    many = [asyncio.create_task(classify_outcome(slow_child, "0.3")) for _ in range(30)]
    await asyncio.sleep(0.05)
    for task in many:
        task.cancel()
    await asyncio.gather(*many, return_exceptions=True)
    assert await classify_outcome(slow_child, "0") == "answered"
    assert (slow_child._question_bytes, slow_child._waiting) == (0, {})


async def test_late(slow_child: TokenizerWorker) -> None:
    """While a child is at a prompt that nobody waits for any more, others are told so at once."""
    assert await classify_outcome(slow_child, "1.8") == "late"
    await asyncio.sleep(0.1)
    begun = time.monotonic()
    assert await classify_outcome(slow_child, "0") == "busy"
    assert time.monotonic() - begun < MAX_QUEUE_WAIT_S
    async with asyncio.timeout(20):
        while await classify_outcome(slow_child, "0") != "answered":
            await asyncio.sleep(0.1)


async def test_many(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """That a model has no tokenizer because others have is said, once."""
    monkeypatch.setattr(prompt_reader, "MAX_TOKENIZERS", 0)

    found = LocalPromptReader(None, build_fleet(root="/m"))
    for source in ("/m", "/n", "/m"):
        assert found.ensure_loaded(source) is None
    assert caplog.text.count("tokenizers are wanted") == 1
    assert "--tokenizer" in caplog.text


@pytest.mark.parametrize("away", [True, False])
async def test_engine_another(away: bool) -> None:
    """An instance that is late or not there is not asked again soon; another one is."""
    hanging, vllm = FakeVllm(answer={}, delay_s=3.0), FakeVllm(answer={"token_ids": [1, 2]})
    async with hanging.run_server() as first, vllm.run_server() as second:
        worse, better = (
            parse_instance_url(ABSENT_URL if away else first, "mono"),
            parse_instance_url(second, "mono"),
        )
        better.in_flight = 9
        async with run_reader(None, "engine", InstancePool({"mono": [worse, better]})) as read:
            found = await read.read_prompt(CHAT_PATH, "m", HELLO_BODY, 4)
            assert (found is not None) is away
            begun = time.monotonic()
            for _ in range(3):
                assert await read.read_prompt(CHAT_PATH, "m", HELLO_BODY, 4) is not None
            assert time.monotonic() - begun < REQUEST_WAIT_S
        assert read.counts["failed-unreachable" if away else "failed-late"] == 1


async def test_a_client_that_leaves_as_its_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request ends there: the cancellation is never taken for the answer that came with it."""
    reader = LocalPromptReader("m", build_fleet())

    async def cancel_while_reading(*_: object) -> None:
        asyncio.get_running_loop().call_soon(task.cancel)

    monkeypatch.setattr(reader, "_read_in_child", cancel_while_reading)
    task = asyncio.create_task(reader.read_prompt("/v1/completions", "m", b"{}", 16))
    await asyncio.wait({task})
    assert task.cancelled()
