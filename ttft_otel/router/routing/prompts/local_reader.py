# SPDX-License-Identifier: Apache-2.0
"""Read prompts with each model's tokenizer in child processes: --tokenize local."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import msgspec

from ttft_otel.model.endpoints import CHAT_PATH, COMPLETIONS_PATH
from ttft_otel.router.errors import UnreadablePrompt
from ttft_otel.router.routing.prompts import template_probe
from ttft_otel.router.routing.prompts.child_frames import (
    NO_TOKENIZER,
    TokenizeAnswer,
    TokenizeQuestion,
)
from ttft_otel.router.routing.prompts.prompt_reader import Prompt
from ttft_otel.router.routing.prompts.tokenizer_worker import REQUEST_WAIT_S, TokenizerWorker
from ttft_otel.router.time_limits import wait_at_most
from ttft_otel.router.types import JSON_ERRORS, Instance
from ttft_otel.router.upstream.instance_pool import InstancePool

PROMPT_KINDS: Final = {CHAT_PATH: "chat", COMPLETIONS_PATH: "completion"}
LOAD_RETRY_DELAY_S: Final = 60.0  # seconds before a failed load is tried again
MODEL_CHECK_INTERVAL_S: Final = 1.0  # seconds between two checks for new models
PROMPT_PEEK_BYTES: Final = 64  # bytes of a prompt that show whether it is token ids
MAX_TOKENIZERS: Final = 8  # tokenizers at a time; each child takes about 100 MB
TOO_MANY_TOKENIZERS: Final = (
    f"more than {MAX_TOKENIZERS} tokenizers are wanted: prompts of the other models are routed "
    "without token ids; give one tokenizer for all with --tokenizer, or use --tokenize engine"
)

log: Final = logging.getLogger("ttft_otel")


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """A tokenizer's folder or hub name, the LoRA adapter of the model, and its longest prompt (0 unknown)."""

    source: str
    adapter: str = ""
    max_prompt_tokens: int = 0


class _CompletionPrompt(msgspec.Struct):
    prompt: msgspec.Raw = msgspec.Raw(b"")


_prompt_decoder: Final = msgspec.json.Decoder(_CompletionPrompt)


@dataclass(slots=True)
class TokenizerLoad:
    """The child process of one tokenizer and the state of loading it.

    child_number: of the child that has loaded it; another number means that the child was restarted.
    retry_at_s: event-loop time from which a failed load is tried again.
    """

    worker: TokenizerWorker
    child_number: int = 0
    task: asyncio.Task[None] | None = None
    is_ready: bool = False
    retry_at_s: float = 0.0

    @property
    def is_loading(self) -> bool:
        """Whether loading has begun and not ended."""
        return self.task is not None and not self.task.done() and not self.is_ready


