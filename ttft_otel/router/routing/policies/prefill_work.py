# SPDX-License-Identifier: Apache-2.0
"""The work of a prefill, from its token counts; pending_load.py sums it, prefill_model.py times it."""

from __future__ import annotations

from typing import NamedTuple


# Integers, so that sums of pending work return to exactly zero.
class PrefillWork(NamedTuple):
    """Prompt tokens to compute (linear cost), and the (query, key) pairs of their causal attention."""

    tokens_to_compute: int
    pairs: int


def count_pairs(prompt_tokens: int, cached_tokens: int) -> int:
    """Attention pairs left to compute for a prompt whose first `cached_tokens` are cached.

    Token k attends to k tokens, so this is the sum of cached_tokens + 1 .. `prompt_tokens`, a trapezoid.
    """
    # Always even, since the factors differ in parity: // only keeps it an integer.
    return (cached_tokens + 1 + prompt_tokens) * (prompt_tokens - cached_tokens) // 2


def compute_work(prompt_tokens: int, cached_tokens: int) -> PrefillWork:
    """The work of a prompt of `prompt_tokens`, of which the first `cached_tokens` are cached."""
    return PrefillWork(prompt_tokens - cached_tokens, count_pairs(prompt_tokens, cached_tokens))
