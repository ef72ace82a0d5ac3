# SPDX-License-Identifier: Apache-2.0
"""Parse the few fields of a request that the router needs; the bytes are forwarded unmodified.

endpoint.py passes a client's body. Values stay raw JSON: a client chooses how large they are, and
building objects of them would hold the event loop. What takes long is done in a thread (BodyParser).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, ParamSpec, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from ttft_otel.router.disagg import request_media
from ttft_otel.router.types import JSON_ERRORS

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
    model: Raw = request_media.NULL_JSON
    stream: Raw = request_media.NULL_JSON
    background: Raw = request_media.NULL_JSON
    priority: Raw = request_media.NULL_JSON
    messages: Raw = request_media.NULL_JSON
    input: Raw = request_media.NULL_JSON
    vllm_xargs: Raw = request_media.NULL_JSON
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

    path: to find media items, one of `request_media.CONVERSATION_FIELDS`; "" not to look for them.
    """
    try:
        fields = _fields_decoder.decode(data)
        has_extra_params = request_media.starts_with(fields.vllm_xargs, b"{") and (
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
            _decode_number(fields.priority)
            if fields.priority is not request_media.NULL_JSON
            else 0,
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
    return _text_decoder.decode(raw) if request_media.starts_with(raw, b'"') else ""


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
    items = request_media.find_items(path, getattr(fields, request_media.CONVERSATION_FIELDS[path]))
    # Equal bytes are one item, encoded once.
    for position, item in enumerate(items):
        first_positions.setdefault(item, position)
    parsed.media_part_count = len(items)
    parsed.media_items = tuple(first_positions)
    parsed.item_positions = tuple(first_positions.values())
    if parsed.media_items:
        parsed.encoder_fields = {
            name: value
            for name in request_media.PREPARATION_FIELDS[path]
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
