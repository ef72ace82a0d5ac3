# SPDX-License-Identifier: Apache-2.0
"""Rings in shared memory: read whole and in order, by other processes too; what is lost is noticed."""

from __future__ import annotations

import os
import random

import pytest

from router.workers.forked_process import run_forked
from ttft_otel.router.errors import RingOverrun
from ttft_otel.router.workers import shared_memory
from ttft_otel.router.workers.shared_memory import (
    MAX_FRAME_BYTES,
    RING_BYTES,
    SharedMemory,
    SlotReader,
    SlotWriter,
)


def read_all(reader: SlotReader) -> list[bytes]:
    """All frames that there are, in several reads."""
    frames: list[bytes] = []
    while reader.has_messages():
        frames += reader.read_frames(7)
    return frames


@pytest.mark.parametrize("seed", range(5))
def test_frames_arrive_in_order(seed: int) -> None:
    """Of all sizes and many laps, also those that meet the end of the ring; each slot has its own."""
    chance = random.Random(seed)
    rings = SharedMemory(3)
    writers = [SlotWriter(rings, slot) for slot in (0, 2)]
    readers = [SlotReader(rings, slot) for slot in (0, 2)]
    written_bytes = 0
    while written_bytes < 5 * RING_BYTES:
        sent: list[list[bytes]] = [[], []]
        for _ in range(chance.randrange(1, 4)):
            slot = chance.randrange(2)
            data = chance.randbytes(chance.choice((0, 1, 9, 100, 5000, RING_BYTES // 8)))
            assert writers[slot].write_frame(data)
            sent[slot].append(data)
            written_bytes += len(data)
        assert [read_all(reader) for reader in readers] == sent


def test_the_last_bytes_of_a_ring() -> None:
    """Wherever the end of the ring cuts a header or a frame, nothing is lost."""
    for rest in range(40):
        rings = SharedMemory(1)
        writer, reader = SlotWriter(rings, 0), SlotReader(rings, 0)
        filled = 0
        while RING_BYTES - filled > MAX_FRAME_BYTES + 8:
            assert writer.write_frame(bytes(MAX_FRAME_BYTES))
            filled += MAX_FRAME_BYTES + 8
        assert writer.write_frame(bytes(RING_BYTES - filled - 8 - rest))
        read_all(reader)
        sent = [b"first", b"second", b"third"]
        for data in sent:
            writer.write_frame(data)
        assert read_all(reader) == sent, rest


def test_a_reader_that_is_too_slow() -> None:
    """It is told, whatever lies where it stopped; afterwards it goes on with what is new."""
    for extra in range(1, 60):
        rings = SharedMemory(1)
        writer, reader = SlotWriter(rings, 0), SlotReader(rings, 0)
        # Frames of one size, so that those of the next lap begin where those of the first did.
        frame = bytes(RING_BYTES // 64 - 8)
        for _ in range(64 + extra):
            writer.write_frame(frame)
        with pytest.raises(RingOverrun):
            reader.read_frames(1000)
        reader.skip_messages()
        writer.write_frame(b"new")
        assert read_all(reader) == [b"new"]


def test_what_is_half_overwritten() -> None:
    """A frame that changes while it is read is no frame."""
    rings = SharedMemory(1)
    writer, reader = SlotWriter(rings, 0), SlotReader(rings, 0)
    writer.write_frame(b"attempt 1 was sent")
    start = rings.find_start(0)
    rings.rings[start + 12] ^= 1

    with pytest.raises(RingOverrun):
        reader.read_frames(10)


@pytest.mark.parametrize("length", [0xFFFFFFFE, RING_BYTES, 20])
def test_a_length_that_is_wrong(length: int) -> None:
    """Nothing outside the ring is read for it, nor what is not written yet."""
    rings = SharedMemory(1)
    writer, reader = SlotWriter(rings, 0), SlotReader(rings, 0)
    writer.write_frame(b"short")
    start = rings.find_start(0)
    rings.rings[start : start + 4] = length.to_bytes(4, "little")

    with pytest.raises(RingOverrun):
        reader.read_frames(10)


def test_too_long() -> None:
    """It would overwrite most of what others have not read: refused, and nothing changes."""
    rings = SharedMemory(1)
    writer, reader = SlotWriter(rings, 0), SlotReader(rings, 0)

    assert not writer.write_frame(bytes(MAX_FRAME_BYTES + 1))
    assert writer.write_frame(b"next")
    assert read_all(reader) == [b"next"]


def test_a_successor_goes_on() -> None:
    """Readers follow it from where its predecessor stopped."""
    rings = SharedMemory(1)
    reader = SlotReader(rings, 0)
    SlotWriter(rings, 0).write_frame(b"one")
    SlotWriter(rings, 0).write_frame(b"two")

    assert read_all(reader) == [b"one", b"two"]


def write_numbers(rings: SharedMemory, count: int) -> None:
    """In another process: numbers, as fast as it can."""
    writer = SlotWriter(rings, 1)
    for number in range(count):
        writer.write_frame(b"%d " % number * (1 + number % 50))


def test_between_processes() -> None:
    """While one writes, the other reads: every frame is whole, and in order; gaps are noticed."""
    count = 200_000
    rings = SharedMemory(2)
    reader = SlotReader(rings, 1)
    last, overruns = -1, 0
    with run_forked(write_numbers, rings, count) as process:
        while last < count - 1:
            try:
                frames = reader.read_frames(500)
            except RingOverrun:
                overruns += 1
                reader.skip_messages()
                last = max(last, -1)
                # What is skipped may be the end of it.
                if not process.is_alive() and not reader.has_messages():
                    break
                continue
            for frame in frames:
                numbers = {int(each) for each in frame.split()}
                (number,) = numbers
                assert len(frame.split()) == 1 + number % 50
                assert number == last + 1 if not overruns else number > last
                last = number
            if not frames and not process.is_alive() and not reader.has_messages():
                break
    assert overruns or last == count - 1


def test_memory_is_not_taken_before_it_is_used() -> None:
    """Rings of 64 workers cost nothing while they are empty."""
    before = read_resident_bytes()
    rings = SharedMemory(64)
    assert read_resident_bytes() - before < 1 << 20
    assert len(rings.rings) > 64 * shared_memory.RING_BYTES


def read_resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
