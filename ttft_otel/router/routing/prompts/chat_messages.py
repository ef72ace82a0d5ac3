# SPDX-License-Identifier: Apache-2.0
"""Convert a chat request to the messages that vLLM passes to the chat template.

Follows vLLM 0.32 (renderers/chat_utils.py and ChatCompletionRequest, Apache-2.0), so that rendered
prompts are equal. model_tokenizer.py calls it with the request body.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from ttft_otel.router.errors import UnreadablePrompt

_TEXT_FIELDS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_MODALITIES: Final = {  # modality by the type of a part, or by the key that implies it
    "image_url": "image",
    "input_image": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "video_url": "video",
}
# Keys that vLLM interprets; it passes all others on to the template.
_KNOWN_PART_KEYS: Final = frozenset(
    "audio_embeds audio_url closed data file image_embeds image_pil image_url input_audio name "
    "prompt_cache_breakpoint refusal text thinking type uuid video_embeds video_url".split()
)
# Differs per request, so vLLM removes it for the sake of the prefix cache.
_BILLING_HEADER: Final = "x-anthropic-billing-header"
_UNSET_VALUES: Final = (None, "auto")


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One media item; `url` is None if the request only names it by `uuid`."""

    modality: str
    url: str | None
    uuid: str | None


@dataclass(slots=True)
class ChatMessages:
    """Messages for the template, and their media items in order.

    keeps_parts: content stays a list of parts (vLLM's format "openai"); otherwise it is joined to text
    ("string"). placeholder: returns the text that stands for an item of a modality in that text.
    """

    keeps_parts: bool
    placeholder: Callable[[str], str]
    messages: list[dict[str, Any]] = field(default_factory=list)
    items: list[MediaItem] = field(default_factory=list)

    def add_messages(self, messages: Iterable[dict[str, Any]]) -> None:
        """Convert `messages` of a request. Raises UnreadablePrompt, or KeyError and the like if malformed."""
        for message in messages:
            self.messages.append(self._convert_message(message))
        for message in self.messages:
            if message["role"] == "assistant" and "tool_calls" in message:
                _decode_arguments(message)

    def _convert_message(self, message: dict[str, Any]) -> dict[str, Any]:
        role, content = message["role"], message.get("content")
        parts = [] if content is None else content
        if isinstance(content, str):
            parts = [{"type": "text", "text": content}]
        # vLLM strips it from system messages only.
        if role == "system":
            parts = _strip_billing(parts)
        converted: dict[str, Any] = {"role": role, "content": self._convert_content(parts)}
        if role == "assistant":
            _convert_assistant(message, converted)
        elif role == "tool":
            if "tool_call_id" in message:
                converted["tool_call_id"] = message["tool_call_id"]
            converted["content"] = _flatten_text(converted["content"])
        for name in ("name", "task"):
            if isinstance(message.get(name), str):
                converted[name] = message[name]
        if role == "developer":
            converted["tools"] = message.get("tools")
        return converted

    def _convert_content(self, parts: Iterable[Any]) -> Any:
        first_item = len(self.items)
        converted = [part for part in map(self._convert_part, parts) if part]
        if self.keeps_parts:
            return converted
        text = "\n".join(converted)
        placeholders = [self.placeholder(item.modality) for item in self.items[first_item:]]
        # As in vLLM: placeholders that the text does not contain itself are put before it.
        missing: list[str] = []
        for name in dict.fromkeys(placeholders):
            missing_count = placeholders.count(name) - text.count(name)
            # More placeholders in the text than items: vLLM answers 400.
            if missing_count < 0:
                raise UnreadablePrompt("refused")
            missing += [name] * missing_count
        return "\n".join([*missing, text] if text else missing)

    def _convert_part(self, part: Any) -> Any:
        """Convert one content part; None if nothing of it is for the template."""
        if isinstance(part, str):
            return {"type": "text", "text": part} if self.keeps_parts else part
        part_type = part.get("type")
        # An item that is named by its uuid may come without content, so the key decides.
        if part_type is None or part.get("uuid") is not None:
            part_type = next(
                (key for key in (*_MODALITIES, "tool_reference") if key in part), part_type
            )
        if part_type in _TEXT_FIELDS:
            text = part.get(_TEXT_FIELDS[part_type])
            if text is None or not self.keeps_parts:
                return text
            return {"type": "text", "text": text, **_keep_unknown_keys(part)}
        if part_type == "tool_reference":
            name = part.get("name")
            return {"type": "tool_reference", "name": name} if self.keeps_parts else name
        if part_type not in _MODALITIES:
            raise UnreadablePrompt(
                "unsupported"
            )  # embeddings: only the engine knows their number of tokens
        modality = _MODALITIES[part_type]
        uuid = part.get("uuid")
        self.items.append(
            MediaItem(
                modality, _read_media_url(part_type, part), None if uuid is None else str(uuid)
            )
        )
        return {"type": modality, **_keep_unknown_keys(part)} if self.keeps_parts else None


