# SPDX-License-Identifier: Apache-2.0
"""Replicas of a router with --shared-state in the simulation of fleet_simulation.py, for worker_sharing.py.

They share what ttft_otel/router/shared_state does and no more: neither blocks nor measured times. A replica
exchanges with the store when its load or another one's has changed, EXCHANGE_INTERVAL_S after the last
time at the earliest.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, Final

from benchmarks.routing.worker_simulation import LEG, SimulatedWorker, WorkerSimulation, deliver
from ttft_otel.router.routing.policies.policy_state import US_PER_SECOND
from ttft_otel.router.shared_state.store_link import EXCHANGE_INTERVAL_S
from ttft_otel.router.workers import messages

ROUND_TRIP_S: Final = 0.001  # to the store, and until the replica's event loop has read its answer
_ROUND_TRIP_US: Final = round(ROUND_TRIP_S * US_PER_SECOND)
_INTERVAL_US: Final = round(EXCHANGE_INTERVAL_S * US_PER_SECOND) + _ROUND_TRIP_US


class SharedStateSimulation(WorkerSimulation):
    """`worker_count` replicas that share their load through a store."""

    def __init__(
        self, case: dict[str, Any], policy: str, seed: int, worker_count: int, are_sharing: bool
    ) -> None:
        super().__init__(case, policy, seed, worker_count, are_sharing)
        self.exchanged_us: Counter[int] = (
            Counter()
        )  # the latest exchange, by replica; it may be due

    def tell_others(self, owner: int, message: messages.LoadMessage, now_us: int) -> None:
        """Deliver what replicas share of a message."""
        if isinstance(message, messages.Sent):
            work = (message.tokens_to_compute, message.pairs)
            message = messages.Sent(message.span_id, LEG, message.url, message.sent_us, *work)
        elif isinstance(message, messages.FirstToken):
            message = messages.FirstToken(message.span_id, now_us)
        for replica, due_us in self.list_readers(owner, now_us):
            self.schedule_event(due_us, functools.partial(deliver, replica, owner, message))

    def list_readers(self, owner: int, now_us: int) -> list[tuple[SimulatedWorker, int]]:
        """The other replicas, and when each has what happens at the replica `owner` now."""
        if not self.are_sharing:
            return []
        # The store tells the others when it is written, and each of them asks what.
        told_us = self._find_exchange_us(owner, now_us) + _ROUND_TRIP_US
        return [
            (replica, self._find_exchange_us(number, told_us) + _ROUND_TRIP_US)
            for number, replica in enumerate(self.workers)
            if number != owner
        ]

    def _find_exchange_us(self, replica: int, now_us: int) -> int:
        """When `replica` exchanges next, which has a reason to since `now_us`."""
        latest_us = self.exchanged_us[replica]
        if now_us > latest_us:
            self.exchanged_us[replica] = max(now_us, latest_us + _INTERVAL_US)
        return self.exchanged_us[replica]