class LocalPromptReader:
    """Runs one child per tokenizer, so that one that loads does not delay prompts of other models.

    tokenizer: for all models; None: the one that /v1/models names. api_key: for probing instances.
    """

    def __init__(self, tokenizer: str | None, pool: InstancePool, api_key: str = "") -> None:
        self.counts: Counter[str] = Counter()
        self._tokenizer, self._pool, self._api_key = tokenizer, pool, api_key
        self._loads: dict[str, TokenizerLoad] = {}
        self._last_warnings: dict[str, str] = {}  # last logged problem by source
        self._session: aiohttp.ClientSession | None = None
        self._watch_task: asyncio.Task[None] | None = None
        self._closing_tasks: set[asyncio.Task[None]] = set()

    async def start(self, session: aiohttp.ClientSession, lazy: bool = False) -> None:
        """Load each tokenizer once an instance names its model; `lazy`: at the first prompt for it."""
        self._session = session
        self._watch_task = asyncio.create_task(self._watch_models(lazy))

    async def close(self) -> None:
        """End the children."""
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.gather(self._watch_task, return_exceptions=True)
        for source in list(self._loads):
            self._close_tokenizer(source)
        await asyncio.gather(*self._closing_tasks)

    async def read_prompt(
        self, path: str, model: str, body: bytes, block_size: int
    ) -> Prompt | None:
        """The prompt of a request; None if it cannot be read, with the reason in `counts`.

        path, model, body: of the request. block_size: tokens per block of the keys.
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
        tokenizer = self.find_tokenizer(model)
        if tokenizer is None:
            raise UnreadablePrompt("model")
        source, load = tokenizer.source, self.ensure_loaded(tokenizer.source)
        if (
            not (load and load.is_ready)
            and kind == PROMPT_KINDS[COMPLETIONS_PATH]
            and _is_token_ids(body)
        ):
            source, load = NO_TOKENIZER, await self._wait_for_ids_child()
        if load is None or not load.is_ready:
            raise UnreadablePrompt("loading" if load and load.is_loading else "load")
        question = TokenizeQuestion(
            0, source, kind, body, block_size, tokenizer.adapter, tokenizer.max_prompt_tokens
        )
        answer = await load.worker.ask_child(question)
        if answer.error:
            raise UnreadablePrompt(answer.error)
        self.counts["read"] += 1
        if answer.cached_tokens:
            self.counts["cached"] += 1
        ids = array("I")
        ids.frombytes(answer.ids)
        return Prompt(answer.tokens, ids, answer.blocks, answer.item_tokens)

    async def _wait_for_ids_child(self) -> TokenizerLoad | None:
        """The child for prompts that are token ids, used while the model's tokenizer is not loaded."""
        load = self.ensure_loaded(NO_TOKENIZER)
        if load and load.task and load.is_loading:
            await asyncio.wait({load.task})
        return load

    def find_tokenizer(self, model: str) -> TokenizerSource | None:
        """The tokenizer of `model`; None while no instance lists the model."""
        for _, card, cards in self._list_model_cards():
            if not model or card.get("id") == model:
                return self._locate_tokenizer(card, cards)
        return TokenizerSource(self._tokenizer) if self._tokenizer else None

    def ensure_loaded(self, source: str) -> TokenizerLoad | None:
        """The state of the tokenizer `source`, starting to load it if necessary; None beyond MAX_TOKENIZERS.

        A failed load is tried again after LOAD_RETRY_DELAY_S.
        """
        load = self._loads.get(source)
        if load is None:
            if (
                source != NO_TOKENIZER
                and len(self._loads.keys() - {NO_TOKENIZER}) >= MAX_TOKENIZERS
            ):
                self.warn_once("", TOO_MANY_TOKENIZERS)
                return None
            load = self._loads[source] = TokenizerLoad(TokenizerWorker())
        if load.is_ready and load.child_number != load.worker.child_count:
            load.is_ready = False  # its child died
        now_s = asyncio.get_running_loop().time()
        if not load.is_ready and not load.is_loading and now_s >= load.retry_at_s:
            load.task = asyncio.create_task(self._load_tokenizer(source, load))
        return load

    async def _load_tokenizer(self, source: str, load: TokenizerLoad) -> None:
        try:
            answer = await load.worker.ask_child(TokenizeQuestion(0, source))
        except UnreadablePrompt as error:
            answer = TokenizeAnswer(
                0, error.reason, f"the tokenizer process of {source!r} failed: {error.reason}"
            )
        load.child_number = load.worker.child_count
        if answer.error == "closed":
            return
        if answer.error:
            load.retry_at_s = asyncio.get_running_loop().time() + LOAD_RETRY_DELAY_S
            self.warn_once(source, f"prompts are routed without token ids: {answer.detail}")
            return
        load.is_ready = True
        self._last_warnings.pop(source, None)
        await self._compare_with_instance(source, load)

    def _close_tokenizer(self, source: str) -> None:
        """Close in a task of its own, so that cancelling the caller leaves no process behind."""
        self._last_warnings.pop(source, None)
        task = asyncio.create_task(_close_load(self._loads.pop(source)))
        self._closing_tasks.add(task)
        task.add_done_callback(self._closing_tasks.discard)

    async def _compare_with_instance(self, source: str, load: TokenizerLoad) -> None:
        """Warn if an instance tokenizes a chat differently: it was started with other files."""
        for instance, card, cards in list(self._list_model_cards()):
            tokenizer = self._locate_tokenizer(card, cards)
            if tokenizer.source != source or tokenizer.adapter or self._session is None:
                continue
            model = str(card.get("id"))
            instance_ids = await template_probe.request_token_ids(
                self._session, instance.url, model, self._api_key
            )
            if instance_ids is None:
                continue
            with contextlib.suppress(UnreadablePrompt):
                answer = await load.worker.ask_child(
                    TokenizeQuestion(0, source, "chat", template_probe.build_probe_body(model), 1)
                )
                own_ids = array("I")
                own_ids.frombytes(answer.ids)
                if list(own_ids) != instance_ids:
                    self.counts["differs"] += 1
                    self.warn_once(
                        source,
                        template_probe.DIFFERENCE_WARNING.format(url=instance.url, source=source),
                    )
            return

    def warn_once(self, source: str, message: str) -> None:
        """Log `message`, unless it is the last one that was logged for `source`."""
        if self._last_warnings.get(source) != message:
            self._last_warnings[source] = message
            log.warning("ttft-otel: %s", message)

    async def _watch_models(self, lazy: bool) -> None:
        while True:
            wanted_sources = {
                self._locate_tokenizer(card, cards).source
                for _, card, cards in self._list_model_cards()
            }
            if self._tokenizer:
                wanted_sources = {self._tokenizer}
            for source in () if lazy else wanted_sources:
                self.ensure_loaded(source)
            # The last instance of these models is gone.
            for source in set(self._loads) - wanted_sources - {NO_TOKENIZER}:
                self._close_tokenizer(source)
            await asyncio.sleep(MODEL_CHECK_INTERVAL_S)

    def _list_model_cards(
        self,
    ) -> Iterator[tuple[Instance, dict[str, Any], tuple[dict[str, Any], ...]]]:
        return ((each, card, each.model_cards) for each in self._pool for card in each.model_cards)

    def _locate_tokenizer(
        self, card: dict[str, Any], cards: tuple[dict[str, Any], ...]
    ) -> TokenizerSource:
        """The tokenizer of a model card: an adapter uses that of its base model.

        cards: all of the same instance. The adapter's name is part of its block keys.
        """
        parent = card.get("parent")
        base = next((each for each in cards if parent and each.get("id") == parent), card)
        max_model_len = base.get("max_model_len")
        source = self._tokenizer or str(base.get("root") or base.get("id"))
        adapter = str(card.get("id")) if base is not card else ""
        return TokenizerSource(
            source, adapter, max_model_len if isinstance(max_model_len, int) else 0
        )


def _is_token_ids(body: bytes) -> bool:
    """Whether the prompt of a completion request is token ids, or a list of such prompts."""
    try:
        prompt = memoryview(_prompt_decoder.decode(body).prompt)[:PROMPT_PEEK_BYTES].tobytes()
    except JSON_ERRORS:
        return False
    return prompt[:1] == b"[" and prompt.lstrip(b"[ \t\r\n")[:1].isdigit()


async def _close_load(load: TokenizerLoad) -> None:
    await load.worker.close()
    if load.task is not None:
        load.task.cancel()
        await asyncio.gather(load.task, return_exceptions=True)
