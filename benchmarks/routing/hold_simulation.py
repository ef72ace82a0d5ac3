# SPDX-License-Identifier: Apache-2.0
"""What --max-queue-ms does to TTFTs, in the simulation of fleet_simulation.py: cases in, a table out.

    python -m benchmarks.routing.hold_simulation --traces DIR [--requests N] [--seeds N ...]

The kinds of load_kinds.py at loads at which requests wait at all instances. Figures: seconds, without the
flag and with it; short prompts have at most SHORT_TOKENS.
"""

from __future__ import annotations

import json
import statistics
import sys
from functools import partial
from typing import Any, Final

from benchmarks.routing import trace_options
from benchmarks.routing.fleet_simulation import Simulation
from benchmarks.routing.load_kinds import read_rows
from benchmarks.routing.mooncake_traces import TraceRow, compute_speedup
from ttft_otel.model.statistics import compute_quantile
from ttft_otel.router import types
from ttft_otel.router.limits import RouterLimits
from ttft_otel.router.proxy.admission import HoldQueue
from ttft_otel.router.routing.policies.policy_state import US_PER_SECOND
from ttft_otel.router.timeline import Hold

SHORT_TOKENS: Final = 1000
# Kind, instances, load: of cases.json's terms, the rest as in its first case.
LOADS: Final = (
    ("conversation", 8, 0.85),
    ("conversation", 8, 1.2),
    ("bursts", 8, 1.2),
    ("heavy_tails", 1, 0.85),
    ("heavy_tails", 2, 0.85),
    ("heavy_tails", 8, 1.1),
    ("long_decodes", 8, 1.8),
)
LIMITS_S: Final = (0.0, 0.25, 0.5, 1.0)  # 0: without the flag
FIGURES: Final = ("mean", "p99", "short_p99", "long_p99", "held")


class HoldSimulation(Simulation):
    """A case with --max-queue-ms; max_queue_s: 0 for a case without it."""

    def __init__(self, case: dict[str, Any], seed: int, max_queue_s: float) -> None:
        super().__init__(case, "calibrated", seed, max_queue_s)
        self.max_queue_s = max_queue_s
        candidates = [each.instance for each in self.servers]
        self.hold_queue = HoldQueue(
            self.policy,
            lambda _leg, _model: candidates,
            RouterLimits(max_held=1 << 30, first_byte_timeout=0),
            lambda delay_s, action: self.schedule_event(
                self.now_us + round(delay_s * US_PER_SECOND), lambda _: action()
            ),
            lambda: self.now_us,
        )

    def route_request(self, request: types.RoutingRequest, row: TraceRow, now_us: int) -> None:
        """The router sends a request, or holds it first."""
        if not self.max_queue_s or self.hold_queue.is_free(request):
            super().route_request(request, row, now_us)
            return
        go_on = partial(self._end_hold, request, row)
        self.hold_queue.add_request(request, 0, Hold(now_us), go_on)

    def list_ttfts_s(self, rows: tuple[TraceRow, ...], are_short: bool) -> list[float]:
        """TTFTs of short prompts, or of the others."""
        return [
            self.ttfts_by_id_s[str(number)]
            for number, row in enumerate(rows)
            if (row.tokens <= SHORT_TOKENS) == are_short
        ]

    def _end_hold(self, request: types.RoutingRequest, row: TraceRow, error: object) -> None:
        assert error is None, error
        super().route_request(request, row, self.now_us)


def simulate_hold(
    case: dict[str, Any], rows: tuple[TraceRow, ...], seed: int, max_queue_s: float
) -> dict[str, float]:
    """FIGURES of one case; max_queue_s: 0 for one without the flag."""
    simulation = HoldSimulation(case, seed, max_queue_s)
    capacity = sum(each.speed for each in simulation.servers)
    simulation.run(rows, compute_speedup(rows, case["load"], capacity))
    assert len(simulation.ttfts_s) == len(rows) and not len(simulation.hold_queue)
    quantiles = [
        compute_quantile(each, 0.99) if each else 0.0
        for each in (
            simulation.ttfts_s,
            simulation.list_ttfts_s(rows, True),
            simulation.list_ttfts_s(rows, False),
        )
    ]
    held = sum(simulation.hold_queue.counts.values()) / len(rows)
    return dict(zip(FIGURES, (simulation.mean_ttft_s, *quantiles, held), strict=True))


def main() -> None:
    """Simulate LOADS with each of LIMITS_S; a row of the table is the mean over all seeds."""
    parser = trace_options.make_parser(__doc__.split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = trace_options.parse_options(parser)
    usual = json.loads(options.list.read_text("utf-8"))["cases"][0]
    sys.stdout.write(f"| case | ms | {' | '.join(FIGURES)} |\n|{'---|' * (len(FIGURES) + 2)}\n")
    for kind, instances, load in LOADS:
        case = {**usual, "kind": kind, "instances": instances, "load": load}
        for limit_s in LIMITS_S:
            found = [
                simulate_hold(
                    case, read_rows(kind, options.traces, seed, options.requests), seed, limit_s
                )
                for seed in options.seeds
            ]
            cells = [f"{statistics.fmean(each[name] for each in found):.3f}" for name in FIGURES]
            name = f"{kind}, {instances} at {load}"
            sys.stdout.write(f"| {name} | {limit_s * 1000:g} | {' | '.join(cells)} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
