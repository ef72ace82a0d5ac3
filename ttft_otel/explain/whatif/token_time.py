# SPDX-License-Identifier: Apache-2.0
"""The time per output token of a recorded window, and of its replays: the price of many changes. Pure.

Of requests whose servers measured it; what_if.py makes figures of it as of the TTFT. It is the mean of a
request: single tokens that came late are not told apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy

from ttft_otel.explain.whatif.fleet_model import FleetModel
from ttft_otel.explain.whatif.replay_facts import ReplayRequest
from ttft_otel.explain.whatif.what_if_figures import TOKEN_TIME, Array

MIN_TIMED: Final = 30  # requests, below which nothing is said
MAX_TOKEN_ERROR: Final = 0.3  # of p50 and p99 of the window itself


def list_timed(requests: Sequence[ReplayRequest]) -> list[int]:
    """The numbers of the requests that tell it; none where they are too few."""
    timed = [number for number, each in enumerate(requests) if each.main.token_us]
    return timed if len(timed) >= MIN_TIMED else []


def compare_mean(
    requests: Sequence[ReplayRequest], model: FleetModel, timed: Sequence[int]
) -> float:
    """The mean recorded time per output token, as a multiple of the replayed one."""
    replayed = add_replayed({}, model, timed)
    if TOKEN_TIME not in replayed:
        return 1.0
    recorded = add_recorded({}, requests, timed)
    return float(recorded[TOKEN_TIME].mean() / max(replayed[TOKEN_TIME].mean(), 1.0))


def add_recorded(
    columns: dict[str, Array], requests: Sequence[ReplayRequest], timed: Sequence[int]
) -> dict[str, Array]:
    """The stages' `columns`, and the recorded time per output token."""
    if timed:
        columns[TOKEN_TIME] = numpy.array([requests[each].main.token_us for each in timed], float)
    return columns


def add_replayed(
    columns: dict[str, Array], model: FleetModel, timed: Sequence[int]
) -> dict[str, Array]:
    """The stages' `columns`, and the time per output token of a replay."""
    found = []
    for each in timed:
        prompt = model.replayed[each].prompt
        if prompt is not None and prompt.decode_steps > 0:
            found.append((prompt.last_token - prompt.first_token) / prompt.decode_steps)
    if found:
        columns[TOKEN_TIME] = numpy.array(found, float)
    return columns


def is_known(errors: Mapping[str, Sequence[float]]) -> bool:
    """Whether the replay of the unchanged window has it right. errors: by figure and quantile."""
    found = errors.get(TOKEN_TIME)
    return found is not None and max(abs(found[0]), abs(found[-1])) <= MAX_TOKEN_ERROR


def describe_miss(errors: Sequence[float]) -> str:
    """A sentence for a replay that has it wrong. errors: of p50, p95, p99."""
    worst = max(errors[0], errors[-1], key=abs)
    return (
        f"The model misses the recorded time per output token by {worst:+.0%}: it is not predicted."
    )
