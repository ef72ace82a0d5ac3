# SPDX-License-Identifier: Apache-2.0
"""The admin API, /instances on its own port: operators list and change instances; command.py starts it."""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime, timezone
from typing import Any, Final, Literal

import msgspec
from aiohttp import web

from ttft_otel.http.head_checks import CallerRules, is_loopback
from ttft_otel.model import stages
from ttft_otel.router import types
from ttft_otel.router.errors import RequestRejected
from ttft_otel.router.proxy.client_stream import render_error
from ttft_otel.router.routing.upstream_client import UpstreamClient
from ttft_otel.router.types import JSON_ERRORS, Instance
from ttft_otel.router.upstream.connection_pool import build_authorization
from ttft_otel.router.upstream.instance_pool import InstancePool

# Loopback: orders decide where clients' requests go, and need no token there by default.
DEFAULT_ADMIN_HOST: Final = "127.0.0.1"
MAX_ADMIN_BODY_BYTES: Final = 65_536  # bytes of a request body
OWN_NAMES: Final = CallerRules(DEFAULT_ADMIN_HOST)

REFUSAL_LOG_PAUSE_S: Final = 1.0

# A line of JSON for each order, which a handler of its own can keep apart.
audit_log: Final = logging.getLogger("ttft_otel.audit")
AdminHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]


# A field that is misspelt must not be left out in silence.
class InstanceOrder(msgspec.Struct, forbid_unknown_fields=True):
    action: Literal["add", "drain", "remove"]
    leg: str
    url: str


class AdminApi:
    """The request handlers.

    token: "" admits every process on this machine. is_loopback_only: whether it listens on loopback only;
    otherwise a token is required.
    """

    def __init__(
        self,
        upstream: UpstreamClient,
        token: str = "",
        is_loopback_only: bool = True,
    ) -> None:
        # Orders decide where requests go: no port that others reach may be without a token.
        if not (token or is_loopback_only):
            raise ValueError("an admin port that other machines reach needs a token")
        self.upstream = upstream
        self.token = token
        self.is_loopback_only = is_loopback_only
        self._refusal_logged_s, self._unlogged = float("-inf"), 0

    async def list_instances(self, _: web.Request) -> web.Response:
        """Answer GET: every instance with its state and what routing knows of it."""
        routing = self.upstream.routing
        described = {leg: routing.describe_instances(leg) for leg in routing.reported_legs}
        policies = {"leg": routing.prefilling_leg, "logic": routing.prefill_policy.name}
        if self.upstream.pool.get(stages.ENCODE):
            policies["encoders"] = routing.get_policy(stages.ENCODE).name
        instances = [
            _describe_instance(instance) | described.get(instance.leg, {}).get(instance.url, {})
            for instance in self.upstream.pool
        ]
        return web.json_response({"routing": policies, "instances": instances})

    async def change_instances(self, request: web.Request) -> web.Response:
        # Not for form's sake: a web page can send other types to this port without a preflight.
        if request.content_type != "application/json":
            raise RequestRejected(415, "Send application/json.")
        try:
            order = msgspec.json.decode(await request.read(), type=InstanceOrder)
        except JSON_ERRORS as error:
            raise RequestRejected(400, str(error)) from error
        try:
            instance = self._follow_order(order)
        except RequestRejected as error:
            self.audit(request, error.status, order)
            raise
        self.audit(request, 200, order)
        return web.json_response(_describe_instance(instance))

    def _follow_order(self, order: InstanceOrder) -> Instance:
        try:
            named_instance = types.parse_instance_url(order.url, order.leg)
        except ValueError as error:
            raise RequestRejected(400, str(error)) from error
        instance = apply_order(self.upstream.pool, order.action, named_instance)
        # After it was done: the other workers follow orders that were not refused here.
        self.upstream.pool.order_listeners.notify(order.action, order.leg, named_instance.url)
        return instance

    def audit(self, request: web.Request, status: int, order: InstanceOrder | None = None) -> None:
        """Log who gave which order, when, and what became of it.

        Without an order, who may give none: a line a second at most, and the others are counted in the next.
        """
        moment = time.monotonic()
        if order is None and moment - self._refusal_logged_s < REFUSAL_LOG_PAUSE_S:
            self._unlogged += 1
            return
        entry = {
            "event": "ttft-otel admin order",
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "client": request.remote,
            "user_agent": request.headers.get("User-Agent", "")[:128],
            "token": bool(self.token) and order is not None,
            "order": order and msgspec.to_builtins(order),
            "status": status,
        }
        if order is None:
            entry["not_logged"], self._unlogged = self._unlogged, 0
            self._refusal_logged_s = moment
        # Escaped, so that no line can be forged.
        audit_log.warning("%s", json.dumps(entry))

    def check_access(self, request: web.Request) -> None:
        """Raise RequestRejected for `request`s without a token, and for DNS rebinding by web pages."""
        if self.is_loopback_only and not OWN_NAMES.allows_host(
            request.headers.get("Host", "").encode("utf-8", "surrogateescape")
        ):  # a host name that was made to resolve to this machine
            raise RequestRejected(403, "Use the loopback address, like 127.0.0.1, for this port.")
        # The bytes that came: aiohttp decodes headers as UTF-8 with these escapes.
        authorization = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        expected = build_authorization(self.token).encode()
        if self.token and not hmac.compare_digest(authorization, expected):
            raise RequestRejected(401, "Send the admin token: Authorization: Bearer TOKEN.")


