# SPDX-License-Identifier: Apache-2.0
"""Bounds the bytes of all bodies that receiver.py holds, from the first byte until the batch is stored.

When they are used up the largest body that is still arriving gives way, of equal ones the oldest: a sender
that is slow, or sends nothing more, takes no place from one that sends a usual export at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# Sixteen bodies of the largest size that is accepted.
MAX_BODIES_BYTES: Final = 64 << 20  # of all bodies together


class BodyBudgetError(Exception):
    """This body had to give way: the sender should retry."""


class HeldBody:
    """One body. `data` is what has arrived; is_complete: it is being decoded and cannot give way."""

    __slots__ = ("data", "has_given_way", "is_complete")

    def __init__(self) -> None:
        self.data = bytearray()
        self.has_given_way = False
        self.is_complete = False


class BodyBudget:
    """The bodies in memory; used on one event loop. counts in `used_bytes`."""

    def __init__(self, max_bytes: int = MAX_BODIES_BYTES) -> None:
        self.max_bytes, self.used_bytes = max_bytes, 0
        self._bodies: dict[HeldBody, None] = {}  # oldest first

    @contextmanager
    def hold_body(self) -> Iterator[HeldBody]:
        """A new body, whose bytes are given back at the end."""
        body = HeldBody()
        self._bodies[body] = None
        try:
            yield body
        finally:
            # Also after an exception: bytes that are not given back would refuse bodies for ever.
            self._release(body)
            del self._bodies[body]

    def extend_body(self, body: HeldBody, chunk: bytes) -> None:
        """Append `chunk`. Raises BodyBudgetError when this body gave way, now or earlier."""
        while not body.has_given_way and self.used_bytes + len(chunk) > self.max_bytes:
            # A complete body is being decoded: taking its bytes away would free no memory.
            arriving = [each for each in self._bodies if not each.is_complete and each.data]
            # max() takes the first, hence the oldest, of equal ones.
            largest = max(arriving, key=lambda each: len(each.data), default=body)
            # The newcomer is the largest itself: then it gives way, and no other.
            if len(largest.data) < len(body.data) + len(chunk):
                largest = body
            self._release(largest)
            largest.has_given_way = True
        # Told at its next chunk, since only its own coroutine can answer its sender.
        if body.has_given_way:
            raise BodyBudgetError("too many bytes of other exports are arriving")
        body.data += chunk
        self.used_bytes += len(chunk)

    def _release(self, body: HeldBody) -> None:
        self.used_bytes -= len(body.data)
        body.data = bytearray()
