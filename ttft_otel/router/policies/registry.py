# SPDX-License-Identifier: Apache-2.0
"""The policies by the name that users give them; whoever starts a router or a simulation takes one."""

from __future__ import annotations

from typing import Final, Protocol

from ttft_otel.router.choose import Policy
from ttft_otel.router.policies.kvaware import Kvaware
from ttft_otel.router.policies.least import Least
from ttft_otel.router.policies.prefix import Prefix
from ttft_otel.router.policies.qps import Qps
from ttft_otel.router.policies.session import Session
from ttft_otel.router.policies.state import State
from ttft_otel.router.policies.ttft import Ttft
from ttft_otel.router.policies.turns import Turns


class Kind(Protocol):
    """A policy's class: what it needs, before there is one."""

    books: bool
    prompts: bool

    def __call__(self, state: State, /) -> Policy:
        """A leg's policy."""
        ...


POLICIES: Final[dict[str, Kind]] = {
    "round_robin": Turns,
    "session": Session,
    "qps": Qps,
    "least_requests": Least,
    "prefix": Prefix,
    "kvaware": Kvaware,
    "ttft": Ttft,
}
