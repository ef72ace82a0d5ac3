# SPDX-License-Identifier: Apache-2.0
"""The policies by the name that users give them; whoever starts a router or a simulation takes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ttft_otel.router.choose import Policy, RoundRobin
from ttft_otel.router.policies.kvaware import Kvaware
from ttft_otel.router.policies.least import Least
from ttft_otel.router.policies.prefix import Prefix
from ttft_otel.router.policies.qps import Qps
from ttft_otel.router.policies.session import Session
from ttft_otel.router.policies.state import State
from ttft_otel.router.policies.ttft import Ttft

POLICIES: Final[dict[str, Callable[[State], Policy]]] = {
    "round_robin": lambda _: RoundRobin(),
    "session": Session,
    "qps": Qps,
    "least_requests": Least,
    "prefix": Prefix,
    "kvaware": Kvaware,
    "ttft": Ttft,
}
