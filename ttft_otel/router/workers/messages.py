# SPDX-License-Identifier: Apache-2.0
"""What workers of one router send one another through worker_socket.py, in MessagePack.

Times are microseconds of the monotonic clock, which processes of one machine share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

MAX_BLOCK_KEYS: Final = 4096  # leading blocks of a prompt that are reported: 36 KB


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
