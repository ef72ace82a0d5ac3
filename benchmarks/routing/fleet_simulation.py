# SPDX-License-Identifier: Apache-2.0
"""A discrete-event simulation of instances behind the router's own policies, for simulate.py."""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

from benchmarks.routing.load_kinds import ADAPTERS
from benchmarks.routing.mooncake_traces import (
    PREFILL_COST,
    TRACE_BLOCK_TOKENS,
    TraceRow,
    compute_speedup,
)
from benchmarks.routing.oracle_policy import OraclePolicy
from benchmarks.routing.peer_policies import PEER_POLICIES, DynamoPolicy
from benchmarks.routing.predicted_latency import PredictedLatencyPolicy
from benchmarks.routing.simulated_instance import SimulatedInstance
from ttft_otel.explain.whatif.engine_model import QueuedPrompt
from ttft_otel.model.endpoints import COMPLETIONS_PATH
from ttft_otel.model.statistics import compute_quantile
from ttft_otel.router import types
from ttft_otel.router.routing.policies.block_index import BlockHolders, RecentBlocks, SentHistory
from ttft_otel.router.routing.policies.policy_registry import POLICIES
from ttft_otel.router.routing.policies.policy_state import US_PER_SECOND, PolicyOptions, PolicyState
from ttft_otel.router.routing.policies.prefill_model import compute_work

MODEL_NAME = "model"
SESSION_HEADER = "x-session"
ADAPTER_NAMES = [str(number) for number in range(1, ADAPTERS + 1)]  # as an instance lists them
SLOWED = 0.4  # speed of an instance that slows
ENCODE_US = 40_000  # of an image
# An answer is good that begins within GOOD_TTFT_S and GOOD_RATIO times the prefill with nothing cached.
GOOD_TTFT_S, GOOD_RATIO = 0.5, 1.5


