# SPDX-License-Identifier: Apache-2.0
"""How many placeholder tokens a picture becomes, by its size; model.py puts them into the prompt.

Exact where the model's processor says it, as for Qwen's; without it, or for what has no size here
(a web address, sound, film), the mean of those counted so far or a guess.
"""

from __future__ import annotations

import base64
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from io import BytesIO
from typing import Any, Final

from ttft_otel.router.policies.blocks import extra
from ttft_otel.router.prompts.chat import Item

GUESSES: Final = {"image": 576, "audio": 750, "video": 4096}
MOST: Final = 4096  # items whose count is kept
_IDS: Final = {
    "image": ("image_token_id", "image_token_index"),
    "video": ("video_token_id", "video_token_index"),
    "audio": ("audio_token_id", "audio_token_index"),
}
# What vLLM writes for an item where the template takes text; other models have the item's token alone.
_FRAMED: Final = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_TURNED: Final = (5, 6, 7, 8)  # EXIF orientations that swap the sides
_ORIENTATION: Final = 0x0112


@dataclass(frozen=True, slots=True)
class Span:
    """An item's placeholders in the prompt, and what stands for its content."""

    start: int
    length: int
    key: str


class Counter:
    """One model's: `processor` and `config` as its files have them, None and empty without."""

    def __init__(self, processor: Any, config: dict[str, Any]) -> None:
        self._processor = processor
        self._config = config
        self._known: OrderedDict[str, int] = OrderedDict()
        self._sum = self._number = 0

    def token(self, modality: str) -> int | None:
        """The id that stands for one item until it is expanded."""
        for name in _IDS[modality]:
            found = self._config.get(name, getattr(self._processor, name, None))
            if isinstance(found, int):
                return found
        return None

    def text(self, modality: str) -> str:
        """The same as text; empty where the processor has none."""
        found = str(getattr(self._processor, f"{modality}_token", None) or "")
        if found and str(self._config.get("model_type")).startswith(_FRAMED):
            return f"<|vision_start|>{found}<|vision_end|>"
        return found

    def count(self, item: Item) -> tuple[int, str]:
        """Its placeholders, and a key of its content."""
        key = item.uuid or _digest(item.data or "")
        known = _digest(key)  # as long as a client likes
        found = self._known.get(known)
        if found is None:
            found = self._exact(item) if item.modality == "image" else None
            if found is None:
                return self._estimate(item.modality), key
            self._known[known] = found
            self._sum, self._number = self._sum + found, self._number + 1
            if len(self._known) > MOST:
                self._known.popitem(last=False)
        return found, key

    def _estimate(self, modality: str) -> int:
        if modality == "image" and self._number:
            return round(self._sum / self._number)
        return GUESSES[modality]

    def _exact(self, item: Item) -> int | None:
        size = dimensions(item.data or "")
        if size is None or self._processor is None:
            return None
        try:
            counted = self._processor._get_num_multimodal_tokens(image_sizes=[size])
            return int(counted.num_image_tokens[0])
        except Exception:  # noqa: BLE001 - a processor that cannot say it is one that we do without
            return None


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()


def dimensions(url: str) -> tuple[int, int] | None:
    """Height and width of a data: URL's picture, its pixels not decoded; None for anything else."""
    if not url.startswith("data:"):
        return None
    try:
        from PIL import Image

        with Image.open(BytesIO(base64.b64decode(url.partition(",")[2]))) as picture:
            width, height = picture.size
            # PNG's would be looked for behind the pixels
            turned = "exif" in picture.info and picture.getexif().get(_ORIENTATION) in _TURNED
    except Exception:  # noqa: BLE001 - of many formats; the engine says what is wrong with it
        return None
    return (width, height) if turned else (height, width)


def expand(
    ids: array[int], items: Sequence[tuple[int | None, int, str]]
) -> tuple[array[int], list[Span]] | None:
    """The prompt with each item's placeholder repeated; None when they do not fit together.

    items: token, count and key of each, in order.
    """
    found, spans, at = array("I"), [], 0
    for token, count, key in items:
        if token is None:
            return None
        try:
            place = ids.index(token, at)
        except ValueError:
            return None
        found += ids[at:place]
        spans.append(Span(len(found), count, key))
        found += array("I", (token,)) * count
        at = place + 1
    return found + ids[at:], spans


def extras(
    spans: Sequence[Span], size: int, adapter: str = "", salt: str = "", blocks: int = 0
) -> dict[int, bytes]:
    """What each block's number takes in besides tokens, in vLLM's order: adapter, items, salt."""
    keys: dict[int, list[Any]] = {}
    if adapter:
        keys = {at: [adapter] for at in range(blocks)}
    for span in spans:
        for at in range(span.start // size, (span.start + span.length - 1) // size + 1):
            keys.setdefault(at, []).append((span.key, span.start - at * size))
    if salt:
        keys.setdefault(0, []).append(salt)
    return {at: extra(each) for at, each in keys.items()}
