# SPDX-License-Identifier: Apache-2.0
"""What live.py compares and under which load: flags of `ttft-otel router` and of `ttft-otel bench`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ROUTERS: Final[dict[str, tuple[str, ...]]] = {
    "trapezoid": ("--routing-logic", "ttft", "--ttft-model", "trapezoid"),
    "calibrated": ("--routing-logic", "ttft", "--ttft-model", "calibrated"),
    "kvaware": ("--routing-logic", "kvaware"),
    "qps": ("--routing-logic", "qps"),
    "round_robin": ("--routing-logic", "round_robin"),
    "least_requests": ("--routing-logic", "least_requests"),
    # kvaware where no prompt is too long to follow its prefix
    "kvaware-always": ("--routing-logic", "kvaware", "--kv-aware-threshold", "1000000"),
}
PREFIXES: Final = ("--prefix-index", "kv-events")  # of every router
POLICIES: Final = ("trapezoid", "calibrated", "kvaware", "qps", "round_robin")


@dataclass(frozen=True, slots=True)
class Experiment:
    """A load: bench's flags, its rate in requests per second, and how long requests are sent."""

    name: str
    flags: tuple[str, ...]
    rate: float
    seconds: float

    def load(self, seed: int) -> list[str]:
        """Flags of one run."""
        paced = (
            ("--qps", f"{self.rate:g}", "--time", f"{self.seconds:g}")
            if self.name == "multi-round"
            else ("--rate", f"{self.rate:g}", "--requests", str(round(self.rate * self.seconds)))
        )
        same = ("--dataset", self.name, "--seed", str(seed))
        return [*same, *self.flags, *paced]


EXPERIMENTS: Final = {
    each.name: each
    for each in (
        Experiment(
            "multi-round",
            (
                *("--num-users", "5", "--num-rounds", "10", "--max-unfinished", "20"),
                *("--user-history-prompt", "200", "--answer-len", "100"),
            ),
            rate=2.0,
            seconds=40.0,
        ),
        Experiment(
            "shared-prefix",
            (
                *("--api", "completions", "--prefix-len", "260"),
                *("--input-len", "2600", "--spread", "0.95", "--output-len", "8"),
            ),
            rate=1.4,
            seconds=45.0,
        ),
    )
}
# Before the first round each router gets the same requests; `calibrated` learns from them.
WARM: Final = (
    *("--dataset", "random", "--api", "completions"),
    *("--input-len", "1500", "--spread", "0.9", "--output-len", "8"),
    *("--requests", "16", "--concurrency", "2"),
)


def order(policies: tuple[str, ...], number: int) -> list[str]:
    """Who comes when in this round: forwards, then backwards, each pair one place further."""
    start = number // 2 * 2 % len(policies)
    turned = [*policies[start:], *policies[:start]]
    return turned if number % 2 == 0 else turned[::-1]
