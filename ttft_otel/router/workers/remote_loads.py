# SPDX-License-Identifier: Apache-2.0
"""What other workers and replicas have under way, put into this process's instances and policies.

load_link.py gives it the messages of workers, shared_state/snapshots.py the values of replicas. What a
process has under way is forgotten with it. `owner` is what names a process here: the slot of a worker, the
store's name of another replica's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from ttft_otel.router.routing.policies.pending_load import PendingRequest
from ttft_otel.router.routing.policies.policy_state import PolicyState, PrefillSample
from ttft_otel.router.routing.policies.prefill_model import PrefillWork
from ttft_otel.router.types import Instance
from ttft_otel.router.workers.messages import Ended, FirstToken, InFlight, Sent, Totals

Place = tuple[str, str]  # leg and URL of an instance


class RemoteLoads:
    """The load of all other processes.

    Args:
        find_instance: By leg and URL, None if this process does not have it (yet).
        find_state: Of a leg's policy.
    """

    def __init__(
        self,
        find_instance: Callable[[str, str], Instance | None],
        find_state: Callable[[str], PolicyState],
    ) -> None:
        self._find_instance = find_instance
        self._find_state = find_state
        # By owner: its requests in flight, and its attempts without a first token by span ID.
        self._in_flight: dict[Hashable, dict[Place, int]] = {}
        self._attempts: dict[Hashable, dict[str, Sent]] = {}

    def apply_in_flight(self, owner: Hashable, news: InFlight) -> None:
        """`owner` has so many requests under way at an instance now."""
        place, known = (news.leg, news.url), self._in_flight.setdefault(owner, {})
        before = known.pop(place, 0)
        if news.number:
            known[place] = news.number
        # Mostly nothing has changed at most instances, and looking for one takes time.
        if news.number != before:
            instance = self._find_instance(*place)
            if instance is not None:
                instance.make_elsewhere().in_flight += news.number - before

    def replace_in_flight(self, owner: Hashable, numbers: Mapping[Place, int]) -> None:
        """The same for all instances: `owner` has nothing under way at those that are not in `numbers`."""
        gone = dict.fromkeys(self._in_flight.get(owner, {}), 0)
        for place, number in {**gone, **numbers}.items():
            self.apply_in_flight(owner, InFlight(*place, number))

    def apply_sent(self, owner: Hashable, sent: Sent) -> None:
        """`owner` sent this, whose work is pending. Idempotent."""
        attempts = self._attempts.setdefault(owner, {})
        # It may come twice: as it happens, and when another worker has missed something.
        if sent.span_id in attempts:
            return
        attempts[sent.span_id] = sent
        work = PrefillWork(sent.tokens_to_compute, sent.pairs)
        # What it was predicted is judged by the worker that predicted it.
        entry = PendingRequest(sent.url, sent.sent_us, work, sent.block_keys, None)
        self._find_state(sent.leg).pending.add_pending((sent.leg, sent.span_id), entry)

    def apply_first_token(self, owner: Hashable, token: FirstToken) -> None:
        """Its attempt has its first token: the work is done, the blocks are cached, the time is known."""
        sent = self._attempts.get(owner, {}).pop(token.span_id, None)
        if sent is None:
            return
        sample = None
        if token.seconds is not None:
            sample = PrefillSample(token.model, token.tokens_to_compute, token.pairs, token.seconds)
        key = (sent.leg, token.span_id)
        self._find_state(sent.leg).record_first_token_elsewhere(key, token.now_us, sample)

    def apply_ended(self, owner: Hashable, ended: Ended) -> None:
        """Its attempt is over without a first token: the work is not waited for any more."""
        sent = self._attempts.get(owner, {}).pop(ended.span_id, None)
        if sent is not None:
            self._remove_pending(sent, ended.now_us)

    def forget_process(self, owner: Hashable, now_us: int) -> None:
        """`owner` is gone, or reports everything anew: forget what it had under way."""
        self.replace_in_flight(owner, {})
        self._in_flight.pop(owner, None)
        for sent in self._attempts.pop(owner, {}).values():
            self._remove_pending(sent, now_us)

    def agrees_with(self, owner: Hashable, totals: Totals) -> bool:
        """Whether no attempt of `owner` was missed, by its `totals`; takes over their numbers and results."""
        numbers = {(leg, url): in_flight for leg, url, in_flight, _ in totals.instances}
        self.replace_in_flight(owner, numbers)
        for leg, url, _, results in totals.instances:
            instance = self._find_instance(leg, url) if results else None
            if instance is not None:
                instance.make_elsewhere().results_by_owner[owner] = results
        return len(self._attempts.get(owner, ())) == totals.pending

    def sync_instances(self) -> None:
        """After a change of the pool: instances that are new here get what is under way at them."""
        numbers = [each for owned in self._in_flight.values() for each in owned.items()]
        found = [(self._find_instance(*place), number) for place, number in numbers]
        for instance, _ in found:
            if instance is not None:
                instance.make_elsewhere().in_flight = 0
        # Set anew: those that were here before have counted it already.
        for instance, number in found:
            if instance is not None:
                instance.make_elsewhere().in_flight += number

    def _remove_pending(self, sent: Sent, now_us: int) -> None:
        self._find_state(sent.leg).pending.remove_pending((sent.leg, sent.span_id), now_us)
