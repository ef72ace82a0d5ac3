# SPDX-License-Identifier: Apache-2.0
"""Parse the few fields and the media items of a request; the bytes are forwarded unmodified.

endpoint.py passes a client's body. Values stay raw JSON: a client chooses how large they are, and
building objects of them would hold the event loop. What takes long is done in a thread (BodyParser).
encoders.py sends each media item to an encoder as a chat completion. Parts of other paths are converted as
vLLM does, from the same bytes, so that the encoder computes the same hash of an item as the instance
that prefills. Facts about vLLM are those of release 0.32.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from ttft_otel.model import stages
from ttft_otel.model.endpoints import CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH
from ttft_otel.router.types import JSON_ERRORS

MEDIA_PART_KEYS: Final = ("image_url", "audio_url", "input_audio", "video_url")

# The field that holds the conversation, by path. All of these take `ec_transfer_params`
# (chat_completion/protocol.py:504, anthropic/protocol.py:280, responses/protocol.py:405).
CONVERSATION_FIELDS: Final[Mapping[str, str]] = {
    CHAT_PATH: "messages",
    MESSAGES_PATH: "messages",
    RESPONSES_PATH: "input",
}
# What else of a request decides how vLLM prepares its media, and thereby their hashes
# (multimodal/processing/inputs.py). On /v1/messages vLLM does not read the first two
# (anthropic/serving.py, _build_base_request); an encoder must not get them either.
PREPARATION_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    CHAT_PATH: ("mm_processor_kwargs", "media_io_kwargs", "chat_template", "chat_template_kwargs"),
    MESSAGES_PATH: ("chat_template_kwargs",),
    RESPONSES_PATH: ("mm_processor_kwargs", "media_io_kwargs", "chat_template_kwargs"),
}
NULL_JSON: Final = Raw(b"null")
_DEFAULT_MEDIA_TYPE: Final = Raw(b'"image/jpeg"')  # what vLLM takes a source without media_type for
_TOOL_OUTPUTS: Final = ("function_call_output", "custom_tool_call_output")


class _Item(msgspec.Struct):
    """A message, a block of /v1/messages, or an item of /v1/responses."""

    type: Any = None
    role: Any = None
    content: Raw = NULL_JSON
    source: Raw = NULL_JSON  # of an image block
    output: Raw = NULL_JSON  # what a tool returned


class _Part(msgspec.Struct):
    """A part of a message of chats or of /v1/responses."""

    type: Any = None
    image_url: Raw = NULL_JSON
    audio_url: Raw = NULL_JSON
    input_audio: Raw = NULL_JSON
    video_url: Raw = NULL_JSON


class _Source(msgspec.Struct):
    """Of an image block of /v1/messages."""

    type: Any = None
    media_type: Raw = _DEFAULT_MEDIA_TYPE
    data: Raw = NULL_JSON
    url: Raw = NULL_JSON


_items_decoder: Final = msgspec.json.Decoder(list[_Item])
_item_decoder: Final = msgspec.json.Decoder(_Item)
_list_decoder: Final = msgspec.json.Decoder(list[Raw])
_part_decoder: Final = msgspec.json.Decoder(_Part)
_source_decoder: Final = msgspec.json.Decoder(_Source)


def may_be_encoded_apart(path: str, answering_leg: str) -> bool:
    """Whether media items of requests of `path` may go to encoders.

    With prefill and decode apart, all paths but chat and completions are served by a decode instance
    alone (request_plan.py), which is seldom a consumer of the encoders' caches.
    """
    return path in ((CHAT_PATH,) if answering_leg == stages.DECODE else CONVERSATION_FIELDS)


def find_items(path: str, conversation: Raw) -> list[bytes]:
    """All media items of a conversation in prompt order, repeated ones included, as chat parts.

    path: of the request. conversation: its messages or input. Empty if malformed, which the instance
    reports.
    """
    try:
        if path == MESSAGES_PATH:
            return list(_find_in_messages(conversation))
        if path == RESPONSES_PATH:
            return list(_find_in_responses(conversation))
        return list(_find_in_chat(conversation))
    except JSON_ERRORS:
        return []


def _find_in_chat(conversation: Raw) -> Iterator[bytes]:
    for message in _items_decoder.decode(conversation):
        for part in _list_objects(message.content):
            if _is_media(part):
                yield bytes(part)


def _is_media(part: Raw) -> bool:
    fields = _part_decoder.decode(part)
    for name in MEDIA_PART_KEYS:
        # vLLM infers the type of a part without one from its key.
        if fields.type in (None, name) and bytes(getattr(fields, name)) != b"null":
            return True
    return False


def _find_in_messages(conversation: Raw) -> Iterator[bytes]:
    """Image blocks, as vLLM converts them (anthropic/serving.py, _convert_block).

    What a tool returned becomes a message before the one that holds it. Of system messages only
    texts are used.
    """
    for message in _items_decoder.decode(conversation):
        if message.role == "system":
            continue
        own_items: list[bytes] = []
        for raw in _list_objects(message.content):
            block = _item_decoder.decode(raw)
            if block.type == "image":
                own_items += _convert_source(block.source)
            elif block.type == "tool_result" and message.role == "user":
                for inner_block in map(_item_decoder.decode, _list_objects(block.content)):
                    if inner_block.type == "image":
                        yield from _convert_source(inner_block.source)
        yield from own_items


def _convert_source(raw: Raw) -> list[bytes]:
    """An image block's source as a part of a chat message (_convert_image_source_to_url)."""
    if not starts_with(raw, b"{"):
        return []
    source = _source_decoder.decode(raw)
    if source.type == "url":
        return _build_image_part(bytes(source.url))
    # Neither is decoded: an image may have megabytes.
    if not _is_text(source.data) or not starts_with(source.media_type, b'"'):
        return []
    # both are JSON strings: spliced without their quotes they are one again
    media_type, data = memoryview(source.media_type)[1:-1], memoryview(source.data)[1:-1]
    return _build_image_part(b"".join((b'"data:', media_type, b";base64,", data, b'"')))


