# SPDX-License-Identifier: Apache-2.0
"""Parts of a prompt as vLLM makes them: messages for the chat template, and placeholders of media items.

tokenizer_child.py uses both; prompt_reader.py needs the keys of what an instance rendered.
What the two say to each other is here, too: a frame is the length of a message, big-endian, followed by the
message in msgpack.

transformers passes messages and tools on as the client wrote them. vLLM 0.32 changes them before
(renderers/chat_utils.py). What most clients send is converted here in the same way; the rest is not read,
since another beginning of a prompt would match no cached block: --tokenize engine reads all.

The model's processor of transformers counts placeholder tokens where it can do that from the size of an
image, as Qwen's does. Without one, or if the size is unknown (a URL to fetch, audio, video), the count is the
mean of the images counted so far, or a default.
"""

from __future__ import annotations

import base64
import inspect
import json
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from io import BytesIO
from typing import Any, Final

import msgspec

from ttft_otel.router.errors import UnreadablePrompt
from ttft_otel.router.routing.policies.block_index import compute_block_keys, encode_extra_keys

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


# MessagePack does not tell its length in front, and a pipe has no message bounds.
LENGTH_BYTES: Final = 4  # bytes of a frame's length
# The `source` of prompts that are token ids already and need no tokenizer; no model has this name.
NO_TOKENIZER: Final = "\0"


# array_like: fields by position, since both ends are of the same version.
class TokenizeQuestion(msgspec.Struct, array_like=True, frozen=True):
    """A request to load the tokenizer `source`, or with a `path` to read the prompt of `body`."""

    source: str
    path: str = ""  # "chat" or "completion"
    body: bytes = b""
    block_size: int = 0  # tokens per block
    adapter: str = ""  # the LoRA adapter, if any
    max_prompt_tokens: int = 0  # the model's limit, 0 if unknown


class Prompt(msgspec.Struct, array_like=True, frozen=True):
    """A prompt as the engine will see it, or why it cannot be read: the response to a question."""

    error: str = ""  # one word, "" for success
    detail: str = ""  # for logs, about the model and never of a prompt
    tokens: int = 0  # its length, placeholder tokens of media included
    ids: bytes = b""  # an array("I") as bytes; empty if the ids of media placeholders are unknown
    # Keys of the full blocks (policies/block_index.py), as far as ids are known.
    block_keys: tuple[int, ...] = ()
    item_tokens: tuple[int, ...] = ()  # placeholder tokens per media item, repeated ones included
    cached_tokens: int = 0  # tokens taken from the cache of tokenizer_child.py

    @property
    def token_ids(self) -> array[int]:
        ids = array("I")
        ids.frombytes(self.ids)
        return ids


def frame_message(message: TokenizeQuestion | Prompt) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


question_decoder: Final = msgspec.msgpack.Decoder(TokenizeQuestion)
answer_decoder: Final = msgspec.msgpack.Decoder(Prompt)


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


# Default token count per item when unknown; any estimate separates requests with and without media.
DEFAULT_ITEM_TOKENS: Final = {"image": 576, "audio": 750, "video": 4096}
MAX_KNOWN_ITEMS: Final = 4096  # items whose count is cached
# Models for which vLLM frames the placeholder with vision tokens if the template takes plain text;
# others have the bare placeholder.
_FRAMED_MODEL_TYPES: Final = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


class PlaceholderSpan(msgspec.Struct):
    """The placeholder tokens of one media item in a prompt; without a key as vLLM renders it."""

    start: int = msgspec.field(name="offset")  # position of the first one
    length: int
    key: str = ""  # identifies the item's content


class PlaceholderCounter:
    """Counts placeholders for one model.

    processor: the transformers processor, None if there is none. config: the model's config.json.
    """

    def __init__(self, processor: Any, config: dict[str, Any]) -> None:
        self._processor = processor
        self._config = config
        self._counts_by_key: OrderedDict[str, int] = OrderedDict()
        self._counted_tokens = 0
        self._counted_items = 0

    def find_token_id(self, modality: str) -> int | None:
        """The token id that stands for one item of `modality` before expansion; None if unknown."""
        for name in (f"{modality}_token_id", f"{modality}_token_index"):
            token_id = self._config.get(name, getattr(self._processor, name, None))
            if isinstance(token_id, int):
                return token_id
        return None

    def get_placeholder_text(self, modality: str) -> str:
        """The text of that placeholder for `modality`; "" if the processor has none."""
        placeholder = str(getattr(self._processor, f"{modality}_token", None) or "")
        if placeholder and str(self._config.get("model_type")).startswith(_FRAMED_MODEL_TYPES):
            return f"<|vision_start|>{placeholder}<|vision_end|>"
        return placeholder

    def count_item(self, item: MediaItem) -> tuple[int, str]:
        """The number of placeholder tokens of `item`, and a key of its content."""
        # A uuid is what vLLM uses as hash as well, so such blocks match KV events.
        key = item.uuid or _digest_text(item.url or "")
        cache_key = _digest_text(key)  # a client's uuid may be of any length
        tokens = self._counts_by_key.get(cache_key)
        if tokens is None:
            tokens = self._count_exactly(item) if item.modality == "image" else None
            if tokens is None:
                if item.modality == "image" and self._counted_items:
                    return round(self._counted_tokens / self._counted_items), key
                return DEFAULT_ITEM_TOKENS[item.modality], key
            self._counts_by_key[cache_key] = tokens
            self._counted_tokens += tokens
            self._counted_items += 1
            if len(self._counts_by_key) > MAX_KNOWN_ITEMS:
                self._counts_by_key.popitem(last=False)
        return tokens, key

    def _count_exactly(self, item: MediaItem) -> int | None:
        dimensions = read_dimensions(item.url or "")
        if dimensions is None or self._processor is None:
            return None
        try:
            counted = self._processor._get_num_multimodal_tokens(image_sizes=[dimensions])
            return int(counted.num_image_tokens[0])
        except Exception:  # noqa: BLE001 - any error of a processor: the count is estimated instead
            return None


