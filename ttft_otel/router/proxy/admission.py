# SPDX-License-Identifier: Apache-2.0
"""Who is admitted, with how much: API key, content type, model, and the bytes of bodies while they arrive.

endpoint.py asks before it reads a request's body, reads it here, and asks again for what it says.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import re
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final

from ttft_otel.http.byte_budget import ByteBudget
from ttft_otel.model.endpoints import KNOWN_ROUTES
from ttft_otel.model.names import header_names, keys
from ttft_otel.router.disagg.request_body import RequestBody
from ttft_otel.router.errors import RequestRejected
from ttft_otel.router.limits import RouterLimits
from ttft_otel.router.routing.upstream_client import UpstreamClient
from ttft_otel.router.time_limits import DeadlineQueue
from ttft_otel.router.timeline import Exchange
from ttft_otel.router.types import AsgiReceive, AsgiScope
from ttft_otel.router.upstream.connection_pool import build_authorization
from ttft_otel.router.upstream.http_headers import ClientHeaders
from ttft_otel.tracing import clock

JSON_TYPE: Final = "application/json"
# Servers differ in whether these separate segments: what is checked here may be another path there.
_ODD_SEPARATOR: Final = re.compile(rb"\\|%2f|%5c", re.IGNORECASE)
# Microseconds between two requests for a model that no instance has listed.
MODEL_REFRESH_INTERVAL_US: Final = 1_000_000
MAX_JOINED_BYTES: Final = 4 << 20  # of a body that is joined on the loop: about a millisecond


class AdmissionGate:
    """Admits or rejects requests; `is_shut` rejects all, while the router is being stopped.

    client_keys: keys of clients, not forwarded. upstream_authorization: sent to instances instead.
    requests_under_way: requests in flight. refusal_counts: every refusal of the router, by reason.
    """

    def __init__(
        self, upstream: UpstreamClient, client_keys: Sequence[str] = (), upstream_key: str = ""
    ) -> None:
        self.upstream = upstream
        self.is_shut = False
        self.requests_under_way = 0
        self.is_draining = False  # the router is to stop: /readyz responds 503
        self.is_memory_short = False  # its container's is used up nearly
        self.upstream_authorization = build_authorization(upstream_key)
        self.refusal_counts: Counter[str] = Counter()
        self._requests_by_owner: Counter[str] = Counter()
        self._due_by_owner: dict[str, float] = {}  # microseconds; what --max-key-rate has booked
        self._refreshed_us = 0
        self.client_keys: tuple[bytes, ...] = ()
        self.set_client_keys(client_keys)

    def set_client_keys(self, client_keys: Sequence[str]) -> None:
        """Accept these `client_keys` from now on; without any, keys are not checked."""
        self.client_keys = tuple(key.encode() for key in client_keys)
        self._owners = {key: sha256(key).hexdigest()[:16] for key in self.client_keys}

    def admit_request(
        self, scope: AsgiScope, client_headers: ClientHeaders, requires_json: bool
    ) -> str:
        """Check a request before its body is read; returns its owner. Raises RequestRejected.

        scope: for the path. client_headers: changed to what instances get.
        requires_json: whether the body must be JSON.
        """
        if self.is_shut:
            raise RequestRejected(503, "The router is shutting down.", reason="draining")
        # Not the only one: whatever holds the memory then does not wait for a request's end.
        if self.is_memory_short and self.requests_under_way > 1:
            raise RequestRejected(503, "The router's memory is nearly used up.", reason="memory")
        path = scope["path"]
        # A known route of which nothing was encoded, as equal lengths show, needs no check.
        if path not in KNOWN_ROUTES or len(scope.get("raw_path", path)) != len(path):
            _check_path(path, scope.get("raw_path", b""))
        forwarded = client_headers.forwarded
        owner = ""
        # A client's key ends here: instances get the router's own, or none.
        if self.client_keys:
            owner = self.check_api_key(forwarded.pop("authorization", ""))
            forwarded.pop("x-api-key", None)  # where clients of /v1/messages put the same key
        if self.upstream_authorization:
            forwarded["authorization"] = self.upstream_authorization
        # Nearly all clients send exactly this, and only the others have to be parsed.
        if requires_json and forwarded.get("content-type") != JSON_TYPE:
            media_type = forwarded.get("content-type", "").partition(";")[0].strip().lower()
            if media_type != JSON_TYPE:
                raise RequestRejected(415, f"Unsupported media type: send {JSON_TYPE}.")
        if owner:
            # Last: what is refused before has no share to give back.
            self._take_share(owner)
        return owner

    def _take_share(self, owner: str) -> None:
        limits = self.upstream.limits
        if limits.max_key_requests and self._requests_by_owner[owner] >= limits.max_key_requests:
            raise RequestRejected(
                429, "Too many requests of this API key are under way.", reason="share"
            )
        if limits.max_key_rate:
            now_us, pause_us = clock.now_us(), 1e6 / limits.max_key_rate
            due_us = max(self._due_by_owner.get(owner, 0.0), now_us)
            # A second's requests may come at once.
            if due_us - now_us > 1e6 - pause_us:
                raise RequestRejected(
                    429, "Too many requests a second of this API key.", reason="share"
                )
            self._due_by_owner[owner] = due_us + pause_us
        self._requests_by_owner[owner] += 1

    def end_request(self, owner: str) -> None:
        """A request that was admitted is over."""
        if owner:
            self._requests_by_owner[owner] -= 1

    def check_api_key(self, authorization: str) -> str:
        """The owner of what has the key in `authorization`: the same for one key, whichever worker asks.

        Raises RequestRejected unless the key is valid; compares in constant time.
        """
        scheme, _, given_key = authorization.partition(" ")
        # As bytes: compare_digest takes text only if it is ASCII.
        data = given_key.strip().encode("utf-8", "surrogateescape")
        # A list: every key is compared, so that it takes as long whichever it is not.
        is_known = any([hmac.compare_digest(data, key) for key in self.client_keys])
        # Schemes are case-insensitive (RFC 9110 section 11.1), keys are not.
        if scheme.lower() != "bearer" or not is_known:
            raise RequestRejected(401, "Send an API key: Authorization: Bearer KEY.")
        return self._owners[data]

    def check_body(
        self, parsed_body: RequestBody, client_headers: ClientHeaders, requires_json: bool
    ) -> None:
        """Raise RequestRejected for JSON that cannot be read, or with more media items than --max-items.

        requires_json: whether the body must be JSON. On every other path what servers would take for
        JSON is refused too: what the router cannot read may hold transfer parameters.
        """
        if parsed_body.problem and (
            requires_json
            or (parsed_body.data and is_json_type(client_headers.forwarded.get("content-type", "")))
        ):
            raise RequestRejected(400, parsed_body.problem, reason="json")
        max_items = self.upstream.limits.max_items
        if len(parsed_body.media_items) > max_items:
            message = f"The request has more than {max_items} different media items."
            raise RequestRejected(400, message, reason="items")

    async def check_model(self, parsed_body: RequestBody, leg: str, authorization: str) -> None:
        """Raise RequestRejected if `leg` does not have the model of the body.

        authorization: the client's header, for instances that require a key to list their models.
        """
        model = parsed_body.model
        pool = self.upstream.pool
        # An instance that has not listed its models yet may have it, and can refuse it itself.
        if not model or pool.knows_model(leg, model):
            return
        now_us = clock.now_us()
        if (
            now_us - self._refreshed_us > MODEL_REFRESH_INTERVAL_US
        ):  # the model may have been loaded a moment ago
            # Before the wait, so that requests that come meanwhile do not ask, too.
            self._refreshed_us = now_us
            await self.upstream.health_monitor.refresh_leg_models(leg, authorization, kept_s=0)
        if not pool.knows_model(leg, model):
            # Cut: a client chooses its length.
            message = f"The model `{model[:256]}` does not exist."
            raise RequestRejected(404, message, reason="model", parameter="model")


def read_ttft_limit(text: str) -> float:
    """The seconds that a client allows in x-ttft-limit-ms, 0 for "". Raises RequestRejected."""
    try:
        limit_ms = float(text or 0)
    except ValueError:
        limit_ms = -1.0
    if not 0 <= limit_ms < math.inf or (text and not limit_ms):
        message = f"{header_names.TTFT_LIMIT} is a number of milliseconds above 0."
        raise RequestRejected(400, message)
    return limit_ms / 1000


def _check_path(path: str, raw_path: bytes) -> None:
    """Raise RequestRejected for a path that an instance may take for another one, even outside /v1.

    path: decoded. raw_path: as it is forwarded.
    """
    # Some servers read a backslash as a slash.
    segments = path.replace("\\", "/").split("/")
    is_plain = "." not in segments and ".." not in segments and path.isprintable()
    if not is_plain or _ODD_SEPARATOR.search(raw_path):
        message = "The path has `.` or `..` segments, an encoded separator or a control character."
        raise RequestRejected(400, message, reason="path")


def is_json_type(content_type: str) -> bool:
    """Whether a server reads a body of this `content_type` as JSON; FastAPI does so without any, too."""
    media_type = content_type.partition(";")[0].strip().lower()
    main_type, _, subtype = media_type.partition("/")
    return not media_type or (
        main_type == "application" and (subtype == "json" or subtype.endswith("+json"))
    )


class ClientBody:
    """The body of one request, which the task `reader` reads.

    owner: whose key it came with, "" without keys. owner_bytes: of the owner's share.
    data: all of it, once it is here; b"" again when it was taken. error: why the reader was cancelled, None
    unless that was done here.
    """

    __slots__ = ("data", "error", "counted_bytes", "owner", "owner_bytes", "_reader")

    def __init__(self, reader: asyncio.Task[Any] | None, owner: str) -> None:
        self.data = b""
        self.owner = owner
        self.owner_bytes = 0
        self.counted_bytes = 0
        self.error: RequestRejected | None = None
        self._reader = reader

    def take_data(self) -> bytes:
        """All of it, for the only one who holds it from here on: it may be large, and the answer long."""
        data, self.data = self.data, b""
        return data

    def time_out(self) -> None:
        """End the reading: the body did not arrive in time."""
        message = "The body of the request did not arrive in time."
        self.refuse(RequestRejected(408, message, reason="body_timeout"))

    def refuse(self, error: RequestRejected) -> None:
        """End the reading with `error`."""
        # First, so that the reader finds it when the cancellation arrives.
        self.error = error
        if self._reader is not None:
            self._reader.cancel()


class BodyBudget:
    """All bodies that the router holds; all of it runs on the event loop."""

    def __init__(self, limits: RouterLimits) -> None:
        self.limits = limits
        self._arriving: DeadlineQueue[ClientBody] = DeadlineQueue(limits.body_timeout)
        self._bytes: ByteBudget[ClientBody] = ByteBudget(limits.max_bodies, self._arriving)
        self._bytes_by_owner: Counter[str] = Counter()  # with --max-key-bytes

    @property
    def counted_bytes(self) -> int:
        """Bytes of all bodies together."""
        return self._bytes.counted_bytes

    def begin_body(self, reader: asyncio.Task[Any] | None, owner: str) -> ClientBody:
        """A body of `owner` is expected, by the task `reader`."""
        body = ClientBody(reader, owner)
        self._arriving.watch(body)
        return body

    def add_bytes(self, body: ClientBody, number: int) -> None:
        """Count bytes that arrived. Raises RequestRejected if `body` is refused for them."""
        # The limit of one body first: a body that is too large must not push out others.
        if body.counted_bytes + number > self.limits.max_body:
            raise build_too_large_error()
        if body.owner and (most := self.limits.max_key_bytes):
            if self._bytes_by_owner[body.owner] + number > most:
                message = "Too many bytes of this API key's bodies are under way."
                raise RequestRejected(429, message, reason="share")
            self._bytes_by_owner[body.owner] += number
            body.owner_bytes += number
        for each in self._bytes.add_bytes(body, number):
            error = RequestRejected(
                503, "The router holds too many request bodies.", reason="bodies"
            )
            # The caller gets an exception; readers of others wait, and are cancelled.
            if each is body:
                raise error
            self.end_reading(each)
            each.refuse(error)

    def end_reading(self, body: ClientBody) -> None:
        """Nothing more of `body` will arrive; its bytes count until it is released. Idempotent."""
        self._arriving.forget(body)

    def release_body(self, body: ClientBody) -> None:
        """No instance gets it any more, or its request is over. Idempotent."""
        self._bytes.release(body)
        if body.owner_bytes:
            self._bytes_by_owner[body.owner] -= body.owner_bytes
            body.owner_bytes = 0
        body.error = None  # its frames hold the body


def build_too_large_error() -> RequestRejected:
    """A body that exceeds --max-body."""
    return RequestRejected(413, "The request body is too large.", reason="body")


async def read_body(
    receive: AsgiReceive,
    client_headers: ClientHeaders,
    budget: BodyBudget,
    client_body: ClientBody,
    exchange: Exchange,
) -> bool:
    """Read the request body into `client_body`; False if the client disconnected first.

    budget: counts its bytes. Raises RequestRejected.
    """
    content_length = client_headers.get("content-length")
    chunks: list[bytes] = []
    try:
        # What is announced is refused before it is read; a chunked body announces nothing.
        if content_length.isdigit() and int(content_length) > budget.limits.max_body:
            raise build_too_large_error()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                exchange.record_failure(keys.ERROR_DISCONNECTED)
                return False
            chunk = message.get("body", b"")
            budget.add_bytes(client_body, len(chunk))
            chunks.append(chunk)
            if not message.get("more_body", False):
                if len(chunks) == 1:
                    client_body.data = chunks[0]
                elif client_body.counted_bytes > MAX_JOINED_BYTES:
                    # in a thread, which lets go of the interpreter while it copies
                    client_body.data = await asyncio.to_thread(b"".join, chunks)
                else:
                    client_body.data = b"".join(chunks)
                return True
    except asyncio.CancelledError:
        # By the budget or its timer, which leave an error; otherwise the server is being stopped.
        if client_body.error is None:
            raise
        raise client_body.error from None
    finally:
        budget.end_reading(client_body)
