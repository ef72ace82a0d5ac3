# SPDX-License-Identifier: Apache-2.0
"""Whose fault a failed attempt is, what the client gets for it, and whether it is retried.

A request that crashes an engine must not be sent to the next one. It is retried only if nothing of it was
sent, if the server responded 502, 503 or 504, or if a kept-alive connection broke so soon that the server
must have closed it before. Calls to encoders only fill a cache: any failure is retried once.
upstream_client.py, client_stream.py and instance_pool.py ask about exceptions of aiohttp.
"""

from __future__ import annotations

import asyncio
import errno
from typing import Final

import aiohttp

from ttft_otel.router.errors import FirstByteTimeout, InvalidAnswer, UpstreamUnavailable
from ttft_otel.router.timeline import Attempt

# What an instance's answer can end in. asyncio.TimeoutError is no OSError before Python 3.11.
UPSTREAM_ERRORS: Final = (aiohttp.ClientError, OSError, asyncio.TimeoutError)
MAX_DESCRIPTION_CHARS: Final = 256
TLS_REMEDY: Final = "; see --upstream-ca, --upstream-name and --upstream-cert"
MAX_RETRIES: Final = 2  # of one request, beyond the first attempt
MAX_ENCODER_RETRIES: Final = 1  # of an encoder's call
MAX_RACE_RETRIES: Final = 1  # of a request, after connections that broke
RETRY_BUDGET_RATIO: Final = 0.2  # retries per request that the budget allows in the long run
MAX_SAVED_RETRIES: Final = 20.0  # limit of saved retries, and the number at start
FIRST_BACKOFF_S: Final = 0.025  # seconds: the longest first wait, doubled each time
RACE_WINDOW_US: Final = 100_000  # microseconds
UNAVAILABLE_STATUSES: Final = frozenset({502, 503, 504})
# The router itself has no file descriptor, port or memory left for one more connection.
_SHORTAGE_CODES: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
)


def is_resource_shortage(error: BaseException) -> bool:
    """Whether `error` comes of the router's own limits, so that it says nothing about an instance."""
    return isinstance(error, OSError) and error.errno in _SHORTAGE_CODES


def is_instance_failure(error: BaseException) -> bool:
    """Whether `error` counts against the instance.

    An answer that the router cannot read does not: a client can provoke one, with a long target that a
    redirect repeats in its Location for example. ClientResponseError is such a head, InvalidAnswer an
    encoder's body.
    """
    return not (
        isinstance(error, aiohttp.ClientResponseError | aiohttp.InvalidURL | InvalidAnswer)
        or is_resource_shortage(error)
    )


def describe_error(error: BaseException) -> str:
    """Class and message of `error` for a log line: printable, and cut, since answers are quoted in it."""
    # In one line, since line breaks in an answer could forge entries of the log.
    cause: object = error
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause = error.certificate_error
    text = " ".join(f"{type(error).__name__}: {cause}".split())
    printable = "".join(
        each if each.isprintable() else "?" for each in text[:MAX_DESCRIPTION_CHARS]
    )
    remedy = TLS_REMEDY if "[SSL" in printable else ""
    return printable + ("…" if len(text) > MAX_DESCRIPTION_CHARS else "") + remedy


def build_unavailable_error(leg: str, error: BaseException) -> UpstreamUnavailable:
    """Turn `error` into one for the client, which names the leg ("" for none) but no address."""
    if is_resource_shortage(error):
        return UpstreamUnavailable(503, "The router has no free connection to an instance.")
    # Nothing was sent, so it is not 504, after which the request may have been run.
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        status = 503
    else:
        status = 504 if isinstance(error, asyncio.TimeoutError | TimeoutError) else 502
    # The texts of aiohttp's errors name addresses; those of ours do not.
    reason = error if isinstance(error, InvalidAnswer | FirstByteTimeout) else type(error).__name__
    return UpstreamUnavailable(status, f"The {f'{leg} ' if leg else ''}instance failed: {reason}.")


class RetryBudget:
    """Limits retries to the share `ratio` of requests, so that failing instances are not overloaded."""

    def __init__(self, ratio: float = RETRY_BUDGET_RATIO) -> None:
        self.ratio = ratio
        self.available_retries = MAX_SAVED_RETRIES if ratio else 0.0

    def record_request(self) -> None:
        if self.available_retries < MAX_SAVED_RETRIES:
            self.available_retries += self.ratio

    def try_spend(self) -> bool:
        """Take one retry from the budget; False if there is none left."""
        if self.available_retries < 1:
            return False
        self.available_retries -= 1
        return True


def is_idle_close_race(attempt: Attempt, error: BaseException) -> bool:
    """Whether the server closed an idle connection just as `attempt` was sent, judging by `error`."""
    is_disconnect = isinstance(error, (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError))
    return (
        is_disconnect
        and not attempt.is_new_connection
        and attempt.ended_us - attempt.sent_us < RACE_WINDOW_US
    )
