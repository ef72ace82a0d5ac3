# SPDX-License-Identifier: Apache-2.0
"""Find the media items of a request, each converted to the content part of a chat message.

encoders.py sends each item to an encoder as a chat completion. Parts of other paths are converted as
vLLM does, from the same bytes, so that the encoder computes the same hash of an item as the instance
that prefills. Facts about vLLM are those of release 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw

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
