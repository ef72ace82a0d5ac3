# SPDX-License-Identifier: Apache-2.0
"""Prompts when there is too much to do, or somebody is away: queues, instances that do not answer."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time

import pytest

from tests.router.test_config import read as options
from tests.router.test_prompts_process import CHAT, HELLO, Vllm, fleet, folder, run, started, until
from ttft_otel.router.choose import instance
from ttft_otel.router.fleet import Fleet
from ttft_otel.router.prompts import engine, local
from ttft_otel.router.prompts.frames import Ask
from ttft_otel.router.prompts.local import Local
from ttft_otel.router.prompts.reason import Unreadable
from ttft_otel.router.prompts.worker import PATIENCE, QUEUE, Worker

__all__ = ["folder"]
NOWHERE = "http://127.0.0.1:9"
SLOW = """
import sys, time
from ttft_otel.router.prompts.frames import HEAD, Told, ask, frame
while len(head := sys.stdin.buffer.read(HEAD)) == HEAD:
    asked = ask.decode(sys.stdin.buffer.read(int.from_bytes(head, "big")))
    time.sleep(float(asked.body or 0))
    sys.stdout.buffer.write(frame(Told(asked.number)))
    sys.stdout.buffer.flush()
"""


def slow() -> Worker:
    """A child that works at a prompt for as many seconds as its body says."""
    return Worker([sys.executable, "-c", SLOW])


async def outcome(worker: Worker, seconds: str) -> str:
    """How a request fares that waits for its prompt as local.py's do."""
    try:
        await asyncio.wait_for(worker.ask(Ask(0, "m", "chat", seconds.encode())), PATIENCE)
    except asyncio.TimeoutError:
        return "late"
    except Unreadable as error:
        return error.reason
    return "answered"


def test_overload() -> None:
    """With five times what a child can do, it answers as many as it can, and the others at once."""
    worker = slow()

    async def test() -> None:
        await worker.ask(Ask(0, "m"))
        tasks, begun = [], time.monotonic()
        for _ in range(300):  # 100 a second, and it can do 20
            tasks.append(asyncio.create_task(outcome(worker, "0.05")))
            await asyncio.sleep(0.01)
        lasted = time.monotonic() - begun
        fared = await asyncio.gather(*tasks)
        assert await outcome(worker, "0") == "answered"
        await worker.close()

        half = fared[len(fared) // 2 :]
        assert half.count("answered") > 0.4 * 20 * lasted / 2
        assert half.count("late") < 0.1 * len(half)
        assert set(fared) <= {"answered", "late", "busy"}

    run(test())


def test_left() -> None:
    """A child works for nobody who has left: the next one waits for what it is at, no longer."""
    worker = slow()

    async def test() -> None:
        await worker.ask(Ask(0, "m"))
        many = [asyncio.create_task(outcome(worker, "0.3")) for _ in range(30)]
        await asyncio.sleep(0.05)
        for task in many:
            task.cancel()
        await asyncio.gather(*many, return_exceptions=True)
        assert await outcome(worker, "0") == "answered"
        assert worker._bytes == 0
        assert not worker._waiting
        await worker.close()

    run(test())


def test_late() -> None:
    """While a child is at a prompt that nobody waits for any more, others are told so at once."""
    worker = slow()

    async def test() -> None:
        await worker.ask(Ask(0, "m"))
        assert await outcome(worker, "1.8") == "late"
        await asyncio.sleep(0.1)
        begun = time.monotonic()
        assert await outcome(worker, "0") == "busy"
        assert time.monotonic() - begun < QUEUE
        await asyncio.sleep(1.0)
        assert await outcome(worker, "0") == "answered"
        await worker.close()

    run(test())


def test_many(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """That a model has no tokenizer because others have is said, once."""
    monkeypatch.setattr(local, "MOST", 0)

    async def test() -> None:
        found = Local(None, fleet(root="/m"))
        for source in ("/m", "/n", "/m"):
            assert found.load(source) is None

    with caplog.at_level(logging.WARNING):
        run(test())
    assert caplog.text.count("tokenizers are wanted") == 1
    assert "--tokenizer" in caplog.text


def test_engine_backend() -> None:
    """The instances of the router's own options are asked."""

    async def test() -> None:
        vllm = Vllm(answer={"token_ids": [1, 2, 3, 4, 5]})
        async with vllm.serve() as url:
            several = Fleet(options("--backend", url).legs())
            async with started(None, "engine", several) as read:
                found = await read.read(CHAT, "m", HELLO, 4)

        assert found is not None
        assert found.tokens == 5
        assert [path for path, _, _ in vllm.asked] == [f"{CHAT}/render"]

    run(test())


def test_engine_away(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When nobody is there, tokens come from the tokenizer, and instances are left alone for a while."""
    monkeypatch.setattr(engine, "REST", 600.0)

    async def test() -> None:
        async with started(None, "engine", fleet(NOWHERE, root=folder)) as read:
            found = await until(read)
            assert found.tokens == len(found.ids) > 0
            assert read.counts["failed-unreachable"] == 1

    run(test())


@pytest.mark.parametrize("away", [True, False])
def test_engine_another(away: bool) -> None:
    """An instance that is late or not there is not asked again soon; another one is."""

    async def test() -> None:
        hanging, vllm = Vllm(answer={}, delay=3.0), Vllm(answer={"token_ids": [1, 2]})
        async with hanging.serve() as first, vllm.serve() as second:
            worse, better = instance(NOWHERE if away else first, "mono"), instance(second, "mono")
            better.in_flight = 9
            async with started(None, "engine", Fleet({"mono": [worse, better]})) as read:
                found = await read.read(CHAT, "m", HELLO, 4)
                assert (found is not None) is away
                begun = time.monotonic()
                for _ in range(3):
                    assert await read.read(CHAT, "m", HELLO, 4) is not None
                assert time.monotonic() - begun < PATIENCE
            assert read.counts["failed-unreachable" if away else "failed-late"] == 1

    run(test())


def test_engine_gone(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that an instance made necessary goes with it."""
    monkeypatch.setattr(local, "LOOK", 0.05)
    many = fleet(NOWHERE, root=folder)

    async def test() -> None:
        async with started(None, "engine", many) as read:
            loads = read._local._loads  # type: ignore[attr-defined]
            await asyncio.sleep(0.2)
            assert not loads, "it loads before it has to"
            await until(read)
            (load,) = loads.values()
            many.replace({"mono": []})
            while loads:
                await asyncio.sleep(0.05)
            await asyncio.gather(*read._local._ending)  # type: ignore[attr-defined]
            with pytest.raises(ProcessLookupError):
                os.kill(load.worker.pid, 0)

    run(test())


def test_a_client_that_leaves_as_its_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request ends there: the cancellation is never taken for the answer that came with it."""

    async def test() -> None:
        reader = Local("m", fleet())

        async def read(*_: object) -> None:
            asyncio.get_running_loop().call_soon(task.cancel)

        monkeypatch.setattr(reader, "_read", read)
        task = asyncio.create_task(reader.read("/v1/completions", "m", b"{}", 16))
        await asyncio.wait({task})
        assert task.cancelled()

    run(test())
