# SPDX-License-Identifier: Apache-2.0
"""Keeps the router's instances as its sources (sources.py) name them, beside those of the configuration.

command.py runs it beside the router. What is gone drains. A source that cannot be asked changes nothing: the
instances that it named last stay in use, and health probes say whether they live.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

from ttft_otel.model.stages import DECODE, ENCODE, MONO, PREFILL, PREFILL_DECODE
from ttft_otel.router.errors import SourceUnreachable
from ttft_otel.router.types import Instance, parse_instance_url
from ttft_otel.router.upstream.instance_pool import InstancePool, describe_instance

DNS_SCHEME: Final = "dns"
KUBERNETES_SCHEME: Final = "k8s"
# Words for roles: those of our own flags, and of llm-d's label.
ROLES_BY_WORD: Final = {
    ENCODE: ENCODE,
    "encoder": ENCODE,
    PREFILL: PREFILL,
    DECODE: DECODE,
    PREFILL_DECODE: PREFILL_DECODE,
    "prefill-decode": PREFILL_DECODE,
    "both": PREFILL_DECODE,
    "backend": PREFILL_DECODE,
    MONO: PREFILL_DECODE,
}
# Any other is refused: an option that is misspelt must not be left out in silence.
OPTIONS_BY_SCHEME: Final = {
    DNS_SCHEME: ("role", "nameserver", "scheme"),
    KUBERNETES_SCHEME: ("role", "port", "scheme"),
}

# Roles, each also the name of its leg, with those that cannot be served beside it.
CONFLICTING_ROLES: Final[Mapping[str, frozenset[str]]] = {
    ENCODE: frozenset(),
    PREFILL: frozenset({PREFILL_DECODE}),
    DECODE: frozenset({PREFILL_DECODE}),
    PREFILL_DECODE: frozenset({PREFILL, DECODE}),
}
MAX_URL_CHARS: Final = 2048
MAX_FOUND_INSTANCES: Final = 256  # each costs a task and a probe every --health-interval
SWEEP_INTERVAL_S: Final = 1.0  # seconds between two looks for instances that have left
MAX_RETRY_PAUSE_S: Final = 30.0  # seconds between two attempts to reach a source
CANCEL_AGAIN_S: Final = 0.2  # seconds until a task that goes on is cancelled once more
# Visible ASCII: line breaks, for instance, could forge log lines.
_VISIBLE_PATTERN: Final = re.compile(r"[!-~]+")

log: Final = logging.getLogger("ttft_otel")


@dataclass(frozen=True, slots=True)
class SourceAddress:
    """One --discover, parsed; `text` is how the user wrote it, for logs and /readyz.

    place: the DNS name, or the namespace. port: of instances, a number or the name of a slice's port; ""
    where the source says it. role: "" where labels say it. nameserver: IP:PORT, "" for the system's.
    instance_scheme: of the instances' URLs.
    """

    text: str
    scheme: str
    place: str
    selector: str = ""
    port: str = ""
    role: str = ""
    nameserver: str = ""
    instance_scheme: str = "http"


def parse_source_address(text: str) -> SourceAddress:
    """Parse one --discover. Raises ValueError with what to write instead."""
    parts = urlsplit(text)
    if parts.scheme not in OPTIONS_BY_SCHEME or not parts.netloc or parts.fragment:
        raise ValueError(
            f"{text!r} names no source: write dns://SERVICE:PORT or k8s://NAMESPACE/SELECTOR"
        )
    # With blank values, or `role=` would pass for no option.
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    known = OPTIONS_BY_SCHEME[parts.scheme]
    if unknown := sorted(options.keys() - set(known)):
        raise ValueError(f"{text!r}: {unknown[0]!r} is not one of {', '.join(known)}")
    role = options.get("role")
    if role is not None and role not in ROLES_BY_WORD:
        raise ValueError(f"{text!r}: {role!r} is not a role: {', '.join(sorted(ROLES_BY_WORD))}")
    instance_scheme = options.get("scheme", "http")
    if instance_scheme not in ("http", "https"):
        raise ValueError(f"{text!r}: the scheme of instances is http or https")
    # A selector may need escapes, for `?` and blanks.
    place, selector = parts.netloc, unquote(parts.path.removeprefix("/"))
    port, nameserver = options.get("port", ""), options.get("nameserver", "")
    # The name of a port can only be found in the slices, a number is checked here.
    numbers = [port] if port.isdigit() else []
    if parts.scheme == DNS_SCHEME:
        place, _, port = place.partition(":")
        # SRV records say the port, addresses do not: it has to be written for these only.
        if parts.path.strip("/") or not place or bool(port) == place.startswith("_"):
            raise ValueError(
                f"{text!r}: write dns://SERVICE:PORT, or dns://_PORT._tcp.SERVICE for SRV records, "
                "which say the port"
            )
        selector, numbers = "", [port] if port else []
        if nameserver:
            # After the last colon, as the nameserver may be IPv6.
            numbers.append(nameserver.rpartition(":")[2])
    elif not selector:
        raise ValueError(
            f"{text!r} selects nothing: write the label selector of the Service's EndpointSlices, "
            "like k8s://default/kubernetes.io/service-name=vllm"
        )
    for each in numbers:
        # isdigit() and int() take digits of any script.
        if not (each.isascii() and each.isdigit() and 0 < int(each) < 65536):
            raise ValueError(f"{text!r}: {each!r} is not a port")
    role = "" if role is None else ROLES_BY_WORD[role]
    return SourceAddress(
        text, parts.scheme, place, selector, port, role, nameserver, instance_scheme
    )


@dataclass(frozen=True, slots=True)
class Findings:
    """All instances that a source names now.

    roles_by_url: role by URL. problem: what a person should know, though the source answered: that it
    names nothing, or which part of it cannot be used; "" for nothing.
    """

    roles_by_url: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


# Gives all that a source names, then all of it after each change, for ever; called anew after it has raised
# SourceUnreachable. An async generator's function: calling it returns the generator without await.
WatchFindings: TypeAlias = Callable[[], AsyncGenerator[Findings, None]]


def write_url(scheme: str, host: str, port: int | str) -> str:
    """The URL of an instance at an address, which may be IPv6."""
    # Brackets tell the colons of IPv6 from that of the port (RFC 3986 section 3.2.2).
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def check_url(url: str) -> str:
    """Return `url` without a trailing slash. Raises ValueError unless http(s)://HOST:PORT[/PREFIX]."""
    try:
        if len(url) > MAX_URL_CHARS or not _VISIBLE_PATTERN.fullmatch(url):
            raise ValueError
        parts = urlsplit(url)
        # A user's name would be shown to all who list instances; a fragment is never sent.
        if not parts.port or "@" in parts.netloc or parts.fragment:
            raise ValueError
        return parse_instance_url(url, "").url
    except ValueError as error:
        message = f"{url[:200]!r} is not an instance's URL; write it like http://10.0.0.7:8001"
        raise ValueError(message) from error


