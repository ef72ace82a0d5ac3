# SPDX-License-Identifier: Apache-2.0
"""A child process that is asked in turn and killed when it hangs; local.py has one for each tokenizer.

A process and not a thread: templates and tokenizers hold Python's lock, and a template could run
for ever. Questions wait here and not in its pipe, so that it works for nobody who has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

import msgspec

from ttft_otel.router.prompts.frames import HEAD, Ask, Told, frame, told
from ttft_otel.router.prompts.reason import Unreadable

MODULE: Final = "ttft_otel.router.prompts.child"
MOST: Final = 64  # questions that wait
BYTES: Final = 64 << 20  # of their bodies
AHEAD: Final = 2  # questions in its pipe: the one it works at, and the next
PATIENCE: Final = 1.0  # seconds that a request waits for its tokens
QUEUE: Final = 0.5  # seconds that a question may expect to wait: behind more it would be too late
WEIGHT: Final = 0.2  # of the latest in the mean time for a prompt
STUCK: Final = 2.0  # seconds for one prompt, then the child is killed: nobody waits for it any more
LOADING: Final = 300.0  # for one model, which may be fetched
_AGAIN: Final = 1.0  # seconds between two starts


class Worker:
    """Starts its child when first asked; `age` counts the children, each knows nothing at first."""

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", MODULE)) -> None:
        self._command = tuple(command)
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, tuple[Ask, asyncio.Future[Told]]] = {}
        self._sent: dict[int, tuple[Ask, asyncio.Future[Told]]] = {}
        self._bytes = self._number = self.age = 0
        self._mean = self._since = 0.0  # seconds for a prompt; when the child began with this one
        self._timer: asyncio.TimerHandle | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        self._started = float("-inf")
        self.pid = 0

    async def ask(self, question: Ask) -> Told:
        """The child's answer. Raises Unreadable: busy, stuck, or it died."""
        if self._full(question):
            raise Unreadable("busy")
        await self._open()
        self._number += 1
        number, question = self._number, Ask(self._number, *_rest(question))
        answer: asyncio.Future[Told] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (question, answer)
        self._bytes += len(question.body)
        self._feed()
        try:
            return await answer
        finally:
            if self._waiting.pop(number, None) is not None:  # it has left before its turn
                self._bytes -= len(question.body)

    def _full(self, question: Ask) -> bool:
        """Whether it would wait in vain, or one too many would."""
        many = len(self._waiting) + len(self._sent)
        if many >= MOST or self._bytes + len(question.body) > BYTES:
            return True
        if not question.path or not self._sent:
            return False
        late = asyncio.get_running_loop().time() - self._since > PATIENCE
        return late or many * self._mean > QUEUE

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

    async def _open(self) -> None:
        async with self._starting:
            if self._closed:
                raise Unreadable("closed")
            if self._process is None:
                await self._start()
            if self._process is None:
                raise Unreadable("died")

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
        except (asyncio.IncompleteReadError, msgspec.MsgspecError, ValueError, OSError):
            pass  # it ended, or says what no child of ours says: then it is ended
        _kill(process)
        await process.wait()
        if self._process is process:
            self._process = None
            self._fail("died")

    def _feed(self) -> None:
        """Give the child its next questions."""
        stdin = None if self._process is None else self._process.stdin
        while stdin is not None and self._waiting and len(self._sent) < AHEAD:
            number = next(iter(self._waiting))
            self._sent[number] = self._waiting.pop(number)
            stdin.write(frame(self._sent[number][0]))
        if self._timer is None:
            self._watch()

    def _told(self, answer: Told) -> None:
        found = self._sent.pop(answer.number, None)
        if found is None:
            return  # asked of an earlier child
        question, future = found
        self._bytes -= len(question.body)
        if question.path:
            spent = asyncio.get_running_loop().time() - self._since
            self._mean += (spent - self._mean) * WEIGHT
        if not future.done():
            future.set_result(answer)
        self._watch()
        self._feed()

    def _watch(self) -> None:
        """The first that was sent is what the child works at: it has so long from now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sent:
            loop = asyncio.get_running_loop()
            question, _ = next(iter(self._sent.values()))
            self._since = loop.time()
            self._timer = loop.call_later(STUCK if question.path else LOADING, self._stuck)

    def _stuck(self) -> None:
        self._timer = None
        process, self._process = self._process, None
        self._fail("stuck")
        if process is not None:
            _kill(process)

    def _fail(self, reason: str) -> None:
        waiting = [*self._sent.values(), *self._waiting.values()]
        self._sent, self._waiting, self._bytes = {}, {}, 0
        for _, future in waiting:
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
