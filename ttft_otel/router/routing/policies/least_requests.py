# SPDX-License-Identifier: Apache-2.0
"""Policy `least_requests`: fewest requests in flight; the default of encoder and decode legs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ttft_otel.router.routing.policies.policy_state import PolicyState
from ttft_otel.router.types import Decision, Instance, RoutingPolicy, RoutingRequest

SECONDS_PER_REQUEST: Final = 5.0  # of overdue answers that weigh as much as one more request


class LeastRequestsPolicy(RoutingPolicy):
    """Compares `Instance.all_in_flight`, which counts a request until its response has ended.

    An instance that owes answers for long, and has begun none meanwhile, counts as if it had more: one
    that hangs would keep its share for as long as its clients leave and others come.
    """

    def __init__(self, state: PolicyState) -> None:
        self._state = state

    def choose_instance(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """Choose the fewest requests in flight, ties at random; the score is that number."""
        counts = [
            # A request counts until its answer has ended: for decoding this is the load that
            # matters.
            each.all_in_flight + each.owed_answers.measure_overdue_s(now_us) / SECONDS_PER_REQUEST
            for each in instances
        ]
        position = self._state.choose_least(counts)
        return Decision(
            instances[position], counts[position], "least_requests", candidate_scores=counts
        )
