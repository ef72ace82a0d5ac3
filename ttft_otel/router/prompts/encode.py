# SPDX-License-Identifier: Apache-2.0
"""Text to token ids, the beginnings that were seen before from memory; model.py has the text.

A text may be cut after a special token: no token reaches over one. What follows is tokenized as
if it stood alone, so it is only done where trying it at the start gave the same ids.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, Final

PIECE: Final = 2048  # characters at least between two cuts
ROOM: Final = 64 << 20  # bytes of ids kept
EACH: Final = 200  # bytes that a kept piece costs besides
CUTS: Final = 4  # special tokens tried
_TRIES: Final = ("", " ", "a", " a", "\n", "\n\nB", "  x", "é", "\u0301", "7", "'s", "\U0001f600")


class Kept:
    """Ids by the digest of their text, the latest within so many bytes."""

    def __init__(self, room: int = ROOM) -> None:
        self.room, self.used = room, 0
        self._ids: OrderedDict[bytes, array[int]] = OrderedDict()

    def get(self, key: bytes) -> array[int] | None:
        """What was put there, if it still is."""
        found = self._ids.get(key)
        if found is not None:
            self._ids.move_to_end(key)
        return found

    def put(self, key: bytes, ids: array[int]) -> None:
        """Keep it; the longest unused go for it."""
        cost = EACH + ids.itemsize * len(ids)
        if key in self._ids or cost > self.room:
            return
        self._ids[key] = ids
        self.used += cost
        while self.used > self.room:
            _, gone = self._ids.popitem(last=False)
            self.used -= EACH + gone.itemsize * len(gone)


class Encoder:
    """One tokenizer of transformers'; `cuts` are the special tokens after which texts may be cut.

    Only those that the template names are of use.
    """

    def __init__(self, tokenizer: Any, template: str = "", room: int = ROOM) -> None:
        self._tokenizer = tokenizer
        self._fast: Any = self._backend()
        self._kept = Kept(room)
        alone = [token for token in _alone(tokenizer) if token in template]
        self.cuts = tuple(token for token in alone[:CUTS] if self._cuts(token))

    def encode(self, text: str, special: bool) -> tuple[array[int], int]:
        """Its ids, and how many of them were kept; `special` adds what begins and ends a text."""
        if special:
            return self._piece(text, True)
        ids, kept = array("I"), 0
        for piece in self._pieces(text):
            found, known = self._piece(piece, False)
            ids += found
            kept += known
        return ids, kept

    def truncated(self, text: str, special: bool, most: int) -> array[int]:
        """At most so many of its ids, with the special ones kept, as the tokenizer truncates."""
        found = self._slow(text, special, truncation=True, max_length=most)
        if self._fast is not None:
            self._fast.no_truncation()  # it would stay
        return found

    def _piece(self, text: str, special: bool) -> tuple[array[int], int]:
        key = blake2b(text.encode("utf-8"), digest_size=16, key=b"+" if special else b"").digest()
        ids = self._kept.get(key)
        if ids is not None:
            return ids, len(ids)
        ids = self._ids(text, special)
        self._kept.put(key, ids)
        return ids, 0

    def _ids(self, text: str, special: bool) -> array[int]:
        if self._fast is None:
            return self._slow(text, special)
        (found,) = self._fast.encode_batch_fast([text], add_special_tokens=special)
        return array("I", found.ids)

    def _slow(self, text: str, special: bool, **more: Any) -> array[int]:
        found = self._tokenizer(
            text,
            add_special_tokens=special,
            return_attention_mask=False,
            return_token_type_ids=False,
            **more,
        )
        return array("I", found["input_ids"])

    def _backend(self) -> Any:
        """The tokenizer behind it, twice as fast; None where it says something else, or is none."""
        fast: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if not hasattr(fast, "encode_batch_fast"):
            return None
        for text in _TRIES:
            for special in (True, False):
                slow = self._slow(text, special)
                (found,) = fast.encode_batch_fast([text], add_special_tokens=special)
                if array("I", found.ids) != slow:
                    return None
        return fast

    def _pieces(self, text: str) -> Iterator[str]:
        """Cuts depend on what is before them alone, so equal beginnings have equal pieces."""
        start = 0
        while self.cuts and len(text) - start > PIECE:
            ends = [
                at + len(token)
                for token in self.cuts
                if (at := text.find(token, start + PIECE)) >= 0
            ]
            if not ends or min(ends) >= len(text):
                break
            yield text[start : min(ends)]
            start = min(ends)
        yield text[start:]

    def _cuts(self, token: str) -> bool:
        """Whether cutting there has been seen to change nothing."""
        for left in _TRIES:
            for right in _TRIES:
                first = self._ids(left + token, False)
                if self._ids(left + token + right, False) != first + self._ids(right, False):
                    return False
        return True


def _alone(tokenizer: Any) -> list[str]:
    """Special tokens that take no blank beside them and share no beginning or end with another one."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = [str(each) for each in added]
    return [
        str(each)
        for each in added
        if each.special
        and not (each.normalized or each.lstrip or each.rstrip or each.single_word)
        and not any(_overlap(str(each), other) for other in names if other != str(each))
    ]


def _overlap(one: str, other: str) -> bool:
    if one in other or other in one:
        return True
    return any(
        one.endswith(other[:size]) or other.endswith(one[:size])
        for size in range(1, min(len(one), len(other)))
    )
