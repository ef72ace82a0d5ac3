# SPDX-License-Identifier: Apache-2.0
"""One attempt's entry in the pending load that its leg's policy decides by.

upstream_client.py creates it, instance_pool.py ends it. The entry is removed at the first token or with
the attempt, whichever comes first.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from ttft_otel.model.endpoints import RESPONSES_PATH
from ttft_otel.model.stages import ENCODE, PREFILL, QUEUE_STAGES, STAGES
from ttft_otel.model.timing import ServerTiming
from ttft_otel.router.routing.policies.pending_load import US_PER_SECOND
from ttft_otel.router.routing.policies.policy_state import PolicyState
from ttft_otel.router.types import Decision, RoutingRequest
from ttft_otel.tracing import clock

# Stages during which an instance that serves this leg cannot begin with the next prompt or item.
SERVICE_STAGES: Final = {
    leg: tuple(stage.name for stage in STAGES if leg in stage.service_of)
    for leg in (ENCODE, PREFILL)
}
COMPUTE_STAGES: Final = {ENCODE: "encoder.compute", PREFILL: "prefill.compute"}
# Ends the type of every event of /v1/responses that carries output, as in
# response.output_text.delta.
DELTA_MARKER: Final = b'.delta"'


class LoadEntry:
    """The entry of one attempt."""

    __slots__ = (
        "request",
        "requested_timing",
        "cached_tokens",
        "awaits_delta",
        "predicted_ttft_s",
        "prediction_error_s",
        "found_idle",
        "key",
        "sent_us",
        "state",
        "url",
    )

    def __init__(
        self,
        state: PolicyState,
        request: RoutingRequest,
        decision: Decision,
        span_id: str,
        now_us: int,
    ) -> None:
        # It lasts as long as the answer: without what only the instance gets, which may be long.
        self.request = replace(request, headers={}, body=b"", media_item=b"", body_frame=None)
        self.state = state
        self.cached_tokens = decision.cached_tokens
        self.sent_us = now_us
        self.key = (request.leg, span_id)  # not the request ID: clients choose it and may repeat it
        self.url = decision.instance.url
        # Whether the instance had no other pending request: before record_sent() below adds this one.
        self.found_idle = not state.pending.get_load(self.url).entries
        self.requested_timing = False  # only the policy asked for Server-Timing, not the client
        self.awaits_delta = False  # events were received, but the first token was not
        # Kept as it was at the decision: the models learn from others meanwhile.
        self.predicted_ttft_s = state.predict_ttft(decision)
        # Seconds by which the first token was later than predicted, once known.
        self.prediction_error_s: float | None = None
        state.record_sent(request, decision, now_us, self.key)

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
            other_us = first_token_us - self.sent_us - service_us - queue_us
            # Stages are of the server's clock and the rest of ours: rounding can make it negative.
            self.state.record_overhead(self.url, max(other_us, 0) / US_PER_SECOND)
        seconds = service_us / US_PER_SECOND
        cached_tokens = self.cached_tokens
        # An estimate of the length would teach the model a wrong slope.
        prompt_tokens = 0 if self.request.tokens_estimated else self.request.prompt_tokens
        # The engine's own counts are right even where the router guessed what is cached.
        if server_timing.tokens is not None:
            own_tokens, step_tokens = server_timing.tokens.own, server_timing.tokens.step
            cached_tokens, prompt_tokens = server_timing.tokens.cached, server_timing.tokens.prompt
            if 0 < own_tokens < step_tokens:  # other requests shared these engine steps
                seconds *= own_tokens / step_tokens
        # No prefill here, or one of unknown length: nothing to learn.
        is_measured = has_compute and prompt_tokens
        measured_s = seconds if is_measured else None
        self.prediction_error_s = self.state.record_first_token(
            self.request, first_token_us, measured_s, cached_tokens, self.key, prompt_tokens
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
        seconds = (first_token_us - self.sent_us) / US_PER_SECOND if had_instance_alone else None
        self.prediction_error_s = self.state.record_first_token(
            self.request,
            first_token_us,
            seconds,
            self.cached_tokens,
            self.key,
            # A whole answer arrives long after its first token: it
            # ends the entry, but judges nothing.
            is_measured=is_streaming,
        )

    def record_chunk(self, data: bytes) -> None:
        """Check a later chunk (`data`) of a stream whose first events preceded the engine for a token."""
        if DELTA_MARKER in data:
            self.awaits_delta = False
            self.state.record_first_token(
                self.request, clock.now_us(), None, self.cached_tokens, self.key, is_measured=False
            )

    def record_end(self) -> None:
        """Remove the entry when the attempt ends, however it does; idempotent."""
        self.state.record_left(self.request, clock.now_us(), self.key)
