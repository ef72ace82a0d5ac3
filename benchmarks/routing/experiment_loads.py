# SPDX-License-Identifier: Apache-2.0
"""What experiments.py compares and under which load: flags of `ttft-otel router` and of `ttft-otel bench`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PREFIX_INDEX_FLAGS: Final = ("--prefix-index", "kv-events")  # of every router that looks at prompts
ROUTER_FLAGS_BY_POLICY: Final[dict[str, tuple[str, ...]]] = {
    # The prefix index is the same for all: policies are compared, not what they know.
    "trapezoid": ("--routing-logic", "ttft", "--ttft-model", "trapezoid", *PREFIX_INDEX_FLAGS),
    "calibrated": ("--routing-logic", "ttft", "--ttft-model", "calibrated", *PREFIX_INDEX_FLAGS),
    "kvaware": ("--routing-logic", "kvaware", *PREFIX_INDEX_FLAGS),
    "round_robin": ("--routing-logic", "round_robin"),
    "least_requests": ("--routing-logic", "least_requests"),
    # kvaware where no prompt is too long to follow its prefix
    "kvaware-always": (
        *("--routing-logic", "kvaware", *PREFIX_INDEX_FLAGS),
        *("--kv-aware-threshold", "1000000"),
    ),
}
# The order of tables, in which results may have a policy that there is no more: qps chose by rate.
SHOWN_POLICIES: Final = ("trapezoid", "calibrated", "kvaware", "qps", *ROUTER_FLAGS_BY_POLICY)
# The others on demand only: each policy adds a run to every round.
MEASURED_POLICIES: Final = ("trapezoid", "calibrated", "kvaware", "least_requests", "round_robin")


@dataclass(frozen=True, slots=True)
class Experiment:
    """A load: bench's flags, its rate in requests per second, and how long requests are sent.

    `share`: instead of a rate, how much of what both servers can do; experiments.py measures that first.
    """

    name: str
    flags: tuple[str, ...]
    seconds: float
    rate: float = 0.0
    share: float = 0.0

    def build_load_flags(self, seed: int) -> list[str]:
        """Flags of one run."""
        count = ("--requests", str(round(self.rate * self.seconds)))
        # Conversations pace themselves: the time to think makes the rate.
        paced = () if "--concurrency" in self.flags else ("--rate", f"{self.rate:g}")
        return [*self.flags, "--seed", str(seed), *paced, *count]

    def build_saturation_flags(self, seed: int) -> list[str]:
        """Flags of a run in which both servers always have something to do."""
        # Four times as many requests as clients: compute_capacity() cuts the first and last of them off.
        closed = (
            "--concurrency",
            str(SATURATION_CONCURRENCY),
            "--requests",
            str(4 * SATURATION_CONCURRENCY),
        )
        return [*self.flags, "--seed", str(seed), *closed]


# Four a server: more only wait, since one core computes one prefill at a time.
SATURATION_CONCURRENCY: Final = 8
MULTI_ROUND_FLAGS: Final = (
    *("--turns", "10", "--concurrency", "5", "--prefixes", "20"),
    *("--input-len", "20", "--output-len", "100"),
)
EXPERIMENTS: Final = {
    each.name: each
    for each in (
        Experiment(
            "multi-round",
            (*MULTI_ROUND_FLAGS, "--prefix-len", "300", "--think", "1"),
            22.0,
            rate=2.5,
        ),
        Experiment(
            "multi-round-long",
            # A history ten times as long makes each request dearer, hence the lower rate.
            (*MULTI_ROUND_FLAGS, "--prefix-len", "2100", "--think", "2"),
            22.0,
            rate=1.5,
        ),
        Experiment(
            "shared-prefix",
            (
                *("--api", "completions", "--prefix-len", "260"),
                *("--input-len", "2600", "--spread", "0.95", "--output-len", "8"),
            ),
            36.0,
            # By share: capacity depends on the machine, and unequal lengths make a rate hard to guess.
            share=0.75,
        ),
    )
}
# Before the first round each router gets the same requests; `calibrated` learns from them.
WARMUP_FLAGS: Final = (
    *("--api", "completions"),
    *("--input-len", "1500", "--spread", "0.9", "--output-len", "8"),
    *("--requests", "20", "--concurrency", "2"),
)

# One prompt after the other, to see how far two servers disturb each other.
SINGLE_PROMPT_FLAGS: Final = (
    *("--api", "completions"),
    *("--input-len", "2600", "--output-len", "1", "--requests", "5", "--concurrency", "1"),
)


def order_policies(policies: tuple[str, ...], number: int) -> list[str]:
    """The order of the policies in round `number`: forwards, then backwards, rotated by two per pair."""
    # Forwards and backwards: a drift of the machine during a pair of rounds cancels in their sum.
    start = number // 2 * 2 % len(policies)
    turned = [*policies[start:], *policies[:start]]
    return turned if number % 2 == 0 else turned[::-1]
