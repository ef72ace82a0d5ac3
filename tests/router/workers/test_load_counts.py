# SPDX-License-Identifier: Apache-2.0
"""Numbers in shared memory: a reader sees what has changed, also when it looks rarely."""

from __future__ import annotations

import random

import pytest

from router.workers.forked_process import run_forked
from ttft_otel.router.workers.shared_memory import (
    MAX_CHANGES,
    SharedMemory,
    SlotReader,
    SlotWriter,
)


@pytest.mark.parametrize("seed", range(5))
def test_what_has_changed_is_seen(seed: int) -> None:
    """By many changes or few between two looks, of two slots that share nothing."""
    chance = random.Random(seed)
    counts = SharedMemory(2)
    writers = [SlotWriter(counts, slot) for slot in range(2)]
    readers = [SlotReader(counts, slot) for slot in range(2)]
    truth = [{index: [0, 0] for index in range(20)} for _ in range(2)]
    seen: list[dict[int, list[int]]] = [{index: [0, 0] for index in range(20)} for _ in range(2)]
    for _ in range(60):
        for _ in range(chance.choice((0, 1, 5, MAX_CHANGES // 2 + 1, 3 * MAX_CHANGES))):
            slot, index = chance.randrange(2), chance.randrange(20)
            if truth[slot][index][0] and chance.random() < 0.5:
                writers[slot].count_ended(index)
                truth[slot][index][0] -= 1
            else:
                writers[slot].count_sent(index)
                truth[slot][index][0] += 1
                truth[slot][index][1] += 1
        for slot, reader in enumerate(readers):
            for index, in_flight, arrivals in reader.read_changes(20):
                seen[slot][index] = [in_flight, arrivals]
            assert not reader.has_changes()
        assert seen == truth


def test_nothing_is_read_twice() -> None:
    """What has not changed is left out, unless all is asked for."""
    counts = SharedMemory(1)
    writer, reader = SlotWriter(counts, 0), SlotReader(counts, 0)
    writer.count_sent(3)
    assert reader.read_changes(5) == [(3, 1, 1)]
    assert reader.read_changes(5) == []
    reader.read_all_next()
    assert sorted(reader.read_changes(5)) == [(0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 1, 1), (4, 0, 0)]


def test_a_successor_begins_at_nothing() -> None:
    """What was under way ended with its predecessor."""
    counts = SharedMemory(2)
    SlotWriter(counts, 0).count_sent(0)
    SlotWriter(counts, 1).count_sent(0)

    SlotWriter(counts, 0).clear()

    assert SlotWriter(counts, 0).get_counts(0) == (0, 0)
    assert SlotWriter(counts, 1).get_counts(0) == (1, 1)


def count_up(counts: SharedMemory, number: int) -> None:
    """In another process."""
    writer = SlotWriter(counts, 0)
    for each in range(number):
        writer.count_sent(each % 7)
    for each in range(number):
        writer.count_ended(each % 7)


def test_between_processes() -> None:
    """While one counts, the other reads: numbers only go where they were, and the last ones are right."""
    number = 70_000
    counts = SharedMemory(1)
    reader = SlotReader(counts, 0)
    seen = {index: (0, 0) for index in range(7)}
    with run_forked(count_up, counts, number) as process:
        is_over = False
        while not is_over:
            is_over = not process.is_alive()  # before the read, which is then the last
            for index, in_flight, arrivals in reader.read_changes(7):
                assert 0 <= in_flight <= number and seen[index][1] <= arrivals <= number // 7
                seen[index] = (in_flight, arrivals)
    assert seen == {index: (0, number // 7) for index in range(7)}
