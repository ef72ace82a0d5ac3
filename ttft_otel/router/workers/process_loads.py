# SPDX-License-Identifier: Apache-2.0
"""What this process has under way, reported as it happens, and what others have, put into pool and policies.

LoadLink passes messages between workers, all of a moment in one datagram; shared_state/ passes values
between replicas. What a process has under way is forgotten with it. `owner` is what names another process
here: the slot of a worker, the store's name of a replica's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from ttft_otel.router.routing.policies.policy_state import (
    PendingRequest,
    PolicyState,
    PrefillSample,
    RequestKey,
)
from ttft_otel.router.routing.policies.prefill_model import PrefillWork
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
    Message,
    Question,
    Reset,
    Sent,
    Totals,
)
from ttft_otel.tracing import clock

Place: TypeAlias = tuple[str, str]  # leg and URL of an instance

MAX_RESENT_KEYS: Final = 1 << 17  # blocks of all prompts that are reported anew: 1.2 MB
MAX_RESENT: Final = 16_384  # attempts that are reported anew
# Seconds between two datagrams to another worker, as between exchanges of replicas: what happens meanwhile
# shares one, at some 20 us.
MIN_TELL_INTERVAL_S: Final = 0.005
# The same for each worker that there is: however many there are, one reads 1,000 a second at most.
TELL_INTERVAL_S: Final = 0.001
ASK_INTERVAL_S: Final = 1.0  # seconds before the same worker is asked for everything once more


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
        self.pool.on_sent, self.pool.on_ended = self.record_sent, self.record_ended
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
        if self._pending.pop(key[1], None) is not None:
            self._report(FirstToken(key[1], now_us, *(() if sample is None else sample)))

    def record_ended(self, attempt: Attempt) -> None:
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
                0 if self.routing.get_policy(each.leg).name == DEFAULT_POLICY else each.in_flight,
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
                instance.in_flight_elsewhere += news.number - before

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
            work = (token.tokens_to_compute, token.pairs)
            sample = PrefillSample(token.model, *work, token.seconds, token.decodes)
        key = (sent.leg, token.span_id)
        self._find_state(sent.leg).record_first_token_elsewhere(key, token.now_us, sample)

    def apply_ended(self, owner: Hashable, ended: Ended) -> None:
        """Its attempt is over without a first token: the work is not waited for any more."""
        sent = self._attempts.get(owner, {}).pop(ended.span_id, None)
        if sent is not None:
            self._remove_pending(sent, ended.now_us)

    def replace_pending(self, owner: Hashable, pending: Mapping[str, Sent], now_us: int) -> None:
        """`owner` has these attempts without a first token, by span ID, and no others."""
        for span_id in self._attempts.get(owner, {}).keys() - pending.keys():
            self.apply_ended(owner, Ended(span_id, now_us))
        for sent in pending.values():
            self.apply_sent(owner, sent)

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
                instance.results_elsewhere[owner] = results
        return len(self._attempts.get(owner, ())) == totals.pending

    def sync_instances(self) -> None:
        """After a change of the pool: instances that are new here get what is under way at them."""
        numbers = [each for owned in self._in_flight.values() for each in owned.items()]
        found = [(self._find_instance(*place), number) for place, number in numbers]
        for instance, _ in found:
            if instance is not None:
                instance.in_flight_elsewhere = 0
        # Set anew: those that were here before have counted it already.
        for instance, number in found:
            if instance is not None:
                instance.in_flight_elsewhere += number

    def _remove_pending(self, sent: Sent, now_us: int) -> None:
        self._find_state(sent.leg).pending.remove_pending((sent.leg, sent.span_id), now_us)


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
        send: Callable[[Sequence[Message], Sequence[int]], None],
    ) -> None:
        self.pool = pool
        self.own = OwnLoads(pool, routing, self._add_message)
        self.remote = RemoteLoads(pool.find_instance, lambda leg: routing.get_policy(leg).state)
        self.others = others
        self.handlers: dict[type, Callable[[int, Any], None]] = {
            InFlight: self.remote.apply_in_flight,
            Sent: self.remote.apply_sent,
            FirstToken: self.remote.apply_first_token,
            Ended: self.remote.apply_ended,
            Totals: self._compare_totals,
            Reset: lambda number, _: self.forget_worker(number),
        }
        self._send = send
        self._events: list[LoadMessage] = []
        self._in_flight: dict[tuple[str, str], InFlight] = {}  # the latest, by leg and URL
        self._interval_s = max(MIN_TELL_INTERVAL_S, TELL_INTERVAL_S * (1 + len(others)))
        self._told_s = 0.0  # event-loop time
        self._timer: asyncio.TimerHandle | None = None
        self._asked_s: dict[int, float] = {}  # for everything anew, by slot

    def start(self) -> None:
        """Tell the others from now on, and ask them for what is under way."""
        # What a predecessor had under way ended with it.
        self._send([Reset(), Question(0, "load")], self.others)
        self.own.start()
        self.pool.change_listeners.add(self.remote.sync_instances)

    def close(self) -> None:
        """Have the others forget at once what was under way here."""
        if self._timer is not None:
            self._timer.cancel()
        self._send([Reset()], self.others)

    def tell_totals(self) -> None:
        """Once a second: by these the others see whether they have missed something."""
        self._tell()
        self._send([self.own.build_totals()], self.others)

    def tell_all(self, number: int) -> None:
        # It may know too much or too little.
        told: list[Message] = [Reset(), *self.own.list_pending()]
        # Last, so that nothing is missing when they are compared.
        told.append(self.own.build_totals())
        self._send(told, [number])

    def forget_worker(self, number: int) -> None:
        """Forget what was under way at a worker; should it be back, its totals will not agree."""
        self.remote.forget_process(number, clock.now_us())

    def _add_message(self, message: LoadMessage) -> None:
        if isinstance(message, InFlight):
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

    def _compare_totals(self, number: int, totals: Totals) -> None:
        moment = time.monotonic()
        if self.remote.agrees_with(number, totals):
            return
        # All of it is megabytes: a worker that cannot keep up would make it worse for everybody.
        if moment - self._asked_s.get(number, -ASK_INTERVAL_S) >= ASK_INTERVAL_S:
            self._asked_s[number] = moment
            self._send([Question(0, "load")], [number])
