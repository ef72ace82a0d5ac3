# SPDX-License-Identifier: Apache-2.0
"""What workers of one router send one another, in MessagePack, and the datagram sockets through which.

worker.py and process_loads.py say and take messages. The supervisor makes all sockets before it forks,
without names: whoever sends is one of us. Times are microseconds of the monotonic clock, which processes of
one machine share.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec

from ttft_otel.router.types import JSON_ERRORS

MAX_BLOCK_KEYS: Final = 4096  # leading blocks of a prompt that are reported: 36 KB
RETRY_S: Final = 0.005  # seconds until a datagram is tried again whose receiver's queue was full
# Bytes that the kernel keeps for a worker which reads nothing, and of one datagram at most.
MAX_QUEUED_BYTES: Final = 1 << 20
MAX_BACKLOG: Final = 256  # datagrams that wait for a worker beside these; the oldest are lost first
# Messages that are longer together are sent in several datagrams: the kernel's buffers may be small.
MAX_JOINED_BYTES: Final = 1 << 16
MAX_READS: Final = 64  # datagrams read in one turn of the event loop

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
