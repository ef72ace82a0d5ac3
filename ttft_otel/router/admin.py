# SPDX-License-Identifier: Apache-2.0
"""GET and POST /instances on a loopback port of its own: operators see and change the fleet."""

from __future__ import annotations

import contextlib
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Literal

import msgspec
from aiohttp import web
from yarl import URL

from ttft_otel.router import answer, choose
from ttft_otel.router.answer import Rejected
from ttft_otel.router.choose import Instance
from ttft_otel.router.legs import Legs

HOST: Final = "127.0.0.1"
OWN: Final = ("localhost", "127.0.0.1", "::1")

log: Final = logging.getLogger("ttft_otel")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Order(msgspec.Struct, forbid_unknown_fields=True):
    """What POST /instances takes."""

    action: Literal["add", "drain", "remove"]
    leg: str
    url: str


class Admin:
    """The two handlers; `token` "" lets everybody on this machine in."""

    def __init__(self, legs: Legs, token: str = "") -> None:
        self.legs, self.token = legs, token

    async def get(self, _: web.Request) -> web.Response:
        """Every instance and how it is."""
        routing = self.legs.routing
        told = {leg: routing.tell(leg) for leg in routing.told}
        how = {"leg": routing.leg, "logic": routing.desk.logic}
        if self.legs.fleet.get(choose.ENCODE):
            how["encoders"] = routing.at(choose.ENCODE).logic
        return web.json_response(
            {
                "routing": how,
                "instances": [
                    _tell(each) | told.get(each.leg, {}).get(each.url, {})
                    for each in self.legs.fleet
                ],
            }
        )

    async def post(self, request: web.Request) -> web.Response:
        """Add, drain or remove one; the instance as it is then."""
        if request.content_type != "application/json":
            raise Rejected(415, "Send application/json.")
        try:
            order = msgspec.json.decode(await request.read(), type=Order)
            wanted = choose.instance(order.url, order.leg)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
            raise Rejected(400, str(error)) from error
        found = await self._do(order.action, wanted)
        log.warning("ttft-otel: %s of %s instance %s", order.action, wanted.leg, wanted.url)
        return web.json_response(_tell(found))

    async def _do(self, action: str, wanted: Instance) -> Instance:
        fleet = self.legs.fleet
        if wanted.leg not in fleet.legs():
            legs = ", ".join(fleet.legs())
            raise Rejected(404, f"This router has no leg {wanted.leg!r}, but: {legs}.")
        found = fleet.find(wanted.leg, wanted.url)
        if found is None and action != "add":
            raise Rejected(404, f"No {wanted.leg} instance {wanted.url}; see GET /instances.")
        if found is None:
            fleet.add(wanted)
        elif action != "remove":
            fleet.drain(found, action == "drain")
        elif len(fleet.get(wanted.leg)) > 1:
            fleet.remove(found)
        else:
            raise Rejected(409, f"It is the last {wanted.leg} instance: drain it instead.")
        await self.legs.follow()
        return found or wanted

    def check(self, request: web.Request) -> None:
        """Raise Rejected for a page in somebody's browser, and for a wrong token."""
        try:
            host = URL(f"http://{request.host}").host
        except ValueError:
            host = None
        if host not in OWN:  # a name that was made to lead here
            raise Rejected(403, "Ask for this port by its loopback address.")
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if self.token and not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            raise Rejected(401, "Send the admin token: Authorization: Bearer TOKEN.")


@contextlib.asynccontextmanager
async def serve(legs: Legs, port: int, token: str = "") -> AsyncIterator[int]:
    """Answer on loopback; gives the port, which the system chooses for 0."""
    admin = Admin(legs, token)

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            admin.check(request)
            return await handler(request)
        except Rejected as error:
            headers, data = answer.render(error)
            text = {name.decode(): value.decode() for name, value in headers}
            return web.Response(body=data, status=error.status, headers=text)

    app = web.Application(middlewares=[guarded])
    app.router.add_get("/instances", admin.get)
    app.router.add_post("/instances", admin.post)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, HOST, port)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def _tell(each: Instance) -> dict[str, Any]:
    return {
        "leg": each.leg,
        "url": each.url,
        "state": each.state,
        "breaker": each.breaker,
        "in_flight": each.in_flight,
        "models": sorted(each.models or ()),
        "results": dict(each.results),
    }
