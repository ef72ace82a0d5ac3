# SPDX-License-Identifier: Apache-2.0
"""Start responses, and render errors in OpenAI's form; endpoint.py and the admin API use it."""

from __future__ import annotations

import msgspec

from ttft_otel.model.names import header_names
from ttft_otel.router.errors import (
    RETRYABLE_STATUSES,
    RequestRejected,
    RouterError,
    UpstreamRefused,
)
from ttft_otel.router.exchange import Exchange
from ttft_otel.router.types import AsgiSend, HeaderList


async def send_response_start(
    status: int, response_headers: HeaderList, exchange: Exchange, send: AsgiSend
) -> None:
    """Send `status` and headers, adding the request ID, by which a client can find its report."""
    # First, since it raises if a head is out: a second one would corrupt the stream.
    exchange.record_head(status)
    response_headers.append((header_names.REQUEST_ID.encode(), exchange.request_id.encode()))
    await send({"type": "http.response.start", "status": status, "headers": response_headers})


async def send_error(error: RouterError, exchange: Exchange, send: AsgiSend) -> None:
    """Answer with an error: the instance's own, or ours in OpenAI's form."""
    response_headers, data = render_error(error)
    # Before the send, in which a client that has its answer may leave.
    exchange.record_error_answer(error.status)
    await send_response_start(error.status, response_headers, exchange, send)
    await send({"type": "http.response.body", "body": data, "more_body": False})


def render_error(error: RouterError) -> tuple[HeaderList, bytes]:
    """The instance's own headers and body, or ours: OpenAI's JSON."""
    if isinstance(error, UpstreamRefused):
        return error.headers, error.body
    # Not after 502 and 504: the request may have been run.
    error_type = "UpstreamError"
    param = None
    retry_after_s = int(error.status in RETRYABLE_STATUSES)
    if isinstance(error, RequestRejected):
        error_type = error.error_type
        param = error.parameter
        retry_after_s = error.retry_after_s
    content = {"message": str(error), "type": error_type, "param": param, "code": error.status}
    data = msgspec.json.encode({"error": content})
    response_headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(data)),
    ]
    if retry_after_s:
        response_headers.append((b"retry-after", b"%d" % retry_after_s))
    # RFC 9110 section 15.5.2: a 401 has to name the scheme.
    if error.status == 401:
        response_headers.append((b"www-authenticate", b"Bearer"))
    return response_headers, data
