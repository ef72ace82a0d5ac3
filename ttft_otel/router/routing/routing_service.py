# SPDX-License-Identifier: Apache-2.0
"""The routing policy of each leg and its state; upstream_client.py and endpoint.py use it.

The leg that prefills has the policy of --routing-logic, the encode leg that of --encoder-routing-logic,
and the decode leg chooses by requests in flight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from ttft_otel.model.endpoints import RESPONSES_PATH
from ttft_otel.model.stages import ENCODE, PREFILL, QUEUE_STAGES, STAGES
from ttft_otel.model.timing import ServerTiming
from ttft_otel.router.routing.policies.block_index import BlockHolders
from ttft_otel.router.routing.policies.policy_registry import POLICIES
from ttft_otel.router.routing.policies.policy_state import (
    US_PER_SECOND,
    FirstTokenListener,
    PendingRequest,
    PolicyOptions,
    PolicyState,
    RoutingPolicy,
)
from ttft_otel.router.routing.policies.prefill_model import describe_fit
from ttft_otel.router.timeline import RequestTimeline
from ttft_otel.router.types import (
    DEFAULT_POLICY,
    OTHER_LEGS_POLICY,
    Decision,
    Instance,
    RoutingRequest,
)
from ttft_otel.router.upstream.connection_pool import QueryClient
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.tracing import clock
from ttft_otel.tracing.guard import Guard

if TYPE_CHECKING:
    from ttft_otel.router.routing.prefixes.prefix_source import PrefixSource
    from ttft_otel.router.routing.prompts.prompt_reader import LocalPromptReader

# Stages during which an instance that serves this leg cannot begin with the next prompt or item.
SERVICE_STAGES: Final = {
    leg: tuple(stage.name for stage in STAGES if leg in stage.service_of)
    for leg in (ENCODE, PREFILL)
}
COMPUTE_STAGES: Final = {ENCODE: "encoder.compute", PREFILL: "prefill.compute"}
# Ends the type of every event of /v1/responses that carries output: response.output_text.delta.
DELTA_MARKER: Final = b'.delta"'
BYTES_PER_TOKEN: Final = 4  # bytes of the body per token, if the prompt could not be tokenized
MAX_ESTIMATED_TOKENS: Final = 8192  # limit of that estimate: long bodies mostly hold images


class RoutingService:
    """The policies of one router.

    Args:
        policy_name: of the leg that prefills.
        prompt_reader, prefix_source: None if the policy does not read prompts.
        others_policy, encoders_policy: names for the other legs; encoders_policy "" is others_policy.
    """

    def __init__(
        self,
        pool: InstancePool,
        policy_name: str = DEFAULT_POLICY,
        options: PolicyOptions | None = None,
        prompt_reader: LocalPromptReader | None = None,
        prefix_source: PrefixSource | None = None,
        others_policy: str = OTHER_LEGS_POLICY,
        encoders_policy: str = "",
    ) -> None:
        self.pool = pool
        self.prompt_reader = prompt_reader
        self.prefix_source = prefix_source
        self.prefilling_leg = pool.prefilling_leg
        self.first_token_listener: FirstTokenListener | None = None
        self._options = options or PolicyOptions()
        self._policies = {self.prefilling_leg: self._build_policy(policy_name, True)}
        self._others_policy = others_policy
        self._encoders_policy = encoders_policy or others_policy
        self._remove_listener: Callable[[], None] | None = None
        self._sync_states()

    def _build_policy(self, name: str, is_prefilling: bool) -> RoutingPolicy:
        """A policy; that of another leg than the one that prefills has no prefix cache and no objective."""
        index, options = BlockHolders(1), self._options
        if not is_prefilling:
            options = dataclasses.replace(options, shared_cache=False, slo_s=0.0)
        elif self.prefix_source is not None:
            index = self.prefix_source.index
        state = PolicyState(index, options, first_token_listener=self.first_token_listener)
        return POLICIES[name](state)

    def get_policy(self, leg: str) -> RoutingPolicy:
        """The policy of `leg`, created when first needed."""
        policy = self._policies.get(leg)
        if policy is None:
            name = self._encoders_policy if leg == ENCODE else self._others_policy
            policy = self._policies[leg] = self._build_policy(name, False)
        return policy

    def listen_to_first_tokens(self, listener: FirstTokenListener) -> None:
        """Call `listener` at every first token that a policy learns from."""
        self.first_token_listener = listener
        for policy in self._policies.values():
            policy.state.first_token_listener = listener

    def choose_instance(
        self, request: RoutingRequest, candidates: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """By the policy of the request's leg. Raises SloUnreachable."""
        policy = self.get_policy(request.leg)
        return policy.choose_instance(request, candidates, now_us, is_retry)

    def add_load_entry(
        self, request: RoutingRequest, decision: Decision, span_id: str, now_us: int
    ) -> LoadEntry | None:
        """Record the load of an attempt that starts now, if the leg's policy compares work."""
        policy = self.get_policy(request.leg)
        if not policy.reads_prompts:
            return None
        return LoadEntry(policy.state, request, decision, span_id, now_us)

    @property
    def prefill_policy(self) -> RoutingPolicy:
        """The policy of the leg that prefills."""
        return self._policies[self.prefilling_leg]

    @property
    def reported_legs(self) -> tuple[str, ...]:
        """Legs shown by metrics and GET /instances: the one that prefills, and encoders by work."""
        encoders = self._policies.get(ENCODE)
        return (
            (self.prefilling_leg, ENCODE)
            if encoders and encoders.reads_prompts
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
            policy = self._policies.pop(self.prefilling_leg)
            self.prefilling_leg = self.pool.prefilling_leg
            self._policies[self.prefilling_leg] = policy
        self._sync_states()
        if self.prefix_source is not None:
            self.prefix_source.sync_instances()

    def _sync_states(self) -> None:
        if self.pool.has_encoders:
            self.get_policy(ENCODE)
        for leg, policy in self._policies.items():
            policy.state.sync_instances({each.url for each in self.pool.get(leg)})

    async def read_prompt(
        self, request: RoutingRequest, path: str, timeline: RequestTimeline, has_media: bool = False
    ) -> RoutingRequest:
        """Return `request` with its prompt's length and the tokens cached per instance.

        timeline: gets the times of the lookup. has_media: the request has items for encoders, which are
        counted for the encode leg's policy. A prompt that cannot be read is estimated from its bytes.
        """
        is_needed = request.leg == self.prefilling_leg or (
            has_media and self.get_policy(ENCODE).reads_prompts
        )
        if self.prompt_reader is None or not is_needed:
            return request
        timeline.record_lookup_began()
        # An error of ours while reading a prompt must not cost the request.
        with Guard("router.look"):
            index = self.prefill_policy.state.index
            prompt = await self.prompt_reader.read_prompt(
                path, request.model, request.body, index.block_size
            )
            timeline.record_tokenized()
            if prompt is not None and prompt.tokens:
                urls = [each.url for each in self.pool.get(self.prefilling_leg)]
                depths = index.match_blocks(prompt.block_keys, urls)
                cached = zip(urls, (depth * index.block_size for depth in depths), strict=True)
                request = replace(
                    request,
                    prompt_tokens=prompt.tokens,
                    block_keys=prompt.block_keys,
                    cached_tokens_by_url=dict(cached),
                    item_tokens=prompt.item_tokens,
                )
        if not request.prompt_tokens:
            estimated_tokens = min(len(request.body) // BYTES_PER_TOKEN, MAX_ESTIMATED_TOKENS)
            request = replace(request, prompt_tokens=estimated_tokens, tokens_estimated=True)
        timeline.record_looked_up()
        return request

    def check_slo(self, request: RoutingRequest, item_requests: Sequence[RoutingRequest]) -> None:
        """Raise SloUnreachable if no instance can meet the TTFT objective after the items are encoded.

        item_requests: the encoder requests. Called before they are sent; no load is recorded.
        """
        candidates = self.pool.get_candidates(request.leg, request.model)
        has_limit = self._options.slo_s or request.slo_s
        if has_limit and request.leg == self.prefilling_leg and candidates:
            now_us = clock.now_us()
            wait_s, are_busy = self._estimate_encode_wait(item_requests, now_us)
            request = replace(request, encode_wait_s=wait_s, encoders_busy=are_busy)
            self.prefill_policy.choose_instance(request, candidates, now_us, True)

    def _estimate_encode_wait(
        self, item_requests: Sequence[RoutingRequest], now_us: int
    ) -> tuple[float, bool]:
        """Predicted seconds of the largest item, and whether every encoder has pending items."""
        policy = self.get_policy(ENCODE)
        counted_items = [each for each in item_requests if not each.tokens_estimated]
        # Items are encoded side by side: the largest decides when the prefill can begin.
        largest_item = max(counted_items, key=lambda each: each.prompt_tokens, default=None)
        candidates = (
            () if largest_item is None else self.pool.get_candidates(ENCODE, largest_item.model)
        )
        if largest_item is None or not candidates or not policy.uses_predictions:
            return 0.0, False
        seconds = policy.state.predict_ttft(
            policy.choose_instance(largest_item, candidates, now_us, True)
        )
        return seconds or 0.0, all(
            policy.state.pending.get_load(each.url).entries for each in candidates
        )

    def describe_instances(self, leg: str = "") -> dict[str, dict[str, Any]]:
        """The policy's knowledge of the instances of `leg` ("": the one that prefills), by URL."""
        leg = leg or self.prefilling_leg
        prefix_source = self.prefix_source if leg == self.prefilling_leg else None
        state = self.get_policy(leg).state
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
                    model: describe_fit(fit) for (model, at), fit in fits.items() if at == url
                },
                "predictions": None if outcome is None else outcome.describe_quality(),
                "index": status.get(url),
            }
        return described


