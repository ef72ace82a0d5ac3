# SPDX-License-Identifier: Apache-2.0
"""Every error class of the router.

A RouterError becomes the response to the client (proxy/client_stream.py); the others are handled inside the
router. Only the standard library is imported, because the tokenizer child imports this file.
"""

from __future__ import annotations

import math
from typing import Final

# Reasons of refusals that name none, by status; the values of ttft_otel_router_refusals_total{reason}.
REASONS: Final = {401: "key", 404: "not_found", 405: "method", 415: "media_type"}
OTHER_REASON: Final = "request"
# The `type` of OpenAI's errors by status, and the statuses after which a client is to come back in a second.
ERROR_TYPES: Final = {
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    429: "RateLimitError",
    502: "UpstreamError",
    503: "UnavailableError",
}
OTHER_ERROR_TYPE: Final = "BadRequestError"
RETRYABLE_STATUSES: Final = (429, 503)


class RouterError(Exception):
    """An error response for the client; `status` is the HTTP status.

    retry_after_s: sent as Retry-After, in seconds; by default as the status says, 0 for none.
    """

    error_type = "UpstreamError"
    parameter: str | None = None

    def __init__(self, status: int, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        # Not after 502 and 504: the request may have been run.
        self.retry_after_s = (
            int(status in RETRYABLE_STATUSES) if retry_after_s is None else retry_after_s
        )


class RequestRejected(RouterError):
    """The router rejects the request.

    reason: one word for metrics.
    """

    def __init__(
        self,
        status: int,
        message: str,
        reason: str = "",
        parameter: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(status, message, retry_after_s)
        # A label of a counter: one of a few words, never empty and never the message.
        self.reason = reason or REASONS.get(status, OTHER_REASON)
        self.error_type = ERROR_TYPES.get(status, OTHER_ERROR_TYPE)
        self.parameter = parameter


class SloUnreachable(RequestRejected):
    """No instance can meet the TTFT objective: 429; in `wait_s` seconds one might."""

    def __init__(self, wait_s: float) -> None:
        # Retry-After has whole seconds (RFC 9110); 0 would mean at once.
        self.wait_s = wait_s
        rounded_s = max(1, math.ceil(wait_s))
        message = f"No instance can answer in time; try again in {rounded_s} s."
        super().__init__(429, message, "slo", retry_after_s=rounded_s)


class UpstreamUnavailable(RouterError):
    """No instance responded: 502, 503 or, too late, 504."""


# The built-in TimeoutError is an OSError, and thereby one of UPSTREAM_ERRORS.
class FirstByteTimeout(TimeoutError):
    """An instance did not begin its answer within --first-byte-timeout; the text is for the client."""


class UpstreamRefused(RouterError):
    """An encoder or prefill instance responded with an error, which the client gets unmodified."""

    def __init__(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        # Not for the client, which gets the instance's own body, as it would without a router.
        super().__init__(status, f"an instance answered {status}")
        self.headers = headers
        self.body = body


class InvalidAnswer(ValueError):
    """An answer is unusable, or has more bytes than it may have; an encoder's text is for the client."""


class UnreadablePrompt(Exception):
    """A prompt cannot be read; `reason` is one word, for metrics.

    refused: the engine will reject the request too. unsupported: only the engine can read it (--tokenize
    engine). Others: path, model, malformed, load, loading, busy, stuck, died, closed.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class MalformedEvents(ValueError):
    """A message that is not a valid batch of KV events."""


class ReplayFailed(Exception):
    """A replay of KV events was requested but did not arrive completely."""


class SourceUnreachable(Exception):
    """A source of instances cannot be asked now; the text says why, for the log and /readyz."""


class WatchExpired(Exception):
    """The API server has forgotten the version from which a watch should go on: list again."""
