# SPDX-License-Identifier: Apache-2.0
"""What is over the bound of all bodies goes at the expense of the largest that is still arriving."""

from __future__ import annotations

import random

from ttft_otel.http.byte_budget import ByteBudget


class Body:
    """A body of which only the bytes are known."""

    def __init__(self) -> None:
        self.counted_bytes = 0


def test_the_largest_gives_way() -> None:
    """Of equal ones the oldest; who is complete never does; the one that grows, if it is the largest."""
    complete, old, young, small = (Body() for _ in range(4))
    arriving = [old, young, small]
    budget = ByteBudget(100, arriving)
    assert not budget.add_bytes(complete, 50)
    assert not budget.add_bytes(old, 20)
    assert not budget.add_bytes(young, 20)
    assert budget.add_bytes(small, 15) == [old]
    arriving.remove(old)
    assert budget.add_bytes(small, 30) == [small]
    assert (complete.counted_bytes, young.counted_bytes, budget.counted_bytes) == (50, 20, 70)


def test_several_give_way() -> None:
    """As many as it takes, from the largest on; at last the one that grows."""
    arriving = [Body() for _ in range(4)]
    budget = ByteBudget(100, arriving)
    for body, number in zip(arriving, (40, 30, 20, 10), strict=True):
        assert not budget.add_bytes(body, number)
    assert budget.add_bytes(arriving[3], 40) == [arriving[3]]
    assert not budget.add_bytes(arriving[3], 10)
    assert budget.add_bytes(arriving[3], 19) == [arriving[0]]
    assert budget.add_bytes(arriving[3], 1000) == [arriving[3]]
    assert budget.counted_bytes == 50


def test_sums() -> None:
    """After any order of calls the sum is that of the bodies, and within the bound."""
    chance = random.Random(7)
    arriving: list[Body] = []
    complete: list[Body] = []
    budget = ByteBudget(1000, arriving)
    for _ in range(5000):
        kind = chance.randrange(4)
        if kind == 0 or not arriving:
            arriving.append(Body())
        elif kind == 1:
            for loser in budget.add_bytes(chance.choice(arriving), chance.randrange(300)):
                arriving.remove(loser)
        elif kind == 2:
            complete.append(arriving.pop(chance.randrange(len(arriving))))
        elif complete:
            budget.release(body := complete.pop(chance.randrange(len(complete))))
            budget.release(body)
        assert (
            budget.counted_bytes
            == sum(each.counted_bytes for each in (*arriving, *complete))
            <= 1000
        )