def load_processor(source: str, tokenizer: Any, config: dict[str, Any]) -> tuple[Any, str | None]:
    """The processor of a model, for counting only, and its chat template; None for text models.

    It has no parts but the tokenizer and the image processor: AutoProcessor would load all, also those
    that need torch. A processor that does not work without them is None, and counts are estimated.
    source: folder or hub name. tokenizer, config: of the same model.
    """
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    class_name = PROCESSOR_MAPPING_NAMES.get(str(config.get("model_type")))
    processor_class: Any = getattr(transformers, class_name, None) if class_name else None
    if processor_class is None or not hasattr(processor_class, "get_processor_dict"):
        return None, None
    try:
        settings, _ = processor_class.get_processor_dict(source)
    except OSError:
        settings = {}
    template = settings.pop("chat_template", None)
    # transformers refuses parts that are None or of another class than the processor names.
    unchecked = {"check_argument_for_proper_class": lambda *_: None}
    accepted = inspect.signature(processor_class.__init__).parameters
    parts: dict[str, Any] = dict.fromkeys(processor_class.get_attributes())
    arguments = {
        key: value for key, value in settings.items() if key in accepted and key not in parts
    }
    try:
        parts["tokenizer"] = tokenizer
        if "image_processor" in parts:
            parts["image_processor"] = transformers.AutoImageProcessor.from_pretrained(
                source, trust_remote_code=False
            )
        processor = type(class_name, (processor_class,), unchecked)(**parts, **arguments)
    except Exception:  # noqa: BLE001 - any error of a processor
        processor = None
    return processor, template


def _digest_text(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()


def read_dimensions(url: str) -> tuple[int, int] | None:
    """Height and width of the image in a data: `url`, without decoding its pixels; None for others.

    Of a photograph that is turned by its header they are exchanged: its placeholders are as many.
    """
    if not url.startswith("data:"):
        return None
    try:
        from PIL import Image

        with Image.open(BytesIO(base64.b64decode(url.partition(",")[2]))) as picture:
            width, height = picture.size
    except Exception:  # noqa: BLE001 - malformed images are rejected by the engine
        return None
    return height, width


def expand_placeholders(
    ids: array[int], items: Sequence[tuple[int | None, int, str]]
) -> tuple[array[int], list[PlaceholderSpan]] | None:
    """Expand the single placeholder of each item in `ids` to its count.

    items: placeholder token id, count and content key of each, in prompt order.
    Returns the prompt and the span of each item; None if `ids` lacks a placeholder.
    """
    expanded, spans, position = array("I"), [], 0
    for token, count, key in items:
        if token is None:
            return None
        try:
            # By search and not by offset: templates put text around placeholders.
            next_position = ids.index(token, position)
        except ValueError:
            return None
        expanded += ids[position:next_position]
        spans.append(PlaceholderSpan(len(expanded), count, key))
        expanded += array("I", (token,)) * count
        position = next_position + 1
    return expanded + ids[position:], spans


def compute_prompt_keys(
    ids: array[int],
    block_size: int,
    spans: Sequence[PlaceholderSpan] = (),
    adapter: str = "",
    salt: str = "",
) -> tuple[int, ...]:
    """Keys of the full blocks of a prompt, of `block_size` tokens each.

    With extra keys in vLLM's order: adapter, media items, cache salt (v1/core/kv_cache_utils.py).

    Args:
        spans: of the media items.
        adapter: LoRA name, "" for none; it is in every block.
        salt: the request's cache_salt, in the first block only.
    """
    keys: dict[int, list[Any]] = {}
    if adapter:
        keys = {block: [adapter] for block in range(len(ids) // block_size)}
    for span in spans:
        last_block = (span.start + span.length - 1) // block_size
        for block in range(span.start // block_size, last_block + 1):
            keys.setdefault(block, []).append((span.key, span.start - block * block_size))
    if salt:
        keys.setdefault(0, []).append(salt)
    extra_keys = {block: encode_extra_keys(each) for block, each in keys.items()}
    return compute_block_keys(ids, block_size, extra_keys)
