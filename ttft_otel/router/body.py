# SPDX-License-Identifier: Apache-2.0
"""Look into a request's JSON without copying it; forward.py sends the bytes on, legs.py the media.

Media items stay the client's own bytes, so an encoder hashes what the backend will hash.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

MEDIA: Final = ("image_url", "audio_url", "input_audio", "video_url")
# Transfer parameters belong to the router: a client's own can kill an instance (NIXL asserts).
_STRIPPED: Final = ("kv_transfer_params", "ec_transfer_params")
_DOOR: Final = "vllm_xargs"  # vLLM puts what it holds where the parameters go, unchecked


class _Top(msgspec.Struct):
    """Whatever matters here of any request; the rest is skipped, not built."""

    model: Any = None
    stream: Any = None
    messages: Raw = Raw(b"null")
    kv_transfer_params: Raw | UnsetType = UNSET
    ec_transfer_params: Raw | UnsetType = UNSET
    vllm_xargs: Any = None
    # these change how an image is processed, so the encoder must see them too
    mm_processor_kwargs: Raw | UnsetType = UNSET
    media_io_kwargs: Raw | UnsetType = UNSET
    chat_template: Raw | UnsetType = UNSET
    chat_template_kwargs: Raw | UnsetType = UNSET


class _Message(msgspec.Struct):
    content: Raw = Raw(b"null")


class _Item(msgspec.Struct):
    type: Any = None
    image_url: Raw | UnsetType = UNSET
    audio_url: Raw | UnsetType = UNSET
    input_audio: Raw | UnsetType = UNSET
    video_url: Raw | UnsetType = UNSET


_top: Final = msgspec.json.Decoder(_Top)
_messages: Final = msgspec.json.Decoder(list[_Message])
_parts: Final = msgspec.json.Decoder(list[Raw])
_item: Final = msgspec.json.Decoder(_Item)
_FORWARDED: Final = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "chat_template",
    "chat_template_kwargs",
)


@dataclass(slots=True)
class Body:
    """A request's bytes and what the router knows of them; `media` are its distinct items.

    `places`: where each of these came first among all `parts` that are media. `valid`: it is a JSON
    object.
    """

    data: bytes
    model: str = ""
    stream: bool = False
    media: tuple[bytes, ...] = ()
    places: tuple[int, ...] = ()
    parts: int = 0
    shared: dict[str, Raw] = field(default_factory=dict)
    valid: bool = True

    def sizes(self, counted: Sequence[int]) -> list[int]:
        """Of each item what was counted of it, every part in order; 0 where these are not its parts."""
        if len(counted) != self.parts:
            return [0] * len(self.media)
        return [counted[place] for place in self.places]


def read(data: bytes, media: bool) -> Body:
    """Parse once; where another JSON is taken than an object, it goes on as it came."""
    try:
        top = _top.decode(data)
        theirs = any(getattr(top, name) is not UNSET for name in _STRIPPED)
        kept = _strip(msgspec.json.decode(data)) if theirs or _open(top.vllm_xargs) else data
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _lenient(data)
    found = Body(kept, _text(top.model), top.stream is True)
    if media:
        first, found.parts = _media(top.messages)
        found.media, found.places = tuple(first), tuple(first.values())
    if found.media:
        found.shared = {
            name: value for name in _FORWARDED if isinstance(value := getattr(top, name), Raw)
        }
    return found


def encoder(body: Body, item: bytes) -> bytes:
    """The encoder's request for one item: no text, one token, no stream."""
    content = {"role": "user", "content": [Raw(item)]}
    return msgspec.json.encode(
        {
            "model": body.model,
            "messages": [content],
            "max_tokens": 1,
            "stream": False,
            **body.shared,
        }
    )


def _lenient(data: bytes) -> Body:
    """Python's json, hence vLLM, also takes NaN and the like: strip there too, find no media."""
    try:
        top = json.loads(data)
    except (ValueError, RecursionError):
        return Body(data, valid=False)
    if not isinstance(top, dict):
        return Body(data, valid=False)
    found = Body(data, _text(top.get("model")), top.get("stream") is True)
    if any(name in top for name in _STRIPPED) or _open(top.get(_DOOR)):
        found.data = _strip(top)
    return found


def _open(door: object) -> bool:
    return isinstance(door, dict) and any(name in door for name in _STRIPPED)


def _strip(top: dict[str, Any]) -> bytes:
    door = top.get(_DOOR)
    for name in _STRIPPED:
        top.pop(name, None)
        if isinstance(door, dict):
            door.pop(name, None)
    return json.dumps(top, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "surrogatepass"
    )


def _media(messages: Raw) -> tuple[dict[bytes, int], int]:
    """Every distinct media item of every message with its first place, in order; how many in all."""
    found: dict[bytes, int] = {}
    number = 0
    try:
        for message in _messages.decode(messages):
            if bytes(memoryview(message.content)[:1]) == b"[":
                for part in _parts.decode(message.content):
                    if _is_media(part):
                        found.setdefault(bytes(part), number)
                        number += 1
    except msgspec.MsgspecError:
        return {}, 0  # malformed: the backend says so
    return found, number


def _is_media(part: Raw) -> bool:
    if bytes(memoryview(part)[:1]) != b"{":
        return False
    item = _item.decode(part)
    for name in MEDIA:
        value = getattr(item, name)
        if value is not UNSET and bytes(value) != b"null" and item.type in (None, name):
            return True
    return False


def _text(value: object) -> str:
    """A text that can be written again: JSON lets half a surrogate pair through."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""
