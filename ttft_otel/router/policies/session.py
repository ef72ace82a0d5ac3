# SPDX-License-Identifier: Apache-2.0
"""Every request of a session to one instance, by consistent hashing; without a session, by rate."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Container, Sequence, Set
from hashlib import blake2b
from typing import Final

import msgspec

from ttft_otel.router.choose import Asked, Choice, Instance, Policy
from ttft_otel.router.policies.qps import Qps
from ttft_otel.router.policies.state import State

POINTS: Final = 128  # on the ring for each instance: its share is even within about 10 %
MOST: Final = 1024  # instances on the ring, gone ones among them


class Ring:
    """The points of whoever was offered once; those who are not offered now are passed over.

    So a set of instances that is offered for the first time costs nothing, unless one is new.
    """

    def __init__(self) -> None:
        self._urls: set[str] = set()
        self._points: list[int] = []
        self._owners: list[str] = []

    def find(self, key: str, among: Container[str]) -> str:
        """The first of these from the key's place on; one of them has to be known."""
        at = bisect(self._points, _hash(key))
        while True:
            owner = self._owners[at % len(self._owners)]
            if owner in among:
                return owner
            at += 1

    def know(self, urls: Set[str]) -> None:
        """Put those on it that are new."""
        new = urls - self._urls
        if not new:
            return
        if len(self._urls) + len(new) > MOST:
            new, self._urls, self._points, self._owners = urls, set(), [], []
        points = list(zip(self._points, self._owners, strict=True))
        points += sorted((_hash(f"{url}#{n}"), url) for url in new for n in range(POINTS))
        points.sort()
        self._urls |= new
        self._points = [point for point, _ in points]
        self._owners = [url for _, url in points]


class Session(Policy):
    """The key is a header's value, or one of the body's own."""

    books = True

    def __init__(self, state: State) -> None:
        self._name = state.options.session
        self._otherwise = Qps(state)
        self._ring = Ring()

    def choose(
        self, request: Asked, instances: Sequence[Instance], now: int, again: bool
    ) -> Choice:
        """The next instance on the ring. When one goes, only its own sessions move."""
        key = self.key(request)
        if not key:
            return self._otherwise.choose(request, instances, now, again)
        offered = {each.url: each for each in instances}
        self._ring.know(offered.keys())
        return Choice(offered[self._ring.find(key, offered)], 0.0, "session")

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


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")
