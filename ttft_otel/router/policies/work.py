# SPDX-License-Identifier: Apache-2.0
"""What a prefill is made of, from its token counts; accounts and models add it up."""

from __future__ import annotations

from typing import NamedTuple


class Work(NamedTuple):
    """Prompt tokens to compute, and the (query, key) pairs of their causal attention."""

    fresh: int
    pairs: int


def trapezoid(tokens: int, cached: int) -> int:
    """Pairs that a prompt of so many tokens still needs when its first `cached` ones are there.

    The sum of cached + 1 .. tokens: token k attends to k tokens.
    """
    return (cached + 1 + tokens) * (tokens - cached) // 2


def work(tokens: int, cached: int) -> Work:
    """The work of one prompt."""
    return Work(tokens - cached, trapezoid(tokens, cached))
