# SPDX-License-Identifier: Apache-2.0
"""What `whatif` is asked to change, whether a recorded window can answer that, and what is assumed. Pure.

A change is parsed from words such as `1.5x`, `+1` and `+20%`. what_if.py asks before it replays, after the
first replay, and at its end; a refusal is a sentence. Blocks that requests share, of prefixes that are
cached, are in no trace: where the replay has too few KV blocks and the recorded window had enough, they are
taken as sufficient, and changes that would need more memory are refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from ttft_otel.explain.whatif.engine_model import BLIND_POLICIES, EngineLimits, FleetModel
from ttft_otel.explain.whatif.replay_facts import RANK_MARK, Recording, ReplayRequest, find_unseen
from ttft_otel.explain.whatif.step_fit import StepFit, StepSamples
from ttft_otel.explain.window.request_facts import CannotTellError
from ttft_otel.model import stages

RATE_PATTERN: Final = re.compile(r"(\d+(?:\.\d+)?)x?")
SHARE_PATTERN: Final = re.compile(r"([+-]?\d+(?:\.\d+)?)%")
COUNT_PATTERN: Final = re.compile(r"\+(\d+)")
MAX_MORE: Final = 1000  # servers; each is an engine of the model
MIN_REQUESTS: Final = 50
MAX_FAILED: Final = 0.05  # share of requests that loaded the engines and have no breakdown
MAX_LOST: Final = 0.1  # share of requests whose part of the engine, or whose end, is not known
NOTABLE_WAIT: Final = 0.02  # share of all waiting that is for what is not modelled
MODELLED_REASONS: Final = frozenset(
    {"in_step", "max_num_seqs", "token_budget", "encoder_budget", "kv_blocks"}
)
MAX_UNMODELLED: Final = 0.1  # of all TTFTs, likewise
MAX_DRAIN: Final = 0.15  # of the window's length, from its last arrival to its last first token
MAX_GROWTH: Final = 2.0  # of the TTFT, from the first half of the window to its last quarter
MAX_EXTRAPOLATION: Final = 4.0  # beyond the concurrency, or the step, that was recorded
NOTABLE_EXTRAPOLATION: Final = 1.1
MAX_ERROR: Final = 0.5  # of p50 and p95 of the window itself
NOTABLE_UNEXPLAINED: Final = 0.05  # of a step's length, on average
MAX_BLOCK_WAIT: Final = 0.05  # share of all waiting that is for KV blocks, without a model of them
MAX_PREEMPTED: Final = 0.01  # share of preempted requests, likewise
MAX_BLOCK_ERROR: Final = 0.2  # of that share, as recorded to as replayed


@dataclass(frozen=True, slots=True)
class PlannedChange:
    """What is changed; a field with its default leaves things as they were."""

    instances: int = 0  #: how many more; below 0 the last ones are gone
    encoders: int = 0  #: how many more
    max_num_seqs: int = 0
    max_batched_tokens: int = 0
    policy: str = ""  #: name of --routing-logic
    rate: float = 1.0  #: arrivals come so many times as fast
    cache_hit: float = 0.0  #: share of all prompt tokens that is cached in addition
    kv_cache: float = 1.0  #: the KV cache takes so many times as much


def parse_more(text: str) -> int:
    """`+2` -> 2. Raises ValueError with a sentence."""
    found = COUNT_PATTERN.fullmatch(text.strip())
    # Before int(): thousands of digits are no number of servers either.
    if found is None or len(found[1]) > 4 or int(found[1]) > MAX_MORE:
        raise ValueError(f"{text!r} is not a number of servers to add: write +1, up to +{MAX_MORE}")
    return int(found[1])


def parse_rate(text: str) -> float:
    """`1.5x` -> 1.5. Raises ValueError with a sentence."""
    found = RATE_PATTERN.fullmatch(text.strip())
    if found is None or not 0.01 <= float(found[1]) <= 100:
        raise ValueError(f"{text!r} is not a factor: write 1.5x for half as many again")
    return float(found[1])


def parse_share(text: str) -> float:
    """`+20%` -> 0.2. Raises ValueError with a sentence."""
    found = SHARE_PATTERN.fullmatch(text.strip())
    if found is None or abs(float(found[1])) > 100:
        raise ValueError(f"{text!r} is not a share of all prompt tokens: write +20%")
    return float(found[1]) / 100


def check_window(recording: Recording, limits: Mapping[str, EngineLimits]) -> None:
    """Refuse windows of which no answer can be had, whatever is changed."""
    requests = recording.requests
    count = len(requests)
    everything = count + recording.failed + recording.unreadable
    split = sorted(recording.roles & {stages.PREFILL, stages.DECODE})
    if split:
        raise CannotTellError(
            "requests are computed by a prefill and a decode instance, which is not modelled"
        )
    if count < MIN_REQUESTS:
        raise CannotTellError(
            f"the window has {count} requests whose engine's part is known; {MIN_REQUESTS} are needed"
            + (f"; {recording.failed} more failed" if recording.failed else "")
        )
    if recording.unreadable > MAX_LOST * everything:
        raise CannotTellError(
            f"of {everything} requests {recording.unreadable} do not tell what the engine did; "
            "see `ttft-otel doctor`"
        )
    if recording.failed > MAX_FAILED * everything:
        raise CannotTellError(
            f"{recording.failed} of {everything} requests failed: what they cost is not known"
        )
    for name, limit in sorted(limits.items()):
        missing = [
            option
            for option, value in (
                ("--recorded-max-num-seqs", limit.max_num_seqs),
                ("--recorded-max-num-batched-tokens", limit.max_batched_tokens),
            )
            if not value
        ]
        if missing:
            raise CannotTellError(
                f"the spans of {name} do not tell its scheduler's settings (an older release recorded "
                f"them); name them with {' and '.join(missing)}"
            )
    unknown = sum(each.main.answer_us < 0 and not each.main.output_tokens for each in requests)
    if unknown > MAX_LOST * len(requests):
        raise CannotTellError(
            f"of {unknown} requests the HTTP server's span is missing: how long they decoded, which is "
            "load for others, cannot be told"
        )
    _check_load(requests)
    # Scarce memory of unknown size, and prompts that are larger than the cache.
    if _is_scarce(_measure_recorded(requests)) and not all(
        each.kv_tokens for each in limits.values()
    ):
        raise CannotTellError(
            "requests waited for KV blocks or were preempted, and the spans do not tell the size of the KV "
            "cache: its memory is not modelled"
        )
    for main in (each.main for each in requests):
        available, needed = limits[main.instance].kv_tokens, main.computed + main.cached
        if 0 < available <= needed:
            raise CannotTellError(
                f"a prompt needs {needed} tokens of KV cache, there are {available}"
            )


def is_growing(points: Sequence[tuple[int, int]]) -> bool:
    """Whether a queue grows to the end. points: (start, TTFT), in the order of arrival."""
    start, end = points[0][0], points[-1][0]
    drain = max(begun + ttft for begun, ttft in points) - end
    half, quarter = len(points) // 2, len(points) // 4
    early = sum(ttft for _, ttft in points[:half]) / half
    late = sum(ttft for _, ttft in points[-quarter:]) / quarter
    return drain > MAX_DRAIN * (end - start) and late > MAX_GROWTH * early


def _check_load(requests: Sequence[ReplayRequest]) -> None:
    """Refuse windows of which not all load is known, and those that waited for what is not modelled."""
    unseen = find_unseen([each.main for each in requests])
    if unseen is not None:
        raise CannotTellError(
            f"recorded steps have {unseen[0]:.0f} tokens of other requests, the recorded requests "
            f"account for {unseen[1]:.0f}: not all requests are traced (OTEL_TRACES_SAMPLER), so that "
            "the load is not known"
        )
    named, other, waited = _sum_unmodelled(requests)
    if other > MAX_UNMODELLED * sum(each.ttft_us for each in requests):
        raise CannotTellError(
            f"{other / waited:.0%} of all waiting is for reasons that are not modelled ({named})"
        )


def _sum_unmodelled(requests: Sequence[ReplayRequest]) -> tuple[str, int, int]:
    """Reasons of waiting that are not modelled, their sum, and that of all waiting; microseconds."""
    waited = Counter[str]()
    for each in requests:
        waited.update(each.main.reasons)
    others = sorted(set(waited) - MODELLED_REASONS)
    return ", ".join(others), sum(waited[each] for each in others), max(waited.total(), 1)


def check_change(
    requests: Sequence[ReplayRequest],
    limits: Mapping[str, EngineLimits],
    samples: StepSamples,
    change: PlannedChange,
) -> None:
    """Refuse changes of which the window's traces say nothing."""
    if change.policy in BLIND_POLICIES:
        raise CannotTellError(
            f"--routing-logic {change.policy} decides by what prompts share or by sessions, which traces "
            "do not tell"
        )
    if change.kv_cache != 1 and not any(each.kv_tokens for each in limits.values()):
        raise CannotTellError("the spans do not tell the size of the KV cache")
    if change.encoders and not any(each.encodes for each in requests):
        raise CannotTellError("no request of the window was at an encoder instance")
    if len(limits) + change.instances < 1:
        raise CannotTellError(f"the window has {len(limits)} instances: none would be left")
    if (change.instances or change.policy) and any(RANK_MARK in each for each in limits):
        raise CannotTellError(
            "instances have several data-parallel engines, among which vLLM chooses; that is not modelled"
        )
    if change.instances or change.policy:
        _check_models(requests)
    if change.max_batched_tokens and not samples.tokens_vary:
        raise CannotTellError(
            f"all recorded steps have {samples.seen_tokens[0]} to {samples.seen_tokens[1]} tokens: what a "
            "token more costs cannot be told"
        )


