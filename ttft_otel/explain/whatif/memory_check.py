# SPDX-License-Identifier: Apache-2.0
"""Whether the KV cache of a recorded window is understood, and what a prediction says of it. Pure.

what_if.py asks after its first replay. Blocks that requests share, of prefixes that are cached, are in no
trace: where the replay has too few of them and the recorded window had enough, they are taken as
sufficient, and changes that would need more memory are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ttft_otel.explain.whatif.engine_parts import EngineLimits
from ttft_otel.explain.whatif.fleet_model import FleetModel
from ttft_otel.explain.whatif.replay_facts import ReplayRequest
from ttft_otel.explain.whatif.window_check import NOTABLE_EXTRAPOLATION, CannotTellError

MAX_BLOCK_WAIT: Final = 0.05  # share of all waiting that is for KV blocks, without a model of them
MAX_PREEMPTED: Final = 0.01  # share of preempted requests, likewise
MAX_BLOCK_ERROR: Final = 0.2  # of that share, as recorded to as replayed


def measure_recorded(requests: Sequence[ReplayRequest]) -> tuple[float, float]:
    """The shares of all waiting that was for KV blocks, and of requests that were preempted."""
    waited = sum(sum(each.main.reasons.values()) for each in requests)
    for_blocks = sum(each.main.reasons.get("kv_blocks", 0) for each in requests)
    preempted = sum(each.main.preemptions > 0 for each in requests)
    return for_blocks / max(waited, 1), preempted / len(requests)


def measure_replayed(model: FleetModel) -> tuple[float, float]:
    """The same of a replay."""
    prompts = [each.prompt for each in model.replayed if each.prompt is not None]
    waited = sum(each.queue for each in prompts)
    blocked = sum(each.blocked_us for each in model.engines)
    preempted = sum(each.preemptions > 0 for each in prompts)
    return min(blocked / max(waited, 1), 1.0), preempted / max(len(prompts), 1)


def is_scarce(shares: tuple[float, float]) -> bool:
    """Whether memory was waited for so much that it cannot be left out."""
    return shares[0] > MAX_BLOCK_WAIT or shares[1] > MAX_PREEMPTED


def check_sizes(requests: Sequence[ReplayRequest], limits: Mapping[str, EngineLimits]) -> None:
    """Refuse scarce memory of unknown size, and prompts that are larger than what is told."""
    if is_scarce(measure_recorded(requests)) and not all(
        each.kv_tokens for each in limits.values()
    ):
        raise CannotTellError(
            "requests waited for KV blocks or were preempted, and the spans do not tell the size of the KV "
            "cache: its memory is not modelled"
        )
    for each in requests:
        held = limits[each.main.instance]
        needed = each.main.computed + each.main.cached
        if 0 < held.kv_tokens <= needed:
            raise CannotTellError(
                f"a prompt needs {needed} tokens of KV cache, there are {held.kv_tokens}"
            )


def shares_blocks(requests: Sequence[ReplayRequest], plain: FleetModel) -> bool:
    """Whether the window had memory enough and its replay has not. Raises CannotTellError."""
    recorded, replayed = measure_recorded(requests), measure_replayed(plain)
    if not is_scarce(recorded) and is_scarce(replayed):
        return True
    if abs(replayed[0] - recorded[0]) > MAX_BLOCK_ERROR:
        raise CannotTellError(
            f"{recorded[0]:.0%} of the recorded waiting is for KV blocks, and {replayed[0]:.0%} of the "
            "replayed: what holds the memory is not in the model"
        )
    return False


def check_memory(plain: FleetModel, other: FleetModel) -> list[str]:
    """Refuse predictions that need unknown memory; returns warnings of those that make it scarce."""
    for each, engine in zip(
        # Engines that are added come last, and are compared with the first one.
        [*plain.engines, *[plain.engines[0]] * len(other.engines)],
        other.engines,
        strict=False,
    ):
        held = max(engine.limits.kv_tokens, round(NOTABLE_EXTRAPOLATION * each.peak_tokens))
        if engine.limits.shares_blocks and engine.peak_tokens > held:
            raise CannotTellError(
                f"the prediction needs {engine.peak_tokens} tokens of KV cache, there are "
                f"{engine.limits.kv_tokens}: how many of them requests share is not known"
            )
    if any(each.prompt is None or not each.prompt.first_token for each in other.replayed):
        raise CannotTellError("a request needs more KV cache than there is")
    before, after = measure_replayed(plain), measure_replayed(other)
    if is_scarce(after) and not is_scarce(before):
        return [
            f"{after[0]:.0%} of all waiting would be for KV blocks, and {after[1]:.0%} of the requests "
            "would be preempted: nothing of that was recorded"
        ]
    return []


def list_memory_notes(plain: FleetModel, other: FleetModel) -> list[str]:
    """What the answer assumes of the KV cache."""
    if any(each.limits.shares_blocks for each in other.engines):
        return [
            "Requests share cached tokens, traces do not tell which: KV blocks are taken as sufficient."
        ]
    if is_scarce(measure_replayed(plain)) or is_scarce(measure_replayed(other)):
        return [
            "KV blocks are scarce: preempted requests are computed again from their first token that was "
            "not cached, and each request holds its cached tokens for itself."
        ]
    return []
