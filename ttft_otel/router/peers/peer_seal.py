# SPDX-License-Identifier: Apache-2.0
"""Who may tell a replica anything: datagrams carry a keyed hash, a time and a number that comes once.

peer_link.py seals what it sends and opens what arrives. They are not encrypted: URLs of instances and counts
can be read on the way, not changed.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MIN_KEY_BYTES: Final = 16
MAX_KEYS: Final = 4  # so that a forged datagram costs four hashes at most
MAX_SKEW_MS: Final = 30_000  # by which the clocks of two hosts may differ, and a datagram be late
# Datagrams of one sender that may overtake one another.
WINDOW: Final = 1024
MAX_SENDERS: Final = 1024  # processes of all replicas, also of those that ended a minute ago
# For so long a datagram could be sent once more that was taken: its time may be ahead, then behind.
_KEEP_MS: Final = 2 * MAX_SKEW_MS + 1000
_MAC_BYTES: Final = 16
_PURPOSE: Final = b"ttft-otel router peers 1\0"  # the same key may serve for something else


def read_keys(path: str | Path) -> tuple[bytes, ...]:
    """The keys of a file, one a line; the first one seals, all open. Raises ValueError with the remedy."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"the file of keys cannot be read: {error}") from error
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys or len(keys) > MAX_KEYS or min(map(len, keys)) < MIN_KEY_BYTES:
        raise ValueError(
            f"{path}: write one to {MAX_KEYS} keys of {MIN_KEY_BYTES} characters or more, one a line, "
            "like those of `openssl rand -hex 32`"
        )
    return keys


def seal_body(body: bytes, keys: Sequence[bytes]) -> bytes:
    """The datagram with this `body`."""
    return _compute_mac(body, keys[0]) + body


def open_datagram(data: bytes, keys: Sequence[bytes]) -> bytes | None:
    """The body of a datagram; None if it was sealed with none of the keys."""
    mac, body = data[:_MAC_BYTES], data[_MAC_BYTES:]
    for key in keys:
        if hmac.compare_digest(_compute_mac(body, key), mac):
            return body
    return None


def _compute_mac(body: bytes, key: bytes) -> bytes:
    return hmac.digest(key, _PURPOSE + body, "sha256")[:_MAC_BYTES]


@dataclass(slots=True)
class _SenderNumbers:
    """What has come of one sender: the highest number, a bit for each of the WINDOW up to it, and when."""

    highest: int = 0
    seen: int = 0
    taken_ms: int = 0


class ReplayGuard:
    """Says whether a datagram is new. Numbers of senders that are silent are kept while it matters."""

    def __init__(self) -> None:
        self._senders: dict[tuple[str, str], _SenderNumbers] = {}

    def judge_frame(self, sender: tuple[str, str], number: int, time_ms: int, now_ms: int) -> str:
        """The reason to drop a datagram, one word: "" if it may be taken, which then is noted."""
        if abs(now_ms - time_ms) > MAX_SKEW_MS:
            return "stale"
        numbers = self._senders.get(sender)
        if numbers is None:
            self._forget_silent(now_ms)
            if len(self._senders) >= MAX_SENDERS:
                return "full"
            numbers = self._senders[sender] = _SenderNumbers(number - 1)
        behind = numbers.highest - number
        if behind >= WINDOW or (behind >= 0 and numbers.seen >> behind & 1):
            return "replayed"
        if behind < 0:
            # A number far ahead empties the window: shifting by all of it would make a huge integer.
            shift = min(-behind, WINDOW)
            numbers.seen = (numbers.seen << shift | 1) & ((1 << WINDOW) - 1)
            numbers.highest = number
        else:
            numbers.seen |= 1 << behind
        numbers.taken_ms = now_ms
        return ""

    def _forget_silent(self, now_ms: int) -> None:
        for sender, numbers in list(self._senders.items()):
            if now_ms - numbers.taken_ms > _KEEP_MS:
                del self._senders[sender]
