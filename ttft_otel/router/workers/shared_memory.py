# SPDX-License-Identifier: Apache-2.0
"""Memory that all workers share: how many requests each has under way at each instance, and what it reports.

supervisor.py makes it before it forks. own_loads.py and load_link.py write a worker's own slot; load_link.py
reads the others' before a decision: nobody is woken, nothing is sent, and nothing is locked, because each
slot has one writer and a store of 8 bytes is never seen in halves. A reader of a ring that was too slow
notices, and asks for everything once more.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from typing import Final

from ttft_otel.router.errors import RingOverrun

MAX_PLACES: Final = 4096  # instances of a worker; what is under way at others is not shared
# Changed numbers that a reader may be behind; then it looks at all of them.
MAX_CHANGES: Final = 4096
# Words of a slot before its numbers: how often they have changed, when the worker's event loop last ran, and
# how many orders it has given. A cache line, so that the writer slows no reader of another slot.
_HEAD_WORDS: Final = 8
_HEARTBEAT_AT: Final = 1
_ORDERS_AT: Final = 2
_CHANGES_AT: Final = _HEAD_WORDS
_COUNTS_AT: Final = _CHANGES_AT + MAX_CHANGES
_SLOT_WORDS: Final = _COUNTS_AT + 2 * MAX_PLACES
_WORD_BYTES: Final = 8
# Of one worker: some 900 prompts of 8 000 tokens in blocks of 16, or 20 000 requests without blocks.
RING_BYTES: Final = 1 << 22
MAX_FRAME_BYTES: Final = RING_BYTES // 4
_LINE_BYTES: Final = 64  # a cache line for each position, so that writers do not slow one another
_HEADER: Final = struct.Struct("<II")  # length, checksum
_PAST_END: Final = 0xFFFFFFFF  # in place of a length: the next frame is at the ring's beginning


class SharedMemory:
    """Counts and a ring for each of `slots` workers, in anonymous memory that forked processes share."""

    def __init__(self, slots: int) -> None:
        self.words = memoryview(mmap.mmap(-1, slots * _SLOT_WORDS * _WORD_BYTES)).cast("q")
        heads_bytes = -(-slots * _LINE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        # Pages that nobody has written take no memory.
        self.rings = mmap.mmap(-1, heads_bytes + slots * RING_BYTES)
        # Bytes ever written, by slot: one store of 8 bytes.
        self.heads = memoryview(self.rings)[:heads_bytes].cast("Q")
        self._heads_bytes = heads_bytes

    def find_head(self, slot: int) -> int:
        """The place of a slot's position in `heads`."""
        return slot * _LINE_BYTES // self.heads.itemsize

    def get_heartbeat(self, slot: int) -> int:
        """What the worker has last given to record_heartbeat(); 0 before it serves."""
        return self.words[slot * _SLOT_WORDS + _HEARTBEAT_AT]

    def reset_heartbeat(self, slot: int) -> None:
        """A worker starts that does not serve yet."""
        self.words[slot * _SLOT_WORDS + _HEARTBEAT_AT] = 0

    def count_orders(self, slot: int) -> int:
        """Orders that the worker and its predecessors have given to the others."""
        return self.words[slot * _SLOT_WORDS + _ORDERS_AT]

    def find_start(self, slot: int) -> int:
        """Where the bytes of a slot's ring begin in `rings`."""
        return self._heads_bytes + slot * RING_BYTES


