# SPDX-License-Identifier: Apache-2.0
"""One model's tokenizer, template and placeholders in the child: a request's body becomes a prompt.

transformers does what it does inside vLLM, so that ids are the engine's. Never imported by the router.
"""

from __future__ import annotations

import inspect
import json
from array import array
from pathlib import Path
from typing import Any, Final

import msgspec

from ttft_otel.router.policies.blocks import numbers
from ttft_otel.router.prompts import chat, format, media
from ttft_otel.router.prompts.encode import Encoder
from ttft_otel.router.prompts.frames import Ask, Told
from ttft_otel.router.prompts.reason import Unreadable

# vLLM renders these by code of its own, not by a template.
_OWN: Final = ("deepseek_v32", "deepseek_v4", "gpt_oss", "inkling", "kimi_k3", "kimi_audio")
LONGEST: Final = 16  # characters for each token of the longest prompt: one with more is too long
TEXT: Final = 1 << 22  # characters at most: more take longer than a request waits
_NOT_VARIABLES: Final = frozenset(("chat_template", "tokenize", "tools", "conversation"))


class Ids:
    """Prompts that are token ids already, for which no tokenizer is needed."""

    def read(self, ask: Ask) -> Told:
        """The prompt of one body. Raises Unreadable, or what malformed bodies lead to."""
        body = _decode(ask.body)
        return self._completion(body, ask, body.get("cache_salt") or "")

    def _completion(self, body: dict[str, Any], ask: Ask, salt: str) -> Told:
        prompt = body.get("prompt")
        if prompt is None or body.get("prompt_embeds") is not None:
            raise Unreadable("unsupported")
        several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        prompts = prompt if several else [prompt]
        if sum(map(len, prompts)) > TEXT:
            raise Unreadable("unsupported")
        special = body.get("add_special_tokens", True)
        found = [self._ids(each, body, ask.limit, special) for each in prompts]
        first, cached = found[0]
        told = _told(ask, first, [], salt, (), cached)
        if (
            len(found) > 1
        ):  # as many requests in the engine; of all the work, the first one's blocks
            told = msgspec.structs.replace(told, tokens=sum(len(ids) for ids, _ in found), ids=b"")
        return told

    def _ids(
        self, prompt: str | list[int], body: dict[str, Any], limit: int, special: bool
    ) -> tuple[array[int], int]:
        """Tokenized, and truncated where the request says so."""
        special = body.get("add_special_tokens", special)
        most, side = body.get("truncate_prompt_tokens"), body.get("truncation_side")
        if most is not None and most < 0:
            if not limit:
                raise Unreadable("unsupported")
            most = limit - 1 if _output(body) else limit
        if isinstance(prompt, str):
            ids, cached = self._text(prompt, limit, special, most, side)
        else:
            ids, cached = array("I", prompt), 0
        if not len(ids):
            raise Unreadable("refused")
        if most is None or most >= len(ids):
            return ids, cached
        return (ids[:most] if side == "right" else ids[len(ids) - most :]), cached

    def _text(
        self, prompt: str, limit: int, special: bool, most: int | None, side: Any
    ) -> tuple[array[int], int]:
        raise Unreadable("load")


class Model(Ids):
    """Loads at once, from a folder or a hub's name. Raises whatever transformers raises."""

    def __init__(self, source: str) -> None:
        import transformers

        if Path(source).is_absolute() and not Path(source).is_dir():
            raise OSError("there is no such folder here")
        transformers.utils.logging.set_verbosity_error()
        self._config, _ = transformers.PretrainedConfig.get_config_dict(source)
        # generation keeps a long prompt's end
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(
            source, truncation_side="left", trust_remote_code=False
        )
        self.own = _own(source, self._config)
        processor, self._template = _processor(source, self.tokenizer, self._config)
        self.media = media.Counter(processor, self._config)
        self.encoder = Encoder(self.tokenizer, self._resolve(None) or "")
        self._names = _parameters(self.tokenizer, transformers.PreTrainedTokenizerBase)

    def read(self, ask: Ask) -> Told:
        """The prompt of one body. Raises Unreadable, or what malformed bodies lead to."""
        body = _decode(ask.body)
        salt = body.get("cache_salt") or ""
        if ask.path == "chat":
            text, items = self._chat(body)
            ids, cached = self._ids(text, body, ask.limit, False)
        else:
            return self._completion(body, ask, salt)
        counted = [(self.media.token(item.modality), *self.media.count(item)) for item in items]
        counts = tuple(count for _, count, _ in counted)
        expanded = media.expand(ids, counted) if counted else (ids, [])
        if expanded is None:  # nobody knows where they go: the length, and no blocks
            return Told(ask.number, tokens=len(ids) + sum(counts) - len(items), items=counts)
        return _told(ask, *expanded, salt, counts, cached)

    def _text(
        self, prompt: str, limit: int, special: bool, most: int | None, side: Any
    ) -> tuple[array[int], int]:
        """Tokenized, and truncated where the tokenizer does that."""
        if len(prompt) > TEXT or most is not None and _long(prompt, limit):
            raise Unreadable("unsupported")
        if _long(prompt, limit):
            raise Unreadable("refused")
        if most and side is None:
            return self.encoder.truncated(prompt, special, most), 0
        return self.encoder.encode(prompt, special)

    def _chat(self, body: dict[str, Any]) -> tuple[str, list[chat.Item]]:
        """The rendered text, and the media in it."""
        if self.own:
            raise Unreadable("unsupported")
        tools = chat.tools(body)
        theirs = chat.variables(body)
        if body.get("chat_template") is not None or "chat_template" in theirs:
            raise Unreadable("refused")  # a client's program; vLLM does not trust it either
        template = self._resolve(tools)
        if template is None:
            raise Unreadable("refused")
        messages = chat.Chat(format.wraps(template), self.media.text)
        messages.add(body["messages"])
        conversation = messages.messages
        if '"developer"' not in template and "'developer'" not in template:
            if any(message["role"] == "developer" for message in conversation):
                conversation = chat.undeveloped(conversation)
        accepted = (self._names | format.reads(template)) - _NOT_VARIABLES
        text = self.tokenizer.apply_chat_template(
            conversation=conversation,
            tools=theirs.get("tools", tools),
            chat_template=template,
            tokenize=False,
            **{name: value for name, value in theirs.items() if name in accepted},
        )
        return text, messages.items

    def _resolve(self, tools: list[dict[str, Any]] | None) -> str | None:
        """The processor's template unless there are tools, else the tokenizer's."""
        if tools is None and self._template is not None:
            return self._template
        try:
            found = self.tokenizer.get_chat_template(None, tools=tools)
        except ValueError:
            return None
        return str(found)


