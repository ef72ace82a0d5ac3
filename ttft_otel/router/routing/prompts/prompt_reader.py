# SPDX-License-Identifier: Apache-2.0
"""Read prompts with each model's tokenizer in child processes, or with the render endpoints of instances.

That is --tokenize local or engine; routing_service.py asks. After each load of a tokenizer a probe chat is
compared with what an instance makes of it: the tokens differ if it was started with another template or
tokenizer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from array import array
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from ttft_otel.model.endpoints import CHAT_PATH, COMPLETIONS_PATH, MESSAGES_PATH, RESPONSES_PATH
from ttft_otel.router.errors import InvalidAnswer, UnreadablePrompt
from ttft_otel.router.routing.policies.block_index import compute_block_keys
from ttft_otel.router.routing.prompts.prompt_parts import PlaceholderSpan, build_extra_keys
from ttft_otel.router.routing.prompts.tokenizer_worker import (
    NO_TOKENIZER,
    REQUEST_WAIT_S,
    Prompt,
    TokenizeQuestion,
    TokenizerWorker,
)
from ttft_otel.router.time_limits import wait_at_most
from ttft_otel.router.types import JSON_ERRORS, Instance
from ttft_otel.router.upstream.connection_pool import QUERY_ERRORS, QueryClient
from ttft_otel.router.upstream.instance_pool import InstancePool

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
        answer = await worker.load_tokenizer(source)
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
        # Ends because each failure pauses the instance that failed.
        while (instance := self._choose_instance(model)) is not None:
            remaining_s = deadline_s - asyncio.get_running_loop().time()
            if remaining_s <= 0:
                self.counts["failed-late"] += 1
                return None
            try:
                prompt = await self._read_at_instance(
                    instance, path, body, block_size, model, remaining_s
                )
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
            else:
                if prompt is not None:
                    return prompt
        return await super().read_prompt(path, model, body, block_size)

    async def _read_at_instance(
        self,
        instance: Instance,
        path: str,
        body: bytes,
        block_size: int,
        model: str,
        remaining_s: float,
    ) -> Prompt | None:
        """The prompt as `instance` renders it; None if it has no render endpoint.

        Raises UnreadablePrompt and QUERY_ERRORS.
        """
        route = next(
            (path_suffix for path_suffix in RENDERED_PATHS if path.endswith(path_suffix)), ""
        )
        if not route or block_size < 1:
            raise UnreadablePrompt("path")
        if self._render_count >= MAX_CONCURRENT_RENDERS:
            raise UnreadablePrompt("busy")
        self._render_count += 1
        try:
            status, answer = await self._queries.ask(
                f"{instance.url}{route}/render",
                body=_omit_pixels(body),
                timeout_s=remaining_s,
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
        return self._build_prompt(route, model, answer, block_size)

    def _choose_instance(self, model: str) -> Instance | None:
        now = asyncio.get_running_loop().time()
        for instance, until_s in list(self._paused_until_s.items()):
            if until_s < now:
                del self._paused_until_s[instance]
        candidates = self._pool.get_candidates(self._pool.prefilling_leg, model)
        available = [instance for instance in candidates if instance not in self._paused_until_s]
        return min(available, key=lambda instance: instance.in_flight, default=None)

    def _build_prompt(self, route: str, model: str, answer: bytes, block_size: int) -> Prompt:
        try:
            is_list = PROMPT_KINDS.get(route) == "completion"
            prompts = (
                _prompts_decoder.decode(answer) if is_list else [_prompt_decoder.decode(answer)]
            )
            first_prompt = prompts[0]
            ids = array("I", first_prompt.token_ids)
            tokenizer = self.find_tokenizer(model)
            # Part of the block keys, but not of what an instance renders.
            adapter = tokenizer.adapter if tokenizer else ""
            spans = _list_spans(first_prompt.features)
        except (*JSON_ERRORS, IndexError, OverflowError) as error:
            raise UnreadablePrompt("malformed") from error
        extra_keys = build_extra_keys(
            spans, block_size, adapter, first_prompt.cache_salt or "", len(ids) // block_size
        )
        blocks = compute_block_keys(ids, block_size, extra_keys)
        self.counts["read"] += 1
        # Each prompt of a list is a request in the engine: count all tokens, match the first one's blocks.
        return Prompt(
            tokens=sum(len(each.token_ids) for each in prompts),
            ids=ids.tobytes() if len(prompts) == 1 else b"",
            block_keys=blocks,
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
