# SPDX-License-Identifier: Apache-2.0
"""What this process tells other replicas: frames of what has changed, and once a second of everything.

workers/own_loads.py says what happens here, peer_link.py sends the frames. Blocks of prompts, IDs of requests
and measured times stay here.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from ttft_otel.router.peers.peer_frames import (
    MAX_PARTS,
    MAX_URL_CHARS,
    PeerFrame,
    PeerPlace,
    PeerRequest,
    split_load,
)
from ttft_otel.router.routing.policies.pending_load import MAX_PENDING_US
from ttft_otel.router.workers.load_counts import CountReader
from ttft_otel.router.workers.messages import Ended, FirstToken, LoadMessage, Sent
from ttft_otel.router.workers.own_loads import OwnLoads
from ttft_otel.tracing import clock

# Attempts without a first token that are told each second; of more the others know until they end.
MAX_STATED: Final = 4096

Place = tuple[str, str]  # leg, URL


class ToldRequest(NamedTuple):
    """An attempt that others know of, by number."""

    number: int
    place: Place
    sent: Sent


class ToldLoads:
    """The load of this process as frames. counts: reads the numbers that `own` writes."""

    def __init__(self, replica: str, own: OwnLoads, counts: CountReader) -> None:
        self.replica, self.sender = replica, secrets.token_hex(8)
        self.own, self._counts = own, counts
        self._sequences, self._numbers = itertools.count(1), itertools.count(1)
        self._requests: dict[str, ToldRequest] = {}  # by span ID, in the order of numbers
        self._fresh: dict[Place, list[ToldRequest]] = {}  # since the last frame
        self._ended: list[int] = []
        self._last_number = 0

    def note_message(self, message: LoadMessage) -> None:
        """Something has happened to an attempt whose work others compare."""
        if isinstance(message, Sent):
            self._last_number = next(self._numbers)
            told = ToldRequest(self._last_number, (message.leg, message.url), message)
            self._requests[message.span_id] = told
            self._fresh.setdefault(told.place, []).append(told)
        elif isinstance(message, FirstToken | Ended):
            told_before = self._requests.pop(message.span_id, None)
            if told_before is not None:
                self._ended.append(told_before.number)

    def build_changes(self) -> list[PeerFrame]:
        """Frames of what has changed since the last call."""
        fresh, self._fresh = self._fresh, {}
        ended, self._ended = self._ended, []
        rows = self._read_rows()
        changed = {index for index, _, _ in self._counts.read_changes(len(rows))}
        places = [
            self._build_place(row, fresh.get(row[:2], ()))
            for index, row in enumerate(rows)
            if index in changed or row[:2] in fresh
        ]
        places = [each for each in places if len(each.url) <= MAX_URL_CHARS]
        if not places and not ended:
            return []
        return [
            PeerFrame(*self._begin_frame(), places=some, ended=numbers)
            for some, numbers in split_load(places, ended)
        ]

    def build_statement(self) -> list[PeerFrame]:
        """Frames of everything under way: who has missed something knows by them."""
        self._drop_expired()
        stated = list(itertools.islice(self._requests.values(), MAX_STATED))
        # Of what is left out nothing is said: it stays as it was told.
        covered = stated[-1].number if len(stated) < len(self._requests) else self._last_number
        by_place: dict[Place, list[ToldRequest]] = {}
        for each in stated:
            by_place.setdefault(each.place, []).append(each)
        places = [
            self._build_place(row, by_place.get(row[:2], ()))
            for row in self._read_rows()
            if len(row[1]) <= MAX_URL_CHARS and (row[2] or row[:2] in by_place)
        ]
        return self._build_parts(places, covered)

    def build_farewell(self) -> list[PeerFrame]:
        """Nothing is under way here any more."""
        return self._build_parts((), self._last_number)

    def _build_parts(self, places: Iterable[PeerPlace], covered: int) -> list[PeerFrame]:
        parts = list(split_load(places))[:MAX_PARTS]
        return [
            PeerFrame(*self._begin_frame(), len(parts), number, covered, some)
            for number, (some, _) in enumerate(parts)
        ]

    def _begin_frame(self) -> tuple[str, str, int, int]:
        return self.replica, self.sender, next(self._sequences), time.time_ns() // 1_000_000

    def _read_rows(self) -> list[tuple[str, str, int, int]]:
        """Leg, URL, requests in flight and ever sent, by index."""
        return list(self._list_rows())

    def _list_rows(self) -> Iterator[tuple[str, str, int, int]]:
        for index, (leg, url, arrivals) in enumerate(self.own.describe_places().rows):
            yield leg, url, self.own.counts.get_counts(index)[0], arrivals

    def _build_place(
        self, row: tuple[str, str, int, int], requests: Iterable[ToldRequest]
    ) -> PeerPlace:
        now_us = clock.now_us()
        return PeerPlace(
            *row,
            tuple(
                PeerRequest(
                    each.number,
                    max(0, now_us - each.sent.sent_us),
                    each.sent.tokens_to_compute,
                    each.sent.pairs,
                )
                for each in requests
            ),
        )

    def _drop_expired(self) -> None:
        """Forget attempts that policies have forgotten as well, whose end was never recorded."""
        oldest_us = clock.now_us() - MAX_PENDING_US
        while self._requests:
            span_id, told = next(iter(self._requests.items()))
            if told.sent.sent_us > oldest_us:
                return
            del self._requests[span_id]