def _check_models(requests: Sequence[ReplayRequest]) -> None:
    """Refuse to move requests between instances of two models; adapters share their instances."""
    served: dict[str, set[str]] = {}
    for each in requests:
        served.setdefault(each.model, set()).add(each.main.instance)
    for one, other in combinations(sorted(served), 2):
        if not served[one] & served[other]:
            raise CannotTellError(
                f"the window has requests for {one!r} and {other!r}, which no instance serves both: take "
                "one of them, with --model"
            )


def check_outcome(plain: FleetModel, other: FleetModel, fit: StepFit) -> list[str]:
    """Refuse predictions far from what was seen; returns warnings of those that leave it."""
    ttfts = (sum(each.values()) for each in other.stages)
    if is_growing(list(zip(other.starts, ttfts, strict=True))):
        raise CannotTellError(
            "in the prediction more requests arrive than are served: the queue grows until the last one, so "
            "that a TTFT tells how long the window is and not what a request would wait"
        )
    warnings: list[str] = []
    running = max(each.peak_running for each in other.engines)
    seen = max(each.peak_running for each in plain.engines)
    _check_reach("requests run at once", running, seen, warnings)
    step = max(each.peak_step for each in other.engines)
    seen_step = max(round(fit.times.seen[0]), *(each.peak_step for each in plain.engines))
    _check_reach("tokens are in a step", step, seen_step, warnings)
    if fit.unexplained > NOTABLE_UNEXPLAINED:
        warnings.append(
            f"the window's own steps vary by {fit.unexplained:.0%} that their work does not explain: "
            "something else used the machine, or no line fits their costs. The intervals reach as far as "
            "that would change the figures"
        )
    return warnings


