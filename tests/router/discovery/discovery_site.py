# SPDX-License-Identifier: Apache-2.0
"""A router with --discover for tests of its sources, as the command line builds it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from router import fake_instances
from ttft_otel.commands.router import router_options
from ttft_otel.commands.router.command import build_router, command
from ttft_otel.tracing.settings import Settings


class DiscoverySite:
    """A running router and what a test asks it."""

    def __init__(self, router: fake_instances.RunningRouter) -> None:
        self.router = router

    def map_states(self) -> dict[str, str]:
        """The state of each instance, by leg and URL."""
        return {f"{each.leg} {each.url}": each.state for each in self.router.fleet}

    async def wait_for_states(self, expected: dict[str, str]) -> None:
        """Wait until the instances are these; the scenario has the time limit."""
        while self.map_states() != expected:
            await asyncio.sleep(0.01)

    async def wait_for_source(self, check: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until the first source's line of /readyz is as `check` wants it."""
        while True:
            _, _, said = await self.router.get_json("/readyz")
            line: dict[str, Any] = said["discovery"][0]
            if check(line):
                return line
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def run_discovery_site(*flags: str) -> AsyncIterator[DiscoverySite]:
    """Run an untraced router with these flags, which asks its sources 20 times a second."""
    arguments = ["--health-interval", "0.05", "--discover-interval", "0.05", *flags]
    context = command.make_context("router", arguments)
    options = router_options.RouterOptions.from_flags(context.params)
    async with fake_instances.serve_app(build_router(options, Settings(), None), []) as router:
        yield DiscoverySite(router)
