# SPDX-License-Identifier: Apache-2.0
"""Prompts when there is too much to do, or somebody is away: queues, instances that do not answer."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time

import pytest
from commands.router.test_router_options import read_options as options

from router.routing.prompts.test_prompt_processes import (
    CHAT_PATH,
    HELLO_BODY,
    FakeVllm,
    build_fleet,
    folder,
    light_transformers,
    run_reader,
    wait_for_prompt,
)
from ttft_otel.router.errors import UnreadablePrompt
from ttft_otel.router.routing.prompts import engine_reader, local_reader
from ttft_otel.router.routing.prompts.child_frames import TokenizeQuestion
from ttft_otel.router.routing.prompts.local_reader import LocalPromptReader
from ttft_otel.router.routing.prompts.tokenizer_worker import (
    MAX_QUEUE_WAIT_S,
    REQUEST_WAIT_S,
    TokenizerWorker,
)
from ttft_otel.router.types import parse_instance_url
from ttft_otel.router.upstream.instance_pool import InstancePool

__all__ = ["folder", "light_transformers"]
ABSENT_URL = "http://127.0.0.1:9"
SLOW_CHILD_CODE = """
import sys, time
from ttft_otel.router.routing.prompts.child_frames import (
    LENGTH_BYTES, TokenizeAnswer, question_decoder, frame_message,
)
while len(head := sys.stdin.buffer.read(LENGTH_BYTES)) == LENGTH_BYTES:
    asked = question_decoder.decode(sys.stdin.buffer.read(int.from_bytes(head, "big")))
    time.sleep(float(asked.body or 0))
    sys.stdout.buffer.write(frame_message(TokenizeAnswer()))
    sys.stdout.buffer.flush()
"""


def start_slow_worker() -> TokenizerWorker:
    """A child that works at a prompt for as many seconds as its body says."""
    return TokenizerWorker([sys.executable, "-c", SLOW_CHILD_CODE])


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


async def test_overload() -> None:
    """With five times what a child can do, it answers as many as it can, and the others at once."""
    worker = start_slow_worker()

    await worker.ask_child(TokenizeQuestion("m"))
    tasks, begun = [], time.monotonic()
    for _ in range(300):  # 100 a second, and it can do 20
        tasks.append(asyncio.create_task(classify_outcome(worker, "0.05")))
        await asyncio.sleep(0.01)
    lasted = time.monotonic() - begun
    fared = await asyncio.gather(*tasks)
    assert await classify_outcome(worker, "0") == "answered"
    await worker.close()

    half = fared[len(fared) // 2 :]
    assert half.count("answered") > 0.4 * 20 * lasted / 2
    assert half.count("late") < 0.1 * len(half)
    assert set(fared) <= {"answered", "late", "busy"}


async def test_left() -> None:
    """A child works for nobody who has left: the next one waits for what it is at, no longer."""
    worker = start_slow_worker()

    await worker.ask_child(TokenizeQuestion("m"))
    many = [asyncio.create_task(classify_outcome(worker, "0.3")) for _ in range(30)]
    await asyncio.sleep(0.05)
    for task in many:
        task.cancel()
    await asyncio.gather(*many, return_exceptions=True)
    assert await classify_outcome(worker, "0") == "answered"
    assert worker._question_bytes == 0
    assert not worker._waiting
    await worker.close()


async def test_late() -> None:
    """While a child is at a prompt that nobody waits for any more, others are told so at once."""
    worker = start_slow_worker()

    await worker.ask_child(TokenizeQuestion("m"))
    assert await classify_outcome(worker, "1.8") == "late"
    await asyncio.sleep(0.1)
    begun = time.monotonic()
    assert await classify_outcome(worker, "0") == "busy"
    assert time.monotonic() - begun < MAX_QUEUE_WAIT_S
    await asyncio.sleep(1.0)
    assert await classify_outcome(worker, "0") == "answered"
    await worker.close()


async def test_many(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """That a model has no tokenizer because others have is said, once."""
    monkeypatch.setattr(local_reader, "MAX_TOKENIZERS", 0)

    with caplog.at_level(logging.WARNING):
        found = LocalPromptReader(None, build_fleet(root="/m"))
        for source in ("/m", "/n", "/m"):
            assert found.ensure_loaded(source) is None
    assert caplog.text.count("tokenizers are wanted") == 1
    assert "--tokenizer" in caplog.text


async def test_engine_backend() -> None:
    """The instances of the router's own options are asked."""
    vllm = FakeVllm(answer={"token_ids": [1, 2, 3, 4, 5]})
    async with vllm.run_server() as url:
        several = InstancePool(options("--backend", url).build_instances())
        async with run_reader(None, "engine", several) as read:
            found = await read.read_prompt(CHAT_PATH, "m", HELLO_BODY, 4)

    assert found is not None
    assert found.tokens == 5
    assert [path for path, _, _ in vllm.received] == [f"{CHAT_PATH}/render"]


@pytest.mark.usefixtures("light_transformers")
async def test_engine_away(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When nobody is there, tokens come from the tokenizer, and instances are left alone for a while."""
    monkeypatch.setattr(engine_reader, "FAILURE_PAUSE_S", 600.0)

    async with run_reader(None, "engine", build_fleet(ABSENT_URL, root=folder)) as read:
        found = await wait_for_prompt(read)
        assert found.tokens == len(found.token_ids) > 0
        assert read.counts["failed-unreachable"] == 1


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


@pytest.mark.usefixtures("light_transformers")
async def test_engine_gone(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that an instance made necessary goes with it."""
    monkeypatch.setattr(local_reader, "MODEL_CHECK_INTERVAL_S", 0.05)
    many = build_fleet(ABSENT_URL, root=folder)

    async with run_reader(None, "engine", many) as read:
        loads = read._local._loads  # type: ignore[attr-defined]
        await asyncio.sleep(0.2)
        assert not loads, "it loads before it has to"
        await wait_for_prompt(read)
        (load,) = loads.values()
        many.replace_instances({"mono": []})
        while loads:
            await asyncio.sleep(0.05)
        await asyncio.gather(*read._local._closing_tasks)  # type: ignore[attr-defined]
        with pytest.raises(ProcessLookupError):
            os.kill(load.worker.pid, 0)


async def test_a_client_that_leaves_as_its_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request ends there: the cancellation is never taken for the answer that came with it."""
    reader = LocalPromptReader("m", build_fleet())

    async def cancel_while_reading(*_: object) -> None:
        asyncio.get_running_loop().call_soon(task.cancel)

    monkeypatch.setattr(reader, "_read_in_child", cancel_while_reading)
    task = asyncio.create_task(reader.read_prompt("/v1/completions", "m", b"{}", 16))
    await asyncio.wait({task})
    assert task.cancelled()
