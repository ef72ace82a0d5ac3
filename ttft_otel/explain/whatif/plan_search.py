# SPDX-License-Identifier: Apache-2.0
"""Search the cheapest plan that holds targets, for `whatif --autotune`. Pure; needs numpy.

Input: a Fleet of what_if.py and Targets. Output: its Prediction for commands/answers.py. The cheapest
has the fewest instances, then the fewest changed settings. One replay without noise tells which plans may do;
the first of these that holds in most replays with noise is the answer.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Final

import numpy

from ttft_otel.explain.whatif.planned_change import PlannedChange
from ttft_otel.explain.whatif.what_if import (
    LEVEL,
    TOKEN_TIME,
    TTFT,
    Array,
    Fleet,
    Prediction,
    Targets,
    collect,
    predict_fleet,
    replay_plainly,
)
from ttft_otel.explain.window.request_facts import CannotTellError

MAX_MORE: Final = 4  # instances
MAX_REPLAYS: Final = 60  # without noise
MAX_CHECKED: Final = 4  # plans that are replayed with noise
# Of max_num_seqs and max_num_batched_tokens, fewer changes first; what-if refuses what is further away.
FACTORS: Final = (
    *((1, 1), (2, 1), (0.5, 1), (4, 1), (1, 2), (1, 0.5), (1, 4)),
    *((2, 2), (2, 0.5), (0.5, 2), (0.5, 0.5)),
)
NAMES: Final = {TTFT: "ttft", TOKEN_TIME: "tpot"}

TARGET_PATTERN: Final = re.compile(r"(ttft|tpot)_p(50|95|99)=(\d+(?:\.\d+)?)")


def parse_targets(text: str) -> Targets:
    """`ttft_p99=500,tpot_p99=50`. Raises ValueError with a sentence."""
    found = [TARGET_PATTERN.fullmatch(each.strip()) for each in text.split(",")]
    names = {short: name for name, short in NAMES.items()}
    targets = {
        (names[each[1]], int(each[2]) / 100): float(each[3]) for each in found if each is not None
    }
    if None in found or not all(targets.values()):
        raise ValueError(f"{text!r} is not a target: write ttft_p99=500,tpot_p99=50 (milliseconds)")
    return targets


def describe_targets(targets: Targets) -> str:
    """`ttft_p99 <= 500 ms`, and so on."""
    return ", ".join(
        f"{NAMES[name]}_p{100 * share:g} <= {limit:g} ms"
        for (name, share), limit in targets.items()
    )


def _list_plans(fleet: Fleet, base: PlannedChange, count: int) -> Iterator[PlannedChange]:
    """The plans with so many instances, the cheapest first."""
    limits = next(iter(fleet.limits.values()))
    for places, tokens in FACTORS:
        yield replace(
            base,
            instances=count - len(fleet.limits),
            max_num_seqs=round(places * limits.max_num_seqs) if places != 1 else 0,
            max_batched_tokens=round(tokens * limits.max_batched_tokens) if tokens != 1 else 0,
        )


def _measure(targets: Targets, columns: Mapping[str, Array]) -> float:
    """The largest figure as a multiple of its target: up to 1 they are held."""
    return max(
        float(numpy.quantile(columns[name], share)) / (1000 * limit)
        for (name, share), limit in targets.items()
    )


def count_replays(repetitions: int) -> int:
    """The most that search_plan() makes."""
    return MAX_REPLAYS + MAX_CHECKED * repetitions


def search_plan(
    fleet: Fleet,
    targets: Targets,
    base: PlannedChange,
    repetitions: int,
    track: Callable[[int], None] = lambda _: None,
) -> Prediction:
    """The cheapest plan. Raises CannotTellError where none holds the targets.

    base: what changes in any case, such as the rate. track: called with 1 after each replay, at most
    count_replays() times.
    """
    if any(name == TOKEN_TIME for name, _ in targets) and not fleet.timed:
        raise CannotTellError("the spans do not tell the time per output token")
    excesses: dict[PlannedChange, float] = {}  # without noise; each plan is replayed once

    def list_holding(count: int) -> Iterator[PlannedChange]:
        """The plans with so many instances that may hold the targets, the cheapest first."""
        for change in _list_plans(fleet, base, count):
            if change not in excesses and len(excesses) < MAX_REPLAYS:
                track(1)
                try:
                    model, _ = replay_plainly(fleet, change)
                    excesses[change] = _measure(targets, collect(fleet, model))
                except CannotTellError:
                    excesses[change] = float("inf")
            if excesses.get(change, 2.0) <= 1:
                yield change

    recorded = len(fleet.limits)
    counts = range(1, recorded + MAX_MORE + 1)
    # More instances are never worse: the first that may do is found by halving.
    first = bisect_left(counts, True, key=lambda count: any(list_holding(count)))
    holding = (change for count in counts[first:] for change in list_holding(count))
    for change in islice(holding, MAX_CHECKED):
        answer = predict_fleet(fleet, change, repetitions, track=track)
        held = sum(_measure(targets, each) <= 1 for each in answer.changed)
        if held >= LEVEL * len(answer.changed):
            return replace(answer, targets=targets, held=held, tried=len(excesses))
    nearest = min(excesses, key=lambda each: excesses[each])
    raise CannotTellError(
        f"none of {len(excesses)} plans with up to {counts[-1]} instances holds "
        f"{describe_targets(targets)} in {LEVEL:.0%} of its replays; the nearest is "
        f"{describe_plan(nearest, recorded)}, at {excesses[nearest]:.0%} of the target"
    )


def describe_plan(change: PlannedChange, recorded: int) -> str:
    """`3 instances with --max-num-seqs 64`. recorded: instances of the window."""
    count, flags = recorded + change.instances, " ".join(list_flags(change))
    return f"{count} instance{'s' * (count > 1)}" + (f" with {flags}" if flags else "")


def list_flags(change: PlannedChange) -> list[str]:
    """The flags of `vllm serve`."""
    return [
        f"{flag} {value}"
        for flag, value in (
            ("--max-num-seqs", change.max_num_seqs),
            ("--max-num-batched-tokens", change.max_batched_tokens),
        )
        if value
    ]