class SlotWriter:
    """The slot of one worker: its numbers, by index, and its ring.

    The numbers are requests in flight, and requests ever sent. The ring goes on from a predecessor's bytes.
    """

    def __init__(self, shared: SharedMemory, slot: int) -> None:
        self._words = shared.words
        self._start = slot * _SLOT_WORDS
        self._rings = shared.rings
        self._heads = shared.heads
        self._head = shared.find_head(slot)
        self._ring_start = shared.find_start(slot)
        self._position = self._heads[self._head]

    def clear(self) -> None:
        """Set all to 0: what a predecessor had under way ended with it."""
        begin = self._start + _COUNTS_AT
        self._words[begin : begin + 2 * MAX_PLACES] = memoryview(
            bytes(2 * MAX_PLACES * _WORD_BYTES)
        ).cast("q")

    def record_heartbeat(self, now_us: int) -> None:
        """The event loop runs."""
        self._words[self._start + _HEARTBEAT_AT] = now_us

    def count_order(self) -> int:
        """This worker gives an order: its number."""
        at = self._start + _ORDERS_AT
        self._words[at] += 1
        return self._words[at]

    def count_sent(self, index: int) -> None:
        """One more is in flight."""
        words, start = self._words, self._start
        at = start + _COUNTS_AT + 2 * index
        words[at] += 1
        words[at + 1] += 1
        # As _note_change() does, without the call: this is done for every request.
        changes = words[start]
        words[start + _CHANGES_AT + changes % MAX_CHANGES] = index
        words[start] = changes + 1

    def count_ended(self, index: int) -> None:
        """One less is in flight."""
        self._words[self._start + _COUNTS_AT + 2 * index] -= 1
        self._note_change(index)

    def reset_index(self, index: int) -> None:
        """Set both numbers of `index` to 0."""
        at = self._start + _COUNTS_AT + 2 * index
        self._words[at] = self._words[at + 1] = 0

    def get_counts(self, index: int) -> tuple[int, int]:
        """Requests in flight, and requests ever sent."""
        at = self._start + _COUNTS_AT + 2 * index
        return self._words[at], self._words[at + 1]

    def _note_change(self, index: int) -> None:
        words, start = self._words, self._start
        changes = words[start]
        words[start + _CHANGES_AT + changes % MAX_CHANGES] = index
        # Last: who sees it finds the numbers changed.
        words[start] = changes + 1

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
        begin = self._ring_start + place
        # With the position, so that a frame of another lap is no frame to a reader that was too slow.
        header = _HEADER.pack(length, zlib.crc32(data, position & 0xFFFFFFFF))
        self._rings[begin : begin + _HEADER.size + length] = header + data
        # Last: who reads up to here finds all of it.
        self._position = self._heads[self._head] = position + _HEADER.size + length
        return True

    def _skip_to_beginning(self, position: int) -> int:
        place = position % RING_BYTES
        if place + _HEADER.size <= RING_BYTES:
            begin = self._ring_start + place
            self._rings[begin : begin + _HEADER.size] = _HEADER.pack(_PAST_END, 0)
        return position - place + RING_BYTES


class SlotReader:
    """Reads the slot of another worker, from what is written next."""

    def __init__(self, shared: SharedMemory, slot: int) -> None:
        self.slot = slot
        self._words = shared.words
        self._start = slot * _SLOT_WORDS
        self._changes = self._words[self._start]
        self._reads_all = False
        self._rings = shared.rings
        self._heads = shared.heads
        self._head = shared.find_head(slot)
        self._ring_start = shared.find_start(slot)
        self._position = self._heads[self._head]

    def has_changes(self) -> bool:
        """Whether there are other numbers to read."""
        return self._words[self._start] != self._changes or self._reads_all

    def read_all_next(self) -> None:
        """Have the next read take all numbers: the indices mean other instances now."""
        self._reads_all = True

    def read_changes(self, used: int) -> list[tuple[int, int, int]]:
        """Index, requests in flight and ever sent, of what has changed since the last call.

        used: the indices from 0 that are in use, as far as the reader knows.
        """
        words, start, before = self._words, self._start, self._changes
        self._changes = changes = words[start]
        # Half of them, since the writer goes on meanwhile.
        if self._reads_all or changes - before > MAX_CHANGES // 2:
            self._reads_all = False
            indices = set(range(used))
        else:
            at = start + _CHANGES_AT
            indices = {words[at + number % MAX_CHANGES] for number in range(before, changes)}
        at = start + _COUNTS_AT
        return [(each, words[at + 2 * each], words[at + 2 * each + 1]) for each in indices]

    def has_messages(self) -> bool:
        """Whether there is a frame to read."""
        return self._heads[self._head] != self._position

    def skip_messages(self) -> None:
        """Go on from what is written next."""
        self._position = self._heads[self._head]

    def read_frames(self, max_frames: int) -> list[bytes]:
        """The next frames, so many at most. Raises RingOverrun if some are lost."""
        frames: list[bytes] = []
        memory, position, head = self._rings, self._position, self._heads[self._head]
        while position != head and len(frames) < max_frames:
            place = position % RING_BYTES
            if place + _HEADER.size > RING_BYTES:
                position += RING_BYTES - place
                continue
            begin = self._ring_start + place
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