def _find_in_responses(conversation: Raw) -> Iterator[bytes]:
    """`input_image` parts of messages and of what tools returned (responses/utils.py)."""
    if not starts_with(conversation, b"["):
        return  # a text
    for item in _items_decoder.decode(conversation):
        parts = item.output if item.type in _TOOL_OUTPUTS else item.content
        for part in map(_part_decoder.decode, _list_objects(parts)):
            if part.type == "input_image":
                yield from _build_image_part(bytes(part.image_url))


def _build_image_part(url: bytes) -> list[bytes]:
    """An image's part of a chat message; `url` is the JSON of it, and nothing comes of another one."""
    if not _is_text(url):
        return []
    return [b"".join((b'{"type":"image_url","image_url":{"url":', url, b"}}"))]


def _list_objects(content: Raw) -> list[Raw]:
    """The JSON objects of a list; none where it is a text or null."""
    if not starts_with(content, b"["):
        return []
    # Between them may be strings, which are texts.
    return [each for each in _list_decoder.decode(content) if starts_with(each, b"{")]


def _is_text(raw: Raw | bytes) -> bool:
    return starts_with(raw, b'"') and len(memoryview(raw)) > 2


def starts_with(raw: Raw | bytes, character: bytes) -> bool:
    # A view, since the value may be as large as the body.
    return bytes(memoryview(raw)[:1]) == character