def _long(text: str, limit: int) -> bool:
    """Whether no prompt of the model is so long, whatever its tokens are; limit 0: nobody knows."""
    return limit > 0 and len(text) > limit * LONGEST


def _decode(body: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:  # Python's takes more, and vLLM uses that
        found = json.loads(body)
    if not isinstance(found, dict):
        raise Unreadable("refused")
    return found


def _output(body: dict[str, Any]) -> int:
    """Tokens asked for; a completion has 16 unless it says otherwise."""
    found = body.get("max_completion_tokens")
    if found is None:
        found = body.get("max_tokens", 16 if "prompt" in body else None)
    return found or 0


def _told(
    ask: Ask,
    ids: array[int],
    spans: list[media.Span],
    salt: str,
    items: tuple[int, ...],
    cached: int,
) -> Told:
    extras = media.extras(spans, ask.size, ask.adapter, salt, len(ids) // ask.size)
    blocks = numbers(ids, ask.size, extras)
    return Told(ask.number, "", "", len(ids), ids.tobytes(), blocks, items, cached)


def _own(source: str, config: dict[str, Any]) -> bool:
    """Whether chats need the engine: vLLM has code of its own for them."""
    from transformers.utils import cached_file

    kind = str(config.get("model_type"))
    found = cached_file(source, "tekken.json", _raise_exceptions_for_missing_entries=False)
    return kind.startswith(_OWN) or found is not None


def _parameters(tokenizer: Any, base: Any) -> frozenset[str]:
    """Names that apply_chat_template itself takes."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    functions = (tokenizer.apply_chat_template, base.apply_chat_template)
    return frozenset(
        each.name
        for function in functions
        for each in inspect.signature(function).parameters.values()
        if each.kind not in kinds
    ) - {"self"}


def _processor(source: str, tokenizer: Any, config: dict[str, Any]) -> tuple[Any, str | None]:
    """What counts placeholders, and the template that its files hold; neither for text alone."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    name = PROCESSOR_MAPPING_NAMES.get(str(config.get("model_type")))
    kind = getattr(transformers, name, None) if name else None
    if kind is None or not hasattr(kind, "get_processor_dict"):
        return None, None
    try:
        settings, _ = kind.get_processor_dict(source)
    except OSError:
        settings = {}
    template = settings.pop("chat_template", None)
    return _light(kind, source, tokenizer, settings), template


def _light(kind: Any, source: str, tokenizer: Any, settings: dict[str, Any]) -> Any:
    """The processor without what needs torch: it shall count, not compute."""
    import transformers

    unchecked = {"check_argument_for_proper_class": lambda *_: None}
    wanted = inspect.signature(kind.__init__).parameters
    parts: dict[str, Any] = dict.fromkeys(kind.get_attributes())
    given = {key: value for key, value in settings.items() if key in wanted and key not in parts}
    try:
        parts["tokenizer"] = tokenizer
        if "image_processor" in parts:
            parts["image_processor"] = transformers.AutoImageProcessor.from_pretrained(
                source, trust_remote_code=False
            )
        return type(kind.__name__, (kind,), unchecked)(**parts, **given)
    except Exception:  # noqa: BLE001 - of any processor; then placeholders are estimated
        return None
