# SPDX-License-Identifier: Apache-2.0
"""Convert a chat request to what vLLM passes to the chat template; model_tokenizer.py renders it.

transformers passes messages and tools on as the client wrote them. vLLM changes them before, and this
file follows vLLM 0.32 there (renderers/chat_utils.py, renderers/hf.py and ChatCompletionRequest,
Apache-2.0), so that rendered prompts are equal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from ttft_otel.router.errors import UnreadablePrompt

_TEXT_FIELDS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
# The modality by the type of a part, or by the key that implies it.
_MODALITIES: Final = {
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
# vLLM removes this line, which differs per request, for the sake of the prefix cache.
_BILLING_HEADER: Final = "x-anthropic-billing-header"
_UNSET_VALUES: Final = (None, "auto")


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
        if isinstance(parts, str):
            parts = [{"type": "text", "text": parts}]
        parts = () if parts is None else parts
        first_item = len(items)
        content: Any = [
            each
            for part in (_strip_billing(parts) if role == "system" else parts)
            if (each := _convert_part(part, keeps_parts, items))
        ]
        if not keeps_parts:
            content = _join_content(
                content, [get_placeholder(item.modality) for item in items[first_item:]]
            )
        converted.append({"role": role, "content": content, **_convert_fields(message, content)})
    return converted, items


def _convert_part(part: Any, keeps_parts: bool, items: list[MediaItem]) -> Any:
    """Convert one content part and add its media item to `items`; None if the template gets nothing."""
    if isinstance(part, str):
        return {"type": "text", "text": part} if keeps_parts else part
    kind = part.get("type")
    # An item that is named by its uuid may come without content, so the key decides.
    if kind is None or part.get("uuid") is not None:
        kind = next((key for key in (*_MODALITIES, "tool_reference") if key in part), kind)
    unknown_fields = {key: value for key, value in part.items() if key not in _KNOWN_PART_KEYS}
    if kind in _TEXT_FIELDS:
        text = part.get(_TEXT_FIELDS[kind])
        if text is None or not keeps_parts:
            return text
        return {"type": "text", "text": text, **unknown_fields}
    if kind == "tool_reference":
        name = part.get("name")
        return {"type": kind, "name": name} if keeps_parts else name
    if kind not in _MODALITIES:
        # Embeddings: only the engine knows their number of tokens.
        raise UnreadablePrompt("unsupported")
    url, uuid = part.get("image_url" if kind == "input_image" else kind), part.get("uuid")
    if isinstance(url, dict):
        url = url.get("data" if kind == "input_audio" else "url")
    modality = _MODALITIES[kind]
    items.append(
        MediaItem(
            modality, url if isinstance(url, str) else None, None if uuid is None else str(uuid)
        )
    )
    return {"type": modality, **unknown_fields} if keeps_parts else None


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


def _strip_billing(parts: Iterable[Any]) -> Iterable[Any]:
    for part in parts:
        is_text_part = isinstance(part, dict) and part.get("type") == "text"
        text = part.get("text") if is_text_part else part
        if not isinstance(text, str) or not text.startswith(_BILLING_HEADER):
            yield part
        elif rest := text.partition("\n")[2]:
            yield {**part, "text": rest} if is_text_part else rest


def _convert_fields(message: dict[str, Any], content: Any) -> dict[str, Any]:
    """The fields besides role and content, in vLLM's order, as a template may print the message."""
    role = message["role"]
    fields: dict[str, Any] = {}
    if role == "assistant":
        if calls := message.get("tool_calls"):
            fields["tool_calls"] = [_convert_tool_call(call) for call in calls]
        reasoning = message.get("reasoning")
        reasoning = message.get("reasoning_content") if reasoning is None else reasoning
        if reasoning is not None:
            fields["reasoning"] = fields["reasoning_content"] = reasoning
    elif role == "tool":
        if "tool_call_id" in message:
            fields["tool_call_id"] = message["tool_call_id"]
        # The text parts of a tool's result are joined, unless it has other parts.
        if isinstance(content, list) and all(part.get("type") == "text" for part in content):
            fields["content"] = "\n".join(part.get("text", "") for part in content)
    fields |= {key: message[key] for key in ("name", "task") if isinstance(message.get(key), str)}
    if role == "developer":
        fields["tools"] = message.get("tools")
    return fields