@dataclass(slots=True, eq=False)
class LoadEntry:
    """The entry of one attempt, which is sent at `now_us`; its ID is `span_id`.

    found_idle: the instance had no other pending request. awaits_delta: events were received, but the first
    token was not. requested_timing: only the policy asked for Server-Timing, not the client.
    prediction_error_s: seconds by which the first token was later than predicted, once known.
    """

    state: PolicyState
    request: RoutingRequest
    decision: InitVar[Decision]
    span_id: InitVar[str]
    now_us: InitVar[int]
    cached_tokens: int = 0
    found_idle: bool = False
    requested_timing: bool = False
    awaits_delta: bool = False
    predicted_ttft_s: float | None = None
    prediction_error_s: float | None = None
    sent: PendingRequest = field(init=False)

    def __post_init__(self, decision: Decision, span_id: str, now_us: int) -> None:
        # It lasts as long as the answer: without what only the instance gets, which may be long. Request
        # IDs are no keys: clients choose them and may repeat them.
        self.request = replace(
            self.request, request_id=span_id, headers={}, body=b"", media_item=b"", body_frame=None
        )
        self.cached_tokens = decision.cached_tokens
        self.found_idle = not self.state.pending.get_load(decision.instance.url).entries
        self.sent = self.state.record_sent(self.request, decision, now_us)
        # As it was at the decision: the models learn from others meanwhile.
        self.predicted_ttft_s = self.sent.predicted_s

    def record_first_token(
        self, first_token_us: int, server_timing: ServerTiming | None, is_streaming: bool
    ) -> None:
        """Record the first token, or a whole response, and learn from its `server_timing` if there is one.

        first_token_us: when it was received, microseconds of the monotonic clock.
        """
        # A server without ttft-otel, or a proxy that took the header away.
        if server_timing is None:
            self._record_unmeasured(first_token_us, is_streaming)
            return
        # A response that is not streamed arrives `rest` microseconds after its first token.
        first_token_us -= server_timing.rest or 0
        work = ENCODE if self.request.leg == ENCODE else PREFILL
        service_us = sum(server_timing.stages.get(name, 0) for name in SERVICE_STAGES[work])
        has_compute = COMPUTE_STAGES[work] in server_timing.stages
        if has_compute:
            queue_us = sum(server_timing.stages.get(name, 0) for name in QUEUE_STAGES)
            # Network, HTTP, tokenizing: what neither queue nor prefill explains.
            other_us = first_token_us - self.sent.sent_us - service_us - queue_us
            # Stages are of the server's clock and the rest of ours: rounding can make it negative.
            self.state.record_overhead(self.sent.url, max(other_us, 0) / US_PER_SECOND)
        seconds = service_us / US_PER_SECOND
        cached_tokens = self.cached_tokens
        # An estimate of the length would teach the model a wrong slope.
        prompt_tokens = 0 if self.request.tokens_estimated else self.request.prompt_tokens
        # The engine's own counts are right even where the router guessed what is cached.
        if server_timing.tokens is not None:
            own_tokens, step_tokens = server_timing.tokens.own, server_timing.tokens.step
            cached_tokens, prompt_tokens = server_timing.tokens.cached, server_timing.tokens.prompt
            # Other prompts shared these steps. Answers did, too: those are few tokens, of another cost.
            step_tokens -= self.sent.decodes
            if 0 < own_tokens < step_tokens:
                seconds *= own_tokens / step_tokens
        # No prefill here, or one of unknown length: nothing to learn.
        is_measured = has_compute and prompt_tokens
        measured_s = seconds if is_measured else None
        self.prediction_error_s = self.state.record_first_token(
            self.request, first_token_us, measured_s, cached_tokens, prompt_tokens
        )

    def _record_unmeasured(self, first_token_us: int, is_streaming: bool) -> None:
        """Without Server-Timing: a request that had the instance alone measures its prefill by its TTFT."""
        # The first chunk of these streams is no token, so the prefill still counts as pending.
        if is_streaming and self.request.path.partition("?")[0] == RESPONSES_PATH:
            # these streams begin with events that come before the engine is asked
            self.awaits_delta = True
            return
        had_instance_alone = (
            # With others before it the TTFT contains their prefills, and
            # cannot be taken apart without stages.
            self.found_idle
            and is_streaming
            and self.request.prompt_tokens
            and not self.request.tokens_estimated
        )
        ttft_s = (first_token_us - self.sent.sent_us) / US_PER_SECOND
        seconds = ttft_s if had_instance_alone else None
        # A whole answer arrives long after its first token: it ends the entry, but judges nothing.
        self.prediction_error_s = self.state.record_first_token(
            self.request, first_token_us, seconds, self.cached_tokens, is_measured=is_streaming
        )

    def record_chunk(self, data: bytes) -> None:
        """Check a later chunk (`data`) of a stream whose first events preceded the engine for a token."""
        if DELTA_MARKER in data:
            self.awaits_delta = False
            self.state.record_first_token(
                self.request, clock.now_us(), None, self.cached_tokens, is_measured=False
            )

    def record_end(self) -> None:
        """Remove the entry when the attempt ends, however it does; idempotent."""
        self.state.record_left(self.request, clock.now_us())