def _read_media_url(kind: str, part: dict[str, Any]) -> str | None:
    value = part.get("image_url" if kind == "input_image" else kind)
    if isinstance(value, dict):
        value = value.get("data") if kind == "input_audio" else value.get("url")
    return value if isinstance(value, str) else None


def _keep_unknown_keys(part: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key not in _KNOWN_PART_KEYS}


def _strip_billing(parts: Iterable[Any]) -> list[Any]:
    kept = []
    for part in parts:
        named = isinstance(part, dict) and part.get("type") == "text"
        text = part.get("text") if named else part
        if isinstance(text, str) and text.startswith(_BILLING_HEADER):
            rest = text.partition("\n")[2]
            if rest:
                kept.append({**part, "text": rest} if named else rest)
        else:
            kept.append(part)
    return kept


def _convert_assistant(message: dict[str, Any], converted: dict[str, Any]) -> None:
    calls = message.get("tool_calls")
    if calls is not None:
        converted["tool_calls"] = [_convert_tool_call(call) for call in calls]
    reasoning = message.get("reasoning")
    reasoning = message.get("reasoning_content") if reasoning is None else reasoning
    if reasoning is not None:
        converted["reasoning"] = converted["reasoning_content"] = reasoning


def _convert_tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Reorder keys as OpenAI's type has them, since a template may print the dict."""
    function = call["function"]
    if call.get("type", "function") != "function":
        raise UnreadablePrompt("refused")
    function_fields = {key: function[key] for key in ("arguments", "name") if key in function}
    call_fields = {"id": call.get("id"), "function": function_fields, "type": call.get("type")}
    return {key: value for key, value in call_fields.items() if key in call}


def _decode_arguments(message: dict[str, Any]) -> None:
    """Decode JSON arguments of tool calls to objects, as templates expect; others become {}."""
    if not message["tool_calls"]:
        del message["tool_calls"]
        return
    for call in message["tool_calls"]:
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments else {}
            except ValueError:
                arguments = {}
        call["function"]["arguments"] = arguments if isinstance(arguments, dict) else {}


def _flatten_text(content: Any) -> Any:
    """Join the text parts of a tool's result, unless it has other parts."""
    if not isinstance(content, list) or any(part.get("type") != "text" for part in content):
        return content
    return "\n".join(part.get("text", "") for part in content)


def convert_tools(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The tools of `body` as vLLM's types serialise them: these keys, in this order. None without tools.

    Raises UnreadablePrompt for an empty list, which vLLM refuses.
    """
    listed = body.get("tools")
    if listed is None:
        return None
    if not listed:
        raise UnreadablePrompt("refused")
    converted = []
    for tool in listed:
        function, defer_loading = tool["function"], tool.get("defer_loading")
        function_fields = {key: function.get(key) for key in ("name", "description", "parameters")}
        if function.get("strict") is not None:
            function_fields["strict"] = function["strict"]
        deferred = function.get("defer_loading", defer_loading)
        deferred = defer_loading if deferred is None else deferred
        if deferred is not None:
            function_fields["defer_loading"] = deferred
        tool_fields = {"type": "function", "function": function_fields}
        converted.append(
            tool_fields
            if defer_loading is None
            else {**tool_fields, "defer_loading": defer_loading}
        )
    return converted


def collect_template_variables(body: dict[str, Any]) -> dict[str, Any]:
    """Variables of `body` for the template, besides messages and tools.

    The client's chat_template_kwargs yield to the request's own fields. Raises UnreadablePrompt.
    """
    client_variables = body.get("chat_template_kwargs") or {}
    effort = body.get("reasoning_effort")
    own_variables = {
        "add_generation_prompt": body.get("add_generation_prompt", True),
        "continue_final_message": body.get("continue_final_message", False),
        "documents": body.get("documents"),
        "reasoning_effort": effort,
    }
    if own_variables["add_generation_prompt"] and own_variables["continue_final_message"]:
        raise UnreadablePrompt("refused")
    if effort is not None and "enable_thinking" not in client_variables:
        own_variables["enable_thinking"] = effort != "none"
    merged = client_variables | {
        key: value for key, value in own_variables.items() if value not in _UNSET_VALUES
    }
    return {key: value for key, value in merged.items() if value not in _UNSET_VALUES}


def merge_system_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turn developer messages to system messages and merge all of these into the first message.

    messages: for a template without a developer role; these are modified in place.
    """
    for message in messages:
        if message["role"] == "developer":
            message["role"] = "system"
            message.pop("tools", None)
    system_positions = [
        position for position, message in enumerate(messages) if message["role"] == "system"
    ]
    if system_positions in ([], [0]):
        return messages
    texts = [_join_text(messages[position].get("content", "")) for position in system_positions]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(each for each in messages if each["role"] != "system")]


def _join_text(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    parts = [part["text"] if isinstance(part, dict) else part for part in content if _is_text(part)]
    return "\n".join(parts)


def _is_text(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, dict) and "text" in part)
