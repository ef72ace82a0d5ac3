# SPDX-License-Identifier: Apache-2.0
"""What each worker says to all others, in memory that they share: nobody is woken, nothing is sent.

supervisor.py makes it before it forks; worker_link.py writes the ring of its seat, and reads the others'
before a decision. A reader that was too slow notices, and asks for all anew.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from typing import Final

from ttft_otel.router.errors import RingOverrun

# Of one worker: some 900 prompts of 8 000 tokens in blocks of 16, or 20 000 requests without blocks.
RING_BYTES: Final = 1 << 22
MAX_FRAME_BYTES: Final = RING_BYTES // 4
_LINE_BYTES: Final = 64  # a cache line for each position, so that writers do not slow one another
_HEADER: Final = struct.Struct("<II")  # length, checksum
_PAST_END: Final = 0xFFFFFFFF  # in place of a length: the next frame is at the ring's beginning


class LoadRings:
    """A ring for each of `seats` workers, in anonymous memory that forked processes share."""

    def __init__(self, seats: int) -> None:
        heads_bytes = -(-seats * _LINE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        # Pages that nobody has written take no memory.
        self.memory = mmap.mmap(-1, heads_bytes + seats * RING_BYTES)
        # Bytes ever written, by seat: one store of 8 bytes, which is never seen in halves.
        self.heads = memoryview(self.memory)[:heads_bytes].cast("Q")
        self._heads_bytes = heads_bytes

    def find_head(self, seat: int) -> int:
        """The place of a seat's position in `heads`."""
        return seat * _LINE_BYTES // self.heads.itemsize

    def find_start(self, seat: int) -> int:
        """Where the bytes of a seat's ring begin in `memory`."""
        return self._heads_bytes + seat * RING_BYTES


class RingWriter:
    """The ring of `seat`, whose predecessors' bytes it goes on from."""

    def __init__(self, rings: LoadRings, seat: int) -> None:
        self._memory, self._heads = rings.memory, rings.heads
        self._head, self._start = rings.find_head(seat), rings.find_start(seat)
        self._position = self._heads[self._head]

    def write_frame(self, data: bytes) -> bool:
        """Write `data`; the oldest is overwritten. False if it is too long."""
        length = len(data)
        if length > MAX_FRAME_BYTES:
            return False
        position = self._position
        place = position % RING_BYTES
        if place + _HEADER.size + length > RING_BYTES:
            position = self._skip_to_beginning(position)
            place = 0
        begin = self._start + place
        # With the position, so that a frame of another lap is no frame to a reader that was too slow.
        header = _HEADER.pack(length, zlib.crc32(data, position & 0xFFFFFFFF))
        self._memory[begin : begin + _HEADER.size + length] = header + data
        # Last: who reads up to here finds all of it.
        self._position = self._heads[self._head] = position + _HEADER.size + length
        return True

    def _skip_to_beginning(self, position: int) -> int:
        place = position % RING_BYTES
        if place + _HEADER.size <= RING_BYTES:
            begin = self._start + place
            self._memory[begin : begin + _HEADER.size] = _HEADER.pack(_PAST_END, 0)
        return position - place + RING_BYTES


class RingReader:
    """Reads the ring of another `seat`, from what is written next."""

    def __init__(self, rings: LoadRings, seat: int) -> None:
        self.seat = seat
        self._memory, self._heads = rings.memory, rings.heads
        self._head, self._start = rings.find_head(seat), rings.find_start(seat)
        self._position = self._heads[self._head]

    def has_news(self) -> bool:
        """Whether there is anything to read."""
        return self._heads[self._head] != self._position

    def skip_all(self) -> None:
        """Go on from what is written next."""
        self._position = self._heads[self._head]

    def read_frames(self, max_frames: int) -> list[bytes]:
        """The next frames, so many at most. Raises RingOverrun if some are lost."""
        frames: list[bytes] = []
        memory, position, head = self._memory, self._position, self._heads[self._head]
        while position != head and len(frames) < max_frames:
            place = position % RING_BYTES
            if place + _HEADER.size > RING_BYTES:
                position += RING_BYTES - place
                continue
            begin = self._start + place
            length, checksum = _HEADER.unpack_from(memory, begin)
            if length == _PAST_END:
                position += RING_BYTES - place
                continue
            begin += _HEADER.size
            data = memory[begin : begin + length] if length <= MAX_FRAME_BYTES else b""
            position_after = position + _HEADER.size + length
            # Also where the writer was overwriting it meanwhile.
            is_whole = position_after <= head and len(data) == length
            if not is_whole or zlib.crc32(data, position & 0xFFFFFFFF) != checksum:
                raise RingOverrun
            frames.append(data)
            position = position_after
        self._position = position
        return frames
