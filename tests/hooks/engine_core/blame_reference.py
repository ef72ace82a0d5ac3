# SPDX-License-Identifier: Apache-2.0
"""Who held a waiting request, worked out from the complete list of steps; the truth of held_steps.py.

The steps come from tests/hooks/real_scheduler.py's driver. Nothing here is shared with the hooks: every
step's time is divided by its tokens and embeddings, as fractions, and added up over a request's wait. A
step's turnaround, from its end to the next one's begin, is divided as the step itself.
"""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from typing import Any

Shares = dict[tuple[str, str], Fraction]  # (request ID, kind) -> microseconds


def list_segments(steps: list[Any]) -> list[tuple[int, int, Any]]:
    """(begin, end, step) of each step that has ended and of its turnaround, in their order.

    A step begins when the one before it has ended. A turnaround ends when the next step is scheduled; there
    is none with a pause in it.
    """
    segments: list[tuple[int, int, Any]] = []
    last, before = 0, None
    for step in steps:
        if step.end:
            if before is not None and step.scheduled > last and not step.resumed:
                segments.append((last, step.scheduled, before))
            segments.append((max(step.scheduled, last), step.end, step))
            last, before = step.end, step
    return segments


def skip_turnaround(steps: list[Any], start: int) -> int:
    """From when on a request that came at `start` can have been held: not in a turnaround that went on."""
    for low, high, step in list_segments(steps):
        if low == step.end <= start <= high:
            return high
    return start


def count_steps(steps: list[Any], start: int, end: int) -> int:
    """How many steps ran in [start, end]."""
    return sum(low < end and high > start for low, high, _ in list_segments(steps))


def divide_step(step: Any) -> Shares:
    """Each request's share of the step; they add up to 1, or to 0 for a step without work."""
    if step.is_dummy:
        return {("", "other_rank"): Fraction(1)}
    tokens = step.output.num_scheduled_tokens
    total = sum(tokens.values()) + sum(step.embeddings.values())
    shares: Shares = {}
    for request_id, count in tokens.items():
        shares[request_id, "prefill" if count > 1 else "decode"] = Fraction(count, total)
    for request_id, count in step.embeddings.items():
        shares[request_id, "encoder"] = Fraction(count, total)
    return shares


def sum_shares(steps: list[Any], start: int, end: int) -> Shares:
    """Microseconds of each request and kind in [start, end], for a request that came at `start`."""
    sums: Shares = defaultdict(Fraction)
    start = skip_turnaround(steps, start)
    for low, high, step in list_segments(steps):
        length = min(high, end) - max(low, start)
        if length > 0:
            for key, share in divide_step(step).items():
                sums[key] += length * share
    return sums


def sum_kinds(steps: list[Any], own_id: str, start: int, end: int) -> dict[str, Fraction]:
    """Microseconds of each kind of work in [start, end], for the request `own_id`."""
    kinds: dict[str, Fraction] = defaultdict(Fraction)
    for (request_id, kind), length in sum_shares(steps, start, end).items():
        kinds["own" if request_id == own_id else kind] += length
    kinds["idle"] = end - start - sum(kinds.values(), Fraction(0))
    return kinds


def list_holders(steps: list[Any], own_id: str, start: int, end: int) -> list[Fraction]:
    """The shares of all holders, the largest first."""
    shares = sum_shares(steps, start, end)
    return sorted([us for key, us in shares.items() if key[0] not in ("", own_id)], reverse=True)