def _convert_tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """The call with keys in the order of OpenAI's type, and its arguments decoded, or {} if they are bad."""
    function = call["function"]
    if call.get("type", "function") != "function":
        raise UnreadablePrompt("refused")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    function_fields = {"arguments": arguments if isinstance(arguments, dict) else {}}
    if "name" in function:
        function_fields["name"] = function["name"]
    call_fields = {"id": call.get("id"), "function": function_fields, "type": call.get("type")}
    return {key: value for key, value in call_fields.items() if key in call}


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
        fields = {key: function.get(key) for key in ("name", "description", "parameters")}
        if function.get("strict") is not None:
            fields["strict"] = function["strict"]
        own_defer_loading = function.get("defer_loading")
        if own_defer_loading is not None or defer_loading is not None:
            fields["defer_loading"] = (
                defer_loading if own_defer_loading is None else own_defer_loading
            )
        outer = {} if defer_loading is None else {"defer_loading": defer_loading}
        converted.append({"type": "function", "function": fields, **outer})
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
    own_variables = {key: each for key, each in own_variables.items() if each not in _UNSET_VALUES}
    merged = client_variables | own_variables
    return {key: value for key, value in merged.items() if value not in _UNSET_VALUES}


def merge_system_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turn developer messages to system messages and merge all of these into the first message.

    messages: for a template without a developer role; these are modified in place.
    """
    for message in messages:
        if message["role"] == "developer":
            message["role"] = "system"
            message.pop("tools", None)
    positions = [at for at, message in enumerate(messages) if message["role"] == "system"]
    if positions in ([], [0]):
        return messages
    texts = []
    for position in positions:
        content = messages[position].get("content", "")
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content if "text" in part)
        texts.append(content)
    merged = {"role": "system", "content": "\n\n".join(filter(None, texts))}
    return [merged, *(each for each in messages if each["role"] != "system")]


def _parse_template(template: str) -> Any:
    """The syntax tree of `template`, with the tags and filters of transformers."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(template).environment.parse(template)


@lru_cache(maxsize=32)
def list_template_variables(template: str) -> frozenset[str]:
    """The variables that `template` reads without setting them itself."""
    from jinja2.meta import find_undeclared_variables

    return frozenset(find_undeclared_variables(_parse_template(template)))


@lru_cache(maxsize=32)
def iterates_parts(template: str) -> bool:
    """Whether `template` iterates over content parts (vLLM's format "openai") or takes text ("string").

    transformers has no such question: it renders whatever the client sent. The syntax tree is searched for
    loops over a message's content, also in macros that get it and over variables named `content`.
    """
    import jinja2
    from jinja2 import nodes

    try:
        tree = _parse_template(template)
    except jinja2.TemplateError:
        return False
    message_lists = ["messages"]
    # Grows while it is read: names that a name of the list was assigned to.
    for name in message_lists:
        for assignment in tree.find_all(nodes.Assign):
            if _refers_to(assignment.node, name):
                if not isinstance(assignment.target, nodes.Name):
                    return False
                if assignment.target.name not in message_lists:
                    message_lists.append(assignment.target.name)
    loops = list(tree.find_all(nodes.For))
    message_loops = [
        loop for loop in loops if any(_refers_to(loop.iter, name) for name in message_lists)
    ]
    if not all(isinstance(loop.target, nodes.Name) for loop in message_loops):
        return False

    def is_content(node: Any) -> bool:
        return any(_refers_to(node, loop.target.name, "content") for loop in message_loops)

    # Inside a macro, `content` may be an unrelated parameter: only parameters that get content count.
    names_by_loop: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        parameters = [argument.name for argument in macro.args]
        names: set[str] = set()
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                arguments = [*zip(parameters, call.args, strict=False)]
                arguments += [(each.key, each.value) for each in call.kwargs]
                names |= {
                    key for key, value in arguments if key in parameters and is_content(value)
                }
        for loop in macro.find_all(nodes.For):
            if names or id(loop) not in names_by_loop:
                names_by_loop[id(loop)] = names
    return any(
        is_content(loop.iter)
        or isinstance(loop.iter, nodes.Name)
        and loop.iter.name in names_by_loop.get(id(loop), ("content",))
        for loop in loops
    )


def _refers_to(node: Any, name: str, key: str | None = None) -> bool:
    """Whether `node` reads the variable `name`, or its item `key`, possibly sliced, filtered or tested."""
    from jinja2 import nodes

    while isinstance(node, (nodes.Filter, nodes.Test)) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is not None:
        if isinstance(node, nodes.Getattr):
            found = node.attr
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
            found = node.arg.value
        else:
            return False
        if found != key:
            return False
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
