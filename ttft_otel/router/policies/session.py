# SPDX-License-Identifier: Apache-2.0
"""Every request of a session to one instance, by consistent hashing; without a session, by rate."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final

import msgspec

from ttft_otel.router.choose import Asked, Choice, Instance
from ttft_otel.router.policies.qps import Qps
from ttft_otel.router.policies.state import State

POINTS: Final = 128  # on the ring for each instance: its share is even within about 10 %
RINGS: Final = 16  # kept, for as many sets of instances


class Session:
    """The key is a header's value, or one of the body's own."""

    def __init__(self, state: State) -> None:
        self._name = state.options.session
        self._otherwise = Qps(state)

    def choose(
        self, request: Asked, instances: Sequence[Instance], now: int, again: bool
    ) -> Choice:
        """The next instance on the ring. When one goes, only its own sessions move."""
        key = self.key(request)
        if not key:
            return self._otherwise.choose(request, instances, now, again)
        points, owners = _ring(tuple(each.url for each in instances))
        return Choice(instances[owners[bisect(points, _hash(key)) % len(points)]], 0.0, "session")

    def key(self, request: Asked) -> str:
        """The session's name; empty without one."""
        if not self._name:
            return ""
        found = request.headers.get(self._name.lower())
        if found is None:
            try:
                top = msgspec.json.decode(request.body, type=dict[str, msgspec.Raw])
                found = msgspec.json.decode(top.get(self._name, b'""'))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                return ""
        return str(found) if isinstance(found, (str, int)) else ""


@lru_cache(maxsize=RINGS)
def _ring(urls: tuple[str, ...]) -> tuple[list[int], list[int]]:
    points = sorted((_hash(f"{url}#{n}"), at) for at, url in enumerate(urls) for n in range(POINTS))
    return [point for point, _ in points], [at for _, at in points]


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")
