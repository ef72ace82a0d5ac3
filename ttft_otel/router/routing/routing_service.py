# SPDX-License-Identifier: Apache-2.0
"""The routing policy of each leg and its state; upstream_client.py and endpoint.py use it.

The leg that prefills has the policy of --routing-logic, the encode leg that of --encoder-routing-logic,
and the decode leg chooses by requests in flight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from ttft_otel.model.stages import ENCODE
from ttft_otel.router.routing.load_entry import LoadEntry
from ttft_otel.router.routing.policies.block_index import BlockHolders
from ttft_otel.router.routing.policies.pending_load import ARRIVAL_WINDOW_S, PendingLoads
from ttft_otel.router.routing.policies.policy_registry import POLICIES
from ttft_otel.router.routing.policies.policy_state import (
    FirstTokenListener,
    PolicyOptions,
    PolicyState,
)
from ttft_otel.router.timeline import PromptLookup, RequestTimeline
from ttft_otel.router.types import (
    DEFAULT_POLICY,
    OTHER_LEGS_POLICY,
    Decision,
    Instance,
    RoutingPolicy,
    RoutingRequest,
)
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.router.upstream.query_client import QueryClient
from ttft_otel.tracing import clock
from ttft_otel.tracing.guard import Guard

if TYPE_CHECKING:
    from ttft_otel.router.routing.prefixes.prefix_source import PrefixSource
    from ttft_otel.router.routing.prompts.prompt_reader import PromptReader

BYTES_PER_TOKEN: Final = 4  # bytes of the body per token, if the prompt could not be tokenized
MAX_ESTIMATED_TOKENS: Final = 8192  # limit of that estimate: long bodies mostly hold images


@dataclasses.dataclass(slots=True)
class LegPolicy:
    """The policy of one leg and its state."""

    policy_name: str
    policy: RoutingPolicy
    state: PolicyState


class RoutingService:
    """The policies of one router.

    Args:
        policy_name: of the leg that prefills.
        window_s: seconds over which requests are counted.
        prompt_reader, prefix_source: None if the policy does not read prompts.
        others_policy, encoders_policy: names for the other legs; encoders_policy "" is others_policy.
    """

    def __init__(
        self,
        pool: InstancePool,
        policy_name: str = DEFAULT_POLICY,
        options: PolicyOptions | None = None,
        window_s: int = ARRIVAL_WINDOW_S,
        prompt_reader: PromptReader | None = None,
        prefix_source: PrefixSource | None = None,
        others_policy: str = OTHER_LEGS_POLICY,
        encoders_policy: str = "",
    ) -> None:
        self.pool = pool
        self.prompt_reader = prompt_reader
        self.prefix_source = prefix_source
        self.prefilling_leg = pool.prefilling_leg
        self.slo_rejections = 0  # requests that no instance could have answered in time
        self.first_token_listener: FirstTokenListener | None = None
        self.read_others: Callable[[], None] | None = None  # with --workers: what they have said
        self._options = options or PolicyOptions()
        self._window_s = window_s
        self._leg_policies = {self.prefilling_leg: self._build_prefill_policy(policy_name)}
        self._others_policy = others_policy
        self._encoders_policy = encoders_policy or others_policy
        if pool.has_encoders:
            self.get_leg_policy(ENCODE)
        self._remove_listener: Callable[[], None] | None = None
        self._sync_states()

    def _build_prefill_policy(self, policy_name: str) -> LegPolicy:
        index = BlockHolders(1) if self.prefix_source is None else self.prefix_source.index
        return self._make_leg_policy(policy_name, index, self._options)

    def get_leg_policy(self, leg: str) -> LegPolicy:
        """The policy of `leg`, created when first needed."""
        leg_policy = self._leg_policies.get(leg)
        if leg_policy is None:
            policy_name = self._encoders_policy if leg == ENCODE else self._others_policy
            leg_policy = self._leg_policies[leg] = self._build_leg_policy(policy_name)
            leg_policy.state.first_token_listener = self.first_token_listener
        return leg_policy

    def _build_leg_policy(self, policy_name: str) -> LegPolicy:
        """A policy for a leg without prefix cache and TTFT objective."""
        options = dataclasses.replace(self._options, shared_cache=False, slo_s=0.0)
        return self._make_leg_policy(policy_name, BlockHolders(1), options)

    def _make_leg_policy(self, name: str, index: BlockHolders, options: PolicyOptions) -> LegPolicy:
        state = PolicyState(index, options, PendingLoads(window_s=self._window_s))
        state.counts_arrivals = POLICIES[name].tracks_load
        return LegPolicy(name, POLICIES[name](state), state)

    def listen_to_first_tokens(self, listener: FirstTokenListener) -> None:
        """Call `listener` at every first token that a policy learns from."""
        self.first_token_listener = listener
        for leg_policy in self._leg_policies.values():
            leg_policy.state.first_token_listener = listener

    def choose_instance(
        self, request: RoutingRequest, candidates: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """By the policy of the request's leg. Raises SloUnreachable."""
        leg_policy = self.get_leg_policy(request.leg)
        if self.read_others is not None and leg_policy.policy_name != DEFAULT_POLICY:
            self.read_others()
        return leg_policy.policy.choose_instance(request, candidates, now_us, is_retry)

    def get_policy_name(self, leg: str) -> str:
        """What --routing-logic calls the policy of a leg."""
        return self.get_leg_policy(leg).policy_name

    def add_load_entry(
        self, request: RoutingRequest, decision: Decision, span_id: str, now_us: int
    ) -> LoadEntry | None:
        """Record the load of an attempt that starts now, if the leg's policy tracks load."""
        leg_policy = self.get_leg_policy(request.leg)
        if not leg_policy.policy.tracks_load:
            return None
        return LoadEntry(leg_policy.state, request, decision, span_id, now_us)

    def needs_timing(self, leg: str) -> bool:
        """Whether the leg's policy predicts by what instances say of their prefills."""
        return self.get_leg_policy(leg).policy.uses_predictions

    @property
    def prefill_policy(self) -> LegPolicy:
        """The policy of the leg that prefills."""
        return self._leg_policies[self.prefilling_leg]

    @property
    def reported_legs(self) -> tuple[str, ...]:
        """Legs shown by metrics and GET /instances: the one that prefills, and encoders that track load."""
        encoders = self._leg_policies.get(ENCODE)
        return (
            (self.prefilling_leg, ENCODE)
            if encoders and encoders.policy.tracks_load
            else (self.prefilling_leg,)
        )

    async def start(self, queries: QueryClient) -> None:
        """Start the prompt reader and the prefix source with these `queries`."""
        if self.prompt_reader is not None:
            await self.prompt_reader.start(queries)
        if self.prefix_source is not None:
            await self.prefix_source.start(queries, self.pool)
        self._remove_listener = self.pool.change_listeners.add(self.sync_instances)

    async def close(self) -> None:
        """Stop the prompt reader and the prefix source."""
        if self._remove_listener is not None:
            self._remove_listener()
        if self.prefix_source is not None:
            await self.prefix_source.close()
        if self.prompt_reader is not None:
            await self.prompt_reader.close()

    def sync_instances(self) -> None:
        """Follow a change of the pool's instances, and possibly of the leg that prefills."""
        if self.prefilling_leg != self.pool.prefilling_leg:
            # the policy keeps its state: models by name, and instances by URL, which may stay the same
            leg_policy = self._leg_policies.pop(self.prefilling_leg)
            self.prefilling_leg = self.pool.prefilling_leg
            self._leg_policies[self.prefilling_leg] = leg_policy
        if self.pool.has_encoders:
            self.get_leg_policy(ENCODE)
        self._sync_states()
        if self.prefix_source is not None:
            self.prefix_source.sync_instances()

    def _sync_states(self) -> None:
        for leg, leg_policy in self._leg_policies.items():
            leg_policy.state.sync_instances({each.url for each in self.pool.get(leg)})

    async def read_prompt(
        self, request: RoutingRequest, path: str, timeline: RequestTimeline, has_media: bool = False
    ) -> RoutingRequest:
        """Return `request` with its prompt's length and the tokens cached per instance.

        timeline: gets the times of the lookup. has_media: the request has items for encoders, which are
        counted for the encode leg's policy. A prompt that cannot be read is estimated from its bytes.
        """
        is_needed = request.leg == self.prefilling_leg or (
            has_media and self.get_leg_policy(ENCODE).policy.reads_prompts
        )
        if self.prompt_reader is None or not is_needed:
            return request
        lookup = timeline.begin_prompt_lookup()
        # An error of ours while reading a prompt must not cost the request.
        with Guard("router.look"):
            request = await self._tokenize_prompt(request, path, lookup, self.prompt_reader)
        if not request.prompt_tokens:
            estimated_tokens = min(len(request.body) // BYTES_PER_TOKEN, MAX_ESTIMATED_TOKENS)
            request = replace(request, prompt_tokens=estimated_tokens, tokens_estimated=True)
        lookup.record_looked_up()
        return request

    async def _tokenize_prompt(
        self, request: RoutingRequest, path: str, lookup: PromptLookup, prompt_reader: PromptReader
    ) -> RoutingRequest:
        index = self.prefill_policy.state.index
        prompt = await prompt_reader.read_prompt(
            path, request.model, request.body, index.block_size
        )
        lookup.record_tokenized()
        if prompt is None or not prompt.tokens:
            return request
        urls = [each.url for each in self.pool.get(self.prefilling_leg)]
        cached_by_url: Mapping[str, int] | None = None
        if self.prefix_source is not None:
            cached_by_url = await self.prefix_source.look_up(request.model, prompt, urls)
        if cached_by_url is None:
            depths = index.match_blocks(prompt.block_keys, urls)
            cached_by_url = {
                url: depth * index.block_size for url, depth in zip(urls, depths, strict=True)
            }
        return replace(
            request,
            prompt_tokens=prompt.tokens,
            block_keys=prompt.block_keys,
            cached_tokens_by_url=cached_by_url,
            item_tokens=prompt.encoder_items,
        )

    def check_slo(self, request: RoutingRequest, item_requests: Sequence[RoutingRequest]) -> None:
        """Raise SloUnreachable if no instance can meet the TTFT objective after the items are encoded.

        item_requests: the encoder requests. Called before they are sent; no load is recorded.
        """
        candidates = self.pool.get_candidates(request.leg, request.model)
        if self._options.slo_s and request.leg == self.prefilling_leg and candidates:
            now_us = clock.now_us()
            wait_s, are_busy = self._estimate_encode_wait(item_requests, now_us)
            request = replace(request, encode_wait_s=wait_s, encoders_busy=are_busy)
            self.prefill_policy.policy.choose_instance(request, candidates, now_us, True)

    def _estimate_encode_wait(
        self, item_requests: Sequence[RoutingRequest], now_us: int
    ) -> tuple[float, bool]:
        """Predicted seconds of the largest item, and whether every encoder has pending items."""
        leg_policy = self.get_leg_policy(ENCODE)
        counted_items = [each for each in item_requests if not each.tokens_estimated]
        # Items are encoded side by side: the largest decides when the prefill can begin.
        largest_item = max(counted_items, key=lambda each: each.prompt_tokens, default=None)
        candidates = (
            () if largest_item is None else self.pool.get_candidates(ENCODE, largest_item.model)
        )
        if largest_item is None or not candidates or not leg_policy.policy.uses_predictions:
            return 0.0, False
        seconds = leg_policy.state.predict_ttft(
            leg_policy.policy.choose_instance(largest_item, candidates, now_us, True)
        )
        return seconds or 0.0, all(
            leg_policy.state.pending.get_load(each.url).entries for each in candidates
        )

    def describe_instances(self, leg: str = "") -> dict[str, dict[str, Any]]:
        """The policy's knowledge of the instances of `leg` ("": the one that prefills), by URL."""
        leg = leg or self.prefilling_leg
        prefix_source = self.prefix_source if leg == self.prefilling_leg else None
        state = self.get_leg_policy(leg).state
        status = {} if prefix_source is None else prefix_source.describe_instances()
        fits = state.models.list_fits()
        described: dict[str, dict[str, Any]] = {}
        for url in sorted({each.url for each in self.pool.get(leg)}):
            load, outcome = state.pending.get_load(url), state.outcomes.get(url)
            described[url] = {
                "pending": {
                    "requests": len(load.entries),
                    "tokens": load.tokens_to_compute,
                    "pairs": load.pairs,
                },
                "besides": state.overheads_s.get(url),
                "fits": {
                    model: fit.describe_fit()
                    for (model, fit_url), fit in fits.items()
                    if fit_url == url
                },
                "predictions": None if outcome is None else outcome.describe_quality(),
                "index": status.get(url),
            }
        return described
