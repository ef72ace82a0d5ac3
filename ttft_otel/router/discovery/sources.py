# SPDX-License-Identifier: Apache-2.0
"""The two kinds of sources that discovery.py asks: names of DNS, and Services of Kubernetes.

A name has the addresses of a headless Service, or its SRV records, and is asked again and again. dnspython
asks the nameservers of /etc/resolv.conf with its search domains, as the C library would, but tells a name
that does not exist from a server that does not answer: only the first may remove instances.

Of a Service its EndpointSlices are watched. The control plane copies a Service's labels to them, so a label
of the Service can say the role.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

import dns.asyncresolver
import dns.exception
import dns.rdatatype
import dns.resolver
import msgspec

from ttft_otel.model.stages import PREFILL_DECODE
from ttft_otel.router.discovery.discovery import ROLES_BY_WORD, Findings, SourceAddress, write_url
from ttft_otel.router.errors import SourceUnreachable, WatchExpired
from ttft_otel.router.time_limits import wait_at_most
from ttft_otel.router.types import JSON_ERRORS
from ttft_otel.router.upstream.connection_pool import (
    QUERY_ERRORS,
    ClientTls,
    QueryClient,
    read_at_most,
)
from ttft_otel.router.upstream.instance_connection import InstanceAnswer

QUERY_TIMEOUT_S: Final = 5.0  # seconds for one name, all nameservers and search domains together
# Answers without an address in a row until instances are removed: a Service that is made anew, or a
# nameserver that has just started, says for a moment that there is nothing.
EMPTY_ANSWERS_NEEDED: Final = 2
# Where kubelet mounts a pod's token and the cluster's CA.
ACCOUNT_FOLDER: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
WATCH_S: Final = 60  # seconds for which one watch runs; then it goes on from where it was
SILENCE_S: Final = 15.0  # seconds beyond that until a connection that says nothing is given up
LIST_TIMEOUT_S: Final = 30.0  # seconds for a list
MAX_LIST_BYTES: Final = 33_554_432  # bytes of a list; 10,000 endpoints have about 5 MB
MAX_EVENT_BYTES: Final = 4_194_304  # bytes of one slice; etcd takes 1.5 MiB
PAUSE_S: Final = 0.5  # seconds between two watches, for a server that ends each at once
ROLE_LABELS: Final = ("ttft-otel/role", "llm-d.ai/role")  # the first that a slice has decides
SERVICE_LABEL: Final = "kubernetes.io/service-name"
HTTP_PORT: Final = "http"  # of several ports the one of this name

EndpointSlice = Mapping[str, Any]


async def watch_name(address: SourceAddress, interval_s: float) -> AsyncGenerator[Findings, None]:
    """Give the addresses of a name each time that it was resolved. Raises SourceUnreachable.

    interval_s: seconds between two questions.
    """
    empty_answers = 0
    try:
        resolver = build_resolver(address.nameserver)
        while True:
            urls = await _resolve_urls(resolver, address)
            empty_answers = 0 if urls else empty_answers + 1
            if urls:
                yield Findings(dict.fromkeys(urls, address.role or PREFILL_DECODE))
            elif empty_answers >= EMPTY_ANSWERS_NEEDED:
                yield Findings(problem="the name has no address: is the Service headless?")
            # jitter, so that the replicas of a router do not ask at the same moment
            await asyncio.sleep(interval_s * random.uniform(0.8, 1.2))
    except dns.exception.Timeout as error:  # its own text has the seconds, new ones each time
        raise SourceUnreachable(
            f"DNS: no answer for {address.place} in {QUERY_TIMEOUT_S:g} s"
        ) from error
    except (dns.exception.DNSException, OSError) as error:
        raise SourceUnreachable(f"DNS does not answer for {address.place}: {error}") from error


async def _resolve_urls(resolver: dns.asyncresolver.Resolver, address: SourceAddress) -> list[str]:
    # Sorted: nameservers change the order from answer to answer.
    targets = (
        [(address.place, address.port)]
        if address.port
        else sorted(
            {
                (record.target.to_text(), record.port)
                for record in await _ask(resolver, address.place, "SRV")
            }
        )
    )
    return [
        write_url(address.instance_scheme, host, port)
        for target, port in targets
        for host in await _resolve_hosts(resolver, target)
    ]


async def _resolve_hosts(resolver: dns.asyncresolver.Resolver, name: str) -> list[str]:
    """The addresses of a name: IPv4, else IPv6; both would be every instance twice."""
    for kind in ("A", "AAAA"):
        if hosts := {record.address for record in await _ask(resolver, name, kind)}:
            return sorted(hosts)
    return []


async def _ask(resolver: dns.asyncresolver.Resolver, name: str, kind: str) -> list[Any]:
    try:
        # No record of one kind is no error: the name may have the other kind.
        answer = await resolver.resolve(
            name, kind, search=True, raise_on_no_answer=False, lifetime=QUERY_TIMEOUT_S
        )
    except dns.resolver.NXDOMAIN:
        return []
    return list(answer.rrset or ())


def build_resolver(nameserver: str) -> dns.asyncresolver.Resolver:
    """A resolver that asks `nameserver` (IP:PORT), or those of /etc/resolv.conf where it is empty.

    Raises NoResolverConfiguration, a DNSException, without that file.
    """
    if not nameserver:
        return dns.asyncresolver.Resolver()
    host, _, port = nameserver.rpartition(":")
    resolver = dns.asyncresolver.Resolver(configure=False)
    resolver.nameservers = [host.strip("[]")]
    resolver.port = int(port)
    return resolver


def find_cluster(api_url: str = "", folder: Path = ACCOUNT_FOLDER) -> tuple[str, Path | None]:
    """The API server at `api_url`; where that is empty, the one of the pod that we run in, and its account.

    Raises ValueError, with the remedy, outside a pod.
    """
    if api_url:
        return api_url.rstrip("/"), None
    # Set in every container of a cluster.
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    port = os.environ.get("KUBERNETES_SERVICE_PORT_HTTPS", "443")
    if not host:
        raise ValueError(
            "k8s:// needs a pod with a service account, or --kubernetes-api URL, as `kubectl proxy` gives it"
        )
    return write_url("https", host, port), folder


class KubernetesSource:
    """The EndpointSlices of a namespace that match a label selector.

    api_url: of the API server. account: folder with the token and CA of a service account, None for
    `kubectl proxy`, which has rights of its own. watch_s: seconds for which one watch runs.
    """

    _queries: QueryClient  # while it watches

    def __init__(
        self,
        address: SourceAddress,
        api_url: str,
        account: Path | None = None,
        watch_s: int = WATCH_S,
    ) -> None:
        self.address, self.api_url, self.account, self.watch_s = address, api_url, account, watch_s
        namespace = quote(address.place)
        self._url = f"{api_url}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._slices: dict[str, dict[str, Any]] = {}  # by name

    async def watch_findings(self) -> AsyncGenerator[Findings, None]:
        """Give what the API server lists, then what it is after each event. Raises SourceUnreachable."""
        try:
            # The cluster's own CA has signed the API server's certificate, no public one.
            tls = None if self.account is None else ClientTls(str(self.account / "ca.crt"))
        except OSError as error:
            raise SourceUnreachable(f"no CA of the API server: {error}") from error
        # None are the system's CAs: for https:// in --kubernetes-api.
        async with QueryClient(tls=tls) as self._queries:
            while True:
                listed, version = await self.list_slices()
                self._slices = {each["metadata"]["name"]: each for each in listed}
                yield self._read_findings()
                try:
                    async with aclosing(self._follow(version)) as findings:
                        async for each in findings:
                            yield each
                except WatchExpired:
                    await asyncio.sleep(PAUSE_S)

    async def _follow(self, version: str) -> AsyncGenerator[Findings, None]:
        """Watch after watch, each from the version that the one before ended with."""
        while True:
            async with aclosing(self.watch_slices(version)) as events:
                async for event in events:
                    version = event["object"]["metadata"]["resourceVersion"]
                    # a bookmark moves the version only, so that it does not expire in quiet hours
                    if event["type"] != "BOOKMARK":
                        name = event["object"]["metadata"]["name"]
                        if event["type"] == "DELETED":
                            self._slices.pop(name, None)
                        else:
                            self._slices[name] = event["object"]
                        yield self._read_findings()
            yield self._read_findings()  # who was forgotten as unreachable meanwhile comes back
            await asyncio.sleep(PAUSE_S)

    def _read_findings(self) -> Findings:
        return read_slices(self._slices.values(), self.address)

    async def list_slices(self) -> tuple[list[dict[str, Any]], str]:
        """All slices, and the version of the list, from which a watch goes on.

        Raises SourceUnreachable.
        """
        async with self._open_answer({}) as answer:
            body = await wait_at_most(read_at_most(answer, MAX_LIST_BYTES), LIST_TIMEOUT_S)
        try:
            listed = msgspec.json.decode(body)
            return listed.get("items") or [], str(listed["metadata"]["resourceVersion"])
        except (*JSON_ERRORS, ValueError, KeyError, AttributeError, TypeError) as error:
            raise SourceUnreachable(f"its list cannot be read: {error!r}") from error

    async def watch_slices(self, version: str) -> AsyncGenerator[dict[str, Any], None]:
        """Events since `version`, until the API server ends the watch, which is normal.

        Raises WatchExpired when the version is too old, and SourceUnreachable.
        """
        # The server ends the watch, so that one which died unnoticed cannot last.
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(self.watch_s),
        }
        async with self._open_answer(query) as answer:
            # Silent beyond the watch's end: the connection is dead.
            async for line in split_lines(answer, self.watch_s + SILENCE_S):
                try:
                    event = msgspec.json.decode(line)
                    body = event["object"]
                    kind = event["type"]
                except (*JSON_ERRORS, KeyError, TypeError) as error:
                    raise SourceUnreachable(f"its event cannot be read: {error!r}") from error
                # Status 200 was sent when the watch began, so an error is an event: mostly 410.
                if kind == "ERROR":
                    raise build_error(int(body.get("code", 0)), str(body.get("message", "")))
                yield event

    def _read_headers(self) -> dict[str, str]:
        """Read the token anew: kubelet replaces it within an hour. Raises SourceUnreachable."""
        if self.account is None:
            return {}
        try:
            token = (self.account / "token").read_text("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SourceUnreachable(f"no token of a service account: {error}") from error
        return {"Authorization": f"Bearer {token}"}

    @asynccontextmanager
    async def _open_answer(self, query: dict[str, str]) -> AsyncIterator[InstanceAnswer]:
        parameters = urlencode({"labelSelector": self.address.selector, **query})
        headers = self._read_headers()
        try:
            async with AsyncExitStack() as stack:
                opening = self._queries.open_answer(f"{self._url}?{parameters}", headers=headers)
                answer = await wait_at_most(stack.enter_async_context(opening), LIST_TIMEOUT_S)
                if answer.status != 200:
                    reason = await wait_at_most(answer.readany(), LIST_TIMEOUT_S)
                    raise build_error(answer.status, reason[:500].decode())
                yield answer
        except asyncio.TimeoutError as error:
            raise SourceUnreachable(f"{self.api_url} does not answer") from error
        except (*QUERY_ERRORS, UnicodeDecodeError) as error:
            raise SourceUnreachable(f"{self.api_url}: {error or type(error).__name__}") from error


def build_error(status: int, message: str) -> SourceUnreachable | WatchExpired:
    # Gone: etcd does not keep old versions.
    if status == 410:
        return WatchExpired(message)
    if status in (401, 403):
        message = f"{message[:300]}; the service account needs list and watch of endpointslices"
    return SourceUnreachable(f"the API server answered {status}: {message[:400]}")


async def split_lines(answer: InstanceAnswer, silence_s: float) -> AsyncIterator[bytes]:
    """Lines of a stream. Raises TimeoutError when nothing comes for `silence_s` seconds."""
    rest = bytearray()
    while chunk := await wait_at_most(answer.readany(), silence_s):
        rest += chunk
        # Looked for in the chunk: a long event would be searched again with each one.
        if b"\n" in chunk:
            *lines, tail = bytes(rest).split(b"\n")
            rest = bytearray(tail)
            for line in lines:
                if line.strip():
                    yield line
        if len(rest) > MAX_EVENT_BYTES:
            raise SourceUnreachable(f"an event of more than {MAX_EVENT_BYTES} bytes")


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
            scheme = address.instance_scheme
            urls = (write_url(scheme, host, port) for host in list_ready_hosts(each))
            roles_by_url.update(dict.fromkeys(urls, role))
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
