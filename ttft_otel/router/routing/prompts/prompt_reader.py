# SPDX-License-Identifier: Apache-2.0
"""Read prompts with each model's tokenizer in child processes, or with the render endpoints of instances.

That is --tokenize local or engine; routing_service.py asks. A process and not a thread, because templates and
tokenizers hold the GIL and a template may never end; a child that hangs is killed. Questions queue here and
not in its pipe, so that those of disconnected clients can be dropped; it answers each one before it reads the
next. After each load of a tokenizer a probe chat is compared with what an instance makes of it: the tokens
differ if it was started with another template or tokenizer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from ttft_otel.model.endpoints import CHAT_PATH, COMPLETIONS_PATH, MESSAGES_PATH, RESPONSES_PATH
from ttft_otel.router.errors import InvalidAnswer, UnreadablePrompt
from ttft_otel.router.routing.prompts.prompt_parts import (
    LENGTH_BYTES,
    NO_TOKENIZER,
    PlaceholderSpan,
    Prompt,
    TokenizeQuestion,
    answer_decoder,
    compute_prompt_keys,
    frame_message,
)
from ttft_otel.router.time_limits import wait_at_most
from ttft_otel.router.types import JSON_ERRORS, Instance
from ttft_otel.router.upstream.connection_pool import QUERY_ERRORS, QueryClient
from ttft_otel.router.upstream.instance_pool import InstancePool
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
                elif not answer.error:
                    self._loaded_child = self._child_count
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


PROMPT_KINDS: Final = {CHAT_PATH: "chat", COMPLETIONS_PATH: "completion"}
LOAD_RETRY_DELAY_S: Final = 60.0  # seconds before a failed load is tried again
MODEL_CHECK_INTERVAL_S: Final = 1.0  # seconds between two checks for new models
PROMPT_PEEK_BYTES: Final = 64  # bytes of a prompt that show whether it is token ids
MAX_TOKENIZERS: Final = 8  # tokenizers at a time; each child takes about 100 MB
RENDERED_PATHS: Final = (*PROMPT_KINDS, RESPONSES_PATH, MESSAGES_PATH)
REFUSAL_PAUSE_S: Final = 60.0  # seconds before an instance that refused is asked again
FAILURE_PAUSE_S: Final = 5.0  # seconds before one that timed out or was unreachable is asked again
# Beyond it requests go without tokens: rendering competes with the instances' own work.
MAX_CONCURRENT_RENDERS: Final = 32  # render requests in flight
MAX_RENDER_BYTES: Final = 32 << 20  # bytes of a response
_REFUSAL_STATUSES: Final = (401, 403, 404, 405, 501)  # no such endpoint, or it is disabled
_KEY_STATUSES: Final = (401,)
_TOO_MANY_TOKENIZERS: Final = (
    f"more than {MAX_TOKENIZERS} tokenizers are wanted: prompts of the other models are routed "
    "without token ids; give one tokenizer for all with --tokenizer, or use --tokenize engine"
)
_DIFFERENCE_WARNING: Final = (
    "{url} tokenizes a chat differently from the tokenizer and template of {source}: cached prefixes "
    "will be missed; use --tokenize engine, or --tokenizer with what that instance was started with"
)
# Non-ASCII text, whitespace at the edges, several roles and text parts: where templates differ.
_PROBE_CHAT: Final[list[dict[str, Any]]] = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is 2 + 2?\n\nÀnd 3 × 4? \U0001f600"},
    {"role": "assistant", "content": " Four."},
    {"role": "user", "content": [{"type": "text", "text": "And  3?"}]},
]

log: Final = logging.getLogger("ttft_otel")


class LocalPromptReader:
    """Runs one child per tokenizer, so that one that loads does not delay prompts of other models.

    Args:
        tokenizer: for all models; None: the one that /v1/models names.
        pool: the instances.

    counts: results: read, cached, failed-REASON.
    """

    _queries: QueryClient  # from start() on
    loads_early = True  # tokenizers, once an instance names their models; else at the first prompt

    def __init__(self, tokenizer: str | None, pool: InstancePool) -> None:
        self.counts: Counter[str] = Counter()
        self._tokenizer = tokenizer
        self._pool = pool
        self._workers: dict[str, TokenizerWorker] = {}  # by tokenizer
        self._last_warnings: dict[str, str] = {}  # last logged problem by source
        self._watch_task: asyncio.Task[None] | None = None
        self._closing_tasks: set[asyncio.Task[None]] = set()

    async def start(self, queries: QueryClient) -> None:
        """Begin to load tokenizers; `queries` is for questions to instances."""
        self._queries = queries
        self._watch_task = asyncio.create_task(self._watch_models())

    async def close(self) -> None:
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.gather(self._watch_task, return_exceptions=True)
        for source in list(self._workers):
            self._close_tokenizer(source)
        await asyncio.gather(*self._closing_tasks)

    async def read_prompt(
        self, path: str, model: str, body: bytes, block_size: int
    ) -> Prompt | None:
        """The prompt of a request; None if it cannot be read, with the reason in `counts`.

        It never raises and never blocks the event loop.

        Args:
            path: of the request.
            model: name of its model, "" for any.
            body: its JSON.
            block_size: tokens per block of the keys.
        """
        reading = self._read_in_child(path, model, body, block_size)
        try:
            return await wait_at_most(reading, REQUEST_WAIT_S)
        except asyncio.TimeoutError:
            self.counts["failed-late"] += 1
        except UnreadablePrompt as error:
            self.counts[f"failed-{error.reason}"] += 1
        return None

    async def _read_in_child(self, path: str, model: str, body: bytes, block_size: int) -> Prompt:
        kind = next((PROMPT_KINDS[each] for each in PROMPT_KINDS if path.endswith(each)), "")
        if not kind or block_size < 1:
            raise UnreadablePrompt("path")
        question = self.find_tokenizer(model)
        if question is None:
            raise UnreadablePrompt("model")
        worker = self.ensure_loaded(question.source)
        is_loaded = worker is not None and worker.is_loaded
        if not is_loaded and kind == PROMPT_KINDS[COMPLETIONS_PATH] and _is_token_ids(body):
            # The child that needs no tokenizer reads it, and loads in no time.
            question = replace(question, source=NO_TOKENIZER)
            worker = self.ensure_loaded(NO_TOKENIZER)
            if worker is not None and worker.load_task is not None and worker.is_loading:
                await asyncio.wait({worker.load_task})
        if worker is None or not worker.is_loaded:
            raise UnreadablePrompt("loading" if worker and worker.is_loading else "load")
        answer = await worker.ask_child(
            replace(question, path=kind, body=body, block_size=block_size)
        )
        if answer.error:
            raise UnreadablePrompt(answer.error)
        self.counts["read"] += 1
        if answer.cached_tokens:
            self.counts["cached"] += 1
        return answer

    def find_tokenizer(self, model: str) -> TokenizeQuestion | None:
        """The question that loads the tokenizer of `model`; None while no instance lists the model."""
        for instance, card in self._list_model_cards():
            if not model or card["id"] == model:
                return self._locate_tokenizer(instance, card)
        return TokenizeQuestion(self._tokenizer) if self._tokenizer else None

    def ensure_loaded(self, source: str) -> TokenizerWorker | None:
        """The worker of the tokenizer `source`, starting to load it if necessary; None beyond MAX_TOKENIZERS.

        A failed load is tried again after LOAD_RETRY_DELAY_S.
        """
        worker = self._workers.get(source)
        if worker is None:
            if source != NO_TOKENIZER and len({*self._workers} - {NO_TOKENIZER}) >= MAX_TOKENIZERS:
                self.warn_once("", _TOO_MANY_TOKENIZERS)
                return None
            worker = self._workers[source] = TokenizerWorker()
        now_s = asyncio.get_running_loop().time()
        if not worker.is_loaded and not worker.is_loading and now_s >= worker.retry_at_s:
            worker.load_task = asyncio.create_task(self._load_tokenizer(source, worker))
        return worker

    async def _load_tokenizer(self, source: str, worker: TokenizerWorker) -> None:
        try:
            answer = await worker.ask_child(TokenizeQuestion(source))
        except UnreadablePrompt as error:
            detail = f"the tokenizer process of {source!r} failed: {error.reason}"
            answer = Prompt(error.reason, detail)
        if answer.error == "closed":
            return
        if answer.error:
            worker.retry_at_s = asyncio.get_running_loop().time() + LOAD_RETRY_DELAY_S
            self.warn_once(source, f"prompts are routed without token ids: {answer.detail}")
            return
        self._last_warnings.pop(source, None)
        await self._compare_with_instance(source, worker)

    def _close_tokenizer(self, source: str) -> None:
        """Close in a task of its own, so that cancelling the caller leaves no process behind."""
        self._last_warnings.pop(source, None)
        task = asyncio.create_task(self._workers.pop(source).close())
        self._closing_tasks.add(task)
        task.add_done_callback(self._closing_tasks.discard)

    async def _compare_with_instance(self, source: str, worker: TokenizerWorker) -> None:
        for instance, card in list(self._list_model_cards()):
            question = self._locate_tokenizer(instance, card)
            if question.source != source or question.adapter:
                continue
            body = build_probe_body(card["id"])
            instance_ids = await self._request_token_ids(instance.url, body)
            if instance_ids is None:
                continue
            try:
                answer = await worker.ask_child(TokenizeQuestion(source, "chat", body, 1))
            except UnreadablePrompt:
                return
            if answer.token_ids.tolist() != instance_ids:
                self.counts["differs"] += 1
                self.warn_once(source, _DIFFERENCE_WARNING.format(url=instance.url, source=source))
            return

    async def _request_token_ids(self, url: str, body: bytes) -> list[int] | None:
        """Token ids of the chat in `body` from the instance's /tokenize; None if it does not answer so."""
        try:
            # Rendered and tokenized by the server itself, so both can be compared at once.
            answer = await self._queries.ask(f"{url}/tokenize", body=body)
            fields = json.loads(answer.body) if answer.status == 200 else None
        except (*QUERY_ERRORS, ValueError, RecursionError):
            return None
        tokens = fields.get("tokens") if isinstance(fields, dict) else None
        return tokens if isinstance(tokens, list) else None

    def warn_once(self, source: str, message: str) -> None:
        """Log `message`, unless it is the last one that was logged for `source`."""
        if self._last_warnings.get(source) != message:
            self._last_warnings[source] = message
            log.warning("ttft-otel: %s", message)

    async def _watch_models(self) -> None:
        while True:
            wanted_sources = {
                self._locate_tokenizer(instance, card).source
                for instance, card in self._list_model_cards()
            }
            if self._tokenizer:
                wanted_sources = {self._tokenizer}
            for source in wanted_sources if self.loads_early else ():
                self.ensure_loaded(source)
            # The last instance of these models is gone.
            for source in set(self._workers) - wanted_sources - {NO_TOKENIZER}:
                self._close_tokenizer(source)
            await asyncio.sleep(MODEL_CHECK_INTERVAL_S)

    def _list_model_cards(self) -> Iterator[tuple[Instance, dict[str, Any]]]:
        return ((each, card) for each in self._pool for card in each.model_cards)

    def _locate_tokenizer(self, instance: Instance, card: dict[str, Any]) -> TokenizeQuestion:
        """What loads the tokenizer of a model card: an adapter uses that of its base model.

        The adapter's name is part of its block keys.
        """
        base_name = instance.base_models.get(card["id"])
        base = next((each for each in instance.model_cards if each["id"] == base_name), card)
        max_model_len = base.get("max_model_len")
        source = self._tokenizer or str(base.get("root") or base["id"])
        adapter = card["id"] if base is not card else ""
        limit = max_model_len if isinstance(max_model_len, int) else 0
        return TokenizeQuestion(source, adapter=adapter, max_prompt_tokens=limit)


