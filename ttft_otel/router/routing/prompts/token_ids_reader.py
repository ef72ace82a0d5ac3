# SPDX-License-Identifier: Apache-2.0
"""Read completion requests whose prompts are token ids; model_tokenizer.py adds text and chats.

Only the child process uses it (tokenizer_child.py), also while a model's tokenizer is not loaded.
"""

from __future__ import annotations

import json
from array import array
from typing import Any, Final

import msgspec

from ttft_otel.router.errors import UnreadablePrompt
from ttft_otel.router.routing.policies.block_keys import compute_block_keys
from ttft_otel.router.routing.prompts import placeholders
from ttft_otel.router.routing.prompts.child_frames import TokenizeAnswer, TokenizeQuestion

MAX_PROMPT_CHARS: Final = 1 << 22  # longer texts take longer to tokenize than a request waits


class TokenIdsReader:
    """Reads prompts that are token ids already, for which no tokenizer is needed."""

    def read_body(self, question: TokenizeQuestion) -> TokenizeAnswer:
        """The prompt of the body in `question`. Raises UnreadablePrompt, or KeyError and the like."""
        body = decode_body(question.body)
        return self._read_completion(body, question, body.get("cache_salt") or "")

    def _read_completion(
        self, body: dict[str, Any], question: TokenizeQuestion, salt: str
    ) -> TokenizeAnswer:
        prompt = body.get("prompt")
        if prompt is None or body.get("prompt_embeds") is not None:
            raise UnreadablePrompt("unsupported")
        is_list = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        prompts = prompt if is_list else [prompt]
        if sum(map(len, prompts)) > MAX_PROMPT_CHARS:
            raise UnreadablePrompt("unsupported")
        add_special = body.get("add_special_tokens", True)
        tokenized = [
            self._tokenize_prompt(each, body, question.max_prompt_tokens, add_special)
            for each in prompts
        ]
        first_ids, cached = tokenized[0]
        answer = build_answer(question, first_ids, [], salt, (), cached)
        if (
            len(tokenized) > 1
        ):  # each is a request in the engine: count all tokens, but match the first one's blocks
            answer = msgspec.structs.replace(
                answer, tokens=sum(len(ids) for ids, _ in tokenized), ids=b""
            )
        return answer

    def _tokenize_prompt(
        self,
        prompt: str | list[int],
        body: dict[str, Any],
        max_prompt_tokens: int,
        add_special: bool,
    ) -> tuple[array[int], int]:
        """Token ids truncated as the request asks, and how many came from the cache.

        add_special: add the special tokens at both ends, unless the request says otherwise.
        """
        add_special = body.get("add_special_tokens", add_special)
        max_tokens, side = body.get("truncate_prompt_tokens"), body.get("truncation_side")
        # -1 is vLLM's word for "as much as the model takes".
        if max_tokens is not None and max_tokens < 0:
            if not max_prompt_tokens:
                raise UnreadablePrompt("unsupported")
            max_tokens = max_prompt_tokens - 1 if _count_output_tokens(body) else max_prompt_tokens
        if isinstance(prompt, str):
            ids, cached = self._tokenize_text(
                prompt, max_prompt_tokens, add_special, max_tokens, side
            )
        else:
            ids, cached = array("I", prompt), 0
        if not len(ids):
            raise UnreadablePrompt("refused")
        if max_tokens is None or max_tokens >= len(ids):
            return ids, cached
        # vLLM keeps the end of a prompt unless it is told otherwise.
        return (ids[:max_tokens] if side == "right" else ids[len(ids) - max_tokens :]), cached

    def _tokenize_text(
        self,
        prompt: str,
        max_prompt_tokens: int,
        add_special: bool,
        max_tokens: int | None,
        side: Any,
    ) -> tuple[array[int], int]:
        raise UnreadablePrompt("load")


def decode_body(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises UnreadablePrompt or ValueError."""
    try:
        fields = msgspec.json.decode(body)
    except msgspec.DecodeError:  # json accepts more (NaN, for instance), and vLLM uses it
        fields = json.loads(body)
    if not isinstance(fields, dict):
        raise UnreadablePrompt("refused")
    return fields


def _count_output_tokens(body: dict[str, Any]) -> int:
    """The output tokens requested; completions default to 16, as in OpenAI's API."""
    requested = body.get("max_completion_tokens")
    if requested is None:
        requested = body.get("max_tokens", 16 if "prompt" in body else None)
    return requested or 0


def build_answer(
    question: TokenizeQuestion,
    ids: array[int],
    spans: list[placeholders.PlaceholderSpan],
    salt: str,
    item_tokens: tuple[int, ...],
    cached_tokens: int,
) -> TokenizeAnswer:
    """The answer to `question`, with the block keys of the prompt.

    ids: of the whole prompt. spans: placeholders of its media items. salt: cache_salt of the request.
    """
    extras = placeholders.build_extra_keys(
        spans, question.block_size, question.adapter, salt, len(ids) // question.block_size
    )
    blocks = compute_block_keys(ids, question.block_size, extras)
    return TokenizeAnswer(
        question.number, "", "", len(ids), ids.tobytes(), blocks, item_tokens, cached_tokens
    )
