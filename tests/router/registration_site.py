# SPDX-License-Identifier: Apache-2.0
"""A router with --register, and both kinds of clients that register instances.

They send what vLLM's EPD proxy gets: a launcher sends X-API-Key; instances announce themselves by a
`proxy_url`, without a header of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
from yarl import URL

from router import fake_instances
from ttft_otel.commands.router import router_options
from ttft_otel.commands.router.command import build_router, command
from ttft_otel.commands.router.config_reloader import ConfigReloader
from ttft_otel.router.control.registrations import Registrations
from ttft_otel.tracing.settings import Settings

REGISTER_TOKEN = "t0ken/:?"  # with characters that a URL has to escape
PROBE_INTERVAL_S = 0.05  # seconds between two probes


class RegistrationSite:
    """A router that accepts registrations, and requests to it."""

    def __init__(
        self, router: fake_instances.RunningRouter, admin_url: str, reload: ConfigReloader
    ) -> None:
        self.router, self.admin_url, self.reload = router, admin_url, reload

    @property
    def registrations(self) -> Registrations:
        """The router's registrations."""
        registrations = self.router.app.registrations
        assert registrations is not None
        return registrations

    async def send_as_launcher(
        self, role: str, url: str, method: str = "POST", **headers: str
    ) -> tuple[int, Any]:
        """Register or deregister as a launcher does: role and URL, and the key in X-API-Key."""
        sent_headers = headers or {"X-API-Key": REGISTER_TOKEN}
        if method == "DELETE":
            target = URL(f"{self.admin_url}/instances").with_query(url=url)
            request = self.router.client.delete(target, headers=sent_headers)
        else:
            body = {"role": role, "url": url}
            request = self.router.client.post(
                f"{self.admin_url}/instances", json=body, headers=sent_headers
            )
        async with request as response:
            return response.status, await response.json()

    async def send_as_instance(self, role: str, url: str, method: str = "post") -> tuple[int, Any]:
        """Register or deregister as an instance does: the token in the URL, its whole record as body."""
        proxy_url = URL(self.admin_url).with_user("instance").with_password(REGISTER_TOKEN)
        record = {"role": role, "url": url, "ec_zmq_addrs": [], "dp_size": 1}
        async with aiohttp.ClientSession() as session:  # each client opens a session of its own
            async with session.request(method, f"{proxy_url}/instances", json=record) as response:
                return response.status, await response.json()

    async def post_body(self, body: Any, **headers: str) -> tuple[int, str]:
        """Post any `body`; returns status and error message."""
        sent_headers = {"X-API-Key": REGISTER_TOKEN, "Content-Type": "application/json", **headers}
        url = f"{self.admin_url}/instances"
        async with self.router.client.post(url, data=body, headers=sent_headers) as response:
            text = await response.text()
            if response.content_type != "application/json":
                return response.status, text
            return response.status, (await response.json()).get("error", {}).get("message", "")

    async def list_instances(self, **headers: str) -> Any:
        """GET /instances."""
        async with self.router.client.get(
            f"{self.admin_url}/instances", headers=headers
        ) as response:
            return await response.json()

    async def map_states(self) -> dict[str, str]:
        """The state of each instance, by leg and URL."""
        listing = await self.list_instances()
        return {f"{each['leg']} {each['url']}": each["state"] for each in listing["instances"]}


@contextlib.asynccontextmanager
async def run_registration_site(*flags: str) -> AsyncIterator[RegistrationSite]:
    """Run an untraced router with --register and these `flags`."""
    admin_url = fake_instances.find_unused_url()
    arguments = [
        "--register",
        "--register-token",
        REGISTER_TOKEN,
        "--health-interval",
        str(PROBE_INTERVAL_S),
    ]
    arguments += ["--admin-port", admin_url.rpartition(":")[2], *flags]
    context = command.make_context("router", arguments)
    options = router_options.RouterOptions.from_flags(context.params)
    router_app = build_router(options, Settings(), None)
    async with fake_instances.serve_app(router_app, []) as router:
        yield RegistrationSite(router, admin_url, ConfigReloader(context, options, router_app))


@contextlib.asynccontextmanager
async def run_registrants(
    plans: Sequence[fake_instances.InstancePlan], *flags: str
) -> AsyncIterator[tuple[Any, ...]]:
    """Run a site with these `flags`, and an instance for each plan; none of them has registered yet.

    Gives the site, then the instances.
    """
    async with contextlib.AsyncExitStack() as stack:
        instances = [
            await stack.enter_async_context(fake_instances.run_instance(plan)) for plan in plans
        ]
        yield (await stack.enter_async_context(run_registration_site(*flags)), *instances)
