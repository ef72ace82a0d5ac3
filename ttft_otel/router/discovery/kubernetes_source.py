# SPDX-License-Identifier: Apache-2.0
"""Instances behind Services of Kubernetes, from a watch of their EndpointSlices; discovery.py asks it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from ttft_otel.router.discovery.endpoint_slices import read_slices
from ttft_otel.router.discovery.findings import Findings
from ttft_otel.router.discovery.kubernetes_api import KubernetesApi
from ttft_otel.router.discovery.source_address import SourceAddress
from ttft_otel.router.errors import WatchExpired

PAUSE_S: Final = 0.5  # seconds between two watches, for a server that ends each at once


class KubernetesSource:
    """The slices of one selector."""

    def __init__(self, address: SourceAddress, api: KubernetesApi) -> None:
        self.address, self.api = address, api
        self._slices: dict[str, dict[str, Any]] = {}  # by name

    async def watch_findings(self) -> AsyncGenerator[Findings, None]:
        """Give what the API server lists, then what it is after each event. Raises SourceUnreachable."""
        await self.api.open()
        try:
            while True:
                listed, version = await self.api.list_slices()
                self._slices = {each["metadata"]["name"]: each for each in listed}
                yield self._read_findings()
                try:
                    async with aclosing(self._follow(version)) as findings:
                        async for each in findings:
                            yield each
                except WatchExpired:
                    await asyncio.sleep(PAUSE_S)
        finally:
            await self.api.close()

    async def _follow(self, version: str) -> AsyncGenerator[Findings, None]:
        """Watch after watch, each from the version that the one before ended with."""
        while True:
            async with aclosing(self.api.watch_slices(version)) as events:
                async for event in events:
                    version = event["object"]["metadata"]["resourceVersion"]
                    # a bookmark moves the version only, so that it does not expire in quiet hours
                    if event["type"] != "BOOKMARK":
                        self._apply_event(event)
                        yield self._read_findings()
            yield self._read_findings()  # who was forgotten as unreachable meanwhile comes back
            await asyncio.sleep(PAUSE_S)

    def _apply_event(self, event: dict[str, Any]) -> None:
        name = event["object"]["metadata"]["name"]
        if event["type"] == "DELETED":
            self._slices.pop(name, None)
        else:
            self._slices[name] = event["object"]

    def _read_findings(self) -> Findings:
        return read_slices(self._slices.values(), self.address)
