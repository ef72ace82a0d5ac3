# SPDX-License-Identifier: Apache-2.0
"""Instances behind Services of Kubernetes, from a watch of their EndpointSlices; discovery.py asks it.

The control plane copies a Service's labels to its slices, so a label of the Service can say the role.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing
from typing import Any, Final

from ttft_otel.model.stages import PREFILL_DECODE
from ttft_otel.router.discovery.discovery import Findings, write_url
from ttft_otel.router.discovery.kubernetes_api import KubernetesApi
from ttft_otel.router.discovery.source_address import ROLES_BY_WORD, SourceAddress
from ttft_otel.router.errors import WatchExpired

PAUSE_S: Final = 0.5  # seconds between two watches, for a server that ends each at once


class KubernetesSource:
    """The slices of one selector."""

    def __init__(self, address: SourceAddress, api: KubernetesApi) -> None:
        self.address = address
        self.api = api
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


ROLE_LABELS: Final = ("ttft-otel/role", "llm-d.ai/role")  # the first that a slice has decides
SERVICE_LABEL: Final = "kubernetes.io/service-name"
HTTP_PORT: Final = "http"  # of several ports the one of this name

EndpointSlice = Mapping[str, Any]


def read_slices(slices: Iterable[EndpointSlice], address: SourceAddress) -> Findings:
    """The ready instances of all `slices`, and the first thing in them that cannot be used."""
    roles_by_url: dict[str, str] = {}
    problems: list[str] = []
    kept = drop_second_family(slices)
    for each in kept:
        labels = each.get("metadata", {}).get("labels") or {}
        role = address.role or find_role(labels)
        # A number needs nothing of the slice, which may name no port at all.
        port = address.port if address.port.isdigit() else find_port(each, address.port)
        name = each.get("metadata", {}).get("name", "")
        if not role:
            word = next(labels[label] for label in ROLE_LABELS if label in labels)
            problems.append(f"slice {name}: its label says role {word[:64]!r}; add ?role=ROLE")
        elif not port:
            problems.append(f"slice {name}: which of its ports? Add ?port=NAME or ?port=NUMBER")
        else:
            roles_by_url.update((write_url(host, port), role) for host in list_ready_hosts(each))
    if not kept:
        problems.append("the selector finds no EndpointSlice: has the Service these labels?")
    elif not roles_by_url and not problems:
        problems.append("no endpoint is ready")
    # The first is enough to act on; the next one shows when it is mended.
    return Findings(roles_by_url, problems[0] if problems else "")


def drop_second_family(slices: Iterable[EndpointSlice]) -> list[EndpointSlice]:
    """Slices without those that name by IPv6 what the same Service names by IPv4."""
    every = list(slices)
    # A Service of both families has slices of each: every instance would be there twice.
    with_ipv4 = {find_service(each) for each in every if each.get("addressType") == "IPv4"}
    return [
        each
        for each in every
        if each.get("addressType") != "IPv6" or find_service(each) not in with_ipv4
    ]


def find_service(endpoint_slice: EndpointSlice) -> str:
    """The name of the Service that a slice belongs to."""
    labels = endpoint_slice.get("metadata", {}).get("labels") or {}
    return str(labels.get(SERVICE_LABEL, ""))


def find_role(labels: Mapping[str, str]) -> str:
    """The role that labels say; whole requests where they say none, "" for an unknown word."""
    word = next((labels[label] for label in ROLE_LABELS if label in labels), PREFILL_DECODE)
    return ROLES_BY_WORD.get(word, "")


def find_port(endpoint_slice: EndpointSlice, name: str) -> str:
    """The number of the port called `name`; without a name the only port or the one called http."""
    numbers = {
        # A single port may have no name, and TCP is what the API means by no protocol.
        str(each.get("name") or ""): str(each["port"])
        for each in endpoint_slice.get("ports") or ()
        if each.get("port") and each.get("protocol", "TCP") == "TCP"
    }
    if name or len(numbers) != 1:
        return numbers.get(name or HTTP_PORT, "")
    return next(iter(numbers.values()))


def list_ready_hosts(endpoint_slice: EndpointSlice) -> Iterator[str]:
    """Addresses of endpoints that may get new requests.

    A terminating one is never `ready`, and `ready` that is not there means yes. The first address is
    the one that all clients should use; the API forbids to have more in new objects.
    """
    # `endpoints` is null, not empty, where there are none.
    for each in endpoint_slice.get("endpoints") or ():
        conditions = each.get("conditions") or {}
        if conditions.get("ready") is not False and not conditions.get("terminating"):
            yield from each.get("addresses", ())[:1]