def _check_reach(what: str, value: int, seen: int, warnings: list[str]) -> None:
    text = f"up to {value} {what}, in the recorded window {seen}"
    if value > MAX_EXTRAPOLATION * seen:
        raise CannotTellError(f"{text}: too far from what was seen")
    if value > NOTABLE_EXTRAPOLATION * seen:
        warnings.append(f"{text}: the length of such steps is extrapolated")


def check_errors(errors: Sequence[float]) -> None:
    """Refuse where the model does not know the window itself. errors: of p50, p95, p99."""
    worst = max(errors[:2], key=abs)
    if abs(worst) > MAX_ERROR:
        raise CannotTellError(
            f"the model misses the recorded window itself by {worst:+.0%}: what holds its requests up is "
            "not in the model"
        )


def list_notes(
    requests: Sequence[ReplayRequest], samples: StepSamples, change: PlannedChange, policy: str
) -> list[str]:
    """What the answer assumes, as sentences."""
    notes = ["Outside of the engines everything takes as long as it did."]
    if not any(each.main.output_tokens for each in requests):
        notes.append(
            "Traces do not tell the lengths of answers: they are derived from how long requests held "
            "their place."
        )
    if not samples.knows_gap:
        notes.append(
            "No prompt had several chunks: the time between two steps is not known and taken as 0."
        )
    if change.instances and not change.policy:
        notes.append(f"Requests are spread over the instances by `{policy}`.")
    routers = {each.router for each in requests if each.router}
    if len(routers) > 1 and (change.instances or change.policy):
        notes.append(
            f"The requests came through {len(routers)} routers; the replay has one, which sees them all."
        )
    if any(each.main.cached for each in requests) and (change.instances or change.policy):
        notes.append("A prompt has as many cached tokens at every instance as it had where it was.")
    if change.cache_hit:
        notes.append("The additional cached tokens are the same share of each prompt.")
    named, other, waited = _sum_unmodelled(requests)
    if other > NOTABLE_WAIT * waited:
        notes.append(
            f"{other / waited:.0%} of all waiting is for reasons that are not modelled ({named})."
        )
    notes.append("Engines are taken as idle when the window begins.")
    return notes


