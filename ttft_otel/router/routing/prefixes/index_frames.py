# SPDX-License-Identifier: Apache-2.0
"""Messages between a worker (shared_index_source.py) and the owner of the index (workers/index_service.py).

A frame is the length of the message, big-endian, followed by the message in msgpack, on a Unix stream socket
in a folder that only this user can enter.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import msgspec

LENGTH_BYTES: Final = 4  # bytes of a frame's length
MAX_FRAME_BYTES: Final = 1 << 24  # the state of 1 024 instances with 128 ranks each
MAX_ASKED_BLOCKS: Final = 65_536  # leading blocks of a prompt that are asked for: a million tokens


# array_like: fields by position, since both ends are of the same version.
class Follow(msgspec.Struct, array_like=True, tag="f", frozen=True):
    """A worker has these instances that prefill, by URL."""

    urls: list[str]


class Lookup(msgspec.Struct, array_like=True, tag="l", frozen=True):
    """How many leading blocks of this prompt does each instance have? keys: from pack_keys()."""

    number: int
    keys: bytes


class Depths(msgspec.Struct, array_like=True, tag="d", frozen=True):
    """The answer to the lookup of that number: by URL of each instance that reports its blocks."""

    number: int
    depths: dict[str, int]


class Status(msgspec.Struct, array_like=True, tag="s", frozen=True):
    """Once a second: tokens per block of the index, and the feeds of instances that report, by URL."""

    block_size: int
    instances: dict[str, dict[str, Any]]


WorkerMessage: TypeAlias = Follow | Lookup
OwnerMessage: TypeAlias = Depths | Status

_ENCODER: Final = msgspec.msgpack.Encoder()
# The decoders check tag and types, so that no handler has to.
worker_decoder: Final = msgspec.msgpack.Decoder(WorkerMessage)
owner_decoder: Final = msgspec.msgpack.Decoder(OwnerMessage)


def frame_message(message: WorkerMessage | OwnerMessage) -> bytes:
    """Encode `message` as a frame."""
    data = _ENCODER.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def pack_keys(keys: Sequence[int]) -> bytes:
    """The keys of a prompt's blocks, 8 bytes each; of more than MAX_ASKED_BLOCKS the first ones."""
    return array("Q", keys[:MAX_ASKED_BLOCKS]).tobytes()


def unpack_keys(data: bytes) -> Sequence[int]:
    """The keys again. Raises ValueError for a length that is no multiple of 8."""
    keys = array("Q")
    keys.frombytes(data)
    return keys


class FrameSplitter:
    """Cuts what arrives on one connection into messages."""

    def __init__(self) -> None:
        self._left = b""

    def split_frames(self, data: bytes) -> Iterator[bytes]:
        """The messages that are complete now that `data` has come. Raises ValueError for one too long."""
        data = self._left + data
        begin = 0
        while len(data) - begin >= LENGTH_BYTES:
            length = int.from_bytes(data[begin : begin + LENGTH_BYTES], "big")
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a message of {length} bytes")
            end = begin + LENGTH_BYTES + length
            if end > len(data):
                break
            yield data[begin + LENGTH_BYTES : end]
            begin = end
        self._left = data[begin:]
