# SPDX-License-Identifier: Apache-2.0
"""Read prompts with each model's tokenizer in child processes: --tokenize local.

After each load a probe chat is compared with what an instance makes of it: the tokens differ if the
instance was started with another template or tokenizer.
"""

from __future__ import annotations

import asyncio
import json
import logging
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from ttft_otel.model.endpoints import CHAT_PATH, COMPLETIONS_PATH
from ttft_otel.router.errors import UnreadablePrompt
from ttft_otel.router.routing.prompts.tokenizer_worker import (
    NO_TOKENIZER,
    REQUEST_WAIT_S,
    TokenizeQuestion,
    TokenizerWorker,
)
from ttft_otel.router.time_limits import wait_at_most
from ttft_otel.router.types import JSON_ERRORS, Instance
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.router.upstream.query_client import QUERY_ERRORS, QueryClient

PROMPT_KINDS: Final = {CHAT_PATH: "chat", COMPLETIONS_PATH: "completion"}
LOAD_RETRY_DELAY_S: Final = 60.0  # seconds before a failed load is tried again
MODEL_CHECK_INTERVAL_S: Final = 1.0  # seconds between two checks for new models
PROMPT_PEEK_BYTES: Final = 64  # bytes of a prompt that show whether it is token ids
MAX_TOKENIZERS: Final = 8  # tokenizers at a time; each child takes about 100 MB
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


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the engine will see it."""

    tokens: int  # its length, placeholder tokens of media included
    token_ids: Sequence[int]  # empty if the ids of media placeholders are unknown
    # Keys of the full blocks (policies/block_index.py), as far as ids are known.
    block_keys: tuple[int, ...]
    # Placeholder tokens of each media item, in order, repeated items included.
    encoder_items: tuple[int, ...] = ()


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
        return Prompt(answer.tokens, _unpack_ids(answer.ids), answer.blocks, answer.item_tokens)

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
            if _unpack_ids(answer.ids).tolist() != instance_ids:
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


def _unpack_ids(data: bytes) -> array[int]:
    ids = array("I")
    ids.frombytes(data)
    return ids


def _is_token_ids(body: bytes) -> bool:
    """Whether the prompt of a completion request is token ids, or a list of such prompts."""
    try:
        # Raw values: nothing is built of a long list of ids.
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except JSON_ERRORS:
        return False
    prompt = memoryview(fields.get("prompt", b""))[:PROMPT_PEEK_BYTES].tobytes()
    return prompt[:1] == b"[" and prompt.lstrip(b"[ \t\r\n")[:1].isdigit()
