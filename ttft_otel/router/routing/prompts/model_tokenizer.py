# SPDX-License-Identifier: Apache-2.0
"""Turn request bodies into prompts with one model's tokenizer, chat template and processor.

transformers renders, tokenizes and counts in the same way as in vLLM, so that token ids are equal to the
engine's. Only the child process (tokenizer_child.py) imports this.
"""

from __future__ import annotations

import inspect
import json
from array import array
from pathlib import Path
from typing import Any, Final

import msgspec

from ttft_otel.router.errors import UnreadablePrompt
from ttft_otel.router.routing.policies.block_keys import compute_block_keys
from ttft_otel.router.routing.prompts import chat_messages, placeholders
from ttft_otel.router.routing.prompts.child_frames import (
    NO_TOKENIZER,
    TokenizeAnswer,
    TokenizeQuestion,
)
from ttft_otel.router.routing.prompts.text_encoder import TextEncoder

MAX_PROMPT_CHARS: Final = 1 << 22  # longer texts take longer to tokenize than a request waits
# A text with more characters per token of the model's limit is too long, without tokenizing it.
MAX_CHARS_PER_TOKEN: Final = 16
# Model types whose chats vLLM renders by its own code, not by a template.
_ENGINE_ONLY_MODELS: Final = (
    "deepseek_v32",
    "deepseek_v4",
    "gpt_oss",
    "inkling",
    "kimi_k3",
    "kimi_audio",
)
_RESERVED_NAMES: Final = frozenset(("chat_template", "tokenize", "tools", "conversation", "self"))


