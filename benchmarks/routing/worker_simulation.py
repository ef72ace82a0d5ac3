# SPDX-License-Identifier: Apache-2.0
"""Several workers of one router in the simulation of fleet_simulation.py, for worker_sharing.py.

Each has policies of its own and gets a random share of the requests. They tell one another by the messages
of ttft_otel/router/workers, which arrive TELL_S later.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.routing.fleet_simulation import MODEL_NAME, SESSION_HEADER, Simulation
from benchmarks.routing.mooncake_traces import TRACE_BLOCK_TOKENS, TraceRow, compute_speedup
from benchmarks.routing.peer_policies import PEER_POLICIES
from benchmarks.routing.simulated_instance import SimulatedInstance
from ttft_otel.explain.whatif.engine_model import QueuedPrompt
from ttft_otel.model.endpoints import COMPLETIONS_PATH
from ttft_otel.router import types
from ttft_otel.router.routing.policies.block_index import SentHistory
from ttft_otel.router.routing.policies.policy_registry import POLICIES
from ttft_otel.router.routing.policies.policy_state import (
    US_PER_SECOND,
    PolicyState,
    PrefillSample,
    RoutingPolicy,
)
from ttft_otel.router.workers import messages
from ttft_otel.router.workers.messages import MIN_TELL_INTERVAL_S, RemoteLoads

LEG: Final = "prefill"
# Two that decide in the same moment know nothing of each other: as long as four workers wait between two
# datagrams, and more than a decision and its message take.
TELL_S: Final = MIN_TELL_INTERVAL_S + 0.0002


@dataclass(slots=True)
class SimulatedWorker:
    """One worker: its own view of the instances, its policy, and the load of the others."""

    instances: dict[str, types.Instance]
    state: PolicyState
    policy: RoutingPolicy
    remote: RemoteLoads


class WorkerSimulation(Simulation):
    """`worker_count` workers; are_sharing: whether they tell one another anything."""

    def __init__(
        self, case: dict[str, Any], policy: str, seed: int, worker_count: int, are_sharing: bool
    ) -> None:
        super().__init__(case, policy, seed)
        self.are_sharing = are_sharing
        self.dispatch = random.Random(f"workers {seed}")
        self.workers = [
            self._build_worker(case, policy, f"ties {seed} {number}")
            for number in range(worker_count)
        ]
        self.owners: dict[str, int] = {}  # worker by request
        self.last_sample: PrefillSample | None = None

    def _build_worker(self, case: dict[str, Any], policy: str, ties: str) -> SimulatedWorker:
        """KV events reach every worker; what an index infers from requests is each one's own."""
        index = (
            SentHistory(TRACE_BLOCK_TOKENS, case["cache"])
            if isinstance(self.index, SentHistory)
            else self.index
        )
        state = PolicyState(index, self.state.options, tie_breaker=random.Random(ties))
        state.first_token_listener = self._keep_sample
        name = "ttft" if policy in ("trapezoid", "calibrated") else policy
        instances = {url: types.parse_instance_url(url, LEG) for url in self.by_url}
        remote = RemoteLoads(lambda _, url: instances.get(url), lambda _: state)
        made = (PEER_POLICIES.get(name) or POLICIES[name])(state)
        return SimulatedWorker(instances, state, made, remote)

    def handle_arrival(self, number: int, row: TraceRow, now_us: int) -> None:
        """A worker that the kernel chose by chance sends the request where its policy says."""
        owner = self.dispatch.randrange(len(self.workers))
        worker = self.workers[owner]
        request = types.RoutingRequest(
            *(LEG, COMPLETIONS_PATH, MODEL_NAME, str(number), {SESSION_HEADER: row.session}, b""),
            prompt_tokens=row.tokens,
            block_keys=row.blocks,
        )
        offered = list(worker.instances.values())
        choice = worker.policy.choose_instance(request, offered, now_us, False)
        worker.state.record_sent(request, choice, now_us)
        choice.instance.in_flight += 1
        self.owners[request.request_id] = owner
        self.tell_in_flight(owner, choice.instance, now_us)
        if worker.policy.reads_prompts:
            entry = worker.state.pending.find_entry((LEG, request.request_id))
            assert entry is not None
            work = (*entry.work, entry.block_keys)
            sent = messages.Sent(request.request_id, LEG, entry.url, now_us, *work)
            self.tell_others(owner, sent, now_us)
        self.send_request(choice.instance, request, row, now_us)

    def finish_prefill(
        self, server: SimulatedInstance, request: types.RoutingRequest, prompt: QueuedPrompt
    ) -> None:
        """The worker that sent the request has its first token."""
        owner, now_us = self.owners[request.request_id], prompt.first_token
        self.state, self.last_sample = self.workers[owner].state, None
        super().finish_prefill(server, request, prompt)
        learned = () if self.last_sample is None else self.last_sample
        token = messages.FirstToken(request.request_id, now_us, *learned)
        self.tell_others(owner, token, now_us)

    def finish_answer(
        self, instance: types.Instance, request: types.RoutingRequest, prompt: QueuedPrompt
    ) -> None:
        """The last token, of which the others hear."""
        super().finish_answer(instance, request, prompt)
        self.tell_in_flight(self.owners.pop(request.request_id), instance, prompt.last_token)

    def tell_others(self, owner: int, message: messages.LoadMessage, now_us: int) -> None:
        """Deliver a message to all other workers."""
        for worker in self.list_others(owner):
            due_us = now_us + round(TELL_S * US_PER_SECOND)
            self.schedule_event(due_us, functools.partial(deliver, worker, owner, message))

    def tell_in_flight(self, owner: int, instance: types.Instance, now_us: int) -> None:
        """Tell all other workers what the worker `owner` has at `instance` now."""
        self.tell_others(owner, messages.InFlight(LEG, instance.url, instance.in_flight), now_us)

    def list_others(self, owner: int) -> list[SimulatedWorker]:
        """Whom the worker `owner` tells anything."""
        others = (each for number, each in enumerate(self.workers) if number != owner)
        return list(others) if self.are_sharing else []

    def _keep_sample(self, _: tuple[str, str], __: int, sample: PrefillSample | None) -> None:
        self.last_sample = sample


def deliver(worker: SimulatedWorker, owner: int, message: messages.LoadMessage, _: int) -> None:
    """Have another worker take in a message of the worker `owner`; an event of the simulation."""
    if isinstance(message, messages.InFlight):
        worker.remote.apply_in_flight(owner, message)
    elif isinstance(message, messages.Sent):
        worker.remote.apply_sent(owner, message)
    elif isinstance(message, messages.FirstToken):
        worker.remote.apply_first_token(owner, message)


def run_workers(
    case: dict[str, Any],
    policy: str,
    rows: tuple[TraceRow, ...],
    seed: int,
    worker_count: int,
    are_sharing: bool,
    kind: type[WorkerSimulation] = WorkerSimulation,
) -> WorkerSimulation:
    """One case after its last first token. kind: how they tell one another."""
    simulation = kind(case, policy, seed, worker_count, are_sharing)
    capacity = sum(each.speed for each in simulation.servers)
    simulation.run(rows, compute_speedup(rows, case["load"], capacity))
    assert len(simulation.ttfts_s) == len(rows)
    for worker in simulation.workers:
        assert not len(worker.state.pending)
        assert not any(each.all_in_flight for each in worker.instances.values())
    return simulation