# Only the router may set transfer parameters: those of a client can crash an instance (NIXL asserts).
_TRANSFER_PARAM_FIELDS: Final = ("kv_transfer_params", "ec_transfer_params")
# vLLM puts what this field holds where the parameters go, unchecked.
_EXTRA_ARGS_FIELD: Final = "vllm_xargs"
# Of JSON that only Python's parser reads, which builds all of it: about 30 ms on a slow core.
MAX_LENIENT_JSON_BYTES: Final = 256 << 10
_NOT_AN_OBJECT: Final = "The body is not a JSON object, or is nested too deeply."
_LENIENT_TOO_LARGE: Final = (
    "The body is not valid JSON. NaN, Infinity and lone surrogates are accepted in bodies of at "
    f"most {MAX_LENIENT_JSON_BYTES} bytes."
)
# Whatever a body of so many bytes consists of, all that is done with it takes less than 25 ms.
MAX_SMALL_BYTES: Final = 64 << 10
# Larger ones are counted, up to here on the loop: it takes 0.4 ms per MB, or ends early.
MAX_COUNTED_BYTES: Final = 1 << 20
# Small enough that other threads get their turn soon, while one window is counted.
_WINDOW_BYTES: Final = 128 << 10
_BEGINS_OBJECT: Final = b"{ \t\r\n"


class _TransferParams(msgspec.Struct):
    """Of `vllm_xargs`, which holds anything."""

    kv_transfer_params: Raw | UnsetType = UNSET
    ec_transfer_params: Raw | UnsetType = UNSET

    @property
    def is_given(self) -> bool:
        """Whether any of them is there, null included."""
        return self.kv_transfer_params is not UNSET or self.ec_transfer_params is not UNSET


class _RequestFields(_TransferParams):
    """The fields that are read; msgspec skips the others without building objects."""

    # Raw, since any type may come: a wrong one is for the instance to refuse.
    model: Raw = NULL_JSON
    stream: Raw = NULL_JSON
    background: Raw = NULL_JSON
    priority: Raw = NULL_JSON
    messages: Raw = NULL_JSON
    input: Raw = NULL_JSON
    vllm_xargs: Raw = NULL_JSON
    # These change how an image is processed, so the encoder must see them too.
    mm_processor_kwargs: Raw | UnsetType = UNSET
    media_io_kwargs: Raw | UnsetType = UNSET
    chat_template: Raw | UnsetType = UNSET
    chat_template_kwargs: Raw | UnsetType = UNSET


_fields_decoder: Final = msgspec.json.Decoder(_RequestFields)
_params_decoder: Final = msgspec.json.Decoder(_TransferParams)
_object_decoder: Final = msgspec.json.Decoder(dict[str, Raw])
_text_decoder: Final = msgspec.json.Decoder(str)
_number_decoder: Final = msgspec.json.Decoder(int, strict=False)
_MAX_NUMBER_BYTES: Final = 24


class RequestBody(msgspec.Struct):
    data: bytes
    model: str = ""
    stream: bool = False
    background: bool = False
    priority: int = 0  # vLLM's, lower values first; 0 also for what is none
    media_items: tuple[bytes, ...] = ()  # the distinct ones
    # Where each of these came first among all `media_part_count` parts that are media.
    item_positions: tuple[int, ...] = ()
    media_part_count: int = 0
    encoder_fields: dict[str, Raw] = {}
    problem: str = ""  # why it cannot be read, for the client; "" if it is a JSON object
    is_heavy: bool = False  # parsing it once more would hold the event loop

    def map_item_tokens(self, part_tokens: Sequence[int]) -> list[int]:
        """Token counts of the distinct items, from `part_tokens` of all parts; 0 if the numbers disagree."""
        # Counted from the prompt by another parser: with other parts the numbers mean nothing.
        if len(part_tokens) != self.media_part_count:
            return [0] * len(self.media_items)
        return [part_tokens[place] for place in self.item_positions]


def parse_body(data: bytes, path: str = "") -> RequestBody:
    """Parse the body `data`; anything but a JSON object is kept as it is, with a `problem`.

    path: to find media items, one of `CONVERSATION_FIELDS`; "" not to look for them.
    """
    try:
        fields = _fields_decoder.decode(data)
        has_extra_params = starts_with(fields.vllm_xargs, b"{") and (
            _params_decoder.decode(fields.vllm_xargs).is_given
        )
        # Only these bodies are encoded anew; all others pass byte for byte.
        if fields.is_given or has_extra_params:
            data = _strip_transfer_params(data, has_extra_params)
        parsed = RequestBody(
            data,
            _decode_text(fields.model),
            bytes(fields.stream) == b"true",
            bytes(fields.background) == b"true",
            _decode_number(fields.priority) if fields.priority is not NULL_JSON else 0,
        )
    except JSON_ERRORS:
        # NaN or a lone surrogate, perhaps; or no JSON.
        return _parse_leniently(data)
    if path:
        _add_media(parsed, path, fields)
    return parsed


