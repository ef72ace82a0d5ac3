# SPDX-License-Identifier: Apache-2.0
"""Runs a tokenizer child process and kills it when it hangs; local_reader.py has one per tokenizer.

A process and not a thread, because templates and tokenizers hold the GIL and a template may never end.
Questions queue here and not in the pipe, so that those of disconnected clients can be dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from typing import Final

import msgspec

from ttft_otel.router.errors import UnreadablePrompt
from ttft_otel.router.routing.prompts.child_frames import (
    LENGTH_BYTES,
    TokenizeAnswer,
    TokenizeQuestion,
    answer_decoder,
    frame_message,
)
from ttft_otel.router.time_limits import wait_at_most
from ttft_otel.tracing.child_command import build_child_command

CHILD_MODULE: Final = "ttft_otel.router.routing.prompts.tokenizer_child"
MAX_QUESTIONS: Final = 64  # questions queued or asked
MAX_QUESTION_BYTES: Final = 64 << 20  # bytes of their bodies
REQUEST_WAIT_S: Final = 1.0  # seconds that a request waits to be tokenized
# A question whose expected wait in the queue is longer is refused: its answer would be late.
MAX_QUEUE_WAIT_S: Final = 0.5
MEAN_WEIGHT: Final = 0.2  # of the latest prompt in the average time per prompt
# Seconds per prompt until the child is killed; more than REQUEST_WAIT_S, so no request waits any more.
PROMPT_TIMEOUT_S: Final = 2.0
LOAD_TIMEOUT_S: Final = 300.0  # seconds; the model may have to be downloaded
_RESTART_DELAY_S: Final = 1.0  # seconds between two starts


class TokenizerWorker:
    """Starts its child (of `command`) at the first question, and a new one after it died."""

    def __init__(self, command: Sequence[str] = build_child_command(CHILD_MODULE)) -> None:
        self.pid = 0
        self.child_count = 0  # children started; a new one has no tokenizer loaded
        self._command = tuple(command)
        self._process: asyncio.subprocess.Process | None = None
        # The child has one question at a time, first come, first served.
        self._turn = asyncio.Lock()
        self._question_count = 0
        self._question_bytes = 0
        self._mean_prompt_s = 0.0
        self._asked_s = 0.0  # event-loop time when the child got the current question
        self._last_start_s = float("-inf")
        self._is_closed = False

    async def ask_child(self, question: TokenizeQuestion) -> TokenizeAnswer:
        """Send `question` and return the answer. Raises UnreadablePrompt: busy, stuck, died or closed."""
        if self._is_overloaded(question):
            raise UnreadablePrompt("busy")
        self._question_count += 1
        self._question_bytes += len(question.body)
        try:
            await self._turn.acquire()
            exchange = asyncio.create_task(self._exchange_messages(question))
            # The child goes on after its client has left, and with it this task, which ends the turn.
            exchange.add_done_callback(lambda _: self._turn.release())
            return await asyncio.shield(exchange)
        finally:
            self._question_count -= 1
            self._question_bytes -= len(question.body)

    def _is_overloaded(self, question: TokenizeQuestion) -> bool:
        """Whether the queue is full, or so long that the answer would be late."""
        question_bytes = self._question_bytes + len(question.body)
        if self._question_count >= MAX_QUESTIONS or question_bytes > MAX_QUESTION_BYTES:
            return True
        # A load has minutes; and an idle child answers at once.
        if not question.path or not self._turn.locked():
            return False
        is_late = asyncio.get_running_loop().time() - self._asked_s > REQUEST_WAIT_S
        return is_late or self._question_count * self._mean_prompt_s > MAX_QUEUE_WAIT_S

    async def close(self) -> None:
        """Kill the child for good; questions fail with "closed"."""
        self._is_closed = True
        await self._end_child()
        async with self._turn:  # a child that was just being started
            await self._end_child()

    async def _exchange_messages(self, question: TokenizeQuestion) -> TokenizeAnswer:
        loop = asyncio.get_running_loop()
        self._asked_s = loop.time()
        try:
            process = self._process
            if process is None or process.returncode is not None:
                process = await self._start_child()
                self._asked_s = loop.time()
            if self._is_closed or process.stdin is None or process.stdout is None:
                raise UnreadablePrompt("closed")
            process.stdin.write(frame_message(question))
            limit_s = PROMPT_TIMEOUT_S if question.path else LOAD_TIMEOUT_S
            answer = await wait_at_most(_read_answer(process.stdout), limit_s)
        except asyncio.TimeoutError:
            await self._end_child()
            raise UnreadablePrompt("stuck") from None
        # The child ended, or broke the protocol.
        except (asyncio.IncompleteReadError, msgspec.MsgspecError, ValueError, OSError):
            await self._end_child()
            raise UnreadablePrompt("closed" if self._is_closed else "died") from None
        except UnreadablePrompt:
            await self._end_child()
            raise
        if question.path:
            self._mean_prompt_s += (loop.time() - self._asked_s - self._mean_prompt_s) * MEAN_WEIGHT
        return answer

    async def _start_child(self) -> asyncio.subprocess.Process:
        now_s = asyncio.get_running_loop().time()
        if self._is_closed:
            raise UnreadablePrompt("closed")
        # A child that dies at its start must not be restarted in a loop.
        if now_s - self._last_start_s < _RESTART_DELAY_S:
            raise UnreadablePrompt("died")
        self._last_start_s = now_s
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # messages of libraries could contain prompts
            # One prompt at a time: threads of the tokenizer would take cores from the router.
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )
        self.child_count += 1
        self.pid = self._process.pid
        return self._process

    async def _end_child(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            # By pid: Process.kill() polls first, which may consume the exit status others wait for.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        await process.wait()


async def _read_answer(out: asyncio.StreamReader) -> TokenizeAnswer:
    length = int.from_bytes(await out.readexactly(LENGTH_BYTES), "big")
    return answer_decoder.decode(await out.readexactly(length))
