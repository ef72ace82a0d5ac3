# SPDX-License-Identifier: Apache-2.0
"""Bounds the bytes of all bodies that a server holds together, for the budgets of router and receiver.

What is over the bound goes at the expense of the largest body that is still arriving, of equal ones the
oldest: small requests pass while somebody sends large ones and does not finish.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar


class SizedBody(Protocol):
    """A body of which `counted_bytes` are counted."""

    counted_bytes: int


BodyType = TypeVar("BodyType", bound=SizedBody)


class ByteBudget(Generic[BodyType]):
    """The bytes of all bodies, `counted_bytes`; used on one event loop.

    arriving: those that can give way, the oldest first; their owner adds and removes them.
    """

    def __init__(self, max_bytes: int, arriving: Iterable[BodyType]) -> None:
        self.max_bytes = max_bytes
        self.counted_bytes = 0
        self._arriving = arriving

    def add_bytes(self, body: BodyType, number: int) -> list[BodyType]:
        """Count bytes of `body`, which is arriving; the bodies that give way for them, itself perhaps.

        Their bytes are released; their owner ends them.
        """
        body.counted_bytes += number
        self.counted_bytes += number
        losers: list[BodyType] = []
        # Ends with `body` itself at the latest, which is one of the arriving ones.
        while self.counted_bytes > self.max_bytes and body not in losers:
            # the first of equal ones
            largest = max(self._arriving, key=lambda each: each.counted_bytes)
            self.release(largest)
            losers.append(largest)
        return losers

    def release(self, body: BodyType) -> None:
        """The bytes of `body` are free again. Idempotent."""
        # By what the body counts, and then 0: a second release takes nothing away.
        self.counted_bytes -= body.counted_bytes
        body.counted_bytes = 0
