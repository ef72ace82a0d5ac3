# SPDX-License-Identifier: Apache-2.0
"""A chat request as vLLM gives it to the template: model.py has the body, the template gets messages.

After vLLM 0.32: renderers/chat_utils.py and ChatCompletionRequest, Apache-2.0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from ttft_otel.router.prompts.reason import Unreadable

_TEXTS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_MEDIA: Final = {  # a part's type, or the key that stands for one: what it is
    "image_url": "image",
    "input_image": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "video_url": "video",
}
# vLLM passes on whatever else a part has.
_KNOWN: Final = frozenset(
    "audio_embeds audio_url closed data file image_embeds image_pil image_url input_audio name "
    "prompt_cache_breakpoint refusal text thinking type uuid video_embeds video_url".split()
)
_BILLING: Final = "x-anthropic-billing-header"  # differs in each request; vLLM takes it out
_UNSET: Final = (None, "auto")


@dataclass(frozen=True, slots=True)
class Item:
    """One picture or the like: `data` its URL, None where only `uuid` says which."""

    modality: str
    data: str | None
    uuid: str | None


@dataclass(slots=True)
class Chat:
    """Messages for the template, and their media in order.

    wrap: parts stay parts ("openai"), else they are joined ("string") and `placeholder` says how
    the model's text names an item.
    """

    wrap: bool
    placeholder: Callable[[str], str]
    messages: list[dict[str, Any]] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)

    def add(self, messages: Iterable[dict[str, Any]]) -> None:
        """Take the request's messages. Raises Unreadable, or what malformed ones lead to."""
        for message in messages:
            self.messages.append(self._message(message))
        for message in self.messages:
            if message["role"] == "assistant" and "tool_calls" in message:
                _arguments(message)

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        role, content = message["role"], message.get("content")
        parts = [] if content is None else content
        if isinstance(content, str):
            parts = [{"type": "text", "text": content}]
        if role == "system":
            parts = _unbilled(parts)
        found: dict[str, Any] = {"role": role, "content": self._content(parts)}
        if role == "assistant":
            _assistant(message, found)
        elif role == "tool":
            if "tool_call_id" in message:
                found["tool_call_id"] = message["tool_call_id"]
            found["content"] = _plain(found["content"])
        for name in ("name", "task"):
            if isinstance(message.get(name), str):
                found[name] = message[name]
        if role == "developer":
            found["tools"] = message.get("tools")
        return found

    def _content(self, parts: Iterable[Any]) -> Any:
        before = len(self.items)
        found = [part for part in map(self._part, parts) if part]
        if self.wrap:
            return found
        text = "\n".join(found)
        names = [self.placeholder(item.modality) for item in self.items[before:]]
        missing: list[str] = []
        for name in dict.fromkeys(names):
            left = names.count(name) - text.count(name)
            if left < 0:
                raise Unreadable("refused")
            missing += [name] * left
        return "\n".join([*missing, text] if text else missing)

    def _part(self, part: Any) -> Any:
        """A part of a message; None for nothing."""
        if isinstance(part, str):
            return {"type": "text", "text": part} if self.wrap else part
        kind = part.get("type")
        if kind is None or part.get("uuid") is not None:
            kind = next((key for key in (*_MEDIA, "tool_reference") if key in part), kind)
        if kind in _TEXTS:
            text = part.get(_TEXTS[kind])
            if text is None or not self.wrap:
                return text
            return {"type": "text", "text": text, **_more(part)}
        if kind == "tool_reference":
            name = part.get("name")
            return {"type": "tool_reference", "name": name} if self.wrap else name
        if kind not in _MEDIA:
            raise Unreadable("unsupported")  # embeddings: only the engine knows their length
        modality = _MEDIA[kind]
        uuid = part.get("uuid")
        self.items.append(Item(modality, _data(kind, part), None if uuid is None else str(uuid)))
        return {"type": modality, **_more(part)} if self.wrap else None


def _data(kind: str, part: dict[str, Any]) -> str | None:
    value = part.get("image_url" if kind == "input_image" else kind)
    if isinstance(value, dict):
        value = value.get("data") if kind == "input_audio" else value.get("url")
    return value if isinstance(value, str) else None


