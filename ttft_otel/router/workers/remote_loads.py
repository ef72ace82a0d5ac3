# SPDX-License-Identifier: Apache-2.0
"""What other workers and replicas have under way, put into this worker's instances and policies.

How much, by the numbers of shared_memory.py; which work, by messages of their rings. One may be lost: once a
second totals are compared (load_link.py). What a process has under way is forgotten with it. `owner` is what
names a process here: the slot of a worker, the store's name of another replica's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from ttft_otel.router.routing.policies.pending_load import PendingRequest
from ttft_otel.router.routing.policies.policy_state import PolicyState, PrefillSample
from ttft_otel.router.routing.policies.prefill_model import PrefillWork
from ttft_otel.router.types import Instance, LoadElsewhere
from ttft_otel.router.workers.messages import Ended, FirstToken, Places, Sent, Totals


@dataclass(slots=True)
class PlaceView:
    """What was last seen of one process's numbers at one instance."""

    leg: str
    url: str
    arrivals: int  # requests ever sent there
    in_flight: int = 0
    elsewhere: LoadElsewhere | None = None  # of the instance, if this worker has it


class RemoteLoads:
    """The load of all other processes.

    Args:
        find_instance: By leg and URL, None if this worker does not have it (yet).
        find_state: Of a leg's policy.
    """

    def __init__(
        self,
        find_instance: Callable[[str, str], Instance | None],
        find_state: Callable[[str], PolicyState],
    ) -> None:
        self._find_instance = find_instance
        self._find_state = find_state
        # By owner: its numbers by index, and its attempts without a first token by span ID.
        self._places: dict[Hashable, list[PlaceView]] = {}
        self._attempts: dict[Hashable, dict[str, Sent]] = {}

    def count_attempts(self) -> int:
        """The attempts of all others that are under way."""
        views = (view for places in self._places.values() for view in places)
        return sum(each.in_flight for each in views) + sum(map(len, self._attempts.values()))

    def count_places(self, owner: Hashable) -> int:
        """The instances that `owner` has numbers of."""
        return len(self._places.get(owner, ()))

    def apply_places(self, owner: Hashable, places: Places) -> None:
        """The numbers of `owner` mean this from now on; those that mean the same stay."""
        before = self._places.get(owner, [])
        after = []
        for index, (leg, url, arrivals) in enumerate(places.rows):
            old = before[index] if index < len(before) else None
            if old is not None and (old.leg, old.url) == (leg, url):
                after.append(old)
                continue
            if old is not None:
                _set_in_flight(old, 0)
            after.append(PlaceView(leg, url, arrivals, elsewhere=self._find_elsewhere(leg, url)))
        self._places[owner] = after

    def apply_counts(
        self, owner: Hashable, changes: Iterable[tuple[int, int, int]], now_us: int
    ) -> None:
        """Index, requests in flight and ever sent, of what has changed at `owner`."""
        places = self._places.get(owner, ())
        count = len(places)
        for index, in_flight, arrivals in changes:
            # Its meaning is not known here: this worker has missed it, and asks for all anew.
            if index >= count:
                continue
            view = places[index]
            if in_flight != view.in_flight:
                _set_in_flight(view, in_flight)

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
        pending = self._find_state(sent.leg).pending
        pending.add_pending((sent.leg, sent.span_id), entry)

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
        for view in self._places.pop(owner, ()):
            _set_in_flight(view, 0)
        for sent in self._attempts.pop(owner, {}).values():
            self._remove_pending(sent, now_us)

    def agrees_with(self, slot: int, totals: Totals) -> bool:
        """Whether nothing of the worker on `slot` was missed, by its `totals`; takes over its results."""
        for leg, url, results in totals.results:
            elsewhere = self._find_elsewhere(leg, url)
            if elsewhere is not None and results:
                elsewhere.results_by_owner[slot] = results
        known = len(self._attempts.get(slot, ())), self.count_places(slot)
        return known == (totals.pending, totals.places)

    def sync_instances(self) -> None:
        """After a change of the pool: instances that are new here get what is under way at them."""
        views = [view for places in self._places.values() for view in places]
        for view in views:
            view.elsewhere = self._find_elsewhere(view.leg, view.url)
            if view.elsewhere is not None:
                view.elsewhere.in_flight = 0
        # Set anew: those that were here before have counted it already.
        for view in views:
            if view.elsewhere is not None:
                view.elsewhere.in_flight += view.in_flight

    def _remove_pending(self, sent: Sent, now_us: int) -> None:
        self._find_state(sent.leg).pending.remove_pending((sent.leg, sent.span_id), now_us)

    def _find_elsewhere(self, leg: str, url: str) -> LoadElsewhere | None:
        instance = self._find_instance(leg, url)
        if instance is None:
            return None
        if instance.elsewhere is None:
            instance.elsewhere = LoadElsewhere()
        return instance.elsewhere


def _set_in_flight(view: PlaceView, in_flight: int) -> None:
    if view.elsewhere is not None:
        view.elsewhere.in_flight += in_flight - view.in_flight
    view.in_flight = in_flight
