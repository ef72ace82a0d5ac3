# SPDX-License-Identifier: Apache-2.0
"""The load of all workers: what this one tells the others through memory that they share, and what it reads.

worker_link.py starts it; the routing service has it read before each decision by load.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

from ttft_otel.router.errors import RingOverrun
from ttft_otel.router.routing.routing_service import RoutingService
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.router.workers import messages
from ttft_otel.router.workers.load_counts import CountReader, CountWriter
from ttft_otel.router.workers.load_rings import RingReader, RingWriter
from ttft_otel.router.workers.own_loads import OwnLoads
from ttft_otel.router.workers.sibling_loads import SiblingLoads
from ttft_otel.router.workers.supervisor import WorkerSeat
from ttft_otel.tracing import clock
from ttft_otel.tracing.guard import Guard

# Seconds between two looks at the rings of a worker that decides nothing meanwhile.
READ_INTERVAL_S: Final = 0.05
MAX_READS: Final = 512  # messages of one ring that are taken in at once: some 3 ms
SILENCE_S: Final = 5.0  # seconds after which what a silent worker had under way is forgotten
RESYNC_INTERVAL_S: Final = 1.0  # seconds before the same worker is asked for everything once more


class LoadLink:
    """What is under way here and at all other workers.

    ask_resync: asks the worker on a seat to tell everything anew; it does so by `tell_all_anew`.
    lost: messages that were too long, and times that a ring was overwritten before it was read.
    """

    def __init__(
        self,
        seat: WorkerSeat,
        pool: InstancePool,
        routing: RoutingService,
        ask_resync: Callable[[int], None],
    ) -> None:
        self.pool, self.routing, self.ask_resync = pool, routing, ask_resync
        self.lost = 0
        counts = CountWriter(seat.counts, seat.number)
        self.own = OwnLoads(pool, routing, counts, self._tell_others)
        self.siblings = SiblingLoads(
            pool.find_instance, lambda leg: routing.get_leg_policy(leg).state
        )
        self._own_seat = seat.number
        # What cannot be handled must not cost the request that is decided on.
        self._guard = Guard("router.workers")
        self._writer = RingWriter(seat.rings, seat.number)
        self._readers = [
            (RingReader(seat.rings, number), CountReader(seat.counts, number))
            for number in range(seat.count)
            if number != seat.number
        ]
        self._heard_s: dict[int, float] = {}  # by seat
        self._asked_s: dict[int, float] = {}  # for everything anew, by seat
        self._timer: asyncio.TimerHandle | None = None
        self._handlers: dict[type, Callable[[int, Any], None]] = {
            messages.Places: self._take_places,
            messages.Sent: self.siblings.apply_sent,
            messages.FirstToken: self.siblings.apply_first_token,
            messages.Ended: self.siblings.apply_ended,
            messages.Totals: self._compare_totals,
            messages.Reset: self._drop_seat,
        }

    def start(self) -> None:
        """Tell and read from now on, on the running event loop."""
        # What a predecessor had under way ended with it.
        self._tell_others(messages.Reset())
        self.own.start()
        self.pool.change_listeners.add(self.siblings.sync_instances)
        for ring, _ in self._readers:
            # Who joins has missed all that is under way.
            ring.skip_all()
            self.ask_resync(ring.seat)
        self.routing.read_others = self.read_others
        self._read_on_timer()

    def close(self) -> None:
        """Tell the others to forget what was under way here, so that they do not count it until SILENCE_S."""
        if self._timer is not None:
            self._timer.cancel()
        self.routing.read_others = None
        self._tell_others(messages.Reset())

    def read_others(self) -> None:
        """Take in what the others have said until now."""
        for ring, counts in self._readers:
            if ring.has_news():
                self._read_seat(ring, counts)
            # The usual case where no work is compared: a few microseconds less for each decision.
            elif counts.has_news():
                with self._guard:
                    self._read_counts(ring.seat, counts)

    def tell_totals(self) -> None:
        """Once a second: by these the others see whether they have missed something."""
        self._tell_others(self.own.build_totals())

    def tell_all_anew(self, number: int) -> None:
        """Tell the worker on seat `number` everything that is under way."""
        # There may be too much or too little in its book.
        self._tell_others(messages.Reset(number))
        self._tell_others(self.own.describe_places())
        for sent in self.own.list_pending():
            self._tell_others(sent)

    def forget_silent(self) -> None:
        """Forget what is under way at workers that say nothing any more."""
        moment = time.monotonic()
        for number, heard_s in list(self._heard_s.items()):
            if moment - heard_s > SILENCE_S:
                # Should it be back, its totals will not agree, and it is asked for all.
                del self._heard_s[number]
                self.siblings.drop_seat(number, clock.now_us())

    def _read_on_timer(self) -> None:
        self.read_others()
        has_more = any(ring.has_news() for ring, _ in self._readers)
        # With more at once, but after a turn for requests.
        delay_s = 0.0 if has_more else READ_INTERVAL_S
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._read_on_timer)

    def _read_seat(self, ring: RingReader, counts: CountReader) -> None:
        number = ring.seat
        with self._guard:
            self._heard_s[number] = time.monotonic()
            # Before the ring, so that what these numbers mean is in it, or was before.
            changes = counts.read_changes(self.siblings.count_places(number))
            try:
                frames = ring.read_frames(MAX_READS)
            except RingOverrun:
                self.lost += 1
                ring.skip_all()
                self._ask_for_all(number)
                return
            for data in frames:
                message = messages.decode_load(data)
                self._handlers[type(message)](number, message)
            self.siblings.apply_counts(number, changes, clock.now_us())

    def _read_counts(self, number: int, counts: CountReader) -> None:
        changes = counts.read_changes(self.siblings.count_places(number))
        self.siblings.apply_counts(number, changes, clock.now_us())

    def _tell_others(self, message: messages.LoadMessage) -> None:
        if not self._writer.write_frame(messages.encode_load(message)):
            self.lost += 1

    def _compare_totals(self, number: int, totals: messages.Totals) -> None:
        if not self.siblings.agrees_with(number, totals):
            self._ask_for_all(number)

    def _ask_for_all(self, number: int) -> None:
        moment = time.monotonic()
        # All of it is megabytes: a worker that cannot keep up would make it worse for everybody.
        if moment - self._asked_s.get(number, -RESYNC_INTERVAL_S) >= RESYNC_INTERVAL_S:
            self._asked_s[number] = moment
            self.ask_resync(number)

    def _take_places(self, number: int, places: messages.Places) -> None:
        self.siblings.apply_places(number, places)
        for ring, counts in self._readers:
            if ring.seat == number:
                counts.read_all_next()

    def _drop_seat(self, number: int, reset: messages.Reset) -> None:
        if reset.seat in (-1, self._own_seat):
            self.siblings.drop_seat(number, clock.now_us())
