# SPDX-License-Identifier: Apache-2.0
"""A child process that is asked in turn and killed when it hangs; local.py has one for each tokenizer.

A process and not a thread: templates and tokenizers hold Python's lock, and a client's template
could run for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

from ttft_otel.router.prompts.frames import HEAD, Ask, Told, frame, told
from ttft_otel.router.prompts.reason import Unreadable

MODULE: Final = "ttft_otel.router.prompts.child"
MOST: Final = 64  # questions that wait
BYTES: Final = 64 << 20  # of their bodies
STUCK: Final = 10.0  # seconds for one prompt, then the child is killed
LOADING: Final = 300.0  # for one model, which may be fetched
_AGAIN: Final = 1.0  # seconds between two starts


class Worker:
    """Starts its child when first asked; `age` counts the children, each knows nothing at first."""

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", MODULE)) -> None:
        self._command = tuple(command)
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, tuple[Ask, asyncio.Future[Told]]] = {}
        self._bytes = self._number = self.age = 0
        self._timer: asyncio.TimerHandle | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        self._started = float("-inf")
        self.pid = 0

    async def ask(self, question: Ask) -> Told:
        """The child's answer. Raises Unreadable: busy, stuck, or it died."""
        if len(self._waiting) >= MOST or self._bytes + len(question.body) > BYTES:
            raise Unreadable("busy")
        stdin = await self._open()
        self._number += 1
        question = Ask(self._number, *_rest(question))
        answer: asyncio.Future[Told] = asyncio.get_running_loop().create_future()
        self._waiting[self._number] = (question, answer)
        self._bytes += len(question.body)
        stdin.write(frame(question))
        if self._timer is None:
            self._watch()
        return await answer

    async def close(self) -> None:
        """Kill it, for good; whoever waits is told."""
        self._closed = True
        async with self._starting:  # one that is just being started is there then
            process, self._process = self._process, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if process is not None:
            _kill(process)
            await process.wait()
        if self._reading is not None:
            await self._reading
        self._fail("closed")

    async def _open(self) -> asyncio.StreamWriter:
        async with self._starting:
            if self._closed:
                raise Unreadable("closed")
            if self._process is None:
                await self._start()
            process = self._process
            if process is None or process.stdin is None:
                raise Unreadable("died")
            return process.stdin

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() - self._started < _AGAIN:
            raise Unreadable("died")
        self._started = loop.time()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,  # a library's words could hold a prompt's
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            )
        except OSError as error:
            raise Unreadable("died") from error
        self.age += 1
        self.pid = self._process.pid
        self._reading = asyncio.create_task(self._read(self._process))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        out = process.stdout
        try:
            while out is not None:
                length = int.from_bytes(await out.readexactly(HEAD), "big")
                self._told(told.decode(await out.readexactly(length)))
        except (asyncio.IncompleteReadError, ValueError, OSError):
            pass  # it ended, or says what no child of ours says: then it is ended
        _kill(process)
        await process.wait()
        if self._process is process:
            self._process = None
            self._fail("died")

    def _told(self, answer: Told) -> None:
        found = self._waiting.pop(answer.number, None)
        if found is None:
            return  # asked of an earlier child
        question, future = found
        self._bytes -= len(question.body)
        if not future.done():
            future.set_result(answer)
        self._watch()

    def _watch(self) -> None:
        """The first in the queue is what the child works at: it has so long from now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            question, _ = next(iter(self._waiting.values()))
            patience = STUCK if question.path else LOADING
            self._timer = asyncio.get_running_loop().call_later(patience, self._stuck)

    def _stuck(self) -> None:
        self._timer = None
        process, self._process = self._process, None
        self._fail("stuck")
        if process is not None:
            _kill(process)

    def _fail(self, reason: str) -> None:
        waiting, self._waiting, self._bytes = self._waiting, {}, 0
        for _, future in waiting.values():
            if not future.done():
                future.set_exception(Unreadable(reason))
        self._watch()


def _kill(process: asyncio.subprocess.Process) -> None:
    """Not by its own kill(), which may take the exit status from whoever waits for it."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _rest(question: Ask) -> tuple[str, str, bytes, int, str, int]:
    return (
        question.source,
        question.path,
        question.body,
        question.size,
        question.adapter,
        question.limit,
    )
