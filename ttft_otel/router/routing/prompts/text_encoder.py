# SPDX-License-Identifier: Apache-2.0
"""Tokenize text, taking prefixes that were seen before from a cache; model_tokenizer.py uses it.

A text can be cut after a special token, since no token spans it. The rest is tokenized as if it stood
alone, which not every tokenizer does equally; it is tested once at the start.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
from itertools import product
from typing import Any, Final

MIN_PIECE_CHARS: Final = 2048  # minimum characters per piece
MAX_CACHE_BYTES: Final = 64 << 20  # bytes of cached token ids
ENTRY_OVERHEAD_BYTES: Final = 200  # bytes per cached piece besides its ids
MAX_CUT_TOKENS: Final = 4  # special tokens tried as cuts
# Texts whose tokens depend on their neighbours in some tokenizers.
_PROBE_TEXTS: Final = ("", " ", "a", " a", "\n", "\n\nB", "  x", "é", "\u0301", "7", "'s", "😀")


class TextEncoder:
    """Tokenizes with one transformers tokenizer.

    Args:
        tokenizer: of transformers.
        template: only special tokens that it contains are considered as cuts.
        cache_bytes: limit of the cache, from which the least recently used pieces are evicted.
    """

    def __init__(
        self, tokenizer: Any, template: str = "", cache_bytes: int = MAX_CACHE_BYTES
    ) -> None:
        self._tokenizer = tokenizer
        self._fast_backend: Any = self._find_fast_backend()
        self._ids_by_digest: OrderedDict[bytes, array[int]] = OrderedDict()
        self._max_bytes = cache_bytes
        self.used_bytes = 0
        candidates = [token for token in _find_cut_tokens(tokenizer) if token in template]
        #: Special tokens after which a text can be cut without changing its tokens.
        self.cut_tokens = tuple(filter(self._is_safe_cut, candidates[:MAX_CUT_TOKENS]))

    def encode_text(self, text: str, add_special: bool) -> tuple[array[int], int]:
        """Token ids of `text`, and how many came from the cache.

        add_special: add special tokens at the ends; such a text is not cut.
        """
        # Special tokens stand at the ends of the whole text, not of its pieces.
        if add_special:
            return self._encode_piece(text, True)
        ids, cached_count = array("I"), 0
        for piece in self._split_pieces(text):
            piece_ids, piece_cached = self._encode_piece(piece, False)
            ids += piece_ids
            cached_count += piece_cached
        return ids, cached_count

    def encode_truncated(self, text: str, add_special: bool, max_tokens: int) -> array[int]:
        """Token ids of `text`, truncated by the tokenizer to `max_tokens`, special tokens included."""
        ids = self._tokenize_slowly(text, add_special, truncation=True, max_length=max_tokens)
        if self._fast_backend is not None:
            self._fast_backend.no_truncation()  # the setting would persist
        return ids

    def _encode_piece(self, text: str, add_special: bool) -> tuple[array[int], int]:
        # A keyed digest, so that a text has two entries: with special tokens and without.
        key = blake2b(text.encode(), digest_size=16, key=b"+" if add_special else b"").digest()
        ids = self._ids_by_digest.get(key)
        if ids is not None:
            self._ids_by_digest.move_to_end(key)
            return ids, len(ids)
        ids = self._tokenize_fast(text, add_special)
        # A piece that is larger than the cache would push out everything and then itself.
        if _count_entry_bytes(ids) <= self._max_bytes:
            self._ids_by_digest[key] = ids
            self.used_bytes += _count_entry_bytes(ids)
        while self.used_bytes > self._max_bytes:
            self.used_bytes -= _count_entry_bytes(self._ids_by_digest.popitem(last=False)[1])
        return ids, 0

    def _tokenize_fast(self, text: str, add_special: bool) -> array[int]:
        if self._fast_backend is None:
            return self._tokenize_slowly(text, add_special)
        # The batch form only: it computes no offsets, which nobody needs here.
        (encoding,) = self._fast_backend.encode_batch_fast([text], add_special_tokens=add_special)
        return array("I", encoding.ids)

    def _tokenize_slowly(self, text: str, add_special: bool, **options: Any) -> array[int]:
        encoding = self._tokenizer(
            text,
            add_special_tokens=add_special,
            return_attention_mask=False,
            return_token_type_ids=False,
            **options,
        )
        return array("I", encoding["input_ids"])

    def _find_fast_backend(self) -> Any:
        """The Rust tokenizer behind it, twice as fast; None if there is none or its ids differ."""
        backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if not hasattr(backend, "encode_batch_fast"):
            return None
        for text, add_special in product(_PROBE_TEXTS, (True, False)):
            slow = self._tokenize_slowly(text, add_special)
            (found,) = backend.encode_batch_fast([text], add_special_tokens=add_special)
            if array("I", found.ids) != slow:
                return None
        return backend

    def _split_pieces(self, text: str) -> Iterator[str]:
        """Split `text`; a cut depends only on the text before it, so equal prefixes have equal pieces."""
        start = 0
        while self.cut_tokens and len(text) - start > MIN_PIECE_CHARS:
            ends = [
                found_at + len(token)
                for token in self.cut_tokens
                if (found_at := text.find(token, start + MIN_PIECE_CHARS)) >= 0
            ]
            if not ends or min(ends) >= len(text):
                break
            yield text[start : min(ends)]
            start = min(ends)
        yield text[start:]

    def _is_safe_cut(self, token: str) -> bool:
        """Whether cutting after `token` leaves the ids of all probe texts unchanged."""

        def encode(text: str) -> array[int]:
            return self._tokenize_fast(text, False)

        return all(
            encode(left + token + right) == encode(left + token) + encode(right)
            for left, right in product(_PROBE_TEXTS, _PROBE_TEXTS)
        )


def _count_entry_bytes(ids: array[int]) -> int:
    return ENTRY_OVERHEAD_BYTES + ids.itemsize * len(ids)


def _find_cut_tokens(tokenizer: Any) -> list[str]:
    """Special tokens that absorb no whitespace around them and do not overlap with another token."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    all_tokens = {str(each) for each in added}
    return [
        str(each)
        for each in added
        if each.special
        and not (each.normalized or each.lstrip or each.rstrip or each.single_word)
        and not any(_do_overlap(str(each), other) for other in all_tokens - {str(each)})
    ]


def _do_overlap(first: str, second: str) -> bool:
    return (
        first in second
        or second in first
        or any(
            first.endswith(second[:size]) or second.endswith(first[:size])
            for size in range(1, min(len(first), len(second)))
        )
    )
