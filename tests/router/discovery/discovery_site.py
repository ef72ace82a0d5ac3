# SPDX-License-Identifier: Apache-2.0
"""A router with --discover, as the command line builds it, and the part of a Kubernetes API that it asks.

That API is over HTTP and behaves as kube-apiserver does: EndpointSlices are listed and watched, with one
version for all objects, a watch gives what came after a version, 410 for versions that were compacted, as an
ERROR event of a watch, label selectors, bookmarks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from aiohttp import web

from router import fake_instances
from ttft_otel.commands.router import router_options
from ttft_otel.commands.router.command import build_router, command
from ttft_otel.tracing.settings import Settings

PATH = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"


def build_endpoint(address: str, **conditions: bool) -> dict[str, Any]:
    """An endpoint of a slice."""
    return {"addresses": [address], "conditions": conditions or {"ready": True}}


def build_slice(
    name: str,
    endpoints: Sequence[dict[str, Any]],
    ports: Sequence[tuple[str, int]] = (("http", 8000),),
    family: str = "IPv4",
    **labels: str,
) -> dict[str, Any]:
    """An EndpointSlice; in the names of labels `__` stands for a slash and `_` for a hyphen."""
    written = {key.replace("__", "/").replace("_", "-"): value for key, value in labels.items()}
    return {
        "metadata": {"name": name, "labels": {"app": "vllm", **written}},
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": [{"name": name, "port": port, "protocol": "TCP"} for name, port in ports],
    }


class SliceServer:
    """The API server. status: of every answer, if not 200. token: what requests must carry.

    ends_watches: close each watch after what there was to tell, as time-outs do. queries: of all requests.
    """

    def __init__(self) -> None:
        self.version, self.oldest_version, self.status = 10, 0, 200
        self.ends_watches, self.token, self.url = False, "", ""
        self.queries: list[dict[str, str]] = []
        self.slices: dict[str, dict[str, Any]] = {}
        self.events: list[tuple[int, str, dict[str, Any]]] = []
        self._changed = asyncio.Event()
        self._transports: set[asyncio.Transport] = set()

    @property
    def lists(self) -> int:
        """How often slices were listed."""
        return sum("watch" not in query for query in self.queries)

    @property
    def watches(self) -> int:
        """How often a watch was begun."""
        return len(self.queries) - self.lists

    def put(self, endpoint_slice: dict[str, Any]) -> None:
        """Add or replace a slice."""
        name = endpoint_slice["metadata"]["name"]
        self._record("MODIFIED" if name in self.slices else "ADDED", endpoint_slice)
        self.slices[name] = endpoint_slice

    def delete(self, name: str) -> None:
        """Delete a slice."""
        self._record("DELETED", self.slices.pop(name))

    def send_bookmark(self) -> None:
        """Tell watches a newer version without any change."""
        self._record("BOOKMARK", {"metadata": {}})

    def compact(self) -> None:
        """Forget all versions before the newest, and end the watches."""
        self.version += 10
        self.oldest_version = self.version
        self.events.clear()
        self.cut_watches()

    def cut_watches(self) -> None:
        """Break the connections of all watches, in the middle of whatever they send."""
        for transport in self._transports:
            transport.abort()

    def _record(self, kind: str, body: dict[str, Any]) -> None:
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        self.events.append((self.version, kind, json.loads(json.dumps(body))))
        self._changed.set()
        self._changed = asyncio.Event()

    async def answer_request(self, request: web.Request) -> web.StreamResponse:
        """List or watch."""
        self.queries.append(dict(request.query))
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"kind": "Status", "message": "Unauthorized"}, status=401)
        if self.status != 200:
            return web.json_response({"kind": "Status", "message": "no"}, status=self.status)
        key, _, value = request.query["labelSelector"].partition("=")
        if "watch" in request.query:
            return await self._answer_watch(request, key, value)
        items = [each for each in self.slices.values() if each["metadata"]["labels"][key] == value]
        metadata = {"resourceVersion": str(self.version)}
        return web.json_response({"metadata": metadata, "items": items})

    async def _answer_watch(self, request: web.Request, key: str, value: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        assert request.transport is not None
        self._transports.add(request.transport)
        seen = int(request.query["resourceVersion"])
        try:
            while True:
                if seen < self.oldest_version:
                    status = {"kind": "Status", "code": 410, "message": "too old"}
                    await self._send_event(response, "ERROR", status)
                    return response
                changed = self._changed
                for version, kind, body in list(self.events):
                    labels = body["metadata"].get("labels", {key: value})
                    if version > seen and labels.get(key) == value:
                        await self._send_event(response, kind, body)
                        seen = version
                if self.ends_watches:
                    return response
                await changed.wait()
        finally:
            self._transports.discard(request.transport)

    async def _send_event(
        self, response: web.StreamResponse, kind: str, body: dict[str, Any]
    ) -> None:
        data = json.dumps({"type": kind, "object": body}).encode() + b"\n"
        middle = len(data) // 2  # an event may come in pieces
        await response.write(data[:middle])
        await asyncio.sleep(0)
        await response.write(data[middle:])


@contextlib.asynccontextmanager
async def run_slice_server() -> AsyncIterator[SliceServer]:
    """Run an API server on a free port."""
    server = SliceServer()
    app = web.Application()
    app.router.add_get(PATH, server.answer_request)
    async with fake_instances.run_web_app(app) as server.url:
        try:
            yield server
        finally:
            server.cut_watches()


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
