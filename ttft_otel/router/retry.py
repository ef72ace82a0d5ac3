# SPDX-License-Identifier: Apache-2.0
"""When a request may be tried again, how soon and how often in all; legs.py asks.

A request that kills an engine must not go on to kill the next one. So it is tried again only when
nothing of it was sent, when a server answered that it cannot (502, 503, 504), or when a kept-alive
connection broke so soon that the server had closed it before. Encoders' answers are only kept in a
cache: any failure of theirs is tried once more.
"""

from __future__ import annotations

import random
from typing import Final

import aiohttp

from ttft_otel.router.path import Attempt

RETRIES: Final = 2  # of one request, beyond the first attempt
ENCODES: Final = 1  # of an encoder's call
RACES: Final = 1  # of a request, after connections that broke
RATIO: Final = 0.2  # retries per request that the budget allows in the long run
SAVED: Final = 20.0  # retries that a quiet time saves up; also what a router starts with
FIRST: Final = 0.025  # seconds: the longest first wait, doubled each time
RACE: Final = 100_000  # microseconds
CANNOT: Final = frozenset({502, 503, 504})


class Budget:
    """Retries for a share of all requests, so that a broken fleet is not asked three times as much."""

    def __init__(self, ratio: float = RATIO) -> None:
        self.ratio, self.left = ratio, SAVED if ratio else 0.0

    def earn(self) -> None:
        """One request came."""
        if self.left < SAVED:
            self.left += self.ratio

    def spend(self) -> bool:
        """Whether one retry is allowed; it is taken."""
        if self.left < 1:
            return False
        self.left -= 1
        return True


def wait(number: int) -> float:
    """Seconds before retry `number`, from 1: full jitter, so that clients do not come back as one."""
    return random.uniform(0, FIRST * 2 ** (number - 1))


def unable(leg: str, status: int) -> bool:
    """Whether this answer says that another instance may do better."""
    return status in CANNOT or (leg == "encode" and status >= 500)


def unsent(error: BaseException) -> bool:
    """Whether nothing of the request can have been read: there was no connection."""
    return isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))


def raced(attempt: Attempt, error: BaseException) -> bool:
    """Whether a server closed an idle connection while the request was on its way to it."""
    broke = isinstance(error, (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError))
    return broke and not attempt.fresh and attempt.ended - attempt.sent < RACE