def _more(part: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key not in _KNOWN}


def _unbilled(parts: Iterable[Any]) -> list[Any]:
    found = []
    for part in parts:
        named = isinstance(part, dict) and part.get("type") == "text"
        text = part.get("text") if named else part
        if isinstance(text, str) and text.startswith(_BILLING):
            rest = text.partition("\n")[2]
            if rest:
                found.append({**part, "text": rest} if named else rest)
        else:
            found.append(part)
    return found


def _assistant(message: dict[str, Any], found: dict[str, Any]) -> None:
    calls = message.get("tool_calls")
    if calls is not None:
        found["tool_calls"] = [_call(call) for call in calls]
    reasoning = message.get("reasoning")
    reasoning = message.get("reasoning_content") if reasoning is None else reasoning
    if reasoning is not None:
        found["reasoning"] = found["reasoning_content"] = reasoning


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Validated as OpenAI's type, whose order of keys a template may print."""
    function = call["function"]
    if call.get("type", "function") != "function":
        raise Unreadable("refused")
    inner = {key: function[key] for key in ("arguments", "name") if key in function}
    whole = {"id": call.get("id"), "function": inner, "type": call.get("type")}
    return {key: value for key, value in whole.items() if key in call}


def _arguments(message: dict[str, Any]) -> None:
    """Templates want objects; what is none becomes an empty one."""
    if not message["tool_calls"]:
        del message["tool_calls"]
        return
    for call in message["tool_calls"]:
        given = call["function"].get("arguments")
        if isinstance(given, str):
            try:
                given = json.loads(given) if given else {}
            except ValueError:
                given = {}
        call["function"]["arguments"] = given if isinstance(given, dict) else {}


def _plain(content: Any) -> Any:
    """A tool's answer is one text, unless it refers to tools."""
    if not isinstance(content, list) or any(part.get("type") != "text" for part in content):
        return content
    return "\n".join(part.get("text", "") for part in content)


def tools(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The tools as vLLM's own types give them back: in this order, nothing else."""
    given = body.get("tools")
    if given is None:
        return None
    if not given:
        raise Unreadable("refused")
    found = []
    for tool in given:
        function, later = tool["function"], tool.get("defer_loading")
        inner = {key: function.get(key) for key in ("name", "description", "parameters")}
        if function.get("strict") is not None:
            inner["strict"] = function["strict"]
        deferred = function.get("defer_loading", later)
        deferred = later if deferred is None else deferred
        if deferred is not None:
            inner["defer_loading"] = deferred
        whole = {"type": "function", "function": inner}
        found.append(whole if later is None else {**whole, "defer_loading": later})
    return found


def variables(body: dict[str, Any]) -> dict[str, Any]:
    """What the template gets besides the messages and tools."""
    theirs = body.get("chat_template_kwargs") or {}
    effort = body.get("reasoning_effort")
    ours = {
        "add_generation_prompt": body.get("add_generation_prompt", True),
        "continue_final_message": body.get("continue_final_message", False),
        "documents": body.get("documents"),
        "reasoning_effort": effort,
    }
    if ours["add_generation_prompt"] and ours["continue_final_message"]:
        raise Unreadable("refused")
    if effort is not None and "enable_thinking" not in theirs:
        ours["enable_thinking"] = effort != "none"
    merged = theirs | {key: value for key, value in ours.items() if value not in _UNSET}
    return {key: value for key, value in merged.items() if value not in _UNSET}


def undeveloped(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For a template without a developer: it is a system, and there is one system message, the first."""
    for message in messages:
        if message["role"] == "developer":
            message["role"] = "system"
            message.pop("tools", None)
    systems = [at for at, message in enumerate(messages) if message["role"] == "system"]
    if systems in ([], [0]):
        return messages
    texts = [_text(messages[at].get("content", "")) for at in systems]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(each for each in messages if each["role"] != "system")]


def _text(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    parts = [part["text"] if isinstance(part, dict) else part for part in content if _is_text(part)]
    return "\n".join(parts)


def _is_text(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, dict) and "text" in part)
