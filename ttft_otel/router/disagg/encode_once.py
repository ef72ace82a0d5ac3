# SPDX-License-Identifier: Apache-2.0
"""Replace media items by references to their encodings, in the request of the leg that prefills.

endpoint.py calls it once all encoders have responded: the bytes of an item, their transport and their
preprocessing are no longer needed then. Facts are those of vLLM 0.32: a consumer of
encodings takes a chat part of type `image_embeds` (`audio_embeds`, `video_embeds`) without a tensor
(config/vllm.py, _resolve_mm_embedding_inputs), whose metadata say how many placeholders the prompt
needs (renderers/chat_utils.py, _get_embeds_data) and whose `uuid` is its hash
(multimodal/processing/inputs.py, get_mm_hashes). Encoders announce both in `ec_transfer_params`.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from ttft_otel.model import timing
from ttft_otel.model.endpoints import CHAT_PATH
from ttft_otel.model.stages import DECODE
from ttft_otel.router.disagg.ec_params import TransferParams
from ttft_otel.router.disagg.request_plan import LegPlan
from ttft_otel.router.errors import MediaRequired
from ttft_otel.router.timeline import Attempt
from ttft_otel.router.types import JSON_ERRORS, RoutingRequest
from ttft_otel.tracing import clock

# What a part becomes, by its own type (chat_utils.py, MM_PARSER_MAP).
_EMBEDS_TYPES: Final[Mapping[str, str]] = {
    "image_url": "image_embeds",
    "audio_url": "audio_embeds",
    "input_audio": "audio_embeds",
    "video_url": "video_embeds",
}
# Parts without media (chat_utils.py, TEXT_PART_TYPES). Any other kind may hold raw media that no
# encoder was asked about, and vLLM refuses raw and encoded media of one modality side by side.
_TEXT_PART_TYPES: Final = ("text", "input_text", "output_text", "refusal", "thinking")
# With either of these vLLM hashes a `uuid` together with them: it is not the item's hash then.
_HASHED_FIELDS: Final = ("mm_processor_kwargs", "media_io_kwargs")
_HASH_PATTERN: Final = re.compile(r"[0-9a-fA-F]{8,256}")
_NULL_JSON: Final = Raw(b"null")

_fields_decoder: Final = msgspec.json.Decoder(dict[str, Raw])
_list_decoder: Final = msgspec.json.Decoder(list[Raw])
_any_decoder: Final = msgspec.json.Decoder()
LOG_INTERVAL_US: Final = 60_000_000  # microseconds: at most one line in that time
MAX_LOGGED_INSTANCES: Final = 4  # instances in one line, those with the most items
log: Final = logging.getLogger("ttft_otel")


class _AnnouncedEntry(msgspec.Struct):
    """The fields of an entry of `ec_transfer_params` that are needed."""

    metadata: dict[str, Any] = {}
    peer_host: str = ""


_entry_decoder: Final = msgspec.json.Decoder(_AnnouncedEntry)


def omit_media(
    request: RoutingRequest, leg_plan: LegPlan | None, path: str, transfer_params: TransferParams
) -> tuple[RoutingRequest, str]:
    """The request with references in place of its media, and ""; else as it is, and the reason.

    With prefill and decode apart the plan takes them for the prefill instance; the decode request keeps the
    media, since a decode instance that computes the prompt itself, because the prefill instance's blocks
    are gone, must be able to.
    """
    try:
        # Only messages of a chat have parts that refer to encodings.
        if path != CHAT_PATH:
            raise MediaRequired("path")
        if request.leg == DECODE:  # alone, and it need not be a consumer of encodings
            raise MediaRequired("decode")
        if leg_plan is not None and len(leg_plan.legs) > 1:
            leg_plan.media_references = replace_parts(leg_plan.fields, transfer_params)
            return request, ""
        fields = _fields_decoder.decode(request.body)
        fields["messages"] = replace_parts(fields, transfer_params)
        return replace(request, body=msgspec.json.encode(fields)), ""
    except MediaRequired as error:
        return request, error.reason
    except JSON_ERRORS:
        return request, "body"


def replace_parts(fields: Mapping[str, Raw], transfer_params: TransferParams) -> Raw:
    """A chat request's `messages` with a reference for each media item.

    All items or none: vLLM does not take both kinds together. Raises MediaRequired.
    """
    for name in _HASHED_FIELDS:
        if bytes(fields.get(name, _NULL_JSON)) != b"null":
            raise MediaRequired(name)
    metadata_keys: dict[str, frozenset[str]] = {}
    # Each distinct item once, though a conversation may repeat it.
    references = {
        item: _make_reference(item, hashes, transfer_params, metadata_keys)
        for item, hashes in transfer_params.hashes_by_item.items()
    }
    messages = _list_decoder.decode(fields.get("messages", _NULL_JSON))
    return Raw(msgspec.json.encode([_replace_in_message(each, references) for each in messages]))


def _make_reference(
    item: bytes,
    hashes: tuple[str, ...],
    transfer_params: TransferParams,
    metadata_keys: dict[str, frozenset[str]],
) -> Raw:
    """The content part that refers to an item; `metadata_keys`: names of its metadata by part type."""
    # Of several hashes it is not known which one is the item's.
    if len(hashes) != 1:
        raise MediaRequired("answer")
    mm_hash = hashes[0]
    # With a LoRA adapter's name before it, or a client's own.
    if not _HASH_PATTERN.fullmatch(mm_hash):
        raise MediaRequired("hash")
    try:
        entry = _entry_decoder.decode(transfer_params.get_entry(mm_hash))
    except msgspec.ValidationError as error:
        raise MediaRequired("metadata") from error
    # Nowhere to fetch it from, and the consumer would have no media to encode itself.
    if not entry.peer_host:
        raise MediaRequired("address")
    if not entry.metadata or not all(map(_is_number_list, entry.metadata.values())):
        raise MediaRequired("metadata")
    part = _fields_decoder.decode(item)
    kinds = [kind for kind in _EMBEDS_TYPES if kind in part]
    if len(kinds) != 1:
        raise MediaRequired("part")
    kind = _EMBEDS_TYPES[kinds[0]]
    # of one request vLLM merges all items of a modality, which must have the same keys
    if metadata_keys.setdefault(kind, frozenset(entry.metadata)) != frozenset(entry.metadata):
        raise MediaRequired("metadata")
    own_fields = {"type": kind, kind: entry.metadata, "uuid": mm_hash}
    kept_fields = {
        name: raw for name, raw in part.items() if name not in own_fields and name != kinds[0]
    }
    return Raw(msgspec.json.encode({**own_fields, **kept_fields}))


def _replace_in_message(raw: Raw, references: Mapping[bytes, Raw]) -> Raw:
    """A message with its media replaced by references; unmodified bytes if it has none."""
    message = _fields_decoder.decode(raw)
    content = message.get("content", _NULL_JSON)
    # A text, or null beside tool calls.
    if not bytes(content).startswith(b"["):
        return raw
    has_media = False
    parts = _list_decoder.decode(content)
    for position, part in enumerate(parts):
        reference = references.get(bytes(part))
        if reference is not None:
            parts[position] = reference
            has_media = True
        elif not _is_text(part):
            raise MediaRequired("part")
    # As it came: a message without media must not change by a byte.
    if not has_media:
        return raw
    return Raw(msgspec.json.encode({**message, "content": Raw(msgspec.json.encode(parts))}))


def _is_text(part: Raw) -> bool:
    """Whether vLLM treats this part as text only; with a `uuid`, other keys than the type decide."""
    if not bytes(part).startswith(b"{"):
        return bytes(part).startswith(b'"')
    fields = _fields_decoder.decode(part)
    return (
        "uuid" not in fields
        and _any_decoder.decode(fields.get("type", _NULL_JSON)) in _TEXT_PART_TYPES
    )


def _is_number_list(value: object) -> bool:
    """Whether this is valid metadata for vLLM: a list of numbers, and here not empty."""
    # type(), since True is an int to isinstance().
    return (
        isinstance(value, list) and bool(value) and all(type(one) in (int, float) for one in value)
    )


class RecomputedMediaLog:
    """The items counted since the last log line."""

    def __init__(self) -> None:
        self._items_by_url: Counter[str] = Counter()  # by the instance's URL
        self._request_count = 0
        self._logged_us: int | None = None

    def record_attempt(self, attempt: Attempt) -> None:
        """Count items that the instance of `attempt` encoded again; usually none."""
        # Instances that are not traced, or have no encoder cache, report nothing.
        if not timing.may_count_media(attempt.timing_header):
            return
        server_timing = attempt.read_server_timing()
        if server_timing is None or server_timing.ec is None or not server_timing.ec.recomputed:
            return
        ec = server_timing.ec
        instance = attempt.instance
        instance.recomputed_items += ec.recomputed
        self._items_by_url[instance.url] += ec.recomputed
        self._request_count += 1
        now_us = clock.now_us()
        if self._logged_us is None or now_us - self._logged_us >= LOG_INTERVAL_US:
            self._logged_us = now_us
            self._log_recomputed()

    def _log_recomputed(self) -> None:
        most_common = self._items_by_url.most_common(MAX_LOGGED_INSTANCES)
        instances = ", ".join(f"{url} ({number})" for url, number in most_common)
        other_count = len(self._items_by_url) - len(most_common)
        log.warning(
            "ttft-otel: media items encoded again although an encoder had encoded them: %d, in %d"
            " requests since the last such line, by %s%s. Possible causes: encoder responses without"
            " ec_transfer_params, different EC connectors on encoder and consumer, an EC port of the"
            " encoder that the consumer cannot reach, or a cache (ec_cpu_bytes) too small for the"
            " requests in flight. What to check: docs/router.md, 'Encoder-cache parameters'.",
            self._items_by_url.total(),
            self._request_count,
            instances,
            f" and {other_count} more" if other_count else "",
        )
        self._items_by_url.clear()
        self._request_count = 0