def _list_urls(configured: Mapping[str, Sequence[Instance]]) -> dict[str, Collection[str]]:
    return {leg: {each.url for each in instances} for leg, instances in configured.items()}


@dataclass(slots=True, eq=False)
class WatchedSource:
    """A source with what it named last; `problem` is why that is not all, or not news."""

    address: SourceAddress
    watch_findings: WatchFindings
    roles_by_url: dict[str, str] = field(default_factory=dict)
    problem: str = "not asked yet"
    failures: int = 0  # times that it could not be asked, since the start


class Discovery:
    """Every instance that a source names, by its URL; used on the event loop only.

    If a source names a configured instance and then drops it, that stays in the pool, drained until it is
    named again.

    Args:
        pool: The instances of the router.
        configured: Those of the configuration, by leg.
        sources: Who names others.
        retry_pause_s: Seconds after the first failure of a source; doubled after each.
    """

    def __init__(
        self,
        pool: InstancePool,
        configured: Mapping[str, Sequence[Instance]],
        sources: Sequence[WatchedSource] = (),
        retry_pause_s: float = 1.0,
    ) -> None:
        self.pool = pool
        self.watched = sources
        self.retry_pause_s = retry_pause_s
        self._configured_urls = _list_urls(configured)
        self._found: dict[str, Instance] = {}
        self._leaving: set[Instance] = set()  # dropped by their sources, and not yet idle

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._watch_forever(each)) for each in self.watched]
        tasks.append(asyncio.create_task(self._sweep_forever()))
        try:
            yield
        finally:
            # Awaited, so that nothing changes a pool that is being closed.
            await end_tasks(tasks)

    def map_roles(self) -> dict[str, str]:
        return {url: instance.leg for url, instance in self._found.items()}

    def add_instance(self, role: str, url: str) -> None:
        """Have the instance at `url` in the leg of its `role`; nothing changes if it is there.

        Raises ValueError for an unknown role, a malformed URL, a role that cannot be mixed with those of
        other instances, and when there are too many.
        """
        if role not in CONFLICTING_ROLES:
            roles = ", ".join(CONFLICTING_ROLES)
            raise ValueError(f"unknown role {role[:64]!r}; it is one of {roles}")
        url = check_url(url)  # as the pool writes it
        other_roles = {each.leg for key, each in self._found.items() if key != url}
        legs = other_roles | {leg for leg, urls in self._configured_urls.items() if urls}
        if conflicts := sorted(CONFLICTING_ROLES[role] & legs):
            raise ValueError(
                f"this router has {' and '.join(conflicts)} instances, with which a {role} instance cannot "
                "be mixed"
            )
        before = self._found.get(url)
        if before is None and len(self._found) >= MAX_FOUND_INSTANCES:
            raise ValueError(f"{MAX_FOUND_INSTANCES} instances were found, which is the maximum")
        # Another role is another leg: it drains there, and is a new instance here.
        if before is not None and before.leg != role:
            self._release_instance(self._found.pop(url))
            before = None
        instance = self.pool.find_instance(role, url)
        if instance is None:
            instance = parse_instance_url(url, role)
            self.pool.add_instance(instance)
        elif instance in self._leaving:
            self.pool.set_draining(instance, False)
        self._leaving.discard(instance)
        self._found[url] = instance
        if before is not instance:
            log.warning(
                "ttft-otel: found %s: health probes and requests go to it from now on",
                describe_instance(instance),
            )

    def drop_instance(self, url: str) -> None:
        """Drain the instance at `url`, and remove it when its requests have ended."""
        instance = self._found.pop(url.rstrip("/"), None)
        if instance is None:
            return
        log.warning(
            "ttft-otel: no source names %s any more: no new requests, the %d in flight may finish; %s",
            describe_instance(instance),
            instance.in_flight,
            "it is in the configuration and stays drained until one does"
            if self._is_configured(instance)
            else "then it is removed",
        )
        self._release_instance(instance)

    def set_configured(
        self, configured: Mapping[str, Sequence[Instance]]
    ) -> tuple[list[str], list[str]]:
        """Replace the `configured` instances; found ones stay. Returns the URLs added and removed.

        Raises ValueError, without any change, if both cannot be served together.
        """
        legs = {instance.leg for instance in self._found.values()}
        # A file without --discover says legs that no source may have; they take effect with a restart.
        others = [CONFLICTING_ROLES.get(leg, frozenset()) for leg in configured if configured[leg]]
        if any(map(legs.intersection, others)):
            raise ValueError(
                f"found instances have the roles {', '.join(sorted(legs))}, which cannot be mixed with "
                f"the configured {', '.join(configured)}: change what --discover names, or restart"
            )
        self._configured_urls = _list_urls(configured)
        merged = {leg: list(instances) for leg, instances in configured.items()}
        # What an operator has removed from the pool does not come back by a reload.
        present = set(self.pool)
        for instance in self._found.values():
            if instance in present and not self._is_configured(instance):
                merged.setdefault(instance.leg, []).append(instance)
        return self.pool.replace_instances(merged)

    async def _sweep_forever(self) -> None:
        """Remove instances that have left and have no request any more."""
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            self.remove_ended()

    def remove_ended(self) -> None:
        self._leaving.intersection_update(self.pool)
        for instance in list(self._leaving):
            if instance.state != "draining":  # an operator added it again
                self._leaving.discard(instance)
            elif not instance.in_flight and not self._is_configured(instance):
                self._leaving.discard(instance)
                self.pool.remove_instance(instance)

    def _release_instance(self, instance: Instance) -> None:
        self.pool.set_draining(instance, True)
        self._leaving.add(instance)
        self.remove_ended()

    def _is_configured(self, instance: Instance) -> bool:
        return instance.url in self._configured_urls.get(instance.leg, ())

    def describe_sources(self) -> list[dict[str, Any]]:
        """Each source for /readyz: how many instances it names, and its problem if it has one."""
        return [
            {"source": each.address.text, "instances": len(each.roles_by_url)}
            | ({"problem": each.problem} if each.problem else {})
            for each in self.watched
        ]

    async def _watch_forever(self, watched: WatchedSource) -> None:
        pause_s = self.retry_pause_s
        while True:
            problem = "its watch ended"
            try:
                async with aclosing(watched.watch_findings()) as findings:
                    async for each in findings:
                        self.apply_findings(watched, each)
                        # It answers: the next failure is the first of a row.
                        pause_s = self.retry_pause_s
            except SourceUnreachable as error:
                problem = str(error)
            except Exception as error:
                # One odd answer must not end discovery.
                log.exception("ttft-otel: %s: unexpected answer", watched.address.text)
                problem = f"unexpected answer: {error!r}"
            watched.failures += 1
            self._note_problem(
                watched,
                f"{problem}; the {len(watched.roles_by_url)} instances known before stay in use",
            )
            # Jitter, so that the replicas of a router do not ask at the same moment.
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
            pause_s = min(2 * pause_s, MAX_RETRY_PAUSE_S)

    def apply_findings(self, watched: WatchedSource, findings: Findings) -> None:
        """Add and drop instances until they are those that the source names."""
        refused: dict[str, str] = {}
        # New ones first: where a rollout replaces all of them at once, there is never none.
        for url, role in findings.roles_by_url.items():
            if watched.roles_by_url.get(url) != role:
                try:
                    self.add_instance(role, url)
                except ValueError as error:
                    refused[url] = str(error)
        before = watched.roles_by_url
        # What was refused is new again with the next findings, and tried again.
        watched.roles_by_url = {
            url: role for url, role in findings.roles_by_url.items() if url not in refused
        }
        # Two sources may name the same instance.
        named = {url for each in self.watched for url in each.roles_by_url}
        for url in before.keys() - named:
            self.drop_instance(url)
        refusal = next((f"{url} was refused: {text}" for url, text in refused.items()), "")
        self._note_problem(watched, refusal or findings.problem)

    def _note_problem(self, watched: WatchedSource, problem: str) -> None:
        """Keep a problem, "" for none, and log each change once: a source may say it every few seconds."""
        if problem == watched.problem:
            return
        watched.problem = problem
        if problem:
            log.warning("ttft-otel: --discover %s: %s", watched.address.text, problem)
        else:
            log.warning(
                "ttft-otel: --discover %s: %d instances",
                watched.address.text,
                len(watched.roles_by_url),
            )


async def end_tasks(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks until they have ended.

    Once is not enough: before Python 3.12 asyncio.wait_for, which dnspython uses, swallows a cancellation
    that comes as the awaited answer does, and a task that asks for ever would go on.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)
