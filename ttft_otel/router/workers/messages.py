# SPDX-License-Identifier: Apache-2.0
"""What processes of a router tell one another: messages of workers, their sockets, and the load of all.

What a process has under way is reported as it happens, and what others have is put into pool and policies.
LoadLink passes messages between workers, all of a moment in one datagram; shared_state/ passes values between
replicas. What a process has under way is forgotten with it. `owner` is what names another process here: the
slot of a worker, the store's name of a replica's.

Messages are in MessagePack; worker.py says and takes those that are not of load. The supervisor makes all
sockets before it forks, without names: whoever sends is one of us. Times are microseconds of the monotonic
clock, which processes of one machine share.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from ttft_otel.router.routing.policies.policy_state import (
    PendingRequest,
    PolicyState,
    PrefillSample,
    RequestKey,
)
from ttft_otel.router.routing.policies.prefill_model import PrefillWork
from ttft_otel.router.routing.routing_service import RoutingService
from ttft_otel.router.timeline import Attempt
from ttft_otel.router.types import DEFAULT_POLICY, JSON_ERRORS, Instance
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.tracing import clock

Place: TypeAlias = tuple[str, str]  # leg and URL of an instance

MAX_BLOCK_KEYS: Final = 4096  # leading blocks of a prompt that are reported: 36 KB
RETRY_S: Final = 0.005  # seconds until a datagram is tried again whose receiver's queue was full
# Bytes that the kernel keeps for a worker which reads nothing, and of one datagram at most.
MAX_QUEUED_BYTES: Final = 1 << 20
MAX_BACKLOG: Final = 256  # datagrams that wait for a worker beside these; the oldest are lost first
# Messages that are longer together are sent in several datagrams: the kernel's buffers may be small.
MAX_JOINED_BYTES: Final = 1 << 16
MAX_READS: Final = 64  # datagrams read in one turn of the event loop
MAX_RESENT_KEYS: Final = 1 << 17  # blocks of all prompts that are reported anew: 1.2 MB
MAX_RESENT: Final = 16_384  # attempts that are reported anew
# Seconds between two datagrams to another worker, as between exchanges of replicas: what happens meanwhile
# shares one, at some 20 us.
MIN_TELL_INTERVAL_S: Final = 0.005
# The same for each worker that there is: however many there are, one reads 1,000 a second at most.
TELL_INTERVAL_S: Final = 0.001
ASK_INTERVAL_S: Final = 1.0  # seconds before the same worker is asked for everything once more

log: Final = logging.getLogger("ttft_otel")


# array_like: the names of fields would be most of the bytes.
class InFlight(msgspec.Struct, array_like=True, tag="i", frozen=True):
    """So many requests of mine are under way at an instance now; the latest number counts."""

    leg: str
    url: str
    number: int


class Sent(msgspec.Struct, array_like=True, tag="s", frozen=True):
    """An attempt is on its way, with the work and blocks that are pending until its first token.

    Only where the leg's policy compares work; others compare what is in flight.
    """

    span_id: str
    leg: str
    url: str
    sent_us: int
    tokens_to_compute: int = 0
    pairs: int = 0
    block_keys: tuple[int, ...] = ()


class FirstToken(msgspec.Struct, array_like=True, tag="t", frozen=True):
    """An attempt has its first token; `seconds` of its prefill, None if they were not measured."""

    span_id: str
    now_us: int
    model: str = ""
    tokens_to_compute: int = 0
    pairs: int = 0
    seconds: float | None = None
    decodes: int = 0


class Ended(msgspec.Struct, array_like=True, tag="e", frozen=True):
    """An attempt is over, and will have no first token."""

    span_id: str
    now_us: int


class Totals(msgspec.Struct, array_like=True, tag="n", frozen=True):
    """Once a second: by these the others see whether they have missed something.

    pending: attempts that were sent and have no first token. instances: leg, URL, requests in flight, and the
    results of what has ended there since the worker's start, so that nothing is lost with a message.
    """

    pending: int
    instances: list[tuple[str, str, int, dict[str, int]]]


class Reset(msgspec.Struct, array_like=True, tag="z", frozen=True):
    """Forget what I have under way: what still is follows."""


class Order(msgspec.Struct, array_like=True, tag="o", frozen=True):
    """An operator asked me for this.

    number: counts the orders of a slot, so that who has missed one can ask for it.
    """

    action: str
    leg: str
    url: str
    number: int


class Question(msgspec.Struct, array_like=True, tag="q", frozen=True):
    """Answer with this number; topic: `report` of an owner's request, or `instances`.

    The asker has missed something: topic `load` is answered by all that is under way, and `orders` by those
    that were given after the one whose number is the subject.
    """

    number: int
    topic: str
    subject: str = ""


class Answer(msgspec.Struct, array_like=True, tag="a", frozen=True):
    """To the question of that number; empty if there is nothing."""

    number: int
    data: bytes = b""


# The decoder checks tag and types, so that no handler has to.
LoadMessage: TypeAlias = InFlight | Sent | FirstToken | Ended | Totals | Reset
Message: TypeAlias = LoadMessage | Order | Question | Answer


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(tuple[int, list[Message]])


def encode_frame(slot: int, messages: Sequence[Message]) -> bytes:
    return _ENCODER.encode((slot, messages))


def decode_frame(data: bytes | memoryview) -> tuple[int, list[Message]]:
    """The sender's slot and the messages of a datagram. Raises msgspec.MsgspecError for anything else."""
    return _DECODER.decode(data)


