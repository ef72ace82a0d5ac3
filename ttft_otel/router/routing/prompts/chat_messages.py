# SPDX-License-Identifier: Apache-2.0
"""Convert a chat request to what vLLM passes to the chat template; tokenizer_child.py renders it.

transformers passes messages and tools on as the client wrote them. vLLM 0.32 changes them before
(renderers/chat_utils.py). What most clients send is converted here in the same way; the rest is not read,
since another beginning of a prompt would match no cached block: --tokenize engine reads all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from ttft_otel.router.errors import UnreadablePrompt

# The modality by the type of a part.
_MODALITIES: Final = {
    "image_url": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "video_url": "video",
}
_FUNCTION_FIELDS: Final = ("name", "description", "parameters")
# vLLM removes this line, which differs per request, for the sake of the prefix cache.
_BILLING_HEADER: Final = "x-anthropic-billing-header"
_UNSET_VALUES: Final = (None, "auto")
_PROBE_TEXT: Final = "ttft-otel-probe"


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One media item; `url` is None if the request only names it by `uuid`."""

    modality: str
    url: str | None
    uuid: str | None


def convert_messages(
    messages: Iterable[dict[str, Any]], keeps_parts: bool, get_placeholder: Callable[[str], str]
) -> tuple[list[dict[str, Any]], list[MediaItem]]:
    """The messages for the template, and their media items in order.

    Args:
        messages: of the request.
        keeps_parts: content stays a list of parts (vLLM's format "openai"); otherwise it is joined to
            text ("string").
        get_placeholder: returns the text that stands for an item of a modality in joined text.

    Raises UnreadablePrompt, or KeyError and the like if messages are malformed.
    """
    converted: list[dict[str, Any]] = []
    items: list[MediaItem] = []
    for message in messages:
        role, parts = message["role"], message.get("content")
        # Where a template does not know this role, vLLM rewrites the conversation.
        if role == "developer":
            raise UnreadablePrompt("unsupported")
        first_item = len(items)
        content: Any = [
            _convert_part(part, items)
            for part in ([parts] if isinstance(parts, str) else parts or ())
        ]
        texts = [part["text"] for part in content if part["type"] == "text"]
        if role == "system" and any(text.startswith(_BILLING_HEADER) for text in texts):
            raise UnreadablePrompt("unsupported")
        # The text parts of a tool's result are joined, unless it has other parts.
        if role == "tool" and keeps_parts and len(texts) == len(content):
            content = "\n".join(texts)
        elif not keeps_parts:
            placeholders = [get_placeholder(item.modality) for item in items[first_item:]]
            content = _join_content([text for text in texts if text], placeholders)
        converted.append({"role": role, "content": content, **_convert_fields(message)})
    return converted, items


def _convert_part(part: Any, items: list[MediaItem]) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type")
    if kind == "text":
        return {"type": kind, "text": part["text"], **part}
    # Embeddings, for instance: only the engine knows their number of tokens.
    if kind not in _MODALITIES or part.keys() - {"type", "uuid", kind}:
        raise UnreadablePrompt("unsupported")
    url, uuid = part.get(kind), part.get("uuid")
    if isinstance(url, dict):
        url = url.get("data" if kind == "input_audio" else "url")
    url, uuid = (url if isinstance(url, str) else None), (None if uuid is None else str(uuid))
    items.append(MediaItem(_MODALITIES[kind], url, uuid))
    return {"type": _MODALITIES[kind]}


def _join_content(texts: list[str], placeholders: list[str]) -> str:
    """The texts, after those `placeholders` that they do not contain themselves."""
    text = "\n".join(texts)
    missing: list[str] = []
    for name in dict.fromkeys(placeholders):
        missing_count = placeholders.count(name) - text.count(name)
        # vLLM answers 400 if the text has more placeholders than there are items.
        if missing_count < 0:
            raise UnreadablePrompt("refused")
        missing += [name] * missing_count
    return "\n".join([*missing, text] if text else missing)


def _convert_fields(message: dict[str, Any]) -> dict[str, Any]:
    """The fields besides role and content, in vLLM's order, as a template may print the message."""
    fields: dict[str, Any] = {}
    if message["role"] == "assistant":
        if calls := message.get("tool_calls"):
            fields["tool_calls"] = [_convert_tool_call(call) for call in calls]
        reasoning = message.get("reasoning")
        reasoning = message.get("reasoning_content") if reasoning is None else reasoning
        if reasoning is not None:
            fields["reasoning"] = fields["reasoning_content"] = reasoning
    elif message["role"] == "tool" and "tool_call_id" in message:
        fields["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        fields["name"] = message["name"]
    return fields


def _convert_tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """The call with keys in the order of OpenAI's type, and its arguments decoded, or {} if they are bad."""
    function = call["function"]
    if call.keys() != {"id", "type", "function"} or call["type"] != "function":
        raise UnreadablePrompt("unsupported")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    decoded = {"arguments": arguments if isinstance(arguments, dict) else {}}
    return {
        "id": call["id"],
        "function": {**decoded, "name": function["name"]},
        "type": call["type"],
    }


def convert_tools(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The tools of `body` as vLLM's types serialise them: these keys, in this order. None without tools.

    Raises UnreadablePrompt for an empty list, which vLLM refuses.
    """
    listed = body.get("tools")
    if listed is None:
        return None
    if not listed:
        raise UnreadablePrompt("refused")
    if any("strict" in each["function"] or "defer_loading" in each["function"] for each in listed):
        raise UnreadablePrompt("unsupported")
    functions = [{key: each["function"].get(key) for key in _FUNCTION_FIELDS} for each in listed]
    return [{"type": "function", "function": function} for function in functions]


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
    own_variables = {key: each for key, each in own_variables.items() if each not in _UNSET_VALUES}
    merged = client_variables | own_variables
    return {key: value for key, value in merged.items() if value not in _UNSET_VALUES}


@lru_cache(maxsize=32)
def iterates_parts(template: str) -> bool:
    """Whether `template` goes through the parts of a content (vLLM's format "openai") or takes text.

    vLLM looks for such a loop in the template's syntax tree; here a part is rendered. Where it is text for
    the template, the list is printed as a whole, or its rendering fails.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    parts = [{"type": "text", "text": _PROBE_TEXT}]
    try:
        text = _compile_jinja_template(template).render(
            messages=[{"role": "user", "content": parts}], add_generation_prompt=True
        )
    except Exception:  # noqa: BLE001 - any error of a template
        return False
    printed = sum(text.count(each) for each in (f"'{_PROBE_TEXT}'", f'"{_PROBE_TEXT}"'))
    return bool(text.count(_PROBE_TEXT) > printed)
