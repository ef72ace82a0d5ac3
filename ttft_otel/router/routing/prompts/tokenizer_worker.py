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
from ttft_otel.tracing.child_command import build_child_command

CHILD_MODULE: Final = "ttft_otel.router.routing.prompts.tokenizer_child"
MAX_QUESTIONS: Final = 64  # questions queued or in the pipe
MAX_QUESTION_BYTES: Final = 64 << 20  # bytes of their bodies
MAX_IN_PIPE: Final = 2  # questions in the pipe: the one in progress and the next
REQUEST_WAIT_S: Final = 1.0  # seconds that a request waits to be tokenized
# A question whose expected wait in the queue is longer is refused: its answer would be late.
MAX_QUEUE_WAIT_S: Final = 0.5
MEAN_WEIGHT: Final = 0.2  # of the latest prompt in the average time per prompt
# Seconds per prompt until the child is killed; more than REQUEST_WAIT_S, so no request waits any more.
PROMPT_TIMEOUT_S: Final = 2.0
LOAD_TIMEOUT_S: Final = 300.0  # seconds; the model may have to be downloaded
_RESTART_DELAY_S: Final = 1.0  # seconds between two starts


class TokenizerWorker:
    """Starts its child at the first question, and a new one after it died.

    command: of the child process. child_count: children started; a new one has no tokenizer loaded.
    """

    def __init__(self, command: Sequence[str] = build_child_command(CHILD_MODULE)) -> None:
        self._command = tuple(command)
        self._process: asyncio.subprocess.Process | None = None
        self._read_task: asyncio.Task[None] | None = None
        self._waiting_questions: dict[
            int, tuple[TokenizeQuestion, asyncio.Future[TokenizeAnswer]]
        ] = {}
        self._sent_questions: dict[
            int, tuple[TokenizeQuestion, asyncio.Future[TokenizeAnswer]]
        ] = {}
        self._waiting_bytes = self._last_number = self.child_count = 0
        # Average seconds per prompt, and the event-loop time when the child began the current one.
        self._mean_prompt_s = self._prompt_started_s = 0.0
        self._stuck_timer: asyncio.TimerHandle | None = None
        self._start_lock = asyncio.Lock()
        self._is_closed = False
        self._last_start_s = float("-inf")
        self.pid = 0

    async def ask_child(self, question: TokenizeQuestion) -> TokenizeAnswer:
        """Send `question` and return the answer. Raises UnreadablePrompt: busy, stuck, died or closed."""
        if self._is_overloaded(question):
            raise UnreadablePrompt("busy")
        await self._ensure_started()
        self._last_number += 1
        number, question = (
            self._last_number,
            TokenizeQuestion(self._last_number, *_question_fields(question)),
        )
        answer: asyncio.Future[TokenizeAnswer] = asyncio.get_running_loop().create_future()
        self._waiting_questions[number] = (question, answer)
        self._waiting_bytes += len(question.body)
        self._send_questions()
        try:
            return await answer
        finally:
            if self._waiting_questions.pop(number, None) is not None:  # cancelled before its turn
                self._waiting_bytes -= len(question.body)

    def _is_overloaded(self, question: TokenizeQuestion) -> bool:
        """Whether the queue is full, or so long that the answer would be late."""
        question_count = len(self._waiting_questions) + len(self._sent_questions)
        if (
            question_count >= MAX_QUESTIONS
            or self._waiting_bytes + len(question.body) > MAX_QUESTION_BYTES
        ):
            return True
        # A load has minutes; and an idle child answers at once.
        if not question.path or not self._sent_questions:
            return False
        is_late = asyncio.get_running_loop().time() - self._prompt_started_s > REQUEST_WAIT_S
        return is_late or question_count * self._mean_prompt_s > MAX_QUEUE_WAIT_S

    async def close(self) -> None:
        """Kill the child for good; waiting questions fail with "closed"."""
        self._is_closed = True
        async with self._start_lock:  # waits for a child that is just being started
            process, self._process = self._process, None
        if self._stuck_timer is not None:
            self._stuck_timer.cancel()
            self._stuck_timer = None
        if process is not None:
            _kill_process(process)
            await process.wait()
        if self._read_task is not None:
            await self._read_task
        self._fail_questions("closed")

    async def _ensure_started(self) -> None:
        async with self._start_lock:
            if self._is_closed:
                raise UnreadablePrompt("closed")
            if self._process is None:
                await self._start_child()
            if self._process is None:
                raise UnreadablePrompt("died")

    async def _start_child(self) -> None:
        loop = asyncio.get_running_loop()
        # A child that dies at its start must not be restarted in a loop.
        if loop.time() - self._last_start_s < _RESTART_DELAY_S:
            raise UnreadablePrompt("died")
        self._last_start_s = loop.time()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,  # messages of libraries could contain prompts
                # One prompt at a time: threads of the tokenizer would take cores from the router.
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            )
        except OSError as error:
            raise UnreadablePrompt("died") from error
        self.child_count += 1
        self.pid = self._process.pid
        self._read_task = asyncio.create_task(self._read_answers(self._process))

    async def _read_answers(self, process: asyncio.subprocess.Process) -> None:
        out = process.stdout
        try:
            while out is not None:
                length = int.from_bytes(await out.readexactly(LENGTH_BYTES), "big")
                self._receive_answer(answer_decoder.decode(await out.readexactly(length)))
        except (asyncio.IncompleteReadError, msgspec.MsgspecError, ValueError, OSError):
            pass  # the child ended, or broke the protocol and is killed
        _kill_process(process)
        await process.wait()
        # Otherwise `close` or a time-out has dealt with its questions already.
        if self._process is process:
            self._process = None
            self._fail_questions("died")

    def _send_questions(self) -> None:
        """Fill the pipe up to MAX_IN_PIPE questions."""
        stdin = None if self._process is None else self._process.stdin
        while (
            stdin is not None
            and self._waiting_questions
            and len(self._sent_questions) < MAX_IN_PIPE
        ):
            # First come, first served: dicts keep the order of insertion.
            number = next(iter(self._waiting_questions))
            self._sent_questions[number] = self._waiting_questions.pop(number)
            stdin.write(frame_message(self._sent_questions[number][0]))
        if self._stuck_timer is None:
            self._restart_timer()

    def _receive_answer(self, answer: TokenizeAnswer) -> None:
        entry = self._sent_questions.pop(answer.number, None)
        if entry is None:
            return  # the question was for an earlier child
        question, future = entry
        self._waiting_bytes -= len(question.body)
        if question.path:
            spent = asyncio.get_running_loop().time() - self._prompt_started_s
            self._mean_prompt_s += (spent - self._mean_prompt_s) * MEAN_WEIGHT
        if not future.done():
            future.set_result(answer)
        self._restart_timer()
        self._send_questions()

    def _restart_timer(self) -> None:
        """Restart the time-out for the oldest question sent, the one that the child works at."""
        if self._stuck_timer is not None:
            self._stuck_timer.cancel()
            self._stuck_timer = None
        if self._sent_questions:
            loop = asyncio.get_running_loop()
            question, _ = next(iter(self._sent_questions.values()))
            self._prompt_started_s = loop.time()
            self._stuck_timer = loop.call_later(
                PROMPT_TIMEOUT_S if question.path else LOAD_TIMEOUT_S, self._handle_stuck
            )

    def _handle_stuck(self) -> None:
        self._stuck_timer = None
        # Taken away first, so that the next question starts a new child at once.
        process, self._process = self._process, None
        self._fail_questions("stuck")
        if process is not None:
            _kill_process(process)

    def _fail_questions(self, reason: str) -> None:
        waiting = [*self._sent_questions.values(), *self._waiting_questions.values()]
        self._sent_questions, self._waiting_questions, self._waiting_bytes = {}, {}, 0
        for _, future in waiting:
            if not future.done():
                future.set_exception(UnreadablePrompt(reason))
        self._restart_timer()


def _kill_process(process: asyncio.subprocess.Process) -> None:
    """Kill by pid: Process.kill() polls first, which may consume the exit status others wait for."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _question_fields(question: TokenizeQuestion) -> tuple[str, str, bytes, int, str, int]:
    return (
        question.source,
        question.path,
        question.body,
        question.block_size,
        question.adapter,
        question.max_prompt_tokens,
    )