def build_probe_body(model: str) -> bytes:
    return json.dumps({"model": model, "messages": _PROBE_CHAT}).encode()


def _is_token_ids(body: bytes) -> bool:
    """Whether the prompt of a completion request is token ids, or a list of such prompts."""
    try:
        # Raw values: nothing is built of a long list of ids.
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except JSON_ERRORS:
        return False
    prompt = memoryview(fields.get("prompt", b""))[:PROMPT_PEEK_BYTES].tobytes()
    return prompt[:1] == b"[" and prompt.lstrip(b"[ \t\r\n")[:1].isdigit()


class _RenderFeatures(msgspec.Struct):
    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[PlaceholderSpan]]


class _RenderedPrompt(msgspec.Struct):
    token_ids: list[int]
    features: _RenderFeatures | None = None
    cache_salt: str | None = None


_prompt_decoder: Final = msgspec.json.Decoder(_RenderedPrompt)
_prompts_decoder: Final = msgspec.json.Decoder(list[_RenderedPrompt])


class EnginePromptReader(LocalPromptReader):
    """Asks the instance with the fewest requests in flight; tokenizes if all refuse or are unreachable."""

    loads_early = False

    def __init__(self, tokenizer: str | None, pool: InstancePool) -> None:
        super().__init__(tokenizer, pool)
        # Event-loop time until which an instance is not asked.
        self._paused_until_s: dict[Instance, float] = {}
        self._render_count = 0

    async def read_prompt(
        self, path: str, model: str, body: bytes, block_size: int
    ) -> Prompt | None:
        """As LocalPromptReader does."""
        deadline_s = asyncio.get_running_loop().time() + REQUEST_WAIT_S
        route = next((each for each in RENDERED_PATHS if path.endswith(each)), "")
        is_prompt = route and block_size >= 1
        # Ends because each failure pauses the instance that failed.
        while is_prompt and (instance := self._choose_instance(model)) is not None:
            remaining_s = deadline_s - asyncio.get_running_loop().time()
            if remaining_s <= 0:
                self.counts["failed-late"] += 1
                return None
            try:
                answer = await self._render_prompt(instance, route, body, remaining_s)
                if answer is not None:
                    return self._build_prompt(route, model, answer, block_size)
            except asyncio.TimeoutError:
                # The time is used up, so no other instance is asked.
                self._pause_instance(instance, FAILURE_PAUSE_S)
                self.counts["failed-late"] += 1
                return None
            except QUERY_ERRORS:
                self._pause_instance(instance, FAILURE_PAUSE_S)
                self.counts["failed-unreachable"] += 1
            except UnreadablePrompt as error:
                self.counts[f"failed-{error.reason}"] += 1
                return None
        return await super().read_prompt(path, model, body, block_size)

    async def _render_prompt(
        self, instance: Instance, route: str, body: bytes, timeout_s: float
    ) -> bytes | None:
        """The prompt as `instance` renders it; None if it has no render endpoint.

        Raises UnreadablePrompt and QUERY_ERRORS.
        """
        if self._render_count >= MAX_CONCURRENT_RENDERS:
            raise UnreadablePrompt("busy")
        self._render_count += 1
        try:
            status, answer = await self._queries.ask(
                f"{instance.url}{route}/render",
                body=_omit_pixels(body),
                timeout_s=timeout_s,
                max_bytes=MAX_RENDER_BYTES,
            )
        except InvalidAnswer as error:
            raise UnreadablePrompt("refused") from error
        finally:
            self._render_count -= 1
        if status in _REFUSAL_STATUSES:
            self._record_refusal(instance, status)
            return None
        # No other instance is asked: most likely the request is at fault, which all of them refuse.
        if status != 200:
            raise UnreadablePrompt("refused")
        return answer

    def _choose_instance(self, model: str) -> Instance | None:
        paused, now_s = self._paused_until_s, asyncio.get_running_loop().time()
        self._paused_until_s = {each: end_s for each, end_s in paused.items() if end_s >= now_s}
        candidates = self._pool.get_candidates(self._pool.prefilling_leg, model)
        available = [instance for instance in candidates if instance not in self._paused_until_s]
        return min(available, key=lambda instance: instance.in_flight, default=None)

    def _build_prompt(self, route: str, model: str, answer: bytes, block_size: int) -> Prompt:
        try:
            prompts = (
                _prompts_decoder.decode(answer)
                if route == COMPLETIONS_PATH
                else [_prompt_decoder.decode(answer)]
            )
            first_prompt = prompts[0]
            ids = array("I", first_prompt.token_ids)
            tokenizer = self.find_tokenizer(model)
            # Part of the block keys, but not of what an instance renders.
            adapter = tokenizer.adapter if tokenizer else ""
            spans = _list_spans(first_prompt.features)
        except (*JSON_ERRORS, IndexError, OverflowError) as error:
            raise UnreadablePrompt("malformed") from error
        salt = first_prompt.cache_salt or ""
        self.counts["read"] += 1
        # Each prompt of a list is a request in the engine: count all tokens, match the first one's blocks.
        return Prompt(
            tokens=sum(len(each.token_ids) for each in prompts),
            ids=ids.tobytes() if len(prompts) == 1 else b"",
            block_keys=compute_prompt_keys(ids, block_size, spans, adapter, salt),
            item_tokens=tuple(span.length for span in spans),
        )

    def _pause_instance(self, instance: Instance, seconds: float) -> None:
        self._paused_until_s[instance] = asyncio.get_running_loop().time() + seconds

    def _record_refusal(self, instance: Instance, status: int) -> None:
        self._pause_instance(instance, REFUSAL_PAUSE_S)
        problem = (
            f"{instance.url} does not render prompts (status {status}), the router tokenizes them"
        )
        remedy = (
            "give its key with --upstream-key"
            if status in _KEY_STATUSES
            else "start it with --enable-scale-out"
        )
        self.warn_once(instance.url, f"{problem}; {remedy}")


def _omit_pixels(body: bytes) -> bytes:
    """Add a field by which vLLM omits pixel data from its response."""
    start = body.lstrip()
    return b'{"mm_payload":"none",' + start[1:] if start[:1] == b"{" else body


def _list_spans(features: _RenderFeatures | None) -> list[PlaceholderSpan]:
    """Spans of the media items in prompt order; their keys are the engine's hashes."""
    if features is None:
        return []
    spans: list[PlaceholderSpan] = []
    for modality, places in features.mm_placeholders.items():
        with contextlib.suppress(KeyError, ValueError):
            for span, key in zip(places, features.mm_hashes[modality], strict=True):
                span.key = key
            spans += places
    return sorted(spans, key=lambda span: span.start)


# By what --tokenize names; "engine" asks the instances, and tokenizes locally where they refuse.
PROMPT_READERS: Final = {"local": LocalPromptReader, "engine": EnginePromptReader}
