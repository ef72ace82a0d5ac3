# SPDX-License-Identifier: Apache-2.0
"""What runs beside the data path while the router does: admin port, discovery; command.py starts it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from ttft_otel.commands.router.router_options import RouterOptions
from ttft_otel.router.control import admin
from ttft_otel.router.control.announcements import Announcements
from ttft_otel.router.control.registrations import Registrations
from ttft_otel.router.discovery.discovery import Discovery
from ttft_otel.router.proxy.endpoint import ProxyEndpoint

if TYPE_CHECKING:
    from ttft_otel.router.shared_state.store_link import StoreLink


@asynccontextmanager
async def run_background(
    options: RouterOptions,
    endpoint: ProxyEndpoint,
    registered: Registrations | None,
    discovery: Discovery | None,
    store: StoreLink | None,
) -> AsyncIterator[None]:
    """Run what `options` ask for meanwhile; registered: None where no instance can come or go.

    store: joins this router to its replicas, None without --shared-state or with several workers.
    """
    async with AsyncExitStack() as stack:
        announcements = None
        if registered is not None and options.register:
            announcements = Announcements(registered, options.register_token)
        elif registered is not None:  # the admin port sweeps for those who announce themselves
            await stack.enter_async_context(_sweep_meanwhile(registered))
        if options.admin_port is not None:
            await stack.enter_async_context(
                admin.serve_admin(
                    endpoint.upstream,
                    endpoint.routing,
                    options.admin_port,
                    options.admin_token,
                    announcements,
                    options.admin_host,
                    is_shared=options.workers > 1,
                )
            )
        if discovery is not None:
            await stack.enter_async_context(discovery.run())
        if store is not None:
            await stack.enter_async_context(store)
        yield


@asynccontextmanager
async def _sweep_meanwhile(registered: Registrations) -> AsyncIterator[None]:
    """Remove instances that have left and have no request any more."""
    sweeping = asyncio.create_task(registered.sweep_forever())
    try:
        yield
    finally:
        sweeping.cancel()
        await asyncio.gather(sweeping, return_exceptions=True)
