# SPDX-License-Identifier: Apache-2.0
"""What other workers have under way, put into this worker's instances and policies by their messages.

A message may be lost: once a second totals are compared (worker_link.py), and what a worker has under
way is forgotten with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ttft_otel.router.routing.policies.pending_load import PendingRequest
from ttft_otel.router.routing.policies.policy_state import PolicyState, PrefillSample
from ttft_otel.router.routing.policies.prefill_work import PrefillWork
from ttft_otel.router.types import Instance, LoadElsewhere
from ttft_otel.router.workers.messages import Ended, FirstToken, Sent, Totals

Place = tuple[str, str]  # leg, URL


@dataclass(slots=True)
class SiblingBook:
    """The attempts of one other worker, by span ID, and how many of them are at each place."""

    attempts: dict[str, Sent] = field(default_factory=dict)
    in_flight: Counter[Place] = field(default_factory=Counter)
    pending: Counter[Place] = field(default_factory=Counter)


class SiblingLoads:
    """The books of all other workers, by their seat.

    find_instance: by leg and URL, None if this worker has it not (yet). find_state: of the leg's policy.
    """

    def __init__(
        self,
        find_instance: Callable[[str, str], Instance | None],
        find_state: Callable[[str], PolicyState],
    ) -> None:
        self._find_instance, self._find_state = find_instance, find_state
        self._books: dict[int, SiblingBook] = {}

    def count_attempts(self) -> int:
        """The attempts of all others that are under way."""
        return sum(len(book.attempts) for book in self._books.values())

    def apply_sent(self, seat: int, sent: Sent) -> None:
        """The worker on `seat` sent this. Idempotent."""
        book = self._books.setdefault(seat, SiblingBook())
        # It may come twice: as it happens, and in the answer to a Resync.
        if sent.span_id in book.attempts:
            return
        place = (sent.leg, sent.url)
        book.attempts[sent.span_id] = sent
        book.in_flight[place] += 1
        self._count_in_flight(place, 1)
        if sent.is_pending:
            book.pending[place] += 1
            work = PrefillWork(sent.tokens_to_compute, sent.pairs)
            # What it was predicted is judged by the worker that predicted it.
            entry = PendingRequest(sent.url, sent.sent_us, work, sent.block_keys, None)
            self._find_state(sent.leg).pending.add_pending((sent.leg, sent.span_id), entry)

    def apply_first_token(self, seat: int, token: FirstToken) -> None:
        """Its attempt has its first token: the work is done, the blocks are cached, the time is known."""
        sample = None
        if token.seconds is not None:
            sample = PrefillSample(token.model, token.tokens_to_compute, token.pairs, token.seconds)
        # Only of what is pending: a message may come late, or again.
        if self._settle(seat, token.span_id):
            key = (token.leg, token.span_id)
            self._find_state(token.leg).record_first_token_elsewhere(key, token.now_us, sample)

    def apply_ended(self, seat: int, ended: Ended) -> None:
        """Its attempt is over."""
        self._remove_attempt(seat, ended.span_id, ended.now_us)

    def drop_seat(self, seat: int, now_us: int) -> None:
        """The worker is gone, or says everything anew: forget what it had under way."""
        book = self._books.get(seat)
        if book is None:
            return
        # A copy, since each is removed meanwhile.
        for span_id in list(book.attempts):
            self._remove_attempt(seat, span_id, now_us)
        del self._books[seat]

    def agrees_with(self, seat: int, totals: Totals) -> bool:
        """Whether nothing of the worker on `seat` was missed, by its `totals`; takes over its results."""
        book = self._books.get(seat) or SiblingBook()
        counted: Counter[Place] = Counter()
        pending: Counter[Place] = Counter()
        for row in totals.rows:
            place = (row.leg, row.url)
            counted[place], pending[place] = row.in_flight, row.pending
            instance = self._find_instance(*place)
            if instance is not None and row.results:
                _get_elsewhere(instance).results_by_owner[seat] = row.results
        # Unary plus leaves out what is zero.
        return +counted == +book.in_flight and +pending == +book.pending

    def sync_instances(self) -> None:
        """After a change of the pool: instances that are new here get what is under way at them."""
        totals = sum((book.in_flight for book in self._books.values()), Counter[Place]())
        for place, number in totals.items():
            instance = self._find_instance(*place)
            if instance is not None:
                # Set, not added: those that were here before have counted it already.
                _get_elsewhere(instance).in_flight = number

    def _settle(self, seat: int, span_id: str) -> bool:
        """Its attempt is not pending any more; returns whether it was."""
        book = self._books.get(seat)
        sent = None if book is None else book.attempts.get(span_id)
        if book is None or sent is None or not sent.is_pending:
            return False
        place = (sent.leg, sent.url)
        book.pending[place] -= 1
        # Still in flight, but no work any more.
        book.attempts[span_id] = Sent(span_id, sent.leg, sent.url, sent.sent_us)
        return True

    def _remove_attempt(self, seat: int, span_id: str, now_us: int) -> None:
        # Also without a first token: the work is not waited for any more.
        was_pending = self._settle(seat, span_id)
        book = self._books.get(seat)
        sent = None if book is None else book.attempts.pop(span_id, None)
        if book is None or sent is None:
            return
        place = (sent.leg, sent.url)
        book.in_flight[place] -= 1
        self._count_in_flight(place, -1)
        if was_pending:
            self._find_state(sent.leg).pending.remove_pending((sent.leg, span_id), now_us)

    def _count_in_flight(self, place: Place, change: int) -> None:
        instance = self._find_instance(*place)
        if instance is not None:
            elsewhere = _get_elsewhere(instance)
            # Never below 0, which policies would take for the emptiest instance of all.
            elsewhere.in_flight = max(elsewhere.in_flight + change, 0)


def _get_elsewhere(instance: Instance) -> LoadElsewhere:
    if instance.elsewhere is None:
        instance.elsewhere = LoadElsewhere()
    return instance.elsewhere
