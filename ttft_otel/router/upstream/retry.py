# SPDX-License-Identifier: Apache-2.0
"""Whether, when and how often a request is retried; upstream_client.py asks.

A request that crashes an engine must not be sent to the next one. It is retried only if nothing of it
was sent, if the server responded 502, 503 or 504, or if a kept-alive connection broke so soon that the
server must have closed it before. Calls to encoders only fill a cache: any failure is retried once.
"""

from __future__ import annotations

import random
from typing import Final

import aiohttp

from ttft_otel.model.stages import ENCODE
from ttft_otel.router.timeline import Attempt

MAX_RETRIES: Final = 2  # of one request, beyond the first attempt
MAX_ENCODER_RETRIES: Final = 1  # of an encoder's call
MAX_RACE_RETRIES: Final = 1  # of a request, after connections that broke
RETRY_BUDGET_RATIO: Final = 0.2  # retries per request that the budget allows in the long run
MAX_SAVED_RETRIES: Final = 20.0  # limit of saved retries, and the number at start
FIRST_BACKOFF_S: Final = 0.025  # seconds: the longest first wait, doubled each time
RACE_WINDOW_US: Final = 100_000  # microseconds
UNAVAILABLE_STATUSES: Final = frozenset({502, 503, 504})


class RetryBudget:
    """Limits retries to the share `ratio` of requests, so that failing instances are not overloaded."""

    def __init__(self, ratio: float = RETRY_BUDGET_RATIO) -> None:
        self.ratio = ratio
        self.available_retries = MAX_SAVED_RETRIES if ratio else 0.0

    def record_request(self) -> None:
        """Add the share of one request to the budget."""
        if self.available_retries < MAX_SAVED_RETRIES:
            self.available_retries += self.ratio

    def try_spend(self) -> bool:
        """Take one retry from the budget; False if there is none left."""
        if self.available_retries < 1:
            return False
        self.available_retries -= 1
        return True


def choose_backoff_s(number: int) -> float:
    """Seconds to wait before retry `number` (from 1): exponential back-off with full jitter."""
    return random.uniform(0, FIRST_BACKOFF_S * 2 ** (number - 1))


def is_retryable_status(leg: str, status: int) -> bool:
    """Whether a response with `status` should be retried on another instance of `leg`."""
    return status in UNAVAILABLE_STATUSES or (leg == ENCODE and status >= 500)


def is_unsent_error(error: BaseException) -> bool:
    """Whether `error` shows that no connection was made, so the instance read nothing."""
    return isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))


def is_idle_close_race(attempt: Attempt, error: BaseException) -> bool:
    """Whether the server closed an idle connection just as `attempt` was sent, judging by `error`."""
    is_disconnect = isinstance(error, (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError))
    return (
        is_disconnect
        and not attempt.is_new_connection
        and attempt.ended_us - attempt.sent_us < RACE_WINDOW_US
    )
