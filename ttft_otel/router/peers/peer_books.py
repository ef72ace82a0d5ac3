# SPDX-License-Identifier: Apache-2.0
"""What other replicas have under way, put into this one's instances and policies, by their frames.

Counts are absolute, so that a lost frame costs until the next one; a statement of everything, each second,
puts right what attempts were missed. Books of silent replicas are forgotten.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from ttft_otel.router.peers.peer_frames import PeerFrame, PeerPlace, PeerRequest
from ttft_otel.router.types import Instance
from ttft_otel.router.workers.messages import Ended, Places, Sent
from ttft_otel.router.workers.sibling_loads import SiblingLoads
from ttft_otel.tracing import clock

SILENCE_S: Final = 5.0  # seconds after which what a silent replica had under way is forgotten
MAX_BOOKS: Final = 256  # processes of all other replicas
MAX_BOOK_PLACES: Final = 1024  # instances in one book
MAX_BOOK_REQUESTS: Final = 8192  # attempts without a first token in one book


@dataclass(slots=True)
class Statement:
    """The parts that have come of one statement."""

    covered: int
    first_sequence: int
    parts: set[int] = field(default_factory=set)
    numbers: set[int] = field(default_factory=set)
    indices: set[int] = field(default_factory=set)


@dataclass(slots=True)
class PeerBook:
    """One process of another replica.

    rows, sequences: its instances (leg, URL, arrivals before the first frame) and the latest frame of each,
    by index. numbers: its attempts without a first token.
    """

    heard_s: float = 0.0
    rows: list[tuple[str, str, int]] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    indices: dict[tuple[str, str], int] = field(default_factory=dict)
    numbers: set[int] = field(default_factory=set)
    statement: Statement | None = None
    has_been_whole: bool = False


class PeerBooks:
    """The books of all others. loads: takes what is in them. instances: all that this router has.

    too_many: places, attempts and senders beyond the limits.
    """

    def __init__(self, loads: SiblingLoads, instances: Iterable[Instance]) -> None:
        self._loads = loads
        self._books: dict[tuple[str, str], PeerBook] = {}
        self._instances: dict[str, list[Instance]] = {}  # by URL
        self.too_many = 0
        self.sync_instances(instances)

    def sync_instances(self, instances: Iterable[Instance]) -> None:
        """These are the router's instances now."""
        self._instances.clear()
        for each in instances:
            self._instances.setdefault(each.url, []).append(each)

    def count_replicas(self) -> int:
        """Replicas that were heard of."""
        return len({replica for replica, _ in self._books})

    def count_requests(self) -> int:
        """Attempts without a first token at all of them."""
        return sum(len(book.numbers) for book in self._books.values())

    def apply_frame(self, frame: PeerFrame) -> None:
        """Take in one frame, which must be authentic and new."""
        owner = (frame.replica, frame.sender)
        book = self._books.get(owner)
        if book is None:
            if len(self._books) >= MAX_BOOKS:
                self.too_many += 1
                return
            book = self._books[owner] = PeerBook()
        book.heard_s = time.monotonic()
        statement = _find_statement(book, frame) if frame.parts else None
        for place in frame.places:
            self._apply_place(owner, book, frame, place, statement)
        for number in frame.ended:
            self._end_request(owner, book, number)
        if statement is not None:
            statement.parts.add(frame.part)
            if len(statement.parts) == frame.parts:
                self._close_statement(owner, book, statement)

    def forget_silent(self) -> None:
        """Forget what is under way at replicas that say nothing any more."""
        moment = time.monotonic()
        for owner, book in list(self._books.items()):
            if moment - book.heard_s > SILENCE_S:
                self._drop_book(owner)

    def forget_all(self) -> None:
        """Forget everything."""
        for owner in list(self._books):
            self._drop_book(owner)

    def _drop_book(self, owner: tuple[str, str]) -> None:
        del self._books[owner]
        self._loads.drop_seat(owner, clock.now_us())

    def _apply_place(
        self,
        owner: tuple[str, str],
        book: PeerBook,
        frame: PeerFrame,
        place: PeerPlace,
        statement: Statement | None,
    ) -> None:
        instance = self._find_instance(place)
        # A replica may hear of an instance sooner: the next statement has it again.
        if instance is None:
            return
        index = self._find_index(owner, book, instance, place.arrivals)
        if index is None:
            return
        if statement is not None:
            statement.indices.add(index)
        # A frame that was overtaken has old counts; its attempts are news all the same.
        if frame.sequence > book.sequences[index]:
            book.sequences[index] = frame.sequence
            change = (index, place.in_flight, place.arrivals)
            self._loads.apply_counts(owner, [change], clock.now_us())
        for request in place.requests:
            if statement is not None:
                statement.numbers.add(request.number)
            self._add_request(owner, book, instance, request)

    def _find_instance(self, place: PeerPlace) -> Instance | None:
        """The instance of that URL: on the same leg, or the only one, if roles are called otherwise here."""
        found = self._instances.get(place.url, [])
        same_leg = [each for each in found if each.leg == place.leg]
        if same_leg:
            return same_leg[0]
        return found[0] if len(found) == 1 else None

    def _find_index(
        self, owner: tuple[str, str], book: PeerBook, instance: Instance, arrivals: int
    ) -> int | None:
        key = (instance.leg, instance.url)
        index = book.indices.get(key)
        if index is not None:
            return index
        if len(book.rows) >= MAX_BOOK_PLACES:
            self.too_many += 1
            return None
        # Arrivals before the first frame are no news, unless everything else was known already.
        book.rows.append((*key, 0 if book.has_been_whole else arrivals))
        book.sequences.append(0)
        self._loads.apply_places(owner, Places(list(book.rows)))
        book.indices[key] = len(book.rows) - 1
        return len(book.rows) - 1

    def _add_request(
        self, owner: tuple[str, str], book: PeerBook, instance: Instance, request: PeerRequest
    ) -> None:
        if request.number in book.numbers:
            return
        if len(book.numbers) >= MAX_BOOK_REQUESTS:
            self.too_many += 1
            return
        book.numbers.add(request.number)
        sent_us = clock.now_us() - request.age_us
        work = (request.tokens_to_compute, request.pairs)
        span_id = _name_request(owner, request.number)
        self._loads.apply_sent(owner, Sent(span_id, instance.leg, instance.url, sent_us, *work))

    def _end_request(self, owner: tuple[str, str], book: PeerBook, number: int) -> None:
        if number in book.numbers:
            book.numbers.discard(number)
            self._loads.apply_ended(owner, Ended(_name_request(owner, number), clock.now_us()))

    def _close_statement(
        self, owner: tuple[str, str], book: PeerBook, statement: Statement
    ) -> None:
        """All parts have come: what is in none of them is over."""
        book.statement, book.has_been_whole = None, True
        for number in [each for each in book.numbers if each <= statement.covered]:
            if number not in statement.numbers:
                self._end_request(owner, book, number)
        changes = [
            (index, 0, 0)
            for index, sequence in enumerate(book.sequences)
            # One that was told of after the statement was made is not in it.
            if index not in statement.indices and sequence < statement.first_sequence
        ]
        self._loads.apply_counts(owner, changes, clock.now_us())


def _find_statement(book: PeerBook, frame: PeerFrame) -> Statement:
    """The statement that a frame belongs to; an older one that has not come whole is given up."""
    first_sequence = frame.sequence - frame.part
    statement = book.statement
    if statement is None or statement.first_sequence != first_sequence:
        statement = book.statement = Statement(frame.covered, first_sequence)
    return statement


def _name_request(owner: tuple[str, str], number: int) -> str:
    """The key of an attempt of another replica among this one's, which have span IDs."""
    return f"{owner[0]}/{owner[1]}/{number}"
