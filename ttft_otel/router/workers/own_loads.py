# SPDX-License-Identifier: Apache-2.0
"""What this worker has under way, told to the others as it happens; pool and policies call it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from ttft_otel import clock
from ttft_otel.router.routing.policies.pending_load import RequestKey
from ttft_otel.router.routing.policies.policy_state import PrefillSample
from ttft_otel.router.routing.routing_service import RoutingService
from ttft_otel.router.timeline import Attempt
from ttft_otel.router.types import DEFAULT_POLICY
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.router.workers.messages import (
    MAX_BLOCK_KEYS,
    Ended,
    FirstToken,
    InstanceTotals,
    Message,
    Sent,
    Totals,
)


class OwnLoads:
    """The attempts of this worker that others know of. send: tells all of them."""

    def __init__(
        self, pool: InstancePool, routing: RoutingService, send: Callable[[Message], None]
    ) -> None:
        self.pool, self.routing, self.send = pool, routing, send
        self._open: dict[str, Sent] = {}  # by span ID, in the order of sending

    def start(self) -> None:
        """Tell of everything from now on."""
        self.pool.attempt_listener = self
        self.routing.listen_to_first_tokens(self.record_first_token)

    def record_sent(self, attempt: Attempt) -> None:
        """Tell of an attempt that starts, unless nothing is decided by load on its leg."""
        if attempt.policy == DEFAULT_POLICY:
            return
        state = self.routing.get_leg_policy(attempt.leg).state
        # Booked before the attempt is reported (UpstreamClient._send_attempt), so it is there.
        entry = state.pending.find_entry((attempt.leg, attempt.span_id))
        sent = Sent(attempt.span_id, attempt.leg, attempt.instance.url, attempt.sent_us)
        if entry is not None:
            sent = Sent(
                attempt.span_id,
                attempt.leg,
                entry.url,
                entry.sent_us,
                True,
                *entry.work,
                # Cut for the size of a datagram; prefixes match from their beginning.
                entry.block_keys[:MAX_BLOCK_KEYS],
            )
        self._open[attempt.span_id] = sent
        self.send(sent)

    def record_first_token(
        self, key: RequestKey, now_us: int, sample: PrefillSample | None
    ) -> None:
        """Tell of the first token of the request of `key`, and what its prefill took."""
        leg, span_id = key
        sent = self._open.get(span_id)
        # It was not told of: nothing is decided by load on its leg, or it is over.
        if sent is None:
            return
        # No work any more, also for a worker that asks for all that is under way.
        self._open[span_id] = Sent(span_id, leg, sent.url, sent.sent_us)
        self.send(FirstToken(span_id, leg, now_us, *(() if sample is None else sample)))

    def record_ended(self, attempt: Attempt) -> None:
        """Tell of its end."""
        if self._open.pop(attempt.span_id, None) is not None:
            self.send(Ended(attempt.span_id, attempt.leg, clock.now_us()))

    def list_open(self) -> list[Sent]:
        """Every attempt under way, for a worker that has missed something."""
        return list(self._open.values())

    def build_totals(self) -> Totals:
        """How much is under way at each instance, and the results of what has ended there."""
        # Counted anew each time: it is what finds mistakes in running counts.
        in_flight = Counter((sent.leg, sent.url) for sent in self._open.values())
        pending = Counter((sent.leg, sent.url) for sent in self._open.values() if sent.is_pending)
        results = {(each.leg, each.url): dict(each.attempt_results) for each in self.pool}
        # Requests may be under way at an instance that has left the pool.
        places: Final = {**results, **{place: {} for place in in_flight if place not in results}}
        return Totals(
            [
                InstanceTotals(*place, in_flight[place], pending[place], results_there)
                for place, results_there in places.items()
            ]
        )
