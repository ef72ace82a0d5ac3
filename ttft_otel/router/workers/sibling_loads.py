# SPDX-License-Identifier: Apache-2.0
"""What other workers and replicas have under way, put into this worker's instances and policies.

How much, by the numbers of load_counts.py; which work, by messages of their rings. One may be lost: once a
second totals are compared (load_link.py), and what a worker has under way is forgotten with it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from ttft_otel.router.routing.policies.pending_load import PendingRequest
from ttft_otel.router.routing.policies.policy_state import PolicyState, PrefillSample
from ttft_otel.router.routing.policies.prefill_model import PrefillWork
from ttft_otel.router.types import Instance, LoadElsewhere
from ttft_otel.router.workers.messages import Ended, FirstToken, Places, Sent, Totals


@dataclass(slots=True)
class PlaceView:
    """What was last seen of one worker's numbers at one instance. arrivals: requests ever sent there."""

    leg: str
    url: str
    arrivals: int
    in_flight: int = 0
    elsewhere: LoadElsewhere | None = None  # of the instance, if this worker has it


@dataclass(slots=True)
class SiblingBook:
    """One other worker: its numbers by index, and its attempts without a first token by span ID."""

    places: list[PlaceView] = field(default_factory=list)
    attempts: dict[str, Sent] = field(default_factory=dict)


class SiblingLoads:
    """The books of all other workers, by their seat; of other replicas by whatever names a process.

    find_instance: by leg and URL, None if this worker has it not (yet). find_state: of the leg's policy.
    """

    def __init__(
        self,
        find_instance: Callable[[str, str], Instance | None],
        find_state: Callable[[str], PolicyState],
    ) -> None:
        self._find_instance, self._find_state = find_instance, find_state
        self._books: dict[Hashable, SiblingBook] = {}

    def count_attempts(self) -> int:
        """The attempts of all others that are under way."""
        return sum(
            sum(each.in_flight for each in book.places) + len(book.attempts)
            for book in self._books.values()
        )

    def count_places(self, seat: Hashable) -> int:
        """The instances that the worker on `seat` has numbers of."""
        book = self._books.get(seat)
        return 0 if book is None else len(book.places)

    def apply_places(self, seat: Hashable, places: Places) -> None:
        """The numbers of the worker on `seat` mean this from now on; those that mean the same stay."""
        book = self._get_book(seat)
        before = book.places
        book.places = []
        for index, (leg, url, arrivals) in enumerate(places.rows):
            old = before[index] if index < len(before) else None
            if old is not None and (old.leg, old.url) == (leg, url):
                book.places.append(old)
                continue
            if old is not None:
                self._set_in_flight(old, 0)
            view = PlaceView(leg, url, arrivals)
            view.elsewhere = self._find_elsewhere(leg, url)
            book.places.append(view)

    def apply_counts(
        self, seat: Hashable, changes: Iterable[tuple[int, int, int]], now_us: int
    ) -> None:
        """Index, requests in flight and ever sent, of what has changed at the worker on `seat`."""
        book = self._books.get(seat)
        if book is None:
            return
        places = book.places
        count = len(places)
        for index, in_flight, arrivals in changes:
            # Its meaning is not known here: this worker has missed it, and asks for all anew.
            if index >= count:
                continue
            view = places[index]
            if in_flight != view.in_flight:
                self._set_in_flight(view, in_flight)
            if arrivals > view.arrivals:
                state = self._find_state(view.leg)
                if state.counts_arrivals:
                    state.pending.count_arrivals(view.url, now_us, arrivals - view.arrivals)
                view.arrivals = arrivals

    def apply_sent(self, seat: Hashable, sent: Sent) -> None:
        """The worker on `seat` sent this, whose work is pending. Idempotent."""
        book = self._get_book(seat)
        # It may come twice: as it happens, and when another worker has missed something.
        if sent.span_id in book.attempts:
            return
        book.attempts[sent.span_id] = sent
        work = PrefillWork(sent.tokens_to_compute, sent.pairs)
        # What it was predicted is judged by the worker that predicted it.
        entry = PendingRequest(sent.url, sent.sent_us, work, sent.block_keys, None)
        pending = self._find_state(sent.leg).pending
        pending.add_pending((sent.leg, sent.span_id), entry, is_counted=True)

    def apply_first_token(self, seat: Hashable, token: FirstToken) -> None:
        """Its attempt has its first token: the work is done, the blocks are cached, the time is known."""
        book = self._books.get(seat)
        sent = None if book is None else book.attempts.pop(token.span_id, None)
        if sent is None:
            return
        sample = None
        if token.seconds is not None:
            sample = PrefillSample(token.model, token.tokens_to_compute, token.pairs, token.seconds)
        key = (sent.leg, token.span_id)
        self._find_state(sent.leg).record_first_token_elsewhere(key, token.now_us, sample)

    def apply_ended(self, seat: Hashable, ended: Ended) -> None:
        """Its attempt is over without a first token: the work is not waited for any more."""
        book = self._books.get(seat)
        sent = None if book is None else book.attempts.pop(ended.span_id, None)
        if sent is not None:
            self._remove_pending(sent, ended.now_us)

    def drop_seat(self, seat: Hashable, now_us: int) -> None:
        """The worker is gone, or says everything anew: forget what it had under way."""
        book = self._books.pop(seat, None)
        if book is None:
            return
        for view in book.places:
            self._set_in_flight(view, 0)
        for sent in book.attempts.values():
            self._remove_pending(sent, now_us)

    def agrees_with(self, seat: int, totals: Totals) -> bool:
        """Whether nothing of the worker on `seat` was missed, by its `totals`; takes over its results."""
        for row in totals.rows:
            elsewhere = self._find_elsewhere(row.leg, row.url)
            if elsewhere is not None and row.results:
                elsewhere.results_by_owner[seat] = row.results
        book = self._books.get(seat) or SiblingBook()
        return (len(book.attempts), len(book.places)) == (totals.pending, totals.places)

    def sync_instances(self) -> None:
        """After a change of the pool: instances that are new here get what is under way at them."""
        views = [view for book in self._books.values() for view in book.places]
        for view in views:
            view.elsewhere = self._find_elsewhere(view.leg, view.url)
            if view.elsewhere is not None:
                view.elsewhere.in_flight = 0
        # Set anew: those that were here before have counted it already.
        for view in views:
            if view.elsewhere is not None:
                view.elsewhere.in_flight += view.in_flight

    def _get_book(self, seat: Hashable) -> SiblingBook:
        book = self._books.get(seat)
        if book is None:
            book = self._books[seat] = SiblingBook()
        return book

    def _set_in_flight(self, view: PlaceView, in_flight: int) -> None:
        if view.elsewhere is not None:
            view.elsewhere.in_flight += in_flight - view.in_flight
        view.in_flight = in_flight

    def _remove_pending(self, sent: Sent, now_us: int) -> None:
        self._find_state(sent.leg).pending.remove_pending((sent.leg, sent.span_id), now_us)

    def _find_elsewhere(self, leg: str, url: str) -> LoadElsewhere | None:
        instance = self._find_instance(leg, url)
        if instance is None:
            return None
        if instance.elsewhere is None:
            instance.elsewhere = LoadElsewhere()
        return instance.elsewhere
