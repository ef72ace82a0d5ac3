# SPDX-License-Identifier: Apache-2.0
"""Choose an instance for one leg; legs.py asks, and gets the instance, its score and the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, Protocol
from urllib.parse import urlsplit

ENCODE: Final = "encode"
State = Literal["healthy", "failed", "draining"]
Breaker = Literal["closed", "open", "half-open"]


@dataclass(slots=True, eq=False)
class Instance:
    """One server of a leg and how it is; fleet.py alone writes what changes, policies may read it.

    `url` without a trailing slash, `host` and `port` for spans; `models` None: not learnt yet.
    """

    url: str
    leg: str
    host: str
    port: int
    state: State = "healthy"
    breaker: Breaker = "closed"
    trial: bool = False  # half-open, and its one request is under way
    in_flight: int = 0
    failures: int = 0  # in a row, of requests
    missed: int = 0  # in a row, of probes
    opened: int = 0  # how often in a row its breaker opened
    pause: int = 0  # number of the pause that its breaker is in: an older one's end is not its own
    probed: bool = False
    models: frozenset[str] | None = None
    cards: tuple[dict[str, Any], ...] = ()  # what its /v1/models says
    results: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a policy decided; `reason` is one word for spans and logs.

    `cached`: prompt tokens that the instance need not compute; `predicted`: seconds to the first token.
    `scores`, `caches`: of every candidate, in the order in which they were offered, if it had any.
    """

    instance: Instance
    score: float
    reason: str
    cached: int = 0
    predicted: float | None = None
    scores: Sequence[float] = ()
    caches: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """What a policy may know about a request: its leg, path, model, id, headers and body bytes.

    final: an answer counts as it is, since what the body names may be gone after it.
    tokens, blocks: the prompt's length, and a number for each full block of it; 0 and none: unknown.
    guessed: nobody has counted these tokens.
    found: tokens of it that instances have cached, by URL; None: nobody has looked yet.
    items: placeholders of each media part, in order; none: unknown.
    arrived: when the router got it; 0: what has passed since does not count.
    ahead: seconds until its leg can begin; queued: other requests' work among them.
    """

    leg: str
    path: str
    model: str
    request_id: str
    headers: dict[str, str]
    body: bytes
    final: bool = False
    tokens: int = 0
    guessed: bool = False
    blocks: tuple[int, ...] = ()
    found: Mapping[str, int] | None = None
    items: tuple[int, ...] = ()
    arrived: int = 0
    ahead: float = 0.0
    queued: bool = False


class Policy(Protocol):
    """Anything that chooses; called on the event loop, so it must not block."""

    books: ClassVar[bool] = False  # whether it has to know what is pending
    prompts: ClassVar[bool] = False  # and how long prompts are, and who has them cached

    @property
    def learns(self) -> bool:
        """Whether it predicts by what instances say of their prefills."""
        return False

    def choose(
        self, request: Asked, instances: Sequence[Instance], now: int, again: bool
    ) -> Choice:
        """Pick one of `instances` (never empty); `now` is CLOCK_MONOTONIC in microseconds.

        `again`: the request failed elsewhere and is tried once more.
        """
        ...


def instance(url: str, leg: str) -> Instance:
    """Read `http://host:port[/prefix]`. Raises ValueError, with the remedy, for anything else."""
    remedy = f"{url!r} is not a server's URL; write it like http://127.0.0.1:8001"
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise ValueError(remedy) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
        raise ValueError(remedy)
    return Instance(url.rstrip("/"), leg, parts.hostname, port)
