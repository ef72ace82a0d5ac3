# SPDX-License-Identifier: Apache-2.0
"""Bounds the bytes of all bodies that receiver.py holds, from the first byte until the batch is stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ttft_otel.http.byte_budget import ByteBudget

MAX_BODIES_BYTES: Final = 64 << 20  # of all bodies together


class BodyBudgetError(Exception):
    """This body had to give way: the sender should retry."""


class HeldBody:
    """One body. `data` is what has arrived; its bytes are counted until `held_bytes` are released."""

    __slots__ = ("data", "has_given_way", "held_bytes")

    def __init__(self) -> None:
        self.data = bytearray()
        self.has_given_way = False
        self.held_bytes = 0


class BodyBudget:
    """The bodies in memory; used on one event loop."""

    def __init__(self, max_bytes: int = MAX_BODIES_BYTES) -> None:
        self.max_bytes = max_bytes
        self._arriving: dict[HeldBody, None] = {}  # oldest first
        self._bytes: ByteBudget[HeldBody] = ByteBudget(max_bytes, self._arriving)

    @property
    def held_bytes(self) -> int:
        """Bytes of all bodies together."""
        return self._bytes.held_bytes

    @contextmanager
    def hold_body(self) -> Iterator[HeldBody]:
        """A new body, whose bytes are given back at the end."""
        body = HeldBody()
        self._arriving[body] = None
        try:
            yield body
        finally:
            self.complete_body(body)
            self._bytes.release(body)
            body.data = bytearray()

    def extend_body(self, body: HeldBody, chunk: bytes) -> None:
        """Append `chunk`. Raises BodyBudgetError when this body gave way, now or earlier."""
        if not body.has_given_way:
            for each in self._bytes.add_bytes(body, len(chunk)):
                each.has_given_way, each.data = True, bytearray()
                self.complete_body(each)
        if body.has_given_way:
            raise BodyBudgetError("too many bytes of other exports are arriving")
        body.data += chunk

    def complete_body(self, body: HeldBody) -> None:
        """Nothing more of `body` will arrive: it is being decoded and cannot give way. Idempotent."""
        self._arriving.pop(body, None)
