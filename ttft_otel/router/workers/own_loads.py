# SPDX-License-Identifier: Apache-2.0
"""What this process has under way, reported as it happens; pool and policies call it.

load_link.py passes it on to other workers, shared_state/ to other replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from ttft_otel.router.routing.policies.pending_load import PendingRequest, RequestKey
from ttft_otel.router.routing.policies.policy_state import PrefillSample
from ttft_otel.router.routing.routing_service import RoutingService
from ttft_otel.router.timeline import Attempt
from ttft_otel.router.types import DEFAULT_POLICY, Instance
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.router.workers.messages import (
    MAX_BLOCK_KEYS,
    Ended,
    FirstToken,
    InFlight,
    LoadMessage,
    Sent,
    Totals,
)
from ttft_otel.tracing import clock

MAX_RESENT_KEYS: Final = 1 << 17  # blocks of all prompts that are reported anew: 1.2 MB
MAX_RESENT: Final = 16_384  # attempts that are reported anew


class OwnLoads:
    """The attempts of this process that others know of.

    Args:
        pool: The instances.
        routing: The policies, whose pending work is reported.
        report: Takes each message for the other workers.
    """

    def __init__(
        self, pool: InstancePool, routing: RoutingService, report: Callable[[LoadMessage], None]
    ) -> None:
        self.pool = pool
        self.routing = routing
        self.report = report
        self.on_change: Callable[[], None] | None = None  # with --shared-state
        self._pending: dict[str, Attempt] = {}  # by span ID, in the order of sending

    def start(self) -> None:
        """Report everything from now on."""
        self.pool.attempt_listener = self
        self.routing.listen_to_first_tokens(self.record_first_token)

    def record_sent(self, attempt: Attempt) -> None:
        """Report an attempt that starts, unless nothing is decided by load on its leg."""
        if attempt.policy == DEFAULT_POLICY:
            return
        self._report(_count_in_flight(attempt.instance))
        leg_policy = self.routing.get_policy(attempt.leg)
        # Who reads no prompts compares no work: the number is all that is needed.
        if leg_policy.reads_prompts:
            # Booked before the attempt is reported (UpstreamClient._send_attempt), so it is there.
            entry = leg_policy.state.pending.find_entry((attempt.leg, attempt.span_id))
            if entry is not None:
                self._pending[attempt.span_id] = attempt
                self._report(_describe_entry(attempt, entry, MAX_BLOCK_KEYS))

    def record_first_token(
        self, key: RequestKey, now_us: int, sample: PrefillSample | None
    ) -> None:
        """Report the first token of the request of `key`, and what its prefill took."""
        if self._pending.pop(key[1], None) is not None:
            self._report(FirstToken(key[1], now_us, *(() if sample is None else sample)))

    def record_ended(self, attempt: Attempt) -> None:
        """Report its end."""
        if attempt.policy != DEFAULT_POLICY:
            self._report(_count_in_flight(attempt.instance))
        # Where nothing is decided by load, others want to know of failures all the same.
        elif attempt.error:
            self._note_change()
        if self._pending.pop(attempt.span_id, None) is not None:
            self._report(Ended(attempt.span_id, clock.now_us()))

    def list_pending(self, max_keys: int = MAX_RESENT_KEYS) -> Iterator[Sent]:
        """Every attempt without a first token, with so many blocks of all prompts; bounded."""
        keys_left = max_keys
        for span_id, attempt in list(self._pending.items())[:MAX_RESENT]:
            state = self.routing.get_policy(attempt.leg).state
            entry = state.pending.find_entry((attempt.leg, span_id))
            # It has expired here, and so it has there.
            if entry is None:
                del self._pending[span_id]
                continue
            sent = _describe_entry(attempt, entry, min(MAX_BLOCK_KEYS, keys_left))
            keys_left -= len(sent.block_keys)
            yield sent

    def build_totals(self) -> Totals:
        """How much is under way, and the results of what has ended at each instance."""
        instances = [
            (
                each.leg,
                each.url,
                0 if self.routing.get_policy_name(each.leg) == DEFAULT_POLICY else each.in_flight,
                dict(each.attempt_results),
            )
            for each in self.pool
        ]
        return Totals(len(self._pending), instances)

    def _note_change(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def _report(self, message: LoadMessage) -> None:
        self.report(message)
        self._note_change()


def _count_in_flight(instance: Instance) -> InFlight:
    return InFlight(instance.leg, instance.url, instance.in_flight)


def _describe_entry(attempt: Attempt, entry: PendingRequest, max_keys: int) -> Sent:
    # Cut for the size of a message; prefixes match from their beginning.
    keys = entry.block_keys[:max_keys]
    return Sent(attempt.span_id, attempt.leg, entry.url, entry.sent_us, *entry.work, keys)
