# SPDX-License-Identifier: Apache-2.0
"""The load of all workers: what this one tells the others, and what it hears; worker.py has the socket.

What happens within a moment is told in one datagram, so that many requests cost hardly more than one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from ttft_otel.router.routing.routing_service import RoutingService
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.router.workers import messages
from ttft_otel.router.workers.process_loads import OwnLoads, RemoteLoads
from ttft_otel.tracing import clock

# Seconds between two datagrams to another worker, as between exchanges of replicas: what happens meanwhile
# shares one, at some 20 us.
MIN_TELL_INTERVAL_S: Final = 0.005
# The same for each worker that there is: however many there are, one reads 1,000 a second at most.
TELL_INTERVAL_S: Final = 0.001
SILENCE_S: Final = 5.0  # seconds after which what a silent worker had under way is forgotten
ASK_INTERVAL_S: Final = 1.0  # seconds before the same worker is asked for everything once more


class LoadLink:
    """What is under way here and at all other workers.

    Args:
        pool: The instances.
        routing: The policies.
        others: The slots of the other workers.
        send: Sends messages to the workers on some slots.
    """

    def __init__(
        self,
        pool: InstancePool,
        routing: RoutingService,
        others: Sequence[int],
        send: Callable[[Sequence[messages.Message], Sequence[int]], None],
    ) -> None:
        self.pool = pool
        self.own = OwnLoads(pool, routing, self._add_message)
        self.remote = RemoteLoads(pool.find_instance, lambda leg: routing.get_policy(leg).state)
        self.others = others
        self.handlers: dict[type, Callable[[int, Any], None]] = {
            messages.InFlight: self.remote.apply_in_flight,
            messages.Sent: self.remote.apply_sent,
            messages.FirstToken: self.remote.apply_first_token,
            messages.Ended: self.remote.apply_ended,
            messages.Totals: self._compare_totals,
            messages.Reset: self._forget_worker,
        }
        self._send = send
        self._events: list[messages.LoadMessage] = []
        self._in_flight: dict[tuple[str, str], messages.InFlight] = {}  # the latest, by leg and URL
        self._interval_s = max(MIN_TELL_INTERVAL_S, TELL_INTERVAL_S * (1 + len(others)))
        self._told_s = 0.0  # event-loop time
        self._timer: asyncio.TimerHandle | None = None
        self._heard_s: dict[int, float] = {}  # by slot
        self._asked_s: dict[int, float] = {}  # for everything anew, by slot

    def start(self) -> None:
        """Tell the others from now on, and ask them for what is under way."""
        # What a predecessor had under way ended with it.
        self._send([messages.Reset(), messages.Question(0, "load")], self.others)
        self.own.start()
        self.pool.change_listeners.add(self.remote.sync_instances)

    def close(self) -> None:
        """Have the others forget what was under way here, so that they do not count it until SILENCE_S."""
        if self._timer is not None:
            self._timer.cancel()
        self._send([messages.Reset()], self.others)

    def note_heard(self, number: int) -> None:
        """The worker on slot `number` has said something."""
        self._heard_s[number] = time.monotonic()

    def tell_totals(self) -> None:
        """Once a second: by these the others see whether they have missed something."""
        self._tell()
        self._send([self.own.build_totals()], self.others)

    def tell_all(self, number: int) -> None:
        """Tell the worker on slot `number` everything that is under way."""
        # It may know too much or too little.
        told: list[messages.Message] = [messages.Reset(), *self.own.list_pending()]
        # Last, so that nothing is missing when they are compared.
        told.append(self.own.build_totals())
        self._send(told, [number])

    def forget_silent(self) -> None:
        """Forget what is under way at workers that say nothing any more."""
        moment = time.monotonic()
        for number, heard_s in list(self._heard_s.items()):
            if moment - heard_s > SILENCE_S:
                # Should it be back, its totals will not agree, and it is asked for all.
                del self._heard_s[number]
                self.remote.forget_process(number, clock.now_us())

    def _add_message(self, message: messages.LoadMessage) -> None:
        if isinstance(message, messages.InFlight):
            self._in_flight[message.leg, message.url] = message
        else:
            self._events.append(message)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            # At once after a pause, but after this turn of the loop, in which more may happen.
            due_s = max(self._told_s + self._interval_s, loop.time())
            self._timer = loop.call_at(due_s, self._tell)

    def _tell(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        told, self._events = [*self._in_flight.values(), *self._events], []
        self._in_flight.clear()
        self._told_s = asyncio.get_running_loop().time()
        if told:
            self._send(told, self.others)

    def _compare_totals(self, number: int, totals: messages.Totals) -> None:
        moment = time.monotonic()
        if self.remote.agrees_with(number, totals):
            return
        # All of it is megabytes: a worker that cannot keep up would make it worse for everybody.
        if moment - self._asked_s.get(number, -ASK_INTERVAL_S) >= ASK_INTERVAL_S:
            self._asked_s[number] = moment
            self._send([messages.Question(0, "load")], [number])

    def _forget_worker(self, number: int, _: messages.Reset) -> None:
        self.remote.forget_process(number, clock.now_us())
