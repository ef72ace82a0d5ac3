# SPDX-License-Identifier: Apache-2.0
"""Replicas of a router with --peers in the simulation of fleet_simulation.py, for worker_sharing.py.

What ttft_otel/router/peers tells and no more: neither blocks nor measured times. What happens within FLUSH_S
of a datagram shares the next one, which arrives NETWORK_S later.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, Final

from benchmarks.routing.worker_simulation import LEG, WorkerSimulation, deliver
from ttft_otel.router import types
from ttft_otel.router.peers.peer_link import FLUSH_S
from ttft_otel.router.routing.policies.pending_load import US_PER_SECOND
from ttft_otel.router.workers import messages

NETWORK_S: Final = 0.001  # between two hosts, and until the other's event loop has read it


class PeerSimulation(WorkerSimulation):
    """`worker_count` replicas that tell one another their load."""

    def __init__(
        self, case: dict[str, Any], policy: str, seed: int, worker_count: int, are_sharing: bool
    ) -> None:
        super().__init__(case, policy, seed, worker_count, are_sharing)
        self.sent_us: Counter[int] = Counter()  # when the latest datagram leaves, by replica

    def tell_others(self, owner: int, message: messages.LoadMessage, now_us: int) -> None:
        """Deliver what replicas tell of a message."""
        if isinstance(message, messages.Sent):
            work = (message.tokens_to_compute, message.pairs)
            message = messages.Sent(message.span_id, LEG, message.url, message.sent_us, *work)
        elif isinstance(message, messages.FirstToken):
            message = messages.FirstToken(message.span_id, now_us)
        due_us = self.choose_arrival_us(owner, now_us)
        for replica in self.list_others(owner):
            self.schedule_event(due_us, functools.partial(deliver, replica, owner, message))

    def tell_numbers(self, owner: int, instance: types.Instance, now_us: int) -> None:
        """Show all others what the replica `owner` has at `instance` when its datagram leaves."""
        due_us = self.choose_arrival_us(owner, now_us)
        changes = [
            (self.indices[instance.url], instance.in_flight, self.arrivals[owner, instance.url])
        ]
        for replica in self.list_others(owner):
            show = functools.partial(replica.siblings.apply_counts, owner, changes)
            self.schedule_event(due_us, show)

    def choose_arrival_us(self, owner: int, now_us: int) -> int:
        """When others have what happens at the replica `owner` now."""
        if now_us > self.sent_us[owner]:
            self.sent_us[owner] = max(now_us, self.sent_us[owner] + round(FLUSH_S * US_PER_SECOND))
        return self.sent_us[owner] + round(NETWORK_S * US_PER_SECOND)
