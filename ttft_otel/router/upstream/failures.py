# SPDX-License-Identifier: Apache-2.0
"""Whose fault a failed attempt is, and what the client gets for it; docs/reference/router-failures.md.

upstream_client.py, response_relay.py and health_monitor.py ask about exceptions of aiohttp, and
instance_pool.py logs how they are described.
"""

from __future__ import annotations

import asyncio
import errno
from typing import Final

import aiohttp

from ttft_otel.router.errors import FirstByteTimeout, InvalidAnswer, UpstreamUnavailable

# What an instance's answer can end in. asyncio.TimeoutError is no OSError before Python 3.11.
UPSTREAM_ERRORS: Final = (aiohttp.ClientError, OSError, asyncio.TimeoutError)
MAX_DESCRIPTION_CHARS: Final = 256
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
    text = " ".join(f"{type(error).__name__}: {error}".split())
    printable = "".join(
        each if each.isprintable() else "?" for each in text[:MAX_DESCRIPTION_CHARS]
    )
    return printable + ("…" if len(text) > MAX_DESCRIPTION_CHARS else "")


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