def _measure_recorded(requests: Sequence[ReplayRequest]) -> tuple[float, float]:
    """The shares of all waiting that was for KV blocks, and of requests that were preempted."""
    waited = sum(sum(each.main.reasons.values()) for each in requests)
    for_blocks = sum(each.main.reasons.get("kv_blocks", 0) for each in requests)
    preempted = sum(each.main.preemptions > 0 for each in requests)
    return for_blocks / max(waited, 1), preempted / len(requests)


def _measure_replayed(model: FleetModel) -> tuple[float, float]:
    """The same of a replay."""
    prompts = model.prompts
    waited = sum(each.queue for each in prompts)
    blocked = sum(each.blocked_us for each in model.engines)
    preempted = sum(each.preemptions > 0 for each in prompts)
    return min(blocked / max(waited, 1), 1.0), preempted / max(len(prompts), 1)


def _is_scarce(shares: tuple[float, float]) -> bool:
    """Whether memory was waited for so much that it cannot be left out."""
    return shares[0] > MAX_BLOCK_WAIT or shares[1] > MAX_PREEMPTED


def shares_blocks(requests: Sequence[ReplayRequest], plain: FleetModel) -> bool:
    """Whether the window had memory enough and its replay has not. Raises CannotTellError."""
    recorded, replayed = _measure_recorded(requests), _measure_replayed(plain)
    if not _is_scarce(recorded) and _is_scarce(replayed):
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
        available = max(engine.limits.kv_tokens, round(NOTABLE_EXTRAPOLATION * each.peak_tokens))
        if engine.limits.shares_blocks and engine.peak_tokens > available:
            raise CannotTellError(
                f"the prediction needs {engine.peak_tokens} tokens of KV cache, there are "
                f"{engine.limits.kv_tokens}: how many of them requests share is not known"
            )
    if not all(each.first_token for each in other.prompts):
        raise CannotTellError("a request needs more KV cache than there is")
    before, after = _measure_replayed(plain), _measure_replayed(other)
    if _is_scarce(after) and not _is_scarce(before):
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
    if _is_scarce(_measure_replayed(plain)) or _is_scarce(_measure_replayed(other)):
        return [
            "KV blocks are scarce: preempted requests are computed again from their first token that was "
            "not cached, and each request holds its cached tokens for itself."
        ]
    return []