class ModelTokenizer:
    """Loads the tokenizer of `source`, a folder or hub name. Raises whatever transformers raises.

    With NO_TOKENIZER it only reads prompts that are token ids already, and transformers is not needed.
    """

    def __init__(self, source: str) -> None:
        self._encoder: TextEncoder | None = None
        if source == NO_TOKENIZER:
            return
        import jinja2  # noqa: F401 - missing, it is to be named now and not at the first chat
        import transformers

        # Else transformers would take the path for a name of the hub.
        if Path(source).is_absolute() and not Path(source).is_dir():
            raise OSError("no such folder on the router's machine")
        # Nobody would read its warnings: the child's stderr is /dev/null.
        transformers.utils.logging.set_verbosity_error()
        config, _ = transformers.PretrainedConfig.get_config_dict(source)
        # vLLM's default for generation: truncation keeps the end of a prompt.
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            source, truncation_side="left", trust_remote_code=False
        )
        tekken = transformers.utils.cached_file(
            source, "tekken.json", _raise_exceptions_for_missing_entries=False
        )
        is_engine_only = str(config.get("model_type")).startswith(_ENGINE_ONLY_MODELS)
        # vLLM also renders chats of Mistral's tekken tokenizers by code of Mistral's.
        self._needs_engine = is_engine_only or tekken is not None
        processor, self._template = placeholders.load_processor(source, self._tokenizer, config)
        self._counter = placeholders.PlaceholderCounter(processor, config)
        self._encoder = TextEncoder(self._tokenizer, self._find_template(None) or "")
        # vLLM lets a request set the parameters of `apply_chat_template` itself.
        self._template_parameters = frozenset(
            each.name
            for owner in (self._tokenizer, transformers.PreTrainedTokenizerBase)
            for each in inspect.signature(owner.apply_chat_template).parameters.values()
            if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        )

    def read_body(self, question: TokenizeQuestion) -> TokenizeAnswer:
        """The prompt of the body in `question`. Raises UnreadablePrompt, or KeyError and the like."""
        try:
            body = msgspec.json.decode(question.body)
        except msgspec.DecodeError:  # json accepts more (NaN, for instance), and vLLM uses it
            body = json.loads(question.body)
        if not isinstance(body, dict):
            raise UnreadablePrompt("refused")
        read = self._read_chat if question.path == "chat" else self._read_completion
        return read(body, question)

    def _read_chat(self, body: dict[str, Any], question: TokenizeQuestion) -> TokenizeAnswer:
        text, items = self._render_chat(body)
        ids, cached = self._tokenize_prompt(text, body, question.max_prompt_tokens, False)
        counted_items = [
            (self._counter.find_token_id(item.modality), *self._counter.count_item(item))
            for item in items
        ]
        item_tokens = tuple(count for _, count, _ in counted_items)
        expanded = (
            placeholders.expand_placeholders(ids, counted_items) if counted_items else (ids, [])
        )
        if expanded is None:  # placeholders not found: the length is known, block keys are not
            tokens = len(ids) + sum(item_tokens) - len(items)
            return TokenizeAnswer(tokens=tokens, item_tokens=item_tokens)
        ids, spans = expanded
        blocks = _compute_blocks(ids, spans, body, question)
        return TokenizeAnswer(
            tokens=len(ids),
            ids=ids.tobytes(),
            blocks=blocks,
            item_tokens=item_tokens,
            cached_tokens=cached,
        )

    def _read_completion(self, body: dict[str, Any], question: TokenizeQuestion) -> TokenizeAnswer:
        prompt = body.get("prompt")
        if prompt is None or body.get("prompt_embeds") is not None:
            raise UnreadablePrompt("unsupported")
        is_list = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        prompts = prompt if is_list else [prompt]
        if sum(map(len, prompts)) > MAX_PROMPT_CHARS:
            raise UnreadablePrompt("unsupported")
        tokenized = [
            self._tokenize_prompt(each, body, question.max_prompt_tokens, True) for each in prompts
        ]
        ids, cached = tokenized[0]
        return TokenizeAnswer(
            # Each prompt is a request in the engine: count all tokens, but match the first one's blocks.
            tokens=sum(len(each) for each, _ in tokenized),
            ids=ids.tobytes() if len(tokenized) == 1 else b"",
            blocks=_compute_blocks(ids, [], body, question),
            cached_tokens=cached,
        )

    def _render_chat(self, body: dict[str, Any]) -> tuple[str, list[chat_messages.MediaItem]]:
        """The text that the chat template renders, and the media items in it."""
        if self._encoder is None:
            raise UnreadablePrompt("load")
        if self._needs_engine:
            raise UnreadablePrompt("unsupported")
        tools = chat_messages.convert_tools(body)
        variables = chat_messages.collect_template_variables(body)
        template = self._find_template(tools)
        # Templates of clients are untrusted; vLLM refuses them by default.
        is_own = body.get("chat_template") is not None or "chat_template" in variables
        if template is None or is_own:
            raise UnreadablePrompt("refused")
        conversation, items = chat_messages.convert_messages(
            body["messages"],
            chat_messages.iterates_parts(template),
            self._counter.get_placeholder_text,
        )
        if '"developer"' not in template and "'developer'" not in template:
            if any(message["role"] == "developer" for message in conversation):
                conversation = chat_messages.merge_system_messages(conversation)
        accepted_names = (
            self._template_parameters | chat_messages.list_template_variables(template)
        ) - _RESERVED_NAMES
        text = self._tokenizer.apply_chat_template(
            conversation=conversation,
            tools=variables.get("tools", tools),
            chat_template=template,
            tokenize=False,
            **{name: value for name, value in variables.items() if name in accepted_names},
        )
        return text, items

    def _find_template(self, tools: list[dict[str, Any]] | None) -> str | None:
        """The chat template: the processor's if there are no tools, else the tokenizer's."""
        if tools is None and self._template is not None:
            return self._template
        try:
            return str(self._tokenizer.get_chat_template(None, tools=tools))
        except ValueError:
            return None

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
        cached = 0
        if not isinstance(prompt, str):
            ids = array("I", prompt)
        elif self._encoder is None:
            raise UnreadablePrompt("load")
        else:
            _check_length(prompt, max_prompt_tokens, max_tokens is not None)
            if max_tokens and side is None:
                ids = self._encoder.encode_truncated(prompt, add_special, max_tokens)
            else:
                ids, cached = self._encoder.encode_text(prompt, add_special)
        if not len(ids):
            raise UnreadablePrompt("refused")
        if max_tokens is None or max_tokens >= len(ids):
            return ids, cached
        # vLLM keeps the end of a prompt unless the request says otherwise.
        return (ids[:max_tokens] if side == "right" else ids[len(ids) - max_tokens :]), cached


def _check_length(text: str, max_prompt_tokens: int, is_truncated: bool) -> None:
    """Raise UnreadablePrompt if `text` exceeds the model's limit however it is tokenized (0: unknown)."""
    is_too_long = 0 < max_prompt_tokens * MAX_CHARS_PER_TOKEN < len(text)
    if len(text) > MAX_PROMPT_CHARS or is_too_long and is_truncated:
        raise UnreadablePrompt("unsupported")
    if is_too_long:
        raise UnreadablePrompt("refused")


def _count_output_tokens(body: dict[str, Any]) -> int:
    """The output tokens requested; completions default to 16, as in OpenAI's API."""
    requested = body.get("max_completion_tokens")
    if requested is None:
        requested = body.get("max_tokens", 16 if "prompt" in body else None)
    return requested or 0


def _compute_blocks(
    ids: array[int],
    spans: list[placeholders.PlaceholderSpan],
    body: dict[str, Any],
    question: TokenizeQuestion,
) -> tuple[int, ...]:
    """The block keys of a prompt; `spans` are the placeholders of its media items."""
    size, salt = question.block_size, body.get("cache_salt") or ""
    extras = placeholders.build_extra_keys(spans, size, question.adapter, salt, len(ids) // size)
    return compute_block_keys(ids, size, extras)
