# SPDX-License-Identifier: Apache-2.0
"""The load of all workers: what this one reports through memory that all share, and what it reads.

worker.py starts it; the routing service has it read before each decision by load.
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
from ttft_otel.router.workers.own_loads import OwnLoads
from ttft_otel.router.workers.remote_loads import RemoteLoads
from ttft_otel.router.workers.shared_memory import SlotReader, SlotWriter
from ttft_otel.router.workers.supervisor import WorkerSlot
from ttft_otel.tracing import clock
from ttft_otel.tracing.guard import Guard

# Seconds between two looks at the rings of a worker that decides nothing meanwhile.
READ_INTERVAL_S: Final = 0.05
MAX_READS: Final = 512  # messages of one ring that are taken in at once: some 3 ms
SILENCE_S: Final = 5.0  # seconds after which what a silent worker had under way is forgotten
ASK_INTERVAL_S: Final = 1.0  # seconds before the same worker is asked for everything once more


class LoadLink:
    """What is under way here and at all other workers.

    Args:
        slot: This worker's.
        pool: The instances.
        routing: The policies, which have it read before they decide.
        ask_for_load: Asks the worker on a slot to report everything anew; it does so by `report_all`.
    """

    def __init__(
        self,
        slot: WorkerSlot,
        pool: InstancePool,
        routing: RoutingService,
        ask_for_load: Callable[[int], None],
    ) -> None:
        self.pool = pool
        self.routing = routing
        self.ask_for_load = ask_for_load
        # Messages that were too long, and times that a ring was overwritten before it was read.
        self.lost = 0
        self.writer = SlotWriter(slot.shared, slot.number)
        self.own = OwnLoads(pool, routing, self.writer, self._report)
        self.remote = RemoteLoads(pool.find_instance, lambda leg: routing.get_leg_policy(leg).state)
        self._own_slot = slot.number
        # What cannot be handled must not cost the request that is decided on.
        self._guard = Guard("router.workers")
        self._readers = [
            SlotReader(slot.shared, number) for number in range(slot.count) if number != slot.number
        ]
        self._heard_s: dict[int, float] = {}  # by slot
        self._asked_s: dict[int, float] = {}  # for everything anew, by slot
        self._timer: asyncio.TimerHandle | None = None
        self._handlers: dict[type, Callable[[int, Any], None]] = {
            messages.Places: self._apply_places,
            messages.Sent: self.remote.apply_sent,
            messages.FirstToken: self.remote.apply_first_token,
            messages.Ended: self.remote.apply_ended,
            messages.Totals: self._compare_totals,
            messages.Reset: self._forget_worker,
        }

    def start(self) -> None:
        """Report and read from now on, on the running event loop."""
        # What a predecessor had under way ended with it.
        self._report(messages.Reset())
        self.own.start()
        self.pool.change_listeners.add(self.remote.sync_instances)
        for reader in self._readers:
            # Who joins has missed all that is under way.
            reader.skip_messages()
            self.ask_for_load(reader.slot)
        self.routing.read_others = self.read_others
        self._read_on_timer()

    def close(self) -> None:
        """Have the others forget what was under way here, so that they do not count it until SILENCE_S."""
        if self._timer is not None:
            self._timer.cancel()
        self.routing.read_others = None
        self._report(messages.Reset())

    def read_others(self) -> None:
        """Take in what the others have reported until now."""
        for reader in self._readers:
            if reader.has_messages():
                self._read_slot(reader)
            # The usual case where no work is compared: a few microseconds less for each decision.
            elif reader.has_changes():
                with self._guard:
                    self._read_counts(reader)

    def report_totals(self) -> None:
        """Once a second: by these the others see whether they have missed something."""
        self._report(self.own.build_totals())

    def report_all(self, number: int) -> None:
        """Report everything that is under way to the worker on slot `number`."""
        # It may know too much or too little.
        self._report(messages.Reset(number))
        self._report(self.own.describe_places())
        for sent in self.own.list_pending():
            self._report(sent)

    def forget_silent(self) -> None:
        """Forget what is under way at workers that report nothing any more."""
        moment = time.monotonic()
        for number, heard_s in list(self._heard_s.items()):
            if moment - heard_s > SILENCE_S:
                # Should it be back, its totals will not agree, and it is asked for all.
                del self._heard_s[number]
                self.remote.forget_process(number, clock.now_us())

    def _read_on_timer(self) -> None:
        self.read_others()
        has_more = any(each.has_messages() for each in self._readers)
        # With more at once, but after a turn for requests.
        delay_s = 0.0 if has_more else READ_INTERVAL_S
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._read_on_timer)

    def _read_slot(self, reader: SlotReader) -> None:
        number = reader.slot
        with self._guard:
            self._heard_s[number] = time.monotonic()
            # Before the ring, so that what these numbers mean is in it, or was before.
            changes = reader.read_changes(self.remote.count_places(number))
            try:
                frames = reader.read_frames(MAX_READS)
            except RingOverrun:
                self.lost += 1
                reader.skip_messages()
                self._ask_for_all(number)
                return
            for data in frames:
                message = messages.decode_load(data)
                self._handlers[type(message)](number, message)
            self.remote.apply_counts(number, changes, clock.now_us())

    def _read_counts(self, reader: SlotReader) -> None:
        changes = reader.read_changes(self.remote.count_places(reader.slot))
        self.remote.apply_counts(reader.slot, changes, clock.now_us())

    def _report(self, message: messages.LoadMessage) -> None:
        if not self.writer.write_frame(messages.encode_load(message)):
            self.lost += 1

    def _compare_totals(self, number: int, totals: messages.Totals) -> None:
        if not self.remote.agrees_with(number, totals):
            self._ask_for_all(number)

    def _ask_for_all(self, number: int) -> None:
        moment = time.monotonic()
        # All of it is megabytes: a worker that cannot keep up would make it worse for everybody.
        if moment - self._asked_s.get(number, -ASK_INTERVAL_S) >= ASK_INTERVAL_S:
            self._asked_s[number] = moment
            self.ask_for_load(number)

    def _apply_places(self, number: int, places: messages.Places) -> None:
        self.remote.apply_places(number, places)
        for reader in self._readers:
            if reader.slot == number:
                reader.read_all_next()

    def _forget_worker(self, number: int, reset: messages.Reset) -> None:
        if reset.slot in (-1, self._own_slot):
            self.remote.forget_process(number, clock.now_us())
