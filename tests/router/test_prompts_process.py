# SPDX-License-Identifier: Apache-2.0
"""Readers with real processes and real sockets: children that hang or die, instances that refuse."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.router import tokens
from ttft_otel.router.choose import instance
from ttft_otel.router.fleet import Fleet
from ttft_otel.router.policies.blocks import extra, numbers
from ttft_otel.router.prompts import Prompt, Reader, local, probe, reader, worker
from ttft_otel.router.prompts.frames import IDS, Ask
from ttft_otel.router.prompts.reason import Unreadable
from ttft_otel.router.prompts.worker import Worker

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hello"}]}).encode()
BROKEN = {
    "died": "pass",
    "stuck": "import time; time.sleep(60)",
}
GARBAGE = ("x", "\\x98", "\\x92\\1", "\\xc1")


def run(test: Coroutine[Any, Any, None]) -> None:
    """Run one test's coroutine; on a busy machine a child takes its time to start."""
    asyncio.run(asyncio.wait_for(test, 240))


def fleet(*urls: str, root: str = "", leg: str = "mono", **card: Any) -> Fleet:
    """Instances that have named their model."""
    found = [instance(url, leg) for url in urls or ("http://127.0.0.1:9",)]
    for each in found:
        each.models, each.cards = frozenset(("m",)), ({"id": "m", "root": root, **card},)
    return Fleet({leg: found})


async def until(read: Reader, body: bytes = HELLO, path: str = CHAT) -> Prompt:
    """The prompt, as soon as the tokenizer is loaded."""
    while True:
        found = await read.read(path, "m", body, 4)
        if found is not None:
            return found
        assert not read.counts["failed-load"]
        await asyncio.sleep(0.05)


@asynccontextmanager
async def started(*of: Any, **more: Any) -> AsyncIterator[Reader]:
    """A reader that is closed in the end."""
    async with aiohttp.ClientSession() as session:
        found = reader(*of, **more)
        await found.start(session)
        try:
            yield found
        finally:
            await found.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer with a chat template, no model."""
    return tokens.build(tmp_path_factory.mktemp("tokenizer"))


def test_local(folder: str) -> None:
    """The tokenizer that an instance names is loaded in a child, which ends with the reader."""

    async def test() -> None:
        async with started(None, "local", fleet(root=folder)) as read:
            found = await until(read)
            again = await read.read(CHAT, "m", HELLO, 4)
            (load,) = read._loads.values()  # type: ignore[attr-defined]
            pid = load.worker.pid
            os.kill(pid, 0)

        assert found.blocks == numbers(found.ids, 4)
        assert found.tokens == len(found.ids) > 0
        assert again == found
        assert read.counts["cached"] == 1
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    run(test())


def test_named(folder: str) -> None:
    """The tokenizer that the operator names is used whatever instances say, and before they do."""

    async def test() -> None:
        async with started(folder, "local", Fleet({"mono": []})) as early:
            found = await until(early)
        async with started(folder, "local", fleet(root="/nowhere")) as late:
            assert await until(late) == found

    run(test())


def test_adapter(folder: str) -> None:
    """An adapter has its base model's tokenizer and its own blocks."""
    many = fleet(root=folder)
    (each,) = many
    each.cards = (*each.cards, {"id": "lora", "root": "/adapter", "parent": "m"})

    async def test() -> None:
        async with started(None, "local", many) as read:
            base = await until(read)
            lora = await read.read(CHAT, "lora", HELLO, 4)

        assert lora is not None
        assert lora.ids == base.ids
        more = {at: extra(["lora"]) for at in range(len(base.blocks))}
        assert lora.blocks == numbers(base.ids, 4, more)

    run(test())


