# SPDX-License-Identifier: Apache-2.0
"""Read prompts with the render endpoints of vLLM instances, or else the tokenizer: --tokenize engine."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from typing import Any, Final

import msgspec

from ttft_otel.model.endpoints import MESSAGES_PATH, RESPONSES_PATH
from ttft_otel.router.errors import InvalidAnswer, UnreadablePrompt
from ttft_otel.router.routing.policies.block_index import compute_block_keys
from ttft_otel.router.routing.prompts.local_reader import (
    PROMPT_KINDS,
    LocalPromptReader,
    Prompt,
)
from ttft_otel.router.routing.prompts.placeholders import PlaceholderSpan, build_extra_keys
from ttft_otel.router.routing.prompts.tokenizer_worker import REQUEST_WAIT_S
from ttft_otel.router.types import JSON_ERRORS, Instance
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.router.upstream.query_client import QUERY_ERRORS

RENDERED_PATHS: Final = (*PROMPT_KINDS, RESPONSES_PATH, MESSAGES_PATH)
REFUSAL_PAUSE_S: Final = 60.0  # seconds before an instance that refused is asked again
FAILURE_PAUSE_S: Final = 5.0  # seconds before one that timed out or was unreachable is asked again
# Beyond it requests go without tokens: rendering competes with the instances' own work.
MAX_CONCURRENT_RENDERS: Final = 32  # render requests in flight
MAX_RENDER_BYTES: Final = 32 << 20  # bytes of a response
_REFUSAL_STATUSES: Final = (401, 403, 404, 405, 501)  # no such endpoint, or it is disabled
_KEY_STATUSES: Final = (401,)


class _PlaceholderRange(msgspec.Struct):
    offset: int
    length: int


class _RenderFeatures(msgspec.Struct):
    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[_PlaceholderRange]]


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
        item_tokens = tuple(span.length for span in spans)
        # Each prompt of a list is a request in the engine: count all tokens, match the first one's blocks.
        if len(prompts) > 1:
            return Prompt(
                sum(len(each.token_ids) for each in prompts), array("I"), blocks, item_tokens
            )
        return Prompt(len(ids), ids, blocks, item_tokens)

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
    spans: list[Any] = []
    for modality, places in features.mm_placeholders.items():
        with contextlib.suppress(KeyError, ValueError):
            keys: Any = zip(places, features.mm_hashes[modality], strict=True)
            spans += [PlaceholderSpan(place.offset, place.length, key) for place, key in keys]
    return sorted(spans, key=lambda span: span.start)
