# SPDX-License-Identifier: Apache-2.0
"""Choose an instance for one leg; legs.py asks, and gets the instance, its score and the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Instance:
    """One server of a leg; `url` without a trailing slash, `host` and `port` for spans."""

    url: str
    leg: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Choice:
    """What a policy decided; `reason` is one word for spans and logs."""

    instance: Instance
    score: float
    reason: str


@dataclass(frozen=True, slots=True)
class Asked:
    """What a policy may know about a request: its leg, path, model, id, headers and body bytes."""

    leg: str
    path: str
    model: str
    request_id: str
    headers: dict[str, str]
    body: bytes


class Policy(Protocol):
    """Anything that chooses; called on the event loop, so it must not block."""

    def choose(self, request: Asked, instances: Sequence[Instance], now: int) -> Choice:
        """Pick one of `instances` (never empty); `now` is CLOCK_MONOTONIC in microseconds."""
        ...


class RoundRobin:
    """Each leg's instances in turn."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}
        self._most: dict[str, int] = {}

    def choose(self, request: Asked, instances: Sequence[Instance], now: int) -> Choice:
        """Pick the next one; a retry, offered fewer instances, takes no turn of its own."""
        turn, most = self._next.get(request.leg, 0), self._most.get(request.leg, 0)
        if len(instances) >= most:
            self._next[request.leg], self._most[request.leg] = turn + 1, len(instances)
        return Choice(instances[turn % len(instances)], 0.0, "round_robin")


def instance(url: str, leg: str) -> Instance:
    """Read `http://host:port[/prefix]`. Raises ValueError, with the remedy, for anything else."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ValueError(f"{url!r} is not a server's URL; write it like http://127.0.0.1:8001")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return Instance(url.rstrip("/"), leg, parts.hostname, port)