def test_gone(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model's last instance its tokenizer's process goes too."""
    monkeypatch.setattr(local, "LOOK", 0.05)
    many = fleet(root=folder)

    async def test() -> None:
        async with started(None, "local", many) as read:
            await until(read)
            many.replace({"mono": []})
            while read._loads:  # type: ignore[attr-defined]
                await asyncio.sleep(0.05)

            assert await read.read(CHAT, "m", HELLO, 4) is None
            assert read.counts["failed-model"] == 1

    run(test())


@pytest.mark.parametrize(("path", "size"), [("/v1/embeddings", 4), (CHAT, 0)])
def test_path(path: str, size: int) -> None:
    """What is no prompt is not read, and that is counted."""

    async def test() -> None:
        async with started(None, "local", fleet()) as read:
            assert await read.read(path, "m", HELLO, size) is None
            assert read.counts["failed-path"] == 1

    run(test())


def test_no_tokenizer(caplog: pytest.LogCaptureFixture) -> None:
    """A model that cannot be loaded is said once, with the remedy, and tried again after a pause."""

    async def test() -> None:
        async with started(None, "local", fleet(root="/nowhere/model")) as read:
            while not read.counts["failed-load"]:
                assert await read.read(CHAT, "m", HELLO, 4) is None
                await asyncio.sleep(0.05)
            (load,) = read._loads.values()  # type: ignore[attr-defined]
            task = load.task
            for _ in range(3):
                assert await read.read(CHAT, "m", HELLO, 4) is None

            assert load.task is task
            load.again = 0.0
            await read.read(CHAT, "m", HELLO, 4)
            assert load.task is not task
            await load.task

    with caplog.at_level(logging.WARNING):
        run(test())
    (line,) = [
        each.getMessage() for each in caplog.records if "routed without" in each.getMessage()
    ]
    assert "'/nowhere/model'" in line
    assert "--tokenizer DIR" in line


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": [*range(1, 11)]},
        {"prompt": [[1, 2, 3, 4, 5], [6, 7]]},
        {"prompt": [*range(1, 11)], "truncate_prompt_tokens": 6, "cache_salt": "s"},
    ],
)
def test_ids_need_no_tokenizer(folder: str, more: dict[str, Any]) -> None:
    """Token ids are read while no tokenizer is there, as they are with it; text and odd ids are not."""
    body = json.dumps({"model": "m", **more}).encode()
    text, odd = (json.dumps({"prompt": each}).encode() for each in ("Hello", [1, "a"]))

    async def test() -> None:
        async with started(None, "local", fleet(root=folder)) as read:
            await until(read)
            known = await read.read(COMPLETION, "m", body, 4)
            assert known is not None and known.blocks
            assert IDS not in read._loads  # type: ignore[attr-defined]
        async with started(None, "local", fleet(root="/nowhere/at/all")) as read:
            while (found := await read.read(COMPLETION, "m", body, 4)) is None:
                assert not read.counts["failed-load"]
            assert found == known
            await asyncio.sleep(1.5 * local.LOOK)  # it is not taken for one that nobody wants
            assert await read.read(COMPLETION, "m", body, 4) == known
            assert await read.read(COMPLETION, "m", text, 4) is None
            assert await read.read(COMPLETION, "m", odd, 4) is None
            assert read.counts["failed-malformed"] == 1
            assert read.counts["failed-load"] + read.counts["failed-loading"] >= 1
            pid = read._loads[IDS].worker.pid  # type: ignore[attr-defined]
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    run(test())


def test_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without transformers the log says what to install, and the router goes on."""
    (tmp_path / "transformers.py").write_text("raise ImportError('no', name='transformers')")

    async def test() -> None:
        async with started(None, "local", fleet(root="/m")) as read:
            while not read.counts["failed-load"]:
                assert await read.read(CHAT, "m", HELLO, 4) is None
                await asyncio.sleep(0.05)

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setenv("PYTHONPATH", str(tmp_path))
        run(test())
    assert "transformers is not here; pip install 'ttft-otel[router]'" in caplog.text


def test_prompts_stay(folder: str, caplog: pytest.LogCaptureFixture, capfd: Any) -> None:
    """What a prompt says is in no log and no output, whatever is wrong with it."""
    bodies = [
        HELLO.replace(b"Hello", b"s3cret"),
        b'{"messages": "s3cret"}',
        b"s3cret",
        b'{"messages": [{"role": "user", "content": ["s3cret", 1]}]}',
    ]

    async def test() -> None:
        async with started(None, "local", fleet(root=folder)) as read:
            await until(read)
            for body in bodies:
                await read.read(CHAT, "m", body, 4)
            assert read.counts["failed-malformed"] == 3

    with caplog.at_level(logging.DEBUG):
        run(test())
    assert "s3cret" not in caplog.text + str(capfd.readouterr())


def test_endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that never ends costs its own request a second, then the child is another one."""
    monkeypatch.setattr(worker, "STUCK", 3.0)
    monkeypatch.setattr(worker, "_AGAIN", 0.0)
    monkeypatch.setattr(local, "PATIENCE", 0.5)
    folder = tokens.build(tmp_path, template=tokens.ENDLESS + tokens.TEMPLATE)
    body = HELLO.replace(b'"user"', b'"endless"')

    async def test() -> None:
        async with started(None, "local", fleet(root=folder)) as read:
            found = await until(read)
            (load,) = read._loads.values()  # type: ignore[attr-defined]
            pid, begun = load.worker.pid, time.monotonic()
            assert await read.read(CHAT, "m", body, 4) is None
            assert time.monotonic() - begun < 3
            assert read.counts["failed-late"] == 1
            while load.worker._process is not None:
                await asyncio.sleep(0.05)
            while (again := await read.read(CHAT, "m", HELLO, 4)) is None:
                await asyncio.sleep(0.05)

            assert again == found
            assert load.worker.pid != pid
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    run(test())


@pytest.mark.parametrize(("name", "reason"), [("died", "died"), ("stuck", "stuck")])
def test_broken(name: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that dies or hangs fails those who wait for it, and is not there any more."""
    monkeypatch.setattr(worker, "LOADING", 0.3)
    found = Worker([sys.executable, "-c", BROKEN[name]])

    async def test() -> None:
        with pytest.raises(Unreadable, match=reason):
            await found.ask(Ask(0, "m"))
        with pytest.raises(Unreadable, match="died"):  # at once: no child a millisecond
            await found.ask(Ask(0, "m"))
        await found.close()

    run(test())


@pytest.mark.parametrize("said", GARBAGE)
def test_garbage(said: str) -> None:
    """A child that does not speak our frames is killed, and whoever waits is told."""
    found = Worker(
        [
            sys.executable,
            "-c",
            f"""
import sys, time
said = b'{said}'
sys.stdout.buffer.write(len(said).to_bytes(4, 'big') + said); sys.stdout.flush()
time.sleep(60)
""",
        ]
    )

    async def test() -> None:
        with pytest.raises(Unreadable, match="died"):
            await found.ask(Ask(0, "m"))
        await found.close()

    run(test())


def test_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more wait than may, in number or in bytes; whoever waits at the end is told."""
    monkeypatch.setattr(worker, "MOST", 2)
    monkeypatch.setattr(worker, "BYTES", 100)
    found = Worker([sys.executable, "-c", BROKEN["stuck"]])

    async def test() -> None:
        one = asyncio.create_task(found.ask(Ask(0, "m", "chat", b"x" * 60)))
        await asyncio.sleep(0.3)
        with pytest.raises(Unreadable, match="busy"):
            await found.ask(Ask(0, "m", "chat", b"x" * 60))
        two = asyncio.create_task(found.ask(Ask(0, "m", "chat", b"x")))
        await asyncio.sleep(0.1)
        with pytest.raises(Unreadable, match="busy"):
            await found.ask(Ask(0, "m", "chat", b""))
        await found.close()
        for task in (one, two):
            with pytest.raises(Unreadable, match="closed"):
                await task

    run(test())


def test_loop_free(folder: str) -> None:
    """A prompt of a hundred thousand tokens costs the event loop some milliseconds."""
    text = "".join(f"the quick brown fox {n} " for n in range(12_000))
    body = json.dumps({"prompt": text}).encode()

    async def test() -> None:
        async with started(folder, "local", fleet()) as read:
            await until(read, b'{"prompt": "x"}', COMPLETION)
            spent = time.process_time()
            found = await until(read, body, COMPLETION)
            spent = time.process_time() - spent

        assert found.tokens > 100_000
        assert len(found.blocks) == found.tokens // 4
        assert spent < 0.05

    run(test())


class Vllm:
    """An instance that renders what it is told to, or refuses, and notes what it was asked."""

    def __init__(self, status: int = 200, answer: Any = None, delay: float = 0.0) -> None:
        self.status, self.answer, self.delay = status, answer, delay
        self.asked: list[tuple[str, dict[str, Any], str]] = []

    async def respond(self, request: web.Request) -> web.Response:
        """One answer for all."""
        key = request.headers.get("Authorization", "")
        self.asked.append((request.path, await request.json(), key))
        await asyncio.sleep(self.delay)
        return web.json_response(self.answer, status=self.status)

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """On a port of its own."""
        app = web.Application()
        app.router.add_route("POST", "/{path:.*}", self.respond)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


IMAGE = {
    "token_ids": list(range(12)),
    "features": {
        "mm_hashes": {"image": ["hash"]},
        "mm_placeholders": {"image": [{"offset": 3, "length": 6}]},
    },
    "cache_salt": "s",
}


def test_engine() -> None:
    """The instance's own tokens and media are the prompt, numbered as its KV events are."""

    async def test() -> None:
        vllm = Vllm(answer=IMAGE)
        async with vllm.serve() as url, started(None, "engine", fleet(url), "key") as read:
            found = await read.read(CHAT, "m", HELLO, 4)

        assert found is not None
        more = {0: extra([("hash", 3), "s"]), 1: extra([("hash", -1)]), 2: extra([("hash", -5)])}
        assert found.blocks == numbers(range(12), 4, more)
        assert (found.tokens, found.encoder_items, found.encoder_tokens) == (12, (6,), 6)
        assert vllm.asked == [
            (f"{CHAT}/render", {**json.loads(HELLO), "mm_payload": "none"}, "Bearer key")
        ]

    run(test())


def test_engine_completion() -> None:
    """Several prompts in one request are all counted."""

    async def test() -> None:
        vllm = Vllm(answer=[{"token_ids": [1, 2, 3, 4, 5]}, {"token_ids": [6, 7]}])
        async with vllm.serve() as url, started(None, "engine", fleet(url)) as read:
            found = await read.read(COMPLETION, "m", b'{"prompt": ["a", "b"]}', 4)

        assert found is not None
        assert (found.tokens, list(found.ids), found.blocks) == (7, [], numbers([1, 2, 3, 4], 4))

    run(test())


def test_engine_refuses(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    """An instance that does not render is asked once; what it is to be started with is said."""

    async def test() -> None:
        vllm = Vllm(status=403)
        async with vllm.serve() as url, started(None, "engine", fleet(url, root=folder)) as read:
            found = await until(read)
            assert found.tokens == len(found.ids) > 0
            assert [path for path, _, _ in vllm.asked if path != "/tokenize"] == [f"{CHAT}/render"]

    with caplog.at_level(logging.WARNING):
        run(test())
    assert caplog.text.count("--enable-scale-out") == 1


def test_engine_key(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    """An instance that wants a key says so by another status, and the log another remedy."""

    async def test() -> None:
        vllm = Vllm(status=401)
        async with vllm.serve() as url, started(None, "engine", fleet(url, root=folder)) as read:
            assert await read.read(CHAT, "m", HELLO, 4) is None  # the tokenizer is loading

    with caplog.at_level(logging.WARNING):
        run(test())
    assert "--upstream-key" in caplog.text


FAILURES: list[tuple[Vllm, str]] = [
    (Vllm(status=400, answer={}), "refused"),
    (Vllm(status=500, answer={}), "refused"),
    (Vllm(answer={"token_ids": "x"}), "malformed"),
    (Vllm(answer={"token_ids": [-1]}), "malformed"),
    (Vllm(answer=IMAGE, delay=5.0), "late"),
]


@pytest.mark.parametrize(("vllm", "reason"), FAILURES)
def test_engine_fails(vllm: Vllm, reason: str) -> None:
    """Whatever an instance answers, a request has its prompt or the reason why not, in a second."""

    async def test() -> None:
        async with vllm.serve() as url, started(None, "engine", fleet(url)) as read:
            begun = time.monotonic()
            assert await read.read(CHAT, "m", HELLO, 4) is None
            assert read.counts == {f"failed-{reason}": 1}
            assert time.monotonic() - begun < 3

    run(test())


@pytest.mark.parametrize("same", [True, False])
def test_differs(folder: str, same: bool, caplog: pytest.LogCaptureFixture) -> None:
    """An instance that reads chats in another way is named, with what to do; one that does not is not."""

    async def test() -> None:
        vllm = Vllm(answer={"tokens": [1]})
        if same:
            async with started(folder, "local", fleet()) as other:
                found = await until(other, probe.body("m"))
            vllm.answer = {"tokens": list(found.ids)}
        async with vllm.serve() as url, started(None, "local", fleet(url, root=folder)) as read:
            await until(read)
            (load,) = read._loads.values()  # type: ignore[attr-defined]
            await load.task
            assert read.counts["differs"] == (0 if same else 1)
            assert [path for path, _, _ in vllm.asked] == ["/tokenize"]

    with caplog.at_level(logging.WARNING):
        run(test())
    assert ("--tokenize engine" in caplog.text) is not same
