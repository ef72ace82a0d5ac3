# SPDX-License-Identifier: Apache-2.0
"""The state that the policy of one leg decides by; routing_service.py records what happens to requests.

`record_sent` after each choice, then `record_first_token` at the first token or `record_left` at
any other end. All times are arguments, so that simulations can use it.
"""

from __future__ import annotations

import abc
import random
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal, NamedTuple

from ttft_otel.model.stages import ENCODE
from ttft_otel.router.routing.policies.block_index import BlockHolders
from ttft_otel.router.routing.policies.pending_load import (
    US_PER_SECOND,
    InstanceLoad,
    PendingLoads,
    PendingRequest,
    RequestKey,
)
from ttft_otel.router.routing.policies.prefill_model import (
    MAX_TRACKED,
    PredictionQuality,
    PrefillModels,
    PrefillWork,
    compute_work,
)
from ttft_otel.router.types import Decision, Instance, RoutingRequest, find_base_model

# Weight of the latest sample in the moving average of overheads.
# About the last ten requests: overheads change with the network, not with prompts.
LATEST_WEIGHT: Final = 0.1


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Policy options that an operator can set."""

    session_key: str = ""  # header or body key with the session ID
    kv_aware_threshold: int = 2000  # tokens that may be missing from a cached prefix
    # Compare predicted seconds or attention pairs.
    ttft_model: Literal["trapezoid", "calibrated"] = "calibrated"
    shared_cache: bool = False  # a prefix cached at one instance counts as cached at all
    slo_s: float = 0.0  # TTFT objective in seconds, 0 for none
    max_queue_s: float = 0.0  # predicted queue from which on requests are held, 0 for none


class PrefillSample(NamedTuple):
    """One measured prefill."""

    model: str
    tokens_to_compute: int
    pairs: int
    seconds: float
    decodes: int = 0  # answers under way beside it


FirstTokenListener = Callable[[RequestKey, int, PrefillSample | None], None]


@dataclass(slots=True)
class PolicyState:
    """Pending requests, cached prefixes and prefill models of one leg."""

    index: BlockHolders
    options: PolicyOptions = field(default_factory=PolicyOptions)
    pending: PendingLoads = field(default_factory=PendingLoads)
    models: PrefillModels = field(default_factory=PrefillModels)
    # Accuracy of predicted TTFTs, by URL.
    outcomes: dict[str, PredictionQuality] = field(default_factory=dict)
    # Average seconds of a first token besides queue and prefill, by URL.
    overheads_s: dict[str, float] = field(default_factory=dict)
    urls: Set[str] | None = None  # instances to learn about, None for any
    tie_breaker: random.Random = field(default_factory=random.Random)  # seedable for simulations
    # Called with key, time in microseconds and what was measured; None without workers.
    first_token_listener: FirstTokenListener | None = None

    def estimate_cached(
        self,
        request: RoutingRequest,
        instances: Sequence[Instance],
        loads: Sequence[InstanceLoad] = (),
    ) -> list[int]:
        """Prompt tokens that each of `instances` has cached, in whole blocks.

        loads: if given, blocks of pending prompts count too, because those are prefilled first.
        """
        blocks, block_size = request.block_keys, self.index.block_size or 1
        urls = [each.url for each in instances]
        # Not looked up: the prompt could not be read, or nothing reads prompts (simulations).
        if request.cached_tokens_by_url is None:
            depths = self.index.match_blocks(blocks, urls)
        else:
            depths = [request.cached_tokens_by_url.get(url, 0) // block_size for url in urls]
        _extend_with_queued(depths, blocks, loads)
        if self.options.shared_cache:
            # After the pending ones, whose blocks will be in the shared cache as well.
            depths = [max(depths)] * len(depths)
        # vLLM always computes the last token, because it needs its logits.
        max_blocks = max(0, request.prompt_tokens - 1) // block_size
        if max(depths) > max_blocks:
            depths = [min(depth, max_blocks) for depth in depths]
        return [depth * block_size for depth in depths]

    def record_sent(
        self,
        request: RoutingRequest,
        decision: Decision,
        now_us: int,
        key: RequestKey | None = None,
    ) -> None:
        """Record that `request` is sent to the chosen instance at `now_us`.

        key: identifies the request where leg and request ID do not.
        """
        # By what was cached at the decision; later evictions are not known in time.
        work_to_do = compute_work(request.prompt_tokens, decision.cached_tokens)
        entry = PendingRequest(
            decision.instance.url,
            now_us,
            work_to_do,
            request.block_keys,
            self.predict_ttft(decision),
            self.pending.count_decodes(decision.instance),
            find_base_model([decision.instance], request.model),
        )
        self.pending.add_pending(key or (request.leg, request.request_id), entry)

    def predict_ttft(self, decision: Decision) -> float | None:
        """Predicted TTFT in seconds: queue and prefill of `decision` plus the recent average overhead."""
        if decision.predicted_ttft_s is None:
            return None
        return decision.predicted_ttft_s + self.overheads_s.get(decision.instance.url, 0.0)

    def find_slo_s(self, request: RoutingRequest) -> float:
        """The stricter of the operator's and the client's limit of the TTFT, seconds; 0 without any."""
        # Encoders send no first token.
        limits_s = self.options.slo_s, request.slo_s * (request.leg != ENCODE)
        return min(filter(None, limits_s), default=0.0)

    def record_overhead(self, url: str, overhead_s: float) -> None:
        """Update the average time of a first token besides queue and prefill, such as network hops.

        overhead_s: seconds of one request at the instance at `url`.
        """
        # An answer can come after its instance was removed, and would bring its state back.
        if self._is_unknown(url):
            return
        if url not in self.overheads_s and len(self.overheads_s) >= MAX_TRACKED:
            # dicts keep insertion order: the instance added first is dropped
            del self.overheads_s[next(iter(self.overheads_s))]
        # The first one counts fully: from 0 the average would take dozens of requests to get there.
        previous_s = self.overheads_s.get(url, overhead_s)
        self.overheads_s[url] = previous_s + LATEST_WEIGHT * (overhead_s - previous_s)

    def record_first_token(
        self,
        request: RoutingRequest,
        now_us: int,
        prefill_s: float | None,
        cached_tokens: int,
        key: RequestKey | None = None,
        prompt_tokens: int = 0,
        is_measured: bool = True,
    ) -> float | None:
        """Record the first token of `request`, and learn from its prefill.

        Returns seconds by which the token was later than predicted, None without a judged prediction.

        Args:
            prefill_s: measured seconds, None if unknown.
            cached_tokens: prompt tokens not computed.
            prompt_tokens: prompt length as the engine counted it, 0 to use the router's.
            is_measured: whether `now_us` is the time of the first token; if not, the prediction is not
                judged.
        """
        # None if it was ended before: a first token is recorded once.
        entry = self.record_left(request, now_us, key)
        if entry is None or self._is_unknown(entry.url):
            return None
        sample = None
        if prefill_s is not None:
            prompt_tokens = prompt_tokens or request.prompt_tokens
            # Engines may report more cached than the router's length of the prompt.
            prefill_work = compute_work(prompt_tokens, min(cached_tokens, prompt_tokens))
            sample = PrefillSample(entry.base_model, *prefill_work, prefill_s, entry.decodes)
        self._learn_prefill(entry, sample)
        if self.first_token_listener is not None:
            own_key = key or (request.leg, request.request_id)
            self.first_token_listener(own_key, now_us, sample)
        if entry.predicted_s is None or not is_measured:
            return None
        if entry.url not in self.outcomes and len(self.outcomes) >= MAX_TRACKED:
            del self.outcomes[next(iter(self.outcomes))]
        ttft_s = (now_us - entry.sent_us) / US_PER_SECOND
        self.outcomes.setdefault(entry.url, PredictionQuality()).add_outcome(
            entry.predicted_s, ttft_s
        )
        # Positive if it was late, as in ttft.prediction_error_ms.
        return ttft_s - entry.predicted_s

    def _learn_prefill(self, entry: PendingRequest, sample: PrefillSample | None) -> None:
        # The blocks are cached from the first token on, also if the client disconnects later.
        self.index.record_served(entry.url, entry.block_keys)
        if sample is not None:
            model, tokens, pairs, seconds, decodes = sample
            self.models.add_sample(model, entry.url, PrefillWork(tokens, pairs), seconds, decodes)

    def record_first_token_elsewhere(
        self, key: RequestKey, now_us: int, sample: PrefillSample | None
    ) -> None:
        """Another worker had the first token of the request of `key`, which is pending here too.

        sample: what it measured. The accuracy of the prediction is judged where it was made.
        """
        entry = self.pending.remove_pending(key, now_us)
        if entry is not None and not self._is_unknown(entry.url):
            self._learn_prefill(entry, sample)

    def record_left(
        self, request: RoutingRequest, now_us: int, key: RequestKey | None = None
    ) -> PendingRequest | None:
        """Remove `request` from the pending ones, however it ended; idempotent."""
        return self.pending.remove_pending(key or (request.leg, request.request_id), now_us)

    def sync_instances(self, urls: Set[str]) -> None:
        """Learn only about the instances in `urls` from now on; drop the state of others."""
        # Pending entries stay, since their requests still run: each ends by itself.
        for url in (self.urls or frozenset()) - urls:
            self.forget_instance(url)
        self.urls = urls

    def forget_instance(self, url: str) -> None:
        """Drop what was learned about the instance at `url`; its pending requests end normally."""
        self.outcomes.pop(url, None)
        self.overheads_s.pop(url, None)
        self.models.drop_instance(url)

    def _is_unknown(self, url: str) -> bool:
        return self.urls is not None and url not in self.urls

    def choose_least(self, scores: Sequence[float]) -> int:
        """The position of the least of `scores`, a random one among equals."""
        lowest = min(scores)
        # The usual case costs no list and no random number.
        if scores.count(lowest) == 1:
            return scores.index(lowest)
        return self.tie_breaker.choice(
            [position for position, score in enumerate(scores) if score == lowest]
        )


class RoutingPolicy(abc.ABC):
    """Chooses instances of one leg over its `state`; called on the event loop, so it must not block.

    name: in --routing-logic.
    """

    name: ClassVar[str]
    # Whether it needs prompt lengths, cached prefixes and the work that is pending.
    reads_prompts: ClassVar[bool] = False

    def __init__(self, state: PolicyState) -> None:
        self.state = state

    @property
    def uses_predictions(self) -> bool:
        """Whether it learns from the Server-Timing of instances, which then is requested."""
        return False

    @abc.abstractmethod
    def choose_instance(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """Choose one of `instances`, which is never empty.

        now_us: CLOCK_MONOTONIC in microseconds. is_retry: an earlier attempt of the request failed.
        """

    def predict_wait(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int
    ) -> tuple[float, float]:
        """Seconds of the shortest queue of `instances` and of the prefill; 0 where nothing is predicted."""
        return 0.0, 0.0


def _extend_with_queued(
    depths: list[int], block_keys: Sequence[int], loads: Sequence[InstanceLoad]
) -> None:
    """Extend `depths`, leading blocks cached per instance, by blocks that pending prompts will add."""
    length = len(block_keys)
    for position, load in enumerate(loads):
        depth, queued_blocks = depths[position], load.queued_blocks
        # From where the cache ends: a prefix that only begins later is of no use.
        while depth < length and block_keys[depth] in queued_blocks:
            depth += 1
        depths[position] = depth
