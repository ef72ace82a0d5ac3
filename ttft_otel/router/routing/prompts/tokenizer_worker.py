# SPDX-License-Identifier: Apache-2.0
"""Runs a tokenizer child process and kills it when it hangs; prompt_reader.py has one per tokenizer.

A process and not a thread, because templates and tokenizers hold the GIL and a template may never end.
Questions queue here and not in the pipe, so that those of disconnected clients can be dropped. A frame is
the length of a message, big-endian, followed by the message in msgpack; the child answers each question
before it reads the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from array import array
from collections.abc import Sequence
from typing import Final

import msgspec

from ttft_otel.router.errors import UnreadablePrompt
from ttft_otel.tracing.handoff import build_child_command

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


# MessagePack does not tell its length in front, and a pipe has no message bounds.
LENGTH_BYTES: Final = 4  # bytes of a frame's length
# The `source` of prompts that are token ids already and need no tokenizer; no model has this name.
NO_TOKENIZER: Final = "\0"


# array_like: fields by position, since both ends are of the same version.
class TokenizeQuestion(msgspec.Struct, array_like=True, frozen=True):
    """A request to load the tokenizer `source`, or with a `path` to read the prompt of `body`."""

    source: str
    path: str = ""  # "chat" or "completion"
    body: bytes = b""
    block_size: int = 0  # tokens per block
    adapter: str = ""  # the LoRA adapter, if any
    max_prompt_tokens: int = 0  # the model's limit, 0 if unknown


class Prompt(msgspec.Struct, array_like=True, frozen=True):
    """A prompt as the engine will see it, or why it cannot be read: the response to a question."""

    error: str = ""  # one word, "" for success
    detail: str = ""  # for logs, about the model and never of a prompt
    tokens: int = 0  # its length, placeholder tokens of media included
    ids: bytes = b""  # an array("I") as bytes; empty if the ids of media placeholders are unknown
    # Keys of the full blocks (policies/block_index.py), as far as ids are known.
    block_keys: tuple[int, ...] = ()
    item_tokens: tuple[int, ...] = ()  # placeholder tokens per media item, repeated ones included
    cached_tokens: int = 0  # tokens taken from the cache of tokenizer_child.py

    @property
    def token_ids(self) -> array[int]:
        ids = array("I")
        ids.frombytes(self.ids)
        return ids


def frame_message(message: TokenizeQuestion | Prompt) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


question_decoder: Final = msgspec.msgpack.Decoder(TokenizeQuestion)
answer_decoder: Final = msgspec.msgpack.Decoder(Prompt)


class TokenizerWorker:
    """Starts its child (of `command`) at the first question, and a new one after it died.

    load_task, retry_at_s: its reader's, which loads a tokenizer; event-loop time of the next attempt.
    """

    def __init__(self, command: Sequence[str] = build_child_command(CHILD_MODULE)) -> None:
        self.pid = 0
        self.load_task: asyncio.Task[None] | None = None
        self.retry_at_s = 0.0
        # Numbers of the latest child, and of the one that has loaded the tokenizer: another one has not.
        self._child_count = self._loaded_child = 0
        self._command = tuple(command)
        self._process: asyncio.subprocess.Process | None = None
        self._read_task: asyncio.Task[None] | None = None
        # First come, first served: dicts keep the order of insertion, and the child that of questions.
        self._waiting: dict[asyncio.Future[Prompt], TokenizeQuestion] = {}
        self._sent: dict[asyncio.Future[Prompt], TokenizeQuestion] = {}
        self._question_bytes = 0  # of both
        self._mean_prompt_s = 0.0
        self._begun_s = 0.0  # event-loop time when the child began with the current question
        self._stuck_timer: asyncio.TimerHandle | None = None
        self._start_lock = asyncio.Lock()
        self._last_start_s = float("-inf")
        self._is_closed = False

    @property
    def is_loaded(self) -> bool:
        return 0 < self._loaded_child == self._child_count

    @property
    def is_loading(self) -> bool:
        return self.load_task is not None and not self.load_task.done() and not self.is_loaded

    async def load_tokenizer(self, source: str) -> Prompt:
        """Have the child load the tokenizer `source`; the answer says what was wrong."""
        try:
            answer = await self.ask_child(TokenizeQuestion(source))
        except UnreadablePrompt as error:
            detail = f"the tokenizer process of {source!r} failed: {error.reason}"
            return Prompt(error.reason, detail)
        if not answer.error:
            self._loaded_child = self._child_count
        return answer

    async def ask_child(self, question: TokenizeQuestion) -> Prompt:
        """Send `question` and return the answer. Raises UnreadablePrompt: busy, stuck, died or closed."""
        if self._is_overloaded(question):
            raise UnreadablePrompt("busy")
        if self._process is None or self._is_closed:
            await self._ensure_started()
        answer: asyncio.Future[Prompt] = asyncio.get_running_loop().create_future()
        self._waiting[answer] = question
        self._question_bytes += len(question.body)
        self._send_questions()
        try:
            return await answer
        finally:
            if self._waiting.pop(answer, None) is not None:  # cancelled before its turn
                self._question_bytes -= len(question.body)

    def _is_overloaded(self, question: TokenizeQuestion) -> bool:
        """Whether the queue is full, or so long that the answer would be late."""
        question_count = len(self._waiting) + len(self._sent)
        question_bytes = self._question_bytes + len(question.body)
        if question_count >= MAX_QUESTIONS or question_bytes > MAX_QUESTION_BYTES:
            return True
        # A load has minutes; and an idle child answers at once.
        if not question.path or not self._sent:
            return False
        is_late = asyncio.get_running_loop().time() - self._begun_s > REQUEST_WAIT_S
        return is_late or question_count * self._mean_prompt_s > MAX_QUEUE_WAIT_S

    async def close(self) -> None:
        """Kill the child for good; questions fail with "closed"."""
        self._is_closed = True
        async with self._start_lock:  # waits for a child that is just being started
            process, self._process = self._process, None
        self._fail_questions("closed")
        if process is not None:
            _kill_process(process)
        if self._read_task is not None:
            await self._read_task
        if self.load_task is not None:
            self.load_task.cancel()
            await asyncio.gather(self.load_task, return_exceptions=True)

    async def _ensure_started(self) -> None:
        async with self._start_lock:
            now_s = asyncio.get_running_loop().time()
            if self._is_closed:
                raise UnreadablePrompt("closed")
            if self._process is not None:
                return
            # A child that dies at its start must not be restarted in a loop.
            if now_s - self._last_start_s < _RESTART_DELAY_S:
                raise UnreadablePrompt("died")
            self._last_start_s = now_s
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
            self._child_count += 1
            self.pid = self._process.pid
            self._read_task = asyncio.create_task(self._read_answers(self._process))

    async def _read_answers(self, process: asyncio.subprocess.Process) -> None:
        out = process.stdout
        # The child ends, or breaks the protocol and is killed.
        with contextlib.suppress(
            asyncio.IncompleteReadError, msgspec.MsgspecError, ValueError, OSError
        ):
            while out is not None:
                length = int.from_bytes(await out.readexactly(LENGTH_BYTES), "big")
                answer = answer_decoder.decode(await out.readexactly(length))
                # One that was too late has been replaced, and its questions have failed.
                if self._process is not process or not self._sent:
                    break
                future = next(iter(self._sent))
                question = self._sent.pop(future)
                self._question_bytes -= len(question.body)
                if question.path:
                    spent_s = asyncio.get_running_loop().time() - self._begun_s
                    self._mean_prompt_s += (spent_s - self._mean_prompt_s) * MEAN_WEIGHT
                if not future.done():
                    future.set_result(answer)
                self._restart_timer()
                self._send_questions()
        _kill_process(process)
        await process.wait()
        # Otherwise `close` or a time-out has dealt with its questions already.
        if self._process is process:
            self._process = None
            self._fail_questions("died")

    def _send_questions(self) -> None:
        """Fill the pipe up to MAX_IN_PIPE questions."""
        stdin = None if self._process is None else self._process.stdin
        while stdin is not None and self._waiting and len(self._sent) < MAX_IN_PIPE:
            answer = next(iter(self._waiting))
            self._sent[answer] = self._waiting.pop(answer)
            stdin.write(frame_message(self._sent[answer]))
        if self._stuck_timer is None:
            self._restart_timer()

    def _restart_timer(self) -> None:
        """Restart the time-out for the oldest question sent, the one that the child works at."""
        if self._stuck_timer is not None:
            self._stuck_timer.cancel()
            self._stuck_timer = None
        if self._sent:
            loop = asyncio.get_running_loop()
            question = next(iter(self._sent.values()))
            self._begun_s = loop.time()
            limit_s = PROMPT_TIMEOUT_S if question.path else LOAD_TIMEOUT_S
            self._stuck_timer = loop.call_later(limit_s, self._handle_stuck)

    def _handle_stuck(self) -> None:
        # Taken away first, so that the next question starts a new child at once.
        process, self._process = self._process, None
        self._fail_questions("stuck")
        if process is not None:
            _kill_process(process)

    def _fail_questions(self, reason: str) -> None:
        futures = [*self._sent, *self._waiting]
        self._sent.clear()
        self._waiting.clear()
        self._question_bytes = 0
        for future in futures:
            if not future.done():
                future.set_exception(UnreadablePrompt(reason))
        self._restart_timer()


def _kill_process(process: asyncio.subprocess.Process) -> None:
    """Kill by pid: Process.kill() polls first, which may consume the exit status others wait for."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