class SocketPair(NamedTuple):
    """What is sent to one slot, and where its worker reads that."""

    inbox: socket.socket
    outbox: socket.socket  # of all others


def make_socket_pairs(count: int) -> tuple[SocketPair, ...]:
    """The sockets of `count` slots; successors of a worker read on where it has ended."""
    pairs = tuple(
        SocketPair(*socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK))
        for _ in range(count)
    )
    for each in pairs:
        each.outbox.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_QUEUED_BYTES)
    return pairs


class WorkerSocket:
    """One worker's end.

    Args:
        pairs: The sockets of all slots.
        slot: This worker's number.
        receive: Called with the slot and the messages of each datagram of another worker.
    """

    def __init__(
        self, pairs: Sequence[SocketPair], slot: int, receive: Callable[[int, list[Message]], None]
    ) -> None:
        self.slot = slot
        self.receive = receive
        self.others = tuple(number for number in range(len(pairs)) if number != slot)
        self._pairs = pairs
        self.lost = 0  # datagrams that were given up
        self._backlogs: dict[int, deque[bytes]] = {number: deque() for number in self.others}
        self._timer: asyncio.TimerHandle | None = None
        self._is_open = False
        self._buffer = memoryview(bytearray(MAX_QUEUED_BYTES))

    def open(self) -> None:
        """Read what others send from now on; what a predecessor was sent and did not read is dropped."""
        self._is_open = True
        while self._receive_datagram():
            pass
        asyncio.get_running_loop().add_reader(self._pairs[self.slot].inbox, self._read_datagrams)

    def close(self) -> None:
        """Send what waits, and nothing more."""
        if not self._is_open:
            return
        self._send_waiting()
        if self._timer is not None:
            self._timer.cancel()
        asyncio.get_running_loop().remove_reader(self._pairs[self.slot].inbox)
        self._is_open = False

    def send(self, messages: Sequence[Message], slots: Sequence[int]) -> None:
        """Send to those on `slots`, in one datagram each if they fit."""
        if not slots:
            return
        data = encode_frame(self.slot, messages)
        if len(data) > MAX_JOINED_BYTES and len(messages) > 1:
            half = len(messages) // 2
            self.send(messages[:half], slots)
            self.send(messages[half:], slots)
            return
        for slot in slots:
            self._backlogs[slot].append(data)
        self._send_waiting()

    def _send_waiting(self) -> None:
        """Send as much of what waits as the receivers' queues take."""
        for slot, backlog in self._backlogs.items():
            # In order: the answer to a question must not overtake an order before it.
            while backlog and self._send_datagram(backlog[0], slot):
                backlog.popleft()
            while len(backlog) > MAX_BACKLOG:
                backlog.popleft()
                self.lost += 1
        if self._timer is None and any(self._backlogs.values()):
            self._timer = asyncio.get_running_loop().call_later(RETRY_S, self._try_again)

    def _try_again(self) -> None:
        self._timer = None
        self._send_waiting()

    def _send_datagram(self, data: bytes, slot: int) -> bool:
        """Send it; returns False if it has to be tried again."""
        try:
            if self._is_open:
                self._pairs[slot].outbox.send(data)
        except BlockingIOError:
            return False
        except OSError as error:
            self.lost += 1
            log.warning("ttft-otel: a message to worker %d was lost: %s", slot, error)
        return True

    def _receive_datagram(self) -> int:
        """The bytes of the next datagram, which is in the buffer then; 0 for none."""
        try:
            return self._pairs[self.slot].inbox.recv_into(self._buffer)
        except BlockingIOError:
            return 0

    def _read_datagrams(self) -> None:
        for _ in range(MAX_READS):
            if not (length := self._receive_datagram()):
                return
            try:
                sender, messages = decode_frame(self._buffer[:length])
            except JSON_ERRORS as error:
                log.warning("ttft-otel: a message of another worker is not readable: %s", error)
                continue
            self.receive(sender, messages)


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