def build_encoder_frame(body: RequestBody) -> tuple[bytes, bytes]:
    """What comes before and after the item in each encoder request of `body`.

    The requests have no text, ask for one token and no stream, and differ only in the item: fields
    that all of them carry are encoded once.
    """
    fields = {"model": body.model, "max_tokens": 1, "stream": False, **body.encoder_fields}
    # Without its closing brace: `messages` comes last, and the item between both halves.
    before = msgspec.json.encode(fields)[:-1] + b',"messages":[{"role":"user","content":['
    return before, b"]}]}"


def _parse_leniently(data: bytes) -> RequestBody:
    """Parse what only Python's json, hence vLLM, accepts (NaN); media items are not searched."""
    if len(data) > MAX_LENIENT_JSON_BYTES:
        return RequestBody(data, problem=_LENIENT_TOO_LARGE)
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return RequestBody(data, problem=_NOT_AN_OBJECT)
    if not isinstance(fields, dict):
        return RequestBody(data, problem=_NOT_AN_OBJECT)
    model, extra_args = fields.get("model"), fields.get(_EXTRA_ARGS_FIELD)
    holders = [each for each in (fields, extra_args) if isinstance(each, dict)]
    if any(name in holder for holder in holders for name in _TRANSFER_PARAM_FIELDS):
        for holder in holders:
            for name in _TRANSFER_PARAM_FIELDS:
                holder.pop(name, None)
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
        data = text.encode("utf-8", "surrogatepass")
    return RequestBody(
        data,
        # a string that can be encoded again: JSON may contain lone surrogates
        model.encode("utf-8", "replace").decode() if isinstance(model, str) else "",
        fields.get("stream") is True,
        fields.get("background") is True,
        priority if isinstance(priority := fields.get("priority"), int) else 0,
    )


def _strip_transfer_params(data: bytes, has_extra_params: bool) -> bytes:
    # Raw values are not validated, and what is left out would take its bad bytes along: the body that
    # instances refuse would become one that they take. Raises UnicodeDecodeError.
    data.decode()
    fields = _drop_transfer_params(data)
    if has_extra_params:
        extra_args = _drop_transfer_params(fields[_EXTRA_ARGS_FIELD])
        fields[_EXTRA_ARGS_FIELD] = Raw(msgspec.json.encode(extra_args))
    return msgspec.json.encode(fields)


def _drop_transfer_params(data: bytes | Raw) -> dict[str, Raw]:
    # Of equal names the last one stays, as it does for the instances' parsers.
    fields = _object_decoder.decode(data)
    for name in _TRANSFER_PARAM_FIELDS:
        fields.pop(name, None)
    return fields


def _decode_text(raw: Raw) -> str:
    """A JSON string; "" for any other value."""
    return _text_decoder.decode(raw) if starts_with(raw, b'"') else ""


def _decode_number(raw: Raw) -> int:
    """A whole number; 0 for any other value, which is for the instance to refuse."""
    if len(memoryview(raw)) > _MAX_NUMBER_BYTES:
        return 0
    try:
        return _number_decoder.decode(raw)
    except msgspec.ValidationError:
        return 0


def _add_media(parsed: RequestBody, path: str, fields: _RequestFields) -> None:
    """Set the distinct media items, and the fields that influence their preprocessing."""
    first_positions: dict[bytes, int] = {}
    items = find_items(path, getattr(fields, CONVERSATION_FIELDS[path]))
    # Equal bytes are one item, encoded once.
    for position, item in enumerate(items):
        first_positions.setdefault(item, position)
    parsed.media_part_count = len(items)
    parsed.media_items = tuple(first_positions)
    parsed.item_positions = tuple(first_positions.values())
    if parsed.media_items:
        parsed.encoder_fields = {
            name: value
            for name in PREPARATION_FIELDS[path]
            if isinstance(value := getattr(fields, name), Raw)
        }


