# SPDX-License-Identifier: Apache-2.0
"""POST and DELETE /instances as instances and launchers send them to vLLM's EPD proxy, with a token.

admin.py hands requests over; registrations.py does what they ask. Two clients were written for this
protocol: a launcher that sends `X-API-Key` (vLLM's example proxy, `--dynamic-registration`), and
instances that announce themselves every 30 s without any header (`proxy_url`): these can have the
token in the URL's user information, which their HTTP client sends as basic authentication.
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from aiohttp import web

from ttft_otel.router.control.registrations import Registrations
from ttft_otel.router.errors import RequestRejected
from ttft_otel.router.proxy.admission import matches_any_key
from ttft_otel.router.types import JSON_ERRORS

log: Final = logging.getLogger("ttft_otel")


class Announcement(msgspec.Struct):
    """The body of a registration; other fields, `dp_size` among them, are ignored.

    ec_zmq_addrs: where a consumer with ECMooncakeConnector receives pushed encodings.
    """

    role: str
    url: str
    ec_zmq_addrs: list[str] = []


class Departure(msgspec.Struct):
    """The body of a deregistration whose URL is not in the query."""

    url: str


class Announcements:
    """The request handlers; `token` is required in every request and must not be empty."""

    def __init__(self, registrations: Registrations, token: str) -> None:
        if not token:
            raise ValueError(
                "registration needs a token: registered instances receive clients' requests"
            )
        self.registrations = registrations
        self.token = token.encode()

    def is_authorized(self, request: web.Request) -> bool:
        """Whether `request` has the token: X-API-Key, bearer, or password of basic authentication."""
        return matches_any_key(self.token, read_tokens(request))

    async def register_instance(self, fields: dict[str, Any]) -> web.Response:
        """Answer POST with `fields` of the body: 200 for new and known instances. Raises RequestRejected."""
        try:
            announcement = msgspec.convert(fields, Announcement)
        except JSON_ERRORS as error:
            # Counted, so that a fleet that cannot register shows in metrics too.
            self.registrations.result_counts["refused"] += 1
            raise RequestRejected(400, str(error)) from error
        try:
            is_new = self.registrations.register_instance(announcement.role, announcement.url)
        except RequestRejected as error:
            self.registrations.result_counts["refused"] += 1
            # Quoted and cut: this URL was refused, and may be any text.
            log.warning("ttft-otel: registration of %.200r refused: %s", announcement.url, error)
            raise
        # Renewals as well: another worker may have missed or forgotten the registration.
        self.registrations.pool.order_listeners.notify(
            "register", announcement.role, announcement.url
        )
        # Said once, since instances repeat their announcement every 30 s.
        if is_new and announcement.ec_zmq_addrs:
            log.warning(
                "ttft-otel: %s registered with ec_zmq_addrs, which this router does not pass on: "
                "encoders with ECMooncakeConnector push nothing to it, use another EC connector",
                announcement.url,
            )
        return web.json_response(
            {"registered": is_new, "role": announcement.role, "url": announcement.url}
        )

    async def deregister_instance(self, request: web.Request) -> web.Response:
        """Answer DELETE, whether the URL is in the query or in a JSON body. Raises RequestRejected."""
        url = request.query.get("url", "")
        if not url:
            try:
                url = msgspec.json.decode(await request.read(), type=Departure).url
            except JSON_ERRORS as error:
                message = (
                    f"Name the instance, as DELETE /instances?url=URL or in a JSON body: {error}"
                )
                raise RequestRejected(400, message) from error
        was_registered = self.registrations.deregister_instance(url)
        if was_registered:
            self.registrations.pool.order_listeners.notify("deregister", "", url)
        return web.json_response(
            {"removed": was_registered, "found": was_registered, "unregistered": url}
        )


def read_tokens(request: web.Request) -> Iterator[bytes]:
    """Everything in the headers of `request` that may be a token."""
    # All of them, not the first: the caller compares each in constant time.
    yield _to_bytes(request.headers.get("X-API-Key", ""))
    scheme, _, value = request.headers.get("Authorization", "").partition(" ")
    # Schemes are case-insensitive (RFC 9110 section 11.1).
    if scheme.lower() == "bearer":
        yield _to_bytes(value.strip())
    elif scheme.lower() == "basic":
        try:
            # USER:PASSWORD, as HTTP clients make it of http://instance:TOKEN@HOST.
            yield base64.b64decode(_to_bytes(value.strip()), validate=True).partition(b":")[2]
        # No token at all, which is answered like a wrong one.
        except binascii.Error:
            return


def _to_bytes(text: str) -> bytes:
    # The bytes that came: aiohttp decodes headers as UTF-8 with these escapes.
    return text.encode("utf-8", "surrogateescape")