@contextlib.asynccontextmanager
async def serve_admin(
    upstream: UpstreamClient,
    port: int,
    token: str = "",
    host: str = DEFAULT_ADMIN_HOST,
    is_shared: bool = False,
) -> AsyncIterator[int]:
    """Serve the admin API on `host`; yields the port, which the system chooses if `port` is 0.

    is_shared: other workers of this router serve the port too.
    """
    admin = AdminApi(upstream, token, is_loopback(host))

    @web.middleware
    async def check_request(request: web.Request, handler: AdminHandler) -> web.StreamResponse:
        try:
            admin.check_access(request)
            return await handler(request)
        except RequestRejected as error:
            if error.status in (401, 403):
                admin.audit(request, error.status)
            # The form of the data path, so that clients read one kind of error.
            headers, data = render_error(error)
            text = {name.decode(): value.decode() for name, value in headers}
            return web.Response(body=data, status=error.status, headers=text)

    # A longer body is answered with 413 by aiohttp, whose own limit would be 1 MiB.
    app = web.Application(middlewares=[check_request], client_max_size=MAX_ADMIN_BODY_BYTES)
    app.router.add_get("/instances", admin.list_instances)
    app.router.add_post("/instances", admin.change_instances)
    # No access log: scripts may ask every second.
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        # reuse_port: the kernel spreads connections over all workers that listen.
        site = web.TCPSite(runner, host, port, reuse_port=is_shared or None)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def apply_order(pool: InstancePool, action: str, named_instance: Instance) -> Instance:
    """Add, drain or remove an instance; returns it as it is in the pool. Raises RequestRejected."""
    # An order opens no leg: which legs there are decides the way of every request.
    if named_instance.leg not in pool.list_legs():
        legs = ", ".join(pool.list_legs()) or "none that has an instance yet"
        raise RequestRejected(404, f"This router has no leg {named_instance.leg!r}, but: {legs}.")
    instance = pool.find_instance(named_instance.leg, named_instance.url)
    if instance is None and action != "add":
        raise RequestRejected(
            404, f"No {named_instance.leg} instance {named_instance.url}; see GET /instances."
        )
    if instance is None:
        pool.add_instance(named_instance)
    elif action != "remove":
        pool.set_draining(instance, action == "drain")
    # The last one stays for the same reason: without it requests would go another way.
    elif len(pool.get(named_instance.leg)) > 1:
        pool.remove_instance(instance)
    else:
        raise RequestRejected(
            409, f"It is the last {named_instance.leg} instance: drain it instead."
        )
    return instance or named_instance


def _describe_instance(instance: Instance) -> dict[str, Any]:
    # Each worker counts what it sent itself; `instance` has this one's results.
    elsewhere = map(Counter, instance.results_elsewhere.values())
    results = sum(elsewhere, instance.attempt_results)
    return {
        "leg": instance.leg,
        "url": instance.url,
        "state": instance.state,
        "breaker": instance.breaker.state,
        "in_flight": instance.all_in_flight,
        "models": sorted(instance.models or ()),
        "results": dict(results),
    }