P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class JsonStructure:
    """What one call of the parser costs besides the bytes."""

    outside_bytes: int = 0  # outside strings
    parts: int = 0  # members of objects, objects and lists
    quotes: int = 0  # two per string
    escapes: int = 0  # backslashes

    def exceeds(self, limit: JsonStructure) -> bool:
        return (
            self.outside_bytes > limit.outside_bytes
            or self.parts > limit.parts
            or self.quotes > limit.quotes
            or self.escapes > limit.escapes
        )


def count_structure(data: bytes, limit: JsonStructure) -> JsonStructure:
    """Count `data` from its beginning until one count exceeds its `limit`."""
    found = JsonStructure()
    is_inside, open_escape = 0, b""
    for start in range(0, len(data), _WINDOW_BYTES):
        window = open_escape + data[start : start + _WINDOW_BYTES]
        open_escape = b""
        if b"\\" in window:
            found.escapes += window.count(b"\\")
            if (len(window) - len(window.rstrip(b"\\"))) % 2:  # its character is in the next window
                window, open_escape = window[:-1], b"\\"
                found.escapes -= 1
            # pairs first: in \\" the quote ends the string
            window = window.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = window.split(b'"')
        outside = b"".join(pieces[is_inside::2])
        # An odd number of quotes means that the next window begins on the other side.
        is_inside ^= (len(pieces) - 1) % 2
        found.quotes += len(pieces) - 1
        found.outside_bytes += len(outside)
        found.parts += outside.count(b":") + outside.count(b"{") + outside.count(b"[")
        if found.exceeds(limit):
            break
    return found


# What is parsed on the loop, too, as it is hardly more than a small body.
LIGHT_STRUCTURE: Final = JsonStructure(512 << 10, 5_000, 20_000, 100_000)
# What is parsed at all: 8 MiB of numbers are a million token ids, 50 000 parts several thousand messages.
MAX_STRUCTURE: Final = JsonStructure(8 << 20, 50_000, 400_000, 4_000_000)
_TOO_MANY: Final = (
    f"The body has more than {MAX_STRUCTURE.parts} objects, lists and members, "
    f"{MAX_STRUCTURE.quotes // 2} strings, {MAX_STRUCTURE.escapes} escapes, or "
    f"{MAX_STRUCTURE.outside_bytes} bytes outside strings."
)


class BodyParser:
    """One thread for heavy bodies, one after the other; without such a body there is no thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "ttft-otel-json")

    async def parse(self, data: bytes, path: str = "") -> RequestBody:
        """As parse_body(); a body whose structure exceeds MAX_STRUCTURE has a `problem`."""
        if len(data) <= MAX_SMALL_BYTES or data[0] not in _BEGINS_OBJECT:
            return parse_body(data, path)  # of what is no object only the first byte is read
        if len(data) <= MAX_COUNTED_BYTES:
            found = count_structure(data, LIGHT_STRUCTURE)
            if not found.exceeds(LIGHT_STRUCTURE):
                return parse_body(data, path)
        return await self._run_beside(_parse_heavy, data, path)

    async def run_on(
        self, body: RequestBody, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """What `function`, which parses `body` once more, returns; beside the loop if it is heavy."""
        if not body.is_heavy:
            return function(*args, **kwargs)
        return await self._run_beside(function, *args, **kwargs)

    async def _run_beside(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        call = self._thread.submit(function, *args, **kwargs)
        # A client that leaves takes its call out of the queue.
        return await asyncio.wrap_future(call)


def _parse_heavy(data: bytes, path: str) -> RequestBody:
    if count_structure(data, MAX_STRUCTURE).exceeds(MAX_STRUCTURE):
        return RequestBody(data, problem=_TOO_MANY)
    parsed = parse_body(data, path)
    parsed.is_heavy = True
    return parsed