class Simulation:
    """The simulation of one case with one policy."""

    def __init__(
        self, case: dict[str, Any], policy: str, seed: int, max_queue_s: float = 0.0
    ) -> None:
        # Terms of a case: benchmarks/routing/cases.json.
        size, slow = case["instances"], round(case["instances"] * case["slow"])
        # Whole microseconds, as in the router: sums of floats would order events by rounding errors.
        self.lag = round(case["lag"] * US_PER_SECOND)
        self.event = case["event"]
        # The counter breaks ties of time in the order of scheduling; functions cannot be compared.
        self.events: list[tuple[int, int, Callable[[int], None]]] = []
        self.event_order = itertools.count()
        self.servers = [
            SimulatedInstance(
                types.parse_instance_url(f"http://127.0.0.1:{9000 + n}", "prefill"),
                0.5 if n < slow else 1.0,
                RecentBlocks(case["cache"]),
                case.get("adapters", 0),
                case["noise"],
                # Of its own: how often a policy has ties must not change the noise.
                random.Random(f"noise {seed} {n}"),
                self.schedule_event,
            )
            for n in range(size)
        ]
        self.by_url = {each.instance.url: each for each in self.servers}
        if case.get("adapters"):
            for each in self.servers:
                each.instance.base_models = dict.fromkeys(ADAPTER_NAMES, MODEL_NAME)
        index = (
            BlockHolders(TRACE_BLOCK_TOKENS)
            if case["index"] == "events"
            # The size of the instances' own caches: the best case for a router that only remembers.
            else SentHistory(TRACE_BLOCK_TOKENS, case["cache"])
        )
        self.index = index
        # Peers that need predicted times get them from the same fitted model as `calibrated`.
        score: Literal["trapezoid", "calibrated"] = (
            "trapezoid" if policy == "trapezoid" else "calibrated"
        )
        options = PolicyOptions(
            session_key=SESSION_HEADER, ttft_model=score, max_queue_s=max_queue_s
        )
        self.state = PolicyState(index, options, tie_breaker=random.Random(f"ties {seed}"))
        policy_classes = {**POLICIES, **PEER_POLICIES}
        name = "ttft" if policy in ("trapezoid", "calibrated") else policy
        knowing = {each.name: each for each in (OraclePolicy, PredictedLatencyPolicy)}
        self.policy = (
            knowing[policy](self.by_url, self.state)
            if policy in knowing
            else policy_classes[name](self.state)
        )
        self.encoders_free_us = [0] * case.get("encoders", 0)
        self.arrived_us: dict[str, int] = {}
        self.now_us = 0
        self.ttfts_s: list[float] = []
        self.ttfts_by_id_s: dict[str, float] = {}
        self.tpots_s: list[float] = []  # means of answers
        self.in_time = self.cached_tokens = 0

    @property
    def mean_ttft_s(self) -> float:
        """The mean of all first tokens so far, seconds."""
        return statistics.fmean(self.ttfts_s)

    def schedule_event(self, when_us: int, action: Callable[[int], None]) -> None:
        """Call `action` at the time `when_us` of the simulation."""
        heapq.heappush(self.events, (when_us, next(self.event_order), action))

    def run(self, rows: Sequence[TraceRow], speed: float) -> None:
        """From the first arrival to the last token; arrivals are only looked at when due."""
        for number, row in enumerate(rows):
            when = round(row.arrival_s / speed * US_PER_SECOND)
            # Up to and including `when`: an instance that is done at this moment counts as free.
            while self.events and self.events[0][0] <= when:
                self._run_next_event()
            if number == len(rows) // 2:
                self._change_first_instance()
            self.now_us = when
            encoded = self.encode_images(row.images, when)
            self.arrived_us[str(number)] = when
            # As in the router, an instance is chosen when a request's images are encoded.
            if encoded > when:
                self.schedule_event(encoded, partial(self.handle_arrival, number, row))
            else:
                self.handle_arrival(number, row, when)
        while self.events:
            self._run_next_event()

    def _change_first_instance(self) -> None:
        """What happens to it in the middle of the case, if anything."""
        first = self.servers[0]
        if self.event == "slows":
            first.speed *= SLOWED
        elif self.event == "restarts":
            gone = list(first.cache)
            first.cache = RecentBlocks(first.cache.max_blocks)
            self.index.remove_blocks(first.instance.url, gone)

    def _run_next_event(self) -> None:
        when, _, do = heapq.heappop(self.events)
        self.now_us = when
        do(when)

    def handle_arrival(self, number: int, row: TraceRow, now_us: int) -> None:
        """A request arrives at the router."""
        # No body: policies decide by tokens and blocks, which the trace already has.
        request = types.RoutingRequest(
            "prefill",
            COMPLETIONS_PATH,
            str(row.adapter or MODEL_NAME),
            str(number),
            {SESSION_HEADER: row.session},
            b"",
            prompt_tokens=row.tokens,
            block_keys=row.blocks,
        )
        self.route_request(request, row, now_us)

    def route_request(self, request: types.RoutingRequest, row: TraceRow, now_us: int) -> None:
        """The router chooses an instance for a request, which is sent there."""
        # All instances every time: health, retries and circuit breakers are not simulated.
        choice = self.policy.choose_instance(
            request, [each.instance for each in self.servers], now_us, False
        )
        self.state.record_sent(request, choice, now_us)
        choice.instance.in_flight += 1
        self.send_request(choice.instance, request, row, now_us)

    def encode_images(self, images: int, now_us: int) -> int:
        """Each goes to the encoder that is free soonest; returns when the last one is encoded."""
        done_us = now_us
        for _ in range(images):
            free_us = heapq.heappop(self.encoders_free_us)
            done_us = max(free_us, now_us) + ENCODE_US
            heapq.heappush(self.encoders_free_us, done_us)
        return done_us

    def send_request(
        self, instance: types.Instance, request: types.RoutingRequest, row: TraceRow, now_us: int
    ) -> None:
        """The instance gets a request."""
        self.by_url[instance.url].add_request(
            request,
            row.output_tokens,
            now_us,
            self.finish_prefill,
            lambda request, prompt: self.finish_answer(instance, request, prompt),
        )

    def finish_answer(
        self, instance: types.Instance, request: types.RoutingRequest, prompt: QueuedPrompt
    ) -> None:
        """The last token."""
        instance.in_flight -= 1
        tpot_s = 0.0
        if prompt.decode_steps > 0:
            decoding_us = prompt.last_token - prompt.first_token
            tpot_s = decoding_us / prompt.decode_steps / US_PER_SECOND
            self.tpots_s.append(tpot_s)
        if isinstance(self.policy, DynamoPolicy | PredictedLatencyPolicy):
            self.policy.record_end(request.request_id, tpot_s)

    def finish_prefill(
        self, server: SimulatedInstance, request: types.RoutingRequest, prompt: QueuedPrompt
    ) -> None:
        """The first token; the cache changes now, and the router hears of it later."""
        now_us = prompt.first_token
        # At the end of the prefill: vLLM publishes a block when it is computed.
        new, gone = server.cache.record_use(request.block_keys)
        url = server.instance.url
        # SentHistory hears nothing: it learns in record_first_token() below.
        if isinstance(self.index, BlockHolders) and not isinstance(self.index, SentHistory):
            self.schedule_event(
                now_us + self.lag, lambda _: self.report_cache_change(url, new, gone)
            )
        # As the router reads it from Server-Timing: its part of the steps that it was in.
        entry = self.state.pending.find_entry((request.leg, request.request_id))
        decodes = entry.decodes if entry else 0
        share = min(prompt.tokens / max(prompt.step_tokens - decodes, 1), 1.0)
        seconds = prompt.compute * share / US_PER_SECOND
        self.state.record_first_token(request, now_us, seconds, prompt.context)
        self.cached_tokens += prompt.context
        ttft_s = (now_us - self.arrived_us.pop(request.request_id)) / US_PER_SECOND
        self.ttfts_s.append(ttft_s)
        if isinstance(self.policy, PredictedLatencyPolicy):
            self.policy.record_first_token(request.request_id, ttft_s)
        self.ttfts_by_id_s[request.request_id] = ttft_s
        alone_s = PREFILL_COST.predict_seconds(compute_work(request.prompt_tokens, 0))
        self.in_time += ttft_s <= GOOD_TTFT_S + GOOD_RATIO * alone_s

    def report_cache_change(self, url: str, new: list[int], gone: list[int]) -> None:
        """Apply the KV events of a prefill to the router's index."""
        self.index.add_blocks(url, new)
        self.index.remove_blocks(url, gone)


