# SPDX-License-Identifier: Apache-2.0
"""What workers of one router tell one another, in MessagePack; worker_socket.py carries it.

Times are microseconds of the sender's monotonic clock, which processes of one machine share.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

MAX_BLOCK_KEYS: Final = 4096  # leading blocks of a prompt that others hear of: 36 KB


# array_like: the names of fields would be most of the bytes.
class Sent(msgspec.Struct, array_like=True, tag="s", frozen=True):
    """An attempt is on its way.

    is_pending: it counts as work before its first token, with the work and blocks that follow; False where
    the leg's policy tracks no load, or once the first token is there.
    """

    span_id: str
    leg: str
    url: str
    sent_us: int
    is_pending: bool = False
    tokens_to_compute: int = 0
    pairs: int = 0
    block_keys: tuple[int, ...] = ()


class FirstToken(msgspec.Struct, array_like=True, tag="t", frozen=True):
    """An attempt has its first token; `seconds` of its prefill, None if they were not measured."""

    span_id: str
    leg: str
    now_us: int
    model: str = ""
    tokens_to_compute: int = 0
    pairs: int = 0
    seconds: float | None = None


class Ended(msgspec.Struct, array_like=True, tag="e", frozen=True):
    """An attempt is over."""

    span_id: str
    leg: str
    now_us: int


class InstanceTotals(msgspec.Struct, array_like=True, frozen=True):
    """What a worker has under way at one instance, and the results of what has ended."""

    leg: str
    url: str
    in_flight: int
    pending: int
    # Since the worker's start, so that nothing is lost with a message.
    results: dict[str, int]


class Totals(msgspec.Struct, array_like=True, tag="n", frozen=True):
    """Once a second: by these the others see whether they have missed something."""

    rows: list[InstanceTotals]


class Resync(msgspec.Struct, array_like=True, tag="r", frozen=True):
    """Send me, who is named by the frame, all that you have under way: I have missed something."""


class Reset(msgspec.Struct, array_like=True, tag="z", frozen=True):
    """Forget what I have under way: all of it follows."""


class Order(msgspec.Struct, array_like=True, tag="o", frozen=True):
    """An operator or an instance asked me for this; leg is a role where it registers."""

    action: str
    leg: str
    url: str


class Question(msgspec.Struct, array_like=True, tag="q", frozen=True):
    """Answer with this number; topic: `report` of a request, or `roster`."""

    number: int
    topic: str
    subject: str = ""


class Answer(msgspec.Struct, array_like=True, tag="a", frozen=True):
    """To the question of that number; empty if there is nothing."""

    number: int
    data: bytes = b""


# The decoder checks tag and types, so that no handler has to.
Message: TypeAlias = Sent | FirstToken | Ended | Totals | Resync | Reset | Order | Question | Answer


class Frame(msgspec.Struct, array_like=True):
    """One datagram. seat: the sender's number. process: tells its successors on that seat apart."""

    seat: int
    process: int
    messages: list[Message]


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Frame)


def encode_frame(frame: Frame) -> bytes:
    """The bytes of a datagram."""
    return _ENCODER.encode(frame)


def decode_frame(data: bytes) -> Frame:
    """The frame in a datagram. Raises msgspec.MsgspecError for anything else."""
    return _DECODER.decode(data)
