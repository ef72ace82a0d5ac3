# SPDX-License-Identifier: Apache-2.0
"""One model's tokenizer, chat template and placeholders: turns request bodies into prompts.

It uses transformers in the same way as vLLM, so that token ids are equal to the engine's. Only the child
process (tokenizer_child.py) imports it.
"""

from __future__ import annotations

import inspect
from array import array
from pathlib import Path
from typing import Any, Final

from ttft_otel.router.errors import UnreadablePrompt
from ttft_otel.router.routing.prompts import chat_messages, placeholders, template_format
from ttft_otel.router.routing.prompts.child_frames import TokenizeAnswer, TokenizeQuestion
from ttft_otel.router.routing.prompts.model_processor import load_processor
from ttft_otel.router.routing.prompts.text_encoder import TextEncoder
from ttft_otel.router.routing.prompts.token_ids_reader import (
    MAX_PROMPT_CHARS,
    TokenIdsReader,
    build_answer,
    decode_body,
)

# Model types whose chats vLLM renders by its own code, not by a template.
_ENGINE_ONLY_MODELS: Final = (
    "deepseek_v32",
    "deepseek_v4",
    "gpt_oss",
    "inkling",
    "kimi_k3",
    "kimi_audio",
)
# A text with more characters per token of the model's limit is too long, without tokenizing it.
MAX_CHARS_PER_TOKEN: Final = 16
_RESERVED_NAMES: Final = frozenset(("chat_template", "tokenize", "tools", "conversation"))


class ModelTokenizer(TokenIdsReader):
    """Loads the tokenizer of `source`, a folder or hub name. Raises whatever transformers raises."""

    def __init__(self, source: str) -> None:
        import transformers

        # Else transformers would take the path for a name of the hub.
        if Path(source).is_absolute() and not Path(source).is_dir():
            raise OSError("no such folder on the router's machine")
        # Nobody would read its warnings: the child's stderr is /dev/null.
        transformers.utils.logging.set_verbosity_error()
        self._config, _ = transformers.PretrainedConfig.get_config_dict(source)
        # vLLM's default for generation: truncation keeps the end of a prompt
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(
            source, truncation_side="left", trust_remote_code=False
        )
        self.needs_engine = _needs_engine(source, self._config)
        processor, self._template = load_processor(source, self.tokenizer, self._config)
        self.placeholder_counter = placeholders.PlaceholderCounter(processor, self._config)
        self.encoder = TextEncoder(self.tokenizer, self._find_template(None) or "")
        self._template_parameters = _list_template_parameters(
            self.tokenizer, transformers.PreTrainedTokenizerBase
        )

    def read_body(self, question: TokenizeQuestion) -> TokenizeAnswer:
        """The prompt of the body in `question`. Raises UnreadablePrompt, or KeyError and the like."""
        body = decode_body(question.body)
        salt = body.get("cache_salt") or ""
        if question.path == "chat":
            text, items = self._render_chat(body)
            ids, cached = self._tokenize_prompt(text, body, question.max_prompt_tokens, False)
        else:
            return self._read_completion(body, question, salt)
        counted_items = [
            (
                self.placeholder_counter.find_token_id(item.modality),
                *self.placeholder_counter.count_item(item),
            )
            for item in items
        ]
        item_tokens = tuple(count for _, count, _ in counted_items)
        expanded = (
            placeholders.expand_placeholders(ids, counted_items) if counted_items else (ids, [])
        )
        if expanded is None:  # placeholders not found: the length is known, block keys are not
            return TokenizeAnswer(
                question.number,
                tokens=len(ids) + sum(item_tokens) - len(items),
                item_tokens=item_tokens,
            )
        return build_answer(question, *expanded, salt, item_tokens, cached)

    def _tokenize_text(
        self,
        prompt: str,
        max_prompt_tokens: int,
        add_special: bool,
        max_tokens: int | None,
        side: Any,
    ) -> tuple[array[int], int]:
        """Token ids, truncated if the tokenizer has to do it, and how many came from the cache."""
        if (
            len(prompt) > MAX_PROMPT_CHARS
            or max_tokens is not None
            and _is_too_long(prompt, max_prompt_tokens)
        ):
            raise UnreadablePrompt("unsupported")
        if _is_too_long(prompt, max_prompt_tokens):
            raise UnreadablePrompt("refused")
        if max_tokens and side is None:
            return self.encoder.encode_truncated(prompt, add_special, max_tokens), 0
        return self.encoder.encode_text(prompt, add_special)

    def _render_chat(self, body: dict[str, Any]) -> tuple[str, list[chat_messages.MediaItem]]:
        """The text that the chat template renders, and the media items in it."""
        if self.needs_engine:
            raise UnreadablePrompt("unsupported")
        converted_tools = chat_messages.convert_tools(body)
        client_variables = chat_messages.collect_template_variables(body)
        if body.get("chat_template") is not None or "chat_template" in client_variables:
            raise UnreadablePrompt(
                "refused"
            )  # client templates are untrusted; vLLM refuses them by default
        template = self._find_template(converted_tools)
        if template is None:
            raise UnreadablePrompt("refused")
        conversion = chat_messages.ChatMessages(
            template_format.iterates_parts(template), self.placeholder_counter.get_placeholder_text
        )
        conversion.add_messages(body["messages"])
        conversation = conversion.messages
        if '"developer"' not in template and "'developer'" not in template:
            if any(message["role"] == "developer" for message in conversation):
                conversation = chat_messages.merge_system_messages(conversation)
        accepted_names = (
            self._template_parameters | template_format.list_template_variables(template)
        ) - _RESERVED_NAMES
        text = self.tokenizer.apply_chat_template(
            conversation=conversation,
            tools=client_variables.get("tools", converted_tools),
            chat_template=template,
            tokenize=False,
            **{name: value for name, value in client_variables.items() if name in accepted_names},
        )
        return text, conversion.items

    def _find_template(self, tools: list[dict[str, Any]] | None) -> str | None:
        """The chat template: the processor's if there are no tools, else the tokenizer's."""
        if tools is None and self._template is not None:
            return self._template
        try:
            template = self.tokenizer.get_chat_template(None, tools=tools)
        except ValueError:
            return None
        return str(template)


def _is_too_long(text: str, max_prompt_tokens: int) -> bool:
    """Whether `text` exceeds the model's limit however it is tokenized; False if the limit is 0."""
    return max_prompt_tokens > 0 and len(text) > max_prompt_tokens * MAX_CHARS_PER_TOKEN


def _needs_engine(source: str, config: dict[str, Any]) -> bool:
    """Whether vLLM renders chats of this model by its own code (also Mistral's tekken tokenizers)."""
    from transformers.utils import cached_file

    model_type = str(config.get("model_type"))
    found = cached_file(source, "tekken.json", _raise_exceptions_for_missing_entries=False)
    return model_type.startswith(_ENGINE_ONLY_MODELS) or found is not None


def _list_template_parameters(tokenizer: Any, base: Any) -> frozenset[str]:
    """Names of the parameters of `apply_chat_template` itself."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    functions = (tokenizer.apply_chat_template, base.apply_chat_template)
    return frozenset(
        each.name
        for function in functions
        for each in inspect.signature(function).parameters.values()
        if each.kind not in kinds
    ) - {"self"}