def simulate_case(
    case: dict[str, Any], policy: str, rows: tuple[TraceRow, ...], seed: int
) -> dict[str, Any]:
    """Simulate one case with one policy; returns its figures, in seconds."""
    simulation = Simulation(case, policy, seed)
    # Load is relative to what all instances can do with nothing cached (cases.json).
    capacity = sum(each.speed for each in simulation.servers)
    # The simulation's own cost, most of it the engines'; arrivals are read before.
    started = time.process_time()
    simulation.run(rows, compute_speedup(rows, case["load"], capacity))
    cpu_s = time.process_time() - started
    # Nothing lost: a request without a first token would flatter the mean.
    assert len(simulation.ttfts_s) == len(rows) and not len(simulation.state.pending)
    figures = {
        "mean": simulation.mean_ttft_s,
        "p50": compute_quantile(simulation.ttfts_s, 0.5),
        "p99": compute_quantile(simulation.ttfts_s, 0.99),
        "good": simulation.in_time / len(rows),
        "tpot_p99": compute_quantile(simulation.tpots_s, 0.99),
        "hit": simulation.cached_tokens / sum(row.tokens for row in rows),
        "cpu": cpu_s,
    }
    if policy == "calibrated":
        # Fits without a URL are the fleet's common ones.
        fits = [fit for (_, url), fit in simulation.state.models.list_fits().items() if url]
        figures["prefill_mape"] = compute_known_mean(fit.quality.mape for fit in fits)
        figures["prefill_r2"] = compute_known_mean(fit.quality.r2 for fit in fits)
        figures["ttft_mape"] = compute_known_mean(
            each.mape for each in simulation.state.outcomes.values()
        )
        figures["ttft_r2"] = compute_known_mean(
            each.r2 for each in simulation.state.outcomes.values()
        )
    return {name: round(value, 5) for name, value in figures.items()}


def compute_known_mean(values: Iterable[float | None]) -> float:
    """The mean of the values that are not None."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else 0.0
