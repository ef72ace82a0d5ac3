# SPDX-License-Identifier: Apache-2.0
"""Decide whether the part of a router's TTFT that no server accounts for is small enough.

Tests of deployments with a router call `check_unaccounted_share` with a function that sends a request.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lab.evidence import Errors, ErrorTolerance, measure_until_decided
from lab.ttft_client import TimedResponse
from tests.live.bench import read_breakdown
from tests.live.echo_server import EchoServer, measure_clock
from ttft_otel.model import stages

MAX_SHARE = 0.05  # of the router's TTFT, at the median
# A hop costs 1 to 4 ms whatever the TTFT: of a short one that is a large share.
MIN_TTFT_US = 20_000
EXCESS_TOLERANCE = ErrorTolerance(-math.inf, 0.0, 4.0)


def sum_unaccounted_us(found: dict[str, int]) -> int:
    """The router's hops and `unattributed`."""
    hops = sum(us for name, us in found.items() if name.startswith("router.hop."))
    return hops + found[stages.UNATTRIBUTED]


def check_unaccounted_share(
    send_request: Callable[[int], TimedResponse],
    echo: EchoServer,
    *,
    min_rounds: int = 5,
    max_rounds: int = 21,
    added_share: float = 0.0,
) -> dict[str, list[float]]:
    """Check that the median of hops and `unattributed` is at most MAX_SHARE of the TTFT.

    send_request: gets the number of the round, sends one request through the router.
    added_share: a part of the TTFT that is counted as unaccounted, to prove that the check can fail.
    What `echo` takes in the same round is subtracted: that much the machine adds to any exchange.
    Returns the shares of the TTFT of all rounds, of "router" and of "echo".
    """
    shares: dict[str, list[float]] = {"router": [], "echo": []}

    def measure_round() -> Errors:
        found = read_breakdown(send_request(len(shares["router"])))
        assert found["ttft"] > MIN_TTFT_US, found
        ttft_ms, own_ms = found["ttft"] / 1000, sum_unaccounted_us(found) / 1000
        own_ms += added_share * ttft_ms
        echo_ms = measure_clock(echo)
        shares["router"].append(own_ms / ttft_ms)
        shares["echo"].append(echo_ms / ttft_ms)
        return {"unaccounted": own_ms - echo_ms - MAX_SHARE * ttft_ms}

    measure_until_decided(
        measure_round, lambda _: EXCESS_TOLERANCE, min_rounds=min_rounds, max_rounds=max_rounds
    )
    return shares
