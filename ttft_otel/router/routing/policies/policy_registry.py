# SPDX-License-Identifier: Apache-2.0
"""The policies by their names in --routing-logic; used by the router and by simulations."""

from __future__ import annotations

from typing import Final, Protocol

from ttft_otel.router.routing.policies.least_ttft import LeastTtftPolicy
from ttft_otel.router.routing.policies.load_policies import (
    LeastRequestsPolicy,
    RequestRatePolicy,
    RoundRobinPolicy,
)
from ttft_otel.router.routing.policies.policy_state import PolicyState
from ttft_otel.router.routing.policies.prefix_policies import KvAwarePolicy, PrefixPolicy
from ttft_otel.router.routing.policies.session_ring import SessionPolicy
from ttft_otel.router.types import RoutingPolicy


class PolicyFactory(Protocol):
    """A policy class: its requirements are known before an instance of it exists."""

    tracks_load: bool
    reads_prompts: bool

    def __call__(self, state: PolicyState, /) -> RoutingPolicy:
        """Create the policy of one leg over its `state`."""
        ...


POLICIES: Final[dict[str, PolicyFactory]] = {
    "round_robin": RoundRobinPolicy,
    "session": SessionPolicy,
    "qps": RequestRatePolicy,
    "least_requests": LeastRequestsPolicy,
    "prefix": PrefixPolicy,
    "kvaware": KvAwarePolicy,
    "ttft": LeastTtftPolicy,
}
